"""Slots and buffers come back, whatever happens to a request."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gangway.artifact.format import TensorSpec
from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.messages import Cancel, Submit, unpack
from gangway.executor.segment import Segment
from gangway.executor.slots import NEVER_JOINED, SlotStatus, SlotTable
from gangway.server.requests.data_plane import DataPlane, PoolExhaustedError, RequestLayout, Scheduling, Usage
from gangway.server.requests.heap import ColdError

SLOTS = 4
LAYOUT = RequestLayout.of(
    7,
    [TensorSpec("a", "FP32", (-1, 10), 40), TensorSpec("b", "INT8", (-1, 100), 100)],
    [TensorSpec("y", "FP32", (-1, 10), 40)],
)
SECOND_NS = 10**9


class Bench:
    """A data plane, and the scheduler's end of it."""

    def __init__(self, heap_bytes: int) -> None:
        self.control = ControlSegment.create(ControlLayout(workers=1, front_ends=1, leases=1))
        self.io = Segment.create(SLOTS * 1024 + heap_bytes, "test-plane")
        self.slots = SlotTable(self.io, SLOTS)
        self.slots.init()
        self.plane = DataPlane(self.io, self.slots, self.control.submit_rings[0], self.control.scheduler_bell)

    def receive(self) -> Any:
        raw = self.control.submit_rings[0].receive()
        return None if raw is None else unpack(raw)

    def start(self) -> Submit:
        message = self.receive()
        assert isinstance(message, Submit)
        assert self.slots.start(message.slot, message.generation)
        return message

    def finish(self, message: Submit, status: SlotStatus = SlotStatus.OK) -> None:
        assert self.slots.finish(message.slot, message.generation, status)


@pytest.fixture
def bench() -> Bench:
    return Bench(64 * 1024)


def test_a_request_from_open_to_close(bench: Bench) -> None:
    with bench.plane.open(LAYOUT, rows=3) as request:
        assert [len(view) for view in request.inputs] == [120, 300]
        assert [len(view) for view in request.outputs] == [120]
        request.inputs[0][:] = b"i" * 120
        request.submit(Scheduling(deadline_ns=99, priority=2, arrival_ns=5))
        message = bench.start()
        seen = bench.slots.request(message.slot)
        assert (seen.model_id, seen.rows, seen.deadline_ns, seen.priority, seen.arrival_ns) == (7, 3, 99, 2, 5)
        offsets = [*seen.input_offsets[:2], *seen.output_offsets[:1]]
        assert all(offset % 64 == 0 and offset >= SLOTS * 1024 for offset in offsets)
        assert bytes(bench.io.view[offsets[0] : offsets[0] + 120]) == b"i" * 120
        bench.io.view[offsets[2] : offsets[2] + 120] = b"o" * 120
        bench.finish(message)
        outcome = request.wait(time.monotonic_ns() + SECOND_NS)
        assert outcome is not None
        assert outcome.status == SlotStatus.OK
        assert bytes(request.outputs[0]) == b"o" * 120
        assert bench.plane.usage().requests == 1
    assert bench.plane.usage() == Usage(0, 0)
    assert bench.receive() is None


@pytest.mark.parametrize(("alone", "key"), [(False, 0), (True, NEVER_JOINED)])
def test_a_request_says_with_which_others_it_may_be_joined(bench: Bench, alone: bool, key: int) -> None:
    with bench.plane.open(LAYOUT, rows=1) as request:
        request.submit(alone=alone)
        message = bench.start()
        assert bench.slots.terms(message.slot).join_key == key
        bench.finish(message)


def test_waiting_ends_at_its_time_and_on_an_answer(bench: Bench) -> None:
    with bench.plane.open(LAYOUT, 1) as request:
        request.submit()
        message = bench.start()
        begin = time.monotonic_ns()
        assert request.wait(begin + 20_000_000) is None
        assert time.monotonic_ns() - begin >= 19_000_000
        assert request.wait(begin) is None  # a time that has passed
        answering = threading.Timer(0.02, bench.finish, (message,))
        answering.start()
        assert request.wait(time.monotonic_ns() + 10 * SECOND_NS) is not None
        answering.join()


def test_memory_of_a_running_request_is_kept_until_it_has_ended(bench: Bench) -> None:
    request = bench.plane.open(LAYOUT, 1)
    request.submit()
    message = bench.start()
    request.close()
    assert bench.receive() == Cancel(message.slot, message.generation)
    assert bench.slots.cancelled(message.slot)
    assert bench.plane.usage().requests == 1
    others = [bench.plane.open(LAYOUT, 1) for _ in range(SLOTS - 1)]
    with pytest.raises(PoolExhaustedError, match="4 requests are in flight"):
        bench.plane.open(LAYOUT, 1)
    bench.finish(message, SlotStatus.CANCELLED)
    others.append(bench.plane.open(LAYOUT, 1))
    for other in others:
        other.close()
    assert bench.plane.usage() == Usage(0, 0)


