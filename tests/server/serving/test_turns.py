"""Coroutines that enter one at a time, are closed with their calls, and do long work in slices."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from gangway.server.errors import RequestError
from gangway.server.serving.call import Call
from gangway.server.serving.loop import SLICE_S, ServingLoop
from gangway.server.serving.pending import Pending, drive, result_of
from gangway.server.serving.turns import Slices, Turns, drive_for

MANY = 2000  # more than there may be frames
WAIT_S = 20


class EmptyCall(Call):
    """One of which only the end matters."""

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def answer(self, result: bytes | RequestError) -> None:
        return None


def settled_on(serving: ServingLoop, act: Callable[[], object]) -> None:
    """Have the loop do so; return when it has, and all that follows from it."""

    async def do() -> None:
        act()

    result_of(serving, do())


def test_one_at_a_time_in_order(serving: ServingLoop) -> None:
    turns, first = Turns(serving.loop), Pending[None]()
    seen: SimpleQueue[int] = SimpleQueue()

    async def work(number: int) -> None:
        async with turns:
            if number == 0:
                await first
            seen.put(number)

    for number in range(MANY):
        serving.call(drive, work(number))
    settled_on(serving, lambda: None)
    assert seen.empty()
    serving.call(first.settle, None)
    assert [seen.get(timeout=WAIT_S) for _ in range(MANY)] == list(range(MANY))


def test_those_whose_call_is_over_are_passed_over(serving: ServingLoop) -> None:
    turns, first = Turns(serving.loop), Pending[None]()
    seen: SimpleQueue[int] = SimpleQueue()
    calls = [EmptyCall() for _ in range(5)]

    async def work(number: int) -> None:
        async with turns:
            if number == 0:
                await first
            seen.put(number)

    for number, call in enumerate(calls):
        serving.call(drive_for, call, work(number))
    for number in (1, 3):
        serving.call(calls[number].end)
    serving.call(first.settle, None)
    serving.call(calls[2].end)  # whose turn it is, but it does not know
    assert seen.get(timeout=WAIT_S) == 0
    assert seen.get(timeout=WAIT_S) == 4
    settled_on(serving, lambda: drive_for(EmptyCall(), work(5)))
    assert seen.get(timeout=WAIT_S) == 5


def test_a_coroutine_whose_call_is_over_is_closed(serving: ServingLoop) -> None:
    call, gone = EmptyCall(), EmptyCall()
    gone.end()
    closed: SimpleQueue[str] = SimpleQueue()

    async def wait(name: str, value: Pending[None]) -> None:
        try:
            await value
            closed.put(f"{name} goes on")
        except GeneratorExit:
            closed.put(f"{name} is closed")
            raise

    def begin() -> None:
        first, second, third = Pending[None](), Pending[None](), Pending[None]()
        drive_for(call, wait("first", first))
        drive_for(call, wait("second", second))
        second.settle(None)
        call.end()
        first.settle(None)
        drive_for(gone, wait("third", third))
        third.settle(None)

    settled_on(serving, begin)
    assert [closed.get(timeout=WAIT_S) for _ in range(3)] == ["second goes on", "first is closed", "third is closed"]
    assert closed.empty()


def test_others_have_their_turn_in_long_work(serving: ServingLoop) -> None:
    other = threading.Event()

    async def work() -> int:
        slices, count = Slices(serving.loop), 0
        serving.loop.call_later(2 * SLICE_S, other.set)
        while not other.is_set():
            count += 1
            await slices.rest()
        return count

    assert result_of(serving, work()) > 1
