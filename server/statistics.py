"""What is counted of a model since it was loaded: as Triton counts it, and ours beside.

ModelStatistics, the metrics and the log are three views of the same counters. They lie in shared memory
(`counting/layout.py`), so that they outlive the front end that counts and add up over several.
"""

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import grpc

from gangway.executor.slots import SlotCounts
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.counting.figures import OWN_KEYS, REASONS, Figures, Totals, figures_of
from gangway.server.counting.layout import (
    BATCH_ROWS,
    BATCHES,
    CACHE_HIT,
    CACHE_MISS,
    COMPUTE,
    COMPUTE_TIMES,
    EXECUTIONS,
    FAIL,
    FAILURES,
    INFERENCES,
    MAX_BATCHES,
    OTHER_BATCHES,
    OWN,
    QUEUE,
    QUEUE_TIMES,
    REQUEST_TIMES,
    RESPONSE_TIMES,
    ROWS,
    SUCCESS,
    VERSION_COUNT,
    VERSIONS,
    batch_offset,
)
from gangway.server.counting.row import Row, batches_in
from gangway.server.histogram import ROW_BOUNDS, TIME_BOUNDS_NS

MISSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL)
_REASONS = {
    grpc.StatusCode.UNAVAILABLE: "REJECTED",
    grpc.StatusCode.CANCELLED: "CANCELED",
    grpc.StatusCode.DEADLINE_EXCEEDED: "CANCELED",  # the client is gone, as after a cancellation
    grpc.StatusCode.INTERNAL: "BACKEND",
}
_FAILURE_OF = {code: FAILURES + REASONS.index(reason) for code, reason in _REASONS.items()}
_OTHER_FAILURE = FAILURES + REASONS.index("OTHER")
_QOS_MET, _QOS_MISSED, _REFUSED, _BLOCKS, _CONFLICTS, _PREEMPTIONS = range(OWN, OWN + len(OWN_KEYS))
_STATIC_VERSION = 1  # the mask of requests that used no other one


class Times(NamedTuple):
    """Nanoseconds of one successful request."""

    total: int
    queue: int
    compute_input: int  # checking the request and copying its inputs
    compute_infer: int
    compute_output: int  # copying the outputs and building the response


@lru_cache(maxsize=1024)
def versions_of(mask: int) -> tuple[int, ...]:
    """Return the numbers of the bits that are set."""
    return tuple(number for number in range(mask.bit_length()) if mask >> number & 1)


