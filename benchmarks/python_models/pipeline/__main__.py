"""An image from its bytes to its labels, by an ensemble of Python, ONNX and Python: Gangway beside Triton.

Both servers read the same files, are pinned to the same cores, and take turns. Clients in a closed loop drive the
ensemble. Then another model, with a latency target, gets requests at a modest rate, alone and while the ensemble is at
its limit.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.triton_server import Configuration, triton_serving
from benchmarks.peers.triton_server import write_repository as write_triton_repository
from benchmarks.python_models.pipeline.repository import (
    CLASSIFIER,
    Asked,
    asked,
    echo_asked,
    link_pillow,
    write_pipeline,
)
from benchmarks.serving.servers import warm_up, write_repository
from gangway.clients.open_loop import drive
from gangway.workload.arrivals import Arrivals
from gangway.workload.outcomes import summarise
from testing.cost import Stretch, measure_stretch, median_of
from testing.fetch.triton import fetch
from testing.fetching import FetchError
from testing.isolated import Reference
from testing.live_server import live_server
from testing.load import Load, LoadProcess
from testing.processes import descendants_of
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_profiles, ensure_zoo, onnx_file

GANGWAY = "gangway"
CORES = 2
TARGET_TIMES, FULL_CLIENTS = 3, 8  # of the other model's isolated latency; that drive the ensemble beside it
WARM_UP_S = 0.5
IN_TIME_AT_LEAST = 0.95


@dataclass(frozen=True)
class Side:
    """One of the servers that are compared."""

    name: str
    url: str
    root_pid: int

    def pids(self) -> Mapping[str, Sequence[int]]:
        """Return all its processes, as one role."""
        return {"server": [self.root_pid, *descendants_of(self.root_pid)]}


@contextmanager
def gangway_side(models: Path, instances: int, targets_ms: Mapping[str, float | None]) -> Iterator[Side]:
    """Serve by Gangway, with so many instances of each Python model."""
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), models, targets_ms)
        write_pipeline(Path(folder), instances)
        with live_server(folder) as server:
            yield Side(f"{GANGWAY} {instances}", server.url, server.process.pid)


@contextmanager
def triton_side(models: Path, configuration: Configuration, names: Sequence[str]) -> Iterator[Side]:
    """Serve by Triton: so many instances of each model, and threads of onnxruntime."""
    with tempfile.TemporaryDirectory() as folder:
        write_triton_repository(Path(folder), models, names, configuration)
        write_pipeline(Path(folder), configuration.instances)
        link_pillow(Path(folder))
        with triton_serving(Path(folder)) as server:
            yield Side(configuration.name, server.url, server.process.pid)


def closed_loops(report: Report, sides: Sequence[Side], options: argparse.Namespace, request: Asked) -> None:
    """Drive the ensemble by clients that wait for their answers."""
    rows: list[Row] = []
    for clients in options.clients:
        found = by_turns(sides, request, clients, options)
        rows += [row(clients, name, stretches) for name, stretches in found.items()]
        compare(report, f"{clients} clients", found)
    report.table("the ensemble, closed loop", rows)


def by_turns(
    sides: Sequence[Side], request: Asked, clients: int, options: argparse.Namespace
) -> dict[str, list[Stretch]]:
    """Load all sides, one after the other, again and again."""
    found: dict[str, list[Stretch]] = {side.name: [] for side in sides}
    for _ in range(options.rounds):
        for side in sides:
            load = Load(side.url, request.request, request.outputs, clients)
            found[side.name].append(measure_stretch(side.pids, load, options.seconds))
    return found


def row(clients: int, name: str, stretches: Sequence[Stretch]) -> Row:
    """Return the line of a table: medians."""
    return {
        "clients": clients,
        "server": name,
        "requests/s": median_of(stretches, lambda one: one.requests_per_s),
        "p50 ms": median_of(stretches, lambda one: one.latency_ms(0.5)),
        "p99 ms": median_of(stretches, lambda one: one.latency_ms(0.99)),
        "CPU ms a request": median_of(stretches, lambda one: one.all_cpu_us) / 1000,
    }


def compare(report: Report, what: str, found: Mapping[str, Sequence[Stretch]]) -> None:
    """Compare Gangway's best with Triton's, by throughput, and its CPU time with the least of Triton's."""

    def of(own: bool, figure: Callable[[Stretch], float]) -> list[float]:
        return [median_of(some, figure) for name, some in found.items() if name.startswith(GANGWAY) == own]

    rates, cpu_us = (of(False, figure) for figure in (lambda one: one.requests_per_s, lambda one: one.all_cpu_us))
    if rates:
        rate = max(of(True, lambda one: one.requests_per_s)) / max(rates)
        report.goal(f"{what}: requests/s over Triton's most", rate, 1.0)
        cpu = min(of(True, lambda one: one.all_cpu_us)) / min(cpu_us)
        report.target(f"{what}: CPU of a request over Triton's least", cpu, 1.0)


