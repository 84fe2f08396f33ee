"""`is_cancelled()` of requests whose clients go, in whatever way, while a Python model computes for them."""

import http.client
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.live_server import live_server
from testing.processes import command_of, descendants_of
from testing.waiting import until
from tests.helpers import ensemble_configs
from tests.helpers.certificates import Authority
from tests.helpers.own_time import OwnTime
from tests.helpers.python_models import config_of, write
from tests.helpers.served import TIMEOUT_S, Served, inputs_of, serving

pytestmark = pytest.mark.long

SEEN_WITHIN_S = 0.25  # 50 ms, and what polling adds
DEADLINE_S = 1.2  # of a client; its request has reached the last step by then, on a busy machine, too
# `watch` notes that it has begun, and when it has seen that the request is cancelled, by the clock of all processes.
WATCHES = """
    def initialize(self, args):
        import os
        self.notes = os.path.join(args["model_repository"], "notes")

    def note(self, text):
        with open(self.notes, "a") as file:
            file.write(text + "\\n")

    def number(self, request):
        return int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy().flat[0])

    def watch(self, request, number, asks=None):
        import time
        asks = asks or request.is_cancelled
        self.note(f"begun {number} 0")
        until_s = time.monotonic() + 5
        while not asks() and time.monotonic() < until_s:
            time.sleep(0.001)
        self.note(f"{'cancelled' if asks() else 'missed'} {number} {time.monotonic()}")

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""
PLAIN = """
    def execute(self, requests):
        for request in requests:
            self.watch(request, self.number(request))
        return [self.answer(request) for request in requests]
"""
SENDER = PLAIN.replace("self.number(request))", "self.number(request), request.get_response_sender().is_cancelled)")
COROUTINE = """
    async def execute(self, requests):
        import asyncio
        for request in requests:
            await asyncio.to_thread(self.watch, request, self.number(request))
        return [self.answer(request) for request in requests]
"""
# Of a batch, only the first request is waited for: the others' clients stay, and get their answers.
BATCHED = """
    def execute(self, requests):
        if len(requests) == 1:
            return [self.answer(request) for request in requests]
        for request in requests:
            if self.number(request) == 1:
                self.watch(request, 1)
        for request in requests:
            if self.number(request) != 1:
                self.note(f"{'cancelled' if request.is_cancelled() else 'waited-for'} {self.number(request)} 0")
        return [self.answer(request) for request in requests]
"""
LEFT = """
    def execute(self, requests):
        for request in requests:
            inner = pb_utils.InferenceRequest(model_name="echo", inputs=request.inputs(), requested_output_names=["y"])
            assert not inner.exec().has_error()
            self.watch(request, self.number(request))
        return [self.answer(request) for request in requests]
"""
ASKS = """
    def execute(self, requests):
        for request in requests:
            inner = pb_utils.InferenceRequest(model_name="plain", inputs=request.inputs(), requested_output_names=["y"])
            inner.exec()
            self.note(f"{'cancelled' if request.is_cancelled() else 'missed'} {self.number(request)} 0")
        return [self.answer(request) for request in requests]
"""
DECOUPLED = """
    def execute(self, requests):
        import threading
        for request in requests:
            threading.Thread(target=self.stream, args=(request,), daemon=True).start()

    def stream(self, request):
        sender = request.get_response_sender()
        sender.send(self.answer(request))
        self.watch(request, self.number(request))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED_COROUTINE = """
    async def execute(self, requests):
        import asyncio
        for request in requests:
            await asyncio.to_thread(self.watch, request, self.number(request))
            request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Models that give up what they have asked another one for, while their own clients wait.
GIVES_UP = """
    async def execute(self, requests):
        import asyncio, time
        for request in requests:
            inner = pb_utils.InferenceRequest(model_name="plain", inputs=request.inputs(), requested_output_names=["y"])
            try:
                await asyncio.wait_for(inner.async_exec(), 0.2)
            except asyncio.TimeoutError:
                self.note(f"left {self.number(request)} {time.monotonic()}")
            await asyncio.sleep(0.3)
        return [self.answer(request) for request in requests]
"""
STOPS = """
    def execute(self, requests):
        import time
        for request in requests:
            inner = pb_utils.InferenceRequest(model_name="decoupled", inputs=request.inputs())
            responses = inner.exec(decoupled=True)
            assert next(responses).output_tensors()
            responses.cancel()
            self.note(f"left {self.number(request)} {time.monotonic()}")
            assert list(responses) == []
            time.sleep(0.3)
        return [self.answer(request) for request in requests]
