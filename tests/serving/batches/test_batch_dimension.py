"""`gangway serve` with models whose first dimension is a batch, may be one, or is a size like others."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.conftest import CompileKept
from tests.helpers import onnx_text
from tests.helpers.served import Served, serving

MANY = 12  # requests that wait at the same time
BATCH = 6
TOGETHER = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 60000 }"
SUM_STATE = """max_batch_size: 8 input { name: "x" } output { name: "y" } sequence_batching {
    oldest { max_candidate_sequences: 16 max_queue_delay_microseconds: 60000 }
    state { input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ 2 ] } }"""
STEPS = """platform: "ensemble" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
    ensemble_scheduling { step { model_name: "branch" model_version: -1
        input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }"""
MEAN = "m = ReduceMean<axes = [0], keepdims = 1>(x) y = Sub(x, m)"
BRANCH = """chance = RandomUniform<shape = [1], low = 1.0, high = 2.0>() yes = Cast<to = 9>(chance)
    y = If<then_branch = t () => (float[n, 2] o) {%s}, else_branch = e () => (float[n, 2] o) {o = Identity(x)}>(yes)"""
POOL = """d = AveragePool<kernel_shape = [16, 16], strides = [16, 16]>(x)
    u = Resize<mode = "nearest">(d, none, scales) y = Add(x, u)"""


@dataclass(frozen=True)
class Model:
    """A graph in ONNX's text form, what config.pbtxt says, and sizes of symbols to compile in advance."""

    graph: str
    config: str = ""
    sizes: tuple[dict[str, int], ...] = ({},)


def rows_model(body: str, config: str = "", sizes: tuple[dict[str, int], ...] = ({},)) -> Model:
    return Model(f"(float[n, 2] x) => (float[n, 2] y) {{{body}}}", config, sizes)


WHOLE = 'input { name: "x" dims: [ -1, 2 ] }'
MODELS = {
    "centre": rows_model(MEAN, TOGETHER),
    "branch": rows_model(BRANCH % MEAN.replace("y =", "o ="), TOGETHER),
    "harmless": rows_model(BRANCH % "o = Relu(x)", TOGETHER),
    "texts": Model(
        "(float[n, 2] x) => (string[n] y) {p = ArgMax<axis = 1, keepdims = 0>(x) y = Gather(words, p)}", TOGETHER
    ),
    "lengths": Model(f"(float[n, S] x) => (float[n, S] y) {{{MEAN}}}", TOGETHER),
    "sums": Model(
        f"(float[n, 2] x, float[n, 2] s) => (float[n, 2] y, float[n, 2] t) {{{MEAN} t = Add(s, y)}}", SUM_STATE
    ),
    "double": rows_model("y = Add(x, x)", WHOLE),
    "automatic": rows_model("y = Add(x, x)"),
    "centre_whole": rows_model(MEAN, WHOLE, ({}, {"n": 3})),
    "pictures": Model(
        "(float[n, 1, H, W] x) => (float[n, 1, H, W] y) {y = Relu(x)}",
        'input { name: "x" dims: [ -1, 1, -1, -1 ] }',
        ({}, {"H": 2, "W": 3}),
    ),
    "two": Model(
        "(float[n, 2] x, float[m, 2] z) => (float[n, 2] y, float[m, 2] u) {y = Relu(x) u = Relu(z)}",
        WHOLE + 'input { name: "z" dims: [ -1, 2 ] }',
    ),
    "masked": Model("(float[n, S] x, float[m, S] z) => (float[n, S] y) {y = Mul(x, z)}", "", ({}, {"S": 3})),
    "scores": Model("(float[n, S] x, float[m, S] z) => (float[n, m] y) {t = Transpose(z) y = MatMul(x, t)}"),
    "detector": Model(f"(float[D0, 1, H, W] x) => (float[D3, 1, P, Q] y) {{{POOL}}}", "max_batch_size: 8"),
    "one_size": Model(
        "(float[n, 1, H, W] x) => (float[n, 1, H, W] y) {y = Relu(x)}",
        'max_batch_size: 4 input { name: "x" dims: [ 1, 8, 16 ] } output { name: "y" dims: [ 1, -1, -1 ] }',
        ({}, {"H": 8, "W": 16}),
    ),
    "fixed": Model("(float[1, 2] x) => (float[1, 2] y) {y = Relu(x)}", "max_batch_size: 8", ()),
    "places": Model("(float[n, 2] x) => (int64[m, 2] y) {t = NonZero(x) y = Transpose(t)}", "max_batch_size: 8"),
}
ENSEMBLES = {
    "steps": STEPS,
    "whole_steps": STEPS.replace("branch", "double").replace("max_batch_size: 8", "").replace("[ 2 ]", "[ -1, 2 ]"),
}
LOADED = [name for name in MODELS if name not in ("fixed", "places")]
CONSTANTS: dict[str, Any] = {
    "scales": np.array([1, 1, 16, 16], np.float32),
    "none": np.zeros(0, np.float32),
    "words": np.array(["first", "second"], object),
}


class Batches(Served):
    def answer(self, model: str, x: Any, **options: Any) -> Any:
        return self.ask(model, {"x": x}, **options)["y"]

    def together(self, model: str, columns: int = 2, **options: Any) -> list[Any]:
        """Send single rows that wait for each other; return the answers."""
        with ThreadPoolExecutor(MANY) as pool:
            rows = [np.full((1, columns), number, np.float32) for number in range(MANY)]
            extra = [{name: first + number for name, first in options.items()} for number in range(MANY)]
            return list(pool.map(lambda row, more: self.answer(model, row, **more), rows, extra))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Iterator[Batches]:
    repository, cache_dir = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("cache")
    for name, model in MODELS.items():
        used = {key: value for key, value in CONSTANTS.items() if key in model.graph}
        path = onnx_text.save(repository, name, model.graph, model.config, **used)
        for sizes in model.sizes:
            compile_kept(path, name, cache_dir, dimensions=sizes)
    for name, config in ENSEMBLES.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    path = repository / "two" / "1" / "model.onnx"
    compile_kept(path, "two", cache_dir, whole=True)
    flags = [f"--cache-dir={cache_dir}", f"--backend-config=onnxruntime,default-max-batch-size={BATCH}"]
    flags += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in (*LOADED, *ENSEMBLES))]
    with serving(repository, *flags, kind=Batches) as served:
        yield served


