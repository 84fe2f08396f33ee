"""The front-end process: what it says to the supervisor, and how it ends."""

import os
import queue
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.artifact.format import TensorSpec
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.messages import unpack
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotStatus, SlotTable
from gangway.protos.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from gangway.server.messages import (
    AllKnown,
    BindFailed,
    Drain,
    FrontEndMessage,
    InitialLoadDone,
    Listening,
    ModelReady,
    ModelUnavailable,
    from_json,
    to_json,
)
from gangway.server.options.command_line import FrontEndOptions, ServeOptions
from gangway.server.options.endpoints import HttpOptions, MetricsOptions

SLOTS = 4
LISTEN = "0A"  # in /proc/net/tcp
NO_METRICS = ServeOptions(metrics=MetricsOptions(allow=False), http=HttpOptions(allowed=False))


class Supervised:
    """A front end of its own, with this test in place of its supervisor."""

    def __init__(self, address: str, serve: ServeOptions = NO_METRICS) -> None:
        self.control = ControlSegment.create(ControlLayout(workers=1, front_ends=2, leases=1))
        self.io = Segment.create(SLOTS * 1024 + (40 << 20), "test-process")
        self.slots = SlotTable(self.io, SLOTS)
        self.slots.init()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20)
        options = FrontEndOptions(
            1,
            self.control.segment.fd,
            self.io.fd,
            theirs.fileno(),
            SLOTS,
            address,
            bell_fd=self.slots.bell.make_event_fd(),
            serve=serve,
        )
        self.process = options.start()
        theirs.close()
        self.send(AllKnown())

    def send(self, message: FrontEndMessage) -> None:
        self.socket.send(to_json(message))

    def receive(self) -> FrontEndMessage:
        return from_json(self.socket.recv(1 << 17))

    def client(self) -> triton.InferenceServerClient:
        message = self.receive()
        assert isinstance(message, Listening)
        return triton.InferenceServerClient(message.address)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        os.close(self.slots.bell.event_fd)


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    front_end = Supervised("127.0.0.1:0")
    yield front_end
    front_end.close()


def test_readiness_follows_the_supervisor(supervised: Supervised) -> None:
    with supervised.client() as client:
        assert client.is_server_live()
        assert not client.is_server_ready()
        supervised.send(ModelUnavailable("m", 1, "compiling", "LOADING"))
        supervised.send(InitialLoadDone())
        supervised.send(Drain())
        assert supervised.process.wait(10) == 0


def test_draining_finishes_running_requests_and_refuses_new_ones(supervised: Supervised, announced: Any) -> None:
    with supervised.client() as client:
        supervised.send(announced.message)
        supervised.send(InitialLoadDone())
        while not client.is_server_ready():
            pass
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client.async_infer("simple", announced.inputs(), callback=lambda result, error: answers.put((result, error)))
        submitted = submitted_to(supervised)
        supervised.send(Drain())
        while client.is_server_ready():
            pass
        with pytest.raises(InferenceServerException, match="the server is stopping"):
            client.infer("simple", announced.inputs(), client_timeout=20)
        assert supervised.process.poll() is None
        supervised.slots.finish(submitted.slot, submitted.generation, SlotStatus.OK)
        result, error = answers.get(timeout=10)
        assert error is None
        assert result.get_response().model_name == "simple"
        assert supervised.process.wait(10) == 0


def test_draining_finishes_the_requests_of_streams(supervised: Supervised, announced: Any) -> None:
    with supervised.client() as client:
        supervised.send(announced.message)
        supervised.send(InitialLoadDone())
        while not client.is_server_ready():
            pass
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("simple", announced.inputs(), request_id="first")
        submitted = submitted_to(supervised)
        supervised.send(Drain())
        while client.is_server_ready():
            pass
        assert supervised.process.poll() is None
        supervised.slots.finish(submitted.slot, submitted.generation, SlotStatus.OK)
        result, error = answers.get(timeout=10)
        assert error is None
        assert result.get_response().id == "first"
        _, error = answers.get(timeout=10)
        assert (error.status(), error.message()) == ("StatusCode.UNAVAILABLE", "the server is stopping")
        assert supervised.process.wait(10) == 0
        client.stop_stream()


def test_a_taken_port_is_reported(supervised: Supervised) -> None:
    message = supervised.receive()
    assert isinstance(message, Listening)
    second = Supervised(message.address)
    try:
        answer = second.receive()
        assert isinstance(answer, BindFailed)
        assert message.address in answer.reason
        assert second.process.wait(10) == 1
    finally:
        second.close()