"""
STOPS_A_THREAD = """
    def execute(self, requests):
        import threading, time
        for request in requests:
            inner = pb_utils.InferenceRequest(model_name="decoupled", inputs=request.inputs())
            responses = inner.exec(decoupled=True)
            assert next(responses).output_tensors()
            thread = threading.Thread(target=list, args=(responses,))
            thread.start()
            time.sleep(0.1)
            responses.cancel()
            self.note(f"left {self.number(request)} {time.monotonic()}")
            thread.join()
        return [self.answer(request) for request in requests]
"""
ECHO = """
    def execute(self, requests):
        return [self.answer(request) for request in requests]
"""
MODELS = {
    "plain": PLAIN,
    "sender": SENDER,
    "coroutine": COROUTINE,
    "left": LEFT,
    "asks": ASKS,
    "echo": ECHO,
    "inner": PLAIN,
    "gives_up": GIVES_UP,
    "stops": STOPS,
    "stops_a_thread": STOPS_A_THREAD,
}
NOTES_OF = {"chain": "inner", "asks": "plain", "decoupled_chain": "inner"}  # the model that watches


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    for name, body in MODELS.items():
        write(repository, name, WATCHES + body, config_of("x:FP32:1", "y:FP32:1"))
    write(repository, "short", WATCHES.replace("+ 5", "+ 0.3") + PLAIN, config_of("x:FP32:1", "y:FP32:1"))
    decoupled = config_of("x:FP32:1", "y:FP32:1", more="model_transaction_policy { decoupled: true }")
    write(repository, "decoupled", WATCHES + DECOUPLED, decoupled)
    write(repository, "decoupled_coroutine", WATCHES + DECOUPLED_COROUTINE, decoupled)
    joins = "dynamic_batching { max_queue_delay_microseconds: 300000 }"
    write(repository, "batched", WATCHES + BATCHED, config_of("x:FP32:1", "y:FP32:1", batch=2, more=joins))
    steps = [("echo", "x=x", "y=a"), ("inner", "x=a", "y=y")]
    ensemble_configs.write(repository, "chain", ensemble_configs.config_of("x:FP32:1", "y:FP32:1", steps, batch=0))
    steps = [("echo", "x=x", "y=a"), ("decoupled", "x=a", "y=b"), ("inner", "x=b", "y=y")]
    decoupled = ensemble_configs.config_of(
        "x:FP32:1", "y:FP32:1", steps, batch=0, more="model_transaction_policy { decoupled: true }"
    )
    ensemble_configs.write(repository, "decoupled_chain", decoupled)
    with serving(repository, cwd=repository.parent) as served:
        yield served


class Notes:
    """What a model has noted of one request."""

    def __init__(self, served: Served, model: str, number: int, by: str = "") -> None:
        self._path = served.repository / (by or NOTES_OF.get(model, model)) / "notes"
        self._number = str(number)

    def of(self, what: str) -> float | None:
        """When the model has noted this; None if it has not."""
        if not self._path.exists():
            return None
        for line in self._path.read_text().splitlines():
            noted, number, at_s = line.split()
            if (noted, number) == (what, self._number):
                return float(at_s)
        return None

    def begun(self) -> None:
        """Return when the model watches the request."""
        until(lambda: self.of("begun") is not None)

    def seen_s(self) -> float:
        """When it has seen that the request is cancelled."""
        until(lambda: self.of("cancelled") is not None or self.of("missed") is not None)
        at_s = self.of("cancelled")
        assert at_s is not None, "the model has not seen it"
        return at_s


def assert_seen_soon(notes: Notes, left_s: float, own_time: OwnTime) -> None:
    """The model sees that the client has left, at once but for what others of this machine take."""
    notes.seen_s()
    own_time.waited(left_s)
    assert own_time.longest_s < SEEN_WITHIN_S


def ignore(*_: Any, **__: Any) -> None:
    """Take an answer that nobody waits for."""


def resets(served: Served, model: str, feeds: dict[str, Any], begun: Callable[[], None]) -> float:
    """The client cancels the call (RST_STREAM)."""
    call = served.client.async_infer(model, inputs_of(feeds), ignore)
    begun()
    call.cancel()
    return time.monotonic()


def closes(served: Served, model: str, feeds: dict[str, Any], begun: Callable[[], None]) -> float:
    """The client closes its connection."""
    client = triton.InferenceServerClient(served.server.url)
    client.async_infer(model, inputs_of(feeds), ignore)
    begun()
    client.close()
    return time.monotonic()


def expires(served: Served, model: str, feeds: dict[str, Any], begun: Callable[[], None]) -> float:
    """The client's deadline passes (grpc-timeout)."""
    begin_s = time.monotonic()
    served.client.async_infer(model, inputs_of(feeds), ignore, client_timeout=DEADLINE_S)
    begun()
    return begin_s + DEADLINE_S


