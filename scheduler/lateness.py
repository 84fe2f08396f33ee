"""When a query is certain to miss its deadline: even if it had every core to itself from now on. Pure.

The live scheduler and the simulator refuse a query that `rejects_late` then, waiting or running, and not before.
Policies may refuse a waiting one earlier, by a prediction.
"""

import heapq
from collections.abc import Iterator

from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policy import Query


def certain_from_us(query: Query, model: ModelProfile, core_count: int, layer: int | None = None) -> float | None:
    """Return from when on the query is certain to be late, if it gets no further until then; None without a deadline.

    `layer`: the one being executed, which may end at any moment; None: none is. What counts is the isolated time of the
    rest with the best version and number of cores of each layer; a model whose times are not known is late at its
    deadline.
    """
    if query.deadline_us is None:
        return None
    next_layer = query.next_layer if layer is None else min(layer + 1, model.layers)  # a gang at its end has no layer
    return query.deadline_us - model.fastest_us(next_layer, core_count, query.rows)


def certain_to_be_late(
    query: Query, model: ModelProfile, now_us: float, core_count: int, layer: int | None = None
) -> bool:
    """Return whether the query is certain to miss its deadline."""
    from_us = certain_from_us(query, model, core_count, layer)
    return from_us is not None and now_us > from_us


class LateWatch:
    """Which queries to look at, and when: a driver sets one timer instead of looking at all. Times are microseconds.

    A query that has got further by then is looked at again later; one that has ended is for the driver to skip.
    """

    def __init__(self) -> None:
        self._times: list[tuple[float, int]] = []  # heap of (time, query id)

    def add(self, query_id: int, at_us: float) -> None:
        """Look at a query at this time."""
        heapq.heappush(self._times, (at_us, query_id))

    @property
    def next_us(self) -> float | None:
        """When there is something to look at, at the earliest."""
        return self._times[0][0] if self._times else None

    def due(self, now_us: float) -> Iterator[int]:
        """Yield the queries whose time is over. What is added meanwhile for a time that is over is yielded, too."""
        while self._times and self._times[0][0] < now_us:
            yield heapq.heappop(self._times)[1]
