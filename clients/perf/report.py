"""What a measurement found: tables for people, JSON, and a picture.

docs/reference/perf.md explains every field of the JSON. The picture has the latencies of a run, and of a search the
shares in time over the rate.
"""

import io
from collections import defaultdict
from collections.abc import Mapping
from operator import itemgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from gangway.base.console import Console, Table
from gangway.clients.perf.measure import LoadRun, PerfGoal, Session
from gangway.workload.outcomes import OutcomeRow
from gangway.workload.search import SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT_VERSION = 1
LATE_SHARE = 0.05  # of the tightest target: a sender later than that is reported
GANGWAY_COLUMNS = ("blocks", "conflicts", "preemptions")
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#00798c", "#8d5524", "#555555")


def show_workload(console: Console, session: Session) -> None:
    """Print the mix, the client, isolated latencies and targets."""
    workload = session.workload
    table = _table(
        f"{session.url}, mix {workload.mix.name}, client {session.client}", "model", "share %", "isolated ms"
    )
    for label in workload.targets_us:
        table.add_column(f"target ({label}) ms", justify="right")
    for index, (name, share) in enumerate(zip(workload.mix.names, workload.mix.shares, strict=True)):
        targets = [_ms(targets[index]) for targets in workload.targets_us.values()]
        table.add_row(name, f"{share * 100:.1f}", _ms(workload.isolated_us[name]), *targets)
    console.print(table)
    console.print(f"sequential rate, one query after the other: {session.capacity_per_s:.4g} queries/s")


def show_run(console: Console, run: LoadRun, session: Session) -> None:
    """Print a run: a row per model and one for all, the server's times, and how late the sender was."""
    rate = "arrivals from a file" if run.rate_per_s is None else _rate(run.rate_per_s, session)
    labels = list(session.workload.targets_us)
    columns = [f"in {label} %" for label in labels]
    latencies = ("mean ms", "p50", "p95", "p99")
    table = _table(f"{rate}, seed {run.seed}", "model", "queries", "QPS", *columns, *latencies, "x isolated", "errors")
    for row in (*run.summary.models, run.summary.total):
        total = row is run.summary.total
        table.add_row(*_cells(row, labels), style="bold" if total else None)
        table.columns[0].justify = "left"
        if row is run.summary.models[-1]:
            table.add_section()
    console.print(table)
    if run.server:
        console.print(_server_table(run))
    for status, message in run.load.messages.items():
        console.print(f"first {status}: {message}")
    _show_sender(console, run, session)


def show_probe(console: Console, run: LoadRun, session: Session) -> None:
    """Print a run of a search, in one line."""
    shares = [
        f"{label}: all {_percent(run.summary.total.satisfied[label])} %, least "
        f"{_percent(run.summary.least_satisfied(label))} %"
        for label in session.workload.targets_us
    ]
    rate = _rate(run.rate_per_s or 0.0, session)
    console.print(f"{rate}, {run.summary.total.queries} queries; {'; '.join(shares)}; {_sender(run)}")


def show_found(console: Console, session: Session, goal: PerfGoal, found: Mapping[str, SearchResult]) -> None:
    """Print what a search found."""
    of = "each model's" if goal.each else "all"
    for label, each in found.items():
        if each.rate_per_s:
            text = f"{_rate(each.rate_per_s, session)}, {each.share:.1%}"
            text += " (the highest rate tried)" if each.limited else ""
        else:
            text = _none_found(session, label, min(probe.rate_per_s for probe in each.probes))
        console.print(f"highest rate with {goal.share:.0%} of {of} queries within {label}: {text}", style="bold")


def _none_found(session: Session, label: str, lowest_per_s: float) -> str:
    """Return what a search says that found nothing: which model misses its target at the lowest rate, by how much."""
    run = next(run for run in session.runs if run.rate_per_s == lowest_per_s)
    rows = zip(run.summary.models, session.workload.targets_us[label], strict=True)
    shares = ((share, row, target_us) for row, target_us in rows if (share := row.satisfied[label]) is not None)
    share, row, target_us = min(shares, key=itemgetter(0))
    return (
        f"none, down to {lowest_per_s:.3g}/s: {row.name} has {share:.1%} there, p95 {_ms(row.p95_us)} ms, target"
        f" {_ms(target_us)} ms; a longer run searches lower"
    )


