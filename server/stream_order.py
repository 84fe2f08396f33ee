"""Order within a stream. Requests overtake each other, but for two kinds.

Those of one sequence are executed one after the other. Those without an id are executed at the same time, but answered
in their order: it is all that tells the client which answer is which. Neither class here is safe for threads.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Sequenced(Protocol):
    """What may belong to a sequence."""

    @property
    def sequence(self) -> Hashable | None:
        """Return which; None: to none."""


Item = TypeVar("Item", bound=Sequenced)
Answer = TypeVar("Answer")


class SequenceQueues(Generic[Item]):
    """For each sequence that has a request under way, those that wait behind it."""

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


class AnswerOrder(Generic[Answer]):
    """Keeps answers back until all are there that were asked for earlier."""

    def __init__(self) -> None:
        self._asked = 0
        self._next = 0
        self._kept: dict[int, Answer] = {}

    def ticket(self) -> int:
        """Return the number of a further request."""
        self._asked += 1
        return self._asked - 1

    def put(self, ticket: int, answer: Answer) -> list[Answer]:
        """Return what can be sent now, in order."""
        self._kept[ticket] = answer
        ready = []
        while self._next in self._kept:
            ready.append(self._kept.pop(self._next))
            self._next += 1
        return ready

    def clear(self) -> None:
        """Forget what is kept."""
        self._kept.clear()
