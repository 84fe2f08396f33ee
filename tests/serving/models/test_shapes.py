"""`gangway serve` with a model whose length is symbolic: onnxruntime at once, compiled for lengths that are used."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from tritonclient.utils import InferenceServerException

from gangway.artifact.format import TensorSpec
from gangway.artifact.instances import SizeSpan
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.scheduler.messages import LoadModel
from gangway.server.control.repository.loaded import FIRST_PAUSE_SECONDS, ModelVariants
from gangway.server.control.repository.shapes import MAX_QUEUED
from gangway.server.errors import ConfigError
from gangway.server.messages import ModelReady, ShapeWanted, VariantGone, VariantReady, from_json, to_json
from gangway.server.models.config import buckets_of
from testing.processes import running_below
from tests.conftest import CompileKept
from tests.helpers import onnx_text
from tests.helpers.served import Served, serving
from tests.helpers.ways import WAYS, RefusedError

TIMEOUT_S = 60
LIMIT = 2


# y = relu(x + b) + z, lengths of x and z symbolic.
SEQUENCE = """(float[N, S, 4] x, float[N, S, 4] z) => (float[N, S, 4] y) {
    s = Add(x, b)
    r = Relu(s)
    y = Add(r, z)
}"""
B = np.arange(4, dtype=np.float32)
# Rows of a table, and quotients.
EMBEDDING = """(int64[N, S] tokens, int64[N, S] parts) => (float[N, S, 2] y, int64[N, S] q) {
    [table] y = Gather(rows, tokens)
    [shares] q = Div(tokens, parts)
}"""
ROWS = np.arange(20, dtype=np.float32).reshape(10, 2)
CENTRE = "(float[N, S] x) => (float[N, S] y) { m = ReduceMean<axes=[0]>(x) y = Sub(x, m) }"
# Two convolutions, a mean over the image, whose size is open, and a dense layer.
CLASSIFIER = """(float[N, 3, H, W] x) => (float[N, 10] y) {
    a = Conv<pads=[1, 1, 1, 1]>(x, first)
    b = Relu(a)
    c = Conv<pads=[1, 1, 1, 1]>(b, second)
    d = GlobalAveragePool(c)
    e = Flatten(d)
    y = Gemm<transB=1>(e, dense, bias)
}"""
SHAPES = {"first": (32, 3, 3, 3), "second": (64, 32, 3, 3), "dense": (10, 64), "bias": (10,)}


def save_classifier(repository: Path, config: str = "") -> Path:
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(shape, np.float32) / 9 for name, shape in SHAPES.items()}
    return onnx_text.save(repository, "classifier", CLASSIFIER, config, **weights)


class Lengths(Served):
    """A server with two models of the same file, one of which declares sizes, and others."""

    def check(self, rows: int, length: int, name: str = "sequence") -> None:
        """Send a request and compare the answer."""
        random = np.random.default_rng(rows * 1000 + length)
        arrays = {key: random.standard_normal((rows, length, 4)).astype(np.float32) for key in ("x", "z")}
        answer = self.infer(name, **arrays)["y"]
        expected = np.maximum(arrays["x"] + B, 0) + arrays["z"]
        assert answer.shape == expected.shape
        np.testing.assert_allclose(answer, expected, rtol=1e-6)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Iterator[Lengths]:
    folder = tmp_path_factory.mktemp("repository")
    buckets = 'parameters { key: "gangway_buckets" value: { string_value: "S=2,6" } }'
    onnx_text.save(folder, "sequence", SEQUENCE, b=B)
    onnx_text.save(folder, "declared", SEQUENCE, f"max_batch_size: 4 {buckets}", b=B)
    dims = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }, { name: "w" dims: [ 1, 4 ] } ]'
    onnx_text.save(folder, "windows", "(float[S, 4] x, float[1, 4] w) => (float[S, 4] y) { y = Add(x, w) }", dims)
    picture = onnx_text.save(folder, "picture", "(float[Q, 3, Q, Q] x) => (float[Q, 3, Q, Q] y) { y = Relu(x) }")
    picture.write_bytes(picture.read_bytes().replace(b"Q", b"?"))
    onnx_text.save(folder, "replaced", "(float[N, S, 4] x) => (float[N, S, 4] y) { y = Relu(x) }")
    onnx_text.save(folder, "centre", CENTRE)
    onnx_text.save(folder, "embedding", EMBEDDING, f"max_batch_size: 4 {buckets.replace('2,6', '3')}", rows=ROWS)
    both = 'parameters { key: "gangway_buckets" value: { string_value: "H=8,12; W=8" } }'
    save_classifier(folder, f"max_batch_size: 8 {both}")
    cache_dir = tmp_path_factory.mktemp("cache")
    sizes: dict[str, list[dict[str, int]]] = {
        "declared": [{}, {"S": 2}, {"S": 6}],
        "windows": [{}, {"S": 1}, {"S": 5}],
        "embedding": [{}, {"S": 3}],
        "picture": [{}, {"x.2": 4, "x.3": 6}],
        "centre": [{}, {"N": 1, "S": 5}, {"N": 3, "S": 5}],
        "classifier": [{}, {"H": 8, "W": 8}, {"H": 12, "W": 8}],
    }
    for name, each in sizes.items():
        for dimensions in each:
            path = folder / name / "1" / "model.onnx"
            compile_kept(path, name, cache_dir, dimensions=dimensions)
    with serving(folder, f"--cache-dir={cache_dir}", f"--max-shapes={LIMIT}", kind=Lengths) as served:
        yield served


def test_one_sentence_says_what_serves_a_model(served: Lengths) -> None:
    sentences = {
        "sequence": "served by onnxruntime until a size of (S) has been compiled, which begins with its",
        "declared": "compiled for (S) of 2, 6; onnxruntime serves other sizes until they are compiled",
    }
    for name, expected in sentences.items():
        (sentence,) = served.lines(rf"INFO supervisor: model {name}, version 1: ready after .* s, (.*)")
        assert sentence.startswith(expected)
    assert not served.lines(" ERROR ")


def test_declared_sizes_are_compiled_before_the_model_is_ready(served: Lengths) -> None:
    for size in (2, 6):
        assert served.lines(rf"declared, version 1, S={size}: ready")
        served.check(3, size, "declared")


def test_rows_of_a_compiled_size_are_computed_together(served: Lengths, tmp_path: Path) -> None:
    session = onnxruntime.InferenceSession(save_classifier(tmp_path))
    for rows, height in ((1, 8), (2, 8), (8, 8), (7, 12)):
        x = np.random.default_rng(rows).standard_normal((rows, 3, height, 8), np.float32)
        np.testing.assert_allclose(served.infer("classifier", x=x)["y"], session.run(None, {"x": x})[0], atol=1e-5)
    assert len(served.lines(r"classifier, version 1, H=\d+, W=\d+: ready")) == 2


def test_a_first_dimension_that_is_no_batch(served: Lengths) -> None:
    config = served.client.get_model_config("windows").config
    assert (config.max_batch_size, [list(tensor.dims) for tensor in config.input]) == (0, [[-1, 4], [1, 4]])
    w = np.full((1, 4), 3, np.float32)
    for length in (1, 5, 5):
        x = np.arange(4 * length, dtype=np.float32).reshape(length, 4)
        np.testing.assert_array_equal(served.infer("windows", x=x, w=w)["y"], x + w)
        served.wait_for(rf"windows, version 1, S={length}: ready")


def test_dimensions_of_a_name_that_says_nothing_may_differ(served: Lengths) -> None:
    for rows in (1, 2):
        x = np.arange(72 * rows, dtype=np.float32).reshape(rows, 3, 4, 6) - 30
        np.testing.assert_array_equal(served.infer("picture", x=x)["y"], np.maximum(x, 0))
        served.wait_for(r"picture, version 1, x.2=4, x.3=6: ready")


def test_rows_that_influence_each_other_are_compiled_for_each_number_of_them(served: Lengths) -> None:
    assert served.client.get_model_config("centre").config.max_batch_size == 4
    for rows in (1, 3, 3):
        x = np.arange(5 * rows, dtype=np.float32).reshape(rows, 5) ** 2
        np.testing.assert_allclose(served.infer("centre", x=x)["y"], x - x.mean(0), rtol=1e-6)
        served.wait_for(rf"centre, version 1, N={rows}, S=5: ready")
    with pytest.raises(InferenceServerException, match="batch-size must be <= 4"):
        served.infer("centre", x=np.zeros((5, 5), np.float32))
    (statistics,) = served.client.get_inference_statistics("centre").model_stats
    assert (statistics.inference_count, statistics.inference_stats.success.count) == (7, 3)


def test_a_size_is_compiled_when_it_has_been_used_and_the_oldest_one_goes(served: Lengths) -> None:
    shapes = [list(tensor.shape) for tensor in served.client.get_model_metadata("sequence").inputs]
    assert shapes == [[-1, -1, 4]] * 2
    for length in (5, 6):
        for rows in (1, 2, 3):
            served.check(rows, length)
        served.wait_for(rf"sequence, version 1, S={length}: ready")
    assert not served.lines("unloaded")
    for rows in (1, 4, 2):
        for length in (6, 5, 6):  # compiled
            served.check(rows, length)
    served.check(1, 7)
    served.wait_for(r"sequence, version 1, S=7: ready")
    assert served.lines(r"S=(\d+): unloaded") == ["5"]
    for length in (5, 6, 7):
        served.check(2, length)
    assert len(served.lines(r"sequence, version 1, S=5: (?:compiled|found)")) == 1
    statistics = served.client.get_inference_statistics("sequence").model_stats
    assert [(entry.name, entry.version) for entry in statistics] == [("sequence", "1")]
    assert statistics[0].inference_stats.success.count == 6 + 9 + 1 + 3
    assert statistics[0].inference_stats.fail.count == 0


BOUNDS = "Gather node 'table': indices element out of data bounds, idx={} must be within the inclusive range [-10,9]"
REFUSED = [
    ([3, 10, 5, 6], [1] * 4, BOUNDS.format(10)),
    ([3, -11, 5, 6], [1] * 4, BOUNDS.format(-11)),
    ([3, 5, 1 << 40, 6], [1] * 4, BOUNDS.format(1 << 40)),
    ([3, 5, 6, 7], [3, 1, 0, 2], "Div node 'shares': Integer division by zero"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tokens", "parts", "reason"), REFUSED)
def test_a_refusal_is_the_same_whether_a_size_is_compiled(
    served: Lengths, tokens: list[int], parts: list[int], reason: str, way: str
) -> None:
    for length in (3, 4):  # compiled, and not
        with pytest.raises(RefusedError) as caught:
            served.over(way, "embedding", tokens=np.array([tokens[:length]]), parts=np.array([parts[:length]]))
        assert caught.value.message == f"model 'embedding': {reason}"
        assert caught.value.is_of("INVALID_ARGUMENT")


def test_sizes_are_compiled_from_the_files_that_were_loaded(served: Lengths) -> None:
    path = served.repository / "replaced" / "1" / "model.onnx"
    path.unlink()
    path.parent.rmdir()
    onnx_text.save(served.repository, "replaced", "(float[N, S, 4] x) => (float[N, S, 4] y) { y = Neg(x) }")
    x = np.random.default_rng(5).standard_normal((1, 9, 4)).astype(np.float32)
    np.testing.assert_array_equal(served.infer("replaced", x=x)["y"], np.maximum(x, 0))
    served.wait_for("replaced, version 1, S=9: .*: its files have changed since it was loaded: load it anew")
    np.testing.assert_array_equal(served.infer("replaced", x=x)["y"], np.maximum(x, 0))
    assert not served.lines("replaced, version 1, S=9: ready")


def test_a_storm_of_sizes_is_answered_and_compiles_little(served: Lengths) -> None:
    """While the process that compiles them stands still, so that all of them wait at the same time."""
    served.check(1, 90)
    served.wait_for("sequence, version 1, S=90: ready")
    compilers = running_below(served.server.process.pid, "gangway.compiler --serve=compile")
    for pid in compilers:
        os.kill(pid, signal.SIGSTOP)
    try:
        for length in range(100, 200):
            served.check(1, length)
        assert running_below(served.server.process.pid, "gangway.compiler --serve=compile") == compilers
    finally:
        for pid in compilers:
            os.kill(pid, signal.SIGCONT)
    served.wait_for("sequence, version 1, S=65 to 128: ready")  # which makes others needless
    assert len(served.lines(r"sequence, version 1, S=1\d\d: ready")) <= MAX_QUEUED


@pytest.mark.parametrize(
    ("text", "symbols", "sizes"),
    [
        ("", ["S"], []),
        ("S=8", ["S"], [(8,)]),
        ("S=8, 16,8", ["S"], [(8,), (16,)]),
        ("T=1,2; S=8,16", ["S", "T"], [(8, 1), (8, 2), (16, 1), (16, 2)]),
        ("x.1=3", ["x.1"], [(3,)]),
    ],
)
def test_buckets(text: str, symbols: list[str], sizes: list[tuple[int, ...]]) -> None:
    assert buckets_of(config_with(text), symbols, 64) == sizes


@pytest.mark.parametrize(
    "text", ["S", "S=", "S=a", "S=-1", "S=0", f"S={1 << 31}", "T=3", "S=3;", "=3", "S=3;T=4", "S=1;S=2"]
)
def test_wrong_buckets(text: str) -> None:
    with pytest.raises(ConfigError, match="gangway_buckets"):
        buckets_of(config_with(text), ["S"], 64)
    with pytest.raises(ConfigError, match="no sizes of 'T'"):
        buckets_of(config_with("S=3"), ["S", "T"], 64)


def test_buckets_are_counted_before_they_are_made() -> None:
    """A product of which no machine could hold the tuples: one that made them would never end."""
    symbols = [f"D{number}" for number in range(40)]
    sizes = ",".join(str(size) for size in range(1, 9))
    text = "; ".join(f"{symbol}={sizes}" for symbol in symbols)
    with pytest.raises(ConfigError, match=f"^{8**40} buckets are declared, at most 8 shapes are compiled$"):
        buckets_of(config_with(text), symbols, 8)
    assert len(buckets_of(config_with("S=1,2; T=3,4"), ["S", "T"], 4)) == 4
    with pytest.raises(ConfigError, match="4 buckets are declared, at most 3"):
        buckets_of(config_with("S=1,2; T=3,4"), ["S", "T"], 3)


def config_with(text: str) -> ModelConfig:
    config = ModelConfig()
    config.parameters["gangway_buckets"].string_value = text
    return config


def test_messages_about_variants() -> None:
    tensor = TensorSpec("x", "FP32", (-1, 3), 12)
    messages: list[Any] = [
        VariantReady(7, "m", 1, (3, 4), (tensor,), (tensor,), 8),
        VariantGone("m", 1, (3,)),
        ShapeWanted("m", 2, (3,), ((1,), (2,))),
    ]
    assert [from_json(to_json(message)) for message in messages] == messages


def test_sizes_are_tried_again_after_growing_pauses_unless_the_compiler_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ready = ModelReady(1, "sequence", 1, b"", (), (), 0, 1, True)
    model = ModelVariants(ready, Path("model.onnx"), ("S",), LoadModel(1, "sequence", "", 1, 1, 0, 1))
    model.refused.add((2,))
    for pause in (FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS):
        assert model.may_try((3,))
        model.failed_for_now((3,))
        now += pause - 1
        assert not model.may_try((3,))
        now += 1
    assert model.may_try((3,)) and model.may_try((4,)) and not model.may_try((2,))


@pytest.mark.parametrize(
    ("refused", "is_refused"),
    [
        ([(5, 1), (6, 2)], False),
        ([(5, 1), (6, 2), (7, 3)], True),
        ([(5, 1), (6, 1), (7, 1)], False),
        ([(length, 1) for length in range(1, 17)], True),
        ([(length, 0) for length in range(1, 20)], False),
    ],
)
def test_a_reason_that_holds_for_all_sizes_is_remembered(refused: list[tuple[int, int]], is_refused: bool) -> None:
    ready = ModelReady(1, "sequence", 1, b"", (), (), 0, 1, True)
    model = ModelVariants(ready, Path("model.onnx"), ("S", "T"), LoadModel(1, "sequence", "", 1, 1, 0, 1))
    for length, past in refused:
        assert model.may_try((length, past))
        model.refuse((length, past), f"node 'n' (Unknown): no kernel for [{length}, {past}]")
    assert (model.is_refused, model.may_try((100, 100))) == (is_refused, not is_refused)


@pytest.mark.parametrize("is_padded", [False, True])
def test_lengths_that_the_server_pads_to_are_compiled_without_others(is_padded: bool) -> None:
    ready = ModelReady(1, "text", 1, b"", (), (), 0, 1, True)
    model = ModelVariants(ready, Path("model.onnx"), ("T",), LoadModel(1, "text", "", 1, 1, 0, 1), is_padded=is_padded)
    for length in (16, 24, 32, 48):
        model.made.add((length,))
    assert (model.span_of((64,)) is None) is is_padded


def test_a_model_of_which_some_sizes_are_compiled_is_not_refused() -> None:
    ready = ModelReady(1, "sequence", 1, b"", (), (), 0, 1, True)
    model = ModelVariants(ready, Path("model.onnx"), ("S",), LoadModel(1, "sequence", "", 1, 1, 0, 1))
    model.made.add((1,))
    for length in range(2, 30):
        model.refuse((length,), "too large")
    assert not model.is_refused


def test_a_span_is_of_the_symbol_that_changes() -> None:
    ready = ModelReady(1, "decoder", 1, b"", (), (), 0, 1, True)
    model = ModelVariants(ready, Path("model.onnx"), ("S", "T"), LoadModel(1, "decoder", "", 1, 1, 0, 1))
    for past in (5, 6, 7):
        assert model.span_of((1, past)) is None
        model.made.add((1, past))
    assert model.span_of((1, 8)) == SizeSpan("T", 1, 64)
    assert model.span_of((1, 9)) is None  # it has been tried
    assert model.span_of((1, 64)) is None
    assert model.span_of((1, 65)) == SizeSpan("T", 65, 128)
    assert model.span_of((2, 8)) is None  # as with heights and widths of pictures
    assert model.span_of((1, 0)) is None


def test_a_span_of_the_batch_ends_with_the_largest_batch() -> None:
    tensors = (TensorSpec("x", "FP32", (-1, -1), 0, ("N", "S")),)
    for largest, last in ((8, 8), (100, 64), (0, 64)):
        ready = ModelReady(1, "mixing", 1, b"", tensors, (), largest, 1, False)
        model = ModelVariants(ready, Path("model.onnx"), ("N", "S"), LoadModel(1, "mixing", "", 1, 1, 0, 1))
        model.made |= {(rows, 5) for rows in (1, 2, 3)}
        assert model.span_of((4, 5)) == SizeSpan("N", 1, last)
        model.made |= {(4, length) for length in (6, 7, 8)}
        assert model.span_of((4, 9)) == SizeSpan("S", 1, 64)


def test_symbols_that_grow_together_have_one_span() -> None:
    ready = ModelReady(1, "decoder", 1, b"", (), (), 0, 1, True)
    symbols = ("sequence", "mask", "past")
    model = ModelVariants(ready, Path("model.onnx"), symbols, LoadModel(1, "decoder", "", 1, 1, 0, 1))
    model.made |= {(1, past + 1, past) for past in (70, 71, 72)}
    assert model.span_of((1, 90, 80)) is None
    span = model.span_of((1, 101, 100))
    assert span == SizeSpan("mask", 65, 128, (("past", -1),))
    assert span.sizes(65, {"sequence": 1}) == {"sequence": 1, "mask": 65, "past": 64}
    assert model.span_of((1, 501, 500)) is None  # far from what has been compiled


def variants(ahead: int, *symbols: str) -> ModelVariants:
    """A model whose sizes are compiled ahead of requests."""
    ready = ModelReady(1, "decoder", 1, b"", (), (), 0, 1, True)
    spec = LoadModel(1, "decoder", "", 1, 1, 0, 1)
    return ModelVariants(ready, Path("model.onnx"), symbols, spec, ahead=ahead)


def test_the_only_symbol_is_compiled_ahead_of_requests() -> None:
    model = variants(130, "T")
    assert model.span_of((70,)) == SizeSpan("T", 65, 128, ahead=True)
    made = [found[1] for _ in range(2) if (found := model.next_ahead())]
    assert made == [SizeSpan("T", 1, 64, ahead=True), SizeSpan("T", 129, 192, ahead=True)]
    assert model.next_ahead() is None
    model.forget_spans((128,))
    assert model.next_ahead() == ((65,), SizeSpan("T", 65, 128, ahead=True))


def test_nothing_is_compiled_ahead_unless_that_is_wanted() -> None:
    assert variants(0, "T").next_ahead() is None
    assert variants(512, "H", "W").next_ahead() is None


def test_a_second_request_shows_what_grows() -> None:
    model = variants(100, "sequence", "past", "mask")
    model.ask((1, 0, 1))
    assert model.span_of((1, 0, 1)) is None
    assert model.next_ahead() is None
    model.ask((1, 1, 2))
    assert model.next_ahead() == ((1, 1, 2), SizeSpan("past", 1, 64, (("mask", 1),), ahead=True))
    assert model.next_ahead() == ((1, 65, 66), SizeSpan("past", 65, 128, (("mask", 1),), ahead=True))
    assert model.next_ahead() is None


def test_what_grows_does_so_for_other_sizes_of_the_other_symbols() -> None:
    model = variants(64, "source", "past")
    for past in (1, 2):
        model.ask((7, past))
    assert model.span_of((7, 3)) == SizeSpan("past", 1, 64, ahead=True)
    assert model.span_of((30, 1)) == SizeSpan("past", 1, 64, ahead=True)
    assert model.span_of((30, 2)) is None
    model.forget_spans((7, 64))
    assert model.span_of((30, 2)) is None
    assert model.span_of((7, 2)) == SizeSpan("past", 1, 64, ahead=True)


def test_prompts_and_steps_grow_each_for_itself() -> None:
    model = variants(64, "sequence", "past")
    for sizes in ((3, 0), (5, 0), (1, 5), (1, 6), (1, 7)):
        model.ask(sizes)
    made = [found for _ in range(2) if (found := model.next_ahead())]
    assert sorted(made) == [
        ((1, 0), SizeSpan("sequence", 1, 64, ahead=True)),
        ((1, 1), SizeSpan("past", 1, 64, ahead=True)),
    ]
    assert model.next_ahead() is None
