"""Tensors in the clients' shared memory, through Triton's public client and its helpers for shared memory."""

import os
import socket
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.regions import MAX_REGIONS
from tritonclient.utils import InferenceServerException

FOLDER = Path("/dev/shm")
A = np.arange(16, dtype=np.int32)
B = np.full(16, 3, np.int32)
TENSOR_BYTES = 64
Change = Callable[[pb.ModelInferRequest], object]


@dataclass
class Segments:
    """POSIX segments of this test, registered with the server under the names that they have here."""

    client: Any
    handles: dict[str, Any] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)  # descriptors of the handles
    prefix: str = field(default_factory=lambda: f"regions-test-{uuid.uuid4().hex[:12]}")

    def key(self, name: str) -> str:
        return f"/{self.prefix}-{name}"

    def path(self, name: str) -> Path:
        return FOLDER / self.key(name)[1:]

    def create(self, name: str, size_bytes: int = 4096, register: bool = True) -> Any:
        self.handles[name] = shm.create_shared_memory_region(name, self.key(name), size_bytes)
        self.own[name] = self._descriptors(name)
        if register:
            self.client.register_system_shared_memory(name, self.key(name), size_bytes)
        return self.handles[name]

    def is_open(self, name: str) -> bool:
        """Whether the server, which is in this process, has the segment open."""
        return self._descriptors(name) > self.own[name]

    def _descriptors(self, name: str) -> int:
        links = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                links.append(os.readlink(descriptor))
        return links.count(str(self.path(name)))


@pytest.fixture
def segments(server: Any) -> Iterator[Segments]:
    made = Segments(server.client)
    yield made
    server.client.unregister_system_shared_memory()
    assert not any(made.is_open(name) for name in made.handles)
    for handle in made.handles.values():
        shm.destroy_shared_memory_region(handle)


def inputs_in(region: str, offset: int = 0) -> list[triton.InferInput]:
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for number, tensor in enumerate(inputs):
        tensor.set_shared_memory(region, TENSOR_BYTES, offset + number * TENSOR_BYTES)
    return inputs


def outputs_in(region: str, size_bytes: int = TENSOR_BYTES) -> list[triton.InferRequestedOutput]:
    outputs = [triton.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
    for number, tensor in enumerate(outputs):
        tensor.set_shared_memory(region, size_bytes, number * TENSOR_BYTES)
    return outputs


def values_in(handle: Any, offset: int = 0) -> Any:
    return shm.get_contents_as_numpy(handle, np.int32, [1, 16], offset)


def test_inputs_and_outputs(server: Any, segments: Segments) -> None:
    shm.set_shared_memory_region(segments.create("in"), [A, B], offset=128)
    out = segments.create("out")
    result = server.client.infer("simple", inputs_in("in", 128), outputs=outputs_in("out"), request_id="7")
    np.testing.assert_array_equal(values_in(out), [A + B])
    np.testing.assert_array_equal(values_in(out, TENSOR_BYTES), [A - B])
    response = result.get_response()
    assert response.id == "7"
    assert list(response.raw_output_contents) == [b"", b""]  # one for each output, as Triton's C++ client expects
    assert list(response.outputs[1].shape) == [1, 16]
    parameters = response.outputs[1].parameters
    assert parameters["shared_memory_region"].string_param == "out"
    assert parameters["shared_memory_offset"].int64_param == TENSOR_BYTES
    assert parameters["shared_memory_byte_size"].int64_param == TENSOR_BYTES
    assert "shared_memory_offset" not in response.outputs[0].parameters


def test_some_tensors_in_messages(server: Any, segments: Segments) -> None:
    shm.set_shared_memory_region(segments.create("region"), [A])
    first, second = inputs_in("region")
    second.set_data_from_numpy(B[None])
    outputs = outputs_in("region")
    outputs[0].unset_shared_memory()
    for order in (1, -1):  # of both, in the request
        result = server.client.infer("simple", [first, second][::order], outputs=outputs[::order])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), [A + B])
        np.testing.assert_array_equal(values_in(segments.handles["region"], TENSOR_BYTES), [A - B])


