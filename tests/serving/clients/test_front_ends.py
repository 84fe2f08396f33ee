"""Two front ends behind one address: a real server, and clients that know which of the two they talk with.

The test that kills one stands before the last, the one that ends the server is the last.
"""

import json
import os
import re
import signal
import socket
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.control.supervisor.front_ends import BindError, share_ports
from gangway.server.options.command_line import ServeOptions, parse_options
from gangway.server.options.endpoints import GrpcOptions, HttpOptions, MetricsOptions
from testing.live_server import LiveServer, live_server
from testing.load import EAGER
from testing.processes import shm_names
from testing.waiting import until

TIMEOUT_S = 20
MANY = 64  # connections; that all of so many go to the same one of two front ends happens once in 2^63 times
ROWS = 24  # of a request that takes a while
A = np.arange(16, dtype=np.int32)


@dataclass
class Front:
    """One front end, and a connection that it has accepted."""

    pid: int
    connection: HTTPConnection

    def ask(self, verb: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        self.connection.request(verb, f"/v2/{path}", None if body is None else json.dumps(body))
        response = self.connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None

    def infer(self, model: str = "simple", **more: Any) -> tuple[int, Any]:
        tensors = [{"name": name, "datatype": "INT32", "shape": [1, 16]} for name in ("INPUT0", "INPUT1")]
        data = {"data": A.tolist()}
        inputs = [tensors[0] | more.get("first", data), tensors[1] | data]
        return self.ask("POST", f"models/{model}/infer", {"inputs": inputs})

    def statistics(self, model: str = "simple") -> Any:
        status, answer = self.ask("GET", f"models/{model}/stats")
        assert status == 200, answer
        return answer["model_stats"][0]

    def regions(self) -> list[str]:
        status, answer = self.ask("GET", "systemsharedmemory/status")
        assert status == 200, answer
        return sorted(region["name"] for region in answer)


@dataclass
class Served:
    server: LiveServer
    stack: ExitStack
    fronts: dict[int, Front] = field(default_factory=dict)

    @property
    def pids(self) -> set[int]:
        return set(self.server.pids()["front end"])

    def pair(self) -> tuple[Front, Front]:
        """One connection to each of those that run now."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(pids := self.pids) < 2 or not pids <= self.fronts.keys():
            assert time.monotonic() < deadline
            self._connect()
        first, second = (self.fronts[pid] for pid in sorted(pids))
        return first, second

    def _connect(self) -> None:
        connection = HTTPConnection(self.server.http_url, timeout=TIMEOUT_S)
        try:
            connection.connect()
            connection.request("GET", "/v2/health/live")  # answered, so accepted
            connection.getresponse().read()
            pid = who_has(connection.sock, self.pids)
        except OSError:  # its front end has just been killed
            pid = 0
        if pid in {0, *self.fronts}:
            connection.close()
        else:
            self.fronts[pid] = Front(pid, connection)
            self.stack.callback(connection.close)


def who_has(ours: socket.socket, pids: set[int]) -> int:
    """The process at the other end of a connection of this machine."""
    port, server_port = ours.getsockname()[1], ours.getpeername()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:] + v6_lines():
        fields = line.split()
        ends = tuple(int(address.rpartition(":")[2], 16) for address in fields[1:3])
        if ends == (server_port, port):
            for pid in pids:
                if f"socket:[{fields[9]}]" in links_of(pid):
                    return pid
    return 0


def v6_lines() -> list[str]:
    path = Path("/proc/net/tcp6")
    return path.read_text().splitlines()[1:] if path.exists() else []


def links_of(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(descriptor))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def served(compiled_zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("front_ends")
    for name, config in {"simple": "", "mobilenetv2": f"max_batch_size: {ROWS}"}.items():
        compiled_zoo.link(repository, name, name, config)
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--front-ends=2"]
    flags += ["--model-control-mode=explicit", "--load-model=*"]
    with live_server(repository, flags) as server, ExitStack() as stack:
        yield Served(server, stack)


@pytest.fixture
def segment() -> Iterator[str]:
    """A segment of 64 bytes that holds A; its key."""
    key = f"/front-ends-test-{uuid.uuid4().hex[:12]}"
    handle = shm.create_shared_memory_region("r", key, A.nbytes)
    shm.set_shared_memory_region(handle, [A])
    yield key
    shm.destroy_shared_memory_region(handle)


def test_both_answer_and_either_knows_what_both_have_counted(served: Served) -> None:
    assert len(served.pids) == 2
    first, second = served.pair()
    before = first.statistics()["inference_stats"]["success"]["count"]
    for front, times in ((first, 3), (second, 2)):
        for _ in range(times):
            status, answer = front.infer()
            assert status == 200, answer
            assert answer["outputs"][0]["data"] == (2 * A).tolist()
    counted = first.statistics()
    assert counted == second.statistics()
    assert counted["inference_stats"]["success"]["count"] == counted["inference_count"] == before + 5
    text = urllib.request.urlopen(served.server.metrics_url, timeout=TIMEOUT_S).read().decode()
    assert f'nv_inference_request_success{{model="simple",version="1"}} {before + 5}\n' in text
    assert "gangway_request_slots 2048\n" in text
    assert "gangway_request_slots_in_use 0\n" in text


def test_connections_over_grpc_are_shared_out(served: Served) -> None:
    first, second = served.pair()
    port = int(served.server.url.rpartition(":")[2])
    with ExitStack() as stack:
        for number in range(MANY):  # a subchannel pool of its own is a connection of its own
            options = [("grpc.use_local_subchannel_pool", 1), ("gangway.number", number), *EAGER]
            channel = stack.enter_context(grpc.insecure_channel(served.server.url, options=options))
            ready = channel.unary_unary(
                "/inference.GRPCInferenceService/ServerReady",
                request_serializer=pb.ServerReadyRequest.SerializeToString,
                response_deserializer=pb.ServerReadyResponse.FromString,
            )
            assert ready(pb.ServerReadyRequest(), timeout=TIMEOUT_S).ready
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:] + v6_lines()]
        inodes = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "01"}
        shares = [len(inodes & links_of(front.pid)) for front in (first, second)]
    assert all(shares), shares
    assert sum(shares) >= MANY


def test_a_region_that_one_has_registered_all_know(served: Served, segment: str) -> None:
    first, second = served.pair()
    there = {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": A.nbytes}}
    body = {"key": segment, "byte_size": A.nbytes}
    for one, other in ((first, second), (second, first)):
        assert one.ask("POST", "systemsharedmemory/region/r/register", body)[0] == 200
        status, answer = other.infer(first=there)
        assert status == 200, answer
        assert answer["outputs"][0]["data"] == (2 * A).tolist()
        again = [front.ask("POST", "systemsharedmemory/region/r/register", body) for front in (first, second)]
        assert again[0] == again[1]
        assert again[0][0] != 200 and "already in manager" in again[0][1]["error"]
        assert first.regions() == second.regions() == ["r"]
        assert other.ask("POST", "systemsharedmemory/region/r/unregister")[0] == 200
        assert first.regions() == second.regions() == []
        assert one.infer(first=there)[0] != 200
    bad = first.ask("POST", "systemsharedmemory/region/r/register", {"key": "/absent-segment", "byte_size": 64})
    assert bad[0] != 200 and "Unable to open shared memory region" in bad[1]["error"]


def test_of_many_who_register_one_name_at_once_one_succeeds(served: Served, segment: str) -> None:
    fronts = served.pair()
    body = json.dumps({"key": segment, "byte_size": A.nbytes})

    def register(_number: int) -> int:
        with closing(HTTPConnection(served.server.http_url, timeout=TIMEOUT_S)) as connection:
            connection.request("POST", "/v2/systemsharedmemory/region/once/register", body)
            return connection.getresponse().status

    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(register, range(32)))
    assert statuses.count(200) == 1
    assert [front.regions() for front in fronts] == [["once"]] * 2
    assert fronts[0].ask("POST", "systemsharedmemory/unregister")[0] == 200
    assert [front.regions() for front in fronts] == [[]] * 2


def test_settings_of_one_hold_for_all(served: Served) -> None:
    first, second = served.pair()
    for one, other, level in ((first, second, 1), (second, first, 0)):
        assert one.ask("POST", "logging", {"log_verbose_level": level})[0] == 200
        status, shown = other.ask("GET", "logging")
        assert (status, shown["log_verbose_level"]) == (200, level)
        for path in ("trace/setting", "models/simple/trace/setting"):
            status, shown = one.ask("POST", path, {"trace_rate": str(7 + level), "trace_count": "5"})
            assert (status, shown["trace_rate"]) == (200, str(7 + level))
            assert other.ask("GET", path) == (status, shown)
    text = served.server.log.read_text()
    assert text.count("log settings changed by a client") == 2


def test_a_model_goes_for_all_after_the_last_request_of_any(served: Served) -> None:
    first, second = served.pair()
    image = np.zeros((ROWS, 3, 224, 224), np.float32)
    header = {"inputs": [{"name": "input", "datatype": "FP32", "shape": list(image.shape)}], "outputs": []}
    header["inputs"][0]["parameters"] = {"binary_data_size": image.nbytes}
    text = json.dumps(header).encode()
    long_one = second.connection
    long_one.request(
        "POST",
        "/v2/models/mobilenetv2/infer",
        text + image.tobytes(),
        {"Inference-Header-Content-Length": str(len(text))},
    )
    until(lambda: bool(served.server.busy_slots(running=True)))
    assert first.ask("POST", "repository/models/mobilenetv2/unload")[0] == 200
    answer = long_one.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    for front in (first, second):
        assert front.ask("GET", "models/mobilenetv2/ready")[0] == 400
    assert second.ask("POST", "repository/models/mobilenetv2/load")[0] == 200
    for front in (first, second):
        assert front.ask("GET", "models/mobilenetv2/ready")[0] == 200
    assert first.statistics("mobilenetv2")["inference_count"] == 0, "it begins anew"


def test_a_port_that_others_have_is_refused_although_ports_are_shared(served: Served, compiled_zoo: Any) -> None:
    port = served.server.url.rpartition(":")[2]
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--front-ends=2", f"--grpc-port={port}"]
    said = rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"
    with pytest.raises(RuntimeError, match=said), live_server(compiled_zoo.repository, flags):
        pytest.fail("two servers on one port")


def test_ports_are_held_alone_then_shared() -> None:
    def options(grpc_port: int = 0, http_port: int = 0, metrics_port: int = 0) -> ServeOptions:
        return ServeOptions(
            grpc=GrpcOptions(address="127.0.0.1", port=grpc_port),
            http=HttpOptions(address="127.0.0.1", port=http_port),
            metrics=MetricsOptions(address="127.0.0.1", port=metrics_port),
        )

    with ExitStack() as stack:

        def listener(port: int, reuse: bool) -> socket.socket:
            made = socket.create_server(("127.0.0.1", port), reuse_port=reuse)
            return stack.enter_context(made)

        shared, held = share_ports(options())
        for sock in held:
            stack.enter_context(sock)
        ports = (shared.grpc.port, shared.http.port, shared.metrics.port)
        assert all(ports) and len(set(ports)) == 3
        assert shared.grpc.reuse_port and shared.http.reuse_port and shared.metrics.reuse_port
        with pytest.raises(OSError, match="in use"):
            listener(ports[0], reuse=False)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", ports[0]))
        front_ends = [listener(ports[0], reuse=True) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", ports[0])):
            pass  # by one of those that listen, never by what only holds the port
        failures = ("cannot listen on {}: ", "cannot listen on {} for HTTP: ", "cannot serve metrics on {}: ")
        for number, said in enumerate(failures):
            text = said.format(f"127.0.0.1:{ports[number]}")
            with pytest.raises(BindError, match=re.escape(f"{text}Address already in use")):
                share_ports(options(**{("grpc_port", "http_port", "metrics_port")[number]: ports[number]}))
        for front_end in front_ends:
            front_end.close()
        with pytest.raises(BindError):
            share_ports(options(grpc_port=ports[0]))
        for reuse in (False, True):  # whoever it is
            foreign = listener(0, reuse)
            with pytest.raises(BindError):
                share_ports(options(http_port=foreign.getsockname()[1]))
        held[0].close()
        _, again = share_ports(options(grpc_port=ports[0]))
        for sock in again:
            sock.close()


def test_several_cannot_share_a_unix_socket(capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--model-repository=.", "--cores=0"]
    assert parse_options(needed).general.front_ends == 1
    for flags, said in (
        (["--front-ends=2", "--grpc-address=unix:/tmp/x"], "argument --front-ends: only one can listen on unix:/tmp/x"),
        (["--front-ends=0"], "0 is not from 1 to 16"),
        (["--front-ends=17"], "17 is not from 1 to 16"),
    ):
        with pytest.raises(SystemExit):
            parse_options([*needed, *flags])
        assert said in capsys.readouterr().err


def test_one_that_is_killed_leaves_the_others_serving(served: Served, segment: str) -> None:
    first, second = served.pair()
    body = {"key": segment, "byte_size": A.nbytes}
    assert first.ask("POST", "systemsharedmemory/region/kept/register", body)[0] == 200
    before = second.statistics()["inference_stats"]["success"]["count"]
    assert first.infer()[0] == 200
    os.kill(first.pid, signal.SIGKILL)
    answered = 0
    while len(served.pids) < 2 or first.pid in served.pids:
        assert second.infer()[0] == 200, "its connection has nothing to do with the other"
        answered += 1
    one, other = served.pair()
    successor = one if other.pid == second.pid else other
    assert successor.pid not in (first.pid, second.pid)
    assert successor.regions() == second.regions() == ["kept"]
    there = {"parameters": {"shared_memory_region": "kept", "shared_memory_byte_size": A.nbytes}}
    assert successor.infer(first=there)[0] == 200
    assert successor.statistics()["inference_stats"]["success"]["count"] == before + answered + 2
    assert successor.ask("GET", "logging") == second.ask("GET", "logging")
    assert successor.ask("GET", "models/simple/trace/setting") == second.ask("GET", "models/simple/trace/setting")
    assert second.ask("POST", "systemsharedmemory/region/kept/unregister")[0] == 200
    assert successor.regions() == []
    line = re.search(r"the front end \d \(process (\d+)\) was killed by SIGKILL", served.server.log.read_text())
    assert line and int(line[1]) == first.pid


def test_the_last_the_end_is_one_for_all(served: Served) -> None:
    for front in served.pair():
        assert front.infer()[0] == 200
    count = served.pair()[0].statistics()["inference_stats"]["success"]["count"]
    pids = [pid for same in served.server.pids().values() for pid in same]
    served.server.process.send_signal(signal.SIGTERM)
    assert served.server.process.wait(TIMEOUT_S) == 0
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    text = served.server.log.read_text()
    assert f"simple, version 1, in all: {count} answered, 0 refused" in text
    assert "unfinished" not in text and "Traceback" not in text
    assert [name for name in shm_names() if name.startswith(tuple(f"gangway.{pid}." for pid in pids))] == []
