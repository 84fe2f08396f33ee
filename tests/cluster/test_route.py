"""`gangway route` with a real HAProxy and two real servers of one core: what happens to calls while servers change."""

import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http

from gangway.cluster.haproxy import STOP_TIMEOUT_S, command
from gangway.cluster.haproxy_config import socket_of
from gangway.cluster.moves import Mover
from gangway.cluster.placement import Move
from gangway.cluster.server_address import parse_server
from testing.fetch.haproxy import missing_haproxy, with_haproxy
from testing.live_router import LiveRouter, live_router, server_flag
from testing.live_server import LiveServer, live_server
from testing.processes import descendants_of
from testing.repository import GANGWAY
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers.certificates import Authority
from tests.helpers.steady_calls import simple_inputs, steady_calls
from tests.helpers.whole_server import alive, all_pids, small_repository

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(missing_haproxy()), reason=missing_haproxy())]

CALLS = 500  # of each protocol: before and after what happens to a server
CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, compiled_zoo: CompiledZoo) -> Path:
    return small_repository(tmp_path_factory.mktemp("models"), compiled_zoo)


@contextmanager
def one_core_server(repository: Path, zoo: CompiledZoo, core: int, *flags: str) -> Iterator[LiveServer]:
    more = [f"--cache-dir={zoo.cache_dir}", f"--cores={core}", "--model-control-mode=explicit", "--load-model=simple"]
    with live_server(repository, [*more, "--exit-delay-secs=1", *flags]) as server:
        yield server


@pytest.fixture(scope="module")
def first(repository: Path, compiled_zoo: CompiledZoo) -> Iterator[LiveServer]:
    with one_core_server(repository, compiled_zoo, CORES[0]) as server:
        yield server


@pytest.fixture(scope="module")
def second(repository: Path, compiled_zoo: CompiledZoo) -> Iterator[LiveServer]:
    with one_core_server(repository, compiled_zoo, CORES[-1]) as server:
        yield server


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, first: LiveServer, second: LiveServer) -> Iterator[LiveRouter]:
    flags = [server_flag("first", first), server_flag("second", second), "--refresh=1"]
    with live_router(tmp_path_factory.mktemp("route"), flags) as router:
        yield router


@pytest.fixture
def ending(repository: Path, compiled_zoo: CompiledZoo) -> Iterator[LiveServer]:
    """A server that a test may end."""
    with one_core_server(repository, compiled_zoo, CORES[-1]) as server:
        yield server


def served(server: LiveServer) -> int:
    """Return how many requests for `simple` a server has answered."""
    with triton.InferenceServerClient(server.url) as client:
        return int(client.get_inference_statistics("simple").model_stats[0].inference_stats.success.count)


def kill(server: LiveServer) -> None:
    for pid in all_pids(server):
        os.kill(pid, signal.SIGKILL)


def end(server: LiveServer) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0


@pytest.mark.parametrize("stop", [kill, end])
def test_no_call_fails_when_a_server_stops(
    stop: Callable[[LiveServer], None], tmp_path: Path, first: LiveServer, ending: LiveServer
) -> None:
    with (
        live_router(tmp_path, [server_flag("first", first), server_flag("ending", ending)]) as router,
        steady_calls(router.url, router.http_url) as calls,
    ):
        calls.wait_for(CALLS)
        assert served(ending) > CALLS / 4
        stop(ending)
        calls.wait_for(CALLS)
        calls.end()
    assert not calls.errors


