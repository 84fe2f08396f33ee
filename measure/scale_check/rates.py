"""A small mix under load: the CPU time of what serves, and the rate that is carried beside what is predicted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gangway.measure.scale_check.gangs import NARROW, CheckedModel
from gangway.measure.scale_check.section import Chart, Curve, Finding, Section, apart
from gangway.measure.scale_check.served import SERVING, CheckedServer, RateRun
from gangway.scheduler.policies.registry import DEFAULT_POLICY
from gangway.simulator.batching import Batching
from gangway.simulator.machine import Overheads
from gangway.simulator.measured import MeasuredModel
from gangway.simulator.rates import RateGoal, estimate_rate
from gangway.simulator.runs import share_curve
from gangway.simulator.scenario import SHARED_CORES, SPARE_CORES, Requests, Scenario, make_scenario
from gangway.workload.mix import Mix
from gangway.workload.qos import Qos

GOAL: Final = 0.95  # of each model's requests in time
SHARES: Final = (0.5, 0.7, 0.85, 1.0, 1.15)  # of the predicted rate, at which is measured
HALF: Final = SHARES[0]  # where CPU time is read
MULTIPLE: Final = 5.0  # targets, times a model's latency alone
LEAST_TARGET_US: Final = 5000.0
LEAST_RUN_S: Final = 2.0
QUICK_S, QUICK_QUERIES, QUERIES = 120.0, 300, 2000  # below so many seconds of the whole check, so many queries count
SPARE: Final = 2  # cores without a worker, from which on front end and scheduler have cores of their own
MOST_APART: Final = 0.15
FULL: Final = 0.7  # of its core, which a process should not exceed


@dataclass(frozen=True)
class RatePrediction:
    """The highest rate by the simulator, and the share of each model in time at rates around it.

    `from_narrow`: the rate by times on two cores, as one would predict a machine that is not at hand.
    """

    scenario: Scenario
    rate_per_s: float
    from_narrow: float
    shares: tuple[float, ...]  # of the worst model, at SHARES of the rate

    @property
    def overheads(self) -> Overheads:
        """What a request costs beside its layers."""
        return self.scenario.machine.overheads


def with_targets(mix: Mix, models: Sequence[CheckedModel]) -> Mix:
    """Return the mix with targets in milliseconds: so many times each model's latency alone on all cores."""
    alone_us = {model.name: model.profile.isolated_us[-1][0] for model in models}
    targets = {name: Qos(milliseconds=max(MULTIPLE * us, LEAST_TARGET_US) / 1e3) for name, us in alone_us.items()}
    return replace(mix, models=tuple(replace(model, qos=targets[model.name]) for model in mix.models))


def predict(mix: Mix, models: Sequence[CheckedModel], cores: int, spare: int, seconds: float) -> RatePrediction:
    """Simulate the mix on so many cores. `spare`: cores without a worker. `seconds`: of the whole check."""
    overheads = SPARE_CORES if spare >= SPARE else SHARED_CORES
    queries = QUICK_QUERIES if seconds < QUICK_S else QUERIES
    measured = {model.name: model.measured for model in models}
    scenario = _scenario(mix, measured, cores, overheads)
    rate_per_s = _highest(scenario, queries)
    narrow = _scenario(mix, {model.name: model.narrow for model in models}, cores, overheads)
    from_narrow = _highest(narrow, queries) if cores > NARROW else rate_per_s
    curve = share_curve(DEFAULT_POLICY, scenario, [share * rate_per_s for share in SHARES], queries, seed=1)
    return RatePrediction(scenario, rate_per_s, from_narrow, tuple(point.least for point in curve))


def measure_loads(
    server: CheckedServer, predicted: RatePrediction, seconds: float, report: Callable[[str], None]
) -> tuple[RateRun, ...]:
    """Load the server at SHARES of the predicted rate, each for an equal part of so many seconds."""
    each_s = max(LEAST_RUN_S, seconds / len(SHARES))
    loads = []
    for number, share in enumerate(SHARES):
        report(f"load at {share:.0%} of the predicted rate, {share * predicted.rate_per_s:.1f}/s, {each_s:.0f} s")
        loads.append(server.load(share * predicted.rate_per_s, each_s, seed=number))
    return tuple(loads)


def check_requests(loads: Sequence[RateRun], predicted: RatePrediction) -> Section:
    """Return the CPU time of a request beside its computing."""
    half = loads[0]
    rows = tuple(
        {
            "requests/s": load.rate_per_s,
            **{f"{role}, us": cpu_us for role, cpu_us in load.cpu_us.items()},
            "busy scheduler": load.rate_per_s * load.cpu_us["scheduler"] / 1e6,
            "busy front ends": load.rate_per_s * load.cpu_us["front ends"] / 1e6,
        }
        for load in loads
    )
    served_us = sum(half.cpu_us[role] for role in SERVING) + half.cpu_us["client"]
    figures = {f"{role.replace(' ', '_')}_cpu_us": cpu_us for role, cpu_us in half.cpu_us.items()}
    findings = [
        _busy("scheduler", "one scheduler process", half, predicted),
        _busy("front ends", "one front end", half, predicted),
    ]
    if stolen_us := predicted.overheads.stolen_us:
        figures |= {"served_us": served_us, "predicted_us": stolen_us}
        text = f"a request takes {served_us:.0f} us of CPU beside its computing, client included"
        findings.append(Finding(f"{text}; the simulator reckons with {stolen_us:.0f} us", served_us <= 2 * stolen_us))
    return Section(
        "requests",
        "Scheduler and front ends: CPU of a request",
        rows,
        tuple(findings),
        figures,
        "Each is a process with one thread that decides or talks. Once it is busy for most of the time, requests wait "
        "for it, and cores stay idle however many there are.",
        "Front ends: `--front-ends 2` and more, on cores of their own (`--cores` without those). Scheduler: one server "
        "for each NUMA node, behind `gangway route`; larger batches by clients; fewer, larger models on a server.",
    )


