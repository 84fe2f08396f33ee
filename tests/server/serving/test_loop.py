"""The serving loop: calls, timers, how late it is, and requests that have ended."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from gangway.executor import _native
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotRequest, SlotState, SlotStatus, SlotTable
from gangway.server.serving.loop import LAG_WINDOW_S, Lag, ServingLoop
from gangway.server.serving.pending import drive
from gangway.server.serving.slots import Completions

WAIT_S = 20.0
SECOND_NS = 10**9
SLOTS = 8


def test_what_is_called_runs_in_order_in_the_loops_thread(serving: ServingLoop) -> None:
    seen: SimpleQueue[tuple[int, str]] = SimpleQueue()
    for number in range(100):
        serving.call(lambda number=number: seen.put((number, threading.current_thread().name)))
    assert [seen.get(timeout=WAIT_S) for _ in range(100)] == [(number, "loop") for number in range(100)]


def test_a_coroutine_is_run_and_its_error_raised(serving: ServingLoop) -> None:
    async def divide(by: int) -> float:
        return 6 / by

    assert serving.run(divide(2)) == 3
    with pytest.raises(ZeroDivisionError):
        serving.run(divide(0))


@pytest.mark.parametrize("aside", [False, True])
def test_a_timer_goes_on_whatever_its_function_raises(serving: ServingLoop, aside: bool) -> None:
    seen: SimpleQueue[str] = SimpleQueue()

    def fail() -> None:
        seen.put(threading.current_thread().name)
        raise ZeroDivisionError

    serving.every(0.001, fail, aside)
    names = {seen.get(timeout=WAIT_S) for _ in range(3)}
    assert all(name.startswith("aside") for name in names) if aside else names == {"loop"}


def test_a_timer_is_due_when_its_function_says(serving: ServingLoop) -> None:
    seen: SimpleQueue[float] = SimpleQueue()

    def turn() -> float:
        seen.put(time.monotonic())
        return 0.05

    serving.every(0.0, turn)
    times_s = [seen.get(timeout=WAIT_S) for _ in range(3)]
    assert times_s[1] - times_s[0] >= 0.045 <= times_s[2] - times_s[1]


def test_what_blocks_aside_stops_nobody(serving: ServingLoop) -> None:
    released, called = threading.Event(), threading.Event()
    serving.aside(released.wait, WAIT_S)
    serving.call(called.set)
    assert called.wait(WAIT_S)
    released.set()


def test_a_loop_that_is_held_up_is_late(serving: ServingLoop) -> None:
    fired, lags_s = threading.Event(), SimpleQueue()
    serving.every(0.01, fired.set)
    assert fired.wait(WAIT_S)
    serving.call(time.sleep, 0.3)
    serving.call(lambda: serving.loop.call_later(0.001, lambda: lags_s.put(serving.lag.most_s)))
    assert lags_s.get(timeout=WAIT_S) >= 0.25


def test_a_stopped_loop_calls_nothing_and_stops_again() -> None:
    made = ServingLoop()
    made.start()
    made.stop()
    made.call(pytest.fail, "called")
    made.stop()


def test_lag_is_the_most_of_the_last_two_windows() -> None:
    now_s = 100.0
    lag = Lag(lambda: now_s)
    lag.note(0.5)
    lag.note(0.25)
    assert lag.most_s == 0.5
    now_s += LAG_WINDOW_S
    lag.note(0.125)
    assert lag.most_s == 0.5
    now_s += LAG_WINDOW_S
    assert lag.most_s == 0.125
    now_s += 5 * LAG_WINDOW_S
    assert lag.most_s == 0.0
    lag.note(-0.001)
    assert lag.most_s == 0.0, "early"


class Bench:
    """A table of slots whose requests the test ends, and what the loop hears of it."""

    def __init__(self, serving: ServingLoop) -> None:
        self.segment = Segment.create(1 << 16, "completions")
        self.slots = SlotTable(self.segment, SLOTS)
        self.slots.init()
        self.slots.bell.make_event_fd()
        self.call = serving.call
        self.rests: SimpleQueue[None] = SimpleQueue()
        self.heard: SimpleQueue[int] = SimpleQueue()
        self.completions = Completions(serving, self.slots, lambda: self.rests.put(None))

    def begin(self, then: Callable[[int], object] | None = None) -> tuple[int, int]:
        """Submit a request; return its slot and the generation. `then` gets the slot."""
        slot = self.slots.acquire()
        assert slot is not None
        self.slots.fill(slot, SlotRequest(1, 1, (0,), (0,), by_bell=True))
        then = then or self.heard.put
        self.completions.expect(slot, time.monotonic_ns() + 60 * SECOND_NS).when_settled(lambda: then(slot))
        generation = self.slots.submit(slot)
        self.slots.start(slot, generation)
        return slot, generation

    def close(self) -> None:
        os.close(self.slots.bell.event_fd)
        self.segment.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    serving = ServingLoop()
    made = Bench(serving)
    serving.start()
    yield made
    serving.stop()
    made.close()


def test_each_request_that_has_ended_is_heard_of_once(bench: Bench) -> None:
    for _ in range(200):
        begun = [bench.begin() for _ in range(SLOTS)]
        for slot, generation in reversed(begun):
            bench.slots.finish(slot, generation, SlotStatus.OK)
        assert {bench.heard.get(timeout=WAIT_S) for _ in begun} == {slot for slot, _ in begun}
        for slot, _ in begun:
            assert bench.slots.release(slot)
    assert bench.heard.empty()
    bench.rests.get(timeout=WAIT_S)


def test_what_fails_keeps_nobody_from_hearing(bench: Bench) -> None:
    failing, fine = bench.begin(lambda slot: 1 / 0), bench.begin()
    for slot, generation in (failing, fine):
        bench.slots.finish(slot, generation, SlotStatus.CANCELLED)
    assert bench.heard.get(timeout=WAIT_S) == fine[0]


def test_a_forgotten_request_is_not_heard_of(bench: Bench) -> None:
    forgotten, kept = bench.begin(), bench.begin()
    assert bench.completions.forget(forgotten[0])
    assert not bench.completions.forget(forgotten[0])
    for slot, generation in (forgotten, kept):
        bench.slots.finish(slot, generation, SlotStatus.OK)
    assert bench.heard.get(timeout=WAIT_S) == kept[0]
    assert not bench.completions.forget(kept[0])
    assert bench.heard.empty()


def test_a_slot_that_is_used_again_at_once_is_not_taken_for_ended(bench: Bench) -> None:
    """One of two requests that have ended gives the other up, and a new request gets that one's slot."""
    began: SimpleQueue[tuple[int, int]] = SimpleQueue()
    others: dict[int, int] = {}

    def replace(slot: int) -> None:
        other = others[slot]
        if bench.completions.forget(other):
            assert bench.slots.release(other)
            began.put(bench.begin())

    first, second = bench.begin(replace), bench.begin(replace)
    others[first[0]], others[second[0]] = second[0], first[0]
    ended = threading.Event()

    def end_both() -> None:
        for slot, generation in (first, second):
            bench.slots.finish(slot, generation, SlotStatus.OK)
        ended.set()

    bench.call(end_both)
    slot, generation = began.get(timeout=WAIT_S)
    assert ended.is_set()
    assert slot in others
    bench.slots.finish(slot, generation, SlotStatus.OK)
    assert bench.heard.get(timeout=WAIT_S) == slot
    assert bench.heard.empty()


