"""Tensors in the clients' shared memory, through Triton's public client and its helpers for shared memory."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from gangway.base.host_limits import MemoryLimit
from gangway.base.memory_budget import MemoryBudget
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError
from gangway.server.requests.regions import Regions, Registration
from tests.helpers.client_segments import TENSOR_BYTES, A, B, Segments, inputs_in, outputs_in, values_in


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
    with grpc.insecure_channel(server.url) as channel:
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


def test_a_segment_that_shrinks_while_its_holes_are_looked_for(segments: Segments) -> None:
    """Nothing is behind the end of a file, neither holes nor data."""
    page = 4096
    segments.create("sparse", 8 * page, register=False)
    registry = Regions()
    registry.register(Registration("sparse", segments.key("sparse"), 0, 8 * page))
    held = registry.hold(["sparse"])
    region = held["sparse"]
    region.write(0, memoryview(b"x" * page))
    region.write(4 * page, memoryview(b"x" * page))
    holes = region.holes(0, 8 * page)
    assert next(holes) == (page, 4 * page)
    os.truncate(segments.path("sparse"), page)
    assert not list(holes)
    registry.release(held)
    registry.unregister("")


def test_holes_count_when_answers_fill_them(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is written only holes are taken from the budget, which may have no room for them."""
    page, taken = 4096, list[int]()
    segments.create("sparse", 64 * page, register=False)
    registry = Regions()
    registry.register(Registration("sparse", segments.key("sparse"), page, 63 * page))
    held = registry.hold(["sparse"])
    region = held["sparse"]
    assert list(region.holes(0, 3 * page)) == [(page, 4 * page)]
    region.write(page, memoryview(b"x" * page))
    assert list(region.holes(0, 3 * page)) == [(page, 2 * page), (3 * page, 4 * page)]
    assert not list(region.holes(page, page))

    class Counted(MemoryBudget):
        def take(self, size_bytes: int) -> None:
            taken.append(size_bytes)
            super().take(size_bytes)

    small = Counted(MemoryLimit(64 << 20, "a test"), lambda: 0)
    monkeypatch.setattr("gangway.server.requests.regions.memory_budget", lambda: small)
    region.write(page, memoryview(b"y" * page))
    assert not taken
    blocks = segments.path("sparse").stat().st_blocks
    with pytest.raises(RequestError, match="cannot be written: the server's memory is full") as caught:
        region.write(0, memoryview(bytes(63 * page)))
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert taken == [page]
    assert segments.path("sparse").stat().st_blocks == blocks
    view = memoryview(bytearray(2 * page))
    region.read_into(0, view)
    assert bytes(view) == bytes(page) + b"y" * page
    registry.release(held)
    registry.unregister("")


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
