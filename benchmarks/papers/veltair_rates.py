"""Fig. 12 and 13 of VELTAIR: the highest rate of every policy in the four mixes, and latencies at that rate.

The paper's targets (Table 2) and 64 modelled cores: those that were measured, and those of the paper's premise. 95 % of
all queries in time, and 95 % of each model's. A rate is that of `simulator/rates.py`, found to 3 %: of a load that
lasts, at most the capacity bound.

A policy's search in a mix with a seed is a job. Its rows are written when it ends, and jobs whose rows are there are
left out, so a run that was killed goes on where it was. First each policy's first seed, then the second ones, which
begin where the first one ended. All cores work.
"""

import csv
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from math import floor
from pathlib import Path
from statistics import fmean

from benchmarks.papers import veltair_pictures as pictures
from benchmarks.papers.figures import Csv, FigureRequest
from gangway.simulator.contention import Contention
from gangway.simulator.rates import QUERIES, TARGET, RateEstimate, capacity_bound, search_both, window
from gangway.simulator.runs import run_steady
from gangway.simulator.scenario import Scenario, make_scenario
from gangway.workload.mix import read_mix
from gangway.workload.search import Probe

CORES = 64
SHARE = 0.95
SEEDS = 3
MIXES = ("light", "medium", "heavy", "mix")
MACHINES: Mapping[str, Contention | None] = {"measured": None, "contended": Contention()}
VELTAIRS = ("veltair_as", "veltair_ac", "veltair", "veltair:use")
BASELINE = "planaria"
DEFAULT = "gangway"
SPATIAL = (BASELINE, "fixed_block:6", "fixed_block:11", "model_fcfs", "protean", *VELTAIRS)
TEMPORAL = ("edf", "prema", "layerweaver_plus", "triton", "parties")
POLICIES = (*SPATIAL, *TEMPORAL, DEFAULT)
# Those that share time are far behind on either machine; on the contended one the best of them stands for all.
CONTENDED = (*SPATIAL, "edf", DEFAULT)
GOALS = ("all", "each")
RATES, LATENCIES = "veltair_fig12.csv", "veltair_fig13.csv"
HEADERS = {
    RATES: ("machine", "mix", "policy", "seed", *(f"{goal}_per_s" for goal in GOALS), "at_bound", "bound_per_s",
            "queries", "commit", "tried"),
    LATENCIES: ("machine", "mix", "policy", "seed", "model", "over_isolated", "in_time"),
}  # fmt: skip

Place = tuple[str, str]
"""Machine and mix."""


@dataclass(frozen=True)
class Job:
    """One search."""

    machine: str
    mix: str
    policy: str
    seed: int


@dataclass(frozen=True)
class Found:
    """What a job found. `rates_per_s`: by goal. `latencies`: by model, (over isolated, in time) at the first rate."""

    rates_per_s: tuple[float, float]
    at_bound: int  # how many of the two searches ended at the capacity bound
    bound_per_s: float
    queries: int  # that count in a run at the first rate
    tried: tuple[Probe, ...]
    latencies: Mapping[str, tuple[float, float]]


def draw(
    request: FigureRequest,
    mixes: Sequence[str] = MIXES,
    policies: Sequence[str] = POLICIES,
    machines: Sequence[str] = tuple(MACHINES),
    seeds: int = SEEDS,
) -> None:
    """Write veltair_fig12.csv, veltair_fig13.csv and two pictures. Raises OSError."""
    queries, numbers = min(request.queries, QUERIES), range(request.seed, request.seed + seeds)
    jobs = [
        Job(machine, mix, policy, seed)
        for seed in numbers
        for machine in machines
        for mix in mixes
        for policy in policies
        if machine == "measured" or policy in CONTENDED
    ]
    commit = _commit()
    with ExitStack() as stack:
        files = {name: stack.enter_context(_opened(request.output / name, header)) for name, header in HEADERS.items()}
        pool = stack.enter_context(ProcessPoolExecutor(len(os.sched_getaffinity(0))))
        for job, found in _searches(pool, jobs, request.output, queries):
            _write(job, found, commit, files)
            rates = " and ".join(f"{rate:.4g}" for rate in found.rates_per_s)
            text = f"{job.machine}, {job.mix}, {job.policy}, seed {job.seed}: {rates} of {found.bound_per_s:.4g} per s"
            request.console.print(text, highlight=False)
    pictures.plot_rates(read_rates(request.output), capacity_bounds(request.output), request.output)
    pictures.plot_latencies(read_rows(request.output, LATENCIES), request.output)


def scenario_of(machine: str, mix: str) -> Scenario:
    """Return a mix on one of the machines."""
    return make_scenario(read_mix(mix), CORES, contention=MACHINES[machine])


