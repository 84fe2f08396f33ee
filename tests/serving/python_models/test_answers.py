"""Answers of Python models that are unlike their configurations: passed on as they are, on all ways, or errors."""

import json
import math
import queue
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from testing.live_server import live_server
from tests.helpers import adder_models, ensemble_configs
from tests.helpers.client_segments import Segments
from tests.helpers.python_models import TIMEOUT_S, Array, Served, config_of, inputs_of, write
from tests.helpers.whole_server import until

TENSORS = """
    def execute(self, requests):
        self.made = {
            "as configured": {"y": np.ones((1, 2), np.float32)},
            "other type": {"y": np.ones((1, 2))},
            "whole numbers": {"y": np.ones((1, 2), np.int64)},
            "flags": {"y": np.ones((1, 2), bool)},
            "texts": {"y": np.array([[b"a", b"bc"]], dtype=object)},
            "other dimensions": {"y": np.ones((1, 7), np.float32)},
            "other rank": {"y": np.ones((2, 1, 3, 1, 2), np.float16)},
            "more rows": {"y": np.ones((4, 2), np.float32)},
            "a scalar": {"y": np.ones((), np.int8)},
            "a text": {"y": np.array(b"a", dtype=object)},
            "empty": {"y": np.ones((0, 2), np.float32)},
            "empty, no rank": {"y": np.ones(0, np.float64)},
            "missing": {},
            "stranger": {"stranger": np.zeros(3), "y": np.ones((1, 2), np.float32)},
            "large": {"y": np.ones((3, 700_000))},
        }
        return [pb_utils.InferenceResponse(self.tensors(request)) for request in requests]

    def tensors(self, request):
        what = pb_utils.get_input_tensor_by_name(request, "x").as_numpy().ravel()[0].decode()
        z = pb_utils.Tensor("z", np.full((1, 1), 3, np.int32))
        if what == "twice":
            return [pb_utils.Tensor("y", np.full((1, 2), value, np.float32)) for value in (1, 2)] + [z]
        if what == "bits":
            return [BITS, z]
        return [pb_utils.Tensor(name, array) for name, array in self.made[what].items()] + [z]
"""
SENDS = (
    TENSORS.replace(
        "return [pb_utils.InferenceResponse(self.tensors(request)) for request in requests]",
        "for request in requests:\n            self.answer(request)",
    )
    + """
    def answer(self, request):
        sender = request.get_response_sender()
        sender.send(pb_utils.InferenceResponse(self.tensors(request)))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
ASKS = """
    def execute(self, requests):
        responses = []
        for request in requests:
            answer = pb_utils.InferenceRequest(model_name="plain", inputs=request.inputs(),
                requested_output_names=["y", "z"]).exec()
            assert not answer.has_error(), answer.error().message()
            responses.append(pb_utils.InferenceResponse(answer.output_tensors()))
        return responses
"""
# numpy has no BF16: a capsule whose type is changed has it.
HEAD = """
import ctypes
import numpy as np
import triton_python_backend_utils as pb_utils

bits = np.array([[0x3F80, 0x4000]], np.uint16).__dlpack__()
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
ctypes.c_uint8.from_address(pointer(bits, b"dltensor") + 20).value = 4
BITS = pb_utils.Tensor.from_dlpack("y", bits)


"""


class Given(NamedTuple):
    """What a client finds of y. `content`: raw; None where it is only counted."""

    datatype: str
    shape: tuple[int, ...]
    content: bytes


def given(datatype: str, array: Array) -> Given:
    return Given(datatype, array.shape, array.tobytes())


TEXTS = b"\1\0\0\0a\2\0\0\0bc"
KINDS: Mapping[str, Given | None] = {
    "as configured": given("FP32", np.ones((1, 2), np.float32)),
    "other type": given("FP64", np.ones((1, 2))),
    "whole numbers": given("INT64", np.ones((1, 2), np.int64)),
    "flags": given("BOOL", np.ones((1, 2), bool)),
    "texts": Given("BYTES", (1, 2), TEXTS),
    "other dimensions": given("FP32", np.ones((1, 7), np.float32)),
    "other rank": given("FP16", np.ones((2, 1, 3, 1, 2), np.float16)),
    "more rows": given("FP32", np.ones((4, 2), np.float32)),
    "a scalar": given("INT8", np.ones((), np.int8)),
    "a text": Given("BYTES", (), TEXTS[:5]),
    "empty": given("FP32", np.ones((0, 2), np.float32)),
    "empty, no rank": given("FP64", np.ones(0, np.float64)),
    "missing": None,
    "stranger": given("FP32", np.ones((1, 2), np.float32)),
    "twice": given("FP32", np.ones((1, 2), np.float32)),
    "bits": Given("BF16", (1, 2), b"\x80\x3f\0\x40"),
    "large": given("FP64", np.ones((3, 700_000))),
}
NO_JSON = ("other rank", "bits", "large")  # Triton's JSON has neither FP16 nor BF16; the large one takes long
STRICT = {
    "whole numbers": "output 'y' is of type INT64, but the configuration says FP32",
    "texts": "output 'y' is of type BYTES, but the configuration says FP32",
    "bits": "output 'y' is of type BF16, but the configuration says FP32",
    "other dimensions": r"output 'y' has the shape \[1, 7\], but the configuration says \[-1, 2\]",
    "a scalar": "output 'y' is of type INT8, but the configuration says FP32",
    "stranger": "the response has an output 'stranger', which is none of",
    "twice": "the response has an output 'y', twice",
}


def write_all(repository: Path) -> None:
    outputs = "y:FP32:2 z:INT32:1"
    write(repository, "batched", TENSORS, config_of("x:STRING:1", outputs, batch=8), HEAD)
    cache = "response_cache { enable: true }"
    write(repository, "cached", TENSORS, config_of("x:STRING:1", outputs, batch=8, more=cache), HEAD)
    write(repository, "plain", TENSORS, config_of("x:STRING:1", "y:FP32:1,2 z:INT32:1,1"), HEAD)
    two = "instance_group { count: 2 }"
    write(repository, "twins", TENSORS, config_of("x:STRING:1", "y:FP32:1,2 z:INT32:1,1", more=two), HEAD)
    sends = config_of("x:STRING:1", outputs, batch=8, more="model_transaction_policy { decoupled: true }")
    write(repository, "sends", SENDS, sends, HEAD)
    write(repository, "asks", ASKS, config_of("x:STRING:1", "y:FP32:1,2 z:INT32:1,1"))
    more = 'output { name: "y" data_type: TYPE_FP32 dims: [1, 2, 1] reshape { shape: [2] } }'
    write(repository, "reshaped", TENSORS, config_of("x:STRING:1", "z:INT32:1", batch=8, more=more), HEAD)
    adder_models.write(repository, "adder", 2)

    def ensemble(name: str, outputs: str, *steps: ensemble_configs.Step, batch: int = 0) -> None:
        config = ensemble_configs.config_of("x:STRING:1", outputs, steps, batch=batch)
        ensemble_configs.write(repository, name, config)

    ensemble("step", "y:FP32:1,2 z:INT32:1,1", ("plain", "x=x", "y=y z=z"))
    ensemble("batched_step", outputs, ("batched", "x=x", "y=y z=z"), batch=8)
    ensemble("kept_step", "y:FP32:1,2 z:INT32:1,1", ("asks", "x=x", "y=y z=z"))
    write(repository, "wide", TENSORS, config_of("x:STRING:1", "y:FP32:-1,4 z:INT32:1,1"), HEAD)
    ensemble("before_onnx", "r:FP32:-1,4", ("wide", "x=x", "y=a"), ("adder", "x=a", "y=r"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    write_all(repository)
    flags = [f"--cache-dir={model_cache}", "--cache-config=local,size=100000000", "--no-profile"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Served(server, client, repository)


def x_of(kind: str, rows: int) -> Array:
    x = np.array([kind.encode()], dtype=object)
    return np.repeat(x[None], rows, axis=0) if rows else x


def of_message(message: Any) -> Mapping[str, Given]:
    contents = zip(message.outputs, message.raw_output_contents, strict=True)
    return {output.name: Given(output.datatype, tuple(output.shape), content) for output, content in contents}


def by_grpc(served: Served, model: str, kind: str, rows: int) -> Mapping[str, Given]:
    inputs = inputs_of({"x": x_of(kind, rows)})
    for _ in range(2):  # a request like one before takes another way
        result = served.client.infer(model, inputs, client_timeout=TIMEOUT_S)
    return of_message(result.get_response())


def by_http(served: Served, model: str, kind: str, rows: int) -> Mapping[str, Given]:
    array = x_of(kind, rows)
    x = triton_http.InferInput("x", list(array.shape), "BYTES")
    x.set_data_from_numpy(array)
    with triton_http.InferenceServerClient(served.server.http_url, network_timeout=TIMEOUT_S) as client:
        result = client.infer(model, [x])
        found = {}
        for output in result.get_response()["outputs"]:
            begin = result._output_name_to_buffer_map[output["name"]]
            content = bytes(result._buffer[begin : begin + output["parameters"]["binary_data_size"]])
            found[output["name"]] = Given(output["datatype"], tuple(output["shape"]), content)
        return found


def by_json(served: Served, model: str, kind: str, rows: int) -> Mapping[str, Given]:
    shape = [rows, 1] if rows else [1]
    body = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": shape, "data": [kind] * math.prod(shape)}]}
    url = f"http://{served.server.http_url}/v2/models/{model}/infer"
    with urllib.request.urlopen(url, json.dumps(body).encode(), TIMEOUT_S) as answer:
        content = json.loads(answer.read())
    found = {}
    for output in content["outputs"]:
        numpy_types = {"BOOL": "bool", "FP32": "float32", "FP64": "float64"}
        if output["datatype"] == "BYTES":
            text = b"".join(len(part).to_bytes(4, "little") + part.encode() for part in output["data"])
        else:
            numpy_type = numpy_types.get(output["datatype"], output["datatype"].lower())
            text = np.array(output["data"], numpy_type).tobytes()
        found[output["name"]] = Given(output["datatype"], tuple(output["shape"]), text)
    return found


def by_region(served: Served, model: str, kind: str, rows: int) -> Mapping[str, Given]:
    segments = Segments(served.client)
    size_bytes = 20 << 20
    handle = segments.create("answer", size_bytes)
    try:
        outputs = [triton.InferRequestedOutput(name) for name in ("y", "z")]
        outputs[0].set_shared_memory("answer", size_bytes)
        inputs = inputs_of({"x": x_of(kind, rows)})
        message = served.client.infer(model, inputs, outputs=outputs, client_timeout=TIMEOUT_S).get_response()
        found = dict(of_message(message))
        if "y" in found:
            size_bytes = message.outputs[0].parameters["shared_memory_byte_size"].int64_param
            content = shm.get_contents_as_numpy(handle, np.uint8, [size_bytes]).tobytes()
            found["y"] = found["y"]._replace(content=content)
        return found
    finally:
        served.client.unregister_system_shared_memory("answer")
        shm.destroy_shared_memory_region(handle)


def by_stream(served: Served, model: str, kind: str, rows: int) -> Mapping[str, Given]:
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(model, inputs_of({"x": x_of(kind, rows)}))
        answer = answers.get(timeout=TIMEOUT_S)
        client.stop_stream()
    assert isinstance(answer, triton.InferResult), answer
    return of_message(answer.get_response())


Ask = Callable[[Served, str, str, int], Mapping[str, Given]]
WAYS: Mapping[str, Ask] = {
    "gRPC": by_grpc,
    "HTTP": by_http,
    "JSON": by_json,
    "region": by_region,
    "stream": by_stream,
}
# By model: how many rows its requests have; 0: it has no batches.
MODELS = {"batched": 1, "plain": 0, "cached": 1, "sends": 1, "asks": 0, "step": 0, "batched_step": 1, "kept_step": 0}


PAIRS = [
    *(("batched", way) for way in WAYS),
    *(("step", way) for way in WAYS),
    *((model, "gRPC") for model in MODELS if model not in ("batched", "step", "sends")),
    ("sends", "stream"),
]


@pytest.mark.parametrize(
    ("model", "way", "kind"),
    [(*pair, kind) for pair in PAIRS for kind in KINDS if not (pair[1] == "JSON" and kind in NO_JSON)],
)
def test_an_answer_is_passed_on_as_it_is(served: Served, model: str, way: str, kind: str) -> None:
    found = dict(WAYS[way](served, model, kind, MODELS[model]))
    assert found.pop("z") == Given("INT32", (1, 1), (3).to_bytes(4, "little"))
    expected = KINDS[kind]
    assert found == ({} if expected is None else {"y": expected})


@pytest.mark.parametrize("kind", ["other rank", "bits"])
def test_what_json_has_not_is_refused(served: Served, kind: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        by_json(served, "batched", kind, 1)
    assert raised.value.code == 400
    assert "cannot be sent as JSON" in raised.value.read().decode()


def test_more_rows_than_were_asked_for(served: Served) -> None:
    """And fewer: nothing compares the first dimension with the request's."""
    assert by_grpc(served, "batched", "as configured", 4)["y"].shape == (1, 2)
    assert by_grpc(served, "batched_step", "as configured", 4)["y"].shape == (1, 2)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("as configured", (1, 1, 2, 1)), ("more rows", (4, 1, 2, 1)), ("other dimensions", (1, 7)), ("a scalar", ())],
)
def test_what_can_be_reshaped_is(served: Served, kind: str, shape: tuple[int, ...]) -> None:
    assert by_grpc(served, "reshaped", kind, 1)["y"].shape == shape


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("other type", "inference input 'x' data-type is 'FP64', but model 'adder' expects 'FP32'"),
        ("texts", "inference input 'x' data-type is 'BYTES', but model 'adder' expects 'FP32'"),
        ("other dimensions", "unexpected shape for input 'x' for model 'adder'. Expected [-1, 4], got [1, 7]"),
        ("missing", "expected 1 inputs but got 0 inputs for model 'adder'. Got input(s) [], but missing required"),
    ],
)
def test_the_next_step_checks_its_inputs(served: Served, kind: str, why: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        by_grpc(served, "before_onnx", kind, 0)
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert raised.value.message().startswith(f"in ensemble 'before_onnx', step 1 ('adder'): {why}")


def test_classes_of_another_type(served: Served) -> None:
    def ask(kind: str) -> Any:
        outputs = [triton.InferRequestedOutput("y", class_count=1)]
        inputs = inputs_of({"x": x_of(kind, 1)})
        return served.client.infer("batched", inputs, outputs=outputs, client_timeout=TIMEOUT_S).as_numpy("y")

    for kind, shape in (("other type", (1, 1)), ("whole numbers", (1, 1)), ("more rows", (4, 1)), ("a scalar", (1,))):
        assert ask(kind).shape == shape
    for kind in ("texts", "other rank", "bits"):
        with pytest.raises(InferenceServerException, match="class result not available for output due to unsupported"):
            ask(kind)


def warnings_of(served: Served, model: str) -> list[str]:
    return [line for line in served.log().splitlines() if f" WARNING supervisor: {model}: " in line]


def test_one_warning_of_a_model_for_each_kind(served: Served) -> None:
    """Of all its instances together."""
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            for kind in ("other type", "whole numbers", "stranger", "twice", "other dimensions", "missing"):
                list(pool.map(lambda _, kind=kind: by_grpc(served, "twins", kind, 0), range(4)))
    until(lambda: len(warnings_of(served, "twins")) >= 3)
    types, names, shapes = warnings_of(served, "twins")
    assert types.endswith(
        "twins: output 'y' is of type FP64, but the configuration says FP32: it is passed on (told once)"
    )
    assert "the response has an output 'stranger', which is none of ['y', 'z']: it is left out (told once)" in names
    assert "output 'y' has the shape [1, 7], but the configuration says [1, 2]: it is passed on" in shapes


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("strict")
    write(repository, "batched", TENSORS, config_of("x:STRING:1", "y:FP32:2 z:INT32:1", batch=8), HEAD)
    flags = [f"--cache-dir={tmp_path_factory.mktemp('cache')}", "--strict-python-outputs"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Served(server, client, repository)


def test_strict_outputs(strict: Served) -> None:
    for kind, why in STRICT.items():
        with pytest.raises(InferenceServerException, match=why) as raised:
            by_grpc(strict, "batched", kind, 1)
        assert raised.value.status() == "StatusCode.INTERNAL"
    assert by_grpc(strict, "batched", "as configured", 1)["y"] == KINDS["as configured"]
    assert by_grpc(strict, "batched", "other type", 1)["y"] == KINDS["as configured"], "converted"
    assert list(by_grpc(strict, "batched", "missing", 1)) == ["z"]
    assert warnings_of(strict, "batched") == []
