"""What a simulation writes: tables, CSV files and pictures of policies, timelines of cores, reasons of decisions."""

import csv
import itertools
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType

from gangway.base.console import Table
from gangway.scheduler.policy import Decision, Reject, Replan, Resize, Start, StartOver, Stop, Wake
from gangway.scheduler.timeline import Slice, TimelineWriter
from gangway.simulator.block import SimulatedBlock
from gangway.simulator.machine import Observer
from gangway.simulator.rates import TARGET, RateEstimate
from gangway.simulator.results import SimulationCounters
from gangway.simulator.runs import PolicyRun
from gangway.simulator.turn_cost import MOST_BUSY, processes_needed
from gangway.workload.outcomes import OutcomeRow

COLUMNS = ("qps", "satisfied", "mean_ms", "p50_ms", "p95_ms", "p99_ms", "over_isolated", "errors")


def file_stem(policy: str) -> str:
    """Return a policy's name as part of a file's."""
    return policy.replace(":", "-")


def write_csv(path: Path, run: PolicyRun) -> None:
    """Write a row per model and one for all, then what was counted. Raises OSError."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("policy", "rate_per_s", "model", "queries", *COLUMNS))
        for row in (*run.summary.models, run.summary.total):
            writer.writerow((run.policy, f"{run.rate_per_s:.6g}", row.name, row.queries, *_cells(row, "")))
    counters = run.result.counters
    with path.with_suffix(".counters.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*(field.name for field in fields(SimulationCounters)), "core_use"))
        values = (getattr(counters, field.name) for field in fields(SimulationCounters))
        writer.writerow((*(round(value, 1) for value in values), f"{run.core_use:.4f}"))


def write_probes(path: Path, runs: Sequence[PolicyRun]) -> None:
    """Write what the searches tried. Raises OSError."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("policy", "goal", "search", "rate_per_s", "share"))
        for run in runs:
            for goal, found in (("all", run.in_all), ("each", run.in_each)):
                for number, probes in enumerate(found.probes if found else ()):
                    writer.writerows(
                        (run.policy, goal, number, f"{p.rate_per_s:.6g}", f"{p.share:.5f}") for p in probes
                    )


def table(runs: Sequence[PolicyRun], title: str) -> Table:
    """Return a row per policy and model."""
    result = Table(title=title)
    result.add_column("policy")
    result.add_column("model")
    for name in ("rate/s", "in time %", "mean ms", "p50", "p95", "p99", "x isolated", "errors"):
        result.add_column(name, justify="right")
    for run in runs:
        for row in (*run.summary.models, run.summary.total):
            _, *cells = _cells(row, "-")
            total = row is run.summary.total
            rate = f"{run.rate_per_s:.4g}" if total else ""
            result.add_row(run.policy, row.name, rate, *cells, style="bold" if total else None, end_section=total)
    return result


def counters_table(runs: Sequence[PolicyRun]) -> Table:
    """Return what happened, per policy and query."""
    result = Table(title="per query")
    result.add_column("policy")
    names = ("decisions", "blocks", "conflicts", "preemptions", "grown", "shrunk", "versions")
    for name in (*names, "rows a batch", "gangs a batch", "in fp32 %", "cores busy %"):
        result.add_column(name, justify="right")
    for run in runs:
        count, counters = len(run.result.outcomes), run.result.counters
        cells = [f"{getattr(counters, name) / count:.3g}" for name in names]
        of_batches = (counters.batch_rows, counters.batch_units) if counters.batches else ()
        cells += [f"{number / counters.batches:.3g}" for number in of_batches] or ["-", "-"]
        either = counters.in_fp32 + counters.in_bf16
        cells.append(f"{100 * counters.in_fp32 / either:.1f}" if either else "-")
        result.add_row(run.policy, *cells, f"{100 * run.core_use:.1f}")
    return result


def processes_table(runs: Sequence[PolicyRun], front_end_us: float) -> Table:
    """Return how many schedulers and front ends the rate of each policy needs, by their processor time."""
    result = Table(title=f"processes needed, each at most {100 * MOST_BUSY:g} % busy")
    result.add_column("policy")
    for name in ("scheduler, us a query", "schedulers needed", "front end, us a query", "front ends needed"):
        result.add_column(name, justify="right")
    for run in runs:
        scheduler_us = run.result.counters.scheduler_us / len(run.result.outcomes)
        needed = (processes_needed(run.rate_per_s * each_us / 1e6) for each_us in (scheduler_us, front_end_us))
        schedulers, front_ends = map(str, needed)
        result.add_row(run.policy, f"{scheduler_us:.0f}", schedulers, f"{front_end_us:.0f}", front_ends)
    return result


