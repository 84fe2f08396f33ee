"""Triton's error table: a wrong request is refused with the same words over gRPC, in a stream and over HTTP."""

import gc
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from gangway.executor.slots import SlotStatus
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError
from gangway.server.options.endpoints import GrpcOptions
from gangway.server.serving.http.json_text import set_parameters
from gangway.server.serving.http.replies import STATUSES
from gangway.server.serving.pending import result_of
from tests.helpers.methods import METHOD_WAYS
from tests.helpers.ways import WAYS, RefusedError

Ask = Callable[..., Any]
Parameters = Mapping[str, Any]
ROW = np.ones(16, np.int32).tobytes()
TIMEOUT_S = 10
REGION, SEGMENT_BYTES = "table", 4096


@dataclass(frozen=True)
class Input:
    """A tensor of a request; `content` is None if a region has it."""

    name: str
    datatype: str = "INT32"
    shape: tuple[int, ...] = (1, 16)
    content: bytes | None = ROW
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class Wrong:
    """An inference request that is refused, whichever protocol carries it. `outputs`: names and parameters."""

    model: str = "simple"
    version: str = ""
    inputs: tuple[Input, ...] = (Input("INPUT0"), Input("INPUT1"))
    outputs: Mapping[str, Parameters] = field(default_factory=dict)
    parameters: Parameters = field(default_factory=dict)

    def message(self) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name=self.model, model_version=self.version)
        set_parameters(request.parameters, self.parameters, "")
        for tensor in self.inputs:
            given = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            set_parameters(given.parameters, tensor.parameters, "")
        for name, parameters in self.outputs.items():
            set_parameters(request.outputs.add(name=name).parameters, parameters, "")
        request.raw_input_contents.extend(self.contents())
        return request

    def contents(self) -> list[bytes]:
        return [tensor.content for tensor in self.inputs if tensor.content is not None]


@dataclass(frozen=True)
class Row:
    """A line of the table. `said` begins the message; `scheduler` is what the scheduler says of the request."""

    code: str
    status: int
    said: str
    request: Wrong = field(default_factory=Wrong)
    scheduler: SlotStatus = SlotStatus.OK


def place(size_bytes: int, offset: int = 0, region: str = REGION) -> Parameters:
    return {"shared_memory_region": region, "shared_memory_byte_size": size_bytes, "shared_memory_offset": offset}


def rows(first: Input, second: Input | None = None) -> Wrong:
    return Wrong(inputs=(first, second or Input("INPUT1")))


def of_nine(name: str) -> Input:
    return Input(name, shape=(9, 16), content=9 * ROW)


