"""Three times what the machine can do, for a minute: does the server stay useful, does it grow, does it recover?

First the goodput (queries answered within their targets, per second) on a ladder of rates, then the overload and a
light load, then the ladder once more, since a shared machine may be another one by then: the peak is the best rate's
mean. One model has no target: its queries must progress all the same. Targets are multiples of the
isolated latency of onnxruntime on two cores; capacity is 1 / its mean.
"""

import dataclasses
import math
import multiprocessing as mp
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.front_end.transports import ALIGNED, in_region, region_with
from benchmarks.serving.servers import warm_up, write_repository
from gangway.clients.open_loop import OpenLoopRun, drive
from gangway.protos import grpc_service_pb2 as pb
from gangway.workload.arrivals import Arrivals, poisson_for
from gangway.workload.mix import Mix, MixModel, capacity_per_s, read_mix
from gangway.workload.outcomes import Outcomes
from gangway.workload.qos import Qos
from testing.isolated import Reference
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel
from testing.processes import PROC, memory_of
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_profiles, ensure_zoo, onnx_file

PEAK_SHARES = (0.5, 0.7, 0.9, 1.1)
CALM_SHARE = 0.3
GOODPUT_AT_LEAST = 0.9  # of the peak
GROWTH_AT_MOST = 0.02  # of memory, from the second third of the overload to its last: in the first one the queue fills
RECOVERY_S_AT_MOST = 2.0
ALLOWED = {"UNAVAILABLE"}
WINDOW_S = 1.0
IN_TIME_AGAIN = 0.9
PROGRESS_WINDOWS = 6  # in each sixth of the overload some best-effort query must be answered
SAMPLE_S = 2.0  # the kernel looks at all pages for each: a tenth of a second of a core
TIMEOUT_S = 240  # longer than anything should take: nothing ends because the client lost patience
MOST_OUTSTANDING = 100_000


@dataclass(frozen=True)
class Sample:
    """What all processes of a server hold at one moment."""

    memory_bytes: int  # proportional shares of what they share
    descriptors: int
    threads: int = 0
    processes: int = 0


def sample(server: LiveServer) -> Sample:
    """Add up over the server's processes; one that has just ended counts nothing."""
    memory_bytes = descriptors = threads = processes = 0
    for pids in server.pids().values():
        for pid in pids:
            with suppress(OSError):
                memory_bytes += memory_of(pid).pss_bytes
                descriptors += len(list((PROC / str(pid) / "fd").iterdir()))
                threads += len(list((PROC / str(pid) / "task").iterdir()))
                processes += 1
    return Sample(memory_bytes, descriptors, threads, processes)


