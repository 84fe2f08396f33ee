"""Another client, which asks all the time while somebody else misbehaves: nobody else may notice."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection

import numpy as np

from gangway.clients.inputs import infer_request
from testing.live_server import LiveServer
from testing.load import raw_channel, raw_infer
from testing.processes import memory_of, open_descriptors
from testing.waiting import until
from tests.helpers.own_time import OwnTime

PATIENCE_S = 1.0  # of another client, at most
CALLS = 10  # of it, at least
KEPT_BYTES = 48 << 20  # that allocators may keep of what came and went
VALUES = np.ones((1, 16), np.int32)
SMALL = infer_request("simple", "", dict.fromkeys(("INPUT0", "INPUT1"), ("INT32", VALUES))).SerializeToString()
TENSOR = {"shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
BODY = json.dumps({"inputs": [{"name": name, **TENSOR} for name in ("INPUT0", "INPUT1")]}).encode()


class Neighbour:
    """Another client, which asks all the time, over a connection of its own by each protocol."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answered = 0
        self.longest_s = 0.0
        self.errors: list[Exception] = []

    def start(self) -> None:
        self._thread.start()
        until(lambda: self.answered or self.errors)

    def stop(self) -> None:
        until(lambda: self.answered >= CALLS or self.errors)
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with (
            raw_channel(self._server.url) as channel,
            closing(HTTPConnection(self._server.http_url, timeout=5)) as http,
        ):
            infer = raw_infer(channel)
            infer(SMALL, timeout=20)
            own_time = OwnTime()
            while not self._ends.wait(0.01):
                begin = time.monotonic()
                try:
                    if self.answered % 2:
                        infer(SMALL, timeout=5)
                    else:
                        http.request("POST", "/v2/models/simple/infer", BODY)
                        answer = http.getresponse()
                        assert (answer.status, bool(answer.read())) == (200, True)
                except Exception as error:
                    self.errors.append(error)
                    return
                own_time.waited(begin)
                self.answered, self.longest_s = self.answered + 1, own_time.longest_s


@contextmanager
def nobody_else_notices(server: LiveServer) -> Iterator[None]:
    """Others are served while the block lasts; then descriptors and memory are what they were, and the process, too."""
    pids = server.pids()
    (pid,) = pids["front end"]
    neighbour = Neighbour(server)
    neighbour.start()
    descriptors, private_bytes = open_descriptors(pid), memory_of(pid).private_bytes
    try:
        yield
    finally:
        neighbour.stop()
    assert not neighbour.errors
    assert neighbour.longest_s < PATIENCE_S
    until(lambda: open_descriptors(pid) <= descriptors)
    until(lambda: server.busy_slots() == 0)
    assert memory_of(pid).private_bytes - private_bytes < KEPT_BYTES
    assert server.pids() == pids
