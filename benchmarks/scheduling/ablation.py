"""What each part of the default policy is worth: everything on, then one part off after the other.

Simulated: a rate is searched at which `SHARE` of the requests are in time with everything on; at this rate each part of
`PolicyConfig` is left out, with the same arrivals. Beside the plain mixes there are the scenarios that parts exist for:
batches, three times that rate, a model without a deadline, a model of microseconds beside long ones. A difference
counts if it is larger than twice its standard error over the seeds and than `LEAST_POINTS` or `LEAST_RATIO`.

`--live`: mixes on this machine through `gangway serve --scheduler gangway:without=PART`, by turns with `gangway`.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.serving.servers import serving, warm_up
from gangway.clients.open_loop import drive
from gangway.scheduler.admission import excess
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policy import Decision, Query, Reject, Snapshot
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig
from gangway.scheduler.waiting import WaitingQueries
from gangway.simulator.batching import Batching
from gangway.simulator.contention import Contention
from gangway.simulator.loop import simulate
from gangway.simulator.rates import TARGET, RateGoal, one_core_rate, search_rate
from gangway.simulator.scenario import SHARED_CORES, SPARE_CORES, Requests, Scenario, make_scenario
from gangway.workload.arrivals import poisson_for
from gangway.workload.mix import Mix, MixModel, capacity_per_s, parse_mix, read_mix
from gangway.workload.outcomes import Outcomes, summarise
from gangway.workload.qos import Qos
from testing.isolated import Reference
from testing.reference import example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_profiles, ensure_zoo, onnx_file

SHARE = 0.94  # of all requests in time with everything on
LEAST_POINTS = 0.2  # a smaller difference of the share in time is no reason to keep a part,
LEAST_RATIO = 0.02  # nor is one of latencies
OVERLOAD = 3.0  # times the rate at which SHARE are in time
SHED_EVERY_US = 100_000.0  # as the live scheduler's housekeeping
QUERIES = {2: 3000, 16: 2000, 64: 1500}
ONLY_LIVE = ("prediction_error", "gang_slowdown", "decision_gap", "best_effort_gap", "crowding")

NOT_HERE = ("precision_choice",)  # models of the mixes have one precision


@dataclass(frozen=True)
class Point:
    """A scenario at a rate: its load is `times` the one at which SHARE of the requests are in time."""

    name: str
    mix: str
    cores: int
    times: float = 1.0
    batch: int = 0
    best_effort: bool = False  # the first model has no deadline
    brief: bool = False  # the first model takes microseconds, and its target is 3.4 or 1.3 ms
    contended: bool = False  # cores slow each other down

    def scenario(self) -> Scenario:
        """Two cores are shared with front end and client, as on the machine that live servers run on."""
        is_own = "=" in self.mix  # it names models and weights, and no targets
        mix = parse_mix(self.mix) if is_own else read_mix(self.mix)
        if self.cores < 64 or is_own:
            mix = mix.with_qos(Qos(multiple=3.0))
        overheads = SHARED_CORES if self.cores == 2 else SPARE_CORES
        requests = Requests(batching=Batching(self.batch) if self.batch else None)
        contention = Contention() if self.contended else None
        made = make_scenario(mix, self.cores, overheads=overheads, requests=requests, contention=contention)
        models = dict(made.models)
        if self.best_effort:
            models[0] = replace(models[0], qos_us=None)
        if self.brief:
            times = tuple(tuple(tuple(us / 5000 for us in one) for one in layer) for layer in models[0].latency_us)
            models[0] = replace(models[0], latency_us=times, qos_us=3400.0 if self.cores == 2 else 1300.0)
        return replace(made, models=models)


POINTS = (
    *(Point(f"{mix}, {cores}", mix, cores) for cores in (2, 16, 64) for mix in ("light", "medium", "heavy", "mix")),
    Point("light, 2, batches of 8", "light", 2, batch=8),
    Point("mix, 16, batches of 8", "mix", 16, batch=8),
    Point("light, 2, best effort beside", "light", 2, best_effort=True),
    Point("mix, 16, best effort beside", "mix", 16, best_effort=True),
    Point("mix, 2, brief beside", "mix", 2, brief=True),
    Point("mix, 16, brief beside", "mix", 16, brief=True),
    Point("light, 2, 3 x", "light", 2, times=OVERLOAD, best_effort=True),
    Point("medium, 2, 3 x", "medium", 2, times=OVERLOAD),
    Point("mix, 16, 3 x", "mix", 16, times=OVERLOAD, best_effort=True),
)


@dataclass(frozen=True)
class Outcome:
    """Shares in time of the worst model and of all; latencies over isolated, those of best effort apart."""

    worst: float
    total: float
    mean: float
    p99: float
    best_effort_p99: float = math.nan


class Shedding(Policy):
    """The default policy, with the late work refused that the live scheduler refuses. For the simulator."""

    name = "gangway, shedding"
    batches = True

    def __init__(self, config: PolicyConfig) -> None:
        self._policy = Gangway(config)
        self._config = config.shedding
        self._next_us = 0.0

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Refuse at times what waits in vain, and ask the policy about the others."""
        refused: set[int] = set()
        if snapshot.now_us >= self._next_us:
            self._next_us = snapshot.now_us + SHED_EVERY_US
            queue = WaitingQueries()
            for query in snapshot.waiting:
                queue.add(query)
            seen = (snapshot.models, snapshot.now_us, snapshot.core_count)
            refused = set(excess(queue.groups, *seen, self._config))
        if refused:
            snapshot = replace(snapshot, waiting=[one for one in snapshot.waiting if one.query_id not in refused])
        return [*map(Reject, sorted(refused)), *self._policy.decide(snapshot)]

    def arrived(self, query: Query) -> None:
        """Tell the policy."""
        self._policy.arrived(query)

    def finished(self, query: Query, now_us: float) -> None:
        """Tell the policy."""
        self._policy.finished(query, now_us)


