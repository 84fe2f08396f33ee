"""The scheduler's process: `python -m gangway.scheduler.process`, started by the supervisor with `SchedulerPlan`."""

import gc

if __name__ == "__main__":
    gc.disable()  # until it serves: imports leave no garbage, and to look for it is a twentieth of their time

import argparse
import contextlib
import logging
import socket
import sys
import time
from pathlib import Path

from gangway.base.blame import Blame
from gangway.base.logs import LogLevels, ProcessLog
from gangway.base.peer import Peer
from gangway.base.process import die_with_parent, use_realtime_priority
from gangway.executor.control import ControlSegment
from gangway.executor.messages import WorkerReady, unpack
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotStatus, SlotTable
from gangway.scheduler import WHY_INTERPRETED, messages
from gangway.scheduler.compiled import CHANGED
from gangway.scheduler.loop import LiveScheduler
from gangway.scheduler.messages import SchedulerPlan
from gangway.scheduler.observability import TraceWriter
from gangway.scheduler.policies.per_node import Nodes
from gangway.scheduler.policies.registry import make_policy
from gangway.scheduler.requests import MAX_ATTEMPTS, Request, RequestTable
from gangway.scheduler.state import SchedulerOptions
from gangway.scheduler.timeline import TimelineWriter

_log = logging.getLogger(__name__)


def parse_plan(argv: list[str] | None = None) -> SchedulerPlan:
    """Read the command line that `start_scheduler` wrote."""
    parser = argparse.ArgumentParser(prog="gangway.scheduler.process")
    descriptors = ("control-fd", "arena-fd", "supervisor-fd")
    for name in (*descriptors, "slots", "spin-us", "way-back-us", "dispatch-us", "log-levels", "models-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--io-fds", type=lambda text: tuple(map(int, text.split(","))), required=True)
    parser.add_argument("--nodes", type=_nodes, required=True)
    for name in ("policy", "trace", "timeline"):
        parser.add_argument(f"--{name}", required=True)
    return SchedulerPlan(**vars(parser.parse_args(argv)))


def _nodes(text: str) -> Nodes:
    return tuple(tuple(map(int, node.split(","))) for node in text.split(";") if node)


# Taking over: what a scheduler does first, whether it is the first one or a predecessor was killed.
#
# Claims last milliseconds; a worker that is not quiet by then, and had a core, hangs or executes an indivisible query.
# All others would have to wait for that one, so its worker is replaced, too, and the query run again.

QUIET_TIMEOUT_US = 2_000_000.0


def quiesce(control: ControlSegment, supervisor: Peer[messages.ControlMessage]) -> list[int]:
    """Abort whatever runs; return the workers' process ids (0: none there) once nobody runs anything any more.

    All rings to the scheduler are empty afterwards.
    """
    control.heartbeats.beat(control.heartbeats.scheduler)
    control.scheduler_bell.take_over()
    for index in range(len(control.leases)):
        control.leases[index].abort()
    pids = [_await_quiet(control, supervisor, core) for core in range(control.layout.workers)]
    for ring in control.submit_rings:
        ring.discard()  # the slot tables say the same and more
    return pids


def take_over(scheduler: LiveScheduler, pids: list[int]) -> int:
    """Learn the models, give them to the workers, queue the requests of the slot tables again; return how many."""
    _learn_models(scheduler)
    for core, pid in enumerate(pids):
        if pid:
            scheduler.worker_ready(core, pid)
    requests = queue_again(scheduler.requests)
    for request in requests:
        scheduler.accept(request)
    return len(requests)


def queue_again(book: RequestTable) -> list[Request]:
    """Queue every request that the tables hold, in order of arrival; return them. Nobody may be running one."""
    found = []
    for front_end, table in enumerate(book.tables):
        for entry in table.scan():
            found.append((table.terms(entry.slot).arrival_ns, front_end, entry.slot, entry.generation))
    requests = []
    for _, front_end, slot, generation in sorted(found):
        table = book.tables[front_end]
        if table.attempts(slot) >= MAX_ATTEMPTS:
            table.finish(slot, generation, SlotStatus.UNAVAILABLE)
            continue
        table.requeue(slot, generation)
        request = book.admit(front_end, slot, generation)
        if request is not None:
            requests.append(request)
    return requests


