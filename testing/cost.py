"""CPU time per request, by kind of process, while clients keep a server busy: what benchmarks of front ends share."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.load import RIGHT, Load, LoadProcess, Outcome
from testing.processes import cpu_ns
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo

ROLES = ("front end", "scheduler", "supervisor", "worker")
WARM_UP_S = 0.5

Pids = Callable[[], Mapping[str, Sequence[int]]]  # processes by role, as they are now
Run = Callable[[Report, Path, int, float], None]  # report, model repository, rounds, seconds


@dataclass(frozen=True)
class Stretch:
    """Some seconds of load: what the clients saw, and CPU nanoseconds of the server by role of process."""

    outcomes: Sequence[Outcome]
    elapsed_ns: int
    cpu_ns: Mapping[str, int]
    client_us: float  # CPU microseconds per request of the clients' process

    def cpu_us(self, role: str) -> float:
        """Return CPU microseconds per request of one role; 0 if there is no such process."""
        return self.cpu_ns.get(role, 0) / len(self.outcomes) / 1000

    @property
    def all_cpu_us(self) -> float:
        """CPU microseconds per request of all of the server's processes."""
        return sum(self.cpu_ns.values()) / len(self.outcomes) / 1000

    @property
    def requests_per_s(self) -> float:
        """Answers per second."""
        return len(self.outcomes) / self.elapsed_ns * 1e9

    def latency_ms(self, share: float) -> float:
        """Return the latency that this share of the requests does not exceed."""
        ordered = sorted(outcome.end_ns - outcome.begin_ns for outcome in self.outcomes)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] / 1e6


def cpu_by_role(pids: Pids) -> dict[str, int]:
    """Return the CPU nanoseconds that the processes of each role have taken so far."""
    return {role: sum(map(cpu_ns, numbers)) for role, numbers in pids().items()}


def measure_stretch(pids: Pids, load: Load, seconds: float) -> Stretch:
    """Run a load for some time after a warm-up. Raises RuntimeError when an answer is wrong or an error."""
    with LoadProcess(load) as process:
        time.sleep(WARM_UP_S)
        begin_ns, before = time.monotonic_ns(), cpu_by_role(pids)
        time.sleep(seconds)
        end_ns, after = time.monotonic_ns(), cpu_by_role(pids)
        result = process.stop()
    if bad := {outcome.result for outcome in result.outcomes} - {RIGHT}:
        raise RuntimeError(f"{load.url}: answers were {', '.join(bad)}")
    inside = [outcome for outcome in result.outcomes if begin_ns <= outcome.end_ns < end_ns]
    if not inside:
        raise RuntimeError(f"{load.url}: no answer within {seconds} s")
    spent = {role: after[role] - before.get(role, 0) for role in after}
    return Stretch(inside, end_ns - begin_ns, spent, result.client_cpu_ns / len(result.outcomes) / 1000)


def cost_columns(cpu_us: Mapping[str, float], client_us: float) -> Row:
    """Return a table's columns of CPU microseconds per request. Workers' time includes compute."""
    return {"CPU us, serving": sum(cpu_us.values()) - cpu_us["worker"], **cpu_us, "(client)": client_us}


def median_of(stretches: Sequence[Stretch], figure: Callable[[Stretch], float]) -> float:
    """Return the median of a figure over stretches."""
    return statistics.median(map(figure, stretches))


def run_in_rounds(doc: str | None, title: str, run: Run, rounds: int) -> int:
    """Be the main function of a benchmark whose cases take turns; return 1 when a target is missed."""
    parser = option_parser(doc or "")
    add_repository_option(parser)
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of each case, taking turns")
    parser.add_argument("--seconds", type=float, default=2, help="length of each load in a round")
    options = parser.parse_args()
    report = start_report(title)
    run(report, ensure_zoo(options.repository), options.rounds, options.seconds)
    return report.finish(options.json)