def echoes(report: Report, sides: Sequence[Side], options: argparse.Namespace) -> None:
    """Ask a Python model that does nothing, by one client."""
    found = by_turns(sides, echo_asked(), 1, options)
    report.table("a Python model that does nothing", [row(1, name, stretches) for name, stretches in found.items()])


def tenants(
    report: Report,
    sides: Sequence[Side],
    options: argparse.Namespace,
    request: Asked,
    tenant: Example,
    target_us: float,
) -> None:
    """Ask another model at a modest rate, alone and beside the ensemble under full load."""
    rows: list[Row] = []
    for side in sides:
        alone = tenant_row(side, options, tenant, target_us)
        with LoadProcess(Load(side.url, request.request, request.outputs, FULL_CLIENTS)) as load:
            beside = tenant_row(side, options, tenant, target_us)
            result = load.stop()
        rate = len(result.outcomes) / result.elapsed_ns * 1e9
        rows.append({"server": side.name, **{f"alone: {key}": value for key, value in alone.items()}, **beside})
        rows[-1] = {**rows[-1], "the ensemble's requests/s": rate}
        if side.name.startswith(GANGWAY):
            what = f"{options.tenant} beside the ensemble, {side.name}: in time"
            report.goal(what, float(beside["in time"]), IN_TIME_AT_LEAST)
    report.table(f"{options.tenant}, {options.rate:g}/s, target {target_us / 1000:.1f} ms", rows)


def tenant_row(side: Side, options: argparse.Namespace, tenant: Example, target_us: float) -> dict[str, float]:
    """Ask a model at random times; the same ones for every server. Raises RuntimeError for errors."""
    count = int(options.rate * options.tenant_seconds)
    times_us = np.cumsum(np.random.default_rng(1).exponential(1e6 / options.rate, count))
    arrivals = Arrivals(times_us + WARM_UP_S * 1e6, np.zeros(count, dtype=np.int64))
    outcomes = drive(side.url, {options.tenant: tenant.request}, arrivals).outcomes
    total = summarise(outcomes, {"target": [target_us]}).total
    share, p50_us, p99_us = total.satisfied["target"], total.p50_us, total.p99_us
    if not outcomes.answered.all() or share is None or p50_us is None or p99_us is None:
        raise RuntimeError(f"{side.name}: {options.tenant} was not always answered")
    return {"in time": share, "p50 ms": p50_us / 1000, "p99 ms": p99_us / 1000}


def run(report: Report, options: argparse.Namespace) -> None:
    """Serve by all sides, idle servers take no time, and measure what is asked for."""
    names = [CLASSIFIER, options.tenant]
    models = ensure_zoo(options.repository, names)
    ensure_profiles(models, names)
    tenant = example_of(options.tenant, onnx_file(models, options.tenant))
    isolated_us = Reference(models, {options.tenant: tenant}).isolated_us([options.tenant])[options.tenant]
    target_us = TARGET_TIMES * isolated_us
    targets_ms = {CLASSIFIER: None, options.tenant: target_us / 1000}
    request = asked(models)
    with ExitStack() as stack:
        sides = [stack.enter_context(gangway_side(models, count, targets_ms)) for count in options.instances]
        sides += [stack.enter_context(triton_side(models, one, names)) for one in options.triton]
        for side in sides:
            warm_up(side.url, {options.tenant: tenant})
        if "ensemble" in options.parts:
            closed_loops(report, sides, options, request)
        if "echo" in options.parts:
            echoes(report, sides, options)
        if "tenant" in options.parts:
            tenants(report, sides, options, request, tenant, target_us)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed, 2 when there is no Triton to be had."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    add = parser.add_argument
    add("--parts", default="ensemble,echo,tenant", type=lambda text: text.split(","), metavar="P[,P]")
    add("--clients", default="1,2,4,8", type=_numbers, metavar="N[,N]", help="at a time")
    add("--instances", default="1,2", type=_numbers, metavar="N[,N]", help="of each Python model, Gangway's")
    add("--triton", default="1x1,1x2,2x1,2x2", type=_configurations, metavar="C[,C]", help="instances x threads")
    add("--rounds", type=int, default=2, help="of all servers, by turns")
    add("--seconds", type=float, default=2.0, help="of each load")
    add("--tenant", default="googlenet", help="the other model, of the zoo")
    add("--rate", type=float, default=10.0, help="of the other model's requests, per second")
    add("--tenant-seconds", type=float, default=8.0, help="of these")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    report = start_report("An ensemble of Python, ONNX and Python")
    try:
        if options.triton:
            fetch()
        run(report, options)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return report.finish(options.json)


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


def _configurations(text: str) -> list[Configuration]:
    pairs = [map(int, one.split("x")) for one in text.split(",") if one]
    return [Configuration(instances, threads) for instances, threads in pairs]


if __name__ == "__main__":
    sys.exit(main())
