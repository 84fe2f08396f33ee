"""Several models on shared cores: Gangway under its policies and Triton, the same open-loop load, in one run.

For every mix a ladder of rates, as shares of capacity = 1 / mean isolated latency of onnxruntime on two cores. Each
point is one run of Poisson arrivals; latency counts from the scheduled arrival. It says how many queries were answered
within 3, 4 and 5 times the isolated latency, so all criteria are judged by the same runs. A ladder ends where none of
them holds any more. Points go to --points as they are measured; --resume goes on where a run ended.
"""

import argparse
import multiprocessing as mp
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from statistics import geometric_mean

from benchmarks.peers.triton_server import CONFIGURATIONS
from benchmarks.serving.points import Key, Point, counts_of, decode_file, encode, encode_file, models_of
from benchmarks.serving.servers import (
    IN_PRECISION,
    LOW_MIN_COSINE,
    LOW_TOLERANCE,
    Served,
    known_servers,
    serving,
    warm_up,
)
from benchmarks.serving.table import GOALS, MULTIPLES, add_tables, anything_holds, describe
from gangway.artifact.precision import BF16, DEADLINE
from gangway.clients.open_loop import CLIENTS, RAW, drive
from gangway.workload.arrivals import poisson_for
from gangway.workload.mix import Mix, capacity_per_s, read_mix
from gangway.workload.outcomes import summarise
from gangway.workload.qos import Qos
from testing.fetching import FetchError
from testing.isolated import Reference
from testing.load import TOLERANCE
from testing.processes import core_times
from testing.quiet import LONGEST_WAIT_S, QuietMachine
from testing.reference import Example, example_of
from testing.report import add_repository_option, option_parser, start_report
from testing.repository import ensure_profiles, ensure_zoo, onnx_file

OURS = "gangway"
LOWEST_SHARE = 0.25
CALL_TIMEOUT_S = 30
REFERENCE_ROUNDS = 3
LAG_US_AT_MOST = 200_000  # behind schedule: the machine stood still, which says nothing about a server
STOLEN_AT_MOST = 0.005  # of the machine's time by its host: more says nothing about a server
DRIFT_AT_MOST = 0.15  # of the machine's speed during a run


@dataclass(frozen=True)
class Plan:
    """What is measured. `seconds` is stretched until `least_queries` are to be expected."""

    repository: Path
    servers: Sequence[str]
    mixes: Sequence[str]
    shares: Sequence[float]  # none: the goals of the mix, and LOWEST_SHARE
    triton_shares: Sequence[float]
    seeds: Sequence[int]
    seconds: float
    least_queries: int
    target: float
    climb_on: bool
    attempts: int = 3  # then the run counts that was disturbed least
    quiet_s: float = LONGEST_WAIT_S  # at most, that a run waits for a quiet machine
    client: str = RAW  # of CLIENTS

    def ladder(self, server: str, mix: str) -> Sequence[float]:
        """Return the shares of capacity to measure, from below."""
        if server in CONFIGURATIONS:
            return self.triton_shares
        return self.shares or sorted({LOWEST_SHARE, *(goals[mix] for goals in GOALS.values() if mix in goals)})


