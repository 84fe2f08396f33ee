"""The order of a stream's requests and answers. Pure."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Sequenced(Protocol):
    """What may belong to a sequence."""

    @property
    def sequence(self) -> Hashable | None:
        """Return which; None: to none."""


Item = TypeVar("Item", bound=Sequenced)
Answer = TypeVar("Answer")


class SequenceQueues(Generic[Item]):
    """For each sequence that has a request under way, those that wait behind it. Not safe for threads."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[Item]] = {}

    def enter(self, item: Item) -> bool:
        """Say whether the request may begin; if not, `leave` returns it when it may."""
        if item.sequence is None:
            return True
        waiting = self._waiting.get(item.sequence)
        if waiting is None:
            self._waiting[item.sequence] = deque()
            return True
        waiting.append(item)
        return False

    def leave(self, item: Item) -> Item | None:
        """Return the request that may begin now that this one has been answered."""
        if item.sequence is None or item.sequence not in self._waiting:
            return None
        waiting = self._waiting[item.sequence]
        if waiting:
            return waiting.popleft()
        del self._waiting[item.sequence]
        return None

    def clear(self) -> None:
        """Forget all that wait."""
        self._waiting.clear()


@dataclass(eq=False)
class OrderTicket(Generic[Answer]):
    """The place of a request in each of its lines; `answer` is there when it is known."""

    lines: Sequence[str]
    answer: Answer | None = None


class AnswerOrder(Generic[Answer]):
    """Keeps answers back until those are there that were asked for earlier in the same line. Not safe for threads.

    Requests without an id stand in one line: their order is all that tells the client which answer is which. So do
    those for a model whose configuration says `preserve_ordering`. All others are answered as they end. A request may
    stand in several lines. Nothing waits for ever: of those that have no answer yet the one that came first holds up
    others and is held up by none.
    """

    def __init__(self) -> None:
        self._lines: dict[str, deque[OrderTicket[Answer]]] = {}

    def ticket(self, lines: Sequence[str]) -> OrderTicket[Answer]:
        """Let a further request stand in these lines."""
        ticket: OrderTicket[Answer] = OrderTicket(lines)
        for line in lines:
            self._lines.setdefault(line, deque()).append(ticket)
        return ticket

    def put(self, ticket: OrderTicket[Answer], answer: Answer) -> list[Answer]:
        """Return what can be sent now, in order."""
        ticket.answer = answer
        ready: list[Answer] = []
        candidates = [ticket]
        while candidates:
            first = candidates.pop()
            if first.answer is not None and self._is_first(first):
                ready.append(first.answer)
                candidates += self._leave(first)
        return ready

    def clear(self) -> None:
        """Forget what is kept."""
        self._lines.clear()

    def _is_first(self, ticket: OrderTicket[Answer]) -> bool:
        return all(line in self._lines and self._lines[line][0] is ticket for line in ticket.lines)

    def _leave(self, ticket: OrderTicket[Answer]) -> list[OrderTicket[Answer]]:
        """Take a ticket out of its lines, return those that are the first of one now."""
        followers = []
        for line in ticket.lines:
            waiting = self._lines[line]
            waiting.popleft()
            if waiting:
                followers.append(waiting[0])
            else:
                del self._lines[line]
        return followers