def show_reached(console: Console, session: Session, goal: PerfGoal) -> None:
    """Print what a search knows that ended early: the highest rate all runs of which have reached the goal."""
    of = "each model's" if goal.each else "all"
    whole = [run for run in session.runs if run.load.ended_by is None and run.rate_per_s]
    for label in session.workload.targets_us:
        shares = [(run.rate_per_s or 0.0, goal.share_of(run.summary, label)) for run in whole]
        failed = {rate for rate, share in shares if share < goal.share}
        reached = [rate for rate, _ in shares if rate not in failed]
        text = f"{_rate(max(reached), session)} so far" if reached else "none so far"
        console.print(f"highest rate with {goal.share:.0%} of {of} queries within {label}: {text}", style="bold")


def _show_sender(console: Console, run: LoadRun, session: Session) -> None:
    console.print(f"{_sender(run)}; client {session.client}: {run.cpu_us:.0f} us of CPU a query")
    targets = [target for each in session.workload.targets_us.values() for target in each if target is not None]
    if targets and run.lag_us is not None and run.lag_us[1] > LATE_SHARE * min(targets):
        console.print("The sender was late by more than 5 % of a target: latencies include that.", style="yellow")


def _sender(run: LoadRun) -> str:
    if run.lag_us is None:
        return "sender late: unknown"
    p50, p99 = run.lag_us
    return f"sender late {p50 / 1000:.2f} ms (p50), {p99 / 1000:.2f} ms (p99)"


def _server_table(run: LoadRun) -> Table:
    own = [name for name in GANGWAY_COLUMNS if any(name in side.own for side in run.server.values())]
    table = _table("the server's account, means per query", "model", "queue ms", "compute ms", *own)
    for name, side in run.server.items():
        counts = [f"{side.own.get(column, 0) / max(side.requests, 1):.2f}" for column in own]
        table.add_row(name, _ms(side.mean_queue_us), _ms(side.mean_compute_us), *counts)
    return table


def _cells(row: OutcomeRow, labels: list[str]) -> list[str]:
    latencies = [_ms(us) for us in (row.mean_us, row.p50_us, row.p95_us, row.p99_us)]
    over = "-" if row.over_isolated is None else f"{row.over_isolated:.2f}"
    errors = ", ".join(f"{count} {status}" for status, count in row.errors.items()) or "0"
    shares = [_percent(row.satisfied[label]) for label in labels]
    return [row.name, str(row.queries), f"{row.qps:.4g}", *shares, *latencies, over, errors]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    return table


def _rate(rate_per_s: float, session: Session) -> str:
    return f"{rate_per_s:.4g} queries/s ({rate_per_s / session.capacity_per_s:.2f} of the sequential rate)"


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1000:.3g}" if us < 100_000 else f"{us / 1000:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}"


def result_of(
    session: Session, goal: PerfGoal | None, found: Mapping[str, SearchResult], scenario: Mapping[str, Any]
) -> Any:
    """Return everything that was measured, as what `json.dump` takes."""
    workload = session.workload
    models = [
        {
            "name": model.name,
            "share": share,
            "isolated_us": workload.isolated_us[model.name],
            "targets_us": {label: targets[index] for label, targets in workload.targets_us.items()},
        }
        for index, (model, share) in enumerate(zip(workload.mix.models, workload.mix.shares, strict=True))
    ]
    return {
        "format_version": FORMAT_VERSION,
        "url": session.url,
        "client": session.client,
        "mix": workload.mix.name,
        "models": models,
        "capacity_per_s": session.capacity_per_s,
        "warm_up_s": session.length.warm_up_s,
        "scenario": dict(scenario),
        "runs": [_run_json(run) for run in session.runs],
        "goal": None if goal is None else {"share": goal.share, "of": "each" if goal.each else "all"},
        "found": {label: _found_json(each, session.capacity_per_s) for label, each in found.items()},
    }


