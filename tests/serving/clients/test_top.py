"""`gangway top` at a real server, at ports of other kinds, and where nobody is."""

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tritonclient.grpc as triton

from testing.live_server import LiveServer, live_server
from testing.repository import GANGWAY
from tests.conftest import CompiledZoo
from tests.helpers.steady_calls import simple_inputs

pytestmark = pytest.mark.long

TIMEOUT_S = 60
COLUMNS = 80
# Becomes another program. Shells have what runs in the background ignore interrupts.
TAKES_INTERRUPTS = "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def top(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*GANGWAY, "top", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)


def models_of(server: LiveServer) -> list[str]:
    with triton.InferenceServerClient(server.url) as client:
        return [model.name for model in client.get_model_repository_index().models]


def test_each_model_is_in_a_snapshot(gangway_server: LiveServer) -> None:
    with triton.InferenceServerClient(gangway_server.url) as client:
        for _ in range(3):
            client.infer("simple", simple_inputs())
    shown = top(gangway_server.http_url, "--once")
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert f"at {gangway_server.http_url}, up " in lines[0]
    assert re.search(r"of \d+ cores busy, 0 requests, 0 queued$", lines[1])
    for name in models_of(gangway_server):
        assert sum(bool(re.match(rf"[A-Z] +{name} ", line)) for line in lines) == 1
    assert len([line for line in lines if re.match(r" +\d+ +\d+% ", line)]) == len(os.sched_getaffinity(0))


def test_a_pipe_gets_snapshots_until_the_server_ends(compiled_zoo: CompiledZoo, tmp_path: Path) -> None:
    (tmp_path / "simple").symlink_to(compiled_zoo.repository / "simple")
    command = [*GANGWAY, "top"]
    with live_server(tmp_path, [f"--cache-dir={compiled_zoo.cache_dir}"]) as server:
        process = subprocess.Popen(
            [*command, server.http_url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        heads = [line for line, _ in zip(matching(process, "gangway 0"), range(2), strict=False)]
        assert len(heads) == 2
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 3
    assert "has ended the connection" in errors


def matching(process: "subprocess.Popen[str]", begin: str) -> Iterator[str]:
    assert process.stdout is not None
    return (line for line in process.stdout if line.startswith(begin))


def test_a_terminal_gets_a_live_view_that_ctrl_c_ends(gangway_server: LiveServer) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": "24"}
    command = [sys.executable, "-c", TAKES_INTERRUPTS, *GANGWAY, "top", gangway_server.http_url]
    said, is_asked, pressed = b"", False, 0
    with subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        os.close(follower)
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([leader], [], [], 0.1)[0]:
                with suppress(OSError):  # the terminal's other end is closed
                    said += os.read(leader, 1 << 16)
            if b"mlp" in said and not pressed:
                pressed = os.write(leader, b"A")
            if said.count(b"mlp") >= 2 and b"A: " in said and not is_asked:
                is_asked = True
                process.send_signal(signal.SIGINT)
        process.kill()
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (0, b"")
    os.close(leader)
    assert b"last second" in said
    assert re.search(rb"A: (last|no) decision", said), "the key of a model's letter"


class Other(BaseHTTPRequestHandler):
    """A server of something else."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def other_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_who_is_no_gangway(gangway_server: LiveServer) -> None:
    metrics = gangway_server.metrics_url.removeprefix("http://").removesuffix("/metrics")
    with other_server() as other, socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        cases = {
            nobody: f"cannot reach a server at {nobody}: Connection refused",
            gangway_server.url: f"{gangway_server.url} refuses: this port speaks gRPC, not HTTP: HTTP is on port",
            metrics: f"{metrics} is a port of metrics; the one of HTTP is --http-port",
            other: f"{other} is no Gangway: it answers 200",
        }
        for address, message in cases.items():
            shown = top(address, "--once")
            assert shown.returncode == 3, shown
            assert shown.stderr.startswith(f"gangway top: {message}"), shown.stderr
            assert shown.stdout == ""


def test_what_cannot_be_watched_and_wrong_arguments(compiled_zoo: CompiledZoo, tmp_path: Path) -> None:
    (tmp_path / "simple").symlink_to(compiled_zoo.repository / "simple")
    flags = [f"--cache-dir={compiled_zoo.cache_dir}"]
    with live_server(tmp_path, [*flags, "--allow-page=false"]) as server:
        shown = top(server.http_url, "--once")
        assert shown.returncode == 3
        assert "cannot be watched: it is no Gangway, or runs with --allow-page=false" in shown.stderr
    with live_server(tmp_path, [*flags, "--http-restricted-api=statistics:key=secret"]) as server:
        shown = top(server.http_url, "--once")
        assert shown.returncode == 3
        assert "refuses: This API is restricted, expecting header 'key'; give it by --header" in shown.stderr
        assert top(server.http_url, "--once", "--header", "key=secret").returncode == 0


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("here:port", "expected HOST or HOST:PORT, got 'here:port'"),
        ("here:0", "expected HOST or HOST:PORT"),
        ("http://here", "expected HOST or HOST:PORT"),
        ("--header=key", "expected KEY=VALUE"),
        ("--header=key=a\nb", "the value of 'key' cannot be a header's"),
    ],
)
def test_wrong_arguments(argument: str, said: str) -> None:
    shown = top(argument)
    assert shown.returncode == 2
    assert said in shown.stderr
