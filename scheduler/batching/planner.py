"""Packrat's optimiser (2024, section 3.3): the gangs <i, t, b> that have a batch done soonest. Pure.

A gang of t cores takes L[t, b] for b rows. Of all lists of gangs on at most T cores, with B rows together, the one is
wanted whose slowest gang ends first:

    opt[t, b] = min over t' <= t, b' <= b of max(opt[t - t', b - b'], L[t', b'])

As it stands that is T^2 B^2 steps. Here opt[t] is a list by rows, which ascends. If t cores are divided into s and
t - s, either part does as many rows within a time as its list has entries up to it; both together have done b rows at
the b-th smallest entry of both lists. So one merge stands for all b', and T = 64, B = 1024 takes tens of milliseconds.

What the paper leaves open, as it is read here:

- L[t, b] is measured while like gangs have the other cores (`ModelProfile.together_us`), not alone, since gangs of a
  batch run at the same time. One gang for the whole batch is alone: `ModelProfile.rows_us`.
- More cores or fewer rows never take longer: where a measurement says so, the better one counts for cores, the worse
  one for rows.
- Of several best lists the one is taken whose second slowest gang ends first, and so on, as in the paper's Table 2.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby
from math import ceil, sqrt
from typing import NamedTuple

from gangway.executor.slots import MAX_PARTS
from gangway.scheduler.profiles import ModelProfile

LEAST_GAIN = 0.02  # a split or a larger batch that gains less is not worth it, however well it was measured
WIDE_GAIN = 0.05  # what one gang must gain at least over several, where nothing is cut by having several
WIDE_LOSS = 0.5  # what one gang loses in addition, as a part of what others take from a narrow one
WIDE_STEPS = 20  # it is rounded to twentieths
GANG_US = 50.0  # what each further gang costs: a lease to write, to send and to hear of
MOST_STEPS = 128  # more rows are counted in steps of 2, 4, ...: still finer than anything that is measured

Latency = Callable[[int, int], float]  # (cores, rows) -> microseconds
Gain = Callable[[int], float]  # rows -> share of the latency that must be gained


@dataclass(frozen=True, slots=True)
class Instances:
    """Packrat's <i, t, b>: `count` gangs of `cores` cores with `rows` rows each."""

    count: int
    cores: int
    rows: int

    def __str__(self) -> str:
        return f"<{self.count}, {self.cores}, {self.rows}>"


@dataclass(frozen=True, slots=True)
class Split:
    """Gangs for one batch, widest first, and when the slowest of them ends, in microseconds."""

    instances: tuple[Instances, ...]
    latency_us: float

    @property
    def gangs(self) -> list[tuple[int, int]]:
        """(cores, rows) of each gang, widest first."""
        return [(kind.cores, kind.rows) for kind in self.instances for _ in range(kind.count)]

    def __str__(self) -> str:
        return ", ".join(map(str, self.instances))


