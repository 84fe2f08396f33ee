"""The regions that the workers have mapped. The supervisor alone decides about them.

A region that a front end offers gets a number and is mapped by all workers; only then the front end learns the number.
It is unmapped when no front end holds it any more. A worker that is started again maps all regions before it reports
that it is ready, so a request never meets a worker without its region. A region that is offered twice (under two names,
or by two front ends) is mapped once.
"""

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gangway.base.peer import close_descriptor, peer_sockets
from gangway.executor import _native
from gangway.executor.control import LostRegions
from gangway.executor.regions import (
    AllMapped,
    MapRegion,
    OfferRegion,
    RegionDone,
    RegionMapped,
    RegionMessage,
    UnmapRegion,
    WithdrawRegion,
    region_peer,
)
from gangway.server.control.supervisor.processes import AsyncPeer

_log = logging.getLogger(__name__)

Order = MapRegion | UnmapRegion | AllMapped
Answered = Callable[[bool], None]  # whether it has been done


class WorkerOrders:
    """Orders about regions to one worker process: each is sent when the one before has been answered.

    At most two for each number wait here, and one is under way, so neither sockets nor descriptors pile up.
    """

    def __init__(self, end: socket.socket) -> None:
        self._peer = AsyncPeer(region_peer(end), self._heard)
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
        """The process has ended: nothing is answered any more."""
        self._peer.close()

    def _send(self) -> None:
        order, descriptor, _ = self._waiting[0]
        self._peer.send(order, -1 if descriptor is None else descriptor)

    def _heard(self, message: RegionMessage, descriptor: int) -> None:
        close_descriptor(descriptor)
        if not isinstance(message, RegionDone) or not self._waiting:
            raise ValueError(f"unexpected {message}")
        _, _, answered = self._waiting.popleft()
        if self._waiting:
            self._send()
        answered(message.ok != 0)


MAX_REGION_BYTES: Final = 16 << 30  # the workers' addresses have an end; a larger region is copied from


class _RegionState(Enum):
    MAPPING = 0  # some workers have not answered yet
    MAPPED = 1
    UNMAPPING = 2


@dataclass(eq=False)
class _SharedRegion:
    """One region. `holders`: (front end, its token). `waiting`: workers that have not answered the last order."""

    number: int
    place: tuple[int, int, int, int]  # device, inode, offset, size
    descriptor: int
    waiting: set[int]
    holders: set[tuple[int, int]] = field(default_factory=set)
    state: _RegionState = _RegionState.MAPPING
    failed: bool = False

    @property
    def order(self) -> MapRegion:
        """What a worker is told to map."""
        return MapRegion(self.number, self.place[2], self.place[3])


