"""Which requests of a model's sequences may be executed: their order, slots, backlog and silence. Pure."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

SequenceId = int | str
AnyTicket = TypeVar("AnyTicket")  # stands for one request


class NotStartedError(Exception):
    """There is no such sequence, and the request does not start one."""


class BacklogFullError(Exception):
    """The request would have to wait, and no further one may."""


class ClosedError(Exception):
    """The model has been replaced or unloaded."""


@dataclass(eq=False)
class Sequence(Generic[AnyTicket]):
    """One sequence. `ended`: nothing more can join it; what has joined is still executed, unless it is refused."""

    identity: SequenceId
    has_slot: bool = False
    running: AnyTicket | None = None
    waiting: deque[AnyTicket] = field(default_factory=deque)
    ended: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether a further request has to wait."""
        return not self.has_slot or self.running is not None


@dataclass(frozen=True)
class TurnChanges(Generic[AnyTicket]):
    """What is to be done now: requests that begin, requests that will never begin, sequences that are over."""

    begin: list[AnyTicket] = field(default_factory=list)
    refused: list[AnyTicket] = field(default_factory=list)
    over: list[Sequence[AnyTicket]] = field(default_factory=list)


@dataclass(frozen=True)
class Entered(Generic[AnyTicket]):
    """A request has joined this sequence. `conflict`: it starts one, although that of its id has not ended."""

    sequence: Sequence[AnyTicket]
    conflict: bool
    changes: TurnChanges[AnyTicket]


