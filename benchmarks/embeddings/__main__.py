"""Embeddings beside onnxruntime in a FastAPI app: requests a second at the same p99, and CPU of a request, in one run.

The model is a folder as the tutorial on embeddings makes it, `DIR/1/model.onnx` with the files beside it. Servers run
one after the other in each round, with one to sixteen clients that each ask again when they have an answer. Texts are
words of the documents, as many as real queries and passages have: a log-normal number, median 20.
"""

import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.embeddings.clients import ask
from testing.live_server import free_port, live_server, stop
from testing.processes import descendants_of, process_cpu_ns
from testing.report import Report, option_parser, start_report

DOCUMENTS = Path(__file__).parents[2] / "docs"
MEDIAN_WORDS, SPREAD, MOST_WORDS = 20, 0.7, 60
TEXTS = 400
GOAL = 1.5
MODEL = "embedder"
MOST_BUCKETS = 16
BUCKETS = "16,24,32,48,64,96,128"
PEERS = ("plain", "joined")
OURS = ("gangway", "gangway bf16")


class Stretch(NamedTuple):
    """What one server did for so many clients."""

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Running:
    """A server that answers at `port`. `pid`: of its first process."""

    port: int
    pid: int


def texts(seed: int = 1) -> list[str]:
    """Return texts of the documents' words, each of another length."""
    words = [
        word for page in sorted(DOCUMENTS.rglob("*.md")) for word in re.findall(r"[A-Za-z][a-z]+", page.read_text())
    ]
    draw = random.Random(seed)
    found = []
    for _ in range(TEXTS):
        count = min(MOST_WORDS, max(2, round(draw.lognormvariate(math.log(MEDIAN_WORDS), SPREAD))))
        begin = draw.randrange(len(words) - count)
        found.append(" ".join(words[begin : begin + count]))
    return found


@contextmanager
def peer(kind: str, folder: Path, threads: int) -> Iterator[Running]:
    """Run the app until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.embeddings.app", kind, str(folder), f"--port={port}"]
    process = subprocess.Popen([*command, f"--threads={threads}"])
    try:
        wait_for(port)
        yield Running(port, process.pid)
    finally:
        stop(process)


def wait_for(port: int) -> None:
    """Return when somebody listens. Raises TimeoutError."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/docs")
            connection.getresponse()
            return
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    raise TimeoutError(f"nobody listens on port {port}")


@contextmanager
def ours(folder: Path, cache: Path, precision: str, buckets: str) -> Iterator[Running]:
    """Serve the folder until the block ends, compiled for the buckets."""
    with tempfile.TemporaryDirectory() as repository:
        shutil.copytree(folder, Path(repository) / MODEL, ignore=shutil.ignore_patterns("*.safetensors"))
        names = {"precision": precision, "gangway_buckets": f"sequence={buckets}"}
        lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in names.items()]
        (Path(repository) / MODEL / "config.pbtxt").write_text("\n".join(["max_batch_size: 8", *lines]))
        with live_server(repository, [f"--cache-dir={cache}", f"--max-shapes={MOST_BUCKETS}"]) as server:
            yield Running(int(server.http_url.rpartition(":")[2]), server.process.pid)


