"""Groups waiting requests into batches, and shows them to a policy. Pure. Times are microseconds.

Batches are formed anew at each decision, from what waits then; only what has begun stays as it is. So a change of
Packrat's configuration is the next dispatch, and costs nothing.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from heapq import merge
from itertools import accumulate, count, takewhile
from operator import attrgetter
from types import MappingProxyType

from gangway.executor.fast_path import Completed
from gangway.executor.leases import MAX_MEMBERS
from gangway.scheduler.batching.planner import Part
from gangway.scheduler.batching.sizes import NEVER_LATE, BatchModel
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policy import Query, RunningBlock
from gangway.scheduler.policy_config import BATCHING, DEFAULT
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.units import Batch, Unit
from gangway.scheduler.waiting import BY_ARRIVAL, KIND, WaitingGroup, WaitingQueries, earlier

NO_CLASS = float("-inf")  # above all classes
_NO_ERRORS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Formed:
    """What a policy is shown: queries in order of arrival, some of which are those of `units` of batches.

    `wake_us`: when to form again, if nothing happens before: requests that wait for others go then.
    """

    queries: Sequence[Query]
    units: Mapping[int, Unit] = field(default_factory=dict)  # by query id
    wake_us: float | None = None


@dataclass(slots=True)
class _Selection:
    """What a `Formed` is made of.

    If the queue is long, late queries are not all shown: of each kind as many as could begin. That is one on each free
    core, but a class above that of somebody who runs may have any core, and so may a brief query.
    """

    is_long: bool
    free_cores: int
    core_count: int
    lowest: float  # class of those that run
    is_brief: bool = False  # the kind that is being looked at: others make room for it
    queries: list[Query] = field(default_factory=list)
    units: dict[int, Unit] = field(default_factory=dict)
    has_planned_cores: bool = False  # requests have cores planned for them
    wake_us: float | None = None

    def max_late(self, priority: int) -> int:
        """Return how many late queries of a kind of this class are shown."""
        return self.core_count if self.is_brief or priority < self.lowest else self.free_cores


class BatchFormer:
    """Forms batches of the models that it has been told of.

    `arrived` is called for each request, `form` before each decision. `next_id` returns numbers for queries that stand
    for parts of batches. `way_back_us`: as in Snapshot. `dispatch_us`: what each dispatch takes of one worker's core.
    """

    def __init__(self, next_id: Callable[[], int], way_back_us: float = 0.0, dispatch_us: float = 0.0) -> None:
        self._next_id = next_id
        self._way_back_us = way_back_us
        self._dispatch_us = dispatch_us
        self._models: dict[int, BatchModel] = {}
        self._batch_numbers = count(1)

    def add(self, spec: LoadModel) -> None:
        """Note that a model is loaded."""
        model = BatchModel(spec, self._dispatch_us)
        if not model.is_plain:
            self._models[spec.model_id] = model

    def remove(self, model_id: int) -> None:
        """Note that a model is not served any more."""
        self._models.pop(model_id, None)

    def arrived(self, query: Query) -> None:
        """Learn how often a model is asked."""
        model = self._models.get(query.model_id)
        if model is not None and model.joins(query):
            model.rate.arrived(query.arrival_us, query.rows)

    def answered(self, model_id: int, requests: Sequence[Completed]) -> None:
        """Learn the same from requests of one row that were answered without being formed."""
        model = self._models.get(model_id)
        if model is not None and model.joins_any:
            model.rate.arrived_each([request.arrival_us for request in requests], 1)

    def may_delay(self, profile: ModelProfile, cores: int) -> bool:
        """Whether a lone request of one row may have to wait although all of so many cores are free, as things are."""
        model = self._models.get(profile.model_id)
        return model is not None and model.may_delay(profile, cores)

    def form(
        self,
        waiting: WaitingQueries,
        now_us: float,
        models: Mapping[int, ModelProfile],
        core_count: int,
        free_cores: int,
        running: Sequence[RunningBlock] = (),
        prediction_errors: Mapping[int, float] = _NO_ERRORS,
    ) -> Formed:
        """Return what the policy is shown of `waiting`: the list itself, if all of it is shown as it is.

        `models` has the profiles; a query for a model without one is not shown. Of `core_count` cores in service
        `free_cores` are idle. Of a long queue those queries are shown that the policy may choose (`candidates` of
        `gangway`), so the cost does not grow with it. `prediction_errors`: as in Snapshot.
        """
        is_long = len(waiting) > DEFAULT.planning.min_queries
        classes = [block.query.priority for block in running] if is_long else ()
        selection = _Selection(is_long, free_cores, core_count, max(classes, default=NO_CLASS))
        begun: list[Query] = []  # stopped, or of a batch that has begun
        in_order: dict[int, list[WaitingGroup]] = {}  # by model that keeps its requests' order
        for group in waiting.groups:
            if group.model_id not in models:
                continue
            profile = models[group.model_id].at(group.precision)
            model = self._models.get(group.model_id)
            selection.is_brief = is_long and profile.is_brief
            if group.started or group.formed:
                begun += group.in_order
            elif model is None or group.compound:
                selection.queries += _candidates(group, now_us, selection)
            elif model.keeps_order:
                in_order.setdefault(group.model_id, []).append(group)
            else:
                error = prediction_errors.get(profile.model_id, 1.0)
                model.update(profile, core_count, error, group.is_timed)
                is_alone = free_cores == core_count and len(group) == len(waiting)
                self._add_kind(group, model, now_us, is_alone, error, selection)
        selection.is_brief = False
        for model_id, groups in in_order.items():
            model = self._models[model_id]
            profile = min([group.in_order[0] for group in groups], key=BY_ARRIVAL).profile(models)
            error = prediction_errors.get(profile.model_id, 1.0)
            model.update(profile, core_count, error, any(group.is_timed for group in groups))
            if not _has_begun(model_id, waiting, running):
                is_alone = free_cores == core_count and sum(map(len, groups)) == len(waiting)
                self._add_next_in_order(groups, model, now_us, is_alone, error, selection)
        if begun:
            selection.queries += _begun_candidates(_of_next_rounds(begun), now_us, selection)
        if not selection.units and not selection.has_planned_cores and len(selection.queries) == len(waiting):
            return Formed(waiting.in_order)
        selection.queries.sort(key=attrgetter("arrival_us"))
        return Formed(selection.queries, selection.units, selection.wake_us)

    def _add_kind(
        self, group: WaitingGroup, model: BatchModel, now_us: float, is_alone: bool, error: float, selection: _Selection
    ) -> None:
        """Show the next batches of one kind. `is_alone`: nobody else wants the cores."""
        joins = model.joins(group.in_order[0])
        may_wait = is_alone and joins and model.gap_worth_waiting_us(group.rows) is not None
        batch_rows = model.next_rows(group.rows) if joins else 1
        if batch_rows == 1 and not may_wait:
            self._add_one_by_one(group, model, now_us, error, selection)
            return
        most = max(BATCHING.min_shown, model.cores)  # batches
        most_late = min(model.cores, selection.max_late(group.priority)) if selection.is_long else most
        most_rows = batch_rows or group.rows  # in one batch; all, if they wait for others
        done_us = now_us + self._way_back_us
        first_us = done_us + model.min_row_us  # no earlier deadline can be met
        on_time, others = group.split_at(first_us, (most + 1) * most_rows, (most_late + 1) * most_rows)
        if not on_time and not most_late:
            return
        if group.rows > len(group):
            on_time, others = _split_by_deadline(on_time + others, model, done_us)
        queue = ModelQueue(on_time + others, len(on_time), group.rows, model, now_us, self._way_back_us, error)
        self._add_batches(queue, most, most_late, may_wait, error, selection)

    def _add_one_by_one(
        self, group: WaitingGroup, model: BatchModel, now_us: float, error: float, selection: _Selection
    ) -> None:
        """Show requests that are not joined; those of several rows may be cut."""
        candidates = _candidates(group, now_us, selection)
        if group.rows == len(group):
            selection.queries += candidates
            return
        for query in candidates:
            self._add_batch([query], query.deadline_us, model, error, selection)

    def _add_next_in_order(
        self,
        groups: Sequence[WaitingGroup],
        model: BatchModel,
        now_us: float,
        is_alone: bool,
        error: float,
        selection: _Selection,
    ) -> None:
        """Show the next batch of a model that keeps the order of its requests: those of one kind that come first."""
        ordered = merge(*[group.in_order for group in groups], key=BY_ARRIVAL)
        first = next(ordered)
        queries = [first]
        if model.joins(first):
            queries += takewhile(lambda query: KIND(query) == KIND(first), ordered)
        rows = sum(query.rows for query in queries)
        may_wait = is_alone and len(groups) == 1 and model.joins(first) and model.gap_worth_waiting_us(rows) is not None
        if not model.joins(first) or (model.next_rows(rows) == 1 and not may_wait):
            self._add_batch(queries[:1], first.deadline_us, model, error, selection)
            return
        queue = ModelQueue(queries, 0, rows, model, now_us, self._way_back_us, error)
        self._add_batches(queue, 1, 1, may_wait, error, selection)

    def _add_batches(
        self, queue: "ModelQueue", most: int, most_late: int, may_wait: bool, error: float, selection: _Selection
    ) -> None:
        """Show the next batches of a queue, up to so many.

        The rest at its end, of requests without a target to meet, waits for others while other batches can take all
        cores: a policy that prefers what is short would always choose it, and never a batch of the best size. With a
        configured delay everybody has waited already.
        """
        batches, wait_until_us = queue.batches(most, most_late, may_wait)
        gangs = before_rows = 0
        for begin, end in batches:
            rows = queue.rows(begin, end)
            is_rest = begin >= queue.on_time and rows < before_rows and queue.model.max_delay_us is None
            if is_rest and gangs >= queue.model.cores:
                break
            if rows == 1:  # as it came: most of those that are in a hurry
                selection.queries.append(queue.queries[begin])
                gangs += 1
            else:
                queries, deadline_us = queue.queries[begin:end], queue.deadline_us(begin, end)
                gangs += self._add_batch(queries, deadline_us, queue.model, error, selection)
            before_rows = rows
        selection.wake_us = earlier(selection.wake_us, wait_until_us)

    def _add_batch(
        self,
        queries: Sequence[Query],
        deadline_us: float | None,
        model: BatchModel,
        error: float,
        selection: _Selection,
    ) -> int:
        """Show a batch as one query for each gang that can begin; return how many gangs there are.

        Requests that are a part each remain what they are.
        """
        parts = model.parts(sum(query.rows for query in queries), len(queries), error)
        are_parts = [query.rows for query in queries] == [part.rows for part in parts]
        if are_parts and not (model.keeps_order and len(queries) > 1):
            has_planned_cores = len(parts) > 1
            selection.has_planned_cores |= has_planned_cores
            selection.queries += _with_cores(queries, parts) if has_planned_cores else queries
            return len(parts)
        for unit in Batch(next(self._batch_numbers), queries, parts, deadline_us, self._next_id).units:
            selection.units[unit.query.query_id] = unit
            selection.queries.append(unit.query)
        return len(parts)


class ModelQueue:
    """Waiting requests of one model and kind, in the order in which batches are made of them.

    The first `on_time` of them have a deadline that they can meet, and come by deadline; the others come by arrival. A
    batch is filled up with late requests where this costs little, but makes no request late. If the model keeps the
    order of arrival, none is sorted out as on time. Of a long queue `queries` has those that come first; `rows` are of
    all. `prediction_error`: of the model's blocks lately.
    """

    def __init__(
        self,
        queries: Sequence[Query],
        on_time: int,
        rows: int,
        model: BatchModel,
        now_us: float,
        way_back_us: float,
        prediction_error: float,
    ) -> None:
        self.queries = queries
        self.on_time = on_time
        self.model = model
        self._rows_before = list(accumulate([query.rows for query in queries], initial=0))  # rows before a query
        self._rows = rows
        self._now_us = now_us
        self._done_us = now_us + way_back_us
        self._margin = max(DEFAULT.prediction.min_margin_factor, prediction_error)

    def batches(self, most: int, most_late: int, may_wait: bool) -> tuple[list[tuple[int, int]], float | None]:
        """Return the next batches as (begin, end) in `queries`, and until when the others wait for more, if they do.

        There are at most so many, and `most_late` from the first one that begins with a late request, but always one of
        late requests. `may_wait`: all of them may wait for the next request.
        """
        found: list[tuple[int, int]] = []
        begin, end = 0, len(self.queries)
        while begin < end and len(found) < (most if begin < self.on_time else min(most, most_late)):
            rows, last = self._next_batch(begin)
            if not rows:
                wait_until_us = self._end_of_delay_us(begin)
                if wait_until_us > self._now_us:
                    return found, wait_until_us
                rows = self.model.max_rows
            found.append((begin, self._end_of_batch(begin, rows, last)))
            begin = found[-1][1]
        if may_wait and found == [(0, end)]:
            wait_until_us = self._next_arrival_us()
            if wait_until_us > self._now_us:
                return [], wait_until_us
        begin = max(begin, self.on_time)
        if begin < end and most_late and found[-1][0] < self.on_time:
            rows = self.model.next_rows(self._rows - self._rows_before[begin])
            found.append((begin, self._end_of_batch(begin, rows, end)))
        return found, None

    def rows(self, begin: int, end: int) -> int:
        """Return how many rows these requests have."""
        return self._rows_before[end] - self._rows_before[begin]

    def deadline_us(self, begin: int, end: int) -> float | None:
        """Return the earliest deadline of these requests that can be met; the earliest of all if none can."""
        known = [
            (self.model.time_left_us(query, self._done_us) is None, query.deadline_us)
            for query in self.queries[begin:end]
            if query.deadline_us is not None
        ]
        return min(known)[1] if known else None

    def _next_batch(self, begin: int) -> tuple[int, int]:
        """Return how many rows a batch should have that begins here, and where it has to end.

        Late requests fill up a batch of others only if that takes little time: others come for whom it would be too
        much, and in an overload there is always a late request.
        """
        rows = self.model.next_rows(self._rows - self._rows_before[begin])
        on_time_rows = self._rows_before[self.on_time] - self._rows_before[begin]
        if on_time_rows <= 0 or rows <= on_time_rows or self.model.may_fill_up(on_time_rows, rows):
            return rows, len(self.queries)
        return self.model.next_rows(on_time_rows), self.on_time

    def _end_of_batch(self, begin: int, rows: int, last: int) -> int:
        """Return the end of a batch that begins here: at most so many rows, of whole requests, but at least one.

        No request that would be on time alone becomes late by the batch.
        """
        with_enough_rows = bisect_right(self._rows_before, self._rows_before[begin] + rows) - 1
        last = min(last, begin + MAX_MEMBERS, with_enough_rows)
        if last <= begin + 1:
            return begin + 1
        bound_us = self._max_batch_us(begin)
        for end in range(begin + 1, last):
            bound_us = min(bound_us, self._max_batch_us(end))
            if bound_us < NEVER_LATE and self._batch_us(self.rows(begin, end + 1)) > bound_us:
                return end
        return last

    def _end_of_delay_us(self, begin: int) -> float:
        """Return when the configured delay of the oldest of the rest is over."""
        oldest_us = min(query.arrival_us for query in self.queries[begin:])
        return min(oldest_us + (self.model.max_delay_us or 0.0), self._latest_start_us(0))

    def _next_arrival_us(self) -> float:
        """Return when the next request is expected, if it pays to wait for it; else the past."""
        gap_us = self.model.gap_worth_waiting_us(self._rows)
        if gap_us is None:
            return -NEVER_LATE
        latest_us = max(query.arrival_us for query in self.queries)
        return min(latest_us + gap_us, self._latest_start_us(self.model.rate.rows))

    def _latest_start_us(self, more: int) -> float:
        """Return until when all requests can wait and be on time in one batch with so many further rows."""
        bound_us = min(self._max_batch_us(index) for index in range(len(self.queries)))
        return self._now_us + bound_us - self._batch_us(min(self._rows + more, self.model.max_rows))

    def _max_batch_us(self, index: int) -> float:
        """Return how long a request's batch may take; any time if the request is late even alone."""
        query = self.queries[index]
        if query.deadline_us is None or not self.model.min_row_us:
            return NEVER_LATE
        left_us = query.deadline_us - self._done_us
        return left_us if self._batch_us(query.rows) <= left_us else NEVER_LATE

    def _batch_us(self, rows: int) -> float:
        """Return how long a batch takes as things are."""
        return self.model.latency_us(rows) * self._margin


