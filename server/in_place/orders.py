"""Orders about regions to one worker process: each is sent when the one before has been answered."""

import socket
from collections import deque
from collections.abc import Callable

from gangway.executor.region_messages import AllMapped, MapRegion, RegionDone, RegionMessage, UnmapRegion
from gangway.server.in_place.peer import Peer, close_quietly

Order = MapRegion | UnmapRegion | AllMapped
Answered = Callable[[bool], None]  # whether it has been done


class WorkerOrders:
    """At most two for each number wait here, and one is under way: neither sockets nor descriptors pile up."""

    def __init__(self, end: socket.socket) -> None:
        self._peer = Peer(end, self._heard)
        self._waiting: deque[tuple[Order, int | None, Answered]] = deque()  # the first one has been sent

    def add(self, order: Order, descriptor: int | None, answered: Answered) -> None:
        """Give an order; the descriptor stays the caller's, who keeps it open until `answered` is called."""
        self._waiting.append((order, descriptor, answered))
        if len(self._waiting) == 1:
            self._send()

    def begin(self) -> None:
        """Say that the orders until now are all that there is."""
        self.add(AllMapped(), None, lambda ok: None)

    def close(self) -> None:
        """The process is gone: nothing is answered any more."""
        self._peer.close()

    def _send(self) -> None:
        order, descriptor, _ = self._waiting[0]
        self._peer.send(order, descriptor)

    def _heard(self, message: RegionMessage, descriptor: int) -> None:
        close_quietly(descriptor)
        if not isinstance(message, RegionDone) or not self._waiting:
            raise ValueError(f"unexpected {message}")
        _, _, answered = self._waiting.popleft()
        if self._waiting:
            self._send()
        answered(message.ok != 0)
