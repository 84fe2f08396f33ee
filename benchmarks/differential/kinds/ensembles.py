"""Ensembles of the other kinds' models."""

from collections.abc import Iterator, Mapping

from benchmarks.differential.asked import (
    BINARY,
    BOTH,
    FEW,
    GRPC,
    JSON,
    STREAM,
    WAYS,
    Case,
    Infer,
    Request,
    Value,
    by,
    floats,
    integers,
    texts,
)
from benchmarks.differential.models import Model, config_of, ensemble_of

ADDS = """
    def execute(self, requests):
        return [answer(pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy() + np.float32(1))) for r in requests]
"""
JOINS = """
    def execute(self, requests):
        found = []
        for r in requests:
            found.append(answer(told(" | ".join(f"{t.name()}={t.as_numpy().ravel()[0].decode()}" for t in sorted(r.inputs(), key=lambda t: t.name())))))
        return found
"""
PARAMETERS = """
    def execute(self, requests):
        return [answer(told(r.request_id() + " " + r.parameters()), parameters={"step": 1, "mine": text(r, "x")}) for r in requests]
"""
TEXT = "x:STRING:1"
MODELS = (
    Model("adds", ADDS, config_of("x:FP32:-1", "y:FP32:-1")),
    Model("adds_rows", ADDS, config_of("x:FP32:2", "y:FP32:2", batch=4)),
    Model("joins", JOINS, config_of("a:STRING:1? b:STRING:1? c:STRING:1?", "y:STRING:1")),
    Model("tells_parameters", PARAMETERS, config_of(TEXT, "y:STRING:1")),
    Model("chain", "", ensemble_of("x:FP32:-1", "y:FP32:-1", [("adds", "x=x", "y=m"), ("adds", "x=m", "y=y")])),
    Model(
        "chain_rows",
        "",
        ensemble_of("x:FP32:2", "y:FP32:2", [("adds_rows", "x=x", "y=m"), ("adds_rows", "x=m", "y=y")], batch=4),
    ),
    Model(
        "chain_inside",
        "",
        ensemble_of("x:FP32:-1", "y:FP32:-1 m:FP32:-1", [("chain", "x=x", "y=m"), ("adds", "x=m", "y=y")]),
    ),
    Model("chain_raises", "", ensemble_of(TEXT, "y:STRING:1", [("raises", "do=x", "y=y")])),
    Model(
        "chain_responds",
        "",
        ensemble_of(TEXT, "y:STRING:1 z:STRING:1", [("responds", "do=x", "y=y"), ("joins", "a=y", "y=z")]),
    ),
    Model(
        "chain_bytes",
        "",
        ensemble_of(
            "x:STRING:-1",
            "y:STRING:-1 sizes:INT64:-1",
            [("lengths", "x=x", "y=m"), ("lengths", "x=m", "y=y sizes=sizes")],
        ),
    ),
    Model(
        "chain_sees",
        "",
        ensemble_of("a:FP32:-1", "y:STRING:1 z:STRING:1", [("sees", "a=a", "y=y"), ("joins", "a=y", "y=z")]),
    ),
    Model("chain_sees_all", "", ensemble_of("a:FP32:-1", "y:STRING:1 n:INT32:1", [("sees", "a=a", "y=y z=n")])),
    Model(
        "chain_parameters",
        "",
        ensemble_of(TEXT, "y:STRING:1", [("tells_parameters", "x=x", "y=m"), ("tells_parameters", "x=m", "y=y")]),
    ),
    Model("chain_other", "", ensemble_of(TEXT, "y:FP32:2 z:INT32:-1 s:STRING:1", [("other", "do=x", "y=y z=z s=s")])),
    Model(
        "chain_missing",
        "",
        ensemble_of(TEXT, "y:FP32:2 j:STRING:1", [("other", "do=x", "y=y s=s"), ("joins", "a=s", "y=j")]),
    ),
    Model(
        "chain_streams",
        "",
        ensemble_of(
            TEXT, "y:STRING:1", [("streams", "do=x", "y=y")], more="model_transaction_policy { decoupled: true }"
        ),
    ),
    Model("chain_streams_plain", "", ensemble_of(TEXT, "y:STRING:1", [("streams", "do=x", "y=y")])),
    Model(
        "chain_streams_first",
        "",
        ensemble_of(
            TEXT,
            "y:STRING:1",
            [("streams", "do=x", "y=m"), ("joins", "a=m", "y=y")],
            more="model_transaction_policy { decoupled: true }",
        ),
    ),
    Model("chain_asks", "", ensemble_of(TEXT, "y:STRING:1", [("asks", "do=x", "y=y")])),
    Model("chain_coroutines", "", ensemble_of(TEXT, "y:STRING:1", [("coroutines", "do=x", "y=y")])),
    Model("chain_sends", "", ensemble_of(TEXT, "y:STRING:1", [("sends", "do=x", "y=m"), ("joins", "a=m", "y=y")])),
    Model(
        "shout_chain",
        "",
        ensemble_of(
            "text_input:STRING:1",
            "text_output:STRING:1",
            [("shouts", "text_input=text_input", "text_output=text_output")],
        ),
    ),
    Model(
        "token_chain",
        "",
        ensemble_of(
            "text_input:STRING:1",
            "text_output:STRING:1",
            [("tokens", "text_input=text_input", "text_output=text_output")],
            more="model_transaction_policy { decoupled: true }",
        ),
    ),
    Model("chain_optional", "", ensemble_of("x:STRING:1 o:STRING:1?", "y:STRING:1", [("joins", "a=x b=o", "y=y")])),
    Model(
        "chain_sequence",
        "",
        ensemble_of("x:INT32:1", "y:INT32:1 seen:STRING:1", [("sequence_bare", "x=x", "y=y seen=seen")]),
    ),
    Model("chain_scores", "", ensemble_of("x:FP32:1", "y:FP32:3", [("scores", "x=x", "y=y")], batch=4)),
    Model("chain_unknown", "", ensemble_of("x:FP32:1", "y:FP32:1", [("unheard_of", "x=x", "y=y")])),
    Model("chain_broken", "", ensemble_of(TEXT, "y:STRING:1", [("init_raises", "do=x", "y=y")])),
    Model("chain_wrong_input", "", ensemble_of("x:FP32:1", "y:FP32:1", [("adds", "nothing=x", "y=y")])),
    Model("chain_wrong_type", "", ensemble_of("x:INT32:1", "y:FP32:1", [("adds", "x=x", "y=y")])),
)
ASKED_WITH: Mapping[str, Mapping[str, Value]] = {
    "parameters": {"p": 1, "q": "x", "r": True},
    "nothing": {},
    "a priority and a timeout": {"priority": 1, "timeout": 5_000_000},
    "a sequence's id": {"sequence_id": 7},
}
NOT_LOADED = ("chain_unknown", "chain_broken", "chain_wrong_input", "chain_wrong_type")