class Statistics:
    """Counters of one version of a model. Safe for threads: a request is counted by one call, which nothing interrupts.

    `response_bounds_ns`: of the histogram of the time to the first response. `own` is where this process counts (None:
    in memory of its own), `others` is what other front ends count of the same model.
    """

    def __init__(
        self,
        response_bounds_ns: tuple[int, ...] = TIME_BOUNDS_NS,
        own: Row | None = None,
        others: Sequence[Row] = (),
    ) -> None:
        self._row = own or Row.private()
        self._rows = (self._row, *others)
        self._add = self._row.add
        self._response_bounds_ns = response_bounds_ns
        self.least_met_us = math.inf  # the shortest target that a request has met, as this process knows
        self._lock = threading.Lock()  # of what follows
        places = {rows: batch_offset(place) for place, rows in enumerate(batches_in(self._row.read()))}
        self._batches = {rows: (place, _row_bucket(rows)) for rows, place in places.items()}

    def succeeded(
        self,
        rows: int,
        times: Times,
        in_time: bool | None,
        counts: SlotCounts,
        batch_rows: int = 0,
        leads: bool = True,
    ) -> None:
        """Count a request that was answered by an execution; `in_time` None: it had no target.

        `batch_rows`: rows of the batch that it was executed in; 0: its own. `leads`: it stands for its batch, so that
        an execution is counted once, whatever number of requests it answers.
        """
        batch_rows = batch_rows or rows
        batch, row_bucket = self._batches.get(batch_rows) or self._batch_of(batch_rows)
        total_ns, queue_ns, infer_ns = times.total, times.queue, times.compute_infer
        input_ns, output_ns = times.compute_input, times.compute_output
        request_bucket = bisect_left(TIME_BOUNDS_NS, total_ns)
        versions = counts.versions
        self._add(
            time.time_ns() // 1_000_000,
            SUCCESS, 1, SUCCESS + 1, total_ns, REQUEST_TIMES + request_bucket, 1,
            RESPONSE_TIMES + self._response_bucket(request_bucket, total_ns), 1,
            QUEUE, 1, QUEUE + 1, queue_ns, QUEUE_TIMES + bisect_left(TIME_BOUNDS_NS, queue_ns), 1,
            EXECUTIONS, leads, INFERENCES, rows, BATCH_ROWS, batch_rows * leads, row_bucket, leads,
            COMPUTE, input_ns, COMPUTE + 1, infer_ns, COMPUTE + 2, output_ns,
            COMPUTE_TIMES + bisect_left(TIME_BOUNDS_NS, infer_ns), 1,
            batch + 1, leads, batch + 2, input_ns, batch + 3, infer_ns * leads, batch + 4, output_ns,
            _BLOCKS, counts.blocks, _CONFLICTS, counts.conflicts, _PREEMPTIONS, counts.preemptions,
            VERSIONS, versions & _STATIC_VERSION, _QOS_MET, in_time is True, _QOS_MISSED, in_time is False,
        )  # fmt: skip
        if versions > _STATIC_VERSION:
            for version in versions_of(versions & ~_STATIC_VERSION):
                if version < VERSION_COUNT:
                    self._add(0, VERSIONS + version, 1)

    def cache_hit(self, total_ns: int, lookup_ns: int, in_time: bool | None) -> None:
        """Count a request whose answer the response cache had: it waited in no queue, and nothing was executed."""
        request_bucket = bisect_left(TIME_BOUNDS_NS, total_ns)
        self._add(
            time.time_ns() // 1_000_000,
            SUCCESS, 1, SUCCESS + 1, total_ns, REQUEST_TIMES + request_bucket, 1,
            RESPONSE_TIMES + self._response_bucket(request_bucket, total_ns), 1,
            QUEUE, 1, QUEUE_TIMES, 1, CACHE_HIT, 1, CACHE_HIT + 1, lookup_ns,
            _QOS_MET, in_time is True, _QOS_MISSED, in_time is False,
        )  # fmt: skip

    def cache_miss(self, ns: int) -> None:
        """Count a request whose answer the cache did not have; `ns` is the time of looking it up and keeping it."""
        self._add(0, CACHE_MISS, 1, CACHE_MISS + 1, ns)

    def failed(self, total_ns: int, code: grpc.StatusCode, had_target: bool) -> None:
        """Count a request that reached the model and was not answered. A client that cancels misses nothing."""
        self._add(
            0,
            FAIL, 1, FAIL + 1, total_ns, _FAILURE_OF.get(code, _OTHER_FAILURE), 1,
            _REFUSED, code is grpc.StatusCode.UNAVAILABLE, _QOS_MISSED, had_target and code in MISSES,
        )  # fmt: skip

    def totals(self) -> Totals:
        """Return the counters as they are now, as far as the log needs them."""
        return Totals.of(self.figures())

    def figures(self) -> Figures:
        """Return all counters as they are now, those of all front ends together."""
        return figures_of([row.read() for row in self._rows], self._response_bounds_ns)

    def message(self, name: str, version: int, memory_bytes: int = 0) -> pb.ModelStatistics:
        """Return the counters as the protocol has them."""
        return self.figures().message(name, version, memory_bytes)

    def _response_bucket(self, request_bucket: int, total_ns: int) -> int:
        bounds_ns = self._response_bounds_ns
        return request_bucket if bounds_ns is TIME_BOUNDS_NS else bisect_left(bounds_ns, total_ns)

    def _batch_of(self, rows: int) -> tuple[int, int]:
        """Return the words of a batch size that has not come before, and of its bucket."""
        with self._lock:
            if rows in self._batches:
                return self._batches[rows]
            used = len(self._batches)
            if used == MAX_BATCHES:
                return OTHER_BATCHES, _row_bucket(rows)
            place = batch_offset(used)
            # A process that died here may have written the size, but not yet have counted it.
            self._add(0, place, rows - self._row.word(place), BATCHES, 1)
            self._batches[rows] = place, _row_bucket(rows)
            return self._batches[rows]


def _row_bucket(rows: int) -> int:
    return ROWS + bisect_left(ROW_BOUNDS, rows)
