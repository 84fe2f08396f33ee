"""Clients that leave while a model computes for them; the model tells by a connection of its own what it sees."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from benchmarks.differential.asked import (
    CONNECTION,
    DEADLINE,
    EVENTS,
    HALF,
    HALF_STREAM,
    HTTP,
    JSON,
    RESET,
    STREAM_DEADLINE,
    STREAM_RESET,
    Departs,
    Request,
    texts,
)
from benchmarks.differential.connections import TIMEOUT_S, Addresses, Messages
from benchmarks.differential.wire import Answer, http_body

HOST = "127.0.0.1"
DEADLINE_S = 0.5
PATIENCE_S = 10.0
QUEUED_S = 0.2  # until a request has come that no model tells of
AFTER_MS = "after_ms"


class Ear:
    """Listens to models. Each connection is one request: who has begun, and when it saw that nobody waits."""

    def __init__(self) -> None:
        self._server = socket.create_server((HOST, 0))
        self._begun: SimpleQueue[str] = SimpleQueue()
        self._told: SimpleQueue[tuple[str, float]] = SimpleQueue()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where models connect to."""
        return int(self._server.getsockname()[1])

    def begun(self) -> str:
        """Return who computes, as soon as one does. Raises Empty if none does."""
        return self._begun.get(timeout=PATIENCE_S)

    def told(self, count: int) -> list[tuple[str, float]]:
        """Return who has seen that nobody waits, and when (0: not at all), of so many requests. Raises Empty."""
        found = [self._told.get(timeout=PATIENCE_S) for _ in range(count)]
        time.sleep(QUEUED_S)
        while not self._told.empty():
            found.append(self._told.get())
        return found

    def close(self) -> None:
        """Listen no more."""
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        with connection, connection.makefile() as lines:
            name, _ = lines.readline().split()
            self._begun.put(name)
            seen = lines.readline().strip()
            self._told.put((name, 0.0 if seen == "waited" else float(seen)))


@dataclass(frozen=True)
class Client:
    """A client that has sent its request. `leave`: leave, and return when, by the monotonic clock. `gets`: what it
    still gets.
    """

    leave: Callable[[], float]
    gets: Callable[[], Answer] = lambda: None


Way = Callable[[Addresses, Messages, Request], AbstractContextManager[Client]]


def depart(addresses: Addresses, messages: Messages, step: Departs) -> Answer:
    """Return what the models have seen, after how many ms, and what clients that stay get."""
    with closing(Ear()) as ear, ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        shape = (1, 1) if step.beside else (1,)
        request = Request(step.model, [texts("do", str(ear.port), shape=shape)])
        stays = step.beside or (request if step.behind else None)
        staying = pool.submit(messages.infer, stays) if stays else None
        if step.behind:
            ear.begun()
        client = stack.enter_context(WAYS[step.way](addresses, messages, request))
        if step.behind:
            time.sleep(QUEUED_S)
        else:
            ear.begun()
        left_s = client.leave()
        gets, told = client.gets(), sorted(ear.told(step.tellers))
        if staying is not None and step.behind and "code" not in (beside := staying.result()):
            del beside["outputs"]  # they have the port
        return {
            "seen": [[name, "cancelled" if at_s else "waited"] for name, at_s in told],
            "gets": gets,
            "beside": staying.result() if staying else None,
            AFTER_MS: [round((at_s - left_s) * 1000, 1) for _, at_s in told if at_s],
        }


@contextmanager
def _call(addresses: Addresses, messages: Messages, request: Request) -> Iterator[Client]:
    call = messages.begin(request)
    yield Client(_then_now(call.cancel))


@contextmanager
def _connection(addresses: Addresses, messages: Messages, request: Request) -> Iterator[Client]:
    with closing(Messages(addresses)) as own:
        call = own.begin(request)
        yield Client(_then_now(own.close))
        call.cancel()


@contextmanager
def _deadline(addresses: Addresses, messages: Messages, request: Request) -> Iterator[Client]:
    end_s = time.monotonic() + DEADLINE_S
    call = messages.begin(request, DEADLINE_S)
    yield Client(lambda: end_s, lambda: {"code": call.code().name})


@contextmanager
def _stream(
    addresses: Addresses, messages: Messages, request: Request, timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[Any, SimpleQueue[Request | None]]]:
    """Send a request on a stream that stays open until its queue has None."""
    queue: SimpleQueue[Request | None] = SimpleQueue()
    queue.put(request)
    try:
        yield messages.stream(iter(queue.get, None), {}, timeout_s), queue
    finally:
        queue.put(None)


@contextmanager
def _stream_cancelled(addresses: Addresses, messages: Messages, request: Request) -> Iterator[Client]:
    with _stream(addresses, messages, request) as (call, _):
        yield Client(_then_now(call.cancel))


@contextmanager
def _stream_deadline(addresses: Addresses, messages: Messages, request: Request) -> Iterator[Client]:
    end_s = time.monotonic() + DEADLINE_S
    with _stream(addresses, messages, request, DEADLINE_S) as (call, _):
        yield Client(lambda: end_s, lambda: {"code": call.code().name})


@contextmanager
def _stream_half_closed(addresses: Addresses, messages: Messages, request: Request) -> Iterator[Client]:
    with _stream(addresses, messages, request) as (call, queue):
        yield Client(_then_now(lambda: queue.put(None)), lambda: len(list(call)))


@contextmanager
def _http(addresses: Addresses, messages: Messages, request: Request) -> Iterator[Client]:
    with closing(addresses.connection()) as connection:
        body, headers = http_body(request, JSON)
        connection.request("POST", f"/v2/models/{request.model}/infer", body, dict(headers))
        yield Client(_then_now(connection.close))


@contextmanager
def _http_half_closed(addresses: Addresses, messages: Messages, request: Request) -> Iterator[Client]:
    with closing(addresses.connection()) as connection:
        body, headers = http_body(request, JSON)
        connection.request("POST", f"/v2/models/{request.model}/infer", body, dict(headers))
        yield Client(_then_now(lambda: connection.sock.shutdown(socket.SHUT_WR)), lambda: _status(connection))


@contextmanager
def _events(addresses: Addresses, messages: Messages, request: Request) -> Iterator[Client]:
    with closing(addresses.connection()) as connection:
        body = {each.name: each.elements[0].decode() for each in request.inputs}
        connection.request("POST", f"/v2/models/{request.model}/generate_stream", json.dumps(body))
        yield Client(_then_now(connection.close))


WAYS: Mapping[str, Way] = {
    RESET: _call,
    CONNECTION: _connection,
    DEADLINE: _deadline,
    STREAM_RESET: _stream_cancelled,
    STREAM_DEADLINE: _stream_deadline,
    HALF_STREAM: _stream_half_closed,
    HTTP: _http,
    HALF: _http_half_closed,
    EVENTS: _events,
}


def _then_now(do: Callable[[], object]) -> Callable[[], float]:
    """Return what does this, and says when it is done."""

    def leave() -> float:
        do()
        return time.monotonic()

    return leave


def _status(connection: http.client.HTTPConnection) -> Answer:
    try:
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