def test_typed_contents_beside_a_region(server: Any, segments: Segments) -> None:
    shm.set_shared_memory_region(segments.create("region"), [A])
    request = pb.ModelInferRequest(model_name="simple")
    tensor = request.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 16])
    tensor.parameters["shared_memory_region"].string_param = "region"
    tensor.parameters["shared_memory_byte_size"].int64_param = TENSOR_BYTES
    request.inputs.add(name="INPUT1", datatype="INT32", shape=[1, 16]).contents.int_contents.extend(B)
    with grpc.insecure_channel(server.address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        response = pb.ModelInferResponse.FromString(infer(request.SerializeToString(), timeout=10))
    assert response.raw_output_contents[0] == (A + B).tobytes()


def test_large_tensors_pass(server: Any, segments: Segments) -> None:
    image = np.random.default_rng(0).standard_normal((1, 3, 224, 224), dtype=np.float32)
    shm.set_shared_memory_region(segments.create("image", image.nbytes), [image])
    segments.create("answer", image.nbytes)
    tensor, output = triton.InferInput("x", image.shape, "FP32"), triton.InferRequestedOutput("y")
    tensor.set_shared_memory("image", image.nbytes)
    output.set_shared_memory("answer", image.nbytes)
    server.client.infer("image", [tensor], outputs=[output])
    answer = shm.get_contents_as_numpy(segments.handles["answer"], np.float32, image.shape)
    np.testing.assert_array_equal(answer, image)


def test_a_name_may_come_to_mean_another_region(server: Any, segments: Segments) -> None:
    """Requests that are equal share a plan; which region they mean is looked up each time."""
    client = server.client
    for name, value in (("one", A), ("two", B)):
        shm.set_shared_memory_region(segments.create(name, register=False), [value, value])
    for name, value in (("one", A), ("two", B), ("one", A)):
        client.register_system_shared_memory("region", segments.key(name), 2 * TENSOR_BYTES)
        np.testing.assert_array_equal(client.infer("simple", inputs_in("region")).as_numpy("OUTPUT0"), [value + value])
        client.unregister_system_shared_memory("region")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'region'") as caught:
            client.infer("simple", inputs_in("region"))
        assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_status_and_unregistering(server: Any, segments: Segments) -> None:
    client = server.client
    for name in ("first", "second"):
        segments.create(name)
    client.register_system_shared_memory("part", segments.key("first"), 96, offset=32)
    assert set(client.get_system_shared_memory_status().regions) == {"first", "second", "part"}
    status = client.get_system_shared_memory_status("part").regions["part"]
    assert (status.name, status.key, status.offset, status.byte_size) == ("part", segments.key("first"), 32, 96)
    client.unregister_system_shared_memory("first")
    client.unregister_system_shared_memory("never registered")
    assert set(client.get_system_shared_memory_status().regions) == {"second", "part"}
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'first'") as caught:
        client.get_system_shared_memory_status("first")
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    client.unregister_system_shared_memory()
    assert not client.get_system_shared_memory_status().regions


def test_a_name_is_registered_once(server: Any, segments: Segments) -> None:
    segments.create("region")
    with pytest.raises(InferenceServerException, match="shared memory region 'region' already in manager") as caught:
        server.client.register_system_shared_memory("region", segments.key("region"), 64)
    assert caught.value.status() == "StatusCode.ALREADY_EXISTS"


@pytest.mark.parametrize(
    ("offset", "size_bytes"), [(0, 4097), (4096, 1), (2**64 - 1, 1), (1, 2**64 - 1), (0, 0), (4000, 97)]
)
def test_only_what_the_segment_has_is_registered(server: Any, segments: Segments, offset: int, size_bytes: int) -> None:
    segments.create("region", 4096, register=False)
    with pytest.raises(InferenceServerException, match="failed to register shared memory region 'r': invalid args"):
        server.client.register_system_shared_memory("r", segments.key("region"), size_bytes, offset)
    assert not server.client.get_system_shared_memory_status().regions


@pytest.mark.parametrize(
    "key",
    [
        "/../../etc/passwd",
        "/../shm/{segment}",
        "/sub/{segment}",
        "/{segment}/",
        "..",
        ".",
        "",
        "/",
        "/a\0b",
        "/gangway.1.control",
        "//gangway.1.control",
        "/sem.something",
        "/nobody-has-this",
        "/" + "x" * 300,
        "{link}",
        "{folder}",
        "{pipe}",
        "{socket}",
    ],
)
def test_hostile_keys(server: Any, segments: Segments, key: str) -> None:
    segments.create("segment", register=False)
    for kind in ("link", "folder", "pipe", "socket"):
        path = segments.path(kind)
        if key == f"{{{kind}}}":
            if kind == "link":
                path.symlink_to("/etc/hostname")
            elif kind == "folder":
                path.mkdir()
            elif kind == "pipe":
                os.mkfifo(path)
            else:
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(str(path))
    names = {name: segments.key(name) for name in ("link", "folder", "pipe", "socket")}
    try:
        with pytest.raises(InferenceServerException, match="Unable to open shared memory region") as caught:
            real = key.format(segment=segments.key("segment")[1:], **names)
            server.client.register_system_shared_memory("region", real, 1)
        reserved = key.lstrip("/").startswith(("gangway.", "sem."))
        assert caught.value.status() == f"StatusCode.{'INVALID_ARGUMENT' if reserved else 'INTERNAL'}"
    finally:
        for name in names:
            path = segments.path(name)
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


def test_names_of_regions(server: Any, segments: Segments) -> None:
    segments.create("segment", register=False)
    for name in ("", "x" * 2000):
        with pytest.raises(InferenceServerException, match="a shared memory region needs a name of 1 to 1024 bytes"):
            server.client.register_system_shared_memory(name, segments.key("segment"), 64)


def test_too_many_regions(server: Any, segments: Segments) -> None:
    segments.create("segment", register=False)
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(server.client.register_system_shared_memory, f"r{number}", segments.key("segment"), 64)
            for number in range(MAX_REGIONS)
        ]
        for job in jobs:
            job.result(20)
    with pytest.raises(InferenceServerException, match=f"{MAX_REGIONS} shared memory regions are registered") as caught:
        server.client.register_system_shared_memory("another", segments.key("segment"), 64)
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def region_parameter(tensor: Any, **parameters: str | int) -> None:
    for name, value in parameters.items():
        parameter = tensor.parameters[f"shared_memory_{name}"]
        if isinstance(value, str):
            parameter.string_param = value
        else:
            parameter.int64_param = value


