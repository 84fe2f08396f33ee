"""What is counted of a model since it was loaded: as Triton counts it, and ours beside.

ModelStatistics, the metrics and the log are three views of the same counters. They lie in one segment of shared memory,
which the supervisor makes and every front end inherits. So they outlive the front end that counts, and add up over
several:

    0       one page: u32 magic, u32 version of this layout, u32 front ends, u32 models that there can be
    4096    a section for each front end, which it alone writes and any process reads, without a lock:

      0     one page: u64 bytes of tensors of its requests in flight, u64 calls that it has refused unread, and of its
            response cache 8 times u64, as CacheFigures has them
      4096  a row of 12 KiB (3 pages) for each model (`ModelReady.statistics_row`)

A row has memory while it is in use. The supervisor takes it, all zeros, when a model or an ensemble is announced, and
gives it back when its last request has ended (`supervisor/announcements.py`). So a model that is loaded again begins at
0. A front end that replaces a dead one goes on with its section. A row is 1536 little-endian 64-bit words:

    0      sequence: odd while its writer is at work
    1      time of the last answer, milliseconds since 1970; 0: none
    2      counters, by the names below; times in nanoseconds
    48     three histograms by TIME_BOUNDS_NS, 17 words each: request, queue, compute_infer
    99     histogram of the rows of executions by ROW_BOUNDS, 12 words
    128    histogram of the time to the first response, by the model's own bounds: up to 65 words
    256    160 batch sizes of 8 words: rows, executions, compute_input, compute_infer, compute_output, 3 unused words;
           in the order in which they came. The last one counts all sizes for which no other one is left

Unused words before 48, 128 and 256 are 0 and reserved for another version of the layout.
"""

import math
import struct
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final, Literal, NamedTuple

import msgspec

from gangway.artifact.precision import BF16, FP32
from gangway.executor import _native
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotCounts
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb

_STEPS = (1, 2.5, 5)  # of each decade
TIME_BOUNDS_NS = (*(round(step * 10**power) for power in range(5, 10) for step in _STEPS), 10**10)  # 0.1 ms to 10 s
ROW_BOUNDS = tuple(2**power for power in range(11))  # 1 to 1024


MAGIC: Final = 0x43574721
VERSION: Final = 4
PAGE_BYTES: Final = 4096
HEAP_BYTES: Final = 0  # words of a section's first page
REFUSED_UNREAD: Final = 1
CACHE: Final = 2
WORD_BYTES: Final = 8
MODELS: Final = _native.MAX_MODELS

SEQUENCE: Final = 0
LATEST: Final = 1
# Pairs of a count and a sum of nanoseconds.
SUCCESS: Final = 2
FAIL: Final = 4
QUEUE: Final = 6
CACHE_HIT: Final = 8
CACHE_MISS: Final = 10
# Single counters.
EXECUTIONS: Final = 12
INFERENCES: Final = 13
COMPUTE: Final = 14  # input, infer, output
FAILURES: Final = 17  # by reason
OWN: Final = 21  # by OWN_KEYS
VERSIONS: Final = 27  # requests that used a version of a kernel, by its number
VERSION_COUNT: Final = 8
BATCHES: Final = 35  # sizes that there are in the table
BATCH_ROWS: Final = 36  # in all executions: `inferences`, but for requests of a batch that failed
IN_BF16: Final = 37  # requests that were computed so, of a model that is there in fp32, too
# Histograms.
TIME_BUCKETS: Final = len(TIME_BOUNDS_NS) + 1
REQUEST_TIMES: Final = 48
QUEUE_TIMES: Final = REQUEST_TIMES + TIME_BUCKETS
COMPUTE_TIMES: Final = QUEUE_TIMES + TIME_BUCKETS
ROWS: Final = COMPUTE_TIMES + TIME_BUCKETS
ROW_BUCKETS: Final = len(ROW_BOUNDS) + 1
RESPONSE_TIMES: Final = 128
MAX_RESPONSE_BOUNDS: Final = 64

BATCH_TABLE: Final = 256
BATCH_WORDS: Final = 8
MAX_BATCHES: Final = 159  # sizes with counters of their own
OTHER_BATCHES: Final = BATCH_TABLE + MAX_BATCHES * BATCH_WORDS
ROW_WORDS: Final = OTHER_BATCHES + BATCH_WORDS
ROW_BYTES: Final = ROW_WORDS * WORD_BYTES

SECTION_BYTES: Final = PAGE_BYTES + MODELS * ROW_BYTES


def section_offset(front_end: int) -> int:
    """Return where the section of a front end begins (counted from 0)."""
    return PAGE_BYTES + front_end * SECTION_BYTES


