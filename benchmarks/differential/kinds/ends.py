"""How responses end: senders used from threads, after the last response, beside others; calls of models in them."""

from collections.abc import Iterator

from benchmarks.differential.asked import (
    BOTH,
    GRPC,
    JSON,
    STREAM,
    Case,
    Http,
    Infer,
    OnStream,
    Request,
    Together,
    Value,
    by,
    doing,
    floats,
    generate,
    texts,
)
from benchmarks.differential.kinds.calls import ASKS_HEAD
from benchmarks.differential.kinds.streams import DECOUPLED, FINAL
from benchmarks.differential.models import Model, config_of, ensemble_of

ENDS = f"""
    def execute(self, requests):
        for r in requests:
            getattr(self, "do_" + text(r).replace(" ", "_"))(r, r.get_response_sender())

    def do_calls(self, r, sender):
        for number in range(3):
            sender.send(answer(told(shown(ask("sums", a()).exec())["outputs"]["y"][2])))
        sender.send({FINAL})

    def do_calls_in_a_thread(self, r, sender):
        threading.Thread(target=self.do_calls, args=(r, sender)).start()

    def do_streams(self, r, sender):
        for each in ask("streams", do("five")).exec(decoupled=True):
            if each.output_tensors():
                sender.send(answer(*each.output_tensors()))
        sender.send({FINAL})

    def do_streams_in_a_thread(self, r, sender):
        threading.Thread(target=self.do_streams, args=(r, sender)).start()

    def do_loop_in_a_thread(self, r, sender):
        async def calls():
            found = await asyncio.gather(*(ask("sums", a()).async_exec() for _ in range(3)))
            sender.send(answer(told([shown(each)["outputs"]["y"][2] for each in found])), {FINAL})
        threading.Thread(target=asyncio.run, args=(calls(),)).start()

    def do_streams_in_a_loop(self, r, sender):
        async def calls():
            async for each in await ask("streams", do("two")).async_exec(decoupled=True):
                if each.output_tensors():
                    sender.send(answer(*each.output_tensors()))
            sender.send({FINAL})
        asyncio.run(calls())

    def do_keywords(self, r, sender):
        sender.send(response=answer(told("0")))
        sender.send(response=answer(told("1")), flags=0)
        sender.send(response=None, flags=1)

    def do_positional(self, r, sender):
        sender.send(answer(told("0")), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def do_final_twice(self, r, sender):
        sender.send(answer(told("0")), {FINAL})
        try:
            sender.send({FINAL})
            self.last = "no error"
        except Exception as error:
            self.last = type(error).__name__

    def do_last(self, r, sender):
        sender.send(answer(told(self.last)), {FINAL})

    def do_two_senders(self, r, sender):
        sender.send(answer(told("0")))
        r.get_response_sender().send(answer(told("1")), {FINAL})

    def do_raises_in_a_thread(self, r, sender):
        def fails():
            try:
                raise ValueError("in a thread")
            except ValueError as error:
                sender.send(answer(error=pb_utils.TritonError(str(error))), {FINAL})
        threading.Thread(target=fails).start()

    def do_errors_only(self, r, sender):
        for number in range(3):
            sender.send(answer(error=pb_utils.TritonError(f"error {{number}}", pb_utils.TritonError.UNAVAILABLE)))
        sender.send({FINAL})

    def do_parameters(self, r, sender):
        sender.send(answer(told(r.parameters())), {FINAL})

    def do_request_kept(self, r, sender):
        def later():
            time.sleep(0.02)
            sender.send(answer(told([text(r), r.request_id(), r.is_cancelled(), sender.is_cancelled()])), {FINAL})
        threading.Thread(target=later).start()

    def do_large(self, r, sender):
        for number in range(3):
            sender.send(answer(told("x" * 200000)))
        sender.send({FINAL})

    def do_array_used_again(self, r, sender):
        array = np.array([0], np.int32)
        for number in range(5):
            array[0] = number
            sender.send(answer(pb_utils.Tensor("y", array)))
        sender.send({FINAL})

    def do_pool(self, r, sender):
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool:
            for value in pool.map(lambda _: shown(ask("sums", a()).exec())["outputs"]["y"][2], range(4)):
                sender.send(answer(told(value)))
        sender.send({FINAL})

    def do_generator(self, r, sender):
        def tokens():
            for word in ("a", "b", "c"):
                yield word
        for word in tokens():
            sender.send(answer(told(word)))
        sender.send({FINAL})
"""
ENDED = (
    *("calls", "calls in a thread", "streams", "streams in a thread", "loop in a thread", "streams in a loop"),
    *("keywords", "positional", "final twice", "last", "two senders", "raises in a thread", "errors only"),
    *("parameters", "request kept", "large", "array used again", "pool", "generator"),
)
SOME_SENT = f"""
    def execute(self, requests):
        found = []
        for r in requests:
            what = text(r)
            if what == "returned":
                found.append(answer(self.made(r, requests)))
            elif what == "an error":
                found.append(answer(error=pb_utils.TritonError("returned", pb_utils.TritonError.NOT_FOUND)))
            else:
                sender = r.get_response_sender()
                if what == "sent":
                    sender.send(answer(self.made(r, requests)), {FINAL})
                elif what == "an error sent":
                    sender.send(answer(error=pb_utils.TritonError("sent")), {FINAL})
                else:
                    threading.Timer(0.02, sender.send, (answer(self.made(r, requests)), 1)).start()
                found.append(None)
        return found

    def made(self, r, requests):
        return pb_utils.Tensor("y", np.array([[f"{{text(r)}} of {{len(requests)}}"]], dtype=object))
"""
SENT_TWICE = f"""
    def execute(self, requests):
        found = []
        for r in requests:
            sender, what = r.get_response_sender(), text(r)
            try:
                if what == "two":
                    sender.send(answer(told("0")))
                    sender.send(answer(told("1")), {FINAL})
                elif what == "sent and returned":
                    sender.send(answer(told("sent")), {FINAL})
                    return [answer(told("returned"))]
                elif what == "only the flag":
                    sender.send({FINAL})
            except Exception as error:
                return [answer(told(type(error).__name__))]
            found.append(None)
        return found
"""
GATHERS = """
    async def execute(self, requests):
        return await asyncio.gather(*(self.one(r) for r in requests))

    async def one(self, r):
        inner = await ask("sums", a()).async_exec()
        value = f"{text(r)} {len(inner.output_tensors())}"
        if text(r) == "raises":
            raise ValueError("one of several")
        if text(r) == "error":
            return answer(error=pb_utils.TritonError("one of several", pb_utils.TritonError.UNAVAILABLE))
        return answer(pb_utils.Tensor("y", np.array([[value]], dtype=object)))
"""
GATHERS_PLAINLY = GATHERS.replace(
    "async def execute(self, requests):\n        return await",
    "def execute(self, requests):\n        return asyncio.run(self.all(requests))\n\n    async def all(self, requests):\n        return await",
)
WORDS = {
    "words": "a b c",
    "an error in the middle": "a error c",
    "an error first": "error b",
    "an error last": "a error",
    "only an error": "fails",
    "no word": "",
    "one": "a",
}
IN, OUT = "do:STRING:1", "y:STRING:1"
JOINED = "dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [4] }"
HEAD = Model("").head + ASKS_HEAD
MODELS = (
    Model("ends", ENDS, config_of(IN, OUT, more=DECOUPLED), head=HEAD),
    Model("some_sent", SOME_SENT, config_of(IN, OUT, batch=4, more=JOINED)),
    Model("sent_twice", SENT_TWICE, config_of(IN, OUT)),
    Model("gathers", GATHERS, config_of(IN, OUT, batch=4, more=JOINED), head=HEAD),
    Model("gathers_plainly", GATHERS_PLAINLY, config_of(IN, OUT, batch=4, more=JOINED), head=HEAD),
    Model(
        "ends_chain",
        "",
        ensemble_of("x:STRING:1", OUT, [("joins", "a=x", "y=m"), ("ends_named", "do=m", "y=y")], more=DECOUPLED),
    ),
    Model(
        "ends_named",
        ENDS.replace("text(r).replace", 'text(r).removeprefix("a=").replace'),
        config_of(IN, OUT, more=DECOUPLED),
        head=HEAD,
    ),
    Model(
        "words_chain",
        "",
        ensemble_of(
            "text_input:STRING:1",
            "text_output:STRING:1 number:INT32:1 size:INT32:1",
            [
                ("shouts", "text_input=text_input", "size=size"),
                ("tokens", "text_input=text_input", "text_output=text_output number=number"),
            ],
            more=DECOUPLED,
        ),
    ),
)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for name in ENDED:
        yield from by("ends", name, doing("ends", name, id="i", parameters={"p": 1}), (STREAM,))
        if name not in ("last", "final twice", "large"):
            yield from by("ends", f"{name}, ensemble", Request("ends_chain", [texts("x", name)], id="i"), (STREAM,))
            yield Case(
                f"ends: {name}, generate_stream", [Http("POST", "/v2/models/ends/generate_stream", {"do": name})]
            )
    for what, names in {
        "returned and sent": ("returned", "sent", "returned", "sent"),
        "later": ("returned", "later", "later", "returned"),
        "errors": ("an error", "an error sent", "sent", "returned"),
        "all later": ("later",) * 4,
    }.items():
        for way in BOTH:
            yield Case(
                f"ends: of a batch, {what}, {way}",
                [Together([doing("some_sent", name, rows=True) for name in names], way)],
            )
    for name in ("two", "sent and returned"):
        yield from by("ends", f"not decoupled: {name}", doing("sent_twice", name), (GRPC, STREAM, JSON))
    for model in ("gathers", "gathers_plainly"):
        for what, names in {
            "right": ("a", "b", "c", "d"),
            "one fails": ("a", "error", "c", "d"),
            "one raises": ("a", "raises", "c", "d"),
        }.items():
            yield Case(f"ends: {model}, {what}", [Together([doing(model, name, rows=True) for name in names])])
    final: dict[str, Value] = {"triton_enable_empty_final_response": True}
    for what, words in WORDS.items():
        yield from generate("generate: ensemble token_chain", what, "token_chain", {"text_input": words})
        for parameters in ({}, final):
            request = Request("token_chain", [texts("text_input", words)], id="t", parameters=parameters)
            yield from by("ends: ensemble token_chain", f"{what}, {len(parameters)}", request, (STREAM,))
    for what in ("words", "an error in the middle"):
        yield from generate("generate: ensemble words_chain", what, "words_chain", {"text_input": WORDS[what]})
        request = Request("words_chain", [texts("text_input", WORDS[what])], id="t", parameters=final)
        yield from by("ends: ensemble words_chain", what, request, (STREAM,))
    requests = [
        Request("token_chain", [texts("text_input", words)], id=words, parameters=final)
        for words in ("a b", "fails", "", "c error d")
    ]
    yield Case("ends: ensemble, several on a stream", [OnStream(requests)])
    yield Case("ends: afterwards", [Infer(Request("sums", [floats("a", 1)]), GRPC)])
