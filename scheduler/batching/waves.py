"""Waves: a batch in parts of fewer rows, which run one after the other on the same cores. Pure.

Packrat's instances run at the same time, so a part has as many rows as the batch has for each gang. But the activations
of many rows leave the caches between layers: then two batches of half the rows take less time than the whole one. So
what the paper calls opt is extended by one term: an instance may run several parts in turn. A batch is done in k waves,
each a batch of its own for the optimiser (`split.py`), with equally many rows but for one:

    plan[T, B] = min over k of (k opt[T, B / k] + (k - 1) WAVE_US)

k is 1, 2, 4, ...: times per row change slowly with the rows, and this way it is a handful of steps for each B. Waves
are planned with a barrier between them, but executed without one: the first gang that is done takes the next part.

What must a wave gain? k times a small part is as well known as that part is, and small parts are run often when a model
is measured; so two ways to cut must differ by more than both may err, the root of the mean of the squares of what is
asked for either (`least_gain` is for two times that are known equally well). A time of so many rows that fewer than
three runs stand behind it may be anything: it counts as no longer than its share of the largest batch that is well
known. So only what is seen among well-known sizes is gained, and a slow outlier does not cut a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import sqrt
from typing import NamedTuple

from gangway.executor.slots import MAX_PARTS
from gangway.scheduler.batching.split import Gain, Latency, Split, SplitTable, least_gain, split_table, wide_steps
from gangway.scheduler.model_profile import ModelProfile

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
