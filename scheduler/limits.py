"""Limits: queries that have to wait although cores are free, because a model may not have more of them under way.

A limit is a resource with a name, of which a query holds some from its first layer to its last, also while it is
stopped. The instances of a model are a resource of its own, and those of Triton's rate limiter are shared by models.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import exp
from typing import Final, TypeAlias

from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policy import Query
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.waiting import WaitingGroup

# How much may wait in an overload, and who goes when it is more. Pure.
#
# Late queries are served with what others leave, and in an overload that is next to nothing. There would be ever more
# of them, with the memory of their tensors, until no request slot is left; and each would hear only then that it
# waited for nothing. So what may wait is what is likely to be served before long. The same for best effort, as long as
# that is so. A burst is no overload yet: until late ones have had to be refused more of them may wait.

BURST_US: Final = 2e6  # of the whole machine's time may wait in any case: so a burst is served late, not refused;
OVERLOAD_US: Final = 0.5e6  # only so much
OVERLOADED_US: Final = 10e6  # until so long after the last one was refused
PATIENCE_US: Final = 60e6  # or as much as will be done in this time, if it goes on as lately, where
MOSTLY: Final = 0.5  # such a share of the machine's time at least went to late queries: nobody else waits for it
MEMORY_US: Final = 10e6  # "lately": an answer counts 1/e of what it did so long ago
MUCH: Final = 1 / 2  # of what may wait of late work: what is best effort waits in vain, too,
BEST_EFFORT_MOST: Final = 32  # beyond so many
ROOM: Final = 1 / 8  # of what may wait is made at once


def work_us(model: ModelProfile, rows: int, core_count: int) -> float:
    """Return the machine's time for rows of a model: that of single cores, the most efficient use of them."""
    return model.rows_us(1, 1) * rows / core_count


class LateBacklog:
    """Remembers how much of the machine's time late queries that were answered took lately."""

    def __init__(self) -> None:
        self._served_us = 0.0
        self._updated_us = 0.0
        self._overloaded_until_us = 0.0

    def answered(self, query: Query, model: ModelProfile, now_us: float, core_count: int) -> None:
        """A query has been answered."""
        if query.deadline_us is not None and query.deadline_us < now_us and _is_known(model):
            self._served_us = self._faded(now_us) + work_us(model, query.rows, core_count)
            self._updated_us = now_us

    def most_us(self, now_us: float) -> float:
        """Return how much of the machine's time may wait for late queries now."""
        share = min(1.0, self._faded(now_us) / MEMORY_US)
        return share * PATIENCE_US if share >= MOSTLY else self._least_us(now_us)

    def _least_us(self, now_us: float) -> float:
        return OVERLOAD_US if now_us < self._overloaded_until_us else BURST_US

    def _faded(self, now_us: float) -> float:
        return self._served_us * exp(-max(0.0, now_us - self._updated_us) / MEMORY_US)

    def excess(
        self, groups: Iterable[WaitingGroup], models: Mapping[int, ModelProfile], now_us: float, core_count: int
    ) -> list[int]:
        """Return the numbers of the queries that shall not wait any longer, none that has begun.

        Of the late ones, if their time is known, the oldest of the lowest class; somewhat more than necessary. While
        their work is much, best effort beyond `BEST_EFFORT_MOST`, too, that goes before none of them: the newest, so
        that old ones are answered.
        """
        fresh = [group for group in groups if not group.started]
        late = [(group, model) for group in fresh if group.late(now_us) and (model := _known(group, models))]
        waiting_us = sum(
            group.late(now_us) * work_us(model, group.rows, core_count) / len(group) for group, model in late
        )
        chosen: list[int] = []
        if waiting_us > MUCH * self._least_us(now_us):
            first = min(group.priority for group, _ in late)
            chosen += _newest([group for group in fresh if group.priority >= first], BEST_EFFORT_MOST)
        most_us = self.most_us(now_us)
        if waiting_us > most_us:
            self._overloaded_until_us = now_us + OVERLOADED_US
            chosen += _oldest(late, now_us, core_count, waiting_us - (1 - ROOM) * most_us)
        return chosen


def _oldest(
    groups: Iterable[tuple[WaitingGroup, ModelProfile]], now_us: float, core_count: int, least_us: float
) -> list[int]:
    """Return late queries of so much work at least."""
    late = [(query, model) for group, model in groups for query in group.late_ones(now_us)]
    late.sort(key=lambda one: (-one[0].priority, one[0].arrival_us))
    chosen = []
    for query, model in late:
        if least_us <= 0:
            break
        least_us -= work_us(model, query.rows, core_count)
        chosen.append(query.query_id)
    return chosen


def _newest(groups: Iterable[WaitingGroup], most: int) -> list[int]:
    """Return the best-effort queries beyond so many."""
    queries = [query for group in groups for query in group.best_effort()]
    queries.sort(key=lambda query: (query.priority, query.arrival_us))
    return [query.query_id for query in queries[most:]]


def _known(group: WaitingGroup, models: Mapping[int, ModelProfile]) -> ModelProfile | None:
    model = models.get(group.model_id)
    return model if model is not None and _is_known(model) else None


def _is_known(model: ModelProfile) -> bool:
    return (model.measured or model.isolated_us > 0) and not model.varies


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