# Parts of `BatchFormer.form`.

_query_of: Callable[..., Query] = Query
_FIELDS = tuple(one.name for one in fields(Query))
_BEFORE_CORES = attrgetter(*_FIELDS[: _FIELDS.index("cores")])
_AFTER_CORES = attrgetter(*_FIELDS[_FIELDS.index("cores") + 1 :])


def _with_cores(queries: Sequence[Query], parts: Sequence[Part]) -> list[Query]:
    """Return the same with the cores planned for them: `dataclasses.replace`, at a third of the time."""
    return [
        _query_of(*_BEFORE_CORES(query), part.cores, *_AFTER_CORES(query))
        for query, part in zip(queries, parts, strict=True)
    ]


def _candidates(group: WaitingGroup, now_us: float, selection: _Selection) -> Sequence[Query]:
    """Return those of a kind that the policy would choose from if it saw all of them."""
    if not selection.is_long:
        return group.in_order
    most = max(DEFAULT.planning.min_queries, selection.core_count)
    on_time, others = group.split_at(now_us, most, selection.max_late(group.priority))
    return on_time + others


def _begun_candidates(queries: list[Query], now_us: float, selection: _Selection) -> list[Query]:
    """Return those to choose from: the stopped queries, and some of the units that have not started yet."""
    if not selection.is_long:
        return queries
    found: list[Query] = []
    late = 0
    for query in queries:
        if not query.started and (query.deadline_us is None or query.deadline_us <= now_us):
            late += 1
            if late > selection.max_late(query.priority):
                continue
        found.append(query)
    return found


