"""Answers of Python models that are unlike their configurations: passed on as they are, on all ways, or errors."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm

from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import LiveServer
from testing.waiting import until
from tests.helpers import adder_models, ensemble_configs, ways
from tests.helpers.client_segments import Segments
from tests.helpers.python_models import config_of, write
from tests.helpers.sampled import sampled
from tests.helpers.served import Array, Served, serving
from tests.helpers.ways import RefusedError, by_grpc, request_of

RETURNS = """
    def execute(self, requests):
        (x,) = [request.inputs()[0].as_numpy() for request in requests]
        shape = pb_utils.Tensor("z", np.array(x.shape))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x), shape])]
"""
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
    any_size = '{} {{ name: "{}" data_type: TYPE_FP32 dims: [-1, 4, -1] reshape {{ shape: [-1, 2, 2, -1] }} }}\n'
    more = any_size.format("input", "x") + any_size.format("output", "y")
    write(repository, "any_size", RETURNS, config_of("", "z:INT64:-1", more=more))
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
    with serving(repository, *flags) as served:
        yield served


def request(kind: str, model: str, rows: int) -> pb.ModelInferRequest:
    x = np.array([kind.encode()], dtype=object)
    return request_of(model, {"x": np.repeat(x[None], rows, axis=0) if rows else x})


def given_by(response: pb.ModelInferResponse) -> dict[str, Given]:
    contents = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: Given(output.datatype, tuple(output.shape), content) for output, content in contents}


def asked(served: Served, model: str, kind: str, rows: int) -> dict[str, Given]:
    return given_by(by_grpc(served.server, request(kind, model, rows)))


def by_region(server: LiveServer, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """Over gRPC; y goes to the client's memory."""
    size_bytes = 20 << 20
    with triton.InferenceServerClient(server.url) as client:
        handle = Segments(client).create("answer", size_bytes)
        try:
            y, _ = request.outputs.add(name="y"), request.outputs.add(name="z")
            y.parameters["shared_memory_region"].string_param = "answer"
            y.parameters["shared_memory_byte_size"].int64_param = size_bytes
            response = by_grpc(server, request)
            if response.outputs[0].name == "y":
                size_bytes = response.outputs[0].parameters["shared_memory_byte_size"].int64_param
                content = shm.get_contents_as_numpy(handle, np.uint8, [size_bytes]).tobytes()
                response.raw_output_contents[0] = content
            return response
        finally:
            client.unregister_system_shared_memory("answer")
            shm.destroy_shared_memory_region(handle)


WAYS: Mapping[str, Any] = {**ways.WAYS, "region": by_region}
# By model: how many rows its requests have; 0: it has no batches.
MODELS = {"batched": 1, "plain": 0, "cached": 1, "sends": 1, "asks": 0, "step": 0, "batched_step": 1, "kept_step": 0}


PAIRS = [
    *(("batched", way) for way in WAYS),
    *(("step", way) for way in WAYS),
    *((model, "gRPC") for model in MODELS if model not in ("batched", "step", "sends")),
    ("sends", "stream"),
]


CASES = [(*pair, kind) for pair in PAIRS for kind in KINDS if not (pair[1] == "JSON" and kind in NO_JSON)]


@pytest.mark.parametrize(
    ("model", "way", "kind"), sampled(CASES, [case for case in CASES if case[0] != "step" or case[1] == "gRPC"])
)
def test_an_answer_is_passed_on_as_it_is(served: Served, model: str, way: str, kind: str) -> None:
    asked = [given_by(WAYS[way](served.server, request(kind, model, MODELS[model]))) for _ in range(2)]
    assert asked[0] == asked[1], "a request like one before takes another way"
    found = asked[0]
    assert found.pop("z") == Given("INT32", (1, 1), (3).to_bytes(4, "little"))
    expected = KINDS[kind]
    assert found == ({} if expected is None else {"y": expected})


@pytest.mark.parametrize("kind", ["other rank", "bits"])
def test_what_json_has_not_is_refused(served: Served, kind: str) -> None:
    with pytest.raises(RefusedError, match="cannot be sent as JSON") as raised:
        WAYS["JSON"](served.server, request(kind, "batched", 1))
    assert raised.value.status == 400


def test_more_rows_than_were_asked_for(served: Served) -> None:
    """And fewer: nothing compares the first dimension with the request's."""
    assert asked(served, "batched", "as configured", 4)["y"].shape == (1, 2)
    assert asked(served, "batched_step", "as configured", 4)["y"].shape == (1, 2)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("as configured", (1, 1, 2, 1)), ("more rows", (4, 1, 2, 1)), ("other dimensions", (1, 7)), ("a scalar", ())],
)
def test_what_can_be_reshaped_is(served: Served, kind: str, shape: tuple[int, ...]) -> None:
    assert asked(served, "reshaped", kind, 1)["y"].shape == shape


@pytest.mark.parametrize("way", ways.WAYS)
def test_dimensions_of_any_size_are_reshaped(served: Served, way: str) -> None:
    for shape in ((3, 4, 5), (1, 4, 1), (0, 4, 7)):
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        found = served.over(way, "any_size", x=x)
        assert found["z"].tolist() == [shape[0], 2, 2, shape[2]]
        np.testing.assert_array_equal(found["y"], x)


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
    with pytest.raises(RefusedError) as raised:
        asked(served, "before_onnx", kind, 0)
    assert raised.value.status == "INVALID_ARGUMENT"
    assert raised.value.message.startswith(f"in ensemble 'before_onnx', step 1 ('adder'): {why}")


def test_classes_of_another_type(served: Served) -> None:
    def ask(kind: str) -> tuple[int, ...]:
        message = request(kind, "batched", 1)
        message.outputs.add(name="y").parameters["classification"].int64_param = 1
        return given_by(by_grpc(served.server, message))["y"].shape

    for kind, shape in (("other type", (1, 1)), ("whole numbers", (1, 1)), ("more rows", (4, 1)), ("a scalar", (1,))):
        assert ask(kind) == shape
    for kind in ("texts", "other rank", "bits"):
        with pytest.raises(RefusedError, match="class result not available for output due to unsupported"):
            ask(kind)


def warnings_of(served: Served, model: str) -> list[str]:
    return [line for line in served.log().splitlines() if f" WARNING supervisor: {model}: " in line]


def test_one_warning_of_a_model_for_each_kind(served: Served) -> None:
    """Of all its instances together."""
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            for kind in ("other type", "whole numbers", "stranger", "twice", "other dimensions", "missing"):
                list(pool.map(lambda _, kind=kind: asked(served, "twins", kind, 0), range(4)))
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
    with serving(repository, "--strict-python-outputs") as served:
        yield served


def test_strict_outputs(strict: Served) -> None:
    for kind, why in STRICT.items():
        with pytest.raises(RefusedError, match=why) as raised:
            asked(strict, "batched", kind, 1)
        assert raised.value.status == "INTERNAL"
    assert asked(strict, "batched", "as configured", 1)["y"] == KINDS["as configured"]
    assert asked(strict, "batched", "other type", 1)["y"] == KINDS["as configured"], "converted"
    assert list(asked(strict, "batched", "missing", 1)) == ["z"]
    assert warnings_of(strict, "batched") == []
