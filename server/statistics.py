"""What ModelStatistics answers: counts and times since the model was loaded, as Triton counts them, and ours beside."""

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache

import grpc
from gangway.executor.slots import SlotCounts
from gangway.protos import grpc_service_pb2 as pb

OWN_PREFIX = "gangway_"
OWN_KEYS = ("qos_met", "qos_missed", "refused", "blocks", "conflicts", "preemptions")  # also version_N
MISSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL)


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


class _Duration:
    """How often, and how long altogether."""

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=self.ns)


class _BatchStatistics:
    def __init__(self) -> None:
        self.compute_input = _Duration()
        self.compute_infer = _Duration()
        self.compute_output = _Duration()


class Statistics:
    """Counters of one version of a model. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._success = _Duration()
        self._fail = _Duration()
        self._queue = _Duration()
        self._batches: defaultdict[int, _BatchStatistics] = defaultdict(_BatchStatistics)
        self._last_inference_ms = 0
        self._own: Counter[str] = Counter(dict.fromkeys(OWN_KEYS, 0))

    def succeeded(self, rows: int, times: Times, in_time: bool | None, counts: SlotCounts) -> None:
        """Count a request that was answered; `in_time` None: it had no target.

        Every request is an execution of its own.
        """
        with self._lock:
            self._success.add(times.total)
            self._queue.add(times.queue)
            batch = self._batches[rows]
            batch.compute_input.add(times.compute_input)
            batch.compute_infer.add(times.compute_infer)
            batch.compute_output.add(times.compute_output)
            self._last_inference_ms = time.time_ns() // 1_000_000
            if in_time is not None:
                self._own["qos_met" if in_time else "qos_missed"] += 1
            self._own["blocks"] += counts.blocks
            if counts.conflicts or counts.preemptions:
                self._own["conflicts"] += counts.conflicts
                self._own["preemptions"] += counts.preemptions
            for version in versions_of(counts.versions):
                self._own[f"version_{version}"] += 1

    def failed(self, total_ns: int, code: grpc.StatusCode, had_target: bool) -> None:
        """Count a request that reached the model and was not answered. A client that cancels misses nothing."""
        with self._lock:
            self._fail.add(total_ns)
            self._own["refused"] += code is grpc.StatusCode.UNAVAILABLE
            self._own["qos_missed"] += had_target and code in MISSES

    def totals(self) -> Totals:
        """Return the counters as they are now."""
        with self._lock:
            return Totals(
                answered=self._success.count,
                failed=self._fail.count,
                total_ns=self._success.ns,
                queue_ns=self._queue.ns,
                compute_ns=sum(batch.compute_infer.ns for batch in self._batches.values()),
                own=self._own.copy(),
            )

    def message(self, name: str, version: int) -> pb.ModelStatistics:
        """Return the counters as the protocol has them."""
        with self._lock:
            message = pb.ModelStatistics(
                name=name,
                version=str(version),
                last_inference=self._last_inference_ms,
                inference_count=sum(rows * batch.compute_infer.count for rows, batch in self._batches.items()),
                execution_count=self._success.count,
                inference_stats=pb.InferStatistics(
                    success=self._success.message(), fail=self._fail.message(), queue=self._queue.message()
                ),
            )
            for rows, batch in sorted(self._batches.items()):
                parts = {
                    part: getattr(batch, part).message()
                    for part in ("compute_input", "compute_infer", "compute_output")
                }
                message.batch_stats.add(batch_size=rows, **parts)
            for key, count in self._own.items():
                message.response_stats[OWN_PREFIX + key].success.count = count
        for part in ("compute_input", "compute_infer", "compute_output"):
            whole = getattr(message.inference_stats, part)
            whole.count = sum(getattr(batch, part).count for batch in message.batch_stats)
            whole.ns = sum(getattr(batch, part).ns for batch in message.batch_stats)
        return message