class SequenceBatcher(Generic[AnyTicket]):
    """The sequences of one loaded model. Deterministic: the clock is passed in, and no call waits. Not safe for
    threads.

    A sequence begins with a request that says so. It gets a slot, or a place in the backlog until a slot is free. A
    sequence with a slot has one request executed at a time, in the order in which they came. It ends, and frees its
    slot, when its last request has been executed, or when it was idle for too long. Times are microseconds and never go
    back.
    """

    def __init__(self, slots: int, idle_us: int) -> None:
        """`slots`: sequences at a time. A sequence without requests ends after `idle_us`."""
        self._free_slots = slots
        self._idle_us = idle_us
        self._open: dict[SequenceId, Sequence[AnyTicket]] = {}  # those that can be joined
        self._backlog: OrderedDict[Sequence[AnyTicket], None] = OrderedDict()
        self._idle: OrderedDict[Sequence[AnyTicket], int] = OrderedDict()  # since when; the first for the longest time
        self._closed = False
        self.waiting = 0  # requests that cannot be executed yet
        self.sequences = 0  # that are not over

    def enter(
        self, ticket: AnyTicket, identity: SequenceId, start: bool, end: bool, now_us: int, room: int
    ) -> Entered[AnyTicket]:
        """Add a request. `room`: how many more may wait. Call `end_idle` for the same instant before.

        A start within a sequence that is open goes on in its place, and begins with new state.
        Raises NotStartedError, BacklogFullError or ClosedError; then the request has no effect.
        """
        if self._closed:
            raise ClosedError
        sequence = self._open.get(identity)
        if sequence is None and not start:
            raise NotStartedError
        if room <= 0 and (sequence.is_busy if sequence is not None else not self._free_slots):
            raise BacklogFullError
        conflict = sequence is not None and start
        if sequence is None:
            sequence = self._begin(identity)
        self._idle.pop(sequence, None)
        sequence.waiting.append(ticket)
        self.waiting += 1
        if end:
            self._close_to_others(sequence)
        changes: TurnChanges[AnyTicket] = TurnChanges()
        self._advance(sequence, now_us, changes)
        return Entered(sequence, conflict, changes)

    def leave(self, sequence: Sequence[AnyTicket], now_us: int) -> TurnChanges[AnyTicket]:
        """The sequence's running request has been executed, or has failed: both are the same to its order."""
        changes: TurnChanges[AnyTicket] = TurnChanges()
        sequence.running = None
        self._advance(sequence, now_us, changes)
        return changes

    def withdraw(self, sequence: Sequence[AnyTicket], ticket: AnyTicket, now_us: int) -> TurnChanges[AnyTicket]:
        """End a sequence because a request of it, which has not begun, is given up.

        What came before it is executed, if the sequence has a slot; all else is refused, but for `ticket` itself.
        """
        changes: TurnChanges[AnyTicket] = TurnChanges()
        kept = sequence.waiting.index(ticket) if sequence.has_slot else 0
        dropped = [sequence.waiting.pop() for _ in range(len(sequence.waiting) - kept)]
        self.waiting -= len(dropped)
        changes.refused.extend(other for other in reversed(dropped) if other is not ticket)
        self._close_to_others(sequence)
        if sequence.has_slot:
            self._advance(sequence, now_us, changes)
        else:
            del self._backlog[sequence]
            self._forget(sequence, changes)
        return changes

    def in_backlog(self, sequence: Sequence[AnyTicket]) -> bool:
        """Whether it waits for a slot."""
        return sequence in self._backlog

    def end_idle(self, now_us: int) -> TurnChanges[AnyTicket]:
        """End the sequences for which nothing has happened for too long."""
        changes: TurnChanges[AnyTicket] = TurnChanges()
        while (next_us := self.next_idle_us()) is not None and next_us <= now_us:
            sequence, _ = self._idle.popitem(last=False)
            self._close_to_others(sequence)
            self._advance(sequence, now_us, changes)
        return changes

    def next_idle_us(self) -> int | None:
        """Return when the next sequence will have been idle for too long, unless something happens; None: never."""
        return next(iter(self._idle.values())) + self._idle_us if self._idle else None

    def refuse_backlog(self) -> TurnChanges[AnyTicket]:
        """Let no sequence get a slot any more that has none."""
        changes: TurnChanges[AnyTicket] = TurnChanges()
        while self._backlog:
            sequence, _ = self._backlog.popitem(last=False)
            changes.refused.extend(sequence.waiting)
            self.waiting -= len(sequence.waiting)
            sequence.waiting.clear()
            self._close_to_others(sequence)
            self._forget(sequence, changes)
        return changes

    def close(self, now_us: int) -> TurnChanges[AnyTicket]:
        """End all sequences. Requests of those that have a slot are still executed."""
        self._closed = True
        changes = self.refuse_backlog()
        for sequence in list(self._open.values()):
            self._close_to_others(sequence)
            if self._idle.pop(sequence, None) is not None:
                self._advance(sequence, now_us, changes)
        return changes

    def _begin(self, identity: SequenceId) -> Sequence[AnyTicket]:
        sequence: Sequence[AnyTicket] = Sequence(identity, has_slot=self._free_slots > 0)
        self._open[identity] = sequence
        self.sequences += 1
        if sequence.has_slot:
            self._free_slots -= 1
        else:
            self._backlog[sequence] = None
        return sequence

    def _close_to_others(self, sequence: Sequence[AnyTicket]) -> None:
        """Let nothing join the sequence any more; another one may get its id."""
        sequence.ended = True
        if self._open.get(sequence.identity) is sequence:
            del self._open[sequence.identity]

    def _advance(self, sequence: Sequence[AnyTicket], now_us: int, changes: TurnChanges[AnyTicket]) -> None:
        """Have the sequence's next request executed, if there is one and none is; else it is idle, or over."""
        if sequence.is_busy:
            return
        if sequence.waiting:
            sequence.running = sequence.waiting.popleft()
            self.waiting -= 1
            changes.begin.append(sequence.running)
        elif not sequence.ended:
            self._idle[sequence] = now_us
        else:
            self._forget(sequence, changes)
            self._give_slot(sequence, now_us, changes)

    def _forget(self, sequence: Sequence[AnyTicket], changes: TurnChanges[AnyTicket]) -> None:
        self.sequences -= 1
        changes.over.append(sequence)

    def _give_slot(self, sequence: Sequence[AnyTicket], now_us: int, changes: TurnChanges[AnyTicket]) -> None:
        """Give the slot of a sequence that is over to the one that has waited for the longest time."""
        sequence.has_slot = False
        if not self._backlog:
            self._free_slots += 1
            return
        successor, _ = self._backlog.popitem(last=False)
        successor.has_slot = True
        self._advance(successor, now_us, changes)
