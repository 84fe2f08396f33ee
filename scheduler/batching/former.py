"""Groups waiting requests into batches, and cuts batches into gangs' parts: what a policy is shown. Pure.

A grouping is not remembered: at the next decision it is made anew from what waits then; only what has begun stays as it
is. So a change of Packrat's configuration is the next dispatch, and costs nothing.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from heapq import merge
from itertools import accumulate, count, islice, takewhile
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from gangway.executor.leases import MAX_MEMBERS
from gangway.executor.slots import MAX_PARTS, NEVER_JOINED
from gangway.scheduler.arrival_rate import ArrivalRate
from gangway.scheduler.batching.planner import GANG_US, BatchSizes, Part, PlanTable, batch_sizes, plan_table
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policies.gangway_order import LEAST_PLANNED
from gangway.scheduler.policies.gangway_shares import IDLE_EFFICIENCY
from gangway.scheduler.policy import Query, RunningBlock, value
from gangway.scheduler.prediction import MARGIN, efficient_cores
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.waiting import BY_ARRIVAL, KIND, WaitingGroup, WaitingQueries

# Whether a batch waits for the next request, and how long. Pure.
#
# n rows wait, and r more are expected in w. If the n go now, the others wait until they are done, then take L(r). If
# the n wait, they lose w and what the larger batch takes longer; the others gain. It pays in sum if
#
#     n * (w + L(n + r) - L(n)) < r * (max(L(n) - w, 0) + L(r) - L(n + r))
#
# With a batch that takes no longer than a single row it pays up to w = L / 2 for one row, and never if all who are
# expected have come: then n * w is L or more.


def pays(rows: int, more: int, gap_us: float, latency_us: Callable[[int], float]) -> bool:
    """Return whether `rows` rows had better wait for `more` that are expected in `gap_us`."""
    together_us, now_us = latency_us(rows + more), latency_us(rows)
    cost_us = rows * (gap_us + together_us - now_us)
    return cost_us < more * (max(now_us - gap_us, 0.0) + latency_us(more) - together_us)


# What the former knows of one model: its settings, how often it is asked, how long its batches take. Pure.

NEVER_LATE = float("inf")
CHEAP = 0.5  # of the time that they would take alone may rows cost that fill up a batch


class BatchModel:
    """A model whose requests are joined or split. Call `see` before anything that has to do with time.

    `limited`: it has only so many instances, and each gang counts as one; so nothing is split. `dispatch_us`: what of a
    core each dispatch takes.
    """

    def __init__(self, spec: LoadModel, dispatch_us: float = 0.0) -> None:
        self.model_id = spec.model_id
        self.splits = spec.splits and spec.max_rows > 1 and not spec.indivisible and not spec.limits
        self.keeps_order = spec.preserve_ordering
        self.max_rows = spec.max_rows
        self.max_delay_us = spec.max_delay_us
        self.rate = ArrivalRate()
        self.sure_us = 0.0  # one row takes at least so long; 0: not known
        self._joins = spec.joins and spec.max_rows > 1
        self._preferred = tuple(sorted(rows for rows in spec.preferred_rows if 0 < rows <= spec.max_rows))
        self._dispatch_us = dispatch_us
        self._profile: ModelProfile | None = None
        self._timed = False
        self._load = 0.0  # the part of the machine's time that its requests take
        self.cores = 0  # that a batch may be split over
        self.latency_us: Callable[[int], float]  # how long a batch takes on all cores, as it will be split
        self._sizes: BatchSizes
        self._table: PlanTable

    @property
    def is_plain(self) -> bool:
        """Whether its requests are none of the former's business."""
        return not (self._joins or self.splits or self.keeps_order)

    def joins(self, query: Query) -> bool:
        """Whether a request may be joined with others."""
        return self._joins and query.join_key < NEVER_JOINED

    def may_hold(self, cores: int) -> bool:
        """Whether a request of one row that waits alone may have to wait on although one of so many cores is free."""
        return self.keeps_order or (self._joins and (self.max_delay_us is not None or cores == 1))

    def see(self, profile: ModelProfile, cores: int, stretch: float = 1.0, timed: bool = False) -> None:
        """Take this profile, on a machine of so many cores, for what follows. `stretch`: of its blocks lately.

        `timed`: it is about requests with a target. For them batches are not made larger to save dispatches: who waits
        for a longer batch of others may be late by it.
        """
        cores = min(cores, MAX_PARTS)
        if profile is not self._profile or cores != self.cores or timed != self._timed:
            self._profile, self.cores, self._timed = profile, cores, timed
            self._table = plan_table(profile, cores, self.max_rows)
            batch_us = GANG_US if timed else GANG_US + self._dispatch_us / cores
            most_rows = self.max_rows if self._joins else 1  # otherwise it may be any number
            self._sizes = batch_sizes(profile, cores, most_rows, self._preferred, self.splits, batch_us)
            self.latency_us = self._sizes.latency_us
            self.sure_us = self.latency_us(1) if profile.measured and not profile.varies else 0.0
        if profile.measured and self.max_delay_us is None:
            self._load = self.rate.rows_per_us * self._sizes.row_us * stretch

    def parts(self, rows: int, requests: int = 1, stretch: float = 1.0) -> Sequence[Part]:
        """Return what gangs do of a batch of so many requests.

        Of a single part cores are 0: as many as the policy likes. `stretch`: of the model's blocks lately.
        """
        whole = (Part(0, rows),)
        if not self.splits or rows == 1:
            return whole
        apart = requests == rows
        plan = self._table.apart(self.cores, rows, stretch) if apart else self._table.best(self.cores, rows)
        parts = plan.parts
        return parts if len(parts) > 1 else whole

    def time_left_us(self, query: Query, now_us: float) -> float | None:
        """Return how much time is left until it must be done; infinite if nothing is asked; None if it will be late.

        What is not measured is no reason to call a query late.
        """
        if query.deadline_us is None:
            return NEVER_LATE
        left_us = query.deadline_us - now_us
        if not self.sure_us:
            return NEVER_LATE if left_us > 0 else None
        return left_us if left_us >= self.latency_us(query.rows) else None

    def wanted_rows(self, rows: int) -> int:
        """Return how many of so many waiting rows the next batch should have; 0: what there is had better wait.

        With a configured delay as Triton does it: a preferred size at once, the largest that can be had. Without:
        whatever gives the least mean latency, as far as that is known.
        """
        assert self._profile is not None
        if self.max_delay_us is None:
            return self._sizes.next_rows(rows, self._load) if self._profile.measured else 1
        reached = [size for size in self._preferred or (self.max_rows,) if size <= rows]
        return reached[-1] if reached else 0

    def fills_up(self, rows: int, more_rows: int) -> bool:
        """Whether a batch of so many rows shall have `more_rows` in all, with rows that are not urgent.

        With a configured delay it shall, as Triton does it.
        """
        if self.max_delay_us is not None:
            return True
        extra_us = self.latency_us(more_rows) - self.latency_us(rows)
        return extra_us <= CHEAP * self.latency_us(more_rows - rows)

    def rewarding_gap_us(self, rows: int) -> float | None:
        """Return in what time the next request is expected if it pays that so many rows wait for it, else None."""
        gap_us, more = self.rate.gap_us, self.rate.rows
        assert self._profile is not None
        if self.max_delay_us is not None or gap_us is None or not self._profile.measured or rows + more > self.max_rows:
            return None
        if not pays(rows, more, gap_us, self.latency_us) or len(self.parts(rows + more)) > 1:
            return None
        takes_all = efficient_cores(self._profile, 0.0, rows, self.cores, IDLE_EFFICIENCY) == self.cores
        return gap_us if takes_all else None  # else there is a core for the next request anyway


