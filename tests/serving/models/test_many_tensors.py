"""Models with more inputs and outputs than a slot has room for: by all protocols, and by all that executes them."""

import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from gangway.artifact.cache import Cache
from gangway.artifact.format import MAX_TENSORS
from gangway.compiler.errors import ModelError
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.slots import INLINE_PLACES
from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import LiveServer, live_server
from testing.repository import GANGWAY
from tests.helpers import ensemble_configs, python_models
from tests.helpers.client_segments import Segments
from tests.helpers.python_models import Array, inputs_of
from tests.helpers.raw_stream import RawStream

TIMEOUT_S = 60
INPUTS, OUTPUTS = INLINE_PLACES + 9, INLINE_PLACES + 4
FLOAT, STRING = TensorProto.FLOAT, TensorProto.STRING
NAMES = [f"c{number}" for number in range(INPUTS)]

SUM = f"""
    def execute(self, requests):
        responses = []
        for request in requests:
            feeds = [pb_utils.Tensor(tensor.name(), tensor.as_numpy() * 2) for tensor in request.inputs()]
            names = [f"y{{number}}" for number in range({OUTPUTS})]
            asked = pb_utils.InferenceRequest(model_name="native", inputs=feeds, requested_output_names=names)
            answer = asked.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            tensors = [pb_utils.Tensor(t.name(), t.as_numpy() + np.float32(1)) for t in answer.output_tensors()]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""


def save(
    repository: Path,
    name: str,
    nodes: Sequence[Any],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: dict[str, tuple[int, list[Any]]],
    config: str = "",
) -> None:
    """Write a model; tensors by name: type and shape."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        list(nodes),
        name,
        [info(key, *value) for key, value in inputs.items()],
        [info(key, *value) for key, value in outputs.items()],
        [helper.make_tensor("two", FLOAT, [], [2.0])],
    )
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    if config:
        (repository / name / "config.pbtxt").write_text(config)