def test_an_answer_whose_worker_died_while_it_rang_is_found(bench: Bench) -> None:
    slot, generation = bench.begin()
    running = 1 << SlotState.RUNNING
    assert _native.slot_change(bench.segment.view, slot, generation, running, SlotState.DONE, SlotStatus.OK)
    assert bench.heard.get(timeout=WAIT_S) == slot


def test_a_request_that_takes_too_long_is_given_up(bench: Bench) -> None:
    heard: SimpleQueue[bool] = SimpleQueue()

    async def wait(slot: int) -> None:
        heard.put(await bench.completions.expect(slot, time.monotonic_ns() + SECOND_NS // 10))

    begun, slot = time.monotonic(), bench.slots.acquire()
    assert slot is not None
    bench.call(drive, wait(slot))
    assert heard.get(timeout=WAIT_S) is False
    assert time.monotonic() - begun >= 0.1
    assert not bench.completions.forget(slot)


def test_a_bell_without_an_eventfd_is_refused(serving: ServingLoop) -> None:
    segment = Segment.create(1 << 16, "completions")
    with pytest.raises(ValueError, match="eventfd"):
        Completions(serving, SlotTable(segment, SLOTS))
    segment.close()


def test_what_is_left_to_the_end_of_a_turn_is_done_then_or_soon(serving: ServingLoop) -> None:
    done: list[str] = []
    seen: SimpleQueue[list[str]] = SimpleQueue()
    turn = serving.turn

    def rest() -> None:
        done.append("first")
        turn.at_end(lambda: done.append("asked for meanwhile"))

    def act() -> None:
        turn.begin()
        turn.at_end(rest)
        turn.at_end(lambda: 1 // 0)
        turn.at_end(lambda: done.append("second"))
        seen.put(list(done))
        turn.end()
        seen.put(list(done))
        turn.at_end(lambda: seen.put(["soon"]))
        seen.put(["no turn"])

    serving.call(act)
    found = [seen.get(timeout=WAIT_S) for _ in range(4)]
    assert found == [[], ["first", "second", "asked for meanwhile"], ["no turn"], ["soon"]]