# Waiting requests of one model and kind, and the batches that are made of them. Pure.
#
# Those that can be in time come first, by deadline; then the others, by arrival. A batch is filled up with those that
# are late already where this costs little, but nobody is made late by them.


class Line:
    """The requests in order; `hopeful` of them, the first ones, have a deadline that they can meet.

    If the model keeps the order of arrival nobody is sorted out as hopeful. Of a long queue `members` are those that
    come first; `rows` are of all. `stretch`: predictions were exceeded by this lately.
    """

    def __init__(
        self,
        members: Sequence[Query],
        hopeful: int,
        rows: int,
        model: BatchModel,
        now_us: float,
        way_back_us: float,
        stretch: float,
    ) -> None:
        self.members = members
        self.hopeful = hopeful
        self._before = list(accumulate([query.rows for query in members], initial=0))  # rows before a member
        self._rows = rows
        self.model = model
        self._now_us = now_us
        self._done_us = now_us + way_back_us
        self._margin = max(MARGIN, stretch)

    def batches(self, most: int, most_late: int, may_wait: bool) -> tuple[list[tuple[int, int]], float | None]:
        """Return the next batches as (begin, end) of members, and until when the others wait for company, if they do.

        At most so many; `most_late` if there are any among them who are late, but always one of theirs. `may_wait`:
        nobody else wants the cores.
        """
        found: list[tuple[int, int]] = []
        begin, end = 0, len(self.members)
        while begin < end and len(found) < (most if begin < self.hopeful else min(most, most_late)):
            rows, last = self._wanted(begin)
            if not rows:
                held_until_us = self._delayed_until_us(begin)
                if held_until_us > self._now_us:
                    return found, held_until_us
                rows = self.model.max_rows
            found.append((begin, self._take(begin, rows, last)))
            begin = found[-1][1]
        if may_wait and found == [(0, end)]:
            held_until_us = self._expected_us()
            if held_until_us > self._now_us:
                return [], held_until_us
        begin = max(begin, self.hopeful)
        if begin < end and most_late and found[-1][0] < self.hopeful:
            rows = self.model.wanted_rows(self._rows - self._before[begin])
            found.append((begin, self._take(begin, rows, end)))
        return found, None

    def rows(self, begin: int, end: int) -> int:
        """Return how many rows these members have."""
        return self._before[end] - self._before[begin]

    def deadline_us(self, begin: int, end: int) -> float | None:
        """Return the earliest deadline of these members that can be met; the earliest at all if none can."""
        known = [
            (self._left_us(query) is None, query.deadline_us)
            for query in self.members[begin:end]
            if query.deadline_us is not None
        ]
        return min(known)[1] if known else None

    def _wanted(self, begin: int) -> tuple[int, int]:
        """Return how many rows a batch should have that begins with this member, and where it has to end.

        Whoever is late fills up a batch of those who are not only if that takes little time: others come for whom it
        would be too much, and in an overload there is always somebody late.
        """
        rows = self.model.wanted_rows(self._rows - self._before[begin])
        hopeful_rows = self._before[self.hopeful] - self._before[begin]
        if hopeful_rows <= 0 or rows <= hopeful_rows or self.model.fills_up(hopeful_rows, rows):
            return rows, len(self.members)
        return self.model.wanted_rows(hopeful_rows), self.hopeful

    def _take(self, begin: int, wanted_rows: int, last: int) -> int:
        """Return the end of a batch that begins with this member. Whole requests only, but at least one.

        Nobody who would be in time alone becomes late by the batch.
        """
        with_enough_rows = bisect_right(self._before, self._before[begin] + wanted_rows) - 1
        last = min(last, begin + MAX_MEMBERS, with_enough_rows)
        if last <= begin + 1:
            return begin + 1
        bound_us = self._bound_us(begin)
        for end in range(begin + 1, last):
            bound_us = min(bound_us, self._bound_us(end))
            if bound_us < NEVER_LATE and self._stretched_us(self.rows(begin, end + 1)) > bound_us:
                return end
        return last

    def _delayed_until_us(self, begin: int) -> float:
        """When the configured delay of the oldest of the rest is over."""
        oldest_us = min(query.arrival_us for query in self.members[begin:])
        return min(oldest_us + (self.model.max_delay_us or 0.0), self._patience_us(0))

    def _expected_us(self) -> float:
        """When the next request is expected, if waiting for it pays; else the past."""
        gap_us = self.model.rewarding_gap_us(self._rows)
        if gap_us is None:
            return -NEVER_LATE
        latest_us = max(query.arrival_us for query in self.members)
        return min(latest_us + gap_us, self._patience_us(self.model.rate.rows))

    def _patience_us(self, more: int) -> float:
        """Until when all members can wait and be in time in one batch with so many further rows."""
        bound_us = min(self._bound_us(index) for index in range(len(self.members)))
        return self._now_us + bound_us - self._stretched_us(min(self._rows + more, self.model.max_rows))

    def _bound_us(self, index: int) -> float:
        """How long a member's batch may take; any time if the member is late even alone, as things usually go."""
        query = self.members[index]
        if query.deadline_us is None or not self.model.sure_us:
            return NEVER_LATE
        left_us = query.deadline_us - self._done_us
        return left_us if self._stretched_us(query.rows) <= left_us else NEVER_LATE

    def _left_us(self, query: Query) -> float | None:
        return self.model.time_left_us(query, self._done_us)

    def _stretched_us(self, rows: int) -> float:
        return self.model.latency_us(rows) * self._margin