INVALID, INTERNAL = ("INVALID_ARGUMENT", 400), ("INTERNAL", 500)
NOT_FOUND, UNAVAILABLE = ("NOT_FOUND", 404), ("UNAVAILABLE", 503)
TABLE: dict[str, Row] = {
    "unknown model": Row(*NOT_FOUND, "Request for unknown model: 'nobody' is not found", Wrong(model="nobody")),
    "unknown version": Row(
        *NOT_FOUND, "Request for unknown model: 'simple' version 7 is not found", Wrong(version="7")
    ),
    "version that is no number": Row(
        *INVALID, "failed to get model version from specified version string 'new'", Wrong(version="new")
    ),
    "wrong dtype": Row(
        *INVALID,
        "inference input 'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'",
        rows(Input("INPUT0", "FP32")),
    ),
    "wrong shape": Row(
        *INVALID,
        "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1, 16], got [1, 4, 4]",
        rows(Input("INPUT0", shape=(1, 4, 4))),
    ),
    "batch too large": Row(
        *INVALID, "inference request batch-size must be <= 8 for 'simple'", rows(of_nine("INPUT0"), of_nine("INPUT1"))
    ),
    "batches that differ": Row(
        *INVALID,
        "input 'INPUT1' batch size does not match other inputs for 'simple'",
        rows(Input("INPUT0"), Input("INPUT1", shape=(2, 16), content=2 * ROW)),
    ),
    "missing input": Row(
        *INVALID,
        "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], but missing",
        Wrong(inputs=(Input("INPUT0"),)),
    ),
    "unexpected input": Row(
        *INVALID, "unexpected inference input 'INPUT9' for model 'simple'", rows(Input("INPUT0"), Input("INPUT9"))
    ),
    "unexpected output": Row(
        *INVALID, "unexpected inference output 'OUTPUT9' for model 'simple'", Wrong(outputs={"OUTPUT9": {}})
    ),
    "wrong size": Row(
        *INVALID,
        "input byte size mismatch for input 'INPUT1' for model 'simple'. Expected 64, got 60",
        rows(Input("INPUT0"), Input("INPUT1", content=ROW[:-4])),
    ),
    "reserved parameter": Row(
        *INVALID,
        "parameter keys starting with 'triton_' are reserved for Triton usage",
        Wrong(parameters={"triton_own": 1}),
    ),
    "queue full": Row(*UNAVAILABLE, "Exceeds maximum queue size", scheduler=SlotStatus.QUEUE_FULL),
    "queue timeout": Row(*UNAVAILABLE, "Request timeout expired", scheduler=SlotStatus.LATE),
    "not now": Row(
        *UNAVAILABLE, "the request for model 'simple' could not be executed now", scheduler=SlotStatus.UNAVAILABLE
    ),
    "cancelled": Row("CANCELLED", 400, "the request for model 'simple' was cancelled", scheduler=SlotStatus.CANCELLED),
    "deadline": Row("DEADLINE_EXCEEDED", 504, "the call's deadline passed", scheduler=SlotStatus.DEADLINE),
    "execution failed": Row(*INTERNAL, "the execution of model 'simple' failed", scheduler=SlotStatus.INTERNAL),
    "unknown region": Row(
        *NOT_FOUND,
        "Unable to find shared memory region: 'nobody'",
        rows(Input("INPUT0", content=None, parameters=place(64, region="nobody"))),
    ),
    "offset behind the region": Row(
        *INVALID,
        f"Invalid offset for shared memory region: '{REGION}'",
        rows(Input("INPUT0", content=None, parameters=place(64, SEGMENT_BYTES))),
    ),
    "end behind the region": Row(
        *INVALID,
        f"Invalid offset + byte size for shared memory region: '{REGION}'",
        rows(Input("INPUT0", content=None, parameters=place(64, SEGMENT_BYTES - 63))),
    ),
    "wrong size in a region": Row(
        *INVALID,
        "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 63",
        rows(Input("INPUT0", content=None, parameters=place(63))),
    ),
    "too much in a region": Row(
        "RESOURCE_EXHAUSTED",
        413,
        "inputs of 1099511627776 bytes for model 'simple'",
        rows(Input("INPUT0", content=None, parameters=place(2**40))),
    ),
    "no room for an output": Row(
        *INTERNAL,
        "shared memory size specified with the request for output 'OUTPUT0' (63 bytes) should be at least 64 bytes to"
        " hold the results",
        Wrong(outputs={"OUTPUT0": place(63)}),
    ),
}


@pytest.fixture
def segment(server: Any) -> Iterator[str]:
    """A segment that is registered as REGION; its key."""
    path = Path("/dev/shm") / f"error-table-{uuid.uuid4().hex[:12]}"
    path.write_bytes(bytes(SEGMENT_BYTES))
    server.client.register_system_shared_memory(REGION, f"/{path.name}", SEGMENT_BYTES)
    yield f"/{path.name}"
    server.client.unregister_system_shared_memory()
    path.unlink()


def refusal_of(call: Callable[..., Any], *arguments: Any) -> tuple[str, str | int | None]:
    """Call in some way; return message and status of its refusal."""
    with pytest.raises(RefusedError) as caught:
        call(*arguments)
    return caught.value.message, caught.value.status


@pytest.mark.parametrize("name", TABLE)
def test_a_row_of_the_table(server: Any, segment: str, name: str) -> None:
    row = TABLE[name]
    server.scheduler.status = row.scheduler
    in_a_stream = row.code if row.scheduler is SlotStatus.DEADLINE else None  # it is the stream's
    found = {way: refusal_of(WAYS[way], server, row.request.message()) for way in ("gRPC", "HTTP", "stream")}
    assert [status for _, status in found.values()] == [row.code, row.status, in_a_stream]
    (said,) = {said for said, _ in found.values()}
    assert said.startswith(row.said)