def rates_table(runs: Sequence[PolicyRun], percent: float, seeds: int) -> Table:
    """Return the highest rates of each policy: with so many percent in time of all queries, and of each model's."""
    result = Table(title=f"highest rates, modelled, mean of {seeds} seeds ± 95 % interval")
    result.add_column("policy")
    for heading in (f"{percent:g} % of all, per s", f"{percent:g} % of each model, per s"):
        result.add_column(heading, justify="right")
    for run in runs:
        result.add_row(run.policy, *(_rate_text(found) for found in (run.in_all, run.in_each) if found))
    return result


def _rate_text(found: RateEstimate) -> str:
    return f"{found} (at the capacity bound)" if found.limited else str(found)


def write_curves(path: Path, runs: Sequence[PolicyRun]) -> None:
    """Write what `draw` draws. Raises OSError."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("policy", "rate_per_s", "in_time", "least_model"))
        for run in runs:
            writer.writerows(
                (run.policy, f"{p.rate_per_s:.6g}", f"{p.in_time:.5f}", f"{p.least:.5f}") for p in run.curve
            )


def draw(path: Path, runs: Sequence[PolicyRun], title: str) -> None:
    """Draw the shares in time over the rate: of all, and of the worst model. Raises OSError; needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra package

    figure = Figure(figsize=(8, 5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots()
    for index, run in enumerate(runs):
        rates, colour = [point.rate_per_s for point in run.curve], f"C{index % 10}"
        axes.plot(rates, [100 * point.in_time for point in run.curve], "o-", ms=3, color=colour, label=run.policy)
        axes.plot(rates, [100 * point.least for point in run.curve], "--", lw=1, color=colour)
    axes.plot([], [], "--", lw=1, color="grey", label="the model with the least")
    axes.set(xlabel="queries per second", ylabel="in time, % (modelled)", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _cells(row: OutcomeRow, missing: str) -> Sequence[str]:
    share = row.satisfied[TARGET]
    latencies = (row.mean_us, row.p50_us, row.p95_us, row.p99_us)
    errors = " ".join(itertools.chain.from_iterable((name, str(count)) for name, count in row.errors.items()))
    return (
        f"{row.qps:.5g}",
        missing if share is None else f"{100 * share:.2f}",
        *(missing if value is None else f"{value / 1000:.4g}" for value in latencies),
        missing if row.over_isolated is None else f"{row.over_isolated:.3g}",
        errors,
    )


class Recorder(Observer):
    """Writes what it is told to files; a context manager. Raises OSError."""

    def __init__(self, cores: int, timeline: Path | None, decisions: Path | None, title: str) -> None:
        self._timeline = TimelineWriter(timeline, cores, title=title) if timeline else None
        self._file = decisions.open("w", newline="") if decisions else None
        self._rows = csv.writer(self._file) if self._file else None
        if self._rows:
            self._rows.writerow(("time_us", "decision", "query", "end_layer", "cores", "wanted", "versions", "reason"))

    def ran(self, block: SimulatedBlock, begin_layer: int, end_layer: int, begin_us: float, end_us: float) -> None:
        """Write a slice for each core."""
        if self._timeline:
            versions = block.versions[begin_layer - block.begin : end_layer - block.begin]
            number, name, part = block.query.query_id, block.model.name, block.batch_part
            core_slice = Slice(0, begin_us, end_us, number, name, begin_layer, end_layer, 0, 0, versions, part)
            self._timeline.add_block(core_slice, block.cores)

    def decided(self, now_us: float, decision: Decision) -> None:
        """Write a row."""
        if self._rows:
            self._rows.writerow((f"{now_us:.3f}", type(decision).__name__, *_fields(decision)))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timeline:
            self._timeline.close()
        if self._file:
            self._file.close()


def _fields(decision: Decision) -> Sequence[object]:
    match decision:
        case Start(query_id, end_layer, cores, versions, wanted, reason):
            return query_id, end_layer, _text(cores), wanted, _text(versions), reason
        case Stop(query_id, at_once, reason):
            return query_id, "", "", "", "", f"at once {reason}" if at_once else reason
        case Resize(query_id, cores, reason, versions):
            return query_id, "", _text(cores), "", _text(versions or ()), reason
        case Replan(query_id, versions, _, reason):
            return query_id, "", "", "", _text(versions), reason
        case Reject(query_id, reason) | StartOver(query_id, reason):
            return query_id, "", "", "", "", reason
        case Wake(at_us):
            return "", "", "", "", "", f"at {at_us:.3f}"


def _text(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
