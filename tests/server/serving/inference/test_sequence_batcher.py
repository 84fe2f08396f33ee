"""Who may be executed: order, slots, backlog, time-outs. No clock, no thread."""

import random
from dataclasses import dataclass, field

import pytest

from gangway.server.serving.inference.sequence_batcher import (
    BacklogFullError,
    ClosedError,
    NotStartedError,
    Sequence,
    SequenceBatcher,
    TurnChanges,
)

IDLE_US = 1000
ROOM = 100


@dataclass
class Bench:
    """A batcher, and everything that it has let begin, refused and ended, in order. Requests are texts."""

    slots: int = 1
    now_us: int = 0
    begun: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    over: list[int | str] = field(default_factory=list)
    of: dict[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batcher: SequenceBatcher[str] = SequenceBatcher(self.slots, IDLE_US)

    def enter(self, ticket: str, start: bool = False, end: bool = False, room: int = ROOM) -> None:
        """Tickets begin with the sequence: "a1" is the first of a."""
        self.apply(self.batcher.end_idle(self.now_us))
        entered = self.batcher.enter(ticket, ticket[:-1], start, end, self.now_us, room)
        self.of[ticket] = entered.sequence
        self.apply(entered.changes)

    def leave(self, ticket: str) -> None:
        assert self.of[ticket].running == ticket
        self.apply(self.batcher.leave(self.of[ticket], self.now_us))

    def withdraw(self, ticket: str) -> None:
        self.apply(self.batcher.withdraw(self.of[ticket], ticket, self.now_us))

    def apply(self, changes: TurnChanges[str]) -> None:
        self.begun += changes.begin
        self.refused += changes.refused
        self.over += [sequence.identity for sequence in changes.over]


def test_requests_of_a_sequence_follow_each_other() -> None:
    bench = Bench()
    bench.enter("a1", start=True)
    bench.enter("a2")
    bench.enter("a3", end=True)
    assert bench.begun == ["a1"]
    bench.leave("a1")
    bench.leave("a2")
    assert bench.begun == ["a1", "a2", "a3"] and not bench.over
    bench.leave("a3")
    assert bench.over == ["a"] and bench.batcher.sequences == bench.batcher.waiting == 0


def test_a_sequence_must_be_started() -> None:
    bench = Bench()
    with pytest.raises(NotStartedError):
        bench.enter("a1")
    bench.enter("a2", start=True, end=True)
    with pytest.raises(NotStartedError):  # it is still executed, but nothing can join it
        bench.enter("a3")
    bench.enter("a4", start=True)
    assert bench.of["a4"] is not bench.of["a2"] and bench.begun == ["a2"]
    bench.leave("a2")
    assert bench.begun == ["a2", "a4"]


def test_a_start_within_a_sequence_keeps_its_place() -> None:
    bench = Bench(slots=2)
    for ticket in ("a1", "a2"):
        bench.enter(ticket, start=True)
    assert bench.of["a1"] is bench.of["a2"] and bench.begun == ["a1"]
    bench.leave("a1")
    assert bench.begun == ["a1", "a2"] and not bench.over


def test_others_wait_for_a_slot_in_their_order() -> None:
    bench = Bench(slots=2)
    for ticket in ("a1", "b1", "c1", "d1"):
        bench.enter(ticket, start=True, end=ticket in ("b1", "c1"))
    bench.enter("d2", end=True)
    assert bench.begun == ["a1", "b1"] and bench.batcher.waiting == 3
    bench.leave("a1")  # it has not ended
    assert bench.begun == ["a1", "b1"]
    bench.leave("b1")
    bench.leave("c1")
    bench.leave("d1")
    assert bench.begun == ["a1", "b1", "c1", "d1", "d2"]


def test_idle_sequences_end_and_give_their_slot_away() -> None:
    bench = Bench()
    bench.enter("a1", start=True)
    bench.now_us = 5 * IDLE_US
    bench.apply(bench.batcher.end_idle(bench.now_us))
    assert not bench.over and bench.batcher.next_idle_us() is None  # it is being executed
    bench.leave("a1")
    assert bench.batcher.next_idle_us() == 6 * IDLE_US
    bench.enter("b1", start=True)
    bench.now_us = 6 * IDLE_US - 1
    bench.enter("a2")
    bench.leave("a2")
    assert bench.batcher.next_idle_us() == 7 * IDLE_US - 1
    bench.now_us = 7 * IDLE_US - 1
    with pytest.raises(NotStartedError):
        bench.enter("a3")
    assert bench.over == ["a"] and bench.begun == ["a1", "a2", "b1"]


def test_what_is_given_up_ends_its_sequence() -> None:
    bench = Bench()
    bench.enter("a1", start=True)
    for ticket in ("a2", "a3", "a4"):
        bench.enter(ticket)
    bench.withdraw("a3")
    assert bench.refused == ["a4"]
    with pytest.raises(NotStartedError):
        bench.enter("a5")
    bench.leave("a1")
    bench.leave("a2")
    assert bench.begun == ["a1", "a2"] and bench.over == ["a"]


def test_what_is_given_up_in_the_backlog() -> None:
    bench = Bench()
    bench.enter("a1", start=True, end=True)
    bench.enter("b1", start=True)
    bench.enter("b2")
    bench.enter("c1", start=True)
    assert bench.batcher.in_backlog(bench.of["b2"]) and not bench.batcher.in_backlog(bench.of["a1"])
    bench.withdraw("b2")
    assert bench.refused == ["b1"] and bench.over == ["b"] and bench.batcher.waiting == 1
    bench.leave("a1")
    assert bench.begun == ["a1", "c1"]


def test_no_more_wait_than_may() -> None:
    bench = Bench()
    bench.enter("a1", start=True, room=0)
    for ticket, start in (("a2", False), ("b1", True)):
        with pytest.raises(BacklogFullError):
            bench.enter(ticket, start=start, room=0)
    bench.leave("a1")
    bench.enter("a3", room=0)
    assert bench.begun == ["a1", "a3"] and bench.batcher.sequences == 1


@pytest.mark.parametrize("closes", [True, False])
def test_the_backlog_is_refused_at_the_end(closes: bool) -> None:
    bench = Bench()
    bench.enter("a1", start=True)
    bench.enter("a2")
    bench.enter("b1", start=True)
    bench.apply(bench.batcher.close(0) if closes else bench.batcher.refuse_backlog())
    assert bench.refused == ["b1"] and bench.over == ["b"]
    if closes:
        with pytest.raises(ClosedError):
            bench.enter("c1", start=True)
    bench.leave("a1")
    bench.leave("a2")
    assert bench.begun == ["a1", "a2"] and bench.batcher.sequences == (0 if closes else 1)


def test_closing_ends_idle_sequences() -> None:
    bench = Bench()
    bench.enter("a1", start=True)
    bench.leave("a1")
    bench.apply(bench.batcher.close(0))
    assert bench.over == ["a"] and bench.batcher.next_idle_us() is None


def test_many_random_sequences_leave_nothing() -> None:
    source = random.Random(1)
    bench = Bench(slots=3)
    running: dict[str, Sequence[str]] = {}
    number, most = 0, 0
    for _ in range(10_000):
        bench.now_us += source.choice((0, 1, 10, 400))
        bench.begun.clear()
        action = source.random()
        waiting = [ticket for sequence in dict.fromkeys(bench.of.values()) for ticket in sequence.waiting]
        try:
            if action < 0.5:
                number += 1
                ticket = f"{source.choice('abcdefgh')}{chr(0x4E00 + number % 20_000)}"
                bench.enter(ticket, start=source.random() < 0.5, end=source.random() < 0.4, room=20 - len(waiting))
            elif action < 0.9 and running:
                ticket = source.choice(list(running))
                del running[ticket]
                bench.leave(ticket)
                del bench.of[ticket]
            elif action < 0.92 and waiting:
                ticket = source.choice(waiting)
                bench.withdraw(ticket)
                del bench.of[ticket]
            else:
                bench.apply(bench.batcher.end_idle(bench.now_us))
        except (NotStartedError, BacklogFullError):
            pass
        for ticket in bench.refused:
            del bench.of[ticket]
        bench.refused.clear()
        running |= {ticket: bench.of[ticket] for ticket in bench.begun}
        most = max(most, len(running))
        assert len(running) <= 3 and len({*running.values()}) == len(running)
        assert bench.batcher.waiting <= 20 and bench.batcher.sequences <= 3 + 20
    assert most == 3 and len(bench.over) > 300
    while bench.batcher.sequences:
        bench.begun.clear()
        for ticket in running:
            bench.leave(ticket)
        bench.now_us += IDLE_US
        bench.apply(bench.batcher.end_idle(bench.now_us))  # whose slots go to those of the backlog
        running = {ticket: bench.of[ticket] for ticket in bench.begun}
    assert not running and bench.batcher.waiting == 0 and bench.batcher.next_idle_us() is None
