"""Clients that only take connections or send much metadata, and Python models that fork, hang or answer too much.

The amounts are those of careless clients. Each meets a bound of the server; others shall hardly notice.
"""

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from h2.exceptions import ProtocolError

from benchmarks.faults.surroundings import FAULT_S, TIMEOUT_S, Scene, Situation, post, repeat
from gangway.clients.connection import SERVICE
from gangway.clients.raw_channel import request_headers
from testing.load import running
from testing.processes import command_of, descendants_of
from testing.raw_connection import RawConnection

CONNECTIONS = 400  # to gRPC and to HTTP, each
HEADER_CONNECTIONS, HEADER_PAUSE_S = 4, 0.02
PARTS = [(b"x-part", b"x" * 3000)] * 10  # of metadata; all but the first are references to it
EMPTY_MESSAGE = bytes(5)
KILLS = 5
REFUSED = 400
CONFIG = """backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [1] }
output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""
MODEL = """import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        %s

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", %s)]) for _ in requests]
"""
FORKS = "os.fork() or time.sleep(3600)"
HANGS = "time.sleep(3600)"
START_LIMIT = f"--backend-config=python,stub-timeout-seconds={FAULT_S:.0f}"
ZERO = "np.zeros(1, np.float32)"
TWO_GIB = "np.broadcast_to(np.float32(0), 1 << 29)"  # a view of four bytes
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}]}).encode()


def writes(name: str, initialize: str = "pass", answer: str = ZERO) -> Callable[[Path], None]:
    """Return what writes a Python model into a repository; `initialize`: a statement, `answer`: an expression."""

    def write(repository: Path) -> None:
        folder = repository / name
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text(MODEL % (initialize, answer))
        (folder / "config.pbtxt").write_text(CONFIG)

    return write


def _idle(scene: Scene) -> None:
    """Hundreds of connections to each port say nothing."""
    with ExitStack() as stack:
        for url in (scene.server.url, scene.server.http_url):
            host, _, port = url.rpartition(":")
            for _ in range(CONNECTIONS):
                with suppress(OSError):
                    stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))
        time.sleep(FAULT_S)


def _tables(scene: Scene) -> None:
    """Calls come whose metadata are twice as long as allowed, by references to three kilobytes."""
    over = threading.Event()

    def ask() -> None:
        with suppress(OSError, ProtocolError), RawConnection(scene.server.url) as connection:
            while not over.wait(HEADER_PAUSE_S):
                stream = connection.http.get_next_available_stream_id()
                headers = request_headers(scene.server.url, SERVICE + "ServerLive", TIMEOUT_S)
                connection.http.send_headers(stream, [*headers, *PARTS])
                connection.send(stream, EMPTY_MESSAGE, end=True)
                connection.answer(stream)

    with running([ask] * HEADER_CONNECTIONS, over):
        time.sleep(FAULT_S)


def _repository(scene: Scene, action: str, model: str) -> int:
    """Load or unload a model; return the status. Raises OSError."""
    connection = http.client.HTTPConnection(scene.server.http_url, timeout=TIMEOUT_S)
    try:
        connection.request("POST", f"/v2/repository/models/{model}/{action}")
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def _forked(scene: Scene) -> float:
    """An instance that has forked is killed, again and again; return the longest time until the model answers."""
    _repository(scene, "load", "forks")
    worst_s = 0.0
    for _ in range(KILLS):
        pids = [pid for pid in descendants_of(scene.server.process.pid) if "python_backend" in command_of(pid)]
        begin_s = time.monotonic()
        os.kill(min(pids), signal.SIGKILL)  # the parent
        time.sleep(0.01)
        while _status(scene, "forks") != 200 and time.monotonic() < begin_s + TIMEOUT_S:
            time.sleep(0.01)
        worst_s = max(worst_s, time.monotonic() - begin_s)
    _repository(scene, "unload", "forks")
    return worst_s


def _status(scene: Scene, model: str) -> int:
    try:
        return post(scene.server.http_url, model, BODY)
    except (OSError, http.client.HTTPException):
        return 0


def _hung(scene: Scene) -> None:
    """A model is loaded whose `initialize` does not end, until the server ends it."""
    begin_s = time.monotonic()
    if (status := _repository(scene, "load", "hangs")) != REFUSED or time.monotonic() - begin_s < FAULT_S:
        raise RuntimeError(f"a model that hangs was answered with {status}, not by the limit of its start")


def _huge(scene: Scene) -> None:
    """A model answers with 2 GiB, which is refused."""
    _repository(scene, "load", "huge")
    repeat(lambda: post(scene.server.http_url, "huge", BODY), clients=2)
    _repository(scene, "unload", "huge")


GUARDED = (
    Situation("400 idle connections each, 1024 descriptors", _idle, bounds_p99=True, open_files=1024),
    Situation("400 idle connections each, 256 descriptors", _idle, bounds_p99=True, open_files=256),
    Situation("metadata of references", _tables, bounds_p99=True),
    Situation("a Python instance that has forked is killed", _forked, write=writes("forks", FORKS)),
    Situation("initialize hangs", _hung, bounds_p99=True, write=writes("hangs", HANGS), flags=(START_LIMIT,)),
    Situation("answers of 2 GiB", _huge, bounds_p99=True, write=writes("huge", answer=TWO_GIB)),
)