def _run_json(run: LoadRun) -> dict[str, Any]:
    lag_p50_us, lag_p99_us = run.lag_us or (None, None)
    return {
        "rate_per_s": run.rate_per_s,
        "seed": run.seed,
        "seconds": run.load.seconds,
        "models": [_row_json(row) for row in run.summary.models],
        "total": _row_json(run.summary.total),
        "messages": dict(run.load.messages),
        "sender": {"lag_p50_us": lag_p50_us, "lag_p99_us": lag_p99_us, "cpu_us_per_query": run.cpu_us},
        "server": {
            name: {
                "queries": side.requests,
                "mean_queue_us": side.mean_queue_us,
                "mean_compute_us": side.mean_compute_us,
                **side.own,
            }
            for name, side in run.server.items()
        },
    }


def _row_json(row: OutcomeRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "queries": row.queries,
        "qps": row.qps,
        "satisfied": dict(row.satisfied),
        "mean_us": row.mean_us,
        "p50_us": row.p50_us,
        "p95_us": row.p95_us,
        "p99_us": row.p99_us,
        "over_isolated": row.over_isolated,
        "errors": dict(row.errors),
    }


def _found_json(found: SearchResult, capacity_per_s: float) -> dict[str, Any]:
    return {
        "rate_per_s": found.rate_per_s,
        "share": found.share,
        "load": found.rate_per_s / capacity_per_s,
        "limited": found.limited,
        "probes": [{"rate_per_s": p.rate_per_s, "attempt": p.attempt, "share": p.share} for p in found.probes],
    }


def picture_of(session: Session, run: LoadRun, goal: PerfGoal | None) -> bytes:
    """Return a PNG: latencies of this run, and of a search the shares of all. Needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra package

    searched = goal is not None and len(session.runs) > 1
    figure = Figure(figsize=(12 if searched else 7, 4.5), layout="constrained")
    axes = figure.subplots(1, 2 if searched else 1, squeeze=False)[0]
    _draw_latencies(axes[0], run, session)
    if goal is not None and searched:
        _draw_shares(axes[1], session, goal)
    with io.BytesIO() as file:
        figure.savefig(file, dpi=120, format="png")
        return file.getvalue()


def _draw_latencies(axes: "Axes", run: LoadRun, session: Session) -> None:
    """Draw the distribution of each model's latency; dotted lines are targets."""
    for index, name in enumerate(run.outcomes.names):
        chosen = (run.outcomes.models == index) & run.outcomes.answered
        values = np.sort(run.outcomes.latency_us[chosen]) / 1000
        colour = COLOURS[index % len(COLOURS)]
        if values.size:
            axes.step(values, np.arange(1, values.size + 1) / values.size, where="post", color=colour, label=name)
        for targets in session.workload.targets_us.values():
            if (target := targets[index]) is not None:
                axes.axvline(target / 1000, color=colour, linestyle=":", linewidth=1)
    rate = "" if run.rate_per_s is None else f" at {run.rate_per_s:.3g} queries/s"
    axes.set(xscale="log", xlabel="latency from the scheduled arrival, ms", ylabel="share of answers", ylim=(0, 1.01))
    axes.set_title(f"mix {session.workload.mix.name}{rate}, client {session.client}; dotted: targets")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_shares(axes: "Axes", session: Session, goal: PerfGoal) -> None:
    """Draw a dot for each run, and a line through the mean of each rate."""
    by_rate = defaultdict(list)
    for run in session.runs:
        by_rate[run.rate_per_s or 0.0].append(run.summary)
    for index, label in enumerate(session.workload.targets_us):
        shares = {rate: [goal.share_of(summary, label) for summary in by_rate[rate]] for rate in sorted(by_rate)}
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(list(shares), [fmean(each) for each in shares.values()], color=colour, label=label)
        for rate, each in shares.items():
            axes.plot([rate] * len(each), each, "o", color=colour, markersize=4)
    axes.axhline(goal.share, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="rate, queries/s", ylabel="share in time", ylim=(0, 1.02))
    axes.set_title(f"{'the worst model' if goal.each else 'all queries'}; dashed: goal")
    axes.grid(alpha=0.3)
    axes.legend(title="within", fontsize="small")
