"""How long it takes until the server answers, and how much memory it then holds."""

import mmap
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gangway.artifact.format import WEIGHTS_FILE
from gangway.zoo import DEFAULT_NAMES
from testing.live_server import LiveServer, live_server
from testing.load import Load, run_for
from testing.processes import file_mappings, memory_of
from testing.reference import example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import COMPILE_TIMEOUT_S, GANGWAY, ensure_zoo, onnx_file

COLD_COMPILE_S = {"resnet50": 12.0, "mobilenetv2": 12.0}
CACHED_COMPILE_S = 0.5
WARM_READY_S = 3.0
WORKER_PRIVATE_MB = 40.0
WARM_UP_S = 1.0


def time_compile(repository: Path, model: str, cache: Path) -> float:
    """Return seconds of one `gangway compile`, the start of Python included."""
    begin = time.monotonic()
    command = [*GANGWAY, "compile", str(repository / model), "--cache-dir", str(cache)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=COMPILE_TIMEOUT_S)
    return time.monotonic() - begin


def compile_row(repository: Path, model: str, cache: Path) -> Row:
    """Compile a model into an empty cache, then again from that cache."""
    return {
        "model": model,
        "cold s": time_compile(repository, model, cache),
        "from cache s": time_compile(repository, model, cache),
    }


def memory_rows(server: LiveServer) -> list[Row]:
    """Return the memory of every process. Pages of weights that one worker alone has touched are not private to it."""
    return [
        {
            "process": role,
            "pid": pid,
            "private MB": (memory_of(pid).private_bytes - _weights_only_here(pid)) / 1e6,
            "proportional MB": memory_of(pid).pss_bytes / 1e6,
        }
        for role, pids in server.pids().items()
        for pid in pids
    ]


def _weights_only_here(pid: int) -> int:
    return sum(mapping.only_here_bytes for mapping in file_mappings(pid, WEIGHTS_FILE))


def weight_rows(server: LiveServer) -> list[Row]:
    """Return, for each mapped weights.bin, its size in pages, what all workers together are charged, and copied pages.

    Where the machine holds the weights once, the proportional shares add up to no more than the file's size.
    """
    mappings = [mapping for pid in server.pids()["worker"] for mapping in file_mappings(pid, WEIGHTS_FILE)]
    rows: list[Row] = []
    for path in sorted({mapping.path for mapping in mappings}):
        same = [mapping for mapping in mappings if mapping.path == path]
        rows.append(
            {
                "weights": Path(path).parent.name[:12],
                "mapped by": len(same),
                "file MB": _whole_pages(Path(path).stat().st_size) / 1e6,
                "resident in each MB": max(mapping.rss_bytes for mapping in same) / 1e6,
                "all shares together MB": sum(mapping.pss_bytes for mapping in same) / 1e6,
                "copied MB": sum(mapping.copied_bytes for mapping in same) / 1e6,
            }
        )
    return rows


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def run(report: Report, repository: Path) -> None:
    """Compile cold and warm, serve from the warm cache, and weigh the processes after every model has run."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        compiled = [compile_row(repository, model, cache) for model in DEFAULT_NAMES]
        report.table("compile", compiled)
        with live_server(repository, [f"--cache-dir={cache}"]) as server:
            for model in DEFAULT_NAMES:
                example = example_of(model, onnx_file(repository, model))
                run_for(Load(server.url, example.request, example.outputs, clients=4), WARM_UP_S)
            processes, weights = memory_rows(server), weight_rows(server)
    report.table("gangway serve", [{"cache": "warm", "seconds to ServerReady": server.ready_after_s}])
    report.table("memory after load on every model", processes)
    report.table("weights", weights)
    _add_targets(report, compiled, server.ready_after_s, processes, weights)


def _add_targets(
    report: Report, compiled: list[Row], ready_after_s: float, processes: list[Row], weights: list[Row]
) -> None:
    for row in compiled:
        if row["model"] in COLD_COMPILE_S:
            report.target(f"{row['model']}: compile, cold, s", float(row["cold s"]), COLD_COMPILE_S[str(row["model"])])
        report.target(f"{row['model']}: compile, from cache, s", float(row["from cache s"]), CACHED_COMPILE_S)
    report.target("server ready from a warm cache, s", ready_after_s, WARM_READY_S)
    private_mb = [float(row["private MB"]) for row in processes if row["process"] == "worker"]
    report.target("private memory of the largest worker, MB", max(private_mb, default=float("nan")), WORKER_PRIVATE_MB)
    copies = [float(row["all shares together MB"]) / float(row["file MB"]) for row in weights]
    report.target("copies of weights in the machine", max(copies, default=float("nan")), 1.01)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    options = parser.parse_args()
    report = start_report("Startup and memory")
    run(report, ensure_zoo(options.repository))
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
