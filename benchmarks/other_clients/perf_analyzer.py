"""Triton's own load generator against a running server: in every mode that people use, and with its other flags."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.other_clients.perf_analyzer_cases import CASES, Case, models, write_files
from gangway.clients.connection import ServerConnection
from gangway.zoo import DEFAULT_NAMES
from testing.fetch.perf_analyzer import BINARY, fetch, fetch_newest
from testing.live_server import live_server
from testing.perf_analyzer import GRPC, HTTP, MODES, Result, run_one
from testing.report import Report, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo

MODELS = ("mlp", "simple", "mobilenetv2")
CALL_TIMEOUT_S = 10
WORST_RATE = 1 / 3  # how far the rate may be from the one that was asked for, as a share of it


def run_all(
    url: str, models: Sequence[str], modes: Sequence[str], interval_ms: int, metrics_url: str, program: Path
) -> list[Result]:
    """Run every mode on every model, one after the other."""
    runs = [(model, mode) for model in models for mode in modes]
    return [run_one(url, *run, MODES[run[1]], interval_ms, metrics_url, program=program) for run in runs]


def run_cases(urls: Mapping[str, str], names: Sequence[str], interval_ms: int, program: Path) -> list[Result]:
    """Run the cases, one after the other. `urls`: of both protocols."""
    with tempfile.TemporaryDirectory() as name, ServerConnection(urls[GRPC], CALL_TIMEOUT_S) as connection:
        folder = Path(name)
        write_files(folder)
        return [_run_case(connection, urls, folder, name, CASES[name], interval_ms, program) for name in names]


def _run_case(
    connection: ServerConnection,
    urls: Mapping[str, str],
    folder: Path,
    name: str,
    case: Case,
    interval_ms: int,
    program: Path,
) -> Result:
    """Run a case; the server itself must have answered something, and have refused nothing."""
    flags = tuple(flag.format(folder=folder) for flag in case.mode.flags)
    before = _counts(connection, case.model)
    mode = replace(case.mode, flags=flags)
    result = run_one(urls[case.protocol], case.model, name, mode, interval_ms, protocol=case.protocol, program=program)
    answered, failed = (after - b for after, b in zip(_counts(connection, case.model), before, strict=True))
    problem = result.problem
    if not problem and (failed or not answered):
        problem = f"the server counts {answered} answers and {failed} failures"
    if not problem and case.per_s and abs(max(result.requests_per_s) / case.per_s - 1) > WORST_RATE:
        problem = f"{max(result.requests_per_s):.0f} requests/s, {case.per_s:.0f} were asked for"
    return replace(result, problem=problem)


def _counts(connection: ServerConnection, model: str) -> tuple[int, int]:
    """Return how many requests for a model succeeded and failed so far."""
    (statistics,) = connection.model_statistics(model).model_stats
    return statistics.inference_stats.success.count, statistics.inference_stats.fail.count


def report_results(report: Report, title: str, results: Sequence[Result]) -> None:
    """Print a row for each run; the target is that none has a problem."""
    report.table(title, [result.row() for result in results])
    report.target(f"{title}: runs with a problem", sum(bool(result.problem) for result in results), 0)


def main() -> int:
    """Run the benchmark; return 1 when a run has a problem."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--url", metavar="HOST:PORT", help="a server that runs already (default: start one)")
    parser.add_argument("--http-url", default="localhost:8000", metavar="HOST:PORT", help="of that server's HTTP")
    parser.add_argument(
        "--metrics-url", default="localhost:8002/metrics", metavar="URL", help="of that server's metrics"
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="models to ask in each mode")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES), help="modes of perf_analyzer")
    parser.add_argument(
        "--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="NAME", help="calls with other flags"
    )
    parser.add_argument("--interval-ms", type=int, default=500, help="length of a measurement window")
    parser.add_argument("--newest", action="store_true", help="the newest perf_analyzer, not that of tritonclient 2.50")
    options = parser.parse_args()
    report = start_report("perf_analyzer, the real one")
    fetch()
    program = fetch_newest() if options.newest else BINARY

    def run(urls: Mapping[str, str], metrics_url: str) -> None:
        modes = run_all(urls[GRPC], options.models, options.modes, options.interval_ms, metrics_url, program)
        report_results(report, "perf_analyzer over gRPC", modes)
        report_results(report, "its other flags", run_cases(urls, options.cases, options.interval_ms, program))

    if options.url:
        run({GRPC: options.url, HTTP: options.http_url}, options.metrics_url)
    else:
        repository = ensure_zoo(options.repository, sorted({*DEFAULT_NAMES, *models()}))
        with tempfile.TemporaryDirectory() as folder:
            traced = f"--trace-config=triton,file={folder}/traces.json"  # for the cases that ask for traces
            with live_server(repository, [traced]) as server:
                run({GRPC: server.url, HTTP: server.http_url}, server.metrics_url)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
