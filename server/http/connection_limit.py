"""How many connections there may be, and which of them gives way to a new one. For one event loop's thread.

Whoever says nothing holds nobody out: beyond the limit a new connection is taken in place of the one for whose client
the server has waited longest. Where all clients wait for the server, a few more connections are there for health alone.
"""

from enum import IntEnum
from typing import Final, Protocol

RESERVED: Final = 64  # connections above the limit, which can ask for health only
PATIENCE_SECONDS: Final = 5.0  # granted to every request that has begun to come


class Phase(IntEnum):
    """What a connection is doing. Those whose client is to act give way, in this order."""

    SILENT = 0  # no request so far
    IDLE = 1  # between two requests
    RECEIVING = 2  # a request has begun and is not complete
    ANSWERING = 3


class Limited(Protocol):
    """What must be known of a connection."""

    phase: Phase
    since_s: float  # when the phase began, by the event loop's clock

    def give_way(self) -> None:
        """Close."""


class ConnectionLimit:
    """`limit` connections, and RESERVED more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_phase: tuple[dict[Limited, None], ...] = tuple({} for _ in Phase)  # each in the order of coming
        self._count = 0

    @property
    def exceeded(self) -> bool:
        """Whether there are more connections than the limit."""
        return self._count > self.limit

    def admit(self, connection: Limited, now_s: float) -> bool:
        """Take a new connection, for which others may give way. False: there is no room at all, `leave` is due."""
        self._by_phase[connection.phase][connection] = None
        self._count += 1
        while self.exceeded and (other := self._oldest(connection, now_s)) is not None:
            self.leave(other)
            other.give_way()
        return self._count <= self.limit + RESERVED

    def enter(self, connection: Limited, phase: Phase) -> None:
        """A connection goes to another phase."""
        if self._by_phase[connection.phase].pop(connection, 0) is None:
            self._by_phase[phase][connection] = None
        connection.phase = phase

    def leave(self, connection: Limited) -> None:
        """A connection is being closed. Saying it again does nothing."""
        if self._by_phase[connection.phase].pop(connection, 0) is None:
            self._count -= 1

    def _oldest(self, new: Limited, now_s: float) -> Limited | None:
        for phase in (Phase.SILENT, Phase.IDLE, Phase.RECEIVING):
            oldest = next(iter(self._by_phase[phase]), new)
            if oldest is not new and (phase < Phase.RECEIVING or now_s - oldest.since_s > PATIENCE_SECONDS):
                return oldest
        return None