def find(job: Job, queries: int, start_per_s: float | None = None) -> Found:
    """Search a policy's highest rates, and run it at that with 95 % of all in time."""
    scenario = scenario_of(job.machine, job.mix)
    in_all, in_each = search_both(job.policy, scenario, SHARE, queries, job.seed, start_per_s)
    rate_per_s = in_all.rate_per_s
    summary = run_steady(job.policy, scenario, rate_per_s, queries, job.seed).summary if rate_per_s else None
    return Found(
        (rate_per_s, in_each.rate_per_s),
        in_all.limited + in_each.limited,
        capacity_bound(scenario),
        len(window(scenario, rate_per_s, queries).counted),
        tuple(dict.fromkeys((*in_all.probes, *in_each.probes))),
        {
            row.name: (row.over_isolated or 0.0, row.satisfied[TARGET] or 0.0)
            for row in (summary.models if summary else ())
        },
    )


def _searches(
    pool: ProcessPoolExecutor, jobs: Sequence[Job], folder: Path, queries: int
) -> Iterator[tuple[Job, Found]]:
    """Yield what is found by those jobs whose rows are not there. A later seed begins where an earlier one ended."""
    known = {
        Job(row["machine"], row["mix"], row["policy"], int(row["seed"])): float(row["all_per_s"])
        for row in read_rows(folder, RATES)
    }
    starts = {(job.machine, job.mix, job.policy): rate for job, rate in known.items() if rate}
    left = [job for job in jobs if job not in known]
    running: dict[Future[Found], Job] = {}
    while left or running:
        while left and len(running) < 2 * len(os.sched_getaffinity(0)):
            job = left.pop(0)
            start_per_s = starts.get((job.machine, job.mix, job.policy))
            running[pool.submit(find, job, queries, start_per_s)] = job
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job, found = running.pop(future), future.result()
            if found.rates_per_s[0]:
                starts[job.machine, job.mix, job.policy] = found.rates_per_s[0]
            yield job, found


# The files.


def read_rows(folder: Path, name: str) -> list[Mapping[str, str]]:
    """Return the rows of one of the files, the last one of a job where there are several; none without the file."""
    path = folder / name
    if not path.exists():
        return []
    keys = [key for key in HEADERS[name] if key in ("machine", "mix", "policy", "seed", "model")]
    with path.open(newline="") as file:
        return list({tuple(row[key] for key in keys): row for row in csv.DictReader(file)}.values())


def read_rates(folder: Path) -> dict[tuple[str, str, str, str], RateEstimate]:
    """Return the rates by machine, mix, policy and goal, in the order of their seeds. Raises OSError."""
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for row in sorted(read_rows(folder, RATES), key=lambda row: int(row["seed"])):
        for goal in GOALS:
            key = (row["machine"], row["mix"], row["policy"], goal)
            found.setdefault(key, []).append(float(row[f"{goal}_per_s"]))
    return {key: RateEstimate(tuple(rates)) for key, rates in found.items()}


def of_goal(
    rates: Mapping[tuple[str, str, str, str], RateEstimate], machine: str, mix: str, goal: str
) -> dict[str, RateEstimate]:
    """Return the rates of a machine, a mix and a goal by policy."""
    return {key[2]: one for key, one in rates.items() if (key[0], key[1], key[3]) == (machine, mix, goal)}


def capacity_bounds(folder: Path) -> dict[Place, float]:
    """Return the capacity bounds, queries per second, by machine and mix."""
    return {(row["machine"], row["mix"]): float(row["bound_per_s"]) for row in read_rows(folder, RATES)}


def latency_over_isolated(folder: Path, machine: str, mix: str, policy: str) -> RateEstimate | None:
    """Return the mean over the models, by seed, of the latency over the isolated one; None if nothing is there."""
    by_seed: dict[str, list[float]] = {}
    for row in read_rows(folder, LATENCIES):
        if (row["machine"], row["mix"], row["policy"]) == (machine, mix, policy):
            by_seed.setdefault(row["seed"], []).append(float(row["over_isolated"]))
    return RateEstimate(tuple(map(fmean, by_seed.values()))) if by_seed else None


def _opened(path: Path, header: Sequence[str]) -> Csv:
    return Csv(path, header, keep=path.exists())


def _commit() -> str:
    """Return the commit whose policies are searched, + behind it if files differ from it; "" outside a checkout."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def _write(job: Job, found: Found, commit: str, files: Mapping[str, Csv]) -> None:
    """Write the rates last: they say that the job is done."""
    whose = (job.machine, job.mix, job.policy, job.seed)
    for model, figures in found.latencies.items():
        files[LATENCIES].write(*whose, model, *figures)
    tried = " ".join(f"{probe.rate_per_s:.4g}:{floor(1e3 * probe.share) / 1e3:.3f}" for probe in found.tried)
    files[RATES].write(*whose, *found.rates_per_s, found.at_bound, found.bound_per_s, found.queries, commit, tried)
