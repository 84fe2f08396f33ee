"""What stopping and growing cost through the live scheduler: from the layer boundary to the next gang's first task.

`benchmarks.kernels.gang` measures the same of the ranks alone. Here a policy decides on snapshots, and the messages
take their whole way: worker, bell, scheduler, decision, Run, worker. Kernels of exact duration stand in for a model.
The scheduler is a thread of this process; with two cores it shares one with a rank.
"""

import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.kernels.gang import OVERHEAD_US_AT_MOST, make_artifact, percentile, summary
from gangway.base.peer import peer_sockets
from gangway.base.process import use_realtime_priority
from gangway.executor.launch import WorkerPlan, available_cores, start_worker
from gangway.executor.leases import Lease
from gangway.scheduler import messages
from gangway.scheduler.loop import LiveScheduler
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policy import Decision, Query, Resize, Snapshot, Start, Stop, Wake
from gangway.scheduler.state import SchedulerOptions
from gangway.scheduler.timeline import Slice, TimelineWriter
from gangway.server.control.supervisor.shared_memory import FRONT_END, SharedMemory
from gangway.server.requests.data_plane import DataPlane, RequestLayout, Scheduling, Submission
from testing.report import Row, option_parser, start_report

LAYERS = 40
LAYER_US = 300.0
WAIT_S = 20.0
MODEL = 1


class Recorder(TimelineWriter):
    """Keeps the slices instead of writing them."""

    def __init__(self) -> None:
        self.slices: list[Slice] = []

    def add(self, core_slice: Slice) -> None:
        """Keep one."""
        self.slices.append(core_slice)

    def of(self, query_id: int) -> list[Slice]:
        """Return what the cores did for a query, in order of leaving."""
        return [core_slice for core_slice in self.slices if core_slice.query_id == query_id]


