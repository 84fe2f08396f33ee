"""The result as JSON: docs/perf.md explains every field."""

from collections.abc import Mapping
from typing import Any

from gangway.clients.perf.measure import Goal, Run, Session
from gangway.workload.outcomes import Row
from gangway.workload.search import Found

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