# A batch as its gangs execute it: each takes a stretch of the batch's rows, at once or in its turn. Pure.


class FormedPiece(NamedTuple):
    """Rows [first_row, first_row + rows) of a request."""

    query_id: int  # the request's
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True)
class FormedUnit:
    """What one gang executes: pieces of one or several requests, in order. Units of one batch have its number.

    `rest`: makes the units of the batch's later waves. They are made when it begins: most proposals never do.
    """

    query: Query  # as the policy sees it; `cores`: of the planned gang, 0 if the batch is not split
    pieces: tuple[FormedPiece, ...]
    batch_rows: int
    batch: int
    rest: "Callable[[], Sequence[FormedUnit]]" = tuple


def units_of(
    members: Sequence[Query],
    parts: Sequence[Part],
    deadline_us: float | None,
    batch: int,
    next_id: Callable[[], int],
) -> list[FormedUnit]:
    """Lay the members' rows end to end and cut them into the parts; return the units of the first wave.

    The first unit has the number of the first member, others new ones.
    """
    first = sum(not part.wave for part in parts)
    batch_rows = sum(part.rows for part in parts)
    leader = members[0]
    arrival_us = min(query.arrival_us for query in members)

    def unit(query_id: int, part: Part, pieces: tuple[FormedPiece, ...]) -> FormedUnit:
        query = Query(
            query_id,
            leader.model_id,
            part.rows,
            arrival_us,
            _due_us(members, part, pieces, deadline_us),
            leader.priority,
            rejects_late=leader.rejects_late,
            join_key=leader.join_key,
            cores=part.cores,
            formed=True,
            batch=batch,
            wave=part.wave,
        )
        return FormedUnit(query, pieces, batch_rows, batch, rest)

    def rest() -> list[FormedUnit]:
        cut = islice(zip(parts, _cut(members, parts), strict=True), first, None)
        return [unit(next_id(), part, pieces) for part, pieces in cut]

    begin = enumerate(zip(parts[:first], _cut(members, parts), strict=False))
    return [unit(next_id() if index else leader.query_id, part, pieces) for index, (part, pieces) in begin]


