"""`gangway perf`: load a server with several models, and find the highest rate that it carries."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gangway.base.command_line import CommandParser
from gangway.base.console import Console
from gangway.base.html_page import write_html
from gangway.base.numbers import count, number, positive, share
from gangway.clients.addresses import grpc_address, grpc_url
from gangway.clients.connection import ServerConnection
from gangway.clients.errors import ClientError, InputError, UnreachableError
from gangway.clients.inputs import shape_argument
from gangway.clients.open_loop import CLIENTS, RAW
from gangway.clients.perf.measure import InterruptedRunError, LoadRun, PerfGoal, RunLength, Session
from gangway.clients.perf.prepare import (
    FROM_CONFIG,
    Workload,
    configured_targets,
    even_mix,
    least_targets_us,
    measure_isolated,
    parse_isolated,
    parse_levels,
    prepare_requests,
    ready_models,
    resolve,
)
from gangway.clients.perf.report import (
    picture_of,
    result_of,
    show_found,
    show_probe,
    show_reached,
    show_run,
    show_workload,
)
from gangway.clients.tls import Tls, add_tls_options
from gangway.workload.arrivals import read_trace
from gangway.workload.mix import Mix, parse_mix, read_mix
from gangway.workload.qos import WorkloadError
from gangway.workload.search import SearchResult

DESCRIPTION = (
    "Send requests for several models to a KServe v2 or Triton server over gRPC, at times that do not depend on its"
    " answers, and say how many were answered in time. Latency counts from the scheduled arrival."
)
EPILOG = """exit status: 0 measured, 1 the server refused, 2 wrong argument or file, 3 no server or no answer in time