class SplitTable:
    """opt[t, b] for 1 to `cores` cores and 1 to `max_rows` rows, microseconds.

    `alone_us`: L of a gang that is alone. `together_us`: of one while like gangs have the other cores; None: a batch is
    never split. `least_gain`: of a split. Computed when it is first asked for: one gang needs no table.
    """

    def __init__(
        self,
        cores: int,
        max_rows: int,
        alone_us: Latency,
        together_us: Latency | None,
        gang_us: float = GANG_US,
        least_gain: Gain = lambda rows: LEAST_GAIN,
    ) -> None:
        self.cores = cores
        self.max_rows = max_rows
        self._alone_us = alone_us
        self._together_us = together_us
        self._gang_us = gang_us
        self._least_gain = least_gain
        self._grids: dict[int, _Grid] = {}  # by step
        self._fat: dict[int, list[tuple[float, int]]] = {}  # by rows, then cores - 1: time, and cores that it takes
        self._splits: dict[tuple[int, int], Split] = {}
        self._apart: dict[tuple[int, int, int], Split] = {}

    def best(self, cores: int, rows: int) -> Split:
        """Return the gangs for a batch: one alone, or several if they are done enough sooner. Raises ValueError."""
        key = (cores, rows)
        found = self._splits.get(key)
        if found is None:
            fat_us, fat_cores = self._alone(cores, rows)
            found = Split((Instances(1, fat_cores, rows),), fat_us)
            if self._together_us is not None and cores > 1 and rows > 1:
                split = self._split(cores, rows, self._together_us)
                found = split if self._gains(rows, split.latency_us, len(split.gangs), fat_us) else found
            self._splits[key] = found
        return found

    def apart(self, cores: int, rows: int, stretch: float = 1.0) -> Split:
        """Return the gangs for rows that are requests of their own: like gangs side by side, unless one gains much.

        A split cuts nothing then: it is several smaller batches. Where front end and clients take the cores at times,
        and so the model's blocks last `stretch` times as long as predicted, narrow gangs lose less, since all of a gang
        wait for the slowest. MobileNetV2 with 32 clients on two cores, by the profile 8 % faster in gangs of two cores,
        carried 1.16 times the load in gangs of one, which were stretched to 1.4. Raises ValueError.
        """
        gain_steps = wide_steps(stretch)
        key = (cores, rows, gain_steps)
        found = self._apart.get(key)
        if found is None:
            found = self.best(cores, rows)
            beside = self._beside(cores, rows)
            least_gain = gain_steps / WIDE_STEPS
            if beside and len(found.gangs) == 1 and found.latency_us > (1 - least_gain) * beside.latency_us:
                found = beside
            self._apart[key] = found
        return found

    def apart_us(self, cores: int, rows: int) -> float:
        """Return the time of `apart` where nothing is stretched, without making the split. Raises ValueError."""
        time_us = self.latency_us(cores, rows)
        beside = self._beside(cores, rows) if time_us == self.fat_us(cores, rows) else None
        return beside.latency_us if beside and time_us > (1 - WIDE_GAIN) * beside.latency_us else time_us

    def latency_us(self, cores: int, rows: int) -> float:
        """Return how long a batch takes in the gangs that are best for it. Raises ValueError."""
        fat_us = self.fat_us(cores, rows)
        if self._together_us is None or cores == 1 or rows == 1:
            return fat_us
        if self._gains(rows, split_us := self._optimum_us(cores, rows, self._together_us), cores, fat_us):
            return split_us
        return self.best(cores, rows).latency_us if self._gains(rows, split_us, 1, fat_us) else fat_us

    def fat_us(self, cores: int, rows: int) -> float:
        """Return how long it takes in one gang of at most so many cores, alone. Raises ValueError."""
        return self._alone(cores, rows)[0]

    def _beside(self, cores: int, rows: int) -> Split | None:
        """Return the best of equal gangs with equally many rows, what they cost included; None if there are none."""
        if self._together_us is None:
            return None
        counts = [count for count in range(2, min(cores, rows) + 1) if rows % count == 0]
        kinds = [Instances(count, cores // count, rows // count) for count in counts]
        return min((self._equal(kind, self._together_us) for kind in kinds), key=_latency_us, default=None)

    def _equal(self, kind: Instances, together_us: Latency) -> Split:
        return Split((kind,), together_us(kind.cores, kind.rows) + self._gang_us * (kind.count - 1))

    def _gains(self, rows: int, split_us: float, gangs: int, fat_us: float) -> bool:
        """Whether a split into so many gangs gains enough."""
        return split_us + self._gang_us * (gangs - 1) < (1 - self._least_gain(rows)) * fat_us

    def _alone(self, cores: int, rows: int) -> tuple[float, int]:
        if not (0 < cores <= self.cores and 0 < rows <= self.max_rows):
            raise ValueError(f"{cores} cores, {rows} rows: the table has {self.cores} x {self.max_rows}")
        by_cores = self._fat.get(rows)
        if by_cores is None:
            times = ((self._alone_us(count, rows), count) for count in range(1, self.cores + 1))
            by_cores = self._fat[rows] = list(accumulate(times, min))
        return by_cores[cores - 1]

    def _optimum_us(self, cores: int, rows: int, together_us: Latency) -> float:
        step = _step(rows)
        return self._grid(step, together_us).best_us(cores, -(-rows // step))

    def _split(self, cores: int, rows: int, together_us: Latency) -> Split:
        step = _step(rows)
        grid = self._grid(step, together_us)
        gangs = [(width, steps * step) for width, steps in grid.gangs(cores, -(-rows // step))]
        width, most = gangs[0]
        gangs[0] = (width, most - (sum(taken for _, taken in gangs) - rows))  # the last step may not be a whole one
        kinds = sorted(Counter(gangs).items(), reverse=True)
        return Split(tuple(Instances(count, *kind) for kind, count in kinds), grid.best_us(cores, -(-rows // step)))

    def _grid(self, step: int, together_us: Latency) -> "_Grid":
        grid = self._grids.get(step)
        if grid is None:
            steps = min(MOST_STEPS, -(-self.max_rows // step))
            grid = self._grids[step] = _Grid(_ascending(together_us, self.cores, steps, step))
        return grid


class _Grid:
    """opt by cores and steps of rows, from L likewise."""

    def __init__(self, singles: list[list[float]]) -> None:
        self._singles = singles
        self._best = _optimum(singles)

    def best_us(self, cores: int, steps: int) -> float:
        """Return opt; infinite for rows on no core."""
        if not steps:
            return 0.0
        return self._best[cores - 1][steps - 1] if cores else float("inf")

    def gangs(self, cores: int, steps: int) -> list[tuple[int, int]]:
        """Return (cores, steps) of gangs that reach opt, the slowest first: so that the rest is done soonest."""
        found = []
        while steps:
            width, taken = self._slowest(cores, steps)
            found.append((width, taken))
            cores, steps = cores - width, steps - taken
        return found

    def _slowest(self, cores: int, steps: int) -> tuple[int, int]:
        bound_us = self.best_us(cores, steps)
        options = []
        for width in range(1, cores + 1):
            taken = min(bisect_right(self._singles[width - 1], bound_us), steps)
            rest_us = self.best_us(cores - width, steps - taken)
            if taken and rest_us <= bound_us:
                options.append((rest_us, -taken, width))
        _, taken, width = min(options)
        return width, -taken


def split_table(profile: ModelProfile, cores: int, max_rows: int) -> SplitTable:
    """Return the table of a model on so many cores, made once for a profile.

    What is not measured is not split: its times are guesses, and say that rows are independent.
    """
    key = (split_table, cores, max_rows)
    known: SplitTable | None = profile.derived.get(key)
    if known is None:
        splits = profile.measured and not profile.indivisible
        together_us = profile.together_us if splits else None
        known = profile.derived[key] = SplitTable(
            cores, max_rows, profile.rows_us, together_us, least_gain=lambda rows: least_gain(profile, rows)
        )
    return known


def least_gain(profile: ModelProfile, rows: int) -> float:
    """Return the share of its time that a batch must gain, split or joined: more than the profile's times may err."""
    return max(LEAST_GAIN, profile.doubt_of(rows))


def wide_steps(stretch: float) -> int:
    """Return what one gang must gain over several where nothing is cut, as a multiple of 1 / WIDE_STEPS."""
    return round(WIDE_STEPS * max(WIDE_GAIN, WIDE_LOSS * (stretch - 1.0)))


def _latency_us(split: Split) -> float:
    return split.latency_us


def _step(rows: int) -> int:
    return 1 << ((rows - 1) // MOST_STEPS).bit_length()


def _ascending(latency_us: Latency, cores: int, steps: int, step: int) -> list[list[float]]:
    """Return L by cores and steps of rows: it never falls with rows, and never rises with cores."""
    table: list[list[float]] = []
    sizes = range(step, step * steps + 1, step)
    for count in range(1, cores + 1):
        times = list(accumulate([latency_us(count, rows) for rows in sizes], max))
        table.append(list(map(min, times, table[-1])) if table else times)
    return table


def _optimum(singles: Sequence[list[float]]) -> list[list[float]]:
    """Return opt by cores and steps of rows, from L."""
    best = [singles[0]]
    steps = len(singles[0])
    never = [float("inf")] * steps
    for cores in range(2, len(singles) + 1):
        alone = singles[cores - 1]
        bound_us = alone[-1]
        candidates = [alone]
        for part in range(cores // 2, 0, -1):
            left, right = best[part - 1], best[cores - part - 1]
            both = left[: bisect_right(left, bound_us)] + right[: bisect_right(right, bound_us)]
            both.sort()  # two runs: one merge
            if len(both) < steps:  # what is not within the bound
                both += never[len(both) :]
            else:
                bound_us = both[steps - 1]
            candidates.append(both)
        best.append(list(map(min, *candidates)))  # as long as the shortest
    return best


# Waves: a batch in parts of fewer rows, which run one after the other on the same cores. Pure.
#
# Packrat's instances run at the same time, so a part has as many rows as the batch has for each gang. But the
# activations of many rows leave the caches between layers: then two batches of half the rows take less time than the
# whole one. So what the paper calls opt is extended by one term: an instance may run several parts in turn. A batch is
# done in k waves, each a batch of its own for the optimiser (`split.py`), with equally many rows but for one:
#
#     plan[T, B] = min over k of (k opt[T, B / k] + (k - 1) WAVE_US)
#
# k is 1, 2, 4, ...: times per row change slowly with the rows, and this way it is a handful of steps for each B. Waves
# are planned with a barrier between them, but executed without one: the first gang that is done takes the next part.
#
# What must a wave gain? k times a small part is as well known as that part is, and small parts are run often when a
# model is measured; so two ways to cut must differ by more than both may err, the root of the mean of the squares of
# what is asked for either (`least_gain` is for two times that are known equally well). A time of so many rows that
# fewer than three runs stand behind it may be anything: it counts as no longer than its share of the largest batch
# that is well known. So only what is seen among well-known sizes is gained, and a slow outlier does not cut a batch.

WAVE_US = 250.0  # from the end of a part until the next one begins on its cores: the scheduler has a turn meanwhile
UNKNOWN = 1.0  # what a time's doubt is if too few runs stand behind it


class Part(NamedTuple):
    """What one gang does of a batch. Those of wave 0 begin at once. `later_us`: what the waves after its own take."""

    cores: int
    rows: int
    wave: int = 0
    later_us: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The splits of a batch that run one after the other."""

    waves: tuple[Split, ...]

    @cached_property
    def latency_us(self) -> float:
        """When the last part ends."""
        return sum(split.latency_us for split in self.waves) + (len(self.waves) - 1) * WAVE_US

    @cached_property
    def parts(self) -> Sequence[Part]:
        """What each gang does, wave by wave."""
        found, left_us = list[Part](), self.latency_us
        for wave, split in enumerate(self.waves):
            left_us = max(left_us - split.latency_us - WAVE_US, 0.0)
            found += [Part(cores, rows, wave, left_us) for cores, rows in split.gangs]
        return found

    def __str__(self) -> str:
        counted = [(text, len(list(same))) for text, same in groupby(map(str, self.waves))]
        return ", then ".join(f"{count} times {text}" if count > 1 else text for text, count in counted)


class PlanTable:
    """plan[t, b] for 1 to `cores` cores and 1 to `max_rows` rows of a table of splits.

    `known_rows`: the times of batches of up to so many rows are well known; 0: there are no waves.
    """

    def __init__(self, splits: SplitTable, least_gain: Gain, known_rows: int) -> None:
        self._splits = splits
        self._least_gain = least_gain
        self._known_rows = known_rows
        self._waves: dict[tuple[int, int], int] = {}
        self._plans: dict[tuple[int, int], Plan] = {}
        self._apart: dict[tuple[int, int, int], Plan] = {}

    @property
    def cores(self) -> int:
        """The most cores that it knows of."""
        return self._splits.cores

    def best(self, cores: int, rows: int) -> Plan:
        """Return how a batch is done soonest. Raises ValueError."""
        key = (cores, rows)
        found = self._plans.get(key)
        if found is None:
            waves = [self._splits.best(cores, some) for some in self._sizes(cores, rows)]
            found = self._plans[key] = Plan(tuple(waves))
        return found

    def apart(self, cores: int, rows: int, stretch: float = 1.0) -> Plan:
        """Return it for rows that are requests of their own: see `SplitTable.apart`. Raises ValueError."""
        key = (cores, rows, wide_steps(stretch))
        found = self._apart.get(key)
        if found is None:
            waves = [self._splits.apart(cores, some, stretch) for some in self._sizes(cores, rows)]
            found = self._apart[key] = Plan(tuple(waves))
        return found

    def latency_us(self, cores: int, rows: int) -> float:
        """Return how long a batch takes as it is best done. Raises ValueError."""
        return self._in_waves_us(cores, rows, self._count(cores, rows), self._splits.latency_us)

    def apart_us(self, cores: int, rows: int) -> float:
        """Return how long rows take that are requests of their own. Raises ValueError."""
        return self._in_waves_us(cores, rows, self._count(cores, rows), self._splits.apart_us)

    def fat_us(self, cores: int, rows: int) -> float:
        """Return how long it takes in one gang of at most so many cores, alone. Raises ValueError."""
        return self._splits.fat_us(cores, rows)

    def _sizes(self, cores: int, rows: int) -> Sequence[int]:
        """Return the rows of each wave, descending."""
        count = self._count(cores, rows)
        least, more = divmod(rows, count)
        return [least + 1] * more + [least] * (count - more)

    def _count(self, cores: int, rows: int) -> int:
        """Return in how many waves a batch is done."""
        key = (cores, rows)
        found = self._waves.get(key)
        if found is None:
            found = self._waves[key] = self._fewest_waves(cores, rows)
        return found

    def _fewest_waves(self, cores: int, rows: int) -> int:
        """More waves are taken only if they gain enough over fewer."""
        found, found_us, found_rows = 1, self._splits.latency_us(cores, rows), rows
        if 0 < self._known_rows < rows:
            found_rows = self._known_rows
            found_us = min(found_us, self._splits.fat_us(cores, found_rows) * rows / found_rows)
        count = 2
        while count <= rows and self._known_rows:
            largest = -(-rows // count)
            if largest <= self._known_rows and count * self._most_gangs(cores, largest) <= MAX_PARTS:
                time_us = self._in_waves_us(cores, rows, count, self._splits.latency_us)
                if time_us < (1 - self._gain_between(largest, found_rows)) * found_us:
                    found, found_us, found_rows = count, time_us, largest
            count *= 2
        return found

    def _gain_between(self, rows: int, other_rows: int) -> float:
        """Return by what share the times of two sizes must differ."""
        return sqrt((self._least_gain(rows) ** 2 + self._least_gain(other_rows) ** 2) / 2)

    @staticmethod
    def _in_waves_us(cores: int, rows: int, count: int, wave_us: Latency) -> float:
        least, more = divmod(rows, count)
        time_us = (count - more) * wave_us(cores, least) + (count - 1) * WAVE_US
        return time_us + more * wave_us(cores, least + 1) if more else time_us

    def _most_gangs(self, cores: int, rows: int) -> int:
        """Return how many gangs a wave may have."""
        return 1 if self._splits.latency_us(cores, rows) == self._splits.fat_us(cores, rows) else min(cores, rows)


def plan_table(profile: ModelProfile, cores: int, max_rows: int) -> PlanTable:
    """Return the table of a model on so many cores, made once for a profile."""
    key = (plan_table, cores, max_rows)
    known: PlanTable | None = profile.derived.get(key)
    if known is None:
        splits = split_table(profile, cores, max_rows)
        known = profile.derived[key] = PlanTable(splits, lambda rows: least_gain(profile, rows), known_rows(profile))
    return known


def known_rows(profile: ModelProfile) -> int:
    """Return the most rows whose time is well known; 0 if nothing is measured, or a batch is one task."""
    if not profile.measured or profile.indivisible:
        return 0
    doubts = profile.doubt or (0.0,) * len(profile.batches)
    return max((rows for rows, doubt in zip(profile.batches, doubts, strict=True) if doubt < UNKNOWN), default=0)


# How many of n waiting rows the next batch takes. Pure.
#
# If nobody else came, batches of b1, b2, ... rows would run one after the other, and everybody waits while one runs.
# So the least sum of all rows' completion times, and with it the least mean latency, is
#
#     cost(n) = min over b of n * L(b) + cost(n - b)
#
# with L(b) the time of a batch of b rows in the gangs that are best for it. A short queue gets small batches, since a
# row that could be answered alone would wait for others. A long one gets those with the most rows a second, since
# everybody waits for everybody before. Nothing has to be tuned. If batches gain nothing, rows go one by one.
#
# But others come. They wait for the rows that are there, and the more of the machine's time they take, the more a
# batch with few rows a second costs. Under load rho, n rows are the beginning of a busy period of n / (1 - rho) (as
# many as flow in until the queue is empty): the next batch is the one that so many rows would begin with. If more rows
# than there are, then the one of those that are there that has the most rows a second.

LONGEST_QUEUE = 1024  # rows; in a longer one the next batch is the same: the one with the most rows a second
LONGEST_BUSY = 4  # batches of the most rows: so far a busy period is looked ahead
HIGHEST_LOAD = 0.95  # with more, a busy period has no end that could be planned for


class BatchSizes:
    """The best next batch for each number of waiting rows, found when it is first asked for.

    `latency_us(rows)`: L. `allowed`: numbers of rows that a batch may have, ascending; the last ones of a queue that
    are fewer than any go together. Empty: all up to `max_rows`. `batch_us`: what a batch costs beside its execution.
    """

    def __init__(
        self, latency_us: Callable[[int], float], max_rows: int, allowed: Sequence[int] = (), batch_us: float = GANG_US
    ) -> None:
        self.latency_us = latency_us
        self._batch_us = batch_us
        self._allowed = tuple(rows for rows in allowed if rows <= max_rows) or tuple(range(1, max_rows + 1))
        self._times_us: list[float] = []  # of the allowed sizes, as far as they were needed
        self._cost_us = [0.0]  # by waiting rows
        self._next = [0]

    def next_rows(self, waiting_rows: int, load: float = 0.0) -> int:
        """Return the size of the next batch; the smallest of equally good ones.

        `load`: the part of the machine's time that the rows take that come meanwhile, in batches of the best size.
        """
        rows = min(waiting_rows, LONGEST_QUEUE)
        busy_rows = ceil(rows / (1.0 - min(load, HIGHEST_LOAD)))
        found = self._first_of(max(rows, min(busy_rows, LONGEST_BUSY * self._allowed[-1], LONGEST_QUEUE)))
        return found if found <= rows else self._fastest(rows)

    @cached_property
    def row_us(self) -> float:
        """The least time of a row, in the batches with the most rows a second."""
        return min((self.latency_us(size) + self._batch_us) / size for size in self._allowed)

    def _first_of(self, rows: int) -> int:
        while len(self._next) <= rows:
            self._extend()
        return self._next[rows]

    def _fastest(self, rows: int) -> int:
        """Return the size of the batch of at most so many rows that has the most rows a second."""
        pairs = zip(self._times_us, self._allowed[: bisect_right(self._allowed, rows)], strict=False)
        return min(((time_us / size, size) for time_us, size in pairs), default=(0.0, rows))[1]

    def _extend(self) -> None:
        rows = len(self._next)
        known = bisect_right(self._allowed, rows)
        for size in self._allowed[len(self._times_us) : known]:
            self._times_us.append(self.latency_us(size) + self._batch_us)
        if known:
            pairs = zip(self._times_us, self._allowed, strict=False)
            cost_us, best = min((rows * time_us + self._cost_us[rows - size], size) for time_us, size in pairs)
        else:
            cost_us, best = rows * (self.latency_us(rows) + self._batch_us), rows
        self._cost_us.append(cost_us)
        self._next.append(best)


def batch_sizes(
    profile: ModelProfile,
    cores: int,
    max_rows: int,
    allowed: Sequence[int] = (),
    splits: bool = True,
    batch_us: float = GANG_US,
) -> BatchSizes:
    """Return the sizes for a model on so many cores, made once for a profile. `splits`: batches may be split."""
    key = (batch_sizes, cores, max_rows, tuple(allowed), splits, batch_us)
    known: BatchSizes | None = profile.derived.get(key)
    if known is None:
        table = plan_table(profile, cores, max_rows)
        measured_us = table.apart_us if splits else table.fat_us

        @cache  # asked some fifty times for a decision with a hundred waiting, of few sizes
        def latency_us(rows: int) -> float:
            """A batch that gains less than a split must gains nothing."""
            apart_us, time_us = rows * measured_us(cores, 1), measured_us(cores, rows)
            return apart_us if (1 - least_gain(profile, rows)) * apart_us < time_us < apart_us else time_us

        known = profile.derived[key] = BatchSizes(latency_us, max_rows, allowed, batch_us)
    return known
