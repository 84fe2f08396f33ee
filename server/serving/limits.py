"""How many connections a front end has, and which of them gives way to a new one: one rule for every protocol."""

from collections.abc import Callable
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
    oldest gives way. `is_short` says that descriptors lack: then new connections can ask for health only.
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
        while self.exceeded and (other := self._oldest(connection, now_s)) is not None:
            self._send_away(other)
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
