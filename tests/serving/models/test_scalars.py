"""Scalar inputs and outputs: Triton has none, so its configurations and clients say [1]."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.utils import InferenceServerException

from gangway.artifact.cache import Cache
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.check.command import main as check
from gangway.server.control.repository.completed_config import complete_config
from gangway.server.errors import ConfigError
from tests.helpers import ensemble_configs, onnx_text, python_models
from tests.helpers.served import Served, serving
from tests.helpers.ways import WAYS

DIMS = 'input {{name: "x" data_type: TYPE_FP32 dims: [4]}} input {{name: "k" data_type: TYPE_FP32 {0}}} '
MADE = 'output {{name: "y" data_type: TYPE_FP32 dims: [4]}} output {{name: "total" data_type: TYPE_FP32 {0}}}'
FORMS = {
    "none": "",
    "undeclared": "max_batch_size: 0",
    "ones": DIMS.format("dims: [1]") + MADE.format("dims: [1]"),
    "reshaped": DIMS.format("dims: [1] reshape: {shape: []}") + MADE.format("dims: [1] reshape: {shape: []}"),
    "two_ones": DIMS.format("dims: [1, 1]") + MADE.format("dims: [1, 1]"),
}
OWN = {"none": (), "undeclared": (), "two_ones": (1, 1)}  # what clients see; (1,) of all others
ASKS = """
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            found = []
            for name in ("ones", "none"):
                for k in (np.array([3], np.float32), np.array(3, np.float32)):
                    feeds = [pb_utils.Tensor("x", x), pb_utils.Tensor("k", k)]
                    asked = pb_utils.InferenceRequest(model_name=name, inputs=feeds, requested_output_names=["total"])
                    answer = asked.exec()
                    if answer.has_error():
                        raise pb_utils.TritonModelException(answer.error().message())
                    found.append(float(answer.output_tensors()[0].as_numpy().reshape(-1)[0]))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(found, np.float32))]))
        return responses
"""


# y = x * k, total = the sum of y. Models of all forms are the same file, which is compiled once.
PRODUCT = """(float[4] x, float k) => (float[4] y, float total) {
    y = Mul(x, k)
    total = ReduceSum<keepdims=0>(y)
}"""
# A string makes onnxruntime execute it.
WITH_TEXT = """(float[4] x, float k, string word) => (float[4] y, float total, string same) {
    y = Mul(x, k)
    total = ReduceSum<keepdims=0>(y)
    same = Identity(word)
}"""
# What a scalar says decides what is computed: x + 1, or x + 2.
CHOICE = """(float[4] x, int64 sr) => (float[4] y) {
    rate = Constant<value_int=16000>()
    is = Equal(sr, rate)
    y = If(is) <
        then_branch = b1 () => (float[4] y1) { c = Constant<value_float=1.0>() y1 = Add(x, c) },
        else_branch = b2 () => (float[4] y2) { c = Constant<value_float=2.0>() y2 = Add(x, c) }
    >
}"""
CHOOSES = (
    'input {name: "x" data_type: TYPE_FP32 dims: [4]} input {name: "sr" data_type: TYPE_INT64 dims: [1]}'
    ' output {name: "y" data_type: TYPE_FP32 dims: [4]}'
)
# A scalar state that counts, from the start of a sequence on, which a scalar control tells.
COUNTER = """(float[4] x, float n, float START) => (float[4] y, float n_out) {
    one = Constant<value_float=1.0>()
    goes_on = Sub(one, START)
    before = Mul(n, goes_on)
    n_out = Add(before, one)
    y = Mul(x, n_out)
}"""
COUNTS = """input {name: "x" data_type: TYPE_FP32 dims: [4]} output {name: "y" data_type: TYPE_FP32 dims: [4]}
    sequence_batching {
        control_input {name: "START" control {kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1]}}
        state {input_name: "n" output_name: "n_out" data_type: TYPE_FP32 dims: [1]}
    }"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    for name, config in FORMS.items():
        onnx_text.save(repository, name, PRODUCT, config)
    onnx_text.save(repository, "text_none", WITH_TEXT)
    word = '{group} {{name: "{name}" data_type: TYPE_STRING dims: [1]}} '
    words = word.format(group="input", name="word") + word.format(group="output", name="same")
    onnx_text.save(repository, "text_ones", WITH_TEXT, FORMS["ones"] + words)
    onnx_text.save(repository, "choice", CHOICE, CHOOSES)
    onnx_text.save(repository, "counter", COUNTER, COUNTS)
    python_models.write(repository, "asks", ASKS)
    steps = [("ones", "x=x k=k", "y=z total=t"), ("none", "x=z k=t", "y=y total=total")]
    ensemble = ensemble_configs.config_of("x:FP32:4 k:FP32:1", "y:FP32:4 total:FP32:1", steps, batch=0)
    ensemble_configs.write(repository, "ensemble", ensemble)
    for name in ("ones", "choice", "counter", "text_ones"):
        compile_model(repository / name / "1" / "model.onnx", name, Cache(model_cache), detect(), lambda *_: None)
    with serving(repository, f"--cache-dir={model_cache}") as served:
        yield served


