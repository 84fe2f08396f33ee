"""A front end in this process over real shared memory, with a thread in place of scheduler and workers.

The real ones are exercised by the tests that start the whole server; here a test decides when and how a request ends.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm

from gangway.artifact.format import TensorSpec
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.messages import Cancel, Submit, unpack
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotStatus, SlotTable
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.access import Restrictions, TlsFiles, parse_restriction
from gangway.server.control.repository.completed_config import complete_config, max_rows
from gangway.server.messages import InitialLoadDone, ModelReady
from gangway.server.options.command_line import ServeOptions
from gangway.server.options.endpoints import GrpcOptions, HttpOptions
from gangway.server.options.server import AccessLogOptions, GeneralOptions
from gangway.server.requests.data_plane import DataPlane, Usage
from gangway.server.serving.grpc.streams import StreamLimits
from gangway.server.serving.loop import THREADS, ServingLoop
from gangway.server.serving.process import FrontEnd, Surroundings
from testing.waiting import until
from tests.helpers.client_segments import Segments
from tests.helpers.http_requests import HttpAsk, ask_http

SLOTS = 8
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
HTTP_RESTRICTIONS = Restrictions((parse_restriction("logging,model-repository:secret=42"),))
IO_BYTES = 64 * 1024 * 1024
NO_ACCESS_LOG = AccessLogOptions()
GENERAL = GeneralOptions()
STREAM_LIMITS = StreamLimits(
    streams=6,
    in_flight=4,
    unsent_bytes=1 << 20,
    stall_seconds=0.05,
    slow_bytes=1 << 30,
    message_bytes=MAX_MESSAGE_BYTES,
)


def announce(model_id: int, name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], batch: int) -> ModelReady:
    batched = inputs[0].shape[0] == -1
    config = complete_config(ModelConfig(max_batch_size=batch), name, inputs, outputs, batched)
    encoded = config.SerializeToString()
    rows = max_rows(config, batched)
    return ModelReady(model_id, name, 1, encoded, tuple(inputs), tuple(outputs), config.max_batch_size, rows, batched)


INT16 = {"datatype": "INT32", "shape": (-1, 16), "row_bytes": 64}
SIMPLE = announce(
    0,
    "simple",
    [TensorSpec("INPUT0", **INT16), TensorSpec("INPUT1", **INT16)],
    [TensorSpec("OUTPUT0", **INT16), TensorSpec("OUTPUT1", **INT16)],
    batch=8,
)
IMAGE = announce(
    1,
    "image",
    [TensorSpec("x", "FP32", (1, 3, 224, 224), 602112)],
    [TensorSpec("y", "FP32", (1, 3, 224, 224), 602112)],
    batch=0,
)
DATATYPES = ("BOOL", "INT8", "INT16", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64")
NUMPY_SIZES = {name: np.dtype(triton.triton_to_np_dtype(name)).itemsize for name in DATATYPES}
IDENTITIES = tuple(
    announce(
        2 + index,
        f"identity_{name.lower()}",
        [TensorSpec("x", name, (-1, 4), 4 * size)],
        [TensorSpec("y", name, (-1, 4), 4 * size)],
        batch=4,
    )
    for index, (name, size) in enumerate(NUMPY_SIZES.items())
)
HALF = {"datatype": "FP32", "shape": (1, 40_000), "row_bytes": 160_000}
PAIR = announce(
    2 + len(IDENTITIES), "pair", [TensorSpec("a", **HALF), TensorSpec("b", **HALF)], [TensorSpec("y", **HALF)], batch=0
)
TEXTS = announce(
    PAIR.model_id + 1, "texts", [TensorSpec("x", "BYTES", (1, -1), 0)], [TensorSpec("y", "BYTES", (1, -1), 0)], 0
)
MODELS = (SIMPLE, IMAGE, *IDENTITIES, PAIR, TEXTS)


@dataclass
class FakeScheduler:
    """Answers submitted slots in a thread: `simple` adds and subtracts, the others return their last input.

    While `holding`, requests are started but not answered: `held` receives their slots, `answer` ends one. A cancelled
    request ends at once, as the real scheduler sees to it.
    """

    control: ControlSegment
    io: Segment
    slots: SlotTable
    holding: bool = False
    status: SlotStatus = SlotStatus.OK
    held: "queue.SimpleQueue[Submit]" = field(default_factory=queue.SimpleQueue)
    cancelled: "queue.SimpleQueue[Cancel]" = field(default_factory=queue.SimpleQueue)
    stopping: bool = False

    def run(self) -> None:
        bell, ring = self.control.scheduler_bell, self.control.submit_rings[0]
        while not self.stopping:
            seen = bell.seen()
            while raw := ring.receive():
                self.receive(unpack(raw))
            bell.wait(seen, spin_us=0, timeout_us=1_000_000)

    def receive(self, message: object) -> None:
        if isinstance(message, Submit):
            self.slots.start(message.slot, message.generation)
            if self.holding:
                self.held.put(message)
            else:
                self.answer(message)
        elif isinstance(message, Cancel):
            self.cancelled.put(message)
            self.slots.finish(message.slot, message.generation, SlotStatus.CANCELLED)

    def answer(self, submitted: Submit) -> None:
        request = self.slots.request(submitted.slot)
        model = MODELS[request.model_id]
        sizes = [request.rows * spec.row_bytes for spec in (*model.inputs, *model.outputs)]
        offsets = [*request.input_offsets[: len(model.inputs)], *request.output_offsets[: len(model.outputs)]]
        tensors = [self.io.view[at : at + size] for at, size in zip(offsets, sizes, strict=True)]
        if model.name == "simple":
            a, b, total, difference = (np.frombuffer(tensor, np.int32) for tensor in tensors)
            np.add(a, b, out=total)
            np.subtract(a, b, out=difference)
        else:
            tensors[-1][:] = tensors[-2]
        self.slots.finish(submitted.slot, submitted.generation, self.status)

    def stop(self) -> None:
        self.stopping = True
        self.control.scheduler_bell.ring()


@dataclass(frozen=True)
class Server:
    """What a test works with."""

    url: str
    front_end: FrontEnd
    plane: DataPlane
    scheduler: FakeScheduler
    client: triton.InferenceServerClient
    serving: ServingLoop
    max_message_bytes: int = MAX_MESSAGE_BYTES
    http_url: str = ""

    @contextmanager
    def without_threads(self) -> Iterator[None]:
        """The loop's threads are at something else."""
        released = threading.Event()
        for _ in range(THREADS):
            self.serving.aside(released.wait, 60)
        try:
            yield
        finally:
            released.set()