@cache
def _prepared(point: Point, queries: int) -> tuple[Scenario, float]:
    """Return the scenario and the rate. One with best effort goes by that without."""
    scenario = point.scenario()
    rate = search_rate("gangway", scenario, RateGoal(SHARE), queries, 1).rate_per_s
    return scenario, point.times * (rate or one_core_rate(scenario) / 2)


def simulated(point: Point, without: str, seed: int, queries: int) -> Outcome:
    """Return what the policy without a part does. "": with all."""
    scenario, rate_per_s = _prepared(point, queries)
    config = DEFAULT.without(*without.split("+")) if without else DEFAULT
    policy: Policy = Shedding(config) if point.times > 1 else Gangway(config)
    arrivals = scenario.arrivals(rate_per_s, queries, seed)
    result = simulate(policy, scenario.models, arrivals, scenario.machine, batching=scenario.requests.batching)
    return outcome(result.outcomes, scenario.targets_us, scenario.isolated_us)


def outcome(outcomes: Outcomes, targets_us: Sequence[float | None], isolated_us: Sequence[float]) -> Outcome:
    """Sum up a run."""
    summary = summarise(outcomes, {TARGET: targets_us}, isolated_us)
    ratio = outcomes.latency_us / np.array(isolated_us)[outcomes.models]
    has_target = np.array([target is not None for target in targets_us])[outcomes.models]
    answered = outcomes.answered
    timed, best_effort = ratio[answered & has_target], ratio[answered & ~has_target]
    return Outcome(
        summary.least_satisfied(TARGET),
        summary.total.satisfied[TARGET] or 0.0,
        float(timed.mean()),
        float(np.percentile(timed, 99)),
        float(np.percentile(best_effort, 99)) if best_effort.size else math.nan,
    )


def _simulated(job: tuple[Point, str, tuple[int, ...], int]) -> list[Outcome]:
    point, without, seeds, queries = job
    return [simulated(point, without, seed, queries) for seed in seeds]


@dataclass(frozen=True)
class Difference:
    """What is lost without a part, over seeds: the mean and its standard error."""

    mean: float
    error: float

    def verdict(self, least: float) -> str:
        """Return "+" if the part is worth something, "-" if it costs something, "" if nothing beyond noise."""
        if abs(self.mean) <= max(2 * self.error, least):
            return ""
        return "+" if self.mean > 0 else "-"

    def __str__(self) -> str:
        return f"{self.mean:+.2f} +-{self.error:.2f}"


def difference(values: Sequence[float]) -> Difference:
    """Return the mean and its standard error over seeds."""
    known = [value for value in values if not math.isnan(value)] or [0.0]
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else 0.0
    return Difference(statistics.mean(known), error)


