"""Steps of streams that wait for an instance of a Python model: here, until one can begin.

What follows each response of a decoupled step comes in tens. The scheduler could begin only as many as the instances
take, and would decide anew about all others when one ends: that takes longer than most of them. A request that finds an
instance free begins without a decision. Of each model the most urgent one that waits is the next to be handed over.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

Urgency: TypeAlias = tuple[int, float, int]  # priority, deadline, arrival: the least is the first


class StepTurn:
    """One step's."""

    def __init__(self, turns: "InstanceTurns", model_id: int, begin: Callable[["StepTurn"], None]) -> None:
        self._turns, self._model_id, self._begin = turns, model_id, begin
        self._has_begun = self.is_over = False

    @property
    def waits(self) -> bool:
        """Whether it is to come."""
        return not (self._has_begun or self.is_over)

    def begin(self) -> None:
        """It is its turn."""
        self._has_begun = True
        self._begin(self)

    def end(self) -> None:
        """It is over, whether it has begun or not; the next one begins. Calling it again does nothing."""
        if not self.is_over:
            self.is_over = True
            if self._has_begun:
                self._turns.ended(self._model_id)


class InstanceTurns:
    """Those of all models, by their numbers. For the loop's thread."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[Urgency, int, StepTurn]]] = {}  # heaps
        self._under_way: Counter[int] = Counter()
        self._most: dict[int, int] = {}
        self._beginning: set[int] = set()
        self._numbers = itertools.count()

    def take(self, model_id: int, most: int, urgency: Urgency, begin: Callable[[StepTurn], None]) -> StepTurn:
        """Return a turn; `begin` is called with it, and raises nothing, when less than `most` are under way."""
        turn = StepTurn(self, model_id, begin)
        heapq.heappush(self._waiting.setdefault(model_id, []), (urgency, next(self._numbers), turn))
        self._most[model_id] = most
        self._begin(model_id)
        return turn

    def ended(self, model_id: int) -> None:
        """A turn of this model that had begun is over."""
        self._under_way[model_id] -= 1
        self._begin(model_id)

    def _begin(self, model_id: int) -> None:
        """Begin as many as may be under way. One that ends as it begins leaves the next one to the outer call."""
        if model_id in self._beginning:
            return
        waiting = self._waiting.get(model_id, [])
        self._beginning.add(model_id)
        while waiting and self._under_way[model_id] < self._most[model_id]:
            turn = heapq.heappop(waiting)[-1]
            if not turn.is_over:
                self._under_way[model_id] += 1
                turn.begin()
        self._beginning.discard(model_id)
        if not (waiting or self._under_way[model_id]):
            self._waiting.pop(model_id, None)
            self._most.pop(model_id, None)
            del self._under_way[model_id]