def test_cancelling(bench: Bench) -> None:
    request = bench.plane.open(LAYOUT, 1)
    request.cancel()  # not submitted yet: nothing to tell
    assert bench.receive() is None
    request.submit()
    message = bench.start()
    for _ in range(3):
        request.cancel()
    assert bench.receive() == Cancel(message.slot, message.generation)
    assert bench.receive() is None
    bench.finish(message, SlotStatus.CANCELLED)
    request.close()
    request.close()
    request.cancel()  # the slot may belong to somebody else by now
    assert bench.receive() is None
    assert bench.plane.usage() == Usage(0, 0)


def test_requests_of_one_turn_wake_the_scheduler_twice_at_most(bench: Bench) -> None:
    bell, ends = bench.control.scheduler_bell, list[Callable[[], object]]()
    bench.plane.wake_by_turns(ends.append)
    for requests, strokes in ((1, 1), (2, 2), (SLOTS, 2)):
        before = bell.seen()
        begun = [bench.plane.open(LAYOUT, 1) for _ in range(requests)]
        for request in begun:
            request.submit()
        assert bell.seen() == before + 1, "for the first one, at once"
        ends.pop()()
        assert bell.seen() == before + strokes
        assert not ends
        for request in begun:
            bench.finish(bench.start())
            request.close()


def test_a_request_that_was_never_submitted(bench: Bench) -> None:
    bench.plane.open(LAYOUT, 1).close()
    assert bench.plane.usage() == Usage(0, 0)


def test_a_full_heap_gives_the_slot_back() -> None:
    bench = Bench(heap_bytes=4096)
    for _ in range(2 * SLOTS):
        with pytest.raises(PoolExhaustedError, match="the request's tensors take 18112 bytes") as caught:
            bench.plane.open(LAYOUT, rows=100)
        assert caught.value.for_good
    requests = [bench.plane.open(LAYOUT, 1) for _ in range(SLOTS)]
    assert bench.plane.usage().requests == SLOTS
    for request in requests:
        request.close()


def test_a_full_ring_gives_everything_back(bench: Bench) -> None:
    while bench.plane.send(Submit(0, 0).pack()):
        pass
    with bench.plane.open(LAYOUT, 1) as request, pytest.raises(PoolExhaustedError, match="queue is full"):
        request.submit()
    assert bench.plane.usage() == Usage(0, 0)


def test_memory_that_no_request_has_needed_for_long_goes_back_to_the_system() -> None:
    bench = Bench(1 << 20)
    blocks = [bench.plane.take(64 * 1024) for _ in range(10)]
    for block in blocks:
        bench.plane.drop(block)
    held = os.fstat(bench.io.fd).st_blocks * 512
    bench.plane.give_back_idle()
    assert os.fstat(bench.io.fd).st_blocks * 512 == held  # nothing yet: they have just been needed
    bench.plane.give_back_idle()
    assert os.fstat(bench.io.fd).st_blocks * 512 == held - 9 * 64 * 1024


def test_memory_is_asked_for_aside() -> None:
    """Of all blocks of one size, and of what is larger than what is kept warm."""
    bench = Bench(64 << 20)
    plane = bench.plane
    for rows in (10_000, 200_000):
        with pytest.raises(ColdError):
            plane.open(LAYOUT, rows, most_cold_bytes=1 << 20)
        assert plane.usage() == Usage(0, 0)
        plane.warm(LAYOUT, rows)
        assert plane.usage() == Usage(0, 0)
        with plane.open(LAYOUT, rows, most_cold_bytes=1 << 20), pytest.raises(ColdError):
            plane.open(LAYOUT, rows, most_cold_bytes=1 << 20)
    with plane.open(LAYOUT, 1, most_cold_bytes=1 << 20):
        pass


def test_memory_that_is_not_there_is_missed_when_it_is_asked_for() -> None:
    bench = Bench(1 << 20)
    bench.plane.warm(LAYOUT, 100_000)
    with pytest.raises(PoolExhaustedError):
        bench.plane.open(LAYOUT, 100_000)
    assert bench.plane.usage() == Usage(0, 0)


def test_threads_share_the_plane(bench: Bench) -> None:
    stopping = threading.Event()

    def answer() -> None:
        bell = bench.control.scheduler_bell
        while not stopping.is_set():
            seen = bell.seen()
            while message := bench.receive():
                bench.slots.start(message.slot, message.generation)
                bench.finish(message)
            bell.wait(seen, spin_us=0, timeout_us=1_000_000)

    def ask(failures: list[BaseException]) -> None:
        try:
            for rows in range(1, 200):
                with bench.plane.open(LAYOUT, rows % 5 + 1) as request:
                    mark = threading.get_ident().to_bytes(8, "little") * 5 * (rows % 5 + 1)
                    request.inputs[0][:] = mark
                    request.submit()
                    assert request.wait(time.monotonic_ns() + 10 * SECOND_NS) is not None
                    assert request.inputs[0] == mark
        except BaseException as error:
            failures.append(error)

    failures: list[BaseException] = []
    threads = [threading.Thread(target=ask, args=(failures,)) for _ in range(SLOTS)]
    answering = threading.Thread(target=answer)
    for thread in (answering, *threads):
        thread.start()
    for thread in threads:
        thread.join(30)
    stopping.set()
    bench.control.scheduler_bell.ring()
    answering.join(5)
    assert not failures
    assert bench.plane.usage() == Usage(0, 0)
