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
from itertools import accumulate

from gangway.scheduler.model_profile import ModelProfile

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
