"""kill -9, limits, hangs, hostile clients and Python models: who notices, how soon is the service back, what leaks?"""

import math
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from testing.live_server import LiveServer, is_ready, live_server
from testing.load import RIGHT, Load, LoadProcess, Outcome
from testing.processes import memory_of, open_descriptors, shm_names
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

VICTIMS = ("worker", "scheduler", "front end")
REPLACED_TIMEOUT_S = 30
SETTLE_TIMEOUT_S = 10
REQUEST_TIMEOUT_S = 50  # how long the service was away is measured; an answer that never comes is wrong
BACK_WITHIN_S = 1.0
POLL_S = 0.002


@dataclass(frozen=True)
class Kill:
    """One kill -9, CLOCK_MONOTONIC ns; `replaced_ns` is when as many processes of that role stood again."""

    at_ns: int
    replaced_ns: int


@dataclass(frozen=True)
class Resources:
    """What must not grow: processes, their descriptors, names in /dev/shm, used request slots, memory."""

    processes: int
    descriptors: int
    shm_names: int
    busy_slots: int
    memory_mb: float

    def exceed(self, before: "Resources") -> int:
        """Count processes, descriptors, names in /dev/shm and used slots that were not there before."""
        grown = (
            self.processes - before.processes,
            self.descriptors - before.descriptors,
            self.shm_names - before.shm_names,
            self.busy_slots - before.busy_slots,
        )
        return sum(max(0, more) for more in grown)


@dataclass(frozen=True)
class Trial:
    """One role killed repeatedly under load."""

    victim: str
    kills: list[Kill]
    outcomes: list[Outcome]
    before: Resources
    after: Resources

    def outages_s(self) -> list[float]:
        """Return, for each kill, the longest time without a right answer that began before the next kill."""
        right_ns = [outcome.end_ns for outcome in self.outcomes if outcome.result == RIGHT]
        ends_ns = [*(kill.at_ns for kill in self.kills[1:]), self.kills[-1].at_ns + int(BACK_WITHIN_S * 1e9)]
        return [longest_gap_s(right_ns, kill.at_ns, end) for kill, end in zip(self.kills, ends_ns, strict=True)]


def longest_gap_s(right_ns: Sequence[int], begin_ns: int, end_ns: int) -> float:
    """Return the longest time from `begin`, or a right answer before `end`, to the next right answer (inf: none)."""
    marks = [begin_ns, *(ns for ns in right_ns if ns > begin_ns), math.inf]
    return max(later - earlier for earlier, later in pairwise(marks) if earlier < end_ns) / 1e9


def try_kills(
    server: LiveServer, example: Example, victim: str, kills: int, clients: int, pause_s: float, answering: bool = False
) -> Trial:
    """Keep `clients` requests under way and kill a role `kills` times, each time `pause_s` after it was replaced.

    `answering`: after the server answered again.
    """
    load = Load(server.url, example.request, example.outputs, clients, REQUEST_TIMEOUT_S)
    before = resources_of(server)
    with LoadProcess(load) as process:
        time.sleep(pause_s)
        done = [_kill_one(server, victim, number, pause_s, answering) for number in range(kills)]
        time.sleep(max(0.0, BACK_WITHIN_S - pause_s))  # the last kill is given as long as the service may be away
        outcomes = process.stop().outcomes
    after = settled(server, before)
    return Trial(victim, done, outcomes, before, after)


def resources_of(server: LiveServer) -> Resources:
    """Count what the server holds now."""
    pids = [pid for same in server.pids().values() for pid in same]
    memory_bytes = sum(memory_of(pid).pss_bytes for pid in pids)
    names = [name for name in shm_names() if name.startswith(f"gangway.{server.process.pid}.")]
    descriptors = sum(map(open_descriptors, pids))
    return Resources(len(pids), descriptors, len(names), server.busy_slots(), memory_bytes / 1e6)


