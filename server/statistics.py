"""What is counted of a model since it was loaded: as Triton counts it, and ours beside.

ModelStatistics, the metrics and the log are three views of the same counters.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import grpc
from gangway.executor.slots import SlotCounts
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.histogram import TIME_BOUNDS_NS, Histogram

OWN_PREFIX = "gangway_"
VERSION_PREFIX = "version_"
OWN_KEYS = ("qos_met", "qos_missed", "refused", "blocks", "conflicts", "preemptions")  # also version_N
MISSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL)
OTHER_REASON = "OTHER"
_REASONS = {
    grpc.StatusCode.UNAVAILABLE: "REJECTED",
    grpc.StatusCode.CANCELLED: "CANCELED",
    grpc.StatusCode.DEADLINE_EXCEEDED: "CANCELED",  # the client is gone, as after a cancellation
    grpc.StatusCode.INTERNAL: "BACKEND",
}
REASONS = (*dict.fromkeys(_REASONS.values()), OTHER_REASON)  # why requests fail, as Triton names it

ComputePart = Literal["compute_input", "compute_infer", "compute_output"]
COMPUTE_PARTS: tuple[ComputePart, ...] = ("compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class Times:
    """Nanoseconds of one successful request."""

    total: int
    queue: int
    compute_input: int  # checking the request and copying its inputs
    compute_infer: int
    compute_output: int  # copying the outputs and building the response


@dataclass(frozen=True)
class Totals:
    """Everything counted until an instant, or between two. Nanoseconds. `own` has OWN_KEYS and `version_N`."""

    answered: int
    failed: int
    total_ns: int  # of the answered ones, from arrival to answer
    queue_ns: int
    compute_ns: int
    own: Counter[str]

    def since(self, before: "Totals") -> "Totals":
        """Return what was counted after `before`."""
        return Totals(
            self.answered - before.answered,
            self.failed - before.failed,
            self.total_ns - before.total_ns,
            self.queue_ns - before.queue_ns,
            self.compute_ns - before.compute_ns,
            self.own - before.own,
        )


@lru_cache(maxsize=1024)
def versions_of(mask: int) -> tuple[int, ...]:
    """Return the numbers of the bits that are set."""
    return tuple(number for number in range(mask.bit_length()) if mask >> number & 1)


@dataclass(frozen=True)
class Duration:
    """How often, and how long altogether."""

    count: int
    ns: int

    def message(self) -> pb.StatisticDuration:
        """Return it as the protocol has it."""
        return pb.StatisticDuration(count=self.count, ns=self.ns)


class BatchFigures(NamedTuple):
    """The executions of batches of one size."""

    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True)
class Figures:
    """All counters of one version of a model at one instant."""

    success: Duration  # from arrival to answer
    fail: Duration
    failures: Mapping[str, int]  # by REASONS
    queue: Duration
    cache_hit: Duration
    cache_miss: Duration
    batches: Mapping[int, BatchFigures]  # by rows, ascending
    request_counts: tuple[int, ...]  # by TIME_BOUNDS_NS
    queue_counts: tuple[int, ...]
    compute_counts: tuple[int, ...]  # of compute_infer
    response_bounds_ns: tuple[int, ...]
    response_counts: tuple[int, ...]  # by these: from arrival to the first response
    last_inference_ms: int  # since 1970; 0: none
    own: Mapping[str, int]  # OWN_KEYS and `version_N`

    def compute(self, part: ComputePart) -> Duration:
        """Return one part of computing, of batches of all sizes."""
        durations = [getattr(batch, part) for batch in self.batches.values()]
        return Duration(sum(each.count for each in durations), sum(each.ns for each in durations))

    @property
    def executions(self) -> int:
        """How often the model was executed: not for answers out of the cache."""
        return self.compute("compute_infer").count

    @property
    def inferences(self) -> int:
        """Rows in all executions."""
        return sum(rows * batch.compute_infer.count for rows, batch in self.batches.items())

    def message(self, name: str, version: int, memory_bytes: int = 0) -> pb.ModelStatistics:
        """Return it as the protocol has it. `memory_bytes` 0: not known."""
        message = pb.ModelStatistics(
            name=name,
            version=str(version),
            last_inference=self.last_inference_ms,
            inference_count=self.inferences,
            execution_count=self.executions,
            inference_stats=pb.InferStatistics(
                success=self.success.message(),
                fail=self.fail.message(),
                queue=self.queue.message(),
                cache_hit=self.cache_hit.message(),
                cache_miss=self.cache_miss.message(),
                **{part: self.compute(part).message() for part in COMPUTE_PARTS},
            ),
        )
        for rows, batch in self.batches.items():
            message.batch_stats.add(batch_size=rows, **{part: getattr(batch, part).message() for part in COMPUTE_PARTS})
        if memory_bytes:
            message.memory_usage.add(type="CPU", id=0, byte_size=memory_bytes)
        for key, count in self.own.items():
            message.response_stats[OWN_PREFIX + key].success.count = count
        return message


class _Sum:
    """A Duration that grows."""

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def figures(self) -> Duration:
        return Duration(self.count, self.ns)


class _Batches:
    """Executions of batches of one size."""

    def __init__(self) -> None:
        self.compute_input = _Sum()
        self.compute_infer = _Sum()
        self.compute_output = _Sum()

    def figures(self) -> BatchFigures:
        return BatchFigures(self.compute_input.figures(), self.compute_infer.figures(), self.compute_output.figures())


class Statistics:
    """Counters of one version of a model. Safe for threads.

    `response_bounds_ns`: of the histogram of the time to the first response.
    """

    def __init__(self, response_bounds_ns: tuple[int, ...] = TIME_BOUNDS_NS) -> None:
        self._lock = threading.Lock()
        self._success = _Sum()
        self._fail = _Sum()
        self._failures = dict.fromkeys(REASONS, 0)
        self._queue = _Sum()
        self._cache_hit = _Sum()
        self._cache_miss = _Sum()
        self._batches: defaultdict[int, _Batches] = defaultdict(_Batches)
        self._request_times = Histogram(TIME_BOUNDS_NS)
        self._queue_times = Histogram(TIME_BOUNDS_NS)
        self._compute_times = Histogram(TIME_BOUNDS_NS)
        self._response_bounds_ns = response_bounds_ns
        wanted = response_bounds_ns != TIME_BOUNDS_NS
        self._response_times = Histogram(response_bounds_ns) if wanted else None  # None: those of the request
        self._last_inference_ms = 0
        self._own: Counter[str] = Counter(dict.fromkeys(OWN_KEYS, 0))

    def succeeded(self, rows: int, times: Times, in_time: bool | None, counts: SlotCounts) -> None:
        """Count a request that was answered by an execution of its own; `in_time` None: it had no target."""
        with self._lock:
            self._answered(times.total, times.queue, in_time)
            batch = self._batches[rows]
            batch.compute_input.add(times.compute_input)
            batch.compute_infer.add(times.compute_infer)
            batch.compute_output.add(times.compute_output)
            self._compute_times.add(times.compute_infer)
            self._own["blocks"] += counts.blocks
            if counts.conflicts or counts.preemptions:
                self._own["conflicts"] += counts.conflicts
                self._own["preemptions"] += counts.preemptions
            for version in versions_of(counts.versions):
                self._own[f"{VERSION_PREFIX}{version}"] += 1

    def cache_hit(self, total_ns: int, lookup_ns: int, in_time: bool | None) -> None:
        """Count a request whose answer the response cache had: it waited in no queue, and nothing was executed."""
        with self._lock:
            self._answered(total_ns, 0, in_time)
            self._cache_hit.add(lookup_ns)

    def cache_miss(self, ns: int) -> None:
        """Count a request whose answer the cache did not have; `ns` is the time of looking it up and keeping it."""
        with self._lock:
            self._cache_miss.add(ns)

    def failed(self, total_ns: int, code: grpc.StatusCode, had_target: bool) -> None:
        """Count a request that reached the model and was not answered. A client that cancels misses nothing."""
        with self._lock:
            self._fail.add(total_ns)
            self._failures[_REASONS.get(code, OTHER_REASON)] += 1
            self._own["refused"] += code is grpc.StatusCode.UNAVAILABLE
            self._own["qos_missed"] += had_target and code in MISSES

    def totals(self) -> Totals:
        """Return the counters as they are now, as far as the log needs them."""
        with self._lock:
            return Totals(
                answered=self._success.count,
                failed=self._fail.count,
                total_ns=self._success.ns,
                queue_ns=self._queue.ns,
                compute_ns=sum(batch.compute_infer.ns for batch in self._batches.values()),
                own=self._own.copy(),
            )

    def figures(self) -> Figures:
        """Return all counters as they are now."""
        with self._lock:
            return Figures(
                success=self._success.figures(),
                fail=self._fail.figures(),
                failures=self._failures.copy(),
                queue=self._queue.figures(),
                cache_hit=self._cache_hit.figures(),
                cache_miss=self._cache_miss.figures(),
                batches={rows: batch.figures() for rows, batch in sorted(self._batches.items())},
                request_counts=self._request_times.counts,
                queue_counts=self._queue_times.counts,
                compute_counts=self._compute_times.counts,
                response_bounds_ns=self._response_bounds_ns,
                response_counts=(self._response_times or self._request_times).counts,
                last_inference_ms=self._last_inference_ms,
                own=self._own.copy(),
            )

    def message(self, name: str, version: int, memory_bytes: int = 0) -> pb.ModelStatistics:
        """Return the counters as the protocol has them."""
        return self.figures().message(name, version, memory_bytes)

    def _answered(self, total_ns: int, queue_ns: int, in_time: bool | None) -> None:
        self._success.add(total_ns)
        self._queue.add(queue_ns)
        self._request_times.add(total_ns)
        if self._response_times is not None:
            self._response_times.add(total_ns)
        self._queue_times.add(queue_ns)
        self._last_inference_ms = time.time_ns() // 1_000_000
        if in_time is not None:
            self._own["qos_met" if in_time else "qos_missed"] += 1