def hangs_up(served: Served, model: str, feeds: dict[str, Any], begun: Callable[[], None]) -> float:
    """A client of HTTP closes its connection."""
    ((name, array),) = feeds.items()
    body = {"inputs": [{"name": name, "shape": array.shape, "datatype": "FP32", "data": array.tolist()}]}
    with closing(http.client.HTTPConnection(served.server.http_url)) as connection:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
        begun()
    return time.monotonic()


def hangs_up_by_http_1_0(served: Served, model: str, feeds: dict[str, Any], begun: Callable[[], None]) -> float:
    """A client of HTTP/1.0, as nginx is to its servers, closes its connection."""
    with socket.create_connection(served.server.http_url.split(":"), timeout=TIMEOUT_S) as connection:
        connection.sendall(plain_request(model, feeds["x"][0], "1.0"))
        begun()
    return time.monotonic()


def hangs_up_on_events(served: Served, model: str, feeds: dict[str, Any], begun: Callable[[], None]) -> float:
    """A client of HTTP that gets server-sent events closes its connection."""
    ((name, array),) = feeds.items()
    with closing(http.client.HTTPConnection(served.server.http_url)) as connection:
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps({name: array.tolist()}))
        begun()
    return time.monotonic()


def ends_its_stream(served: Served, model: str, feeds: dict[str, Any], begun: Callable[[], None]) -> float:
    """The client cancels its stream."""
    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(ignore)
        client.async_stream_infer(model, inputs_of(feeds))
        begun()
        at_s = time.monotonic()
        client.stop_stream(cancel_requests=True)
    return at_s


def stream_expires(served: Served, model: str, feeds: dict[str, Any], begun: Callable[[], None]) -> float:
    """The deadline of the client's stream passes."""
    with triton.InferenceServerClient(served.server.url) as client:
        begin_s = time.monotonic()
        client.start_stream(ignore, stream_timeout=DEADLINE_S)
        client.async_stream_infer(model, inputs_of(feeds))
        begun()
        until(lambda: time.monotonic() > begin_s + DEADLINE_S)
    return begin_s + DEADLINE_S


UNARY, STREAMS = (resets, closes, expires, hangs_up), (ends_its_stream, stream_expires)
CASES = [
    *[("plain", way) for way in (*UNARY, *STREAMS, hangs_up_by_http_1_0)],
    *[(model, way) for model in ("sender", "coroutine") for way in (resets, hangs_up)],
    *[(model, way) for model in ("left", "asks", "chain") for way in (resets, expires, hangs_up, ends_its_stream)],
    *[
        (model, way)
        for model in ("decoupled", "decoupled_coroutine", "decoupled_chain")
        for way in (*STREAMS, hangs_up_on_events)
    ],
]


@pytest.mark.parametrize(
    ("model", "way", "number"),
    [
        pytest.param(model, way, number, id=f"{model}-{way.__name__}")
        for number, (model, way) in enumerate(CASES, start=10)
    ],
)
def test_a_model_sees_that_its_client_has_gone(served: Served, model: str, way: Any, number: int) -> None:
    notes, own_time = Notes(served, model, number), OwnTime()
    left_s = way(served, model, {"x": np.array([number], np.float32)}, notes.begun)
    assert notes.seen_s() - left_s > -0.05
    if model == "decoupled_chain":  # and so does the step before, which goes on
        Notes(served, model, number, "decoupled").seen_s()
    own_time.waited(left_s)
    assert own_time.longest_s < SEEN_WITHIN_S
    if model == "asks":  # and so does the model that has asked it
        assert Notes(served, "asks", number, model).seen_s() == 0
    y = served.infer("echo", x=np.array([3], np.float32))["y"]
    assert np.array_equal(y, np.array([3], np.float32))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("model", "number", "asked"),
    [("gives_up", 101, "plain"), ("stops", 102, "decoupled"), ("stops_a_thread", 103, "decoupled")],
)
def test_a_model_gives_up_what_it_has_asked_for(served: Served, model: str, number: int, asked: str) -> None:
    x = np.array([number], np.float32)
    assert np.array_equal(served.infer(model, x=x)["y"], x)
    left_s = Notes(served, model, number).of("left")
    assert left_s is not None
    assert Notes(served, asked, number).seen_s() - left_s < SEEN_WITHIN_S