def save_sums(repository: Path, name: str, inputs: int, outputs: int, config: str = "") -> None:
    """y0 is the sum of all inputs [n, 1], y1 and so on are twice one of the last ones."""
    names = [f"c{number}" for number in range(inputs)]
    nodes = [
        helper.make_node("Concat", names, ["all"], axis=1),
        helper.make_node("ReduceMean", ["all"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Mul", ["mean", "count"], ["y0"]),
        helper.make_node("Constant", [], ["count"], value=helper.make_tensor("v", FLOAT, [], [float(inputs)])),
    ]
    nodes = [nodes[3], *nodes[:3]]
    for number in range(1, outputs):
        nodes.append(helper.make_node("Mul", [names[-number % inputs], "two"], [f"y{number}"]))
    given = {key: (FLOAT, ["n", 1]) for key in names}
    save(repository, name, nodes, given, {f"y{number}": (FLOAT, ["n", 1]) for number in range(outputs)}, config)


def save_texts(repository: Path) -> None:
    """Each output is an input: onnxruntime executes it."""
    nodes = [helper.make_node("Identity", [f"c{number}"], [f"y{number}"]) for number in range(INPUTS)]
    ends = [{f"{letter}{number}": (STRING, ["n"]) for number in range(INPUTS)} for letter in "cy"]
    save(repository, "texts", nodes, *ends)


def save_places(repository: Path) -> None:
    """Where the inputs [n, 1] are not 0: the size of the answer is known when it is computed."""
    nodes = [helper.make_node("Concat", NAMES, ["all"], axis=1), helper.make_node("NonZero", ["all"], ["y"])]
    save(repository, "places", nodes, {key: (FLOAT, ["n", 1]) for key in NAMES}, {"y": (TensorProto.INT64, [2, "m"])})


def save_counts(repository: Path) -> None:
    """Each of many states counts the steps, each with a pace of its own; y is their mean."""
    names = [f"s{number}" for number in range(INPUTS)]
    nodes = [helper.make_node("Mul", ["x", "zero"], ["nothing"])]
    nodes.insert(0, helper.make_node("Constant", [], ["zero"], value=helper.make_tensor("v", FLOAT, [], [0.0])))
    states = []
    for number, key in enumerate(names):
        pace = helper.make_tensor("v", FLOAT, [], [float(number)])
        nodes.append(helper.make_node("Constant", [], [f"pace{number}"], value=pace))
        nodes.append(helper.make_node("Add", [key, f"pace{number}"], [f"{key}.out"]))
        states.append(f'{{input_name: "{key}" output_name: "{key}.out" data_type: TYPE_FP32 dims: [1]}}')
    nodes.append(helper.make_node("Concat", [f"{key}.out" for key in names], ["all"], axis=1))
    nodes.append(helper.make_node("ReduceMean", ["all"], ["mean"], axes=[1], keepdims=1))
    nodes.append(helper.make_node("Add", ["mean", "nothing"], ["y"]))
    given = {key: (FLOAT, ["n", 1]) for key in ("x", *names)}
    made = {key: (FLOAT, ["n", 1]) for key in ("y", *(f"{key}.out" for key in names))}
    config = f"""max_batch_size: 4 input {{name: "x" data_type: TYPE_FP32 dims: [1]}}
        output {{name: "y" data_type: TYPE_FP32 dims: [1]}} sequence_batching {{state [{", ".join(states)}]}}"""
    save(repository, "counts", nodes, given, made, config)


@dataclass(frozen=True)
class Served:
    server: LiveServer
    client: triton.InferenceServerClient

    def infer(self, name: str, feeds: dict[str, Array], **more: Any) -> dict[str, Array]:
        result = self.client.infer(name, inputs_of(feeds), client_timeout=TIMEOUT_S, **more)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    save_sums(repository, "native", INPUTS, OUTPUTS, "max_batch_size: 8 dynamic_batching {}")
    save_sums(repository, "cached", INPUTS, OUTPUTS, "max_batch_size: 8 response_cache {enable: true}")
    save_sums(repository, "most_inputs", MAX_TENSORS, 1)
    save_sums(repository, "most_outputs", 1, MAX_TENSORS)
    save_texts(repository)
    save_places(repository)
    save_counts(repository)
    given = " ".join(f"{name}:FP32:1" for name in NAMES)
    made = " ".join(f"y{number}:FP32:1" for number in range(OUTPUTS))
    python_models.write(repository, "python", SUM, python_models.config_of(given, made, batch=8))
    flow = " ".join(f"{name}={name}" for name in NAMES), " ".join(f"y{each}=y{each}" for each in range(OUTPUTS))
    twice = [
        ("native", flow[0], " ".join(f"y{each}=t{each}" for each in range(OUTPUTS))),
        ("native", " ".join(f"{name}={'ct'[each < OUTPUTS]}{each}" for each, name in enumerate(NAMES)), flow[1]),
    ]
    for name, steps in (("ensemble", [("python", *flow)]), ("twice", twice)):
        ensemble_configs.write(repository, name, ensemble_configs.config_of(given, made, steps, batch=8))
    for name in ("native", "cached", "most_inputs", "most_outputs", "texts", "places", "counts"):  # one import of TVM
        compile_model(repository / name / "1" / "model.onnx", name, Cache(model_cache), detect(), lambda *_: None)
    flags = [f"--cache-dir={model_cache}", "--no-profile", "--cache-config=local,size=1048576"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Served(server, client)


def feeds_of(count: int = INPUTS, rows: int = 2, first: float = 1) -> dict[str, Array]:
    """Each number is another one."""
    values = first + np.arange(count * rows, dtype=np.float32).reshape(count, rows, 1)
    return {f"c{number}": value for number, value in enumerate(values)}


def expected_of(feeds: dict[str, Array], outputs: int = OUTPUTS) -> dict[str, Array]:
    values = list(feeds.values())
    made = {f"y{number}": values[-number % len(values)] * np.float32(2) for number in range(1, outputs)}
    return {"y0": np.sum(values, axis=0), **made}


def check(answer: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(answer) == list(expected)
    for name, value in expected.items():
        assert answer[name].shape == value.shape
        np.testing.assert_allclose(answer[name], value, rtol=1e-5, err_msg=name)


def test_a_compiled_model(served: Served) -> None:
    for name in ("native", "most_inputs", "most_outputs", "counts"):
        config = served.client.get_model_config(name, as_json=True)["config"]
        assert config["parameters"]["gangway_engine"]["string_value"] == "native", name
    for rows in (1, 3, 8):
        feeds = feeds_of(rows=rows)
        check(served.infer("native", feeds), expected_of(feeds))
    wanted = [triton.InferRequestedOutput("y0"), triton.InferRequestedOutput(f"y{OUTPUTS - 1}")]
    expected = expected_of(feeds)
    check(served.infer("native", feeds, outputs=wanted), {each.name(): expected[each.name()] for each in wanted})


@pytest.mark.parametrize("name", ["most_inputs", "most_outputs"])
def test_as_many_as_possible(served: Served, name: str) -> None:
    inputs, outputs = (MAX_TENSORS, 1) if name == "most_inputs" else (1, MAX_TENSORS)
    feeds = feeds_of(inputs)
    check(served.infer(name, feeds), expected_of(feeds, outputs))
    metadata = served.client.get_model_metadata(name)
    assert (len(metadata.inputs), len(metadata.outputs)) == (inputs, outputs)


def test_more_are_refused_when_the_model_is_compiled(tmp_path: Path) -> None:
    save_sums(tmp_path, "too_many", MAX_TENSORS + 1, 1)
    path = tmp_path / "too_many" / "1" / "model.onnx"
    with pytest.raises(ModelError, match=f"{MAX_TENSORS + 1} inputs; 1 to {MAX_TENSORS} are possible"):
        compile_model(path, "too_many", Cache(tmp_path), detect(), lambda *_: None)


def test_a_model_of_texts(served: Served) -> None:
    feeds = {f"c{i}": np.array([f"{i}", "é" * i], object) for i in range(INPUTS)}
    answer = served.infer("texts", feeds)
    for number in range(INPUTS):
        assert [text.decode() for text in answer[f"y{number}"]] == list(feeds[f"c{number}"])


def test_answers_whose_size_depends_on_data(served: Served) -> None:
    feeds = {name: np.array([[float(i % 2)], [float(i % 3)]], np.float32) for i, name in enumerate(NAMES)}
    np.testing.assert_array_equal(
        served.infer("places", feeds)["y"], np.nonzero(np.concatenate(list(feeds.values()), axis=1))
    )


@pytest.mark.parametrize("name", ["python", "ensemble"])
def test_a_python_model_that_asks_another_one(served: Served, name: str) -> None:
    feeds = feeds_of()
    expected = expected_of({key: value * 2 for key, value in feeds.items()})
    check(served.infer(name, feeds), {key: value + 1 for key, value in expected.items()})


def test_steps_that_are_compiled(served: Served) -> None:
    feeds = feeds_of(rows=3)
    inner = list(expected_of(feeds).values())
    between = {name: inner[number] if number < OUTPUTS else feeds[name] for number, name in enumerate(NAMES)}
    check(served.infer("twice", feeds), expected_of(between))


def test_requests_are_joined(served: Served) -> None:
    """Each of them gets its own rows back, whichever were computed together."""
    requests = [feeds_of(rows=1 + number % 3, first=number * 1000) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for feeds, answer in zip(requests, pool.map(partial(served.infer, "native"), requests), strict=True):
            check(answer, expected_of(feeds))


def test_states(served: Served) -> None:
    steps = 3
    for step in range(1, steps + 1):
        flags = {"sequence_id": 7, "sequence_start": step == 1, "sequence_end": step == steps}
        answer = served.infer("counts", {"x": np.zeros((1, 1), np.float32)}, **flags)
        assert answer["y"].item() == pytest.approx(step * (INPUTS - 1) / 2)


def test_the_response_cache(served: Served) -> None:
    feeds = feeds_of(first=5)
    for _ in range(3):
        check(served.infer("cached", feeds), expected_of(feeds))
    (model,) = served.client.get_inference_statistics("cached").model_stats
    assert model.inference_stats.cache_hit.count == 2


@pytest.mark.parametrize("name", ["native", "python", "ensemble"])
@pytest.mark.parametrize("binary", [True, False])
def test_http(served: Served, name: str, binary: bool) -> None:
    feeds = feeds_of()
    inputs, outputs = [], []
    for key, value in feeds.items():
        inputs.append(triton_http.InferInput(key, list(value.shape), "FP32"))
        inputs[-1].set_data_from_numpy(value, binary_data=binary)
    for number in range(OUTPUTS):
        outputs.append(triton_http.InferRequestedOutput(f"y{number}", binary_data=binary))
    with triton_http.InferenceServerClient(served.server.http_url, network_timeout=TIMEOUT_S) as client:
        result = client.infer(name, inputs, outputs=outputs)
    twice = name != "native"
    expected = expected_of({key: value * (1 + twice) for key, value in feeds.items()})
    answer = {key: result.as_numpy(key) for key in expected}
    check(answer, {key: value + twice for key, value in expected.items()})


def typed_request(feeds: dict[str, Array], name: str = "native") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=name)
    for key, value in feeds.items():
        tensor = request.inputs.add(name=key, datatype="FP32", shape=value.shape)
        tensor.contents.fp32_contents.extend(value.ravel())
    return request


def contents_of(response: pb.ModelInferResponse) -> dict[str, Array]:
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: np.frombuffer(raw, np.float32).reshape(output.shape) for output, raw in pairs}


def test_typed_contents_and_streams(served: Served) -> None:
    feeds = feeds_of()
    with grpc.insecure_channel(served.server.url) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        check(contents_of(call(typed_request(feeds), timeout=TIMEOUT_S)), expected_of(feeds))
    with RawStream(served.server.url) as stream:
        stream.send(typed_request(feeds))
        check(contents_of(stream.receive().infer_response), expected_of(feeds))


def test_regions(served: Served) -> None:
    """All inputs and outputs lie in a client's memory; large enough to be used there."""
    rows, segments = 8, Segments(served.client)
    feeds = feeds_of(rows=rows)
    tensor_bytes = rows * 4
    handle = segments.create("many", (INPUTS + OUTPUTS) * tensor_bytes)
    inputs, outputs = [], []
    for number, (key, value) in enumerate(feeds.items()):
        shm.set_shared_memory_region(handle, [value], number * tensor_bytes)
        inputs.append(triton.InferInput(key, [rows, 1], "FP32"))
        inputs[-1].set_shared_memory("many", tensor_bytes, number * tensor_bytes)
    for number in range(OUTPUTS):
        outputs.append(triton.InferRequestedOutput(f"y{number}"))
        outputs[-1].set_shared_memory("many", tensor_bytes, (INPUTS + number) * tensor_bytes)
    try:
        served.client.infer("native", inputs, outputs=outputs, client_timeout=TIMEOUT_S)
        for number, value in enumerate(expected_of(feeds).values()):
            at = (INPUTS + number) * tensor_bytes
            found = shm.get_contents_as_numpy(handle, np.float32, [rows, 1], at)
            np.testing.assert_allclose(found, value, rtol=1e-5)
    finally:
        served.client.unregister_system_shared_memory("many")
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("name", ["native", "simple", "most_outputs"])
def test_what_a_model_does_not_have_is_named(served: Served, name: str) -> None:
    """However many tensors a request has, it is the model that says which of them are too many."""
    known = {"native": INPUTS, "most_outputs": 1}.get(name, 0)
    feeds = feeds_of(INPUTS + 8)
    words = f"unexpected inference input 'c{known}' for model '{name}'" if known else "unknown model: 'simple'"
    with pytest.raises(InferenceServerException, match=words):
        served.infer(name, feeds)
    with (
        triton_http.InferenceServerClient(served.server.http_url, network_timeout=TIMEOUT_S) as client,
        pytest.raises(InferenceServerException, match=words),
    ):
        inputs = []
        for key, value in feeds.items():
            inputs.append(triton_http.InferInput(key, list(value.shape), "FP32"))
            inputs[-1].set_data_from_numpy(value)
        client.infer(name, inputs)


@pytest.mark.long
def test_the_perf_client(served: Served) -> None:
    command = [*GANGWAY, "perf", served.server.url, "--mix=native=1,python=1", "--rate=20", "--seconds=1", "--warmup=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
