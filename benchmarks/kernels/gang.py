"""What a gang costs: turning a page, stopping, growing and shrinking; and what a second rank brings, layer by layer.

Real worker processes on real shared memory; this process is the scheduler. Kernels of exact duration stand in for a
model, so that whatever a layer takes longer is the executor's. With two cores this process shares one with a rank.
"""

import itertools
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.artifact.format import BufferRef, Layer, Manifest, MemorySpace, TargetSpec, TensorSpec, Version
from gangway.artifact.reader import read_manifest
from gangway.artifact.writer import ArtifactWriter
from gangway.executor.launch import available_cores
from gangway.executor.leases import LeaseControl, LeaseSpec, Member
from gangway.executor.messages import LeaseLeft
from gangway.executor.slots import SlotRequest
from gangway.measure.model_runner import LocalExecutor
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import compile_model, ensure_zoo

MODELS = ("resnet50", "mobilenetv2")
KERNELS = Path(__file__).with_name("gang_kernels.c")
HEAP = 1 << 16
PAGES = 4000
BARRIER_US_AT_MOST = 0.3
BOUNDARY_NS_AT_MOST = 50.0
BOUNDARY_REPEATS = 40
OVERHEAD_US_AT_MOST = 20.0
WAIT_S = 20.0
LONG_SPIN_US = 100_000


@dataclass(frozen=True)
class Running:
    """A lease that is being worked on, and the slot of its query."""

    slot: int
    layers: int
    workers: list[int]


class Bench:
    """Runs artifacts on up to two workers; lease 0 only."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor = executor
        self.lease = executor.lease(0)
        self.models: dict[str, tuple[int, Manifest]] = {}

    def load(self, folder: Path) -> None:
        """Load an artifact into every worker."""
        manifest = read_manifest(folder)
        self.models[manifest.key] = (len(self.models), manifest)
        self.executor.load(self.models[manifest.key][0], manifest.key)

    def start(self, key: str, workers: list[int], block_ranks: bytes = b"") -> Running:
        """Start a query of one row whose inputs are what lies in the io segment. `block_ranks`: its plan."""
        model_id, manifest = self.models[key]
        offset, places = HEAP, []
        for tensor in (*manifest.inputs, *manifest.outputs):
            places.append(offset)
            offset += -(-tensor.row_bytes // 4096) * 4096
        count = len(manifest.inputs)
        slot, generation = self.executor.begin(SlotRequest(model_id, 1, tuple(places[:count]), tuple(places[count:])))
        members = (Member(0, slot, generation),)
        layers, wanted = len(manifest.layers), len(workers)
        spec = LeaseSpec(model_id, members, 0, manifest.arena_bytes, 0, layers, wanted=wanted, block_ranks=block_ranks)
        self.executor.start(0, spec, workers)
        return Running(slot, len(manifest.layers), workers)

    def finish(self, running: Running, workers: Sequence[int]) -> list[LeaseLeft]:
        """Abort what is left of a query, wait for these workers, free the slot."""
        self.lease.abort()
        left = self.executor.left(workers, WAIT_S)
        self.release(running)
        return left

    def release(self, running: Running) -> None:
        """Free the query's slot, answered or not."""
        table = self.executor.slots
        table.finish(running.slot, table.entry(running.slot).generation, table.entry(running.slot).status)
        table.release(running.slot)

    def layer_us(self, key: str, workers: list[int], block_ranks: bytes = b"") -> list[float]:
        """Run one query; return the time of each layer."""
        running = self.start(key, workers, block_ranks)
        self.executor.left(workers, WAIT_S)
        self.release(running)
        ends = [self.lease.start_ns(), *self.lease.layer_end_ns(0, running.layers)]
        return [(end - begin) / 1e3 for begin, end in itertools.pairwise(ends)]

    def set_task_us(self, even: float, odd: float) -> None:
        """Say how long the tasks of the kernel `busy` take."""
        struct.pack_into("<2i", self.executor.io.view, HEAP, round(even * 1e3), round(odd * 1e3))


