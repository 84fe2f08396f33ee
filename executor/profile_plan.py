"""Which settings of a model are measured, how many rows, and how often: decided before and while time passes. Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from gangway.artifact.format import Manifest
from gangway.artifact.profile import LEAST_RUNS
from gangway.executor.profile_clock import powers_of_two, version_count

MAX_ROWS: Final = 64
USUAL_ROWS: Final = 8  # batches up to here are measured if one run of each setting fits into the time,
LARGE_RUNS: Final = 1 + LEAST_RUNS  # of larger ones: what is not believed is not worth the time
LARGE_PART: Final = 0.75  # of the time, into which those must fit: the rest is for many runs of small ones
MAX_ROUNDS: Final = 24


class Setting(NamedTuple):
    """One way to run the model: `gangs` at once, of so many ranks and rows each, every layer in this version."""

    rows: int
    ranks: int
    version: int = 0
    gangs: int = 1


class Plan(NamedTuple):
    """What can be measured here: on these numbers of cores, the last one of them all, and so many rows at a time."""

    manifest: Manifest
    cores: tuple[int, ...]
    room_rows: int  # of all gangs together

    def settings(self, rows: int) -> list[Setting]:
        """Return the settings for so many rows: every version alone, then the first one with gangs on all cores."""
        versions = range(version_count(self.manifest))
        alone = [Setting(rows, ranks, version) for version in versions for ranks in self.cores]
        return alone + [together for ranks in self.cores if (together := self.together(rows, ranks)) is not None]

    def together(self, rows: int, ranks: int) -> Setting | None:
        """Return the setting in which gangs of so many ranks fill the machine; None if one does, or rows lack room."""
        gangs = self.cores[-1] // ranks
        return Setting(rows, ranks, gangs=gangs) if gangs > 1 and gangs * rows <= self.room_rows else None


def core_counts(cores: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and `cores`."""
    return tuple(sorted({*powers_of_two(cores), cores}))


def batches_that_fit(row_us: float, left_us: float, max_rows: int) -> tuple[int, ...]:
    """Return the powers of two of rows for which there is time; `row_us`: one row, once in each setting."""
    batches = [1]
    for rows in powers_of_two(max_rows)[1:]:
        once_us = row_us * (2 * rows - 1)  # each size, up to this one
        if least_runs(rows) * once_us > left_us * (1.0 if rows <= USUAL_ROWS else LARGE_PART):
            break
        batches.append(rows)
    return tuple(batches)


def least_runs(rows: int) -> int:
    """Return how often a setting of so many rows is measured, however long it takes.

    The first run, in which pages fault, is not counted when there are others.
    """
    return 1 if rows <= USUAL_ROWS else LARGE_RUNS


def runs_in_round(number: int, rows: int) -> int:
    """Return how often a setting is run in a round: first once, later small batches as long as the usual ones."""
    return max(1, USUAL_ROWS // rows) if number >= least_runs(MAX_ROWS) else 1


def together_us(
    plan: Plan, batches: Sequence[int], isolated_us: Sequence[Sequence[float]], measured_us: dict[Setting, float]
) -> tuple[tuple[float, ...], ...]:
    """Return `Profile.together_us` from what was measured.

    Batches for which memory was lacking are slowed down like the largest one that was measured, on as many cores.
    """
    grid = []
    for ranks, alone_us in zip(plan.cores, isolated_us, strict=True):
        slowdown, times_us = 1.0, []
        for rows, time_us in zip(batches, alone_us, strict=True):
            setting = plan.together(rows, ranks)
            if setting is not None and time_us:
                slowdown = measured_us[setting] / time_us
            times_us.append(slowdown * time_us)
        grid.append(tuple(times_us))
    return tuple(grid)
