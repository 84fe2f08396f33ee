"""Scalar inputs and outputs: Triton has none, so its configurations and clients say [1]."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from google.protobuf import text_format
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from gangway.artifact.cache import Cache
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.check.command import main as check
from gangway.server.control.repository.completed_config import complete_config
from gangway.server.errors import ConfigError
from testing.live_server import LiveServer, live_server
from tests.helpers import ensemble_configs, python_models
from tests.helpers.python_models import Array, inputs_of

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
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


def save(repository: Path, name: str, config: str, foreign: bool = False) -> None:
    """y = x * k, total = the sum of y; of `foreign` ones a string makes onnxruntime execute them.

    Models of all forms are the same file, which is compiled once.
    """
    info, node = helper.make_tensor_value_info, helper.make_node
    nodes = [node("Mul", ["x", "k"], ["y"]), node("ReduceSum", ["y"], ["total"], keepdims=0)]
    given, made = [info("x", FLOAT, [4]), info("k", FLOAT, [])], [info("y", FLOAT, [4]), info("total", FLOAT, [])]
    if foreign:
        nodes.append(node("Identity", ["word"], ["same"]))
        given.append(info("word", TensorProto.STRING, []))
        made.append(info("same", TensorProto.STRING, []))
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    graph = helper.make_graph(nodes, "product", given, made)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    if config:
        (repository / name / "config.pbtxt").write_text(config)


def save_choice(repository: Path) -> None:
    """What a scalar says decides what is computed: x + 1, or x + 2."""
    info, node = helper.make_tensor_value_info, helper.make_node
    branches = []
    for number in (1.0, 2.0):
        constant = node("Constant", [], ["c"], value=helper.make_tensor("v", FLOAT, [], [number]))
        nodes = [constant, node("Add", ["x", "c"], [f"y{number:g}"])]
        branches.append(helper.make_graph(nodes, f"b{number:g}", [], [info(f"y{number:g}", FLOAT, [4])]))
    nodes = [
        node("Constant", [], ["rate"], value=helper.make_tensor("v", INT64, [], [16000])),
        node("Equal", ["sr", "rate"], ["is"]),
        node("If", ["is"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    graph = helper.make_graph(nodes, "g", [info("x", FLOAT, [4]), info("sr", INT64, [])], [info("y", FLOAT, [4])])
    folder = repository / "choice" / "1"
    folder.mkdir(parents=True)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    (repository / "choice" / "config.pbtxt").write_text(
        'input {name: "x" data_type: TYPE_FP32 dims: [4]} input {name: "sr" data_type: TYPE_INT64 dims: [1]}'
        ' output {name: "y" data_type: TYPE_FP32 dims: [4]}'
    )


def save_counter(repository: Path) -> None:
    """A scalar state that counts, from the start of a sequence on, which a scalar control tells."""
    info, node = helper.make_tensor_value_info, helper.make_node
    nodes = [
        node("Constant", [], ["one"], value=helper.make_tensor("v", FLOAT, [], [1.0])),
        node("Sub", ["one", "START"], ["goes_on"]),
        node("Mul", ["n", "goes_on"], ["before"]),
        node("Add", ["before", "one"], ["n_out"]),
        node("Mul", ["x", "n_out"], ["y"]),
    ]
    given = [info("x", FLOAT, [4]), info("n", FLOAT, []), info("START", FLOAT, [])]
    graph = helper.make_graph(nodes, "g", given, [info("y", FLOAT, [4]), info("n_out", FLOAT, [])])
    folder = repository / "counter" / "1"
    folder.mkdir(parents=True)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    (repository / "counter" / "config.pbtxt").write_text(
        """input {name: "x" data_type: TYPE_FP32 dims: [4]} output {name: "y" data_type: TYPE_FP32 dims: [4]}
        sequence_batching {
            control_input {name: "START" control {kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1]}}
            state {input_name: "n" output_name: "n_out" data_type: TYPE_FP32 dims: [1]}
        }"""
    )


@dataclass(frozen=True)
class Served:
    server: LiveServer
    client: triton.InferenceServerClient
    repository: Path
    cache_dir: Path

    def infer(self, name: str, feeds: dict[str, Array]) -> dict[str, Array]:
        result = self.client.infer(name, inputs_of(feeds), client_timeout=60)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository, cache_dir = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("cache")
    for name, config in FORMS.items():
        save(repository, name, config)
    save(repository, "text_none", "", foreign=True)
    word = '{group} {{name: "{name}" data_type: TYPE_STRING dims: [1]}} '
    words = word.format(group="input", name="word") + word.format(group="output", name="same")
    save(repository, "text_ones", FORMS["ones"] + words, foreign=True)
    save_choice(repository)
    save_counter(repository)
    python_models.write(repository, "asks", ASKS)
    steps = [("ones", "x=x k=k", "y=z total=t"), ("none", "x=z k=t", "y=y total=total")]
    ensemble = ensemble_configs.config_of("x:FP32:4 k:FP32:1", "y:FP32:4 total:FP32:1", steps, batch=0)
    ensemble_configs.write(repository, "ensemble", ensemble)
    for name in ("ones", "choice", "counter", "text_ones"):
        compile_model(repository / name / "1" / "model.onnx", name, Cache(cache_dir), detect(), lambda *_: None)
    with (
        live_server(repository, [f"--cache-dir={cache_dir}", "--no-profile"]) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        yield Served(server, client, repository, cache_dir)


X = np.arange(1, 5, dtype=np.float32)


def shapes_of(name: str) -> list[tuple[int, ...]]:
    return list(dict.fromkeys([(), (1,), OWN.get(name, (1,))]))


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_a_configuration(served: Served, name: str) -> None:
    own = OWN.get(name, (1,))
    metadata = served.client.get_model_metadata(name)
    assert [tuple(tensor.shape) for tensor in (*metadata.inputs, *metadata.outputs)] == [(4,), own, (4,), own]
    for shape in shapes_of(name):
        answer = served.infer(name, {"x": X, "k": np.full(shape, 2.5, np.float32)})
        np.testing.assert_allclose(answer["y"], X * 2.5)
        assert answer["total"].shape == own
        assert answer["total"].item() == 25
    for shape in ((2,), (1, 1, 1), (0,), (1, 1) if own != (1, 1) else (4,)):
        with pytest.raises(InferenceServerException, match="unexpected shape for input 'k'"):
            served.infer(name, {"x": X, "k": np.full(shape, 2.5, np.float32)})


@pytest.mark.parametrize("name", ["text_none", "text_ones"])
def test_models_for_onnxruntime(served: Served, name: str) -> None:
    own = OWN.get(name.removeprefix("text_"), (1,))
    for shape in ((), (1,)):
        feeds = {"x": X, "k": np.full(shape, 2.5, np.float32), "word": np.full(shape, "é", object)}
        answer = served.infer(name, feeds)
        assert (answer["total"].shape, answer["total"].item()) == (own, 25)
        assert (answer["same"].shape, answer["same"].item()) == (own, "é".encode())


def test_a_value_that_decides(served: Served) -> None:
    for rate, more in ((16000, 1), (8000, 2), (16000, 1)):
        for shape in ((1,), ()):
            answer = served.infer("choice", {"x": X, "sr": np.full(shape, rate, np.int64)})
            np.testing.assert_array_equal(answer["y"], X + more)


def test_a_state_and_a_control(served: Served) -> None:
    for sequence in (1, 2):
        for step in (1, 2, 3):
            flags = {"sequence_id": sequence, "sequence_start": step == 1, "sequence_end": step == 3}
            result = served.client.infer("counter", inputs_of({"x": X}), client_timeout=60, **flags)
            np.testing.assert_array_equal(result.as_numpy("y"), X * step)


def test_steps_of_an_ensemble(served: Served) -> None:
    answer = served.infer("ensemble", {"x": X, "k": np.array([2], np.float32)})
    np.testing.assert_array_equal(answer["y"], X * 2 * 20)
    assert (answer["total"].shape, answer["total"].item()) == ((1,), 400)


def test_a_python_model_that_asks(served: Served) -> None:
    np.testing.assert_array_equal(served.infer("asks", {"x": X})["y"], [30, 30, 30, 30])


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", ["none", "ones"])
def test_http(served: Served, name: str, binary: bool) -> None:
    with triton_http.InferenceServerClient(served.server.http_url, network_timeout=60) as client:
        for shape in ((), (1,)):
            inputs: list[Any] = []
            for key, value in {"x": X, "k": np.full(shape, 2.5, np.float32)}.items():
                inputs.append(triton_http.InferInput(key, list(value.shape), "FP32"))
                inputs[-1].set_data_from_numpy(value, binary_data=binary)
            outputs = [triton_http.InferRequestedOutput("total", binary_data=binary)]
            total = client.infer(name, inputs, outputs=outputs).as_numpy("total")
            assert (total.shape, total.item()) == (OWN.get(name, (1,)), 25)


@pytest.mark.long
def test_check_finds_nothing_to_mend(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_text() for path in served.repository.glob("*/config.pbtxt")}
    check([str(served.repository), f"--cache-dir={served.cache_dir}", "--fix"])
    assert "dims" not in capsys.readouterr().out
    assert {path: path.read_text() for path in served.repository.glob("*/config.pbtxt")} == before


def test_other_dims_of_a_scalar_are_refused(served: Served) -> None:
    path = served.repository / "ones" / "1" / "model.onnx"
    made = compile_model(path, "ones", Cache(served.cache_dir), detect(), lambda *_: None).manifest
    text = FORMS["ones"].replace('"k" data_type: TYPE_FP32 dims: [1]', '"k" dims: [2]')
    with pytest.raises(ConfigError, match=r"input 'k': dims are \[2\], but the ONNX model has \[\]"):
        complete_config(text_format.Parse(text, ModelConfig()), "ones", made.inputs, made.outputs, made.batched)