def make_artifact(cache_dir: Path, kernel: str, layers: int, tasks: int) -> str:
    """Write a model of equal layers over one kernel; return its key."""
    key = f"{hash((kernel, layers, tasks)) & (1 << 60) - 1:064x}"
    layer = Layer(
        name="layer",
        operator=kernel,
        shape="",
        arguments=(BufferRef(MemorySpace.INPUT, 0), BufferRef(MemorySpace.OUTPUT, 0)),
        versions=(Version(kernel, tasks, ""),),
        flops=0,
        bytes=0,
        max_ranks=2,
    )
    tensor = TensorSpec("task_ns", "INT32", (2,), 8)
    with ArtifactWriter(cache_dir / key) as writer:
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", KERNELS, "-o", writer.kernels_path], check=True)
        target = TargetSpec("baseline", "x86-64", 4, ())
        manifest = Manifest(key, kernel, False, (tensor,), (tensor,), (layer,) * layers, 64, target, {})
        writer.commit(manifest)
    return key


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which so many percent lie."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def summary(name: str, values: Sequence[float]) -> Row:
    """One row of a table of microseconds."""
    return {
        "": name,
        "p50 us": percentile(values, 50),
        "p90 us": percentile(values, 90),
        "p99 us": percentile(values, 99),
        "n": len(values),
    }


def measure_page_turn(bench: Bench, nothing: str, busy: str, report: Report) -> None:
    """What a layer takes beyond its tasks: claim, count, turn, and the other rank's noticing.

    The target is on tasks of 1 us: of empty ones a rank may do both before the other has noticed the page at all.
    """
    rows: list[Row] = []
    rows.append(summary("1 rank, 2 empty tasks: whole page", _pages(bench, nothing, [0])))
    rows.append(summary("2 ranks, 2 empty tasks: whole page", _pages(bench, nothing, [0, 1])))
    for task_us in (1.0, 10.0, 50.0):
        bench.set_task_us(task_us, task_us)
        pages = [page - task_us for page in _pages(bench, busy, [0, 1])]
        rows.append(summary(f"2 ranks, a task of {task_us:.0f} us each: page minus task", pages))
        if task_us == 1.0:
            report.target("barrier: page turn of 2 ranks, p50 us", percentile(pages, 50), BARRIER_US_AT_MOST)
    report.table("turning a page", rows)


def _pages(bench: Bench, key: str, workers: list[int]) -> list[float]:
    return bench.layer_us(key, workers)[100:]  # the ranks do not begin in the same microsecond


def measure_boundaries(bench: Bench, nothing: str, report: Report, repeats: int) -> None:
    """What the end of a planned block costs: each layer is a block of as many ranks, or none is, by turns."""
    rows: list[Row] = []
    for workers in ([0], [0, 1]):
        ns: tuple[list[float], list[float]] = ([], [])
        for number in range(2 * repeats):
            plan = bytes([len(workers)]) * PAGES if number % 2 else b""
            ns[number % 2].append(1e3 * statistics.fmean(bench.layer_us(nothing, workers, plan)[100:]))
        without, planned = map(statistics.median, ns)
        extra = statistics.median(b - a for a, b in zip(*ns, strict=True))
        rows.append({"ranks": len(workers), "layer ns": without, "planned ns": planned, "boundary ns": extra})
        if len(workers) == 1:
            report.target("end of a planned block, p50 ns", extra, BOUNDARY_NS_AT_MOST)
    report.table(f"layers of 2 empty tasks, means of {PAGES}, medians of {repeats} pairs", rows)


def measure_elasticity(bench: Bench, key: str, state: str, report: Report, repeats: int) -> None:
    """How long after the next layer boundary the last rank has left, or the new rank has joined (0: even before it).

    `asleep`: one rank's task is a fifth of the other's, so it sleeps in the kernel when the page is turned.
    """
    rows: list[Row] = []
    long_us = 300.0
    bench.set_task_us(long_us, long_us / 5 if state == "asleep" else long_us)
    measures: dict[str, Callable[[Bench, str], float]] = {"stop": _stop, "shrink": _shrink}
    for name, measure in measures.items():
        values = [measure(bench, key) for _ in range(repeats)]
        rows.append(summary(f"{name}: after the boundary", values))
        report.target(f"{name}, ranks {state}, after the boundary, p50 us", percentile(values, 50), OVERHEAD_US_AT_MOST)
    decided, boundary = zip(*(_grow(bench, key) for _ in range(repeats)), strict=True)
    rows += [summary("grow: after the decision", decided), summary("grow: after the boundary", boundary)]
    report.target(f"grow, ranks {state}, after the boundary, p50 us", percentile(boundary, 50), OVERHEAD_US_AT_MOST)
    report.table(f"stop, shrink and grow, ranks {state}, layers of {long_us:.0f} us", rows)


def _stop(bench: Bench, key: str) -> float:
    """Last rank out of a stopped gang of 2, after the boundary at which it stopped."""
    running = bench.start(key, [0, 1])
    time.sleep(0.002)
    bench.lease.set_control(LeaseControl.STOP)
    left = bench.executor.left([0, 1], WAIT_S)
    boundary_ns = bench.lease.layer_end_ns(0, bench.lease.progress().next_layer)[-1]
    bench.finish(running, [])
    return (max(one.left_ns for one in left) - boundary_ns) / 1e3