def cases() -> Iterator[Case]:
    """Yield the cases."""
    one = floats("x", 1, 2)
    yield from by("ensembles", "two steps", Request("chain", [one], id="i"), WAYS)
    yield from by("ensembles", "no elements", Request("chain", [floats("x")]), FEW)
    yield from by("ensembles", "rows", Request("chain_rows", [floats("x", 1, 2, 3, 4, shape=(2, 2))]), WAYS)
    yield from by("ensembles", "too many rows", Request("chain_rows", [floats("x", *range(10), shape=(5, 2))]), BOTH)
    yield from by("ensembles", "wrong shape", Request("chain_rows", [floats("x", 1, 2, 3, shape=(1, 3))]), BOTH)
    yield from by("ensembles", "inside", Request("chain_inside", [one]), FEW)
    for wanted in (["m"], ["y"], ["y", "m"]):
        yield from by("ensembles", f"inside, {' '.join(wanted)} asked", Request("chain_inside", [one], wanted), BOTH)
    yield from by("ensembles", "an unknown output", Request("chain", [one], ["nothing"]), BOTH)
    yield from by("ensembles", "an unknown input", Request("chain", [floats("nothing", 1)]), BOTH)
    for name in ("value error", "lines", "exit", "right"):
        yield from by(
            "ensembles, errors",
            name,
            Request("chain_raises", [texts("x", name)]),
            (GRPC, STREAM) if name == "exit" else (GRPC, STREAM, JSON),
        )
    for name in (
        *("NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "no code", "no responses", "right", "with outputs"),
    ):
        yield from by(
            "ensembles, errors",
            f"{name} of the first step",
            Request("chain_responds", [texts("x", name)]),
            (GRPC, STREAM, JSON),
        )
        yield from by(
            "ensembles, errors",
            f"{name} of the first step, y asked",
            Request("chain_responds", [texts("x", name)], ["y"]),
            (GRPC,),
        )
    for name, elements in {"a picture": [b"\xff\xd8\0"], "empty": [b""], "none": [], "text": [b"a", b"bc"]}.items():
        ways = (GRPC, "typed", STREAM, BINARY, *([JSON] if name != "a picture" else []))
        yield from by("ensembles, bytes", name, Request("chain_bytes", [texts("x", *elements)]), ways)
    for model in ("chain_sees", "chain_sees_all"):
        for what, parameters in ASKED_WITH.items():
            request = Request(model, [floats("a", 1)], id="seven", parameters=parameters, headers={"x-user": "me"})
            yield from by("ensembles, what a step sees", f"{what}, {model}", request, (GRPC, STREAM, JSON))
        for wanted in (["y"], ["z"]):
            if model == "chain_sees":
                yield from by(
                    "ensembles, what a step sees",
                    f"{wanted[0]} asked",
                    Request(model, [floats("a", 1)], wanted),
                    (GRPC,),
                )
    yield from by(
        "ensembles, response parameters",
        "two steps",
        Request("chain_parameters", [texts("x", "a")], id="i", parameters={"p": 1}),
        (GRPC, STREAM, JSON),
    )
    for name in (
        *("right", "one missing", "none at all", "one more", "float64 for float32", "two axes for one", "scalar text"),
        *("nothing for two", "text for float32", "reverse order"),
    ):
        for model in ("chain_other", "chain_missing"):
            yield from by("ensembles, outputs", f"{name}, {model}", Request(model, [texts("x", name)]), BOTH)
        yield from by(
            "ensembles, outputs", f"{name}, y asked", Request("chain_missing", [texts("x", name)], ["y"]), BOTH
        )
    for name in (
        *("one", "two", "zero", "five", "only an error", "an error in the middle", "raises", "final with the last"),
    ):
        for model in ("chain_streams", "chain_streams_first"):
            if model == "chain_streams_first" and name not in ("zero", "only an error", "raises"):
                continue  # which response of the last step is the final one is a matter of luck in Triton
            yield from by(
                "ensembles, decoupled", f"{name}, {model}", Request(model, [texts("x", name)], id="i"), (STREAM,)
            )
    yield from by("ensembles, decoupled", "no stream", Request("chain_streams", [texts("x", "one")]), BOTH)
    yield from by(
        "ensembles, decoupled", "not declared", Request("chain_streams_plain", [texts("x", "one")]), (GRPC, STREAM)
    )
    for name in ("a model", "an unknown model", "an id", "one that raises", "bytes"):
        yield from by("ensembles, BLS", name, Request("chain_asks", [texts("x", name)]), BOTH)
    for name in ("asyncio.run", "a loop of its own", "asyncio.run of a gather"):
        yield from by("ensembles, coroutines", name, Request("chain_coroutines", [texts("x", name)]), (GRPC,))
    for name in ("sent", "from a thread", "an error sent", "returned"):
        yield from by("ensembles, senders", name, Request("chain_sends", [texts("x", name)]), (GRPC,))
    yield from by("ensembles, optional", "given", Request("chain_optional", [texts("x", "a"), texts("o", "b")]), BOTH)
    yield from by("ensembles, optional", "left out", Request("chain_optional", [texts("x", "a")]), BOTH)
    for number, way in enumerate((GRPC, JSON)):
        asked = [
            Request(
                "chain_sequence",
                [integers("x", value)],
                parameters={"sequence_id": 200 + number, "sequence_start": value == 1, "sequence_end": value == 3},
            )
            for value in (1, 2, 3)
        ]
        yield Case(f"ensembles, sequences: three requests, {way}", [Infer(each, way) for each in asked])
    yield from by("ensembles, sequences", "without id", Request("chain_sequence", [integers("x", 1)]), (GRPC, JSON))
    for count in (1, 2):
        request = Request(
            "chain_scores", [floats("x", 1, shape=(1, 1))], ["y"], output_parameters={"classification": count}
        )
        yield from by("ensembles, classification", str(count), request, (GRPC, JSON))
    for name in NOT_LOADED:
        yield Case(f"ensembles, not loaded: {name}", [Infer(Request(name, [floats("x", 1)]), GRPC)])
