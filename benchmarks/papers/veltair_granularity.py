"""Fig. 3 and 5a of VELTAIR: ResNet-50 alone, by the granularity of scheduling.

Share in time, mean latency and conflict rate over the rate of arrivals; the paper's 15 ms and 64 cores. "Identical
uniform arriving times" is read as times drawn uniformly, the same for every policy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.papers.figures import COLOURS, Csv, FigureRequest, new_figure, save
from benchmarks.papers.veltair_numbers import CONFLICT_RATE, LATENCY_MS
from gangway.scheduler.policies.registry import make_policy
from gangway.simulator.loop import simulate
from gangway.simulator.scenario import Scenario, make_scenario
from gangway.workload.arrivals import Arrivals
from gangway.workload.mix import Mix, MixModel
from gangway.workload.qos import Qos

CORES = 64
QOS_MS = 15.0
POLICIES = ("model_fcfs", "planaria", "fixed_block:6", "fixed_block:11", "veltair_as")
RATES = tuple(range(100, 1601, 100))


@dataclass(frozen=True)
class Point:
    """One run. `conflict_rate`: of units that started with fewer cores than they asked for."""

    in_time: float
    mean_ms: float
    conflict_rate: float
    units: float  # per query


def draw(request: FigureRequest) -> None:
    """Write veltair_fig3_5a.csv and .png. Raises OSError."""
    scenario = make_scenario(Mix("resnet50", (MixModel("resnet50", 1.0, Qos(milliseconds=QOS_MS)),)), CORES)
    points: dict[str, list[Point]] = {}
    header = ("policy", "rate_per_s", "in_time", "mean_ms", "conflict_rate", "units_per_query", "paper")
    with Csv(request.output / "veltair_fig3_5a.csv", header) as file:
        for policy in POLICIES:
            points[policy] = [run(policy, scenario, rate, request.queries, request.seed) for rate in RATES]
            for rate, one in zip(RATES, points[policy], strict=True):
                file.write(policy, rate, one.in_time, one.mean_ms, one.conflict_rate, one.units, _paper(policy, rate))
            request.console.print(f"{policy}: {_within(points[policy])}", highlight=False)
    _plot(request, points)


def run(policy: str, scenario: Scenario, rate_per_s: float, queries: int, seed: int) -> Point:
    """Simulate arrivals at a rate, uniformly distributed."""
    times_us = np.sort(np.random.Generator(np.random.PCG64(seed)).random(queries)) * (queries * 1e6 / rate_per_s)
    arrivals = Arrivals(times_us, np.zeros(queries, dtype=np.int64))
    result = simulate(make_policy(policy), scenario.models, arrivals, scenario.machine)
    latency_us, counters = result.outcomes.latency_us, result.counters
    return Point(
        float((latency_us <= QOS_MS * 1e3).mean()),
        float(latency_us.mean()) / 1e3,
        counters.conflicts / counters.blocks,
        counters.blocks / queries,
    )


def _paper(policy: str, rate: int) -> str:
    latency, conflicts = LATENCY_MS.get((policy, rate)), CONFLICT_RATE.get((policy, rate))
    return f"mean_ms {latency}; conflict_rate {conflicts}" if latency and conflicts else ""


def _within(points: Sequence[Point]) -> str:
    good = [rate for rate, one in zip(RATES, points, strict=True) if one.in_time >= 0.95]
    return f"95 % in time up to {max(good)} queries a second" if good else "95 % in time at no rate"


def _plot(request: FigureRequest, points: Mapping[str, Sequence[Point]]) -> None:
    title = f"VELTAIR's Fig. 3 and 5a: ResNet-50, {QOS_MS:g} ms, {CORES} modelled cores, uniformly drawn arrivals"
    figure, ((shares, latencies, conflicts),) = new_figure(title, columns=3, size=(13.5, 4.4))
    for policy, line in points.items():
        style = {"marker": "o", "ms": 3, "color": COLOURS[policy], "label": policy}
        shares.plot(RATES, [100 * one.in_time for one in line], **style)
        latencies.plot(RATES, [one.mean_ms for one in line], **style)
        conflicts.plot(RATES, [100 * one.conflict_rate for one in line], **style)
    paper = {"marker": "*", "ms": 12, "ls": "", "color": "tab:red", "mfc": "none", "label": "paper, layer-wise"}
    latencies.plot([300], [LATENCY_MS["planaria", 300]], **paper)
    conflicts.plot([300], [100 * CONFLICT_RATE["planaria", 300]], **paper)
    shares.plot([], [], **paper)
    latencies.axhline(QOS_MS, color="grey", ls=":", lw=1)
    shares.set(ylabel="in time, % (Fig. 3a)", ylim=(-3, 103))
    latencies.set(ylabel="mean latency, ms (Fig. 3b)", yscale="log")
    conflicts.set(ylabel="units in conflict, % (Fig. 5a)")
    for axes in (shares, latencies, conflicts):
        axes.set_xlabel("queries per second")
        axes.grid(alpha=0.3)
    shares.legend(fontsize=8, loc="lower left")
    save(figure, request.output / "veltair_fig3_5a.png")