def test_what_cannot_be_a_batch_is_refused_with_a_remedy(served: Batches) -> None:
    remedy = "export it with a symbolic first dimension, or set max_batch_size: 0 and write the batch in dims"
    with pytest.raises(InferenceServerException, match=rf"input 'x' .* \[1, 2\]: {remedy}"):
        served.client.load_model("fixed")
    assert not served.lines("compiling fixed"), "it is checked first"
    with pytest.raises(InferenceServerException, match="a run with zeros shows"):
        served.client.load_model("places")


@pytest.mark.parametrize(("name", "columns"), [("centre", 2), ("branch", 2), ("lengths", 3), ("steps", 2)])
def test_rows_that_influence_each_other_are_never_joined(served: Batches, name: str, columns: int) -> None:
    """Each row is less its own mean over the batch, which is the row."""
    assert not any(answer.any() for answer in served.together(name, columns))
    if name != "steps":
        assert len(served.lines(rf"WARNING .*{name}, version 1: every request runs alone, .+")) == 1
        assert served.client.get_model_config(name).config.parameters["batching"].string_value == "off"


def test_sequences_that_influence_each_other_are_never_joined(served: Batches) -> None:
    for start in (True, False):
        answers = served.together("sums", sequence_id=1) if not start else _started(served)
        assert not any(answer.any() for answer in answers)