def _shrink(bench: Bench, key: str) -> float:
    """Rank 1 out of a gang of 2, after the first boundary since the request."""
    running = bench.start(key, [0, 1])
    time.sleep(0.002)
    layer = bench.lease.progress().next_layer
    bench.lease.resize(2, 1)
    left = bench.executor.left([1], WAIT_S)[0]
    bench.finish(running, [0])
    ends = [end_ns for end_ns in bench.lease.layer_end_ns(layer, running.layers) if 0 < end_ns <= left.left_ns]
    return (left.left_ns - ends[-1]) / 1e3 if ends else 0.0


def _grow(bench: Bench, key: str) -> tuple[float, float]:
    """Rank 1 in a gang that was rank 0 alone: after the decision to grow, and after the next boundary."""
    running = bench.start(key, [0])
    time.sleep(0.002)
    layer = bench.lease.progress().next_layer
    sent_ns = time.monotonic_ns()
    bench.lease.resize(1, 2)
    bench.executor.join(0, 1, 1)
    time.sleep(0.001)
    left = bench.finish(running, [0, 1])
    ends = (end_ns for end_ns in bench.lease.layer_end_ns(layer, running.layers) if end_ns > sent_ns)
    return (left[1].joined_ns - sent_ns) / 1e3, max(0, left[1].joined_ns - next(ends)) / 1e3


def measure_model(bench: Bench, key: str, report: Report, queries: int) -> None:
    """Per layer and for the whole: the time on one rank and on two, in turns."""
    manifest = bench.models[key][1]
    times: dict[int, list[list[float]]] = {1: [], 2: []}
    for number in range(2 * (queries + 2)):
        ranks = 1 + number % 2
        measured = bench.layer_us(key, list(range(ranks)))
        if number >= 4:
            times[ranks].append(measured)
    one, two = ([statistics.median(column) for column in zip(*times[ranks], strict=True)] for ranks in (1, 2))
    rows: list[Row] = [
        {
            "layer": index,
            "operator": layer.operator,
            "shape": layer.shape,
            "tasks": layer.versions[0].tasks,
            "1 rank us": one[index],
            "2 ranks us": two[index],
            "speed-up": one[index] / two[index],
            "GFLOP/s, 2 ranks": layer.flops / two[index] / 1e3,
        }
        for index, layer in enumerate(manifest.layers)
    ]
    totals = [statistics.median(sum(query) for query in times[ranks]) for ranks in (1, 2)]
    whole: Row = {
        **dict.fromkeys(rows[0], ""),
        "layer": "all",
        "1 rank us": totals[0],
        "2 ranks us": totals[1],
        "speed-up": totals[0] / totals[1],
    }
    report.table(f"{manifest.model_name}: medians of {queries} queries", [*rows, whole])


def main() -> int:
    """Measure and report; 0 if all targets were met."""
    parser = option_parser("What a gang costs, and what a second rank brings.")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="whose speed-up per layer is measured")
    parser.add_argument("--repeats", type=int, default=200, help="of stop, shrink and grow")
    parser.add_argument("--queries", type=int, default=15, help="of each model on each number of ranks")
    options = parser.parse_args()
    cores = available_cores()[:2]
    if len(cores) < 2:
        sys.exit("a gang of two needs two cores")
    report = start_report("gang")
    with tempfile.TemporaryDirectory() as folder:
        cache_dir = Path(folder)
        nothing, busy = (make_artifact(cache_dir, kernel, PAGES, 2) for kernel in ("nothing", "busy"))
        for state, spin_us in (("spinning", LONG_SPIN_US), ("asleep", 20)):
            with LocalExecutor(cache_dir, cores, spin_us=spin_us) as executor:
                bench = Bench(executor)
                for key in (nothing, busy):
                    bench.load(cache_dir / key)
                if state == "asleep":
                    measure_page_turn(bench, nothing, busy, report)
                    measure_boundaries(bench, nothing, report, BOUNDARY_REPEATS)
                measure_elasticity(bench, busy, state, report, options.repeats)
    repository = ensure_zoo(options.repository, options.models)
    for model in options.models:
        artifact = compile_model(repository, model)
        with LocalExecutor(artifact.parent, cores, arena_bytes=1 << 30, io_bytes=1 << 28) as executor:
            bench = Bench(executor)
            bench.load(artifact)
            measure_model(bench, artifact.name, report, options.queries)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