class RegionRegistry:
    """All regions, with the processes that hold or map them. `lost` says which ones have lost memory."""

    def __init__(self, lost: LostRegions) -> None:
        self._lost = lost
        self._regions: dict[int, _SharedRegion] = {}  # by number
        self._workers: dict[int, WorkerOrders] = {}
        self._front_ends: dict[int, AsyncPeer[RegionMessage]] = {}

    def worker(self, index: int) -> socket.socket:
        """Return what a new worker process inherits (the caller closes it). Its predecessor, if any, is dead."""
        ours, theirs = peer_sockets()
        if index in self._workers:
            self._workers[index].close()
        orders = self._workers[index] = WorkerOrders(ours)
        for region in list(self._regions.values()):
            if region.state is _RegionState.UNMAPPING:
                self._answered(region, index, _RegionState.UNMAPPING, True)
            else:
                orders.add(region.order, region.descriptor, self._hears(region, index, _RegionState.MAPPED))
        orders.begin()
        return theirs

    def worker_missing(self, index: int) -> None:
        """Wait for nothing of a worker that is dead and has no successor yet."""
        if index in self._workers:
            self._workers.pop(index).close()
            for region in list(self._regions.values()):
                self._answered(region, index, region.state, True)

    def front_end(self, index: int) -> socket.socket:
        """Return what a new front end inherits (the caller closes it). A predecessor's requests have ended."""
        if index in self._front_ends:
            self._front_ends[index].close()
        for region in list(self._regions.values()):
            self._release(region, {holder for holder in region.holders if holder[0] == index})
        ours, theirs = peer_sockets()
        self._front_ends[index] = AsyncPeer(
            region_peer(ours), lambda message, descriptor: self._heard(index, message, descriptor)
        )
        return theirs

    def close(self) -> None:
        """Forget everything, at the server's end."""
        for orders in self._workers.values():
            orders.close()
        for peer in self._front_ends.values():
            peer.close()
        for region in self._regions.values():
            os.close(region.descriptor)
        self._regions.clear()

    # -- front ends

    def _heard(self, front_end: int, message: RegionMessage, descriptor: int) -> None:
        match message:
            case OfferRegion(token):
                self._offered((front_end, token), message, descriptor)
            case WithdrawRegion(token):
                for region in list(self._regions.values()):
                    self._release(region, {(front_end, token)} & region.holders)
            case _:
                close_descriptor(descriptor)
                raise ValueError(f"unexpected {message}")

    def _offered(self, holder: tuple[int, int], offer: OfferRegion, descriptor: int) -> None:
        status = os.fstat(descriptor)
        place = (status.st_dev, status.st_ino, offer.offset, offer.size_bytes)
        region = next((known for known in self._usable() if known.place == place), None)
        if region is not None:
            os.close(descriptor)
        else:
            region = self._map(place, descriptor)
        if region is None or self._lost.is_lost(region.number):
            self._tell(holder, 0)
            return
        region.holders.add(holder)
        if region.state is _RegionState.MAPPED:
            self._tell(holder, region.number)
        self._proceed(region)

    def _usable(self) -> Iterator[_SharedRegion]:
        return (region for region in self._regions.values() if region.state is not _RegionState.UNMAPPING)

    def _release(self, region: _SharedRegion, holders: set[tuple[int, int]]) -> None:
        if holders:
            region.holders -= holders
            self._proceed(region)

    def _tell(self, holder: tuple[int, int], number: int) -> None:
        front_end, token = holder
        self._front_ends[front_end].send(RegionMapped(token, number))

    # -- workers

    def _map(self, place: tuple[int, int, int, int], descriptor: int) -> _SharedRegion | None:
        free = (number for number in range(1, _native.MAX_REGIONS + 1) if number not in self._regions)
        number = next(free, None)
        if number is None or not 1 <= place[3] <= MAX_REGION_BYTES:
            os.close(descriptor)
            return None
        self._lost.forget(number)
        region = self._regions[number] = _SharedRegion(number, place, descriptor, set(self._workers))
        for index, orders in self._workers.items():
            orders.add(region.order, descriptor, self._hears(region, index, _RegionState.MAPPED))
        return region

    def _hears(self, region: _SharedRegion, worker: int, order: _RegionState) -> Callable[[bool], None]:
        return lambda ok: self._answered(region, worker, order, ok)

    def _answered(self, region: _SharedRegion, worker: int, order: _RegionState, ok: bool) -> None:
        """A worker has done what `order` (MAPPED, UNMAPPING) says, or could not."""
        if not ok:
            region.failed = True
            self._lost.lose(region.number)  # requests that use it learn it in this way
        if (
            order is _RegionState.UNMAPPING or region.state is not _RegionState.UNMAPPING
        ):  # else it maps what it is to unmap next
            region.waiting.discard(worker)
        self._proceed(region)

    def _proceed(self, region: _SharedRegion) -> None:
        """Take the next step in a region's life, if nothing has to be waited for."""
        if region.waiting:
            return
        if region.state is _RegionState.MAPPING:
            region.state = _RegionState.MAPPED
            for holder in region.holders:
                self._tell(holder, 0 if region.failed else region.number)
            if region.failed:
                region.holders.clear()
            what = "not mapped" if region.failed else "mapped by all workers"
            _log.debug("region %d, %d bytes: %s", region.number, region.place[3], what)
        if region.state is _RegionState.MAPPED and not region.holders:
            region.state = _RegionState.UNMAPPING
            region.waiting = set(self._workers)
            for index, orders in self._workers.items():
                orders.add(UnmapRegion(region.number), None, self._hears(region, index, _RegionState.UNMAPPING))
        if region.state is _RegionState.UNMAPPING and not region.waiting:
            os.close(region.descriptor)
            del self._regions[region.number]