X = np.arange(1, 5, dtype=np.float32)


def shapes_of(name: str) -> list[tuple[int, ...]]:
    return list(dict.fromkeys([(), (1,), OWN.get(name, (1,))]))


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_a_configuration(served: Served, name: str) -> None:
    own = OWN.get(name, (1,))
    metadata = served.client.get_model_metadata(name)
    assert [tuple(tensor.shape) for tensor in (*metadata.inputs, *metadata.outputs)] == [(4,), own, (4,), own]
    for shape in shapes_of(name):
        answer = served.ask(name, {"x": X, "k": np.full(shape, 2.5, np.float32)})
        np.testing.assert_allclose(answer["y"], X * 2.5)
        assert answer["total"].shape == own
        assert answer["total"].item() == 25
    for shape in ((2,), (1, 1, 1), (0,), (1, 1) if own != (1, 1) else (4,)):
        with pytest.raises(InferenceServerException, match="unexpected shape for input 'k'"):
            served.ask(name, {"x": X, "k": np.full(shape, 2.5, np.float32)})


@pytest.mark.parametrize("name", ["text_none", "text_ones"])
def test_models_for_onnxruntime(served: Served, name: str) -> None:
    own = OWN.get(name.removeprefix("text_"), (1,))
    for shape in ((), (1,)):
        feeds = {"x": X, "k": np.full(shape, 2.5, np.float32), "word": np.full(shape, "é", object)}
        answer = served.ask(name, feeds)
        assert (answer["total"].shape, answer["total"].item()) == (own, 25)
        assert (answer["same"].shape, answer["same"].item()) == (own, "é".encode())


def test_a_value_that_decides(served: Served) -> None:
    for rate, more in ((16000, 1), (8000, 2), (16000, 1)):
        for shape in ((1,), ()):
            answer = served.ask("choice", {"x": X, "sr": np.full(shape, rate, np.int64)})
            np.testing.assert_array_equal(answer["y"], X + more)


def test_a_state_and_a_control(served: Served) -> None:
    for sequence in (1, 2):
        for step in (1, 2, 3):
            flags = {"sequence_id": sequence, "sequence_start": step == 1, "sequence_end": step == 3}
            np.testing.assert_array_equal(served.ask("counter", {"x": X}, **flags)["y"], X * step)


def test_steps_of_an_ensemble(served: Served) -> None:
    answer = served.ask("ensemble", {"x": X, "k": np.array([2], np.float32)})
    np.testing.assert_array_equal(answer["y"], X * 2 * 20)
    assert (answer["total"].shape, answer["total"].item()) == ((1,), 400)


def test_a_python_model_that_asks(served: Served) -> None:
    np.testing.assert_array_equal(served.ask("asks", {"x": X})["y"], [30, 30, 30, 30])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["none", "ones"])
def test_each_way_to_ask(served: Served, name: str, way: str) -> None:
    for shape in ((), (1,)):
        total = served.over(way, name, ["total"], x=X, k=np.full(shape, 2.5, np.float32))["total"]
        assert (total.shape, total.item()) == (OWN.get(name, (1,)), 25)


@pytest.mark.long
def test_check_finds_nothing_to_mend(served: Served, model_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_text() for path in served.repository.glob("*/config.pbtxt")}
    check([str(served.repository), f"--cache-dir={model_cache}", "--fix"])
    assert "dims" not in capsys.readouterr().out
    assert {path: path.read_text() for path in served.repository.glob("*/config.pbtxt")} == before


def test_other_dims_of_a_scalar_are_refused(served: Served, model_cache: Path) -> None:
    path = served.repository / "ones" / "1" / "model.onnx"
    made = compile_model(path, "ones", Cache(model_cache), detect(), lambda *_: None).manifest
    text = FORMS["ones"].replace('"k" data_type: TYPE_FP32 dims: [1]', '"k" dims: [2]')
    with pytest.raises(ConfigError, match=r"input 'k': dims are \[2\], but the ONNX model has \[\]"):
        complete_config(text_format.Parse(text, ModelConfig()), "ones", made.inputs, made.outputs, made.batched)
