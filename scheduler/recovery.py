"""Taking over: what a scheduler does first, whether it is the first one or a predecessor was killed."""

import time

from gangway.executor.control import ControlSegment
from gangway.executor.messages import Ready, unpack
from gangway.executor.slots import SlotStatus
from gangway.scheduler import control as slow
from gangway.scheduler.blame import Blame
from gangway.scheduler.live import LiveScheduler
from gangway.scheduler.packets import PacketSocket
from gangway.scheduler.requests import MAX_ATTEMPTS, RequestBook
from gangway.scheduler.units import Request

# Claims last milliseconds; a worker that is not quiet by then, and had a core, hangs or executes an indivisible query.
# All others would have to wait for that one, so its worker is replaced, too, and the query run again.
QUIET_TIMEOUT_US = 2_000_000.0


def quiesce(control: ControlSegment, supervisor: PacketSocket[slow.ControlMessage]) -> list[int]:
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


def queue_again(book: RequestBook) -> list[Request]:
    """Queue every request that the tables hold, in order of arrival; return them. Nobody may be running one."""
    found = []
    for front_end, table in enumerate(book.tables):
        for entry in table.scan():
            found.append((table.terms(entry.slot).arrival_ns, front_end, entry.slot, entry.sequence))
    requests = []
    for _, front_end, slot, sequence in sorted(found):
        table = book.tables[front_end]
        if table.attempts(slot) >= MAX_ATTEMPTS:
            table.finish(slot, sequence, SlotStatus.UNAVAILABLE)
            continue
        table.requeue(slot, sequence)
        request = book.admit(front_end, slot, sequence)
        if request is not None:
            requests.append(request)
    return requests


def _learn_models(scheduler: LiveScheduler) -> None:
    """Handle what the supervisor sends before Begin."""
    bell = scheduler.control.scheduler_bell
    while True:
        seen = bell.seen()
        match scheduler.supervisor.receive():
            case slow.Begin():
                return
            case slow.LoadModel() as spec:
                scheduler.model_life.load(spec)
            case None:
                bell.wait(seen, 0)
            case other:
                raise ValueError(f"unexpected {other} before Begin")


def _await_quiet(control: ControlSegment, supervisor: PacketSocket[slow.ControlMessage], core: int) -> int:
    bell = control.scheduler_bell
    introduced = _drain(control, core)
    blame: Blame | None = None
    while (pid := control.status(core).pid) and not control.quiet(core):
        now_us = time.monotonic_ns() / 1e3
        if blame is None or blame.pid != pid:
            blame = Blame(pid, QUIET_TIMEOUT_US, now_us)
        elif blame.is_too_much(now_us):
            supervisor.send(slow.WorkerStuck(core, pid))
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
        if isinstance(message, Ready):
            pid = message.pid
    return pid