@dataclass
class Bench:
    """What all points share: examples, the reference, the process that sends, and the file of points.

    `isolated_us` is of when the benchmark began; each point measures its own, since machines do not keep their speed.
    """

    plan: Plan
    examples: Mapping[str, Example]
    reference: Reference
    isolated_us: Mapping[str, float]
    client: ProcessPoolExecutor
    points_file: Path | None
    points: list[Point] = field(default_factory=list)
    quiet: QuietMachine = field(default_factory=QuietMachine)

    def mix(self, name: str, isolated_us: Mapping[str, float]) -> Mix:
        """Return a mix with targets of so many times isolated, and so with weights inverse to isolated latencies."""
        return read_mix(name).with_qos(Qos(multiple=self.plan.target)).resolve(isolated_us)

    def climb(self, server: str, mix_name: str) -> None:
        """Measure the ladder of one server, from below."""
        mix = read_mix(mix_name).name
        for share in self._missing_shares(server, mix):
            here = [self._point(server, mix_name, share, seed) for seed in self.plan.seeds]
            if not self.plan.climb_on and not anything_holds(here):
                return

    def _missing_shares(self, server: str, mix: str) -> list[float]:
        """Return the steps of a ladder from the first one on that a former run left out."""
        ladder = self.plan.ladder(server, mix)
        for step, share in enumerate(ladder):
            keys = {self._key(server, mix, share, seed) for seed in self.plan.seeds}
            here = [point for point in self.points if point.key in keys]
            if len(here) < len(keys):
                return list(ladder[step:])
            if not self.plan.climb_on and not anything_holds(here):
                return []
        return []

    def _key(self, server: str, mix: str, share: float, seed: int) -> Key:
        return server, mix, share, seed, self.plan.target, self.plan.client

    def _point(self, server: str, mix: str, share: float, seed: int) -> Point:
        key = self._key(server, read_mix(mix).name, share, seed)
        if known := [point for point in self.points if point.key == key]:
            return known[0]
        runs: list[Point] = []
        while len(runs) < self.plan.attempts and (not runs or _disturbed(runs[-1])):
            runs.append(self._run(server, mix, share, seed))
            if _disturbed(runs[-1]):
                lag_ms = runs[-1].latest_us / 1000
                print(f"disturbed, the client up to {lag_ms:.0f} ms behind: {describe(runs[-1])}", flush=True)
        point = min(runs, key=_disturbance)
        self._keep(point)
        return point

    def _run(self, server: str, mix_name: str, share: float, seed: int) -> Point:
        """Measure what is isolated now, then serve: rate, targets and what the server is told follow from that."""
        names = read_mix(mix_name).names
        self.quiet.wait(self.plan.quiet_s)
        isolated_us = self.reference.isolated_us(names, REFERENCE_ROUNDS)
        mix = self.mix(mix_name, isolated_us)
        targets_ms = {model.name: model.qos.value for model in mix.models if model.qos}
        with serving(server, self.plan.repository, targets_ms) as served:
            tolerance = LOW_TOLERANCE if IN_PRECISION in server else TOLERANCE
            warm_up(served.url, {name: self.examples[name] for name in names}, tolerance)
            point = self._drive(served, server, mix, share, seed, isolated_us)
        quickest = min(names, key=lambda name: isolated_us[name])
        later_us = self.reference.isolated_us([quickest], REFERENCE_ROUNDS)[quickest]
        return replace(point, drift=later_us / isolated_us[quickest])

    def _drive(
        self, served: Served, server: str, mix: Mix, share: float, seed: int, isolated_us: Mapping[str, float]
    ) -> Point:
        rate_per_s = share * capacity_per_s(mix, isolated_us)
        seconds = max(self.plan.seconds, self.plan.least_queries / rate_per_s)
        arrivals = poisson_for(mix, rate_per_s, seconds, seed)
        requests = {name: self.examples[name].request for name in mix.names}
        before_s, counted = served.cpu_s(), served.by_precision()
        before = core_times()
        run = self.client.submit(
            drive, served.url, requests, arrivals, CALL_TIMEOUT_S, client=self.plan.client
        ).result()
        after = core_times()
        isolated = [isolated_us[name] for name in mix.names]
        targets = {f"{k:g}x": [k * one for one in isolated] for k in MULTIPLES}
        summary = summarise(run.outcomes, targets, isolated, seconds)
        return Point(
            server=server,
            mix=mix.name,
            share=share,
            seed=seed,
            target=self.plan.target,
            rate_per_s=rate_per_s,
            seconds=seconds,
            models=models_of(summary),
            total=counts_of(summary.total),
            server_cpu_s=served.cpu_s() - before_s,
            client_cpu_s=run.cpu_s,
            latest_us=float(run.lag_us.max(initial=0.0)),
            slowness=geometric_mean(isolated_us[name] / self.isolated_us[name] for name in mix.names),
            stolen=(after.stolen_s - before.stolen_s) / (after.all_s - before.all_s),
            client=self.plan.client,
            by_precision={name: count - counted[name] for name, count in served.by_precision().items()},
        )

    def _keep(self, point: Point) -> None:
        self.points.append(point)
        if self.points_file:
            with self.points_file.open("a") as file:
                file.write(encode(point) + "\n")
        print(describe(point), flush=True)


def _disturbance(point: Point) -> tuple[bool, float]:
    """Order runs by how little they say about a server."""
    return point.latest_us > LAG_US_AT_MOST, max(point.stolen / STOLEN_AT_MOST, abs(log(point.drift)) / DRIFT_AT_MOST)