def test_no_call_fails_when_a_model_moves_and_the_router_learns_of_others(
    router: LiveRouter, first: LiveServer, second: LiveServer, repository: Path, compiled_zoo: CompiledZoo
) -> None:
    servers = {"first": first, "second": second}
    addresses = {name: parse_server(server_flag(name, s).removeprefix("--server=")) for name, s in servers.items()}
    mover = Mover(addresses, None, router.folder)
    with steady_calls(router.url, router.http_url) as calls:
        calls.wait_for(CALLS // 2)
        mover.carry_out([Move("simple", "second", load=False)])
        before = served(first)
        calls.wait_for(CALLS // 2)
        assert served(first) >= before + CALLS  # of both protocols
        mover.carry_out([Move("simple", "second", load=True), Move("simple", "first", load=False)])
        calls.wait_for(CALLS // 2)
        # A model that nobody had when the router began: its configuration is replaced under the calls.
        shutil.copytree(repository / "mlp" / "1", repository / "other_mlp" / "1")
        with triton.InferenceServerClient(first.url) as client:
            until(lambda: "other_mlp" in {model.name for model in client.get_model_repository_index().models})
        until(lambda: "grpc:other_mlp" in command(socket_of(router.folder), "show servers state"))
        mover.carry_out([Move("simple", "first", load=True), Move("other_mlp", "first", load=True)])
        tensor = triton.InferInput("input", [1, 16], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 16), np.float32))
        with triton.InferenceServerClient(router.url) as client:
            for _ in range(20):
                client.infer("other_mlp", [tensor])
        calls.wait_for(CALLS // 2)
    assert not calls.errors


def test_connections_without_a_call_outlive_another_configuration(
    tmp_path: Path, first: LiveServer, repository: Path
) -> None:
    """Their next calls are answered: a client may be sending while its connection is closed."""
    with live_router(tmp_path, [server_flag("first", first), "--refresh=1"]) as router, ExitStack() as stack:
        connections = [
            stack.enter_context(closing(http.client.HTTPConnection(router.http_url, timeout=20))) for _ in range(3)
        ]
        for connection in connections:
            assert ask(connection) == 200
        shutil.copytree(repository / "mlp" / "1", repository / "idle_mlp" / "1")
        with triton.InferenceServerClient(first.url) as client:
            client.get_model_repository_index()
        until(lambda: "grpc:idle_mlp" in command(socket_of(router.folder), "show servers state"))
        for connection in connections:
            connection.sock.settimeout(0.5)
            with pytest.raises(TimeoutError):  # no end of the connection
                connection.sock.recv(1)
            connection.sock.settimeout(20)
            assert ask(connection) == 200


def ask(connection: http.client.HTTPConnection) -> int:
    """Ask whether a model is ready; return the status."""
    connection.request("GET", "/v2/models/simple/ready")
    response = connection.getresponse()
    response.read()
    return response.status


def test_errors_say_what_is_wrong(router: LiveRouter) -> None:
    with triton.InferenceServerClient(router.url) as client:
        for model, code, text in (
            ("mlp", "UNAVAILABLE", "no server has the model ready: mlp"),
            ("other", "NOT_FOUND", "unknown model: 'other'"),
            ("x" * 300, "NOT_FOUND", "unknown model"),
        ):
            with pytest.raises(triton.InferenceServerException, match=text) as error:
                client.infer(model, simple_inputs())
            assert error.value.status() == f"StatusCode.{code}"
        assert client.is_model_ready("simple")
        assert not client.is_model_ready("mlp")
        assert client.is_server_live()
        with pytest.raises(triton.InferenceServerException, match="without compression"):
            client.infer("simple", simple_inputs(), request_id="x" * 5000, compression_algorithm="gzip")
        for refused in (lambda: client.load_model("mlp"), client.get_system_shared_memory_status):
            with pytest.raises(triton.InferenceServerException, match="call the server itself"):
                refused()
    with triton_http.InferenceServerClient(router.http_url) as http:
        inputs = simple_inputs(triton_http)
        with pytest.raises(triton.InferenceServerException, match="no server has the model ready: mlp"):
            http.infer("mlp", inputs)
        with pytest.raises(triton.InferenceServerException, match="unknown model: 'other'"):
            http.infer("other", inputs)
        with pytest.raises(triton.InferenceServerException, match="ask the server itself"):
            http.unload_model("simple")


def test_a_stream_stays_on_a_server_and_may_begin_late(router: LiveRouter) -> None:
    answers: list[Any] = []
    with triton.InferenceServerClient(router.url) as client:
        client.start_stream(lambda result, error: answers.append(error or result.as_numpy("OUTPUT0")[0, 0]))
        with triton.InferenceServerClient(router.url) as other:  # a silent stream holds nobody up
            other.infer("simple", simple_inputs())
        for _ in range(3):
            client.async_stream_infer("simple", simple_inputs())
        until(lambda: len(answers) == 3)
        client.stop_stream()
    assert answers == [2, 2, 2]


def test_a_tensor_larger_than_any_buffer(router: LiveRouter) -> None:
    rows = 4096  # more than the model takes: the server says so, having read it all
    inputs = [triton.InferInput(name, [rows, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.zeros((rows, 16), np.int32))
    with triton.InferenceServerClient(router.url) as client:
        with pytest.raises(triton.InferenceServerException, match="batch") as error:
            client.infer("simple", inputs)
        assert error.value.status() == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_the_router_and_its_haproxy(tmp_path: Path, first: LiveServer, number: signal.Signals) -> None:
    """As the end of a terminal, or Ctrl-\\ in it."""
    with live_router(tmp_path, [server_flag("first", first)]) as router:
        haproxy = descendants_of(router.process.pid)
        group = os.getpgid(router.process.pid)  # all of it gets a terminal's signals
        assert not [pid for pid in haproxy if os.getpgid(pid) == group]
        router.process.send_signal(number)
        assert router.process.wait(STOP_TIMEOUT_S) == 0
    assert haproxy and not alive(haproxy)


@pytest.mark.parametrize("secured", ["grpc", "http", "both"])
def test_tls_on_both_sides(tmp_path: Path, repository: Path, compiled_zoo: CompiledZoo, secured: str) -> None:
    """The servers know their clients, so the router and its checks have a certificate, too."""
    authority = Authority(tmp_path)
    identity = authority.issue("server")
    together = tmp_path / "router.pem"
    together.write_bytes(identity.certificate.read_bytes() + identity.key.read_bytes())
    credentials = grpc.ssl_channel_credentials(authority.root.read_bytes())
    known = grpc.ssl_channel_credentials(
        authority.root.read_bytes(), identity.key.read_bytes(), identity.certificate.read_bytes()
    )
    more = [f"--cache-dir={compiled_zoo.cache_dir}", f"--cores={CORES[0]}", "--model-control-mode=explicit"]
    more.append("--load-model=simple")
    protocols = [secured] if secured != "both" else ["grpc", "http"]
    for protocol in protocols:
        more += [f"--{protocol}-use-ssl-mutual=true", f"--{protocol}-root-cert={authority.root}"]
        more += [f"--{protocol}-server-cert={identity.certificate}", f"--{protocol}-server-key={identity.key}"]
    flags = [f"--server-root-certificates={authority.root}", f"--server-certificate={together}"]
    flags += [f"--server-tls={secured}", f"--certificate={together}"]
    with ExitStack() as stack:
        server = stack.enter_context(live_server(repository, more, known if "grpc" in protocols else None))
        address = server_flag("only", server).replace("127.0.0.1", "localhost")
        router = stack.enter_context(live_router(tmp_path, [address], *flags, credentials=credentials))
        client = stack.enter_context(
            triton.InferenceServerClient(router.url, ssl=True, root_certificates=str(authority.root))
        )
        assert (client.infer("simple", simple_inputs()).as_numpy("OUTPUT0") == 2).all()
        context = ssl.create_default_context(cafile=authority.root)
        with urllib.request.urlopen(f"https://{router.http_url}/v2/models/simple", context=context) as answer:
            assert json.load(answer)["name"] == "simple"


def test_round_robin_in_the_client(first: LiveServer, second: LiveServer) -> None:
    """As docs/how-to/many-machines.md has it."""
    policy = [("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')]
    with triton.InferenceServerClient(f"ipv4:{first.url},{second.url}", channel_args=policy) as client:
        client.infer("simple", simple_inputs())
        until(lambda: client.infer("simple", simple_inputs()) and served(second))  # both are connected
        before = served(first), served(second)
        for _ in range(40):
            client.infer("simple", simple_inputs())
    assert served(first) - before[0] == served(second) - before[1] == 20


def route(*flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*GANGWAY, "route", *flags], capture_output=True, text=True, timeout=30, check=False, env=with_haproxy()
    )


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--server=127.0.0.1:1", "--timeout=1"], 3, "no server answers"),
        (["--server=a=x", "--server=a=y"], 2, "two servers have the name a"),
        (["--server=a=x", "--server=b=x"], 2, "two servers have the address x:8001"),
        (["--server=x:99999"], 2, "a port is a number from 1 to 65535"),
        (["--server=x:1,2,3,4"], 2, "is not [NAME=]HOST"),
        (["--server=my server"], 2, "is not [NAME=]HOST"),
        (["--server=x", "--certificate=/none.pem"], 2, "/none.pem: there is no such file"),
        (["--server=x", "--server-certificate=/none.pem"], 2, "/none.pem: there is no such file"),
        (["--server=x", "--server-tls=both"], 2, "give --server-root-certificates, too"),
        (["--server=x", "--output=/tmp/" + "long" * 30], 1, "too long for a socket"),
        ([], 2, "--server"),
    ],
)
def test_what_cannot_be_routed(tmp_path: Path, flags: list[str], status: int, message: str) -> None:
    done = route(f"--output={tmp_path}", *flags)
    assert done.returncode == status, done.stderr
    assert message in done.stderr


def test_written_files_say_who_is_ready_and_a_busy_port_ends_it(tmp_path: Path, first: LiveServer) -> None:
    address = server_flag("first", first)
    done = route(address, "--server=gone=127.0.0.1:1", f"--output={tmp_path}", "--timeout=2", "--write-only")
    assert done.returncode == 0, done.stderr
    assert "warning: gone: no server answers at 127.0.0.1:1" in done.stderr
    states = (tmp_path / "servers.state").read_text()
    assert " grpc:simple 1 first - 2 " in states
    assert " grpc:simple 2 gone - 0 " in states
    grpc_port = first.url.rpartition(":")[2]  # the server's own
    done = route(address, f"--output={tmp_path}", "--address=127.0.0.1", f"--grpc-port={grpc_port}", "--refresh=1")
    assert done.returncode == 1
    assert "haproxy ended" in done.stderr
    assert "annot bind socket" in done.stderr