examples:
  gangway perf
  gangway perf --mix resnet50=3,googlenet=1 --rate 20 --qos 3x,4x,5x
  gangway perf 10.0.0.7:8001 --mix light --search --qos 3x --json light.json
  gangway perf --mix own.toml --trace arrivals.csv"""
WRONG_USAGE = 2
INTERRUPTED = 130
DEFAULT_LOAD = 0.5  # as a share of the capacity


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
    console = Console(record=options.html is not None)
    _check_picture(options)
    mix = None
    if options.mix:
        mix = parse_mix(options.mix) if "=" in options.mix else read_mix(options.mix)
    url, tls = options.target or options.url, Tls.of(options)
    with ServerConnection(url, options.timeout_ms / 1000, tls) as connection:
        left_out: dict[str, str] = {}
        names = mix.names if mix else ready_models(connection)
        requests = prepare_requests(
            connection, names, options.input_data, options.seed, dict(options.shape), None if mix else left_out
        )
        for name, reason in left_out.items():
            print(f"gangway perf: {name} is left out: {reason.removeprefix(f'{name}: ')}", file=sys.stderr)
        mix = mix or even_mix(requests)
        workload = _workload(options, mix, connection, requests, tls)
    length = RunLength(options.seconds, options.queries, options.warmup)
    timeout_s = options.timeout_ms / 1000
    session = Session(
        url, requests, workload, length, options.seed, timeout_s, lambda run: None, tls, client=options.client
    )
    show_workload(console, session)
    goal = PerfGoal(options.goal, options.each) if options.search else None
    try:
        run, found, scenario = _measure(console, options, session, goal)
    except (InterruptedRunError, KeyboardInterrupt):
        if session.runs:
            _show_interrupted(console, options, session, goal)
        else:
            print("gangway perf: interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED
    except UnreachableError:
        if session.runs:
            _show_interrupted(console, options, session, goal)
        raise
    if options.json:
        options.json.write_text(json.dumps(result_of(session, goal, found, scenario), indent=1) + "\n")
    if options.png or options.html:
        picture = picture_of(session, run, goal)
        if options.png:
            options.png.write_bytes(picture)
        if options.html:
            write_html(options.html, f"gangway perf: {mix.name}", console, {"latencies, and shares in time": picture})
    if not any(run.load.outcomes.answered.any() for run in session.runs):
        raise ClientError("no query was answered")
    return 0


def _show_interrupted(console: Console, options: argparse.Namespace, session: Session, goal: PerfGoal | None) -> None:
    """Print, and write, what was measured before the user or the server ended it."""
    last = session.runs[-1]
    if goal is None:
        show_run(console, last, session)
    else:
        show_reached(console, session, goal)
    if last.load.ended_by is not None:
        ended, seconds = len(last.load.outcomes), last.load.seconds
        console.print(f"interrupted after {seconds:.1f} s: {ended} queries had ended, others are not counted")
    if options.json:
        result = result_of(session, goal, {}, {"name": options.scenario, "interrupted": True})
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _measure(
    console: Console, options: argparse.Namespace, session: Session, goal: PerfGoal | None
) -> tuple[LoadRun, Mapping[str, SearchResult], Mapping[str, Any]]:
    """Measure and print; return the printed run, the results of a search, and the scenario as in the JSON."""
    if options.scenario == "mlperf-server":
        return _mlperf(console, options, session)
    scenario = {"name": "poisson" if options.trace is None else "trace"}
    if goal is not None:
        if not any(target is not None for targets in session.workload.targets_us.values() for target in targets):
            raise WorkloadError("--search needs targets: no model has one, so give --qos")
        session.progress = lambda run: show_probe(console, run, session)
        found = session.search(goal, options.step, options.votes, options.rate)
        run = _representative_run(session, found)
        show_run(console, run, session)
        show_found(console, session, goal, found)
        return run, found, scenario
    if options.trace is not None:
        run = session.of_arrivals(read_trace(options.trace, session.workload.mix), None, options.seed)
    else:
        run = session.at_rate(options.rate or DEFAULT_LOAD * session.capacity_per_s)
    show_run(console, run, session)
    return run, {}, scenario


def _representative_run(session: Session, found: Mapping[str, SearchResult]) -> LoadRun:
    """Return the run to print: at the first rate that was found, else the one of the lowest rate."""
    rates = [each.rate_per_s for each in found.values() if each.rate_per_s]
    chosen = [run for run in session.runs if rates and run.rate_per_s == rates[0]]
    return chosen[0] if chosen else min(session.runs, key=lambda run: run.rate_per_s or 0.0)


def _mlperf(
    console: Console, options: argparse.Namespace, session: Session
) -> tuple[LoadRun, Mapping[str, SearchResult], Mapping[str, Any]]:
    try:
        from gangway.clients.perf.mlperf import run_server_scenario  # noqa: PLC0415 - needs an extra package
    except ModuleNotFoundError as error:
        raise InputError(f"--scenario mlperf-server needs {error.name}: pip install 'gangway-serve[perf]'") from error
    run, verdict = run_server_scenario(session, options.rate, options.goal)
    show_run(console, run, session)
    console.print(
        f"MLPerf loadgen, server scenario, client {session.client}: {'VALID' if verdict['valid'] else 'INVALID'}",
        style="bold",
    )
    for line in verdict["summary"]:
        console.print(f"  {line}", highlight=False)
    return run, {}, {"name": "mlperf-server", **verdict}


def _workload(
    options: argparse.Namespace, mix: Mix, connection: ServerConnection, requests: Mapping[str, bytes], tls: Tls | None
) -> Workload:
    least_us: Mapping[str, float] = {}  # given latencies give every server the same targets
    if options.isolated:
        isolated_us = parse_isolated(options.isolated, mix.names)
    else:
        isolated_us = measure_isolated(connection.url, requests, options.timeout_ms / 1000, tls, options.client)
        least_us = least_targets_us(connection, mix.names)
    levels = parse_levels(options.qos) if options.qos and options.qos != FROM_CONFIG else ()
    configured = {} if levels else configured_targets(connection, requests)
    own = mix.with_qos(None) if options.qos == FROM_CONFIG else mix
    return resolve(own, levels, configured, isolated_us, least_us)


def _check_picture(options: argparse.Namespace) -> None:
    """Raise InputError before the measurement if the picture cannot be drawn."""
    if options.png or options.html:
        try:
            import matplotlib  # noqa: F401, PLC0415 - optional dependency
        except ModuleNotFoundError as error:
            raise InputError("--png and --html need matplotlib: pip install 'gangway-serve[perf]'") from error


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; wrong arguments exit with 2. docs/reference/perf.md explains the options at length."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.search and (options.trace or options.scenario != "poisson"):
        parser.error("--search draws Poisson arrivals: it goes with neither --trace nor --scenario")
    if options.trace and (options.rate or options.scenario != "poisson"):
        parser.error("--trace says when requests leave: it goes with neither --rate nor --scenario")
    if options.scenario != "poisson" and not options.rate:
        parser.error(f"--scenario {options.scenario} needs a --rate")
    return options


COMMON = (
    "--url", "--client", "--mix", "--rate", "--trace", "--scenario", "--seconds", "--warmup", "--seed", "--search",
    "--goal", "--qos", "--input-data", "--shape", "--timeout-ms", "--json", "--png", "--ssl",
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    result = CommandParser("gangway perf", description=DESCRIPTION, epilog=EPILOG, common=COMMON)
    result.add_argument(
        "target", type=grpc_address, nargs="?", metavar="HOST:PORT", help="server, another way to say --url"
    )
    result.add_argument("-u", "--url", type=grpc_address, default=grpc_url(), metavar="HOST:PORT",
        help="server (default: %(default)s)")  # fmt: skip
    result.add_argument(
        "--client",
        choices=tuple(CLIENTS),
        default=RAW,
        help="what sends: raw costs little CPU, grpcio what a Python program costs (default: %(default)s)",
    )
    result.add_argument(
        "--mix",
        help="light, medium, heavy or mix; a .toml or .json file; or MODEL=WEIGHT,... (default: all models that are"
        " ready, equally)",
    )
    _add_load(result)
    _add_search(result)
    result.add_argument(
        "--qos", help="targets of all models: 3x (times isolated), 15 (ms), several (3x,4x), or config (the server's)"
    )
    result.add_argument(
        "--isolated", metavar="MODEL=MS,...", help="isolated latencies, or an earlier result.json (default: measured)"
    )
    result.add_argument(
        "--input-data",
        default="random",
        help="random, zero, or a folder with MODEL/INPUT.npy, or MODEL/INPUT for the one element of BYTES",
    )
    result.add_argument("--shape", action="append", type=shape_argument, default=[], metavar="NAME:SIZE,...",
        help="sizes for an input's open dimensions, all but the first, or for a dimension by name: seq:16")  # fmt: skip
    result.add_argument(
        "--timeout-ms", type=positive, default=30_000, metavar="MS", help="of every request (default: %(default)g)"
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    result.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page of tables, picture, command and machine"
    )
    result.add_argument("--png", type=Path, metavar="FILE", help="draw latencies and, of a search, shares in time")
    add_tls_options(result)
    return result


def _add_load(result: argparse.ArgumentParser) -> None:
    load = result.add_argument_group("load")
    load.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help="queries per second; of a search, where it begins (default: half of what one client at a time gets)",
    )
    load.add_argument("--trace", type=Path, metavar="FILE", help="arrivals from a CSV file: time_us, model")
    load.add_argument(
        "--scenario", choices=("poisson", "mlperf-server"), default="poisson", help="who draws the arrivals"
    )
    load.add_argument(
        "--seconds", type=positive, default=10.0, metavar="S", help="length of a run (default: %(default)g)"
    )
    load.add_argument("--queries", type=count, metavar="N", help="length of a run in queries, instead")
    load.add_argument(
        "--warmup", type=_not_negative, default=1.0, metavar="S", help="sent first, not counted (default: %(default)g)"
    )
    load.add_argument("--seed", type=int, default=0, help="of arrivals and inputs (default: %(default)s)")


def _add_search(result: argparse.ArgumentParser) -> None:
    search = result.add_argument_group("search")
    search.add_argument("--search", action="store_true", help="find the highest rate that reaches the goal")
    search.add_argument("--goal", type=share, default=0.95, help="share of queries in time (default: %(default)g)")
    search.add_argument("--each", action="store_true", help="of each model's queries, not of all")
    search.add_argument("--step", type=_step, default=1.05, help="ratio of neighbouring rates (default: %(default)g)")
    search.add_argument(
        "--votes", type=count, default=2, help="runs, each with a seed, that decide on a rate (default: %(default)s)"
    )


def _not_negative(text: str) -> float:
    return number(text, "a number of at least 0", least=0.0)


def _step(text: str) -> float:
    return number(text, "a ratio above 1 and up to 2", above=1.0, most=2.0)