def _started(served: Batches) -> list[Any]:
    row = np.ones((1, 2), np.float32)
    return [served.answer("sums", row, sequence_id=1 + number, sequence_start=True) for number in range(MANY)]


def test_rows_that_do_not_are_joined(served: Batches) -> None:
    """The compiler does not know what a branch does: it is tested when the model is loaded."""
    assert [answer[0, 0] for answer in served.together("harmless")] == list(range(MANY))
    assert served.statistics("harmless").execution_count < MANY
    assert not served.lines("harmless, version 1: every request runs alone")


def test_rows_with_a_string_each_are_joined(served: Batches) -> None:
    """A model that is tested at its load, as `harmless`; its answers are lines of strings, not of numbers."""
    assert [answer.tolist() for answer in served.together("texts")] == [[b"first"]] * MANY
    assert served.statistics("texts").execution_count < MANY


@pytest.mark.parametrize("name", ["double", "centre_whole", "whole_steps"])
def test_any_number_of_rows_without_max_batch_size(served: Batches, name: str) -> None:
    for count in (1, 5, 300, 0, 3):
        x = np.arange(2 * count, dtype=np.float32).reshape(count, 2)
        expected = x - (x.mean(0) if count else 0) if name == "centre_whole" else 2 * x
        np.testing.assert_allclose(served.infer(name, x=x)["y"], expected, rtol=1e-5)


def test_any_number_of_rows_of_any_size(served: Batches) -> None:
    for count in (1, 5, 0, 40):
        x = -np.ones((count, 1, 2, 3), np.float32)
        answer = served.infer("pictures", x=x)["y"]
        assert answer.shape == x.shape and not answer.any()


def test_first_dimensions_of_other_names_may_differ(served: Batches) -> None:
    assert served.infer("two", x=np.ones((2, 2), np.float32), z=np.ones((3, 2), np.float32))["y"].shape == (2, 2)


def test_first_dimensions_of_other_names_are_the_batch_of_rows_that_are_known_to_be_apart(served: Batches) -> None:
    sizes = {name: served.client.get_model_config(name).config.max_batch_size for name in ("masked", "scores")}
    assert sizes == {"masked": BATCH, "scores": 0}
    two, three = np.full((2, 3), 2, np.float32), np.full((3, 3), 3, np.float32)
    np.testing.assert_array_equal(served.infer("masked", x=three, z=three)["y"], 3 * three)
    np.testing.assert_array_equal(served.infer("scores", x=two, z=three)["y"], np.full((2, 3), 18, np.float32))
    with pytest.raises(InferenceServerException, match="batch"):
        served.infer("masked", x=two, z=three)["y"]


def test_sizes_that_trials_do_not_know_refuse_nothing(served: Batches) -> None:
    answer = served.infer("detector", x=np.ones((2, 1, 32, 48), np.float32))["y"]
    assert answer.shape == (2, 1, 32, 48) and (answer == 2).all()


def test_sizes_that_the_configuration_fixes_are_compiled_first(served: Batches) -> None:
    assert served.parameter("one_size", "gangway_engine") == "native"
    x = np.random.default_rng(0).standard_normal((3, 1, 8, 16)).astype(np.float32)
    np.testing.assert_array_equal(served.infer("one_size", x=x)["y"], np.maximum(x, 0))
    with pytest.raises(InferenceServerException, match="unexpected shape"):
        served.infer("one_size", x=x[:, :, :, :8])["y"]


def test_the_default_batch(served: Batches) -> None:
    config = served.client.get_model_config("automatic").config
    assert config.max_batch_size == BATCH
    assert config.HasField("dynamic_batching"), "as Triton completes it"
    assert served.client.get_model_config("double").config.max_batch_size == 0
    assert served.infer("automatic", x=np.ones((BATCH, 2), np.float32))["y"].shape == (BATCH, 2)
    with pytest.raises(InferenceServerException, match=f"must be <= {BATCH}"):
        served.infer("automatic", x=np.ones((BATCH + 1, 2), np.float32))["y"]
