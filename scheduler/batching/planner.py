"""Into which parts a batch is cut: Packrat's optimiser (2024, section 3.3), and rounds of it. Pure.

A gang of t cores takes L[t, b] for b rows. Packrat's configuration is a list of gangs <i, t, b>, i of t cores with b
rows each, which run side by side. Of all lists on at most T cores, with B rows together, the best one is that whose
slowest gang ends first:

    opt[T, B] = min over t <= T, b <= B of max(opt[T - t, B - b], L[t, b])

What the paper leaves open:

- L[t, b] is measured while like gangs have the other cores (`ModelProfile.together_us`), since gangs of a batch run at
  the same time. One gang for the whole batch is alone: `ModelProfile.rows_us`.
- More cores or fewer rows never take longer. Where a measurement says so, the better one counts for cores, the worse
  one for rows.
- Of several best lists that one is taken whose second slowest gang ends first, and so on, as in the paper's Table 2.

Rounds are not in the paper. The activations of many rows leave the caches between layers, so two batches of half the
rows may take less time than the whole. A plan has k rounds of equally many rows, but for one row:

    plan[T, B] = min over k in 1, 2, 4, ... of k opt[T, B / k] + (k - 1) BATCHING.round_us
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import sqrt
from typing import NamedTuple

from gangway.executor.slots import MAX_PARTS
from gangway.scheduler.policy_config import BATCHING
from gangway.scheduler.profiles import ModelProfile

Latency = Callable[[int, int], float]  # (cores, rows) -> microseconds
GainShare = Callable[[int], float]  # rows -> share of the latency that must be gained


class Part(NamedTuple):
    """What one gang does of a batch. Parts of round 0 begin at once. `later_us`: duration of the rounds after its own.

    0 cores: as many as the policy likes.
    """

    cores: int
    rows: int
    round: int = 0
    later_us: float = 0.0


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The parts of a batch, round by round and the widest gang first, and how long each round takes (microseconds)."""

    parts: tuple[Part, ...]
    rounds_us: tuple[float, ...]

    @property
    def latency_us(self) -> float:
        """When the last part ends."""
        return sum(self.rounds_us) + (len(self.rounds_us) - 1) * BATCHING.round_us

    @property
    def rounds(self) -> list[list[tuple[int, int, int]]]:
        """Packrat's <i, t, b> of each round: number of gangs, cores and rows of each."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.rounds_us]
        for (number, cores, rows), same in groupby(self.parts, key=_kind):
            found[number].append((len(list(same)), cores, rows))
        return found

    def __str__(self) -> str:
        texts = [", ".join(f"<{count}, {cores}, {rows}>" for count, cores, rows in one) for one in self.rounds]
        counted = [(text, len(list(same))) for text, same in groupby(texts)]
        return ", then ".join(f"{count} times {text}" if count > 1 else text for text, count in counted)


def _kind(part: Part) -> tuple[int, int, int]:
    return part.round, part.cores, part.rows


def side_by_side(gangs: Sequence[tuple[int, int]], latency_us: float) -> SplitPlan:
    """Return the plan of one round: (cores, rows) of each gang, the widest first, and when the slowest one ends."""
    return SplitPlan(tuple([Part(cores, rows) for cores, rows in gangs]), (latency_us,))


def one_after_the_other(plans: Sequence[SplitPlan]) -> SplitPlan:
    """Return the plan of several rounds, each of which is a plan of one."""
    rounds_us = tuple([plan.latency_us for plan in plans])
    parts = list[Part]()
    left_us = sum(rounds_us) + (len(rounds_us) - 1) * BATCHING.round_us
    for number, (plan, round_us) in enumerate(zip(plans, rounds_us, strict=True)):
        left_us = max(left_us - round_us - BATCHING.round_us, 0.0)
        parts += [Part(part.cores, part.rows, number, left_us) for part in plan.parts]
    return SplitPlan(tuple(parts), rounds_us)


class SplitTable:
    """opt[t, b] for 1 to `cores` cores and 1 to `max_rows` rows, microseconds: plans of one round.

    `alone_us`: L of a gang that is alone. `together_us`: L of a gang while like gangs have the other cores; None: a
    batch is never split. `gang_us`: cost of each further gang. `min_gain`: of a split over one gang. The table is
    computed when it is first asked for, since one gang needs none.
    """

    def __init__(
        self,
        cores: int,
        max_rows: int,
        alone_us: Latency,
        together_us: Latency | None,
        gang_us: float = BATCHING.gang_us,
        min_gain: GainShare = lambda rows: BATCHING.min_gain_share,
    ) -> None:
        self.cores = cores
        self.max_rows = max_rows
        self._alone_us = alone_us
        self._together_us = together_us
        self._gang_us = gang_us
        self._min_gain = min_gain
        self._grids: dict[int, _Grid] = {}  # by step
        self._one_gang: dict[int, list[tuple[float, int]]] = {}  # by rows, then cores - 1: time, cores it takes
        self._plans: dict[tuple[int, int], SplitPlan] = {}
        self._single_rows: dict[tuple[int, int, int], SplitPlan] = {}

    def best(self, cores: int, rows: int) -> SplitPlan:
        """Return one gang for a batch, or several gangs if they are done enough sooner. Raises ValueError."""
        key = (cores, rows)
        found = self._plans.get(key)
        if found is None:
            one_gang_us, width = self._one(cores, rows)
            found = side_by_side([(width, rows)], one_gang_us)
            if self._together_us is not None and cores > 1 and rows > 1:
                split = self._split(cores, rows, self._together_us)
                found = split if self._gains(rows, split.latency_us, len(split.parts), one_gang_us) else found
            self._plans[key] = found
        return found

    def best_of_single_rows(self, cores: int, rows: int, prediction_error: float = 1.0) -> SplitPlan:
        """Return the plan for rows that are requests of their own: equal gangs, unless one gang gains much.

        A split cuts no request then: its gangs are smaller batches. All cores of a gang wait for the slowest one, so
        where front end and clients take cores at times, and the model's blocks last `prediction_error` times as long as
        predicted, narrow gangs lose less. MobileNetV2 with 32 clients on two cores, by the profile 8 % faster in gangs
        of two cores, carried 1.16 times the load in gangs of one, which lasted 1.4 times as long. Raises ValueError.
        """
        steps = gang_gain_steps(prediction_error)
        key = (cores, rows, steps)
        found = self._single_rows.get(key)
        if found is None:
            found = self.best(cores, rows)
            equal = self._equal_gangs(cores, rows)
            min_gain = steps / BATCHING.error_steps
            if equal and len(found.parts) == 1 and found.latency_us > (1 - min_gain) * equal.latency_us:
                found = equal
            self._single_rows[key] = found
        return found

    def latency_us(self, cores: int, rows: int) -> float:
        """Return the time of `best`, mostly without making the plan. Raises ValueError."""
        one_gang_us = self.one_gang_us(cores, rows)
        if self._together_us is None or cores == 1 or rows == 1:
            return one_gang_us
        if self._gains(rows, split_us := self._optimum_us(cores, rows, self._together_us), cores, one_gang_us):
            return split_us
        return self.best(cores, rows).latency_us if self._gains(rows, split_us, 1, one_gang_us) else one_gang_us

    def latency_of_single_rows_us(self, cores: int, rows: int) -> float:
        """Return the time of `best_of_single_rows` where predictions are right. Raises ValueError."""
        time_us = self.latency_us(cores, rows)
        equal = self._equal_gangs(cores, rows) if time_us == self.one_gang_us(cores, rows) else None
        return (
            equal.latency_us if equal and time_us > (1 - BATCHING.min_gang_gain_share) * equal.latency_us else time_us
        )

    def one_gang_us(self, cores: int, rows: int) -> float:
        """Return how long a batch takes in one gang of at most so many cores, alone. Raises ValueError."""
        return self._one(cores, rows)[0]

    def _equal_gangs(self, cores: int, rows: int) -> SplitPlan | None:
        """Return the best of equal gangs with equally many rows, what they cost included; None if there are none."""
        together_us = self._together_us
        if together_us is None:
            return None
        options = list[tuple[float, int]]()
        for count in range(2, min(cores, rows) + 1):
            if rows % count == 0:
                time_us = together_us(cores // count, rows // count) + self._gang_us * (count - 1)
                options.append((time_us, count))
        if not options:
            return None
        time_us, count = min(options)
        return side_by_side([(cores // count, rows // count)] * count, time_us)

    def _gains(self, rows: int, split_us: float, gangs: int, one_gang_us: float) -> bool:
        """Whether a split into so many gangs gains enough."""
        return split_us + self._gang_us * (gangs - 1) < (1 - self._min_gain(rows)) * one_gang_us

    def _one(self, cores: int, rows: int) -> tuple[float, int]:
        """Return the time of one gang, and how many cores it takes."""
        if not (0 < cores <= self.cores and 0 < rows <= self.max_rows):
            raise ValueError(f"{cores} cores, {rows} rows: the table has {self.cores} x {self.max_rows}")
        by_cores = self._one_gang.get(rows)
        if by_cores is None:
            times = ((self._alone_us(count, rows), count) for count in range(1, self.cores + 1))
            by_cores = self._one_gang[rows] = list(accumulate(times, min))
        return by_cores[cores - 1]

    def _optimum_us(self, cores: int, rows: int, together_us: Latency) -> float:
        step = _step(rows)
        return self._grid(step, together_us).best_us(cores, -(-rows // step))

    def _split(self, cores: int, rows: int, together_us: Latency) -> SplitPlan:
        step = _step(rows)
        grid = self._grid(step, together_us)
        gangs = [(width, steps * step) for width, steps in grid.gangs(cores, -(-rows // step))]
        width, most = gangs[0]
        gangs[0] = (width, most - (sum(taken for _, taken in gangs) - rows))  # the last step may not be a whole one
        return side_by_side(sorted(gangs, reverse=True), grid.best_us(cores, -(-rows // step)))

    def _grid(self, step: int, together_us: Latency) -> "_Grid":
        grid = self._grids.get(step)
        if grid is None:
            steps = min(BATCHING.max_steps, -(-self.max_rows // step))
            grid = self._grids[step] = _Grid(_monotonic(together_us, self.cores, steps, step))
        return grid


class _Grid:
    """opt by cores and steps of rows, from L likewise.

    The recursion as it stands takes T^2 B^2 operations. Here opt[t] is a list by rows, which ascends. If t cores are
    divided into s and t - s, either part does as many rows within a time as its list has entries up to it. So both
    together have done b rows at the b-th smallest entry of both lists, and one merge stands for all b: T = 64, B = 1024
    takes tens of milliseconds.
    """

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


def _step(rows: int) -> int:
    return 1 << ((rows - 1) // BATCHING.max_steps).bit_length()


def _monotonic(latency_us: Latency, cores: int, steps: int, step: int) -> list[list[float]]:
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


class PlanTable:
    """plan[t, b] for 1 to `cores` cores and 1 to `max_rows` rows of a table of splits, whose rounds it adds.

    The number of rounds is a power of two: times per row change slowly with the rows, and so it is a handful of steps
    for each b. Rounds are planned with a barrier between them and executed without one: the first gang that is done
    takes the next part. `known_rows`: the times of batches of up to so many rows are well known; 0: one round only.

    More rounds must gain over fewer what both times may err: the root of the mean of the squares of `min_gain`. A time
    of more than `known_rows` rows may be anything, so it counts as no longer than its share of `known_rows`: a slow
    outlier does not cut a batch.
    """

    def __init__(self, splits: SplitTable, min_gain: GainShare, known_rows: int) -> None:
        self._splits = splits
        self._min_gain = min_gain
        self._known_rows = known_rows
        self._round_counts: dict[tuple[int, int], int] = {}
        self._plans: dict[tuple[int, int], SplitPlan] = {}
        self._single_rows: dict[tuple[int, int, int], SplitPlan] = {}

    @property
    def cores(self) -> int:
        """The most cores of a plan."""
        return self._splits.cores

    def best(self, cores: int, rows: int) -> SplitPlan:
        """Return how a batch is done soonest. Raises ValueError."""
        key = (cores, rows)
        found = self._plans.get(key)
        if found is None:
            rounds = [self._splits.best(cores, some) for some in self._sizes(cores, rows)]
            found = self._plans[key] = one_after_the_other(rounds)
        return found

    def best_of_single_rows(self, cores: int, rows: int, prediction_error: float = 1.0) -> SplitPlan:
        """Return the plan for rows that are requests of their own, as `SplitTable` does. Raises ValueError."""
        key = (cores, rows, gang_gain_steps(prediction_error))
        found = self._single_rows.get(key)
        if found is None:
            sizes = self._sizes(cores, rows)
            rounds = [self._splits.best_of_single_rows(cores, some, prediction_error) for some in sizes]
            found = self._single_rows[key] = one_after_the_other(rounds)
        return found

    def latency_us(self, cores: int, rows: int) -> float:
        """Return the time of `best`. Raises ValueError."""
        return self._in_rounds_us(cores, rows, self._round_count(cores, rows), self._splits.latency_us)

    def latency_of_single_rows_us(self, cores: int, rows: int) -> float:
        """Return the time of `best_of_single_rows` where predictions are right. Raises ValueError."""
        return self._in_rounds_us(cores, rows, self._round_count(cores, rows), self._splits.latency_of_single_rows_us)

    def one_gang_us(self, cores: int, rows: int) -> float:
        """Return how long a batch takes in one gang of at most so many cores, alone. Raises ValueError."""
        return self._splits.one_gang_us(cores, rows)

    def _sizes(self, cores: int, rows: int) -> Sequence[int]:
        """Return the rows of each round, descending."""
        count = self._round_count(cores, rows)
        least, more = divmod(rows, count)
        return [least + 1] * more + [least] * (count - more)

    def _round_count(self, cores: int, rows: int) -> int:
        key = (cores, rows)
        found = self._round_counts.get(key)
        if found is None:
            found = self._round_counts[key] = self._fewest_rounds(cores, rows)
        return found

    def _fewest_rounds(self, cores: int, rows: int) -> int:
        """Return the least number of rounds over which no larger one gains enough."""
        found, found_us, found_rows = 1, self._splits.latency_us(cores, rows), rows
        if 0 < self._known_rows < rows:
            found_rows = self._known_rows
            found_us = min(found_us, self._splits.one_gang_us(cores, found_rows) * rows / found_rows)
        count = 2
        while count <= rows and self._known_rows:
            largest = -(-rows // count)
            if largest <= self._known_rows and count * self._max_gangs(cores, largest) <= MAX_PARTS:
                time_us = self._in_rounds_us(cores, rows, count, self._splits.latency_us)
                if time_us < (1 - self._gain_between(largest, found_rows)) * found_us:
                    found, found_us, found_rows = count, time_us, largest
            count *= 2
        return found

    def _gain_between(self, rows: int, other_rows: int) -> float:
        """Return by what share the times of two sizes must differ."""
        return sqrt((self._min_gain(rows) ** 2 + self._min_gain(other_rows) ** 2) / 2)

    @staticmethod
    def _in_rounds_us(cores: int, rows: int, count: int, round_us: Latency) -> float:
        least, more = divmod(rows, count)
        time_us = (count - more) * round_us(cores, least) + (count - 1) * BATCHING.round_us
        return time_us + more * round_us(cores, least + 1) if more else time_us

    def _max_gangs(self, cores: int, rows: int) -> int:
        """Return how many gangs a round may have."""
        return 1 if self._splits.latency_us(cores, rows) == self._splits.one_gang_us(cores, rows) else min(cores, rows)


def split_table(profile: ModelProfile, cores: int, max_rows: int) -> SplitTable:
    """Return the plans of one round of a model on so many cores, made once for a profile.

    What is not measured is not split: its times are guesses, and say that rows are independent.
    """
    key = (split_table, cores, max_rows)
    known: SplitTable | None = profile.derived.get(key)
    if known is None:
        splits = profile.measured and not profile.indivisible
        together_us = profile.together_us if splits else None
        known = profile.derived[key] = SplitTable(
            cores, max_rows, profile.rows_us, together_us, min_gain=lambda rows: min_gain_share(profile, rows)
        )
    return known


def plan_table(profile: ModelProfile, cores: int, max_rows: int) -> PlanTable:
    """Return the plans of a model on so many cores, made once for a profile."""
    key = (plan_table, cores, max_rows)
    known: PlanTable | None = profile.derived.get(key)
    if known is None:
        splits = split_table(profile, cores, max_rows)
        known = PlanTable(splits, lambda rows: min_gain_share(profile, rows), known_rows(profile))
        profile.derived[key] = known
    return known


def known_rows(profile: ModelProfile) -> int:
    """Return the most rows whose time is well known; 0 if nothing is measured, or a batch is one task."""
    if not profile.measured or profile.indivisible:
        return 0
    doubts = profile.doubt or (0.0,) * len(profile.batches)
    return max(
        (rows for rows, doubt in zip(profile.batches, doubts, strict=True) if doubt < BATCHING.unknown_doubt), default=0
    )


def min_gain_share(profile: ModelProfile, rows: int) -> float:
    """Return the share of its time that a batch must gain, split or joined: more than the profile's times may err."""
    return max(BATCHING.min_gain_share, profile.doubt_of(rows))


def gang_gain_steps(prediction_error: float) -> int:
    """Return what one gang must gain over several for rows that are requests of their own, in steps of a twentieth."""
    return round(
        BATCHING.error_steps * max(BATCHING.min_gang_gain_share, BATCHING.gang_loss_share * (prediction_error - 1.0))
    )