def settled(server: LiveServer, before: Resources) -> Resources:
    """Return what the server holds when it holds no more than before, or for long: what stays is a leak."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while (after := resources_of(server)).exceed(before) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return after


def _kill_one(server: LiveServer, victim: str, number: int, pause_s: float, answering: bool) -> Kill:
    """Kill one process of a role, each of them in turn, and wait until another stands in its place."""
    pids = server.pids()[victim]
    target = pids[number % len(pids)]
    at_ns = time.monotonic_ns()
    os.kill(target, signal.SIGKILL)
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    while target in (now := server.pids()[victim]) or len(now) < len(pids):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{victim} {target} was not replaced within {REPLACED_TIMEOUT_S} s")
        time.sleep(POLL_S)
    replaced_ns = time.monotonic_ns()
    while answering and not is_ready(server.url):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server does not answer {REPLACED_TIMEOUT_S} s after the death of a {victim}")
    time.sleep(pause_s)
    return Kill(at_ns, replaced_ns)


def outcome_row(trial: Trial) -> Row:
    """Return how the requests ended."""
    counts = Counter(outcome.result for outcome in trial.outcomes)
    right, unavailable = counts.pop(RIGHT, 0), counts.pop("UNAVAILABLE", 0)
    outages, replaced = trial.outages_s(), [(kill.replaced_ns - kill.at_ns) / 1e9 for kill in trial.kills]
    return {
        "killed": trial.victim,
        "times": len(trial.kills),
        "requests right": right,
        "UNAVAILABLE": unavailable,
        "anything else": ", ".join(f"{count} {result}" for result, count in counts.items()) or "none",
        "outage s, median": statistics.median(outages),
        "outage s, worst": max(outages),
        "new process s, median": statistics.median(replaced),
    }


def resource_row(trial: Trial) -> Row:
    """Return what the server held before and after the kills."""
    before, after = trial.before, trial.after
    return {
        "killed": trial.victim,
        "processes": f"{before.processes} -> {after.processes}",
        "descriptors": f"{before.descriptors} -> {after.descriptors}",
        "/dev/shm names": f"{before.shm_names} -> {after.shm_names}",
        "request slots in use": f"{before.busy_slots} -> {after.busy_slots}",
        "memory MB": f"{before.memory_mb:.0f} -> {after.memory_mb:.0f}",
    }


def wrong_answers(trial: Trial) -> int:
    """Count the requests that ended neither with the right answer nor with UNAVAILABLE."""
    return sum(outcome.result not in (RIGHT, "UNAVAILABLE") for outcome in trial.outcomes)


def leaks(trial: Trial) -> int:
    """Count processes, descriptors, names in /dev/shm and used slots that were not there before the kills."""
    return trial.after.exceed(trial.before)


def report_trials(report: Report, trials: Sequence[Trial]) -> None:
    """Print what happened to requests and to the server, and hold both against the targets."""
    report.table("requests", [outcome_row(trial) for trial in trials])
    report.table("what the server holds", [resource_row(trial) for trial in trials])
    for trial in trials:
        report.target(f"{trial.victim} killed: neither right nor UNAVAILABLE", wrong_answers(trial), 0)
        report.target(f"{trial.victim} killed: worst outage, s", max(trial.outages_s()), BACK_WITHIN_S)
        report.target(f"{trial.victim} killed: leaks", leaks(trial), 0)


def run(repository: Path, model: str, victims: Sequence[str], kills: int, clients: int, pause_s: float) -> list[Trial]:
    """Kill each role in turn, on one server."""
    example = example_of(model, onnx_file(repository, model))
    with live_server(repository) as server:
        return [try_kills(server, example, victim, kills, clients, pause_s) for victim in victims]


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--model", default="mobilenetv2", help="model to ask")
    parser.add_argument("--victims", nargs="*", default=list(VICTIMS), choices=VICTIMS, help="roles to kill")
    parser.add_argument(
        "--surroundings",
        nargs="*",
        default=[""],
        metavar="TEXT",
        help="only situations whose names contain one of these",
    )
    parser.add_argument(
        "--python-models",
        nargs="*",
        default=[""],
        metavar="TEXT",
        help="only misdeeds whose names contain one of these",
    )
    parser.add_argument("--kills", type=int, default=20, help="kills of each role, in a row")
    parser.add_argument("--clients", type=int, default=16, help="requests under way at any time")
    parser.add_argument("--pause-s", type=float, default=1.0, help="time between a replacement and the next kill")
    options = parser.parse_args()
    from benchmarks.faults.guards import GUARDED  # noqa: PLC0415 - it imports this module
    from benchmarks.faults.python_models import report_python_models  # noqa: PLC0415 - the same
    from benchmarks.faults.surroundings import SITUATIONS, report_surroundings  # noqa: PLC0415 - the same

    report = start_report("Faults")
    repository = ensure_zoo(options.repository)
    if options.victims:
        trials = run(repository, options.model, options.victims, options.kills, options.clients, options.pause_s)
        report_trials(report, trials)
    report_surroundings(report, repository, (*SITUATIONS, *GUARDED), options.surroundings)
    if options.python_models:
        report_python_models(report, options.python_models)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