def row_offset(front_end: int, row: int) -> int:
    """Return where a front end has a row. Raises ValueError for a number that no row has."""
    if not 0 <= row < MODELS:
        raise ValueError(f"there is no row {row}")
    return section_offset(front_end) + PAGE_BYTES + row * ROW_BYTES


def batch_offset(place: int) -> int:
    """Return the first word of a batch size, by its place in the table."""
    return BATCH_TABLE + place * BATCH_WORDS


# One that was taken off its core in the middle is waited for; one that died there leaves an odd sequence until its
# successor counts, so not for long.
_QUICK_ATTEMPTS = 80
_SLOW_ATTEMPTS = 20
_RETRY_S = 0.001


class CounterRow:
    """Words at `offset` of a view, as the layout above has them. One process writes, with any number of threads."""

    def __init__(self, view: memoryview, offset: int) -> None:
        self._bytes = view[offset : offset + ROW_BYTES]
        self._words = self._bytes.cast("Q")
        # add(latest, word, amount, word, amount, ...): one call, during which no other thread runs
        self.add = partial(_native.counters_add, view, offset, ROW_WORDS)

    @classmethod
    def private(cls) -> "CounterRow":
        """Return a row that no other process sees."""
        return cls(memoryview(bytearray(ROW_BYTES)), 0)

    def word(self, number: int) -> int:
        """Return one word as it is now."""
        return self._words[number]

    def read(self) -> list[int]:
        """Return the words as they were at one moment: without the batch sizes that have not come yet."""
        words = memoryview(self._snapshot()).cast("Q")
        return words[: batch_offset(min(words[BATCHES], MAX_BATCHES))].tolist()

    def _snapshot(self) -> bytes:
        """Copy the row at one go: converting its words takes longer than a busy writer pauses."""
        copy = b""
        for attempt in range(_QUICK_ATTEMPTS + _SLOW_ATTEMPTS):
            before = self._words[SEQUENCE]
            copy = bytes(self._bytes)
            if not before & 1 and self._words[SEQUENCE] == before:
                break
            if attempt >= _QUICK_ATTEMPTS:
                time.sleep(_RETRY_S)
        return copy


def batches_in(words: list[int]) -> dict[int, list[int]]:
    """Return the words of each batch size, by rows, of what `read` has returned."""
    starts = range(batch_offset(0), len(words), BATCH_WORDS)
    return {words[start]: words[start : start + BATCH_WORDS] for start in starts}


OWN_PREFIX = "gangway_"
VERSION_PREFIX = "version_"
OWN_KEYS = ("qos_met", "qos_missed", "refused", "blocks", "conflicts", "preemptions")  # also version_N
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")  # why requests fail, as Triton names it

ComputePart = Literal["compute_input", "compute_infer", "compute_output"]
COMPUTE_PARTS: tuple[ComputePart, ...] = ("compute_input", "compute_infer", "compute_output")


class Duration(msgspec.Struct, frozen=True):
    """How often, and how long altogether."""

    count: int
    ns: int

    def message(self) -> pb.StatisticDuration:
        """Return it as the protocol has it."""
        return pb.StatisticDuration(count=self.count, ns=self.ns)


class CacheFigures(NamedTuple):
    """A response cache: what it can hold and holds, and what it has been asked since its server was started."""

    size_bytes: int
    used_bytes: int
    entries: int
    hits: int
    misses: int
    evictions: int
    lookup_ns: int
    insertion_ns: int


class BatchFigures(NamedTuple):
    """The executions of batches of one size."""

    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class VersionFigures(msgspec.Struct, frozen=True):
    """All counters of one version of a model at one instant, or between two, added up over all front ends.

    `words`: what they are read from, as the layout above has them before the batch sizes.
    """

    words: list[int]
    success: Duration  # from arrival to answer
    fail: Duration
    failures: Mapping[str, int]  # by REASONS
    queue: Duration
    cache_hit: Duration
    cache_miss: Duration
    executions: int  # one for a batch, whatever number of requests it was made of; not for answers out of the cache
    inferences: int  # rows of all requests
    batch_rows: int  # rows of all executions
    compute_ns: Mapping[ComputePart, int]
    batches: Mapping[int, BatchFigures]  # by rows, ascending: the sizes that have counters of their own
    row_counts: tuple[int, ...]  # by ROW_BOUNDS, of all sizes
    request_counts: tuple[int, ...]  # by TIME_BOUNDS_NS
    queue_counts: tuple[int, ...]
    compute_counts: tuple[int, ...]  # of compute_infer
    response_bounds_ns: tuple[int, ...]
    response_counts: tuple[int, ...]  # by these: from arrival to the first response
    last_inference_ms: int  # since 1970; 0: none
    own: Mapping[str, int]  # OWN_KEYS, `version_N` and `bf16`

    def since(self, before: "VersionFigures") -> "VersionFigures":
        """Return what was counted after `before`, but for batch sizes and the time of the last answer."""
        words = [now - then for now, then in zip(self.words, before.words, strict=True)]
        return figures_of([words], self.response_bounds_ns)

    def compute(self, part: ComputePart) -> Duration:
        """Return one part of computing, summed up over requests: each of a batch takes as long as the batch."""
        return Duration(self.computed, self.compute_ns[part])

    @property
    def by_precision(self) -> Mapping[str, int]:
        """Executed requests by precision, of a model that is there in both."""
        in_bf16 = self.own.get(BF16, 0)
        return {FP32: self.computed - in_bf16, BF16: in_bf16}

    @property
    def computed(self) -> int:
        """Requests that were answered by an execution."""
        return self.success.count - self.cache_hit.count

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


