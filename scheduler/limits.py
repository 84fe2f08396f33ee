"""Limits: queries that have to wait although cores are free, because a model may not have more of them under way.

A limit is a resource with a name, of which a query holds some from its first layer to its last, also while it is
stopped. The instances of a model are a resource of its own, and those of Triton's rate limiter are shared by models.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policy import Query

Urgency: TypeAlias = tuple[int, float, float, int]


class Limits:
    """What models need, and who had how many turns. A server without limits pays nothing for it."""

    def __init__(self) -> None:
        self._models: dict[int, LoadModel] = {}
        self._available: dict[str, int] = {}
        self._turns: Counter[int] = Counter()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._models)

    def add(self, spec: LoadModel) -> None:
        """Note what queries of a model need. It has had as many turns as those that had least, not none."""
        if spec.limits:
            fewest = min((self._share(model_id) for model_id in self._models if self._priority(model_id)), default=0)
            self._models[spec.model_id] = spec
            self._turns[spec.model_id] = fewest // max(1, spec.limit_priority)
            self._review()

    def remove(self, model_id: int) -> None:
        """Forget a model."""
        if self._models.pop(model_id, None) is not None:
            del self._turns[model_id]
            self._review()

    def started(self, model_id: int) -> None:
        """Count a query that has begun."""
        if model_id in self._models:
            self._turns[model_id] += 1

    def admissible(self, waiting: Sequence[Query], under_way: Iterable[int]) -> Sequence[Query]:
        """Return the waiting queries that may run now, in the given order; all of those returned may run together.

        `under_way` has the model of each query that has begun. Where not all may begin, models that had fewer turns,
        times their priority of Triton's rate limiter, go first; then counts how urgent the query is.
        """
        limited: defaultdict[int, list[tuple[Urgency, Query]]] = defaultdict(list)
        for query in waiting:
            if query.model_id in self._models and not query.started:
                limited[query.model_id].append((_urgency(query), query))
        if not limited:
            return waiting
        admitted = self._admitted(limited, self._free(under_way))
        return [
            query
            for query in waiting
            if query.started or query.model_id not in self._models or query.query_id in admitted
        ]

    def _admitted(self, limited: dict[int, list[tuple[Urgency, Query]]], free: Counter[str]) -> set[int]:
        """Give what is free to one query after the other. Queries of one model need the same, so one stands for all."""
        for queries in limited.values():
            heapq.heapify(queries)
        admitted: set[int] = set()
        turns: Counter[int] = Counter()
        while limited:
            model_id = min(limited, key=lambda model: (self._share(model, turns[model]), limited[model][0]))
            limits = self._models[model_id].limits
            if all(free[name] >= amount for name, amount, _ in limits):
                free.subtract({name: amount for name, amount, _ in limits})
                admitted.add(heapq.heappop(limited[model_id])[1].query_id)
                turns[model_id] += 1
            else:
                limited[model_id].clear()
            if not limited[model_id]:
                del limited[model_id]
        return admitted

    def _priority(self, model_id: int) -> int:
        return self._models[model_id].limit_priority

    def _share(self, model_id: int, more: int = 0) -> int:
        return (self._turns[model_id] + more) * self._priority(model_id)

    def _free(self, under_way: Iterable[int]) -> Counter[str]:
        free = Counter(self._available)
        for model_id in under_way:
            if model_id in self._models:
                free.subtract({name: amount for name, amount, _ in self._models[model_id].limits})
        return free

    def _review(self) -> None:
        """There is as much of a resource as the model says that says most."""
        self._available = {}
        for spec in self._models.values():
            for name, _, available in spec.limits:
                self._available[name] = max(available, self._available.get(name, 0))


def _urgency(query: Query) -> Urgency:
    """Order queries; the last part is there so that no two are equal."""
    deadline_us = float("inf") if query.deadline_us is None else query.deadline_us
    return query.priority, deadline_us, query.arrival_us, query.query_id