@dataclass(frozen=True)
class Comparison:
    """What is lost without a part at a point: points of shares in time; latencies as ratio, less 1."""

    point: str
    part: str
    worst: Difference
    total: Difference
    mean: Difference
    p99: Difference
    best_effort_p99: Difference

    def verdicts(self) -> Mapping[str, str]:
        """Return "+", "-" or "" for each figure."""
        shares = {name: getattr(self, name).verdict(LEAST_POINTS) for name in ("worst", "total")}
        names = ("mean", "p99", "best_effort_p99")
        return {**shares, **{name: getattr(self, name).verdict(LEAST_RATIO) for name in names}}

    def row(self) -> Row:
        """Return the line of a table."""
        counts = " ".join(sign + name for name, sign in self.verdicts().items() if sign)
        figures = {name: str(getattr(self, name)) for name in self.verdicts()}
        return {"without": self.part, **figures, "beyond noise": counts}


def compared(point: str, part: str, on: Sequence[Outcome], off: Sequence[Outcome]) -> Comparison:
    """Compare runs with everything on and with one part off, seed by seed."""
    pairs = list(zip(on, off, strict=True))
    return Comparison(
        point,
        part,
        difference([100 * (one.worst - other.worst) for one, other in pairs]),
        difference([100 * (one.total - other.total) for one, other in pairs]),
        difference([other.mean / one.mean - 1 for one, other in pairs]),
        difference([other.p99 / one.p99 - 1 for one, other in pairs]),
        difference([other.best_effort_p99 / one.best_effort_p99 - 1 for one, other in pairs]),
    )