def _busy(role: str, what: str, load: RateRun, predicted: RatePrediction) -> Finding:
    most_per_s = 1e6 / max(load.cpu_us[role], 1e-3)
    share = predicted.rate_per_s / most_per_s
    text = f"{what} carries {most_per_s:.0f} requests/s of this mix at most ({load.cpu_us[role]:.0f} us each)"
    return Finding(f"{text}; the predicted rate takes {share:.0%} of that", share <= FULL)


def check_rates(loads: Sequence[RateRun], predicted: RatePrediction) -> Section:
    """Return the measured rate beside the predicted one."""
    carried = carried_share([(share, load.in_time) for share, load in zip(SHARES, loads, strict=True)])
    rows = tuple(
        {
            "of the predicted rate": share,
            "requests/s": load.rate_per_s,
            "requests": load.queries,
            "worst model in time": load.in_time,
            "predicted": expected,
            **{
                f"{row.name} p95 / target": (row.p95_us or 0.0) / (target_us or 1.0)
                for row, target_us in zip(load.summary.models, predicted.scenario.targets_us, strict=True)
            },
        }
        for share, load, expected in zip(SHARES, loads, predicted.shares, strict=True)
    )
    measured_per_s = carried * predicted.rate_per_s
    error = apart(predicted.rate_per_s, measured_per_s) if carried else float("inf")
    bound = "at least " if carried == SHARES[-1] else "less than " if not carried else ""
    shown_per_s = measured_per_s if carried else SHARES[0] * predicted.rate_per_s
    targets = ", ".join(
        f"{name} {target_us / 1e3:.1f} ms"
        for name, target_us in zip(predicted.scenario.mix.names, predicted.scenario.targets_us, strict=True)
        if target_us
    )
    findings = [
        Finding(f"targets: {targets}"),
        Finding(
            f"{GOAL:.0%} of each model's requests are in time up to {bound}{shown_per_s:.4g}/s; predicted are "
            f"{predicted.rate_per_s:.4g}/s",
            carried > 0 and error <= MOST_APART,
        ),
    ]
    figures = {"predicted_per_s": predicted.rate_per_s, "measured_per_s": measured_per_s}
    if predicted.from_narrow != predicted.rate_per_s:
        figures["predicted_from_two_cores_per_s"] = predicted.from_narrow
        away = apart(predicted.from_narrow, measured_per_s) if carried else float("inf")
        text = f"from times on {NARROW} cores {predicted.from_narrow:.4g}/s are predicted"
        findings.append(Finding(text, carried > 0 and abs(away) <= MOST_APART))
    return Section(
        "rates",
        "Predicted and measured rate",
        rows,
        tuple(findings),
        figures,
        "A machine that carries less than is predicted has costs that the simulator does not know: look above which of "
        "memory, gangs and CPU of a request is away. One that carries more has room: predictions are safe, but low. "
        "Short runs have few requests, and their shares scatter.",
        "Plan with the measured rate, or with `gangway capacity` and the ratio of both. Repeat with more --seconds "
        "before you conclude from a difference of a tenth.",
        Chart(
            "requests per second",
            "share of the worst model in time",
            (
                Curve("measured", tuple((load.rate_per_s, load.in_time) for load in loads)),
                Curve(
                    "predicted",
                    tuple((load.rate_per_s, share) for load, share in zip(loads, predicted.shares, strict=True)),
                    predicted=True,
                ),
            ),
        ),
    )


def carried_share(points: Sequence[tuple[float, float]]) -> float:
    """Return up to which load the goal holds, between the last point that has it and the next one; 0: at none.

    `points`: load and share in time, by load. The first point that misses the goal ends it.
    """
    held = 0.0
    for number, (load, in_time) in enumerate(points):
        if in_time >= GOAL:
            held = load
            continue
        if not number:
            return 0.0
        before, had = points[number - 1]
        return before + (load - before) * (had - GOAL) / (had - in_time)
    return held


def _scenario(mix: Mix, measured: Mapping[str, MeasuredModel], cores: int, overheads: Overheads) -> Scenario:
    return make_scenario(mix, cores, measured, overheads, requests=Requests(batching=Batching(4)))


def _highest(scenario: Scenario, queries: int) -> float:
    return estimate_rate(DEFAULT_POLICY, scenario, RateGoal(GOAL, each=True), queries, (1,)).mean_per_s
