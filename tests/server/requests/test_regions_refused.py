"""Shared memory that cannot be had: keys, ranges and parameters of requests that are refused."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.utils import InferenceServerException

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.descriptors import max_regions
from tests.helpers.client_segments import A, B, Segments

Change = Callable[[pb.ModelInferRequest], object]


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


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("/there-is-none", "No such file or directory"),
        ("/" + "ü" * 128, "File name too long"),
        ("/" + "n" * 400, "File name too long"),
        ("{folder}", "Is a directory"),
        ("{link}", "Too many levels of symbolic links"),
        ("{pipe}", "not a segment of memory"),
    ],
)
def test_why_a_segment_cannot_be_opened(server: Any, segments: Segments, key: str, reason: str) -> None:
    folder, link, pipe = (segments.path(name) for name in ("folder", "link", "pipe"))
    folder.mkdir()
    link.symlink_to(segments.path("folder"))
    os.mkfifo(pipe)
    key = key.format(folder=segments.key("folder"), link=segments.key("link"), pipe=segments.key("pipe"))
    try:
        with pytest.raises(InferenceServerException, match="Unable to open shared memory region") as caught:
            server.client.register_system_shared_memory("region", key, 1)
        assert caught.value.message().endswith(f"': {reason}")
    finally:
        folder.rmdir()
        link.unlink()
        pipe.unlink()


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
            for number in range(max_regions())
        ]
        for job in jobs:
            job.result(20)
    refusal = f"{max_regions()} shared memory regions are registered"
    with pytest.raises(InferenceServerException, match=refusal) as caught:
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
    with grpc.insecure_channel(server.url) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(request.SerializeToString(), timeout=10)
    assert details in caught.value.details()
    assert caught.value.code().name == status