def _learn_models(scheduler: LiveScheduler) -> None:
    """Handle what the supervisor sends before Begin."""
    bell = scheduler.control.scheduler_bell
    while True:
        seen = bell.seen()
        match scheduler.supervisor.receive():
            case messages.BeginServing():
                return
            case messages.LoadModel() as spec:
                scheduler.lifecycle.load(spec)
            case None:
                bell.wait(seen, 0)
            case other:
                raise ValueError(f"unexpected {other} before Begin")


def _await_quiet(control: ControlSegment, supervisor: Peer[messages.ControlMessage], core: int) -> int:
    bell = control.scheduler_bell
    introduced = _drain(control, core)
    blame: Blame | None = None
    while (pid := control.status(core).pid) and not control.quiet(core):
        now_us = time.monotonic_ns() / 1e3
        if blame is None or blame.pid != pid:
            blame = Blame(pid, QUIET_TIMEOUT_US, now_us)
        elif blame.is_too_much(now_us):
            supervisor.send(messages.WorkerStuck(core, pid))
            blame = None
        control.heartbeats.beat(control.heartbeats.scheduler)
        bell.wait(bell.seen(), 0, timeout_us=1000)
        introduced = _drain(control, core) or introduced
    return _drain(control, core) or introduced or pid


def _drain(control: ControlSegment, core: int) -> int:
    """Read a worker's answers, which nobody waits for any more; return the pid of a Ready among them, else 0."""
    pid = 0
    while (raw := control.completion_rings[core].receive()) is not None:
        message = unpack(raw)
        if isinstance(message, WorkerReady):
            pid = message.pid
    return pid


def serve(plan: SchedulerPlan, log: ProcessLog) -> None:
    """Take over from a predecessor, if there was one, and schedule until the supervisor says Stop."""
    control = ControlSegment.attach(plan.control_fd)
    tables = [SlotTable(Segment.attach(fd), plan.slots) for fd in plan.io_fds]
    end = socket.socket(fileno=plan.supervisor_fd)
    supervisor = messages.control_peer(end)
    pids = quiesce(control, supervisor)
    arenas = Segment.attach(plan.arena_fd)
    with contextlib.ExitStack() as files:
        trace, timeline = _open_files(plan, control.layout.workers, files)
        policy = make_policy(plan.policy, plan.nodes)
        costs = (plan.spin_us, plan.way_back_us, plan.dispatch_us)
        options = SchedulerOptions(*costs, trace, timeline, log.set, nodes=plan.nodes, models_bytes=plan.models_bytes)
        scheduler = LiveScheduler(control, tables, arenas, supervisor, policy, options)
        requests = take_over(scheduler, pids)
        supervisor.send(messages.Recovered(requests))
        gc.freeze()  # what lives now lives on: a collection need not look at it
        gc.enable()
        scheduler.run()


def _open_files(
    plan: SchedulerPlan, workers: int, files: contextlib.ExitStack
) -> tuple[TraceWriter | None, TimelineWriter | None]:
    """Open what the plan names. A file that cannot be written is no reason not to serve."""
    trace, timeline = None, None
    try:
        if plan.trace:
            trace = files.enter_context(TraceWriter(Path(plan.trace)))
        if plan.timeline:
            timeline = files.enter_context(TimelineWriter(Path(plan.timeline), workers))
    except OSError as error:
        _log.error("the trace or timeline of decisions is not written: %s", error)
    return trace, timeline


def _log_how_it_decides() -> None:
    if WHY_INTERPRETED == CHANGED:
        _log.warning("decisions take twice as long, by interpreted modules: %s", WHY_INTERPRETED)
    elif WHY_INTERPRETED:
        _log.info("decisions are made by interpreted modules: %s", WHY_INTERPRETED)
    else:
        _log.info("decisions are made by compiled modules")


def main() -> int:
    """Run the process; 0 after Stop or when the supervisor is gone."""
    die_with_parent()
    use_realtime_priority()
    plan = parse_plan()
    log = ProcessLog(LogLevels.from_number(plan.log_levels))
    _log_how_it_decides()
    try:
        serve(plan, log)
    except EOFError:
        _log.info("the supervisor has ended, so this process ends")
    finally:
        log.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
