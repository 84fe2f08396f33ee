"""`gangway perf`: how a server does under the load of several models, and the highest rate that it carries."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gangway.artifact.console import Console
from gangway.clients.connection import ClientError, Connection, InputError, Tls
from gangway.clients.perf.measure import Goal, Length, Run, Session
from gangway.clients.perf.options import parse_options
from gangway.clients.perf.prepare import (
    FROM_CONFIG,
    Workload,
    configured_targets,
    least_targets_us,
    measure_isolated,
    parse_isolated,
    parse_levels,
    prepare_requests,
    resolve,
)
from gangway.clients.perf.results import result_of, show_found, show_probe, show_run, show_workload
from gangway.workload.arrivals import read_trace
from gangway.workload.mix import Mix, parse_mix, read_mix
from gangway.workload.qos import WorkloadError
from gangway.workload.search import Found

WRONG_USAGE = 2


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status. Wrong arguments exit with 2 (argparse)."""
    options = parse_options(argv)
    try:
        return _run(options)
    except (WorkloadError, OSError) as error:  # OSError: a file; those of connections are ClientErrors
        print(f"gangway perf: {error}", file=sys.stderr)
        return WRONG_USAGE
    except ClientError as error:
        print(f"gangway perf: {error}", file=sys.stderr)
        return error.exit_status


def _run(options: argparse.Namespace) -> int:
    console = Console()
    _check_picture(options)
    mix = parse_mix(options.mix) if "=" in options.mix else read_mix(options.mix)
    url, tls = options.target or options.url, Tls.of(options)
    with Connection(url, options.timeout_ms / 1000, tls) as connection:
        requests = prepare_requests(connection, mix.names, options.input_data, options.seed)
        workload = _workload(options, mix, connection, requests, tls)
    length = Length(options.seconds, options.queries, options.warmup)
    session = Session(url, requests, workload, length, options.seed, options.timeout_ms / 1000, lambda run: None, tls)
    show_workload(console, session)
    goal = Goal(options.goal, options.each) if options.search else None
    run, found, scenario = _measure(console, options, session, goal)
    if options.json:
        options.json.write_text(json.dumps(result_of(session, goal, found, scenario), indent=1) + "\n")
    if options.png:
        from gangway.clients.perf.picture import save_picture  # noqa: PLC0415 - needs an extra package

        save_picture(options.png, session, run, goal)
    if not any(run.load.outcomes.answered.any() for run in session.runs):
        raise ClientError("no query was answered")
    return 0


def _measure(
    console: Console, options: argparse.Namespace, session: Session, goal: Goal | None
) -> tuple[Run, Mapping[str, Found], Mapping[str, Any]]:
    """Measure and print what was asked for; return the run shown, what a search found, the scenario as JSON has it."""
    if options.scenario == "mlperf-server":
        return _mlperf(console, options, session)
    scenario = {"name": "poisson" if options.trace is None else "trace"}
    if goal is not None:
        if not any(target is not None for targets in session.workload.targets_us.values() for target in targets):
            raise WorkloadError("--search needs targets: no model has one, so give --qos")
        session.progress = lambda run: show_probe(console, run, session)
        found = session.search(goal, options.step, options.votes, options.rate)
        run = _telling(session, found)
        show_run(console, run, session)
        show_found(console, session, goal, found)
        return run, found, scenario
    if options.trace is not None:
        run = session.of_arrivals(read_trace(options.trace, session.workload.mix), None, options.seed)
    else:
        run = session.at_rate(options.rate)
    show_run(console, run, session)
    return run, {}, scenario


def _telling(session: Session, found: Mapping[str, Found]) -> Run:
    """Return the run worth a table: at the first rate that was found, else the one of the lowest rate."""
    rates = [each.rate_per_s for each in found.values() if each.rate_per_s]
    chosen = [run for run in session.runs if rates and run.rate_per_s == rates[0]]
    return chosen[0] if chosen else min(session.runs, key=lambda run: run.rate_per_s or 0.0)


def _mlperf(
    console: Console, options: argparse.Namespace, session: Session
) -> tuple[Run, Mapping[str, Found], Mapping[str, Any]]:
    try:
        from gangway.clients.perf.mlperf import run_server_scenario  # noqa: PLC0415 - needs an extra package
    except ModuleNotFoundError as error:
        raise InputError(f"--scenario mlperf-server needs {error.name}: pip install 'gangway-serve[perf]'") from error
    run, verdict = run_server_scenario(session, options.rate, options.goal)
    show_run(console, run, session)
    console.print(f"MLPerf loadgen, server scenario: {'VALID' if verdict['valid'] else 'INVALID'}", style="bold")
    for line in verdict["summary"]:
        console.print(f"  {line}", highlight=False)
    return run, {}, {"name": "mlperf-server", **verdict}


def _workload(
    options: argparse.Namespace, mix: Mix, connection: Connection, requests: Mapping[str, bytes], tls: Tls | None
) -> Workload:
    least_us: Mapping[str, float] = {}  # given latencies mean the same targets for every server
    if options.isolated:
        isolated_us = parse_isolated(options.isolated, mix.names)
    else:
        isolated_us = measure_isolated(connection.url, requests, options.timeout_ms / 1000, tls)
        least_us = least_targets_us(connection, mix.names)
    levels = parse_levels(options.qos) if options.qos and options.qos != FROM_CONFIG else ()
    configured = {} if levels else configured_targets(connection, requests, not options.isolated)
    own = mix.with_qos(None) if options.qos == FROM_CONFIG else mix
    return resolve(own, levels, configured, isolated_us, least_us)


def _check_picture(options: argparse.Namespace) -> None:
    """Say before the measurement, not after it, that the picture cannot be drawn."""
    if options.png:
        try:
            import matplotlib  # noqa: F401, PLC0415 - optional dependency
        except ModuleNotFoundError as error:
            raise InputError("--png needs matplotlib: pip install 'gangway-serve[perf]'") from error