def figures_of(rows: Sequence[list[int]], response_bounds_ns: tuple[int, ...]) -> VersionFigures:
    """Return the sum of what `CounterRow.read` has returned, at least one."""
    words = _sum_of([row[:BATCH_TABLE] for row in rows])

    def duration(place: int) -> Duration:
        return Duration(words[place], words[place + 1])

    def counts(place: int, size: int) -> tuple[int, ...]:
        return tuple(words[place : place + size])

    own = dict(zip(OWN_KEYS, words[OWN:], strict=False))
    versions = counts(VERSIONS, VERSION_COUNT)
    own |= {f"{VERSION_PREFIX}{number}": count for number, count in enumerate(versions) if count}
    if in_bf16 := words[IN_BF16]:
        own[BF16] = in_bf16
    return VersionFigures(
        words,
        success=duration(SUCCESS),
        fail=duration(FAIL),
        failures=dict(zip(REASONS, words[FAILURES:], strict=False)),
        queue=duration(QUEUE),
        cache_hit=duration(CACHE_HIT),
        cache_miss=duration(CACHE_MISS),
        executions=words[EXECUTIONS],
        inferences=words[INFERENCES],
        batch_rows=words[BATCH_ROWS],
        compute_ns=dict(zip(COMPUTE_PARTS, words[COMPUTE:], strict=False)),
        batches=_batches_of(rows),
        row_counts=counts(ROWS, ROW_BUCKETS),
        request_counts=counts(REQUEST_TIMES, TIME_BUCKETS),
        queue_counts=counts(QUEUE_TIMES, TIME_BUCKETS),
        compute_counts=counts(COMPUTE_TIMES, TIME_BUCKETS),
        response_bounds_ns=response_bounds_ns,
        response_counts=counts(RESPONSE_TIMES, len(response_bounds_ns) + 1),
        last_inference_ms=max(row[LATEST] for row in rows),
        own=own,
    )


def _sum_of(rows: Sequence[list[int]]) -> list[int]:
    return rows[0] if len(rows) == 1 else [sum(column) for column in zip(*rows, strict=True)]


def _batches_of(rows: Sequence[list[int]]) -> dict[int, BatchFigures]:
    found: dict[int, list[list[int]]] = {}
    for row in rows:
        for size, words in batches_in(row).items():
            found.setdefault(size, []).append(words)
    batches = {}
    for size in sorted(found):
        _, executions, *times = _sum_of(found[size])
        batches[size] = BatchFigures(*(Duration(executions, ns) for ns in times[: len(COMPUTE_PARTS)]))
    return batches


MISSES = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.INTERNAL)
_REASONS = {
    StatusCode.UNAVAILABLE: "REJECTED",
    StatusCode.CANCELLED: "CANCELED",
    StatusCode.DEADLINE_EXCEEDED: "CANCELED",  # the client is gone, as after a cancellation
    StatusCode.INTERNAL: "BACKEND",
}
_FAILURE_OF = {code: FAILURES + REASONS.index(reason) for code, reason in _REASONS.items()}
_OTHER_FAILURE = FAILURES + REASONS.index("OTHER")
_QOS_MET, _QOS_MISSED, _REFUSED, _BLOCKS, _CONFLICTS, _PREEMPTIONS = range(OWN, OWN + len(OWN_KEYS))
_STATIC_VERSION = 1  # the mask of requests that used no other one


