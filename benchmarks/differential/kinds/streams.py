"""Decoupled models and response senders: no, one and many responses, errors in the middle, `generate`."""

from collections.abc import Iterator

from benchmarks.differential.asked import (
    GRPC,
    JSON,
    STREAM,
    Case,
    Http,
    OnStream,
    Request,
    Together,
    by,
    doing,
    generate,
    integers,
    texts,
)
from benchmarks.differential.models import TEXT, Model, config_of, text_config

DECOUPLED = "model_transaction_policy { decoupled: true }"
FINAL = "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
STREAMS = f"""
    def execute(self, requests):
        for r in requests:
            sender, what = r.get_response_sender(), text(r)
            if what == "raises":
                raise ValueError("before any response")
            if what == "a thread":
                threading.Thread(target=self.later, args=(sender,)).start()
                continue
            counts = {{"zero": 0, "one": 1, "two": 2, "five": 5, "fifty": 50}}
            if what in counts:
                for number in range(counts[what]):
                    sender.send(answer(told(str(number))))
                sender.send({FINAL})
            elif what == "final with the last":
                sender.send(answer(told("0")))
                sender.send(answer(told("1")), {FINAL})
            elif what == "only an error":
                sender.send(answer(error=pb_utils.TritonError("only this", pb_utils.TritonError.NOT_FOUND)))
                sender.send({FINAL})
            elif what == "an error with the flag":
                sender.send(answer(told("0")))
                sender.send(answer(error=pb_utils.TritonError("the last")), {FINAL})
            elif what == "an error in the middle":
                sender.send(answer(told("0")))
                sender.send(answer(error=pb_utils.TritonError("in the middle", pb_utils.TritonError.UNAVAILABLE)))
                sender.send(answer(told("2")))
                sender.send({FINAL})
            elif what == "an error first":
                sender.send(answer(error=pb_utils.TritonError("at first", pb_utils.TritonError.INVALID_ARG)))
                sender.send(answer(told("1")))
                sender.send({FINAL})
            elif what == "raises after one":
                sender.send(answer(told("0")))
                raise ValueError("after one response")
            elif what == "raises after the last":
                sender.send(answer(told("0")), {FINAL})
                raise ValueError("after the last response")
            elif what == "after the last":
                sender.send(answer(told("0")), {FINAL})
                try:
                    sender.send(answer(told("1")))
                except Exception:
                    pass
            elif what == "no outputs":
                sender.send(answer())
                sender.send({FINAL})
            elif what == "other outputs":
                sender.send(answer(pb_utils.Tensor("y", np.zeros((2, 2), np.float32)), pb_utils.Tensor("more", np.zeros(1))))
                sender.send({FINAL})
            elif what == "other shapes":
                for number in range(3):
                    sender.send(answer(pb_utils.Tensor("y", np.array([b"x"] * number, dtype=object))))
                sender.send({FINAL})
            elif what == "None":
                try:
                    sender.send(None)
                    found = "no error"
                except Exception as error:
                    found = type(error).__name__
                sender.send(answer(told(found)), {FINAL})
            elif what == "wrong flags":
                try:
                    sender.send(answer(told("0")), flags=7)
                    found = "no error"
                except Exception as error:
                    found = type(error).__name__
                sender.send(answer(told(found)), {FINAL})
            elif what == "wrong response":
                try:
                    sender.send("text")
                    found = "no error"
                except Exception as error:
                    found = type(error).__name__
                sender.send(answer(told(found)), {FINAL})
            elif what == "cancelled?":
                sender.send(answer(told([sender.is_cancelled(), r.is_cancelled()])), {FINAL})
            elif what == "seen":
                seen = [r.request_id(), json.loads(r.parameters()), sorted(r.requested_output_names())]
                sender.send(answer(told(seen)), {FINAL})
            elif what == "returns a list":
                sender.send(answer(told("0")), {FINAL})
                return [answer(told("returned"))]
            elif what == "returns an empty list":
                sender.send(answer(told("0")), {FINAL})
                return []
            elif what == "returns a text":
                sender.send(answer(told("0")), {FINAL})
                return "text"

    def later(self, sender):
        for number in range(3):
            time.sleep(0.01)
            sender.send(answer(told(str(number))))
        sender.send({FINAL})
"""
STREAMED = (
    *("zero", "one", "two", "five", "fifty", "final with the last", "only an error", "an error with the flag"),
    *("an error in the middle", "an error first", "raises", "raises after one", "no outputs", "other outputs"),
    *("other shapes", "None", "wrong flags", "wrong response", "cancelled?", "seen", "a thread"),
    "returns an empty list",
)
STREAMS_ASYNC = f"""
    async def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for number in range(3):
                await asyncio.sleep(0.005)
                sender.send(answer(told(str(number))))
            sender.send({FINAL})
"""
SENDS = f"""
    def execute(self, requests):
        found = []
        for r in requests:
            what = text(r)
            if what == "returned":
                found.append(answer(told("returned")))
                continue
            sender = r.get_response_sender()
            if what == "sent":
                sender.send(answer(told("sent")), {FINAL})
            elif what == "sent, then the flag":
                sender.send(answer(told("sent")))
                sender.send({FINAL})
            elif what == "an error sent":
                sender.send(answer(error=pb_utils.TritonError("sent", pb_utils.TritonError.NOT_FOUND)), {FINAL})
            elif what == "from a thread":
                threading.Thread(target=self.later, args=(sender,)).start()
            elif what == "sender unused":
                found.append(answer(told("returned")))
                continue
            found.append(None)
        return found

    def later(self, sender):
        time.sleep(0.02)
        sender.send(answer(told("later")), {FINAL})
"""
SENT = ("returned", "sent", "an error sent", "from a thread", "sender unused", "sent, then the flag")
TOKENS = f"""
    def execute(self, requests):
        for r in requests:
            sender, prompt = r.get_response_sender(), text(r, "text_input")
            parameters = json.loads(r.parameters())
            if prompt == "fails":
                sender.send(answer(error=pb_utils.TritonError("no tokens", pb_utils.TritonError.INVALID_ARG)), {FINAL})
                continue
            for number, word in enumerate(prompt.split()):
                if word == "error":
                    sender.send(answer(error=pb_utils.TritonError("in the middle")))
                else:
                    array = np.array([word.encode()], dtype=object)
                    sender.send(answer(pb_utils.Tensor("text_output", array), pb_utils.Tensor("number", np.array([number], np.int32))))
            if parameters:
                array = np.array([json.dumps(parameters, sort_keys=True).encode()], dtype=object)
                sender.send(answer(pb_utils.Tensor("text_output", array)))
            sender.send({FINAL})
"""
SHOUTS = """
    def execute(self, requests):
        found = []
        for r in requests:
            if text(r, "text_input") == "fails":
                found.append(answer(error=pb_utils.TritonError("no text", pb_utils.TritonError.INVALID_ARG)))
                continue
            n = pb_utils.get_input_tensor_by_name(r, "n")
            more = "" if n is None else str(n.as_numpy().tolist())
            parameters = json.loads(r.parameters())  # whose order is a matter of luck
            more += json.dumps(parameters, sort_keys=True) if parameters else ""
            loud = text(r, "text_input").upper() + more
            found.append(answer(pb_utils.Tensor("text_output", np.array([loud.encode()], dtype=object)),
                pb_utils.Tensor("size", np.array([len(loud)], np.int32))))
        return found
"""
MODELS = (
    Model("streams", STREAMS, text_config(more=DECOUPLED)),
    Model("streams_rows", STREAMS, text_config(batch=4, more=DECOUPLED)),
    Model("streams_async", STREAMS_ASYNC, text_config(more=DECOUPLED)),
    Model("sends", SENDS, TEXT),
    Model("tokens", TOKENS, config_of("text_input:STRING:1", "text_output:STRING:1 number:INT32:1", more=DECOUPLED)),
    Model("shouts", SHOUTS, config_of("text_input:STRING:1 n:INT32:-1?", "text_output:STRING:1 size:INT32:1")),
    Model(
        "shouts_rows",
        SHOUTS,
        config_of("text_input:STRING:1 n:INT32:-1?", "text_output:STRING:-1 size:INT32:-1", batch=4),
    ),
)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    empty_final = {"triton_enable_empty_final_response": True}
    for name in STREAMED:
        request = doing("streams", name, id="i")
        yield from by("decoupled", name, request, (STREAM,))
        if name in ("zero", "one", "two", "an error in the middle", "final with the last", "raises", "only an error"):
            yield from by(
                "decoupled", f"{name}, empty final response", doing("streams", name, parameters=empty_final), (STREAM,)
            )
        if name in ("zero", "one", "two", "only an error", "raises", "final with the last", "an error in the middle"):
            yield from by("decoupled", f"{name}, no stream", request, (GRPC, JSON))
    yield from by("decoupled", "rows", doing("streams_rows", "two", rows=True), (STREAM,))
    for name in ("three",):
        yield from by("decoupled", f"async, {name}", doing("streams_async", name), (STREAM,))
    for name in SENT:
        yield from by("senders", name, doing("sends", name), (GRPC, STREAM, JSON))
    mixed = [
        doing("streams", name, id=f"r{n}") for n, name in enumerate(("two", "only an error", "zero", "raises", "one"))
    ]
    mixed = [Request(each.model, each.inputs, id=each.id, parameters=empty_final) for each in mixed]
    yield Case("stream: several requests", [OnStream(mixed)])
    unlike = [
        doing("streams", "one", id="a"),
        doing("sends", "returned", id="b"),
        doing("unheard_of", "one", id="c"),
        Request("sends", [texts("nothing", "one")], id="d"),
        doing("responds", "NOT_FOUND", id="e"),
        doing("raises", "value error", id="f"),
        doing("sends", "sent", id="g"),
    ]
    yield Case(
        "stream: several models",
        [OnStream([Request(each.model, each.inputs, id=each.id, parameters=empty_final) for each in unlike])],
    )
    for each in unlike:
        yield Case(
            f"stream: {each.model} {each.id} with triton_grpc_error",
            [OnStream([Request(each.model, each.inputs, id=each.id, headers={"triton_grpc_error": "true"})])],
        )
    yield Case("stream: no request", [OnStream([])])
    bodies: dict[str, dict[str, object]] = {
        "words": {"text_input": "a b c"},
        "one word": {"text_input": "a"},
        "no word": {"text_input": ""},
        "an error": {"text_input": "fails"},
        "an error in the middle": {"text_input": "a error c"},
        "parameters": {"text_input": "a", "parameters": {"p": 1, "q": "x"}},
        "more members": {"text_input": "a", "temperature": 0.5, "stream": True},
        "an id": {"text_input": "a", "id": "seven"},
        "no text": {"n": [1]},
        "a number for a text": {"text_input": 3},
        "a list of texts": {"text_input": ["a"]},
        "numbers": {"text_input": "a", "n": [1, 2]},
        "one number": {"text_input": "a", "n": 5},
        "null": {"text_input": None},
        "an object": {"text_input": {"a": 1}},
        "a nested list": {"text_input": [["a"]]},
        "nothing": {},
    }
    for what, body in bodies.items():
        for model in ("tokens", "shouts"):
            yield from generate("generate", f"{what}, {model}", model, body)
        if what in ("words", "numbers", "an id", "parameters", "an error"):
            yield from generate("generate", f"{what}, shouts_rows", "shouts_rows", body)
    for route in ("generate", "generate_stream"):
        for what, content in {"no JSON": b"{", "no body": b"", "a list": b"[]"}.items():
            yield Case(f"generate: {what}, {route}", [Http("POST", f"/v2/models/shouts/{route}", content)])
        yield Case(
            f"generate: unknown model, {route}", [Http("POST", f"/v2/models/unheard_of/{route}", {"text_input": "a"})]
        )
        yield Case(
            f"generate: a version, {route}",
            [Http("POST", f"/v2/models/shouts/versions/1/{route}", {"text_input": "a"})],
        )
        yield Case(f"generate: raises, {route}", [Http("POST", f"/v2/models/raises/{route}", {"do": "value error"})])
        yield Case(f"generate: GET, {route}", [Http("GET", f"/v2/models/shouts/{route}")])
        yield Case(
            f"generate: ensemble, {route}", [Http("POST", f"/v2/models/shout_chain/{route}", {"text_input": "a b"})]
        )
        yield Case(
            f"generate: decoupled ensemble, {route}",
            [Http("POST", f"/v2/models/token_chain/{route}", {"text_input": "a b"})],
        )
    yield Case("stream: two at once", [Together([doing("streams", "five", id=f"{n}") for n in range(2)], STREAM)])
    yield from by("decoupled", "wrong input", Request("streams", [integers("do", 1)]), (STREAM, GRPC))