def test_one_client_of_a_batch_goes(served: Served) -> None:
    notes, answers, own_time = Notes(served, "batched", 1), [], OwnTime()
    staying = threading.Thread(
        target=lambda: answers.append(served.infer("batched", x=np.array([[2]], np.float32))["y"])
    )
    staying.start()
    left_s = resets(served, "batched", {"x": np.array([[1]], np.float32)}, notes.begun)
    assert_seen_soon(notes, left_s, own_time)
    staying.join(TIMEOUT_S)
    assert np.array_equal(answers, [[[2]]])
    assert Notes(served, "batched", 2).of("waited-for") == 0


@pytest.mark.parametrize(("version", "number"), [("1.0", 7), ("1.1", 8)])
def test_a_client_that_has_closed_its_sending_side_waits(served: Served, version: str, number: int) -> None:
    """It gets its answer: the model is not told that it has gone, however often it asks."""
    with socket.create_connection(served.server.http_url.split(":"), timeout=TIMEOUT_S) as connection:
        connection.sendall(plain_request("short", number, version))
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.count(b"HTTP/1.1") == 1
    assert Notes(served, "short", number).of("missed") is not None


def plain_request(model: str, number: float, version: str) -> bytes:
    """A request over HTTP, as bytes."""
    body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [float(number)]}]})
    head = f"POST /v2/models/{model}/infer HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"{head}{body}".encode()


def test_clients_with_tls_go(tmp_path: Path) -> None:
    own = Authority(tmp_path).issue("server")
    root = tmp_path / "authority.crt"
    repository = tmp_path / "models"
    write(repository, "plain", WATCHES + PLAIN, config_of("x:FP32:1", "y:FP32:1"))
    flags = [f"--cache-dir={tmp_path / 'cache'}"]
    for protocol in ("grpc", "http"):
        flags.append(f"--{protocol}-use-ssl=true")
        flags += [f"--{protocol}-server-cert={own.certificate}", f"--{protocol}-server-key={own.key}"]
    credentials = grpc.ssl_channel_credentials(root.read_bytes())
    with live_server(repository, flags, credentials, cwd=tmp_path) as server:
        secure = triton.InferenceServerClient(server.url, ssl=True, root_certificates=str(root))
        served = Served(server, secure, repository)
        notes, own_time = Notes(served, "plain", 1), OwnTime()
        secure.async_infer("plain", inputs_of({"x": np.array([1], np.float32)}), ignore)
        notes.begun()
        secure.close()
        left_s = time.monotonic()
        assert_seen_soon(notes, left_s, own_time)
        context, body = ssl.create_default_context(cafile=root), {"name": "x", "shape": [1], "datatype": "FP32"}
        notes, own_time = Notes(served, "plain", 2), OwnTime()
        with closing(http.client.HTTPSConnection(server.http_url, context=context)) as connection:
            connection.request("POST", "/v2/models/plain/infer", json.dumps({"inputs": [{**body, "data": [2]}]}))
            notes.begun()
        left_s = time.monotonic()
        assert_seen_soon(notes, left_s, own_time)


def test_the_front_end_of_a_client_ends(served: Served) -> None:
    """Nobody waits for what came by it."""
    notes, own_time = Notes(served, "plain", 3), OwnTime()
    with triton.InferenceServerClient(served.server.url) as client:
        client.async_infer("plain", inputs_of({"x": np.array([3], np.float32)}), ignore)
        notes.begun()
        (pid,) = [pid for pid in descendants_of(served.server.process.pid) if "serving.process" in command_of(pid)]
        left_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert_seen_soon(notes, left_s, own_time)
    until(lambda: is_served(served))


def is_served(served: Served) -> bool:
    """Whether a new front end answers."""
    try:
        with triton.InferenceServerClient(served.server.url) as client:
            return client.infer("echo", inputs_of({"x": np.array([3], np.float32)})).as_numpy("y")[0] == 3
    except InferenceServerException:
        return False
