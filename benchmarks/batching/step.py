"""A change of configuration under load: batches of 8 rows become batches of 64, and 8 waiting clients become 64.

The old configuration would serve 64 rows as eight batches of 8, one after the other: that is what latencies after the
step are held against.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from benchmarks.batching.setup import TIMEOUT_S, Client, Setting, gangway
from testing.load import RIGHT, Load, LoadProcess, Outcome, is_right
from testing.reference import Example, repeated
from testing.report import Report, Row

STEP_MODELS = ("resnet50", "mobilenetv2")
BEFORE, AFTER = 8, 64
TIMES = AFTER // BEFORE
LEAST_OLD = 2 * TIMES  # batches before a step: some windows of 64 rows
LEAST_NEW = 3  # batches after it: the first, and others to compare it with
SHARE_OLD = 0.4  # of a cycle's time
LEAST_CYCLES = 2
FIRST_AT_MOST = 1.05  # times the latency of the following ones: it did not wait for anything
OLD_AT_MOST = 1.02  # times the old configuration's latency: not above it, but for the scatter of two measurements
OLD_RATE = f"{AFTER} rows at the former rate, ms"
SETTLED_S = 1.0  # after a load begins, before it counts


@dataclass(frozen=True)
class Step:
    """One step, milliseconds. `old_ms`: 64 rows in the old configuration; `first_ms`: the first batch after the step.

    `new_ms`: the batches after the first one.
    """

    failures: int
    old_ms: Sequence[float]
    first_ms: float
    new_ms: Sequence[float]


def step_of(before: Sequence[Outcome], after: Sequence[Outcome], times: int = TIMES) -> Step:
    """Make a step of consecutive batches in the old size, then in one `times` as large.

    What the old configuration takes for as many rows is every run of `times` consecutive old batches.
    """
    old, (first, *others) = list(map(_latency_ms, before)), list(map(_latency_ms, after))
    windows = [sum(old[begin : begin + times]) for begin in range(len(old) - times + 1)]
    failures = sum(outcome.result != RIGHT for outcome in (*before, *after))
    return Step(failures, windows, first, others)


def step_row(model: str, steps: Sequence[Step]) -> Row:
    """Return what the table shows of several steps."""
    old, new = [ms for step in steps for ms in step.old_ms], [ms for step in steps for ms in step.new_ms]
    return {
        "model": model,
        "steps": len(steps),
        "failures": sum(step.failures for step in steps),
        "old ms": statistics.median(old),
        "old, worst": max(old),
        "first ms": statistics.median(step.first_ms for step in steps),
        "new ms": statistics.median(new),
        "new, worst": max(*new, *(step.first_ms for step in steps)),
        "first over new": statistics.median(step.first_ms / statistics.median(step.new_ms) for step in steps),
        "new over old": statistics.median(new) / statistics.median(old),
    }


def _latency_ms(outcome: Outcome) -> float:
    return (outcome.end_ns - outcome.begin_ns) / 1e6


@dataclass(frozen=True)
class Crowd:
    """What one-row requests saw when `before` clients became `after`. `old_ms`: so many rows at the former rate."""

    failures: int
    rate_before_per_s: float
    rate_after_per_s: float
    old_ms: float
    latencies_ms: Sequence[float]  # of requests that began after the step


def crowd_of(outcomes: Sequence[Outcome], counted_ns: int, step_ns: int, end_ns: int, after: int = AFTER) -> Crowd:
    """Sum up one run: rates from `counted_ns` to the step and from then to the end, latencies of all after the step.

    Requests that begin after the step and end after the load does are left out: fewer and fewer are under way then.
    """
    failures = sum(outcome.result != RIGHT for outcome in outcomes)
    before = sum(counted_ns <= outcome.end_ns < step_ns for outcome in outcomes)
    later = sum(step_ns <= outcome.end_ns < end_ns for outcome in outcomes)
    rate_per_s = before / (step_ns - counted_ns) * 1e9
    latencies = [_latency_ms(one) for one in outcomes if one.begin_ns >= step_ns and one.end_ns < end_ns]
    return Crowd(failures, rate_per_s, later / (end_ns - step_ns) * 1e9, after / rate_per_s * 1e3, latencies)


def crowd_row(model: str, crowd: Crowd) -> Row:
    """Return what the table shows of a run."""
    ordered = sorted(crowd.latencies_ms)
    return {
        "model": model,
        "failures": crowd.failures,
        f"rows/s, {BEFORE} clients": crowd.rate_before_per_s,
        f"{AFTER} clients": crowd.rate_after_per_s,
        OLD_RATE: crowd.old_ms,
        "p50 ms": statistics.median(ordered),
        "p99 ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "worst ms": ordered[-1],
    }


def run_step(report: Report, setting: Setting) -> None:
    """Measure both steps with every model."""
    batches, crowds = list[Row](), list[Row]()
    for model in setting.models_or(STEP_MODELS):
        example = setting.example(model)
        with gangway(setting, [model], batching=True) as server:
            with Client(server.url, model) as client:
                batches.append(step_row(model, _cycles(client, example, setting.seconds / 2)))
            crowds.append(crowd_row(model, _crowd(server.url, repeated(example, 1), setting.seconds / 2)))
    report.table(f"requests of {BEFORE} rows, then of {AFTER}, one client; old: {TIMES} batches of {BEFORE}", batches)
    report.table(f"{BEFORE} clients of one row, then {AFTER}", crowds)
    for row in batches:
        name, worst = f"step: {row['model']}", float(row["new, worst"]) / float(row["old, worst"])
        report.target(f"{name}: failures", float(row["failures"]), 0)
        report.target(f"{name}: first batch of {AFTER} over the next", float(row["first over new"]), FIRST_AT_MOST)
        report.target(f"{name}: {AFTER} rows over {TIMES} x {BEFORE}, medians", float(row["new over old"]), OLD_AT_MOST)
        report.target(f"{name}: {AFTER} rows over {TIMES} x {BEFORE}, worst", worst, OLD_AT_MOST)
    for row in crowds:
        name, over_old = f"step: {row['model']}: {AFTER} clients", float(row["p50 ms"]) / float(row[OLD_RATE])
        report.target(f"{name}: failures", float(row["failures"]), 0)
        report.target(f"{name}: p50 over {OLD_RATE}", over_old, OLD_AT_MOST)


def _cycles(client: Client, example: Example, seconds: float) -> list[Step]:
    """Step from old to new batches and back until the time is over."""
    old, new = repeated(example, BEFORE), repeated(example, AFTER)
    for batch in (old, new):
        client.check(batch)
    steps: list[Step] = []
    begin_s = time.monotonic()
    while len(steps) < LEAST_CYCLES or time.monotonic() < begin_s + seconds:
        share_s = min(seconds / LEAST_CYCLES, 4.0)
        before = _ask_for(client, old, share_s * SHARE_OLD, LEAST_OLD)
        steps.append(step_of(before, _ask_for(client, new, share_s * (1 - SHARE_OLD), LEAST_NEW)))
    return steps


def _ask_for(client: Client, batch: Example, seconds: float, least: int) -> list[Outcome]:
    """Ask one request after the other."""
    outcomes: list[Outcome] = []
    end_ns = time.monotonic_ns() + int(seconds * 1e9)
    while len(outcomes) < least or time.monotonic_ns() < end_ns:
        begin_ns = time.monotonic_ns()
        try:
            answer = client.ask(batch.request)
        except grpc.RpcError as error:
            outcomes.append(Outcome(begin_ns, time.monotonic_ns(), error.code().name))
            continue
        arrived_ns = time.monotonic_ns()
        outcomes.append(Outcome(begin_ns, arrived_ns, RIGHT if is_right(answer, batch.outputs) else "wrong"))
    return outcomes


def _crowd(url: str, example: Example, seconds: float) -> Crowd:
    """Let 8 clients ask for one row each, then 64."""
    load = Load(url, example.request, example.outputs, BEFORE, TIMEOUT_S)
    more = Load(url, example.request, example.outputs, AFTER - BEFORE, TIMEOUT_S)
    with LoadProcess(load) as first:
        time.sleep(SETTLED_S)
        counted_ns = time.monotonic_ns()
        time.sleep(seconds * SHARE_OLD)
        with LoadProcess(more) as second:
            time.sleep(seconds * (1 - SHARE_OLD))
            end_ns = time.monotonic_ns()
            added = second.stop().outcomes
        outcomes = first.stop().outcomes
    step_ns = min(outcome.begin_ns for outcome in added)
    return crowd_of([*outcomes, *added], counted_ns, step_ns, end_ns)
