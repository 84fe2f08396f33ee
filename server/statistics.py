"""What ModelStatistics answers: counts and times since the model was loaded, as Triton counts them."""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from gangway.protos import grpc_service_pb2 as pb


@dataclass(frozen=True)
class Times:
    """Nanoseconds of one successful request."""

    total: int
    queue: int
    compute_input: int  # checking the request and copying its inputs
    compute_infer: int
    compute_output: int  # copying the outputs and building the response


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

    def succeeded(self, rows: int, times: Times) -> None:
        """Count a request that was answered. Every request is an execution of its own."""
        with self._lock:
            self._success.add(times.total)
            self._queue.add(times.queue)
            batch = self._batches[rows]
            batch.compute_input.add(times.compute_input)
            batch.compute_infer.add(times.compute_infer)
            batch.compute_output.add(times.compute_output)
            self._last_inference_ms = time.time_ns() // 1_000_000

    def failed(self, total_ns: int) -> None:
        """Count a request that reached the model and was not answered."""
        with self._lock:
            self._fail.add(total_ns)

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
        for part in ("compute_input", "compute_infer", "compute_output"):
            whole = getattr(message.inference_stats, part)
            whole.count = sum(getattr(batch, part).count for batch in message.batch_stats)
            whole.ns = sum(getattr(batch, part).ns for batch in message.batch_stats)
        return message