def _of_next_rounds(queries: list[Query]) -> list[Query]:
    """Return all but the units of batches before which others of earlier rounds have to start."""
    rounds: dict[int, int] = {}
    for query in queries:
        if query.batch and not query.started:
            rounds[query.batch] = min(query.round, rounds.get(query.batch, query.round))
    if not rounds:
        return queries
    return [query for query in queries if query.started or query.round == rounds.get(query.batch, query.round)]


def _split_by_deadline(queries: Sequence[Query], model: BatchModel, done_us: float) -> tuple[list[Query], list[Query]]:
    """Return those that can be on time, by deadline, and the others, by arrival. Their numbers of rows differ."""
    on_time: list[Query] = []
    others: list[Query] = []
    for query in sorted(queries, key=BY_ARRIVAL):
        timed = query.deadline_us is not None and model.time_left_us(query, done_us) is not None
        (on_time if timed else others).append(query)
    on_time.sort(key=attrgetter("deadline_us"))
    return on_time, others


def _has_begun(model_id: int, waiting: WaitingQueries, running: Sequence[RunningBlock]) -> bool:
    """Whether anything of this model has begun."""
    begun = any(group.model_id == model_id and (group.started or group.formed) for group in waiting.groups)
    return begun or any(block.query.model_id == model_id for block in running)