def _disturbed(point: Point) -> bool:
    lags, disturbance = _disturbance(point)
    return lags or disturbance > 1


@contextmanager
def open_bench(plan: Plan, points_file: Path | None, resume: bool) -> Iterator[Bench]:
    """Make ready what all points need. What a former run measured is taken over, its isolated latencies too."""
    models = list(dict.fromkeys(name for mix in plan.mixes for name in read_mix(mix).names))
    ensure_zoo(plan.repository, models)
    if any(not server.startswith("triton ") for server in plan.servers):
        ensure_profiles(plan.repository, models)
    if any(server.endswith((f"{IN_PRECISION}{BF16}", f"{IN_PRECISION}{DEADLINE}")) for server in plan.servers):
        ensure_profiles(plan.repository, models, precision=BF16, min_cosine=LOW_MIN_COSINE)
    examples = {name: example_of(name, onnx_file(plan.repository, name)) for name in models}
    reference = Reference(plan.repository, examples)
    resumed = resume and points_file is not None and points_file.exists()
    isolated_us, points = decode_file(points_file.read_text()) if resumed and points_file else ({}, [])
    isolated_us |= reference.isolated_us([name for name in models if name not in isolated_us])
    if points_file:
        points_file.write_text(encode_file(isolated_us, points))
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as client:
        yield Bench(plan, examples, reference, isolated_us, client, points_file, points)


def _numbers(text: str) -> list[float]:
    return sorted(float(part) for part in text.split(",") if part)


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _parser() -> argparse.ArgumentParser:
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    add = parser.add_argument
    add("--mixes", type=_names, default="light,medium,heavy,mix", help="names or files")
    add(
        "--schedulers",
        type=_names,
        default=OURS,
        help="Gangway's policies, @bf16 or @deadline in that precision; empty: none",
    )
    add("--triton", type=_names, default="1x2,2x1,1x1", help="instances x threads; empty: none")
    add("--shares", type=_numbers, default="", help=f"of capacity, for Gangway; empty: the goals, and {LOWEST_SHARE}")
    add("--triton-shares", type=_numbers, default=".06,.15,.25,.35,.45", help="the same for Triton")
    add("--seeds", type=_names, default="1,2")
    add("--seconds", type=float, default=40, help="of each point")
    add("--least-queries", type=int, default=100, help="a point lasts until so many are to be expected")
    add("--target", type=float, default=3, help="times isolated: what Gangway is told to aim at")
    add("--client", choices=tuple(CLIENTS), default=RAW, help="what sends, as of `gangway perf`")
    add("--climb-on", action="store_true", help="measure all shares, even where no criterion holds any more")
    add("--attempts", type=int, default=3, help="of a point that something else on the host disturbs")
    add(
        "--quiet",
        type=float,
        default=LONGEST_WAIT_S,
        metavar="S",
        help="wait so long for a quiet machine, before each run",
    )
    add("--points", type=Path, metavar="FILE", help="write each point to this file as it is measured")
    add("--resume", action="store_true", help="keep the points that are in the file; measure what is missing")
    return parser


def main() -> int:
    """Run the benchmark; return 1 when a goal is missed, 2 when it cannot be run."""
    parser = _parser()
    options = parser.parse_args()
    try:
        servers = known_servers(options.schedulers, options.triton)
    except ValueError as error:
        parser.error(str(error))
    plan = Plan(
        repository=options.repository,
        servers=servers,
        mixes=options.mixes,
        shares=options.shares,
        triton_shares=options.triton_shares,
        seeds=[int(seed) for seed in options.seeds],
        seconds=options.seconds,
        least_queries=options.least_queries,
        target=options.target,
        climb_on=options.climb_on,
        attempts=options.attempts,
        quiet_s=options.quiet,
        client=options.client,
    )
    report = start_report(
        f"Several models on shared cores: what share of capacity is served in time, client {plan.client}"
    )
    try:
        with open_bench(plan, options.points, options.resume) as bench:
            report.table(
                "isolated, onnxruntime", [{"model": n, "ms": us / 1000} for n, us in bench.isolated_us.items()]
            )
            for mix in plan.mixes:
                for server in plan.servers:
                    bench.climb(server, mix)
    except FetchError as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2
    points = [point for point in bench.points if (point.target, point.client) == (plan.target, plan.client)]
    add_tables(report, points, [read_mix(mix).name for mix in plan.mixes], plan.servers, OURS)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