METHODS: dict[str, tuple[Any, str, int, str]] = {
    "unknown model": (
        pb.ModelConfigRequest(name="nobody"), *NOT_FOUND, "Request for unknown model: 'nobody' is not found",
    ),
    "unknown version": (
        pb.ModelStatisticsRequest(name="simple", version="7"),
        *NOT_FOUND,
        "Request for unknown model: 'simple' version 7 is not found",
    ),
    "a region of another name": (
        pb.SystemSharedMemoryStatusRequest(name="nobody"),
        *NOT_FOUND,
        "Unable to find system shared memory region: 'nobody'",
    ),
    "a region that cannot be opened": (
        pb.SystemSharedMemoryRegisterRequest(name="new", key="/nobody-has-this", byte_size=64),
        *INTERNAL,
        "Unable to open shared memory region: '/nobody-has-this'",
    ),
    "a region twice": (
        pb.SystemSharedMemoryRegisterRequest(name=REGION, key="/any", byte_size=64),
        *("ALREADY_EXISTS", 400),
        f"shared memory region '{REGION}' already in manager",
    ),
    "GPU memory": (
        pb.CudaSharedMemoryRegisterRequest(name="new", raw_handle=b"handle", byte_size=64),
        *INVALID,
        "failed to register CUDA shared memory region: 'new', GPUs not supported",
    ),
    "unsupported": (
        pb.RepositoryIndexRequest(repository_name="other"),
        *("UNIMPLEMENTED", 501),
        "'repository_name' specification is not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_other_methods(server: Any, segment: str, name: str) -> None:
    message, code, status, said = METHODS[name]
    found = [refusal_of(call, server, message, {"secret": "42"}) for call in METHOD_WAYS.values()]
    assert [each for _, each in found] == [code, status]
    assert found[0][0] == found[1][0]
    assert found[0][0].startswith(said)


def test_a_server_that_stops(start_front_end: Any) -> None:
    server = start_front_end(GrpcOptions())
    result_of(server.serving, server.front_end.drain())
    for way, status in (("gRPC", "UNAVAILABLE"), ("HTTP", 503)):
        assert refusal_of(WAYS[way], server, Wrong().message()) == ("the server is stopping", status)
        assert not METHOD_WAYS[way](server, pb.ServerReadyRequest()).ready


def server_frames(tracebacks: list[TracebackType]) -> list[str]:
    """Return the functions of the server that these tracebacks have gone through."""
    codes = [each.tb_frame.f_code for each in tracebacks]
    return [code.co_qualname for code in codes if "/server/" in code.co_filename and "/tests/" not in code.co_filename]


def test_refused_requests_leave_nothing_for_the_collector(server: Any, segment: str) -> None:
    """A cycle through an error's traceback keeps a request's tensors until the next full collection, which is rare."""
    large = bytes(3 << 19)  # of two inputs together less than the longest message
    wrong_size = Wrong(inputs=(Input("INPUT0", content=large), Input("INPUT1", content=large)))
    requests = [(row.request, row.scheduler) for row in TABLE.values()] + [(wrong_size, SlotStatus.OK)]
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for request, status in requests:
            server.scheduler.status = status
            for way in ("gRPC", "HTTP", "stream"):
                assert refusal_of(WAYS[way], server, request.message())
            refusal_of(WAYS["gRPC"], server, pb.ModelInferRequest(model_name="x" * len(large)))
        gc.collect()
        left = [each for each in gc.garbage if isinstance(each, TracebackType)]
        tensors = [each for each in gc.garbage if isinstance(each, memoryview) and each.nbytes == len(large)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not server_frames(left) and not tensors


def test_codes_have_triton_s_statuses() -> None:
    """Those that Triton's own error codes become; the others are gRPC's."""
    triton = {
        "INTERNAL": 500,
        "NOT_FOUND": 404,
        "UNAVAILABLE": 503,
        "UNIMPLEMENTED": 501,
        "INVALID_ARGUMENT": 400,
        "ALREADY_EXISTS": 400,
        "CANCELLED": 400,
    }
    assert {name: STATUSES[StatusCode[name]] for name in triton} == triton


def test_a_message_that_is_quoted_has_an_end(http: Ask) -> None:
    answer = http("POST", f"/v2/models/{'x' * 3000}/infer", {"inputs": []})
    assert answer.status == 404
    assert len(answer.content["error"]) <= 1003
    assert len(RequestError(StatusCode.INTERNAL, "x" * 3000).message) == 1003
