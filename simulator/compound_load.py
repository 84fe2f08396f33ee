"""`gangway simulate --compound ... --beside ...`: compound tasks under load, beside requests of others with targets.

The former of the live scheduler runs them, with the schedule that a search finds and without any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gangway.base.console import Table
from gangway.scheduler.policies.registry import DEFAULT_POLICY, build_policy, make_policy
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.stages.compound_policy import SCHEDULE_BITS, CompoundPolicy, StagePlan
from gangway.simulator.loop import LoadDetails, simulate
from gangway.simulator.scenario import Scenario
from gangway.workload.arrivals import Arrivals

LOADS = (0.1, 0.2, 0.4, 0.6)  # shares of the cores' time; half of it is of compound tasks
SCHEDULE = 1


@dataclass(frozen=True)
class Way:
    """One run: the share of others in time, latencies of compound tasks in us, and the share of those by schedule."""

    in_time: float
    median_us: float
    p99_us: float
    by_schedule: float


@dataclass(frozen=True)
class LoadedRun:
    """One load, with the schedule and without."""

    load: float
    planned: Way
    today: Way


def compare_loaded(scenario: Scenario, plan: StagePlan, tasks: int, seed: int) -> list[LoadedRun]:
    """Serve so many compound tasks of the plan's models at each load; the scenario's other models are the others.

    Both kinds are Poisson processes, and each takes half of the load in time on one core.
    """
    runs = []
    for load in LOADS:
        arrivals, compounds = _trace(scenario.models, plan.model_ids, load * scenario.machine.cores, tasks, seed)
        ways = []
        for used in (plan, None):
            policy = build_policy(make_policy(DEFAULT_POLICY))
            policy.use(SCHEDULE, used)
            ways.append(_serve(policy, scenario, arrivals, compounds))
        runs.append(LoadedRun(load, *ways))
    return runs


def _trace(
    models: Mapping[int, ModelProfile], members: Sequence[int], busy_cores: float, tasks: int, seed: int
) -> tuple[Arrivals, dict[int, int]]:
    """Return arrivals and, by number, the compound task of those that are members."""
    generator = np.random.default_rng(seed)
    others = [number for number in models if number not in members]
    task_us = sum(models[number].work_us(1) for number in members)
    gap_us = task_us / (busy_cores / 2)
    times_us = np.cumsum(generator.exponential(gap_us, tasks))
    numbers = [np.repeat(times_us, len(members))]
    kinds = [np.tile(np.array(members, np.int64), tasks)]
    owners = [np.repeat(np.arange(1, tasks + 1), len(members))]
    for number in others:
        other_us = models[number].work_us(1) / (busy_cores / 2) * len(others)
        count = int(times_us[-1] / other_us)
        numbers.append(np.sort(generator.uniform(0.0, times_us[-1], count)))
        kinds.append(np.full(count, number, np.int64))
        owners.append(np.zeros(count, np.int64))
    order = np.argsort(np.concatenate(numbers), kind="stable")
    owner = np.concatenate(owners)[order]
    compounds = {place: SCHEDULE << SCHEDULE_BITS | number for place, number in enumerate(owner.tolist()) if number}
    return Arrivals(np.concatenate(numbers)[order], np.concatenate(kinds)[order]), compounds


def _serve(policy: CompoundPolicy, scenario: Scenario, arrivals: Arrivals, compounds: Mapping[int, int]) -> Way:
    models = scenario.models
    outcomes = simulate(policy, models, arrivals, scenario.machine, details=LoadDetails(compounds)).outcomes
    latest: dict[int, float] = {}
    in_time: list[bool] = []
    for place, (model, latency_us) in enumerate(zip(outcomes.models.tolist(), outcomes.latency_us, strict=True)):
        task, target_us = compounds.get(place), models[model].qos_us
        if task is not None:
            latest[task] = max(latest.get(task, 0.0), float(latency_us))
        elif target_us is not None:
            in_time.append(bool(latency_us <= target_us))
    latencies_us: npt.NDArray[np.float64] = np.array(list(latest.values()))
    median_us, p99_us = np.percentile(latencies_us, (50, 99))
    return Way(float(np.mean(in_time)), float(median_us), float(p99_us), policy.planned / len(latest))


def loaded_table(runs: Sequence[LoadedRun], title: str) -> Table:
    """Return a row for each load, in at most 80 columns."""
    result = Table(title=title)
    for name in ("load", "others in time", "today", "median ms", "today", "99 % ms", "today", "by schedule"):
        result.add_column(name, justify="right")
    for run in runs:
        pairs = zip(*((way.in_time, way.median_us, way.p99_us) for way in (run.planned, run.today)), strict=True)
        shares, medians, p99s = pairs
        cells = [f"{share:.1%}" for share in shares] + [f"{time_us / 1e3:.1f}" for time_us in (*medians, *p99s)]
        result.add_row(f"{run.load:.0%}", *cells, f"{run.planned.by_schedule:.0%}")
    return result