@pytest.mark.parametrize("allow", [False, True])
def test_metrics_have_a_port_only_if_they_are_wanted(allow: bool) -> None:
    front_end = Supervised("127.0.0.1:0", replace(NO_METRICS, metrics=MetricsOptions(allow, 0, "127.0.0.1")))
    try:
        message = front_end.receive()
        assert isinstance(message, Listening)
        assert bool(message.metrics_address) == allow
        named = {int(address.rpartition(":")[2]) for address in asdict(message).values() if address}
        assert listening_ports(front_end.process.pid) == named
    finally:
        front_end.close()


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which the process accepts connections."""
    inodes = {os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def test_it_does_not_outlive_its_supervisor(supervised: Supervised) -> None:
    supervised.receive()
    supervised.socket.close()
    assert supervised.process.wait(10) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_left_to_the_supervisor(supervised: Supervised, number: signal.Signals) -> None:
    supervised.receive()
    os.kill(supervised.process.pid, number)
    supervised.send(Drain())
    assert supervised.process.wait(10) == 0


def test_a_unix_socket(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/grpc"
    first = Supervised(target)
    try:
        with first.client() as client:
            assert client.is_server_live()
        second = Supervised(target)  # must not take the path away
        try:
            answer = second.receive()
            assert isinstance(answer, BindFailed)
            assert "it is in use" in answer.reason
        finally:
            second.close()
        first.process.kill()
        first.process.wait()
        successor = Supervised(target)  # finds the file that the killed one left
        try:
            with successor.client() as client:
                assert client.is_server_live()
            successor.send(Drain())
            assert successor.process.wait(10) == 0
            assert list(tmp_path.iterdir()) == []
        finally:
            successor.close()
    finally:
        first.close()


IMAGE_BYTES = 32 << 20  # more than the kernel keeps for a client that does not read
LARGE = ModelReady(
    7,
    "large",
    1,
    ModelConfig(
        name="large",
        input=[ModelInput(name="x", data_type="TYPE_UINT8", dims=[16])],
        output=[ModelOutput(name="y", data_type="TYPE_UINT8", dims=[IMAGE_BYTES])],
    ).SerializeToString(),
    (TensorSpec("x", "UINT8", (16,), 16),),
    (TensorSpec("y", "UINT8", (IMAGE_BYTES,), IMAGE_BYTES),),
    0,
    1,
    False,
)


def http_on(address: str, port: int) -> ServeOptions:
    return replace(NO_METRICS, http=HttpOptions(address=address, port=port))


def submitted_to(supervised: Supervised) -> Any:
    """The next request, as the scheduler gets it; it is running then."""
    bell, ring = supervised.control.scheduler_bell, supervised.control.submit_rings[1]
    while True:
        seen = bell.seen()
        if raw := ring.receive():
            break
        assert bell.wait(seen, timeout_us=10_000_000) != seen, "nothing is submitted"
    message = unpack(raw)
    assert supervised.slots.start(message.slot, message.generation)
    return message


def test_draining_sends_http_answers_to_the_last_byte() -> None:
    supervised = Supervised("127.0.0.1:0", http_on("127.0.0.1", 0))
    try:
        message = supervised.receive()
        assert isinstance(message, Listening)
        supervised.send(LARGE)
        host, _, port = message.http_address.partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as slow, slow.makefile("rb") as answer:
            head = b"POST /v2/models/large/infer HTTP/1.1\r\ninference-header-content-length: 0\r\n"
            while True:  # until the model is known
                slow.sendall(b"GET /v2/models/large/ready HTTP/1.1\r\n\r\n")
                line = answer.readline()
                while answer.readline() != b"\r\n":
                    pass
                if b" 200 " in line:
                    break
            slow.sendall(head + b"content-length: 16\r\n\r\n" + bytes(16))
            submitted = submitted_to(supervised)
            supervised.send(Drain())
            supervised.slots.finish(submitted.slot, submitted.generation, SlotStatus.OK)
            with pytest.raises(subprocess.TimeoutExpired):
                supervised.process.wait(0.3)
            assert b" 200 " in answer.readline()
            assert len(answer.read()) > IMAGE_BYTES
        assert supervised.process.wait(10) == 0
    finally:
        supervised.close()


def test_a_taken_http_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        supervised = Supervised("127.0.0.1:0", http_on("127.0.0.1", port))
        try:
            answer = supervised.receive()
            assert isinstance(answer, BindFailed)
            assert answer.reason == f"cannot listen on 127.0.0.1:{port} for HTTP: Address already in use"
            assert supervised.process.wait(10) == 1
        finally:
            supervised.close()
