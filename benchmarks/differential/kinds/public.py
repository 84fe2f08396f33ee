"""Models as public repositories have them, with what their clients look at."""

from collections.abc import Iterator
from functools import partial

from benchmarks.differential.asked import (
    BINARY,
    FEW,
    GRPC,
    JSON,
    STREAM,
    WAYS,
    Case,
    Http,
    Infer,
    OnStream,
    Request,
    Rpc,
    Scrape,
    Wait,
    by,
    floats,
    generate,
    integers,
    texts,
)
from benchmarks.differential.kinds.public_models import COMPLETED_CONFIGS, MODELS

NAMES = [model.name for model in MODELS]


def _of_sequence(model: str, value: int, key: int | str, start: bool = False, end: bool = False) -> Request:
    parameters = {"sequence_id": key, "sequence_start": start, "sequence_end": end}
    return Request(model, [integers("INPUT", value, shape=(1, 1))], parameters=parameters)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    kind = "public"
    pixels = bytes(range(24))
    for what, words in {"one": ["hello"], "two": ["hi", "longer text"], "empty": [""], "umlaut": ["äöü"]}.items():
        yield from by(
            kind, f"tokens of {what}", Request("pub_tokenizer", [texts("TEXT", *words, shape=(1, len(words)))]), WAYS
        )
    yield from by(
        kind,
        "tokens, one output",
        Request("pub_tokenizer", [texts("TEXT", "a", shape=(1, 1))], outputs=["attention_mask"]),
        FEW,
    )
    yield from by(kind, "tokens, wrong rank", Request("pub_tokenizer", [texts("TEXT", "a")]), FEW)
    yield from by(kind, "tokens, no UTF-8", Request("pub_tokenizer", [texts("TEXT", b"\xff", shape=(1, 1))]), FEW)
    yield from by(kind, "tokens, too many rows", Request("pub_tokenizer", [texts("TEXT", *"abcde", shape=(5, 1))]), FEW)
    for what, raws in {"one": [pixels[:12]], "two": [pixels, pixels[:12]], "broken": [b"abc"], "empty": [b""]}.items():
        yield from by(
            kind,
            f"image, {what}",
            Request("pub_image", [texts("IMAGE", *raws, shape=(len(raws), 1))]),
            (GRPC, STREAM, BINARY, JSON) if what != "two" else FEW,
        )
    bodies: dict[str, dict[str, object]] = {
        "words": {"text_input": "a b c"},
        "most": {"text_input": "a b c", "max_tokens": 2},
        "one": {"text_input": "a"},
        "none": {"text_input": ""},
        "inline": {"text_input": "a", "final_inline": True},
        "parameters": {"text_input": "a b", "parameters": {"final_inline": True}},
    }
    for what, body in bodies.items():
        yield from generate(kind, f"LLM, {what}", "pub_llm", body)
    for parameters in ({}, {"triton_enable_empty_final_response": True}, {"final_inline": True}):
        for most in (None, 1, 2):
            inputs = [texts("text_input", "x y z"), *([] if most is None else [integers("max_tokens", most)])]
            yield from by(
                kind,
                f"LLM, {sorted(parameters)}, {most}",
                Request("pub_llm", inputs, parameters=parameters, id="r"),
                (STREAM, GRPC, JSON),
            )
    for what, inputs in {
        "text": [texts("TEXT", "abc", shape=(1, 1))],
        "both": [texts("TEXT", "abc", shape=(1, 1)), texts("IMAGE", pixels, shape=(1, 1))],
        "broken": [texts("TEXT", "abc", shape=(1, 1)), texts("IMAGE", b"a", shape=(1, 1))],
    }.items():
        yield from by(kind, f"router, {what}", Request("pub_router", inputs, id="r7"), FEW)
    for what, inputs in {
        "both": [texts("TEXT", "abc", shape=(1, 1)), texts("IMAGE", pixels, shape=(1, 1))],
        "broken": [texts("TEXT", "abc", shape=(1, 1)), texts("IMAGE", b"a", shape=(1, 1))],
    }.items():
        yield from by(kind, f"ensemble, pipeline {what}", Request("pub_pipeline", inputs), FEW)
    for model in ("pub_stateful_direct", "pub_stateful_oldest"):
        step = partial(_of_sequence, model)

        for way in (GRPC, JSON):
            yield Case(
                f"{kind}: sequence of {model}, {way}",
                [
                    Infer(each, way)
                    for each in (
                        step(1, 5, True),
                        step(2, 5),
                        step(10, 6, True),
                        step(3, 5, end=True),
                        step(10, 6, end=True),
                        step(4, 5),
                        step(1, 0),
                        step(1, 9, True, True),
                    )
                ],
            )
        yield Case(
            f"{kind}: sequence of {model} on a stream",
            [OnStream([step(1, 15, True), step(2, 15), step(3, 15, end=True)], at_once=True)],
        )
        yield Case(
            f"{kind}: sequence with a text of {model}",
            [Infer(each, GRPC) for each in (step(1, "a", True), step(2, "a", end=True))],
        )
    for number in (1.5, 2.0):
        yield from by(kind, f"metrics {number}", Request("pub_metrics", [floats("INPUT0", number, 0.5)]), (GRPC,))
    yield Case(f"{kind}: metrics scraped", [Wait(Scrape(["pub_", "# HELP pub_", "# TYPE pub_"]), "pub_last")])
    for name in COMPLETED_CONFIGS:
        rows = (1, 4) if name == "batched" else (4,)
        one = floats("INPUT0", 1, 2, 3, 4, shape=rows)
        yield from by(
            kind,
            f"completed {name}",
            Request(f"pub_completed_{name}", [one, floats("INPUT1", 1, 1, 1, 1, shape=rows)]),
            FEW,
        )
        yield from by(kind, f"completed {name}, optional", Request(f"pub_completed_{name}", [one]), FEW)
        yield from by(
            kind, f"completed {name}, wrong shape", Request(f"pub_completed_{name}", [floats("INPUT0", 1, 2)]), FEW
        )
    scores = floats("SCORES", 0.25, 0.5, 0.125, 4, 2, 1, shape=(2, 3))
    yield from by(kind, "labels", Request("pub_labels", [scores]), WAYS)
    for count in (1, 2, 3, 9):
        yield from by(
            kind,
            f"classification of {count}",
            Request("pub_labels", [scores], outputs=["SCORES_OUT"], output_parameters={"classification": count}),
            FEW,
        )
    for model in ("pub_versions", "pub_latest", "pub_all"):
        for version in ("", "1", "2", "3", "7", "10", "11"):
            yield from by(
                kind,
                f"version {version or 'none'} of {model}",
                Request(model, [integers("IN", 1)], version=version),
                (GRPC, BINARY),
            )
        yield Case(
            f"{kind}: versions' statistics of {model}",
            [
                Rpc("ModelStatistics", {"name": model, "version": "1"}),
                Rpc("ModelStatistics", {"name": model}),
                Http("GET", f"/v2/models/{model}/versions/1/stats"),
            ],
        )
        yield Case(
            f"{kind}: versions of {model}",
            [
                Http("GET", f"/v2/models/{model}"),
                Http("GET", f"/v2/models/{model}/versions/1"),
                Http("GET", f"/v2/models/{model}/versions/3/ready"),
                Rpc("ModelConfig", {"name": model, "version": "1"}),
            ],
        )
    for what, values in {"three": (1, 2, 3), "an error": (1, -1, 2), "none": (), "one": (7,)}.items():
        for parameters in ({}, {"triton_enable_empty_final_response": True}):
            yield from by(
                kind,
                f"after execute, {what}, {len(parameters)}",
                Request("pub_after", [integers("IN", *values)], parameters=parameters),
                (STREAM, GRPC),
            )
        yield Case(
            f"{kind}: after execute, {what}, events",
            [Http("POST", "/v2/models/pub_after/generate_stream", {"IN": list(values)})],
        )
    for name in NAMES:
        yield Case(
            f"{kind}: config, {name}", [Rpc("ModelConfig", {"name": name}), Http("GET", f"/v2/models/{name}/config")]
        )
        yield Case(
            f"{kind}: metadata, {name}", [Rpc("ModelMetadata", {"name": name}), Http("GET", f"/v2/models/{name}")]
        )
        yield Case(f"{kind}: statistics, {name}", [Rpc("ModelStatistics", {"name": name})])