class Bench(Policy):
    """A scheduler with two workers, and its policy: urgent queries stop others.

    With `grows` gangs begin on one core and get the other one 2 ms later.
    """

    name = "bench"

    def __init__(self, cache_dir: Path, key: str, cores: Sequence[int]) -> None:
        self.memory = memory = SharedMemory.create(len(cores))
        self.recorder = Recorder()
        self.grows = False
        self.decided_us = 0.0  # when the last Stop or Resize was
        self.lease: Lease  # of the gang that grew last
        self.boundary_us = 0.0  # at which a query was stopped
        self._ended = threading.Semaphore(0)
        table = memory.tables[FRONT_END]
        self.plane = DataPlane(
            memory.io[FRONT_END], table, memory.control.submit_rings[FRONT_END], memory.control.scheduler_bell
        )
        ours, theirs = (messages.control_peer(end) for end in peer_sockets())
        self._link, self._theirs = ours, theirs
        fds = (memory.control.segment.fd, memory.arenas.fd, memory.io_fds)
        self._workers = [start_worker(WorkerPlan(i, core, *fds, cache_dir)) for i, core in enumerate(cores)]
        options = SchedulerOptions(timeline=self.recorder)
        self.live = LiveScheduler(memory.control, memory.tables, memory.arenas, theirs, self, options)
        self._thread = threading.Thread(target=self.live.run)
        self._thread.start()
        self._tell(messages.LoadModel(MODEL, "busy", key, LAYERS, 2, 64, 1))
        while not isinstance(ours.receive(), messages.ModelLoaded):
            time.sleep(0.001)

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Most urgent first; who runs makes room for somebody more urgent."""
        for query in snapshot.waiting:
            if query.started:
                self.boundary_us = self._gang(query).position()[2] / 1e3
        waiting = sorted(snapshot.waiting, key=lambda query: query.priority)
        if self.grows and snapshot.running and not waiting and len(snapshot.running[0].cores) == 1:
            self.decided_us = snapshot.now_us
            self.lease = self._gang(snapshot.running[0].query)
            return [Resize(snapshot.running[0].query.query_id, (0, 1))]
        if waiting and len(snapshot.free_cores) == snapshot.core_count:
            cores = (0,) if self.grows else (0, 1)
            return [Start(waiting[0].query_id, LAYERS, cores), Wake(snapshot.now_us + 2050)]
        for block in snapshot.running:
            if waiting and waiting[0].priority < block.query.priority and not block.stopping:
                self.decided_us = snapshot.now_us
                return [Stop(block.query.query_id)]
        return []

    def finished(self, query: Query, now_us: float) -> None:
        """Let the measurement go on."""
        self._ended.release()

    def submit(self, task_us: float, priority: int = 0) -> Submission:
        """Submit a query of two tasks per layer."""
        request = self.plane.open(RequestLayout(MODEL, (8,), (8,)), 1)
        struct.pack_into("<2i", request.inputs[0], 0, round(task_us * 1e3), round(task_us * 1e3))
        request.submit(Scheduling(priority=priority))
        return request

    def finish(self, *requests: Submission) -> None:
        """Wait until these queries are answered and their gangs have left."""
        for request in requests:
            assert request.wait(time.monotonic_ns() + int(WAIT_S * 1e9)) is not None, "no answer"
            request.close()
        for _ in requests:
            self._ended.acquire(timeout=WAIT_S)

    def stop(self) -> None:
        """End scheduler and workers."""
        self._tell(messages.StopScheduler())
        self._thread.join()
        for worker in self._workers:
            worker.wait()
        self._link.close()
        self._theirs.close()

    def _gang(self, query: Query) -> Lease:
        gang = self.live.gangs.of_query(query.query_id)
        assert gang is not None, "a query that has begun has a lease"
        return gang.shared

    def _tell(self, message: messages.ControlMessage) -> None:
        self._link.send(message)
        self.memory.control.scheduler_bell.ring_for_control()


def measure_yield(bench: Bench) -> dict[str, float]:
    """An urgent query comes while another is executed: times in us after the boundary at which that one stops."""
    bench.recorder.slices.clear()
    usual = bench.submit(LAYER_US, priority=1)
    time.sleep(0.003)
    begin_us = time.monotonic_ns() / 1e3
    urgent = bench.submit(LAYER_US / 10)
    bench.finish(urgent, usual)
    victim, other = sorted({core_slice.query_id for core_slice in bench.recorder.slices})
    stopped = bench.recorder.of(victim)[:2]
    joined = [core_slice.begin_us for core_slice in bench.recorder.of(other)]
    boundary_us = bench.boundary_us
    return {
        "decision: after the submission": bench.decided_us - begin_us,
        "yield: last rank out after the boundary": max(core_slice.end_us for core_slice in stopped) - boundary_us,
        "yield: next gang's first rank in after the boundary": min(joined) - boundary_us,
        "yield: next gang's last rank in after the boundary": max(joined) - boundary_us,
    }


def measure_grow(bench: Bench) -> dict[str, float]:
    """A gang of one gets a second core after 2 ms."""
    bench.recorder.slices.clear()
    bench.finish(bench.submit(LAYER_US))
    joined_us = next(core_slice.begin_us for core_slice in bench.recorder.slices if core_slice.rank == 1)
    ends_us = [end_ns / 1e3 for end_ns in bench.lease.layer_end_ns(0, LAYERS)]
    boundary_us = next(end_us for end_us in ends_us if end_us > bench.decided_us)
    return {
        "grow: after the decision": joined_us - bench.decided_us,
        "grow: after the boundary": max(0.0, joined_us - boundary_us),
    }


def _rows(measure: Callable[[Bench], dict[str, float]], bench: Bench, repeats: int) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for number in range(repeats + 5):
        for name, value in measure(bench).items():
            if number >= 5:
                values.setdefault(name, []).append(value)
    return values


def main() -> int:
    """Measure and report; 0 if all targets were met."""
    parser = option_parser("What stopping and growing cost through the live scheduler.")
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    cores = available_cores()[:2]
    if len(cores) < 2:
        sys.exit("a gang of two needs two cores")
    report = start_report("live gang")
    use_realtime_priority()  # as the scheduler's process does
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), make_artifact(Path(folder), "busy", LAYERS, 2), cores)
        try:
            values = _rows(measure_yield, bench, options.repeats)
            bench.grows = True
            values |= _rows(measure_grow, bench, options.repeats)
        finally:
            bench.stop()
    rows: list[Row] = [summary(name, column) for name, column in values.items()]
    report.table(f"through the live scheduler, layers of {LAYER_US:.0f} us", rows)
    for name in ("yield: last rank out after the boundary", "grow: after the boundary"):
        report.target(f"{name}, p50 us", percentile(values[name], 50), OVERHEAD_US_AT_MOST)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