@contextmanager
def sampling(server: LiveServer) -> Iterator[list[Sample]]:
    """Take samples in a thread while the block lasts."""
    samples: list[Sample] = []
    over = threading.Event()

    def loop() -> None:
        while not over.wait(SAMPLE_S):
            samples.append(sample(server))

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def in_time(outcomes: Outcomes, targets_us: Sequence[float | None]) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return which queries [Q] were answered within the target of their model; those without one never are."""
    limits = np.array([target or 0.0 for target in targets_us])[outcomes.models]
    return outcomes.answered & (outcomes.latency_us <= limits)


def recovery_s(outcomes: Outcomes, targets_us: Sequence[float | None], end_s: float) -> float:
    """Return how long after `end_s` the first second begins whose queries are nearly all in time again."""
    has_target = np.array([target is not None for target in targets_us])[outcomes.models]
    good, times_s = in_time(outcomes, targets_us), outcomes.scheduled_us / 1e6
    for begin_s in np.arange(end_s, times_s.max(initial=end_s), WINDOW_S / 10):
        here = has_target & (times_s >= begin_s) & (times_s < begin_s + WINDOW_S)
        if here.any() and good[here].mean() >= IN_TIME_AGAIN:
            return float(begin_s - end_s)
    return float("inf")


def thirds(samples: Sequence[Sample], figure: str = "memory_bytes") -> list[float]:
    """Return the median of a figure in each third of the time [3]; NaN without samples."""
    sizes = [getattr(one, figure) for one in samples]
    third = max(1, len(sizes) // 3)
    parts = (sizes[:third], sizes[third:][:third], sizes[-third:])
    return [float(np.median(part)) if part else math.nan for part in parts]


def chained(first: Arrivals, seconds: float, then: Arrivals) -> Arrivals:
    """Return the arrivals of one trace, and after so many seconds those of another."""
    times_us = np.concatenate([first.times_us, then.times_us + seconds * 1e6])
    return Arrivals(times_us, np.concatenate([first.models, then.models]))


@dataclass(frozen=True)
class Overload:
    """One server under test, and what it is asked."""

    server: LiveServer
    client: ProcessPoolExecutor
    mix: Mix
    examples: Mapping[str, Example]
    capacity_per_s: float

    @property
    def targets_us(self) -> list[float | None]:
        """By model, in the mix's order; None: best effort."""
        return [model.qos.resolve_us(None) if model.qos else None for model in self.mix.models]

    def drive(self, arrivals: Arrivals) -> OpenLoopRun:
        """Send a trace from a process of its own."""
        requests = {name: self.examples[name].request for name in self.mix.names}
        return self.client.submit(drive, self.server.url, requests, arrivals, TIMEOUT_S, MOST_OUTSTANDING).result()

    def goodput(self, share: float, seconds: float, seed: int) -> float:
        """Return queries in time per second at a share of capacity."""
        run = self.drive(poisson_for(self.mix, share * self.capacity_per_s, seconds, seed))
        return float(in_time(run.outcomes, self.targets_us).sum() / seconds)

    def ladder(self, seconds: float, seed: int) -> list[float]:
        """Return the goodput at each of `PEAK_SHARES`."""
        return [self.goodput(share, seconds, seed) for share in PEAK_SHARES]


@contextmanager
def inputs_in_region(url: str, examples: Mapping[str, Example]) -> Iterator[Mapping[str, Example]]:
    """Let the inputs lie in shared memory; yield examples whose requests say where. For models with one input."""
    contents, placed = b"", {}
    for name, example in examples.items():
        (raw,) = pb.ModelInferRequest.FromString(example.request).raw_input_contents
        placed[name] = dataclasses.replace(example, request=in_region(example.request, ALIGNED + len(contents), 0))
        contents += raw + bytes(-len(raw) % ALIGNED)
    with raw_channel(url) as channel, region_with(channel, contents, len(contents) + 2 * ALIGNED):
        yield placed


def run(report: Report, overload: Overload, times: float, seconds: float, peak_seconds: float, seed: int) -> None:
    """Find the peak, overload, calm down, find the peak again; note what was seen."""
    before = sample(overload.server)
    ladder_before = overload.ladder(peak_seconds, seed)
    capacity = overload.capacity_per_s
    heavy = poisson_for(overload.mix, times * capacity, seconds, seed)
    calm = poisson_for(overload.mix, CALM_SHARE * capacity, 10 + seconds / 6, seed)
    with sampling(overload.server) as samples:
        outcomes = overload.drive(chained(heavy, seconds, calm)).outcomes
    after = sample(overload.server)
    during = outcomes.select(outcomes.scheduled_us < seconds * 1e6)
    report.table("the overload, by model", _rows(overload, during))
    ladder = list(zip(PEAK_SHARES, ladder_before, overload.ladder(peak_seconds, seed), strict=True))
    report.table(
        "goodput below the overload, per s",
        [{"share": share, "before": first, "after": second} for share, first, second in ladder],
    )
    peak = max((first + second) / 2 for _, first, second in ladder)
    report.goal(
        "goodput over its peak", float(in_time(during, overload.targets_us).sum() / seconds / peak), GOODPUT_AT_LEAST
    )
    report.goal("best-effort queries answered, least of six parts", least_progress(overload, during, seconds), 1)
    wrong = {status for status in outcomes.statuses[1:] if status not in ALLOWED}
    report.target(f"kinds of errors but UNAVAILABLE {sorted(wrong)}".removesuffix(" []"), len(wrong), 0)
    first, second, last = thirds(samples[: int(seconds / SAMPLE_S)])
    report.target("growth of memory, second to last third", last / second - 1, GROWTH_AT_MOST)
    report.target(
        "seconds until queries are in time again",
        recovery_s(outcomes, overload.targets_us, seconds),
        RECOVERY_S_AT_MOST,
    )
    report.target("request slots not given back", overload.server.busy_slots(), 0)
    report.target("descriptors more than before", after.descriptors - before.descriptors, 0)
    sizes = {
        "before": before.memory_bytes,
        "first third": first,
        "second": second,
        "last": last,
        "most": max(one.memory_bytes for one in (before, *samples, after)),
        "after": after.memory_bytes,
    }
    report.table("memory of all processes, MB", [{name: size / 1e6 for name, size in sizes.items()}])


