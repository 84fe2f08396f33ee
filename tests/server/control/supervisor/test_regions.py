"""The set of regions that workers have mapped: the supervisor, with the other ends of its sockets in a test's hands."""

import asyncio
import gc
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gangway.base.peer import close_descriptor
from gangway.executor import _native
from gangway.executor.control import LOST_REGIONS_BYTES, LostRegions
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
from gangway.executor.segment import Segment
from gangway.server.control.supervisor.regions import RegionRegistry
from testing.processes import open_descriptors
from testing.waiting import until

FRONT_END = 1
TURNS = 20  # of the event loop, after which everything has been said that was to be said


class End:
    """A worker's or front end's end of a socket."""

    def __init__(self, end: socket.socket) -> None:
        self.peer = region_peer(end)

    async def heard(self) -> list[RegionMessage]:
        """Return what has been said since the last time."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        messages = []
        while (received := self.peer.receive_with_descriptor()) is not None:
            close_descriptor(received[1])
            messages.append(received[0])
        return messages

    def done(self, ok: int = 1) -> None:
        self.peer.send(RegionDone(ok))


class Bench:
    """A keeper, two workers that have started, a front end, and files to offer."""

    def __init__(self, folder: Path) -> None:
        self._segment = Segment.create(LOST_REGIONS_BYTES, "keeper-test")

        self.lost = LostRegions(self._segment, 0)
        self.keeper = RegionRegistry(self.lost)
        self.workers = [End(self.keeper.worker(index)) for index in range(2)]
        self.front_end = End(self.keeper.front_end(FRONT_END))
        self._folder = folder

    def close(self) -> None:
        self.keeper.close()
        for end in (*self.workers, self.front_end):
            end.peer.close()
        self._segment.close()

    async def begin(self) -> None:
        for worker in self.workers:
            assert await worker.heard() == [AllMapped()]
            worker.done()

    def restart(self, index: int) -> End:
        """Let a worker die and start again."""
        self.workers[index].peer.close()
        self.workers[index] = End(self.keeper.worker(index))
        return self.workers[index]

    def offer(self, token: int, name: str = "", size_bytes: int = 4096) -> None:
        path = self._folder / (name or str(token))
        path.touch()
        descriptor = os.open(path, os.O_RDWR)
        self.front_end.peer.send(OfferRegion(token, 0, size_bytes), descriptor)
        os.close(descriptor)

    async def map(self, token: int, name: str = "") -> int:
        """Have a region mapped; return its number."""
        self.offer(token, name)
        for worker in self.workers:
            (order,) = await worker.heard()
            assert isinstance(order, MapRegion)
            worker.done()
        (answer,) = await self.front_end.heard()
        assert answer == RegionMapped(token, order.number)
        return order.number


def run(folder: Path, test: Callable[[Bench], Awaitable[None]]) -> None:
    async def body() -> None:
        bench = Bench(folder)
        try:
            await bench.begin()
            await test(bench)
        finally:
            bench.close()

    gc.collect()  # else what other tests have left is closed meanwhile
    before = open_descriptors(os.getpid())
    asyncio.run(body())
    until(lambda: open_descriptors(os.getpid()) <= before)


def test_a_number_is_told_when_all_workers_have_mapped(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.offer(5)
        first, second = bench.workers
        assert await first.heard() == await second.heard() == [MapRegion(1, 0, 4096)]
        first.done()
        assert await bench.front_end.heard() == []
        second.done()
        assert await bench.front_end.heard() == [RegionMapped(5, 1)]
        bench.front_end.peer.send(WithdrawRegion(5))
        assert await first.heard() == await second.heard() == [UnmapRegion(1)]

    run(tmp_path, test)


def test_one_order_at_a_time(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.offer(1)
        bench.offer(2)
        for expected in ([MapRegion(1, 0, 4096)], [MapRegion(2, 0, 4096)]):
            assert await bench.workers[0].heard() == expected
            bench.workers[0].done()

    run(tmp_path, test)


def test_a_region_that_is_offered_twice_is_mapped_once(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.map(1, "file") == 1
        bench.offer(2, "file")
        assert await bench.front_end.heard() == [RegionMapped(2, 1)]
        bench.front_end.peer.send(WithdrawRegion(1))
        assert await bench.workers[0].heard() == []
        bench.front_end.peer.send(WithdrawRegion(2))
        assert await bench.workers[0].heard() == [UnmapRegion(1)]

    run(tmp_path, test)


def test_a_number_is_not_used_again_before_all_have_unmapped(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.map(1) == 1
        bench.front_end.peer.send(WithdrawRegion(1))
        first, second = bench.workers
        assert await first.heard() == await second.heard() == [UnmapRegion(1)]
        first.done()
        bench.offer(2)
        assert await first.heard() == [MapRegion(2, 0, 4096)]
        second.done()
        bench.offer(3)
        assert await second.heard() == [MapRegion(2, 0, 4096)]
        first.done()
        second.done()
        assert await first.heard() == await second.heard() == [MapRegion(1, 0, 4096)]

    run(tmp_path, test)


def test_withdrawn_while_a_new_worker_maps_it(tmp_path: Path) -> None:
    """What it answers about mapping is not taken for an answer about unmapping."""

    async def test(bench: Bench) -> None:
        assert await bench.map(1) == 1
        second = bench.restart(1)
        assert await second.heard() == [MapRegion(1, 0, 4096)]
        bench.front_end.peer.send(WithdrawRegion(1))
        assert await bench.workers[0].heard() == [UnmapRegion(1)]
        bench.workers[0].done()
        second.done()
        assert await second.heard() == [AllMapped()]
        second.done()
        assert await second.heard() == [UnmapRegion(1)]
        bench.offer(2)
        assert await bench.workers[0].heard() == [MapRegion(2, 0, 4096)]
        second.done()

    run(tmp_path, test)


def test_a_new_worker_gets_all_of_them_first(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        assert [await bench.map(token) for token in (1, 2)] == [1, 2]
        bench.offer(3)
        await bench.workers[0].heard()
        bench.workers[0].done()
        worker = bench.restart(1)  # the other one has died before it could answer
        for number in (1, 2, 3):
            assert await worker.heard() == [MapRegion(number, 0, 4096)]
            worker.done()
        assert await worker.heard() == [AllMapped()]
        assert await bench.front_end.heard() == [RegionMapped(3, 3)]

    run(tmp_path, test)


def test_a_worker_that_cannot_map(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.offer(1)
        for worker, ok in zip(bench.workers, (1, 0), strict=True):
            assert await worker.heard() == [MapRegion(1, 0, 4096)]
            worker.done(ok)
        assert await bench.front_end.heard() == [RegionMapped(1, 0)]
        for worker in bench.workers:
            assert await worker.heard() == [UnmapRegion(1)]
            worker.done()
        assert await bench.map(2) == 1
        assert not bench.lost.is_lost(1)
        worker = bench.restart(1)
        await worker.heard()
        worker.done(0)  # too late to say no: who uses the region learns that it is lost
        assert await worker.heard() == [AllMapped()]
        assert bench.lost.is_lost(1)

    run(tmp_path, test)


def test_a_region_that_is_lost_is_not_lent_again(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.map(1, "file") == 1
        bench.lost.lose(1)
        bench.offer(2, "file")
        assert await bench.front_end.heard() == [RegionMapped(2, 0)]

    run(tmp_path, test)


def test_a_front_end_that_has_died_holds_nothing(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.map(1) == 1
        bench.front_end.peer.close()
        assert await bench.workers[0].heard() == []  # its requests may still run
        bench.front_end = End(bench.keeper.front_end(FRONT_END))
        assert await bench.workers[0].heard() == [UnmapRegion(1)]

    run(tmp_path, test)


def test_there_are_not_more_than_so_many(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        for token in range(1, _native.MAX_REGIONS + 1):
            assert await bench.map(token) == token
        bench.offer(1000)
        assert await bench.front_end.heard() == [RegionMapped(1000, 0)]
        bench.offer(1001, size_bytes=1 << 40)
        assert await bench.front_end.heard() == [RegionMapped(1001, 0)]

    run(tmp_path, test)


@pytest.mark.parametrize("message", [RegionMapped(1, 1), RegionDone(1), UnmapRegion(1)], ids=str)
def test_what_makes_no_sense_changes_nothing(tmp_path: Path, message: RegionMessage) -> None:
    async def test(bench: Bench) -> None:
        bench.front_end.peer.send(message)
        bench.workers[0].peer.send(message)
        assert await bench.map(1) == 1

    run(tmp_path, test)