@contextmanager
def front_end_server(
    options: GrpcOptions,
    http_tls: TlsFiles | None = None,
    access_log: AccessLogOptions = NO_ACCESS_LOG,
    general: GeneralOptions = GENERAL,
) -> Iterator[Server]:
    """A front end of its own. Nothing of it is left at the end."""
    control = ControlSegment.create(ControlLayout(workers=1, front_ends=1, leases=1))
    io = Segment.create(IO_BYTES, "test-io")
    slots = SlotTable(io, SLOTS)
    slots.init()
    event_fd = slots.bell.make_event_fd()
    serving = ServingLoop()
    serving.start()
    scheduler = FakeScheduler(control, io, slots)
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    plane = DataPlane(io, slots, control.submit_rings[0], control.scheduler_bell)
    limits = replace(STREAM_LIMITS, message_bytes=options.max_message_bytes)
    http_options = HttpOptions(max_body_bytes=options.max_message_bytes, restrictions=HTTP_RESTRICTIONS, tls=http_tls)
    serve_options = ServeOptions(general=general, grpc=options, http=http_options, access_log=access_log)
    front_end = FrontEnd(plane, serve_options, serving, Surroundings(stream_limits=limits))
    address = front_end.listen("127.0.0.1:0")
    http_url = front_end.http.listen("127.0.0.1:0")
    for model in MODELS:
        front_end.handle(model)
    front_end.handle(InitialLoadDone())
    with triton.InferenceServerClient(address) as client:
        yield Server(address, front_end, plane, scheduler, client, serving, options.max_message_bytes, http_url)
    front_end.http.stop()
    front_end.server.stop(5)
    serving.stop()
    if front_end.access_log is not None:
        front_end.access_log.close()
    front_end.descriptors.close()
    os.close(event_fd)
    scheduler.stop()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def serving() -> Iterator[ServingLoop]:
    """A loop that runs."""
    loop = ServingLoop()
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture(scope="module")
def running_server() -> Iterator[Server]:
    with front_end_server(GrpcOptions(max_message_bytes=MAX_MESSAGE_BYTES)) as server:
        yield server


@pytest.fixture(scope="module")
def start_front_end() -> Iterator[Callable[..., Server]]:
    """Starts a front end with options of gRPC; it lives as long as the module's tests."""
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(front_end_server(*options))


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    """The running server; soon after the test's last answer nothing may be taken any more."""
    scheduler = running_server.scheduler
    scheduler.held, scheduler.cancelled = queue.SimpleQueue(), queue.SimpleQueue()
    yield running_server
    scheduler.holding, scheduler.status = False, SlotStatus.OK
    until(lambda: running_server.plane.usage() == Usage(0, 0))  # after handlers of calls that the client gave up


@contextmanager
def no_more_threads() -> Iterator[None]:
    """No thread can be started in this process: none would get so large a stack."""
    usual_bytes = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(usual_bytes)


@pytest.fixture
def simple_inputs() -> Callable[..., list[triton.InferInput]]:
    """Makes inputs of the model `simple`: a counts up, b is ones."""

    def make(rows: int = 1) -> list[triton.InferInput]:
        a = np.arange(16 * rows, dtype=np.int32).reshape(rows, 16)
        inputs = [triton.InferInput(name, [rows, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        inputs[0].set_data_from_numpy(a)
        inputs[1].set_data_from_numpy(np.ones_like(a))
        return inputs

    return make


@pytest.fixture
def segments(server: Server) -> Iterator[Segments]:
    """Makes segments; at the end nothing of them may be open."""
    made = Segments(server.client)
    yield made
    server.client.unregister_system_shared_memory()
    assert not any(made.is_open(name) for name in made.handles)
    for handle in made.handles.values():
        shm.destroy_shared_memory_region(handle)


@dataclass(frozen=True)
class Announced:
    """The model `simple`: its announcement and a maker of inputs."""

    message: ModelReady
    inputs: Callable[..., list[triton.InferInput]]


@pytest.fixture
def announced(simple_inputs: Callable[..., list[triton.InferInput]]) -> Announced:
    return Announced(SIMPLE, simple_inputs)


@pytest.fixture
def http(server: Server) -> HttpAsk:
    """Asks the server of this process."""
    return partial(ask_http, server.http_url)


@pytest.fixture(scope="module")
def live_http(gangway_server: Any) -> HttpAsk:
    """Asks `gangway serve`."""
    return partial(ask_http, gangway_server.http_url)