class RequestTimes(NamedTuple):
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
        own: CounterRow | None = None,
        others: Sequence[CounterRow] = (),
    ) -> None:
        self._row = own or CounterRow.private()
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
        times: RequestTimes,
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
        if counts.bf16:
            self._add(0, IN_BF16, 1)
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

    def failed(self, total_ns: int, code: StatusCode, had_target: bool) -> None:
        """Count a request that reached the model and was not answered. A client that cancels misses nothing."""
        self._add(
            0,
            FAIL, 1, FAIL + 1, total_ns, _FAILURE_OF.get(code, _OTHER_FAILURE), 1,
            _REFUSED, code is StatusCode.UNAVAILABLE, _QOS_MISSED, had_target and code in MISSES,
        )  # fmt: skip

    def figures(self) -> VersionFigures:
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


_HEADER = struct.Struct("<4I")


class StatisticsTable:
    """The segment of all counters, with sections of `front_ends` processes, which are counted from 0.

    The supervisor makes it and says which models have rows; front ends count in them.
    """

    def __init__(self, segment: Segment, front_ends: int) -> None:
        self.segment = segment
        self.front_ends = front_ends
        self._pages = [
            segment.view[offset : offset + PAGE_BYTES].cast("Q") for offset in map(section_offset, range(front_ends))
        ]

    @classmethod
    def create(cls, front_ends: int) -> "StatisticsTable":
        """Make the segment, without a row (the supervisor, once). Raises OSError."""
        segment = Segment.create(section_offset(front_ends), "statistics")
        segment.allocate(0, PAGE_BYTES)
        for front_end in range(front_ends):
            segment.allocate(section_offset(front_end), PAGE_BYTES)
        _HEADER.pack_into(segment.view, 0, MAGIC, VERSION, front_ends, MODELS)
        return cls(segment, front_ends)

    @classmethod
    def attach(cls, fd: int) -> "StatisticsTable":
        """Map an inherited segment. Raises ValueError if `fd` is none, or has another layout."""
        segment = Segment.attach(fd)
        magic, version, front_ends, models = _HEADER.unpack_from(segment.view, 0)
        if magic != MAGIC or segment.size_bytes != section_offset(front_ends):
            raise ValueError(f"file descriptor {fd} is not a segment of statistics")
        if (version, models) != (VERSION, MODELS):
            known = f"layout {VERSION} of {MODELS} models"
            raise ValueError(f"statistics have layout {version} of {models} models, this program knows {known}")
        return cls(segment, front_ends)

    def begin(self, row: int) -> None:
        """Let a model have rows, all zeros (the supervisor). Raises OSError if there is no memory."""
        for offset in self._offsets(row):
            self.segment.zero(offset, ROW_BYTES)

    def end(self, row: int) -> None:
        """Give the memory of a model's rows back (the supervisor)."""
        for offset in self._offsets(row):
            self.segment.punch(offset, ROW_BYTES)

    def statistics(self, front_end: int, row: int, response_bounds_ns: tuple[int, ...]) -> Statistics:
        """Return the counters of a model that has rows, for this front end to count; what is read is that of all."""
        rows = list(self._rows(row))
        own = rows.pop(front_end)
        return Statistics(response_bounds_ns, own, rows)

    def figures(self, row: int, response_bounds_ns: tuple[int, ...] = TIME_BOUNDS_NS) -> VersionFigures:
        """Return what all front ends have counted of a model that has rows."""
        return figures_of([each.read() for each in self._rows(row)], response_bounds_ns)

    def set_heap_bytes(self, front_end: int, size_bytes: int) -> None:
        """Tell how many bytes of tensors the requests of a front end have."""
        self._pages[front_end][HEAP_BYTES] = size_bytes

    def heap_bytes(self, front_end: int) -> int:
        """Return what a front end has told last, or was told of it."""
        return self._pages[front_end][HEAP_BYTES]

    def refused_unread_word(self, front_end: int) -> memoryview:
        """Return the word where a front end counts the calls that it refuses unread."""
        return self._pages[front_end][REFUSED_UNREAD : REFUSED_UNREAD + 1]

    def refused_unread(self, front_end: int) -> int:
        """Return how many calls a front end has refused unread."""
        return self._pages[front_end][REFUSED_UNREAD]

    def cache_words(self, front_end: int) -> memoryview:
        """Return the words of a front end's response cache, where it writes its CacheFigures."""
        return self._pages[front_end][CACHE : CACHE + len(CacheFigures._fields)]

    def cache(self) -> CacheFigures:
        """Return the figures of all front ends' response caches together."""
        return CacheFigures(*map(sum, zip(*map(self.cache_words, range(self.front_ends)), strict=True)))

    def _rows(self, row: int) -> Iterator[CounterRow]:
        return (CounterRow(self.segment.view, offset) for offset in self._offsets(row))

    def _offsets(self, row: int) -> list[int]:
        return [row_offset(front_end, row) for front_end in range(self.front_ends)]
