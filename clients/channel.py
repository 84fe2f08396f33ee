"""What load needs of a client: one connection with many outstanding ModelInfer calls, driven by one thread."""

import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from gangway.clients.connection import SERVICE
from gangway.clients.errors import RefusedError, UnreachableError
from gangway.clients.tls import Tls

INFER_METHOD = SERVICE + "ModelInfer"


class CallResult(NamedTuple):
    """A call that has ended, and when: CLOCK_MONOTONIC nanoseconds.

    `status` is "OK" or a gRPC status, `message` what the server said about an error.
    """

    call: int
    status: str
    message: str
    ended_ns: int


class Channel(Protocol):
    """A connection that calls ModelInfer. Not for several threads.

    The owner waits until `fileno()` is readable or, while `wants_write`, writable, then calls `receive` or `flush`.
    A lost connection raises OSError, and all calls are lost; or it ends each as UNAVAILABLE.
    """

    @property
    def wants_write(self) -> bool:
        """Whether something waits for room in the socket."""
        ...

    @property
    def usable(self) -> bool:
        """Whether new calls may begin."""
        ...

    def fileno(self) -> int:
        """Return the file descriptor to wait for."""
        ...

    def start(self, call: int, request: int) -> None:
        """Start a call with a number of the caller's choice. `request` indexes the requests of the constructor."""
        ...

    def cancel(self, call: int) -> None:
        """Drop a call and tell the server."""
        ...

    def flush(self) -> None:
        """Send what waits for room."""
        ...

    def receive(self) -> list[CallResult]:
        """Return the calls that ended, except cancelled ones."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


# Connects to a URL, with serialised requests, their timeout in seconds, that of connecting, and TLS.
# Raises UnreachableError if nobody answers there as expected; InputError for unusable TLS files.
Connect = Callable[[str, Sequence[bytes], float, float, Tls | None], Channel]


def ready_of(wanted: Mapping[int, int], timeout_s: float | None) -> dict[int, int]:
    """Return events of `poll` by descriptor: what is ready of what is wanted. `select` takes no descriptor above 1023.

    It waits for up to `timeout_s`, to the millisecond; None: as long as it takes.
    """
    poller = select.poll()
    for descriptor, events in wanted.items():
        poller.register(descriptor, events)
    return dict(poller.poll(None if timeout_s is None else timeout_s * 1000))


def call_blocking(channel: Channel, call: int, request: int, what: str, timeout_s: float) -> None:
    """Make one call while no other runs, and wait for its answer. `what` names it in errors.

    Raises RefusedError, UnreachableError.
    """
    until_s = time.monotonic() + timeout_s
    try:
        channel.start(call, request)
        while True:
            left_s = max(until_s - time.monotonic(), 0)
            wanted = select.POLLIN | (select.POLLOUT if channel.wants_write else 0)
            ready = ready_of({channel.fileno(): wanted}, left_s).get(channel.fileno(), 0)
            if ready & select.POLLOUT:
                channel.flush()
            for ended in channel.receive() if ready & ~select.POLLOUT else ():
                if ended.status != "OK":
                    raise RefusedError(f"{what}: {ended.status}: {ended.message}")
                return
            if time.monotonic() >= until_s:
                raise UnreachableError(f"{what} did not answer within {timeout_s:g} s")
    except OSError as error:
        raise UnreachableError(f"{what}: connection lost: {error}") from error