def measure(running: Running, given: Sequence[str], clients: int, seconds: float) -> Stretch:
    """Have clients ask. Raises RuntimeError if an answer is none."""
    before_ns = _cpu_ns(running.pid)
    seen = ask(running.port, MODEL, given, clients, seconds)
    used_ns = _cpu_ns(running.pid) - before_ns
    if seen.failed or not seen.times_ms:
        raise RuntimeError(f"{seen.failed} of {len(seen.times_ms)} requests failed")
    ordered = sorted(seen.times_ms)
    count = len(ordered)
    share = seen.seconds / (seen.seconds + 0.5)  # of the CPU time: clients begin before it counts
    return Stretch(
        count / seen.seconds,
        ordered[count // 2],
        ordered[min(count - 1, int(count * 0.99))],
        used_ns * share / count / 1e6,
    )


def _cpu_ns(pid: int) -> int:
    """Return what a server's processes have used; one may end meanwhile."""
    total_ns = 0
    for each in (pid, *descendants_of(pid)):
        with suppress(OSError):
            total_ns += process_cpu_ns(each)
    return total_ns


def best_within(points: Sequence[Stretch], limit_ms: float) -> float:
    """Return the most requests a second of the points whose p99 is within the limit; 0 if there is none."""
    return max((each.per_s for each in points if each.p99_ms <= limit_ms), default=0.0)


def add_tables(report: Report, points: dict[str, dict[int, list[Stretch]]]) -> None:
    """Write what was measured: medians of the rounds, and ratios at equal p99."""
    medians: dict[str, dict[int, Stretch]] = {}
    for server, by_clients in points.items():
        medians[server] = {
            clients: Stretch(*(median(values) for values in zip(*stretches, strict=True)))
            for clients, stretches in by_clients.items()
        }
    rows = [
        {"server": server, "clients": clients, "requests/s": round(each.per_s, 1), "p50 ms": round(each.p50_ms, 1),
         "p99 ms": round(each.p99_ms, 1), "CPU ms a request": round(each.cpu_ms, 2)}
        for server, by_clients in medians.items() for clients, each in by_clients.items()
    ]  # fmt: skip
    report.table("Medians of the rounds", rows)
    best_peers = [each for server in PEERS if server in medians for each in medians[server].values()]
    rows = []
    for limit_ms in sorted(each.p99_ms for each in best_peers):
        base = best_within(best_peers, limit_ms)  # at least that point's own
        row: dict[str, float | str] = {"p99 of at most, ms": round(limit_ms, 1), "best app, requests/s": round(base, 1)}
        for server in OURS:
            if server in medians:
                row[server] = round(best_within(list(medians[server].values()), limit_ms) / base, 2)
        rows.append(row)
    report.table("Requests a second, over the better app at the same p99", rows)
    for server in OURS:
        ratios = [row[server] for row in rows if server in row]
        if ratios:
            report.goal(f"requests/s of {server} over the better app", median(map(float, ratios)), GOAL)


def main() -> int:
    """Measure by turns."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("folder", type=Path, help="the model")
    parser.add_argument("--servers", default=",".join((*PEERS, *OURS)), help="which of them")
    parser.add_argument("--clients", default="1,2,4,8,16", help="how many at a time")
    parser.add_argument("--rounds", type=int, default=3, help="how often each server runs")
    parser.add_argument("--seconds", type=float, default=4, help="of each stretch")
    parser.add_argument("--threads", type=int, default=2, help="of onnxruntime in the apps")
    parser.add_argument("--buckets", default=BUCKETS, help="lengths that Gangway pads to")
    parser.add_argument("--cache-dir", type=Path, default=Path("build/embeddings"), help="where compiled models are")
    options = parser.parse_args()
    report = start_report("Embeddings beside a FastAPI app")
    given = texts()
    points: dict[str, dict[int, list[Stretch]]] = {}
    with ExitStack() as stack:
        running: dict[str, Running] = {}
        for server in options.servers.split(","):
            if server in PEERS:
                running[server] = stack.enter_context(peer(server, options.folder, options.threads))
            else:
                precision = "bf16" if server.endswith("bf16") else "fp32"
                running[server] = stack.enter_context(
                    ours(options.folder, options.cache_dir, precision, options.buckets)
                )
        for _ in range(options.rounds):
            for clients in map(int, options.clients.split(",")):
                for server, each in running.items():
                    stretch = measure(each, given, clients, options.seconds)
                    points.setdefault(server, {}).setdefault(clients, []).append(stretch)
                    print(server, clients, *(round(figure, 2) for figure in stretch), file=sys.stderr)
    add_tables(report, points)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
