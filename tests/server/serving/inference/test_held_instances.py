"""How the scheduler is told which instances of Python models are taken."""

import queue
from collections.abc import Callable, Iterator

import pytest

from gangway.executor.messages import Held, unpack
from gangway.server.serving.inference.held_instances import HeldInstances
from gangway.server.serving.loop import ServingLoop

TIMEOUT_S = 20


class Scheduler:
    """What has been told. `is_full`: it cannot be told anything."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[Held] = queue.SimpleQueue()
        self.is_full = False
        self.refused = 0
        self.wakes: list[bool] = []

    def send(self, message: bytes, wakes: bool) -> bool:
        """Take a message, unless there is no room for it."""
        self.wakes.append(wakes)
        self.refused += self.is_full
        if not self.is_full:
            held = unpack(message)
            assert isinstance(held, Held)
            self.told.put(held)
        return not self.is_full

    def hears(self, model_id: int, count: int) -> None:
        """That is the next that it is told."""
        assert self.told.get(timeout=TIMEOUT_S) == Held(model_id, count)


@pytest.fixture
def serving() -> Iterator[ServingLoop]:
    made = ServingLoop()
    made.start()
    yield made
    made.stop()


def on_loop(serving: ServingLoop, *work: Callable[[], object]) -> None:
    """Do all of it in one turn of the loop."""

    async def do() -> None:
        for each in work:
            each()

    serving.run(do(), TIMEOUT_S)


def test_an_execution_counts_once_until_nobody_sees_to_it(serving: ServingLoop) -> None:
    scheduler = Scheduler()
    held = HeldInstances(serving, scheduler.send)
    first, second = ("a", 1), ("a", 2)
    on_loop(serving, lambda: held.hold(7, first, "one"), lambda: held.hold(7, first, "other"))
    scheduler.hears(7, 1)
    on_loop(serving, lambda: held.hold(7, second, "one"), lambda: held.hold(8, ("b", 1), "one"))
    assert {scheduler.told.get(timeout=TIMEOUT_S) for _ in range(2)} == {Held(7, 2), Held(8, 1)}
    on_loop(serving, lambda: held.drop(7, first, "one"), lambda: held.drop(7, first, "one"))
    on_loop(serving, lambda: held.drop(7, first, "other"))
    scheduler.hears(7, 1)
    on_loop(serving, lambda: held.drop(7, second, "one"), lambda: held.drop(7, second, "one"))
    scheduler.hears(7, 0)
    assert scheduler.told.empty()
    assert scheduler.wakes == [False] * 3 + [True] * 2, "only what is free again is news"


def test_what_could_not_be_told_is_told_later(serving: ServingLoop) -> None:
    scheduler = Scheduler()
    held = HeldInstances(serving, scheduler.send)
    scheduler.is_full = True
    on_loop(serving, lambda: held.hold(7, ("a", 1), "one"))
    on_loop(serving, lambda: held.hold(7, ("a", 2), "one"))
    scheduler.is_full = False
    scheduler.hears(7, 2)
    on_loop(serving, lambda: held.drop(7, ("a", 1), "one"))
    scheduler.hears(7, 1)
    assert scheduler.refused