def on_input(**parameters: str | int) -> Change:
    return lambda request: region_parameter(request.inputs[0], **parameters)


def on_output(**parameters: str | int) -> Change:
    return lambda request: region_parameter(request.outputs.add(name="OUTPUT0"), **parameters)


REFUSED: dict[str, tuple[Change, str, str]] = {
    "unknown region": (
        on_input(region="nobody", byte_size=64),
        "NOT_FOUND",
        "Unable to find shared memory region: 'nobody'",
    ),
    "unknown region for an output": (
        on_output(region="nobody", byte_size=64),
        "NOT_FOUND",
        "Unable to find shared memory region: 'nobody'",
    ),
    "offset behind the region": (
        on_input(region="region", byte_size=64, offset=4096),
        "INVALID_ARGUMENT",
        "Invalid offset for shared memory region: 'region'",
    ),
    "end behind the region": (
        on_input(region="region", byte_size=64, offset=4033),
        "INVALID_ARGUMENT",
        "Invalid offset + byte size for shared memory region: 'region'",
    ),
    "output behind the region": (
        on_output(region="region", byte_size=2**63 - 1, offset=1),
        "INVALID_ARGUMENT",
        "Invalid offset + byte size for shared memory region: 'region'",
    ),
    "negative offset": (
        on_input(region="region", byte_size=64, offset=-64),
        "INVALID_ARGUMENT",
        "invalid value for 'shared_memory_offset' parameter for tensor 'INPUT0': -64 is negative",
    ),
    "wrong size": (
        on_input(region="region", byte_size=63),
        "INVALID_ARGUMENT",
        "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 63",
    ),
    "more than a message": (
        on_input(region="region", byte_size=2**40),
        "RESOURCE_EXHAUSTED",
        "inputs of 1099511627776 bytes for model 'simple', 268435456 are possible",
    ),
    "output too small": (
        on_output(region="region", byte_size=63),
        "INTERNAL",
        "shared memory size specified with the request for output 'OUTPUT0' (63 bytes) should be at least 64 bytes",
    ),
    "no region": (
        on_input(byte_size=64),
        "INVALID_ARGUMENT",
        "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for tensor 'INPUT0'",
    ),
    "size that is no number": (
        on_input(region="region", byte_size="64"),
        "INVALID_ARGUMENT",
        "invalid value type for 'shared_memory_byte_size' parameter for tensor 'INPUT0', expected int64_param.",
    ),
    "region that is no text": (
        on_input(region=5, byte_size=64),
        "INVALID_ARGUMENT",
        "invalid value type for 'shared_memory_region' parameter for tensor 'INPUT0', expected string_param.",
    ),
    "typed contents as well": (
        lambda request: (
            region_parameter(request.inputs[0], region="region", byte_size=64),
            request.inputs[0].contents.int_contents.extend(A),
        ),
        "INVALID_ARGUMENT",
        "unexpected 'content' provided when using shared memory for input tensor 'INPUT0' for model 'simple'",
    ),
    "raw contents as well": (
        lambda request: (
            region_parameter(request.inputs[0], region="region", byte_size=64),
            request.raw_input_contents.append(A.tobytes()),
        ),
        "INVALID_ARGUMENT",
        "expected 1 raw_input_contents but got 2 for model 'simple'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(server: Any, segments: Segments, case: str) -> None:
    change, status, details = REFUSED[case]
    segments.create("region")
    request = pb.ModelInferRequest(model_name="simple", raw_input_contents=[B.tobytes()])
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    change(request)
    if not request.inputs[0].parameters:
        request.raw_input_contents.append(A.tobytes())
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(request.SerializeToString(), timeout=10)
    assert details in caught.value.details()
    assert caught.value.code().name == status


def test_a_segment_that_has_shrunk(server: Any, segments: Segments) -> None:
    segments.create("in")
    segments.create("out")
    os.truncate(segments.path("in"), 100)
    with pytest.raises(InferenceServerException, match=r"has 100 bytes, 128 are needed") as caught:
        server.client.infer("simple", inputs_in("in"), outputs=outputs_in("out"))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    os.truncate(segments.path("in"), 4096)
    os.truncate(segments.path("out"), 0)
    with pytest.raises(InferenceServerException, match=r"has 0 bytes, 64 are needed"):
        server.client.infer("simple", inputs_in("in"), outputs=outputs_in("out"))
    assert segments.path("out").stat().st_size == 0  # the server makes it no larger
    os.truncate(segments.path("out"), 4096)
    server.client.infer("simple", inputs_in("in"), outputs=outputs_in("out"))


def test_a_region_is_unregistered_while_a_request_uses_it(server: Any, segments: Segments) -> None:
    shm.set_shared_memory_region(segments.create("in"), [A, B])
    out = segments.create("out")
    server.scheduler.holding = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client.infer, "simple", inputs_in("in"), outputs=outputs_in("out"))
        submitted = server.scheduler.held.get(timeout=10)
        server.client.unregister_system_shared_memory()
        assert segments.is_open("out")
        server.scheduler.answer(submitted)
        answer.result(10)
    np.testing.assert_array_equal(values_in(out), [A + B])
    assert not segments.is_open("out")


def test_gpu_memory(server: Any, segments: Segments) -> None:
    client = server.client
    segments.create("system")
    assert not client.get_cuda_shared_memory_status().regions
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("any")
    assert set(client.get_system_shared_memory_status().regions) == {"system"}
    for name, reason in (
        ("any", "Unable to find cuda shared memory region: 'any'"),
        ("system", "'system' is registered as system shared memory, not CUDA shared memory"),
    ):
        with pytest.raises(InferenceServerException, match=reason) as caught:
            client.get_cuda_shared_memory_status(name)
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="'any', GPUs not supported") as caught:
        client.register_cuda_shared_memory("any", b"aGFuZGxl", 0, 64)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