def summaries(found: Sequence[Comparison], parts: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each part: at how many points it is worth or costs something, and where most."""
    for part in parts:
        mine = [one for one in found if one.part == part]
        signs = [set(one.verdicts().values()) for one in mine]
        best, least = (choose(mine, key=lambda one: one.total.mean) for choose in (max, min))
        yield {
            "part": part,
            "helps at": sum("+" in each for each in signs),
            "harms at": sum("-" in each for each in signs),
            "of": len(mine),
            "worst": f"{statistics.mean(one.worst.mean for one in mine):+.2f}",
            "all": f"{statistics.mean(one.total.mean for one in mine):+.2f}",
            "mean": f"{statistics.mean(one.mean.mean for one in mine):+.3f}",
            "p99": f"{statistics.mean(one.p99.mean for one in mine):+.3f}",
            "all, most": f"{best.total} {best.point}",
            "all, least": f"{least.total} {least.point}",
        }


def run_simulated(report: Report, options: argparse.Namespace, parts: Sequence[str]) -> None:
    """Compare all parts at all points."""
    points = [point for point in POINTS if options.points in point.name]
    seeds = tuple(range(2, 2 + options.seeds))
    found: list[Comparison] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for point in points:
            queries = int(QUERIES[point.cores] * options.scale * max(1.0, point.times / 2))
            jobs = [(point, part, seeds, queries) for part in ("", *parts)]
            on, *others = pool.map(_simulated, jobs)
            here = [compared(point.name, part, on, off) for part, off in zip(parts, others, strict=True)]
            share = statistics.mean(100 * one.total for one in on)
            worst = statistics.mean(100 * one.worst for one in on)
            report.table(f"{point.name}: {share:.1f} % in time, worst model {worst:.1f} %", [one.row() for one in here])
            found += here
    report.table("what each part is worth, simulated", list(summaries(found, parts)))


# Live.


@dataclass(frozen=True)
class LivePoint:
    """A mix at a share of capacity, which is 1 / the mean isolated latency of onnxruntime on all cores.

    `best_effort`: a further model without a deadline, asked as often as the rarest. `brief`: a further model, asked so
    often a second.
    """

    name: str
    models: tuple[str, ...]
    share: float
    best_effort: str = ""
    brief: str = ""
    brief_per_s: float = 0.0

    @property
    def names(self) -> list[str]:
        """All models."""
        return [*self.models, *filter(None, (self.best_effort, self.brief))]

    def mix(self, isolated_us: Mapping[str, float]) -> tuple[Mix, float]:
        """Return the resolved mix, with targets of three times isolated, and its rate per second."""
        target = Qos(multiple=3.0)
        timed = Mix(self.name, tuple(MixModel(name, 1 / isolated_us[name], target) for name in self.models))
        timed = timed.resolve(isolated_us)
        rate_per_s = self.share * capacity_per_s(timed, isolated_us)
        rates = dict(zip(timed.names, (share * rate_per_s for share in timed.shares), strict=True))
        qos = {model.name: model.qos for model in timed.models}
        if self.best_effort:
            rates[self.best_effort], qos[self.best_effort] = min(rates.values()), None
        if self.brief:
            rates[self.brief], qos[self.brief] = self.brief_per_s, Qos(milliseconds=BRIEF_TARGET_MS)
        models = tuple(MixModel(name, rate, qos[name]) for name, rate in rates.items())
        return Mix(self.name, models).resolve(isolated_us), sum(rates.values())


BRIEF_TARGET_MS = 3.4  # the least that "3x" means on two cores
LIVE_POINTS = (
    LivePoint("light", ("efficientnet_b0", "mobilenetv2", "tiny_yolov2"), 0.65),
    LivePoint("medium", ("resnet50", "googlenet"), 0.55),
    LivePoint("overload", ("efficientnet_b0", "mobilenetv2", "tiny_yolov2"), OVERLOAD, best_effort="googlenet"),
    LivePoint("small", ("resnet50", "bert_base"), 0.45, brief="mlp", brief_per_s=70.0),
)
TIMEOUT_S = 60.0


class LiveRuns:
    """Servers of a point, one after the other."""

    def __init__(self, point: LivePoint, source: Path, seconds: float, share: float) -> None:
        self._source, self._seconds = source, seconds
        names = point.names
        ensure_zoo(source, names)
        ensure_profiles(source, names)
        self._examples = {name: example_of(name, onnx_file(source, name)) for name in names}
        self._isolated_us = Reference(source, self._examples).isolated_us(names)
        self._mix, self._rate_per_s = replace(point, share=share or point.share).mix(self._isolated_us)

    def measure(self, scheduler: str, seeds: Sequence[int]) -> list[Outcome]:
        """Return what a server does, one run for each seed."""
        names = self._mix.names
        targets_us = [model.qos.resolve_us(None) if model.qos else None for model in self._mix.models]
        targets_ms = {name: us / 1e3 if us else None for name, us in zip(names, targets_us, strict=True)}
        isolated_us = [self._isolated_us[name] for name in names]
        found = []
        with serving(scheduler, self._source, targets_ms) as server:
            warm_up(server.url, self._examples)
            requests = {name: self._examples[name].request for name in names}
            for seed in seeds:
                arrivals = poisson_for(self._mix, self._rate_per_s, self._seconds, seed)
                outcomes = drive(server.url, requests, arrivals, TIMEOUT_S).outcomes
                found.append(outcome(outcomes, targets_us, isolated_us))
        return found


def run_live(report: Report, options: argparse.Namespace, parts: Sequence[str]) -> None:
    """Compare the parts by turns with the whole policy: on, off, on, off, ... with a server for each seed."""
    found: list[Comparison] = []
    for point in LIVE_POINTS:
        if options.points and point.name not in options.points.split(","):
            continue
        runs = LiveRuns(point, options.repository, options.seconds, options.share)
        here = []
        for part in parts:
            on: list[Outcome] = []
            off: list[Outcome] = []
            for seed in range(1, 1 + options.seeds):
                on += runs.measure("gangway", [seed])
                off += runs.measure(f"gangway:without={part}", [seed])
            here.append(compared(point.name, part, on, off))
            shares = [" ".join(f"{100 * one.total:.1f}/{100 * one.worst:.1f}" for one in each) for each in (on, off)]
            print(f"{point.name}, {part}: all/worst in time with {shares[0]}, without {shares[1]}", flush=True)
        report.table(f"live, {point.name}", [one.row() for one in here])
        found += here
    report.table("what each part is worth, live", list(summaries(found, parts)))


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    add = parser.add_argument
    add("--live", action="store_true", help="through servers on this machine instead of the simulator")
    add(
        "--parts",
        default="",
        metavar="P,P",
        help="only these (P+P: both off at once); all that can be seen there if empty",
    )
    add("--points", default="", metavar="TEXT", help="only those whose name contains this")
    add("--seeds", type=int, default=3, help="runs of each, with arrivals of their own")
    add("--processes", type=int, default=1, help="simulations at a time")
    add("--scale", type=float, default=1.0, help="times the usual number of queries of a simulation")
    add("--seconds", type=float, default=15.0, help="of each live run")
    add("--share", type=float, default=0.0, help="of capacity, live; 0: that of each mix")
    options = parser.parse_args()
    known = [part for part in PolicyConfig.parts() if part not in (NOT_HERE if options.live else NOT_HERE + ONLY_LIVE)]
    parts = options.parts.split(",") if options.parts else known
    report = start_report("Ablation of the default policy")
    (run_live if options.live else run_simulated)(report, options, parts)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
