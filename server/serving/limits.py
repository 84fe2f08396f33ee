"""Who gives way when there is too much: connections, and calls that wait for their clients. For every protocol."""

import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final, Protocol

RESERVED: Final = 64  # connections above the limit, which can ask for health only
RESERVED_WHEN_SHORT: Final = 8  # where hardly any descriptor is free
GRACE_SECONDS: Final = 5.0  # granted to every request that has begun to come
IDLE_GRACE_SECONDS: Final = 1.0  # granted to every client between two requests


class Phase(IntEnum):
    """What a connection is doing. Those whose client is to act give way, in this order."""

    SILENT = 0  # no request so far
    IDLE = 1  # between two requests
    RECEIVING = 2  # a request has begun and is not complete
    ANSWERING = 3


class LimitedConnection(Protocol):
    """What must be known of a connection."""

    phase: Phase
    since_s: float  # when the phase began, by the event loop's clock

    def give_way(self) -> None:
        """Close."""


class ConnectionLimit:
    """How many connections there may be, and which of them gives way to a new one. For one event loop's thread.

    Beyond `limit` a new connection replaces the one for whose client the server has waited longest, so silent clients
    keep nobody out. Where all clients wait for the server, RESERVED more connections may ask for health; of these the
    oldest gives way. `is_short` says that descriptors lack: then new connections can ask for health only. All silent
    ones give way to them, or one other: which descriptors that has freed is seen at the next look at them.
    `patience`: the part of the usual times for which a client that is to act is waited for.
    """

    def __init__(self, limit: int, is_short: Callable[[], bool] = lambda: False, patience: float = 1.0) -> None:
        self.limit = limit
        self._is_short = is_short
        self._patience = patience
        self._by_phase: tuple[dict[LimitedConnection, None], ...] = tuple(
            {} for _ in Phase
        )  # each in the order of coming
        self._reserved: dict[LimitedConnection, None] = {}
        self._count = 0

    @property
    def exceeded(self) -> bool:
        """Whether there are more connections than there may be."""
        return self._count > self.limit or self._is_short()

    def admit(self, connection: LimitedConnection, now_s: float) -> bool:
        """Take a new connection, for which others may give way. False: there is no room at all, `leave` is due."""
        self._by_phase[connection.phase][connection] = None
        self._count += 1
        has_sent_away = False
        while self.exceeded and (other := self._oldest(connection, now_s)) is not None:
            if has_sent_away and self._count <= self.limit and other.phase is not Phase.SILENT:
                break
            self._send_away(other)
            has_sent_away = True
        if not self.exceeded:
            return True
        most = RESERVED_WHEN_SHORT if self._is_short() else RESERVED
        while len(self._reserved) >= most:
            waiting = (each for each in self._reserved if each.phase is not Phase.ANSWERING)
            if (other := next(waiting, None)) is None:
                return False
            self._send_away(other)
        self._reserved[connection] = None
        return True

    def is_reserved(self, connection: LimitedConnection) -> bool:
        """Whether a connection can ask for health only; where there is room by now, it is as others from now on."""
        if not self.exceeded:
            self._reserved.pop(connection, None)
        return connection in self._reserved

    def enter(self, connection: LimitedConnection, phase: Phase) -> None:
        """A connection goes to another phase."""
        if self._by_phase[connection.phase].pop(connection, 0) is None:
            self._by_phase[phase][connection] = None
        connection.phase = phase

    def leave(self, connection: LimitedConnection) -> None:
        """A connection is being closed. Saying it again does nothing."""
        self._reserved.pop(connection, None)
        if self._by_phase[connection.phase].pop(connection, 0) is None:
            self._count -= 1

    def end_idle(self, count: int, before_s: float) -> int:
        """Close so many connections that have no request, for as long as since `before_s`; return how many."""
        idle = [each for phase in (Phase.SILENT, Phase.IDLE) for each in self._by_phase[phase]]
        ended = [each for each in idle if each.since_s <= before_s][:count]
        for each in ended:
            self._send_away(each)
        return len(ended)

    def _send_away(self, other: LimitedConnection) -> None:
        self.leave(other)
        other.give_way()

    def _oldest(self, new: LimitedConnection, now_s: float) -> LimitedConnection | None:
        graces_s = ((Phase.SILENT, 0.0), (Phase.IDLE, IDLE_GRACE_SECONDS), (Phase.RECEIVING, GRACE_SECONDS))
        for phase, grace_s in graces_s:
            oldest = next(iter(self._by_phase[phase]), new)
            if oldest is not new and now_s - oldest.since_s >= grace_s * self._patience:
                return oldest
        return None


class StalledCall(Protocol):
    """A call that waits for its client."""

    def cancel(self) -> object:
        """End the call."""


class StalledCalls:
    """Calls that wait for their client: for the rest of a request, or for an answer to be taken.

    Such a call holds memory, and one of the places that there are for calls. When there are too many, those that have
    waited longest are ended. A slow client stays as long as there is room. `grace_s` seconds are granted to every call,
    whatever the others hold. For one event loop's thread.
    """

    def __init__(self, max_calls: int, max_bytes: int, grace_s: float) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        self._calls: dict[StalledCall, tuple[float, int]] = {}  # in the order of their coming

    def __iter__(self) -> Iterator[StalledCall]:
        """Return all that wait now."""
        return iter(tuple(self._calls))

    @property
    def count(self) -> int:
        """How many calls wait now."""
        return len(self._calls)

    def enter(self, call: StalledCall, held_bytes: int = 0) -> None:
        """Note that a call waits from now on, and how much memory it holds."""
        self._calls[call] = (time.monotonic(), held_bytes)

    def leave(self, call: StalledCall) -> None:
        """Note that it does not wait any more."""
        self._calls.pop(call, None)

    def poll(self) -> int:
        """End calls while there are too many; return how many were ended."""
        count, held_bytes = len(self._calls), sum(size for _, size in self._calls.values())
        now_s, ended = time.monotonic(), 0
        for call, (since_s, size) in tuple(self._calls.items()):
            if (count <= self._max_calls and held_bytes <= self._max_bytes) or now_s - since_s < self._grace_s:
                break
            count, held_bytes, ended = count - 1, held_bytes - size, ended + 1
            self.leave(call)
            call.cancel()
        return ended
