"""Groups waiting requests into batches, and cuts batches into gangs' parts: what a policy is shown. Pure.

A grouping is not remembered: at the next decision it is made anew from what waits then; only what has begun stays as it
is. So a change of Packrat's configuration is the next dispatch, and costs nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from heapq import merge
from itertools import count, takewhile
from operator import attrgetter
from types import MappingProxyType

from gangway.scheduler.batching.line import Line
from gangway.scheduler.batching.model import BatchModel
from gangway.scheduler.batching.units import FormedPiece, FormedUnit, units_of, whose_turn_it_is
from gangway.scheduler.batching.waves import Part
from gangway.scheduler.control import LoadModel
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policies.gangway_order import LEAST_PLANNED
from gangway.scheduler.policy import Query, RunningBlock
from gangway.scheduler.values import value
from gangway.scheduler.waiting import BY_ARRIVAL, KIND, WaitingGroup, WaitingQueries

__all__ = ["BatchFormer", "Formed", "FormedPiece", "FormedUnit"]

NO_CLASS = float("-inf")  # above all
LEAST_SHOWN = 4  # batches of a kind, or as many as there are cores: more cannot begin now
_query_of: Callable[..., Query] = Query
_FIELDS = tuple(one.name for one in fields(Query))
_BEFORE_CORES = attrgetter(*_FIELDS[: _FIELDS.index("cores")])
_AFTER_CORES = attrgetter(*_FIELDS[_FIELDS.index("cores") + 1 :])
_NO_STRETCHES: Mapping[int, float] = MappingProxyType({})


@value(frozen=True, slots=True)
class Formed:
    """What a policy is shown: queries in order of arrival; those in `units` stand for several or parts of requests.

    `wake_us`: when to form again, if nothing happens before: requests that wait for company go then.
    """

    queries: Sequence[Query]
    units: Mapping[int, FormedUnit] = field(default_factory=dict)  # by query id
    wake_us: float | None = None


@dataclass(slots=True)
class _Shown:
    """What a `Formed` is made of.

    In a crowd not all of those who will be late are shown: of each kind as many as could begin. That is one on each
    free core, but a class above that of somebody who runs may have any core, and so may those that are brief.
    """

    crowded: bool
    free_cores: int
    core_count: int
    lowest: float  # class of those that run
    brief: bool = False  # the kind that is being looked at: others make room for it
    queries: list[Query] = field(default_factory=list)
    units: dict[int, FormedUnit] = field(default_factory=dict)
    planned: bool = False  # requests have cores planned for them
    wake_us: float | None = None

    def late(self, priority: int) -> int:
        """Return how many of a kind of this class are shown who will be late."""
        return self.core_count if self.brief or priority < self.lowest else self.free_cores


class BatchFormer:
    """Call `arrived` for each request, `form` before each decision.

    `next_id` gives numbers for queries that stand for a part of a batch. `way_back_us`: as in Snapshot. `dispatch_us`:
    what of one of the workers' cores each dispatch takes.
    """

    def __init__(self, next_id: Callable[[], int], way_back_us: float = 0.0, dispatch_us: float = 0.0) -> None:
        self._next_id = next_id
        self._way_back_us = way_back_us
        self._dispatch_us = dispatch_us
        self._models: dict[int, BatchModel] = {}
        self._batches = count(1)

    def add(self, spec: LoadModel) -> None:
        """A model is loaded."""
        model = BatchModel(spec, self._dispatch_us)
        if not model.is_plain:
            self._models[spec.model_id] = model

    def remove(self, model_id: int) -> None:
        """It is not served any more."""
        self._models.pop(model_id, None)

    def arrived(self, query: Query) -> None:
        """Learn how often a model is asked."""
        model = self._models.get(query.model_id)
        if model is not None and model.joins(query):
            model.rate.arrived(query.arrival_us, query.rows)

    def may_hold(self, model_id: int, cores: int) -> bool:
        """Whether a lone request of one row may have to wait although one of so many cores is free."""
        model = self._models.get(model_id)
        return model is not None and model.may_hold(cores)

    def form(
        self,
        waiting: WaitingQueries,
        now_us: float,
        models: Mapping[int, ModelProfile],
        core_count: int,
        free_cores: int,
        running: Sequence[RunningBlock] = (),
        stretches: Mapping[int, float] = _NO_STRETCHES,
    ) -> Formed:
        """Return what the policy is shown of `waiting`: all of it in the very list, if it can be.

        `models` has the profiles; who waits for a model without one is not shown. Of `core_count` cores in service
        `free_cores` are idle. Of a long queue those are shown that the policy may choose (`candidates` of `gangway`):
        what this costs does not grow with it.
        """
        crowded = len(waiting) > LEAST_PLANNED
        classes = [block.query.priority for block in running] if crowded else ()
        shown = _Shown(crowded, free_cores, core_count, max(classes, default=NO_CLASS))
        begun: list[Query] = []
        in_order: dict[int, list[WaitingGroup]] = {}  # by model that keeps its requests' order
        for group in waiting.groups:
            if group.model_id not in models:
                continue
            model = self._models.get(group.model_id)
            shown.brief = models[group.model_id].is_brief
            if group.started or group.formed:
                begun += group.in_order
            elif model is None:
                shown.queries += _planned(group, now_us, shown)
            elif model.keeps_order:
                in_order.setdefault(group.model_id, []).append(group)
            else:
                stretch = stretches.get(group.model_id, 1.0)
                model.see(models[group.model_id], core_count, stretch, group.is_timed)
                may_wait = free_cores == core_count and len(group) == len(waiting)
                self._show(group, model, now_us, may_wait, stretch, shown)
        shown.brief = False
        for model_id, groups in in_order.items():
            model = self._models[model_id]
            stretch = stretches.get(model_id, 1.0)
            model.see(models[model_id], core_count, stretch, any(group.is_timed for group in groups))
            if not _under_way(model_id, waiting, running):
                may_wait = free_cores == core_count and sum(map(len, groups)) == len(waiting)
                self._show_next(groups, model, now_us, may_wait, stretch, shown)
        shown.queries += _begun(whose_turn_it_is(begun), now_us, shown)
        if not shown.units and not shown.planned and len(shown.queries) == len(waiting):
            return Formed(waiting.in_order)
        shown.queries.sort(key=attrgetter("arrival_us"))
        return Formed(shown.queries, shown.units, shown.wake_us)

    def _show(
        self, group: WaitingGroup, model: BatchModel, now_us: float, may_wait: bool, stretch: float, shown: _Shown
    ) -> None:
        """Show the next batches of one kind."""
        rows = group.rows
        joins = model.joins(group.in_order[0])
        may_wait = may_wait and joins and model.rewarding_gap_us(rows) is not None
        wanted_rows = model.wanted_rows(rows) if joins else 1
        if wanted_rows == 1 and not may_wait:
            members = _planned(group, now_us, shown)
            if rows == len(group):
                shown.queries += members
                return
            for query in members:
                self._show_batch([query], query.deadline_us, model, stretch, shown)
            return
        most = max(LEAST_SHOWN, model.cores)
        batch_rows = wanted_rows or rows
        done_us = now_us + self._way_back_us
        most_late = min(model.cores, shown.late(group.priority)) if shown.crowded else most
        hopeful, others = group.parted(done_us + model.sure_us, (most + 1) * batch_rows, (most_late + 1) * batch_rows)
        if not (hopeful or most_late):
            return
        if rows > len(group):
            hopeful, others = _parted(hopeful + others, model, done_us)
        line = Line(hopeful + others, len(hopeful), rows, model, now_us, self._way_back_us, stretch)
        self._show_line(line, most, most_late, may_wait, stretch, shown)

    def _show_next(
        self,
        groups: Sequence[WaitingGroup],
        model: BatchModel,
        now_us: float,
        may_wait: bool,
        stretch: float,
        shown: _Shown,
    ) -> None:
        """Show the next batch of a model that keeps the order of its requests: those of one kind that come first."""
        ordered = merge(*[group.in_order for group in groups], key=BY_ARRIVAL)
        first = next(ordered)
        members = [first]
        if model.joins(first):
            members += takewhile(lambda query: KIND(query) == KIND(first), ordered)
        rows = sum(query.rows for query in members)
        may_wait = may_wait and len(groups) == 1 and model.joins(first) and model.rewarding_gap_us(rows) is not None
        if not model.joins(first) or (model.wanted_rows(rows) == 1 and not may_wait):
            self._show_batch(members[:1], first.deadline_us, model, stretch, shown)
            return
        line = Line(members, 0, rows, model, now_us, self._way_back_us, stretch)
        self._show_line(line, 1, 1, may_wait, stretch, shown)

    def _show_line(self, line: Line, most: int, most_late: int, may_wait: bool, stretch: float, shown: _Shown) -> None:
        """Show the next batches of a line, up to so many.

        What is left over at its end, of those who have no target to meet, waits for company while others can take all
        cores: a policy that prefers what is short would always choose it, and never a batch of the best size. With a
        configured delay everybody has waited for company already.
        """
        batches, held_until_us = line.batches(most, most_late, may_wait)
        gangs = before_rows = 0
        for begin, end in batches:
            rows = line.rows(begin, end)
            is_left_over = begin >= line.hopeful and rows < before_rows and line.model.max_delay_us is None
            if is_left_over and gangs >= line.model.cores:
                break
            if rows == 1:  # as it came: most of those that are in a hurry
                shown.queries.append(line.members[begin])
                gangs += 1
            else:
                members, deadline_us = line.members[begin:end], line.deadline_us(begin, end)
                gangs += self._show_batch(members, deadline_us, line.model, stretch, shown)
            before_rows = rows
        if held_until_us is not None:
            shown.wake_us = held_until_us if shown.wake_us is None else min(shown.wake_us, held_until_us)

    def _show_batch(
        self, members: Sequence[Query], deadline_us: float | None, model: BatchModel, stretch: float, shown: _Shown
    ) -> int:
        """Show a batch as a query of each gang that can begin; requests that are a part each remain what they are.

        Return how many gangs there are.
        """
        parts = model.parts(sum(query.rows for query in members), len(members), stretch)
        apart = [query.rows for query in members] == [part.rows for part in parts]
        if apart and not (model.keeps_order and len(members) > 1):
            planned = len(parts) > 1
            shown.planned |= planned
            shown.queries += _with_cores(members, parts) if planned else members
            return len(parts)
        for unit in units_of(members, parts, deadline_us, next(self._batches), self._next_id):
            shown.units[unit.query.query_id] = unit
            shown.queries.append(unit.query)
        return len(parts)


def _with_cores(members: Sequence[Query], parts: Sequence[Part]) -> list[Query]:
    """Return the same with the cores planned for them: `dataclasses.replace`, at a third of the time."""
    return [
        _query_of(*_BEFORE_CORES(query), part.cores, *_AFTER_CORES(query))
        for query, part in zip(members, parts, strict=True)
    ]


def _planned(group: WaitingGroup, now_us: float, shown: _Shown) -> Sequence[Query]:
    """Return those of a kind that the policy would choose from if it saw all of them."""
    if not shown.crowded:
        return group.in_order
    hopeful, others = group.parted(now_us, max(LEAST_PLANNED, shown.core_count), shown.late(group.priority))
    return hopeful + others


def _begun(queries: list[Query], now_us: float, shown: _Shown) -> list[Query]:
    """Return the stopped queries, and of units that have been made but have not started those to choose from."""
    if not shown.crowded:
        return queries
    found: list[Query] = []
    late = 0
    for query in queries:
        if not query.started and (query.deadline_us is None or query.deadline_us <= now_us):
            late += 1
            if late > shown.late(query.priority):
                continue
        found.append(query)
    return found


def _parted(queries: Sequence[Query], model: BatchModel, done_us: float) -> tuple[list[Query], list[Query]]:
    """Return those that can be in time, by deadline, and the others, by arrival: of different rows not all at once."""
    hopeful: list[Query] = []
    others: list[Query] = []
    for query in sorted(queries, key=BY_ARRIVAL):
        timed = query.deadline_us is not None and model.time_left_us(query, done_us) is not None
        (hopeful if timed else others).append(query)
    hopeful.sort(key=attrgetter("deadline_us"))
    return hopeful, others


def _under_way(model_id: int, waiting: WaitingQueries, running: Sequence[RunningBlock]) -> bool:
    """Whether anything of this model has begun."""
    begun = any(group.model_id == model_id and (group.started or group.formed) for group in waiting.groups)
    return begun or any(block.query.model_id == model_id for block in running)
