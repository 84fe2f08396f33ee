"""Groups waiting requests into batches, and cuts batches into gangs' parts: what a policy is shown. Pure.

A grouping is not remembered: at the next decision it is made anew from what waits then; only what has begun stays as it
is. So a change of Packrat's configuration is the next dispatch, and costs nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from operator import attrgetter
from types import MappingProxyType

from gangway.scheduler.batching.line import Line
from gangway.scheduler.batching.model import BatchModel
from gangway.scheduler.batching.units import FormedPiece, FormedUnit, units_of, whose_turn_it_is
from gangway.scheduler.batching.waves import Part
from gangway.scheduler.control import LoadModel
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policy import Query, RunningBlock
from gangway.scheduler.values import value

__all__ = ["BatchFormer", "Formed", "FormedPiece", "FormedUnit"]

LEAST_SHOWN = 4  # batches of a kind, or as many as there are cores: more cannot begin now
_KIND = attrgetter("model_id", "priority", "rejects_late", "join_key", "started", "formed")
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
    """What a `Formed` is made of."""

    queries: list[Query]
    units: dict[int, FormedUnit] = field(default_factory=dict)
    planned: bool = False  # requests have cores planned for them
    wake_us: float | None = None


class BatchFormer:
    """Call `arrived` for each request, `form` before each decision.

    `next_id` gives numbers for queries that stand for a part of a batch. `way_back_us`: as in Snapshot.
    """

    def __init__(self, next_id: Callable[[], int], way_back_us: float = 0.0) -> None:
        self._next_id = next_id
        self._way_back_us = way_back_us
        self._models: dict[int, BatchModel] = {}
        self._batches = count(1)

    def add(self, spec: LoadModel) -> None:
        """A model is loaded."""
        model = BatchModel(spec)
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
        waiting: Sequence[Query],
        now_us: float,
        models: Mapping[int, ModelProfile],
        core_count: int,
        free_cores: int,
        running: Sequence[RunningBlock] = (),
        stretches: Mapping[int, float] = _NO_STRETCHES,
    ) -> Formed:
        """Return what the policy is shown of `waiting`, which is in order of arrival: `waiting` itself if it can be.

        `models` has a profile for each of them; of `core_count` cores in service `free_cores` are idle.
        """
        if not self._models or not waiting:
            return Formed(waiting)
        passing, groups = self._grouped(waiting)
        shown = _Shown(whose_turn_it_is(passing))
        for group in groups:
            model = self._models[group[0].model_id]
            members = _next_in_order(group, model, waiting, running) if model.keeps_order else group
            if not members:
                continue
            model.see(models[model.model_id], core_count)
            may_wait = free_cores == core_count and len(members) == len(waiting)
            self._show(members, model, now_us, may_wait, stretches.get(model.model_id, 1.0), shown)
        if not shown.units and not shown.planned and len(shown.queries) == len(waiting):
            return Formed(waiting)
        shown.queries.sort(key=attrgetter("arrival_us"))
        return Formed(shown.queries, shown.units, shown.wake_us)

    def _grouped(self, waiting: Sequence[Query]) -> tuple[list[Query], list[list[Query]]]:
        """Return what passes through, and the others by kind: only those of one kind are joined."""
        passing: list[Query] = []
        groups: list[list[Query]] = []
        of_kind: dict[object, list[Query]] = {}  # a kind's, or model's, place among them
        for query in waiting:
            kind = _KIND(query)
            place = of_kind.get(kind)
            if place is None:
                model = self._models.get(query.model_id)
                if model is None or query.started or query.formed:
                    place = passing
                elif model.keeps_order and query.model_id in of_kind:
                    place = of_kind[query.model_id]
                else:
                    groups.append(place := [])
                    of_kind[query.model_id] = place
                of_kind[kind] = place
            place.append(query)
        return passing, groups

    def _show(
        self, members: list[Query], model: BatchModel, now_us: float, may_wait: bool, stretch: float, shown: _Shown
    ) -> None:
        """Show the next batches of one kind."""
        rows = sum(map(attrgetter("rows"), members))
        joins = model.joins(members[0])
        may_wait = may_wait and joins and model.rewarding_gap_us(rows) is not None
        wanted_rows = model.wanted_rows(rows) if joins else 1
        if wanted_rows == 1 and not may_wait:
            if rows == len(members) and not model.keeps_order:
                shown.queries += members
                return
            for query in members[:1] if model.keeps_order else members:
                self._show_batch([query], query.deadline_us, model, stretch, shown)
            return
        most = 1 if model.keeps_order else max(LEAST_SHOWN, model.cores)
        line = Line(members, rows, (most + 1) * (wanted_rows or rows), model, now_us, self._way_back_us, stretch)
        batches, held_until_us = line.batches(most, may_wait)
        for begin, end in batches:
            self._show_batch(line.members[begin:end], line.deadline_us(begin, end), model, stretch, shown)
        if held_until_us is not None:
            shown.wake_us = held_until_us if shown.wake_us is None else min(shown.wake_us, held_until_us)

    def _show_batch(
        self, members: Sequence[Query], deadline_us: float | None, model: BatchModel, stretch: float, shown: _Shown
    ) -> None:
        """Show a batch as a query of each gang that can begin; requests that are a part each remain what they are."""
        parts = model.parts(sum(query.rows for query in members), len(members), stretch)
        apart = [query.rows for query in members] == [part.rows for part in parts]
        if apart and not (model.keeps_order and len(members) > 1):
            planned = len(parts) > 1
            shown.planned |= planned
            shown.queries += _with_cores(members, parts) if planned else members
            return
        for unit in units_of(members, parts, deadline_us, next(self._batches), self._next_id):
            shown.units[unit.query.query_id] = unit
            shown.queries.append(unit.query)


def _with_cores(members: Sequence[Query], parts: Sequence[Part]) -> list[Query]:
    return [replace(query, cores=part.cores) for query, part in zip(members, parts, strict=True)]


def _next_in_order(
    members: list[Query], model: BatchModel, waiting: Sequence[Query], running: Sequence[RunningBlock]
) -> list[Query]:
    """Return who may be in the next batch of a model that keeps their order; nobody while one is under way."""
    if any(query.model_id == model.model_id and (query.started or query.formed) for query in waiting):
        return []
    if any(block.query.model_id == model.model_id for block in running):
        return []
    first = members[0]
    if not model.joins(first):
        return members[:1]
    return list(takewhile(lambda query: _KIND(query) == _KIND(first), members))
