"""What the figures' modules wrote: rates, latencies and rows of CSV files; and their ratios, as pages say them."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.papers.veltair_latency import FILE as LATENCY_FILE
from benchmarks.papers.veltair_rates import (
    BASELINE,
    DEFAULT,
    MACHINES,
    MIXES,
    capacity_bounds,
    latency_over_isolated,
    of_goal,
    read_rates,
)
from gangway.simulator.rates import RateEstimate

NOT_RUN = "not run"  # of a mix that the files do not have
Row = Mapping[str, str]


class Results:
    """What the figures' modules wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rates = read_rates(folder)
        self.bounds = capacity_bounds(folder)

    def rows(self, name: str) -> list[Row]:
        """Return the rows of a file. Raises OSError."""
        with (self.folder / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def of(self, machine: str, mix: str, goal: str) -> Mapping[str, RateEstimate]:
        """Return the policies' rates."""
        return of_goal(self.rates, machine, mix, goal)

    def over(self, machine: str, mix: str, goal: str, policy: str, other: str) -> str:
        """Return a policy's rate over another's, with its interval."""
        found = self.of(machine, mix, goal)
        if policy not in found or other not in found:
            return NOT_RUN
        return ratio_text(found[policy], found[other])

    def range_over_best(self, machine: str) -> str:
        """Return the least and the largest ratio of the default policy's rate to the best other one's, 95 % of each."""
        ratios = []
        for mix in MIXES:
            found = dict(self.of(machine, mix, "each"))
            ours = found.pop(DEFAULT, None)
            if ours and found:
                ratios.append(ratio_of(ours, found[best(found)]).mean_per_s)
        return range_of(ratios) if ratios else NOT_RUN

    def below_the_rate(self, mix: str, policy: str, load: float, over: str) -> RateEstimate:
        """Return the mean of the models' latencies below the highest rate, by seed, over the gang or all cores."""
        found: dict[str, list[float]] = {}
        for row in self.rows(LATENCY_FILE):
            if (row["mix"], row["policy"], float(row["load"])) == (mix, policy, load):
                found.setdefault(row["seed"], []).append(float(row[over]))
        return RateEstimate(tuple(map(fmean, found.values())))

    def over_baseline(self, policy: str, mix: str) -> tuple[str, str]:
        """Return a policy's rate over the baseline's on the two machines, 95 % of all in time."""
        measured, contended = (self.over(machine, mix, "all", policy, BASELINE) for machine in MACHINES)
        return measured, contended

    def share_of_bound(self, machine: str, mix: str, goal: str) -> float | None:
        """Return the default policy's rate over the capacity bound; None if it was not run."""
        ours = self.of(machine, mix, goal).get(DEFAULT)
        return ours.mean_per_s / self.bounds[machine, mix] if ours else None

    def over_isolated(self, machine: str, policy: str) -> str:
        """Return a policy's latency over that of all cores, at its highest rate in the mix of all models."""
        found = latency_over_isolated(self.folder, machine, MIXES[-1], policy)
        return str(found) if found else NOT_RUN


def range_of(values: Sequence[float]) -> str:
    """Return the least and the largest of the values as text."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def ratio_text(one: RateEstimate, other: RateEstimate) -> str:
    """Return the ratio of two rates, with its interval if there is one."""
    return f"{ratio_of(one, other)}" if other.mean_per_s else "no rate"


def ratio_of(one: RateEstimate, other: RateEstimate) -> RateEstimate:
    """Return the ratios of the seeds that both have: each has the first ones."""
    count = min(len(one.rates_per_s), len(other.rates_per_s))
    return RateEstimate(one.rates_per_s[:count]).over(RateEstimate(other.rates_per_s[:count]))


def best(rates: Mapping[str, RateEstimate]) -> str:
    """Return the policy with the highest rate."""
    return max(rates, key=lambda policy: rates[policy].mean_per_s)
