"""How long small requests take beside bodies of 16 MB: latency of one client alone and then, and the loop's lag."""

import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frontend.models import IDENTITY, PassModel, write_pass_models
from testing.live_server import LiveServer, live_server
from testing.load import Load, LoadProcess, LoadResult, run_for
from testing.reference import Example, example_of
from testing.report import Row, option_parser, start_report
from testing.repository import onnx_file

LARGE = PassModel("large", (4 << 20,), (1,))  # 16 MB in, 4 bytes out
SMALL_PAUSE_S = 0.002  # a client that thinks, so that what it waits for is not its own last request
LARGE_CLIENTS = 2
LAG = "gangway_loop_lag_seconds"
LAG_MS_AT_MOST = 2.0


def share_ms(results: Sequence[LoadResult], share: float) -> float:
    """Return the median over the rounds of a quantile of the latencies."""
    return statistics.median(sorted(found := result.latencies_ms())[int(share * len(found))] for result in results)


def lag_ms(server: LiveServer) -> float:
    """Return by how much the loop was late at most in the last seconds."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return max(float(line.split()[-1]) * 1e3 for line in lines if line.startswith(LAG))


def row(name: str, results: Sequence[LoadResult]) -> Row:
    """Return a line of the table."""
    rights = statistics.median(len(result.latencies_ms()) / result.elapsed_ns * 1e9 for result in results)
    figures = {f"p{100 * share:g} ms": share_ms(results, share) for share in (0.5, 0.99, 0.999)}
    return {"client": name, "requests/s": rights, **figures}


def main() -> int:
    """Measure alone and beside, by turns; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each stretch (5)")
    parser.add_argument("--rounds", type=int, default=3, help="of both stretches (3)")
    options = parser.parse_args()
    report = start_report("small requests beside large ones")
    alone: list[LoadResult] = []
    beside: list[LoadResult] = []
    large: list[LoadResult] = []
    with tempfile.TemporaryDirectory() as folder:
        write_pass_models(Path(folder), (IDENTITY, LARGE))
        examples: dict[str, Example] = {
            model.name: example_of(model.name, onnx_file(Path(folder), model.name)) for model in (IDENTITY, LARGE)
        }
        with live_server(folder) as server:
            small, big = (examples[model.name] for model in (IDENTITY, LARGE))
            few = Load(server.url, small.request, small.outputs, 1, pause_s=SMALL_PAUSE_S)
            many = Load(server.url, big.request, big.outputs, LARGE_CLIENTS, timeout_s=60)
            for _ in range(options.rounds):
                alone.append(run_for(few, options.seconds))
                with LoadProcess(many) as process:
                    beside.append(run_for(few, options.seconds))
                    large.append(process.stop())
            late_ms = lag_ms(server)
    names = f"{len(examples[IDENTITY.name].request)} bytes"
    rows = {f"{names}, alone": alone, f"{names}, beside 16 MB": beside, f"16 MB, {LARGE_CLIENTS} clients": large}
    report.table("latency, medians of the rounds", [row(name, results) for name, results in rows.items()])
    report.target("the loop's largest lag in the last round, ms", late_ms, LAG_MS_AT_MOST)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
