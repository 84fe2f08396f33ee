"""What several front ends bring: requests per second and CPU per request with 1, 2, ... of them.

Each server has the same load: small requests over many connections, so that the kernel shares them out. On a machine
whose cores all compute (the default, and all that there is with two cores) front ends take from each other, from the
scheduler, the workers and this client what they win: no gain is to be expected there.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from testing.live_server import LiveServer, live_server
from testing.load import RIGHT, Load, LoadProcess, run_for
from testing.processes import cpu_ns
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

MODEL = "mlp"
WARM_UP_S = 0.5
ROLES = ("front end", "scheduler", "supervisor", "worker")


@dataclass(frozen=True)
class Stretch:
    """Some seconds of load. `shares`: of the CPU time of all front ends, each one's."""

    requests: int
    elapsed_ns: int
    p99_ms: float
    cpu_ns: dict[str, int]
    shares: list[float]
    client_cpu_ns: int


def measure(server: LiveServer, example: Example, processes: int, clients: int, seconds: float) -> Stretch:
    """Ask from several processes, each of which has a connection. Raises RuntimeError when an answer is not right."""
    load = Load(server.url, example.request, example.outputs, clients)
    with ExitStack() as stack:
        running = [stack.enter_context(LoadProcess(load)) for _ in range(processes)]
        time.sleep(WARM_UP_S)
        before, begin_ns = _cpu(server), time.monotonic_ns()
        time.sleep(seconds)
        after, end_ns = _cpu(server), time.monotonic_ns()
        results = [process.stop() for process in running]
    outcomes = [outcome for result in results for outcome in result.outcomes]
    if bad := {outcome.result for outcome in outcomes} - {RIGHT}:
        raise RuntimeError(f"answers were {', '.join(bad)}")
    inside = [outcome for outcome in outcomes if begin_ns <= outcome.end_ns < end_ns]
    latencies_ms = sorted((outcome.end_ns - outcome.begin_ns) / 1e6 for outcome in inside)
    spent = {role: sum(after[role].values()) - sum(before[role].values()) for role in ROLES}
    each = [after["front end"][pid] - before["front end"].get(pid, 0) for pid in after["front end"]]
    share_of_time = (end_ns - begin_ns) / max(result.elapsed_ns for result in results)
    return Stretch(
        requests=len(inside),
        elapsed_ns=end_ns - begin_ns,
        p99_ms=latencies_ms[len(latencies_ms) * 99 // 100],
        cpu_ns=spent,
        shares=sorted((ns / sum(each) for ns in each), reverse=True),
        client_cpu_ns=int(sum(result.client_cpu_ns for result in results) * share_of_time),
    )


def _cpu(server: LiveServer) -> dict[str, dict[int, int]]:
    return {role: {pid: cpu_ns(pid) for pid in pids} for role, pids in server.pids().items()}


def row_of(front_ends: int, stretches: Sequence[Stretch]) -> Row:
    """Return the medians over the stretches."""

    def per_request_us(role: str) -> float:
        return statistics.median(stretch.cpu_ns[role] / stretch.requests / 1e3 for stretch in stretches)

    middle = stretches[len(stretches) // 2]
    return {
        "front ends": front_ends,
        "requests/s": statistics.median(stretch.requests / stretch.elapsed_ns * 1e9 for stretch in stretches),
        "p99 ms": statistics.median(stretch.p99_ms for stretch in stretches),
        **{f"{role}, CPU us": per_request_us(role) for role in ROLES},
        "(client)": statistics.median(stretch.client_cpu_ns / stretch.requests / 1e3 for stretch in stretches),
        "shares of front ends": " ".join(f"{share:.0%}" for share in middle.shares),
    }


def run(report: Report, repository: Path, counts: Sequence[int], options: "Options") -> None:
    """Measure with each number of front ends; servers take turns, each alone on the machine."""
    example = example_of(MODEL, onnx_file(repository, MODEL))
    found: dict[int, list[Stretch]] = {number: [] for number in counts}
    for _ in range(options.rounds):
        for number in counts:
            with live_server(repository, [f"--front-ends={number}", *options.flags]) as server:
                run_for(Load(server.url, example.request, example.outputs, options.clients), WARM_UP_S)
                stretch = measure(server, example, options.processes, options.clients, options.seconds)
            found[number].append(stretch)
    report.table(
        f"{MODEL}, {options.processes} connections of {options.clients} clients each, medians",
        [row_of(number, stretches) for number, stretches in found.items()],
    )


@dataclass(frozen=True)
class Options:
    """How much load, how long, and further flags of the server."""

    rounds: int
    seconds: float
    processes: int
    clients: int
    flags: tuple[str, ...]


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--front-ends", nargs="+", type=int, default=[1, 2], help="numbers of front ends to compare")
    parser.add_argument("--rounds", type=int, default=3, help="servers of each number")
    parser.add_argument("--seconds", type=float, default=3, help="length of a measurement")
    parser.add_argument("--connections", type=int, default=8, help="client processes, each with a connection")
    parser.add_argument("--clients", type=int, default=4, help="requests under way on each connection")
    parser.add_argument("--cores", default="", help="cores of the workers; the rest is for front ends")
    options = parser.parse_args()
    report = start_report("Several front ends")
    repository = ensure_zoo(options.repository)
    flags = (f"--cores={options.cores}",) if options.cores else ()
    settings = Options(options.rounds, options.seconds, options.connections, options.clients, flags)
    run(report, repository, options.front_ends, settings)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