def whole_batch(units: Iterable[FormedUnit], batch: int) -> list[FormedUnit]:
    """Return all units of this batch, of which those of the first wave are among the given ones."""
    first = [unit for unit in units if unit.batch == batch]
    return [*first, *first[0].rest()]


def whose_turn_it_is(queries: list[Query]) -> list[Query]:
    """Return all but the parts of batches before which others have to start."""
    waves: dict[int, int] = {}
    for query in queries:
        if query.batch and not query.started:
            waves[query.batch] = min(query.wave, waves.get(query.batch, query.wave))
    if not waves:
        return queries
    return [query for query in queries if query.started or query.wave == waves.get(query.batch, query.wave)]


def _cut(members: Sequence[Query], parts: Sequence[Part]) -> Iterator[tuple[FormedPiece, ...]]:
    """Yield the pieces of each part."""
    index = first_row = 0
    for part in parts:
        pieces = []
        left = part.rows
        while left:
            query = members[index]
            taken = min(left, query.rows - first_row)
            pieces.append(FormedPiece(query.query_id, first_row, taken))
            left -= taken
            first_row += taken
            if first_row == query.rows:
                index, first_row = index + 1, 0
        yield tuple(pieces)


def _due_us(
    members: Sequence[Query], part: Part, pieces: Sequence[FormedPiece], deadline_us: float | None
) -> float | None:
    """Return when a part must be done: with the batch, or so much sooner as the waves after it take.

    Of several requests each is answered with its last part: so in waves a part has the deadlines of its own requests,
    but those before the batch's, which are missed anyway.
    """
    if deadline_us is None or not (part.wave or part.later_us):
        return deadline_us
    if len(members) == 1:
        return deadline_us - part.later_us
    own = {piece.query_id for piece in pieces}
    asked_us = [query.deadline_us for query in members if query.query_id in own and query.deadline_us is not None]
    return min([at_us for at_us in asked_us if at_us >= deadline_us], default=None)


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