def least_progress(overload: Overload, during: Outcomes, seconds: float) -> float:
    """Count the best-effort queries answered in each part of the overload; return the smallest number."""
    best_effort = [index for index, target in enumerate(overload.targets_us) if target is None]
    chosen = during.answered & np.isin(during.models, best_effort)
    ended_s = (during.scheduled_us[chosen] + during.latency_us[chosen]) / 1e6
    return float(np.histogram(ended_s, bins=PROGRESS_WINDOWS, range=(0, seconds))[0].min())


def _rows(overload: Overload, during: Outcomes) -> list[Row]:
    good = in_time(during, overload.targets_us)
    rows: list[Row] = []
    for index, model in enumerate(overload.mix.models):
        mine = during.models == index
        answered = mine & during.answered
        rows.append(
            {
                "model": model.name,
                "target": str(model.qos) if model.qos else "best effort",
                "asked": int(mine.sum()),
                "answered": int(answered.sum()),
                "in time": int((good & mine).sum()),
                "median ms": float(np.median(during.latency_us[answered]) / 1000) if answered.any() else "",
                "refused": int((mine & ~during.answered).sum()),
            }
        )
    return rows


def main() -> int:
    """Run the benchmark; return 1 when a bound is broken."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    add = parser.add_argument
    add("--mix", default="light", help="its models have targets")
    add("--best-effort", default="googlenet", metavar="MODEL", help="has none; as often as the rarest of the mix")
    add("--scheduler", default="gangway", metavar="NAME", help="policy")
    add("--times", type=float, default=3.0, help="the overload, in capacities")
    add("--seconds", type=float, default=60, help="of the overload")
    add("--peak-seconds", type=float, default=20, help="of each rate below it")
    add("--target", type=float, default=3, help="times isolated")
    add("--seed", type=int, default=1)
    add("--shared-memory", action="store_true", help="inputs lie in the client's shared memory: messages are small")
    options = parser.parse_args()
    report = start_report("Overload: goodput, memory, best effort, recovery")
    named = read_mix(options.mix)
    names = [*named.names, options.best_effort]
    repository = ensure_zoo(options.repository, names)
    ensure_profiles(repository, names)
    examples = {name: example_of(name, onnx_file(repository, name)) for name in names}
    isolated_us = Reference(repository, examples).isolated_us(names)
    mix = named.with_qos(Qos(multiple=options.target)).resolve(isolated_us)
    mix = Mix(mix.name, (*mix.models, MixModel(options.best_effort, weight=min(mix.shares)))).resolve()
    with tempfile.TemporaryDirectory() as folder:
        targets_ms = {model.name: model.qos.value if model.qos else None for model in mix.models}
        write_repository(Path(folder), repository, targets_ms)
        with (
            live_server(Path(folder), [f"--scheduler={options.scheduler}"]) as server,
            ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as client,
        ):
            placed = inputs_in_region(server.url, examples) if options.shared_memory else nullcontext(examples)
            with placed as asked:
                warm_up(server.url, asked)
                overload = Overload(server, client, mix, asked, capacity_per_s(mix, isolated_us))
                run(report, overload, options.times, options.seconds, options.peak_seconds, options.seed)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
