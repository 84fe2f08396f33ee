"""The result as JSON: docs/reference/perf.md explains every field."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from gangway.artifact.console import Console
from gangway.clients.perf.measure import Goal, Run, Session
from gangway.workload.outcomes import Row
from gangway.workload.search import Found

# Results, printed for people.

LATE_SHARE = 0.05  # of the tightest target: a sender later than that is said
OWN_COLUMNS = ("blocks", "conflicts", "preemptions")


def show_workload(console: Console, session: Session) -> None:
    """Print what will be asked, and what is expected of it."""
    workload = session.workload
    table = _table(f"{session.url}, mix {workload.mix.name}", "model", "share %", "isolated ms")
    for label in workload.targets_us:
        table.add_column(f"target ({label}) ms", justify="right")
    for index, (name, share) in enumerate(zip(workload.mix.names, workload.mix.shares, strict=True)):
        targets = [_ms(targets[index]) for targets in workload.targets_us.values()]
        table.add_row(name, f"{share * 100:.1f}", _ms(workload.isolated_us[name]), *targets)
    console.print(table)
    console.print(f"capacity, one query at a time: {session.capacity_per_s:.4g} queries/s")


def show_run(console: Console, run: Run, session: Session) -> None:
    """Print a run: a row per model and one for all, the server's account, and how well the sender kept time."""
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


def show_probe(console: Console, run: Run, session: Session) -> None:
    """Print a run of a search, in one line."""
    shares = [
        f"{label}: all {_percent(run.summary.total.satisfied[label])} %, least "
        f"{_percent(run.summary.least_satisfied(label))} %"
        for label in session.workload.targets_us
    ]
    rate = _rate(run.rate_per_s or 0.0, session)
    console.print(f"{rate}, {run.summary.total.queries} queries; {'; '.join(shares)}; {_sender(run)}")


def show_found(console: Console, session: Session, goal: Goal, found: Mapping[str, Found]) -> None:
    """Print what a search found."""
    of = "each model's" if goal.each else "all"
    for label, each in found.items():
        if each.rate_per_s:
            text = f"{_rate(each.rate_per_s, session)}, {each.share:.1%}"
            text += " (the highest rate tried)" if each.limited else ""
        else:
            text = f"none, down to {min(probe.rate_per_s for probe in each.probes):.3g}/s"
        console.print(f"highest rate with {goal.share:.0%} of {of} queries within {label}: {text}", style="bold")


def _show_sender(console: Console, run: Run, session: Session) -> None:
    console.print(f"{_sender(run)}; {run.cpu_us:.0f} us of CPU a query")
    targets = [target for each in session.workload.targets_us.values() for target in each if target is not None]
    if targets and run.lag_us is not None and run.lag_us[1] > LATE_SHARE * min(targets):
        console.print("The sender was late by more than 5 % of a target: latencies include that.", style="yellow")


def _sender(run: Run) -> str:
    if run.lag_us is None:
        return "sender late: unknown"
    p50, p99 = run.lag_us
    return f"sender late {p50 / 1000:.2f} ms (p50), {p99 / 1000:.2f} ms (p99)"


def _server_table(run: Run) -> Table:
    own = [name for name in OWN_COLUMNS if any(name in side.own for side in run.server.values())]
    table = _table("the server's account, means per query", "model", "queue ms", "compute ms", *own)
    for name, side in run.server.items():
        counts = [f"{side.own.get(column, 0) / max(side.requests, 1):.2f}" for column in own]
        table.add_row(name, _ms(side.mean_queue_us), _ms(side.mean_compute_us), *counts)
    return table


def _cells(row: Row, labels: list[str]) -> list[str]:
    latencies = [_ms(us) for us in (row.mean_us, row.p50_us, row.p95_us, row.p99_us)]
    over = "-" if row.over_isolated is None else f"{row.over_isolated:.2f}"
    errors = ", ".join(f"{count} {status}" for status, count in row.errors.items()) or "0"
    shares = [_percent(row.satisfied[label]) for label in labels]
    return [row.name, str(row.queries), f"{row.qps:.4g}", *shares, *latencies, over, errors]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    return table


def _rate(rate_per_s: float, session: Session) -> str:
    return f"{rate_per_s:.4g} queries/s ({rate_per_s / session.capacity_per_s:.2f} of capacity)"


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1000:.3g}" if us < 100_000 else f"{us / 1000:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}"


FORMAT_VERSION = 1


def result_of(session: Session, goal: Goal | None, found: Mapping[str, Found], scenario: Mapping[str, Any]) -> Any:
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
        "mix": workload.mix.name,
        "models": models,
        "capacity_per_s": session.capacity_per_s,
        "warm_up_s": session.length.warm_up_s,
        "scenario": dict(scenario),
        "runs": [_run(run) for run in session.runs],
        "goal": None if goal is None else {"share": goal.share, "of": "each" if goal.each else "all"},
        "found": {label: _found(each, session.capacity_per_s) for label, each in found.items()},
    }


def _run(run: Run) -> dict[str, Any]:
    lag_p50_us, lag_p99_us = run.lag_us or (None, None)
    return {
        "rate_per_s": run.rate_per_s,
        "seed": run.seed,
        "seconds": run.load.seconds,
        "models": [_row(row) for row in run.summary.models],
        "total": _row(run.summary.total),
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


def _row(row: Row) -> dict[str, Any]:
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


def _found(found: Found, capacity_per_s: float) -> dict[str, Any]:
    return {
        "rate_per_s": found.rate_per_s,
        "share": found.share,
        "load": found.rate_per_s / capacity_per_s,
        "limited": found.limited,
        "probes": [{"rate_per_s": p.rate_per_s, "attempt": p.attempt, "share": p.share} for p in found.probes],
    }
