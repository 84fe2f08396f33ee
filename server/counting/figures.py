"""Counters of a model at one instant, added up over all front ends, and as the protocol has them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.counting import layout
from gangway.server.counting.row import batches_in

OWN_PREFIX = "gangway_"
VERSION_PREFIX = "version_"
OWN_KEYS = ("qos_met", "qos_missed", "refused", "blocks", "conflicts", "preemptions")  # also version_N
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")  # why requests fail, as Triton names it

ComputePart = Literal["compute_input", "compute_infer", "compute_output"]
COMPUTE_PARTS: tuple[ComputePart, ...] = ("compute_input", "compute_infer", "compute_output")


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
    own: Mapping[str, int]  # OWN_KEYS and `version_N`

    def compute(self, part: ComputePart) -> Duration:
        """Return one part of computing, summed up over requests: each of a batch takes as long as the batch."""
        return Duration(self.computed, self.compute_ns[part])

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


@dataclass(frozen=True)
class Totals:
    """Everything counted until an instant, or between two. Nanoseconds. `own` has OWN_KEYS and `version_N`."""

    answered: int
    failed: int
    total_ns: int  # of the answered ones, from arrival to answer
    queue_ns: int
    compute_ns: int
    executions: int
    batch_rows: int  # in all executions
    own: Counter[str]

    @classmethod
    def of(cls, figures: Figures) -> "Totals":
        """Return what the log needs of a model's counters."""
        return cls(
            answered=figures.success.count,
            failed=figures.fail.count,
            total_ns=figures.success.ns,
            queue_ns=figures.queue.ns,
            compute_ns=figures.compute_ns["compute_infer"],
            executions=figures.executions,
            batch_rows=figures.batch_rows,
            own=Counter(figures.own),
        )

    def since(self, before: "Totals") -> "Totals":
        """Return what was counted after `before`."""
        return Totals(
            self.answered - before.answered,
            self.failed - before.failed,
            self.total_ns - before.total_ns,
            self.queue_ns - before.queue_ns,
            self.compute_ns - before.compute_ns,
            self.executions - before.executions,
            self.batch_rows - before.batch_rows,
            self.own - before.own,
        )


def figures_of(rows: Sequence[list[int]], response_bounds_ns: tuple[int, ...]) -> Figures:
    """Return the sum of what `Row.read` has returned, at least one."""
    words = _sum_of([row[: layout.BATCH_TABLE] for row in rows])

    def duration(place: int) -> Duration:
        return Duration(words[place], words[place + 1])

    def counts(place: int, size: int) -> tuple[int, ...]:
        return tuple(words[place : place + size])

    own = dict(zip(OWN_KEYS, words[layout.OWN :], strict=False))
    versions = counts(layout.VERSIONS, layout.VERSION_COUNT)
    own |= {f"{VERSION_PREFIX}{number}": count for number, count in enumerate(versions) if count}
    return Figures(
        success=duration(layout.SUCCESS),
        fail=duration(layout.FAIL),
        failures=dict(zip(REASONS, words[layout.FAILURES :], strict=False)),
        queue=duration(layout.QUEUE),
        cache_hit=duration(layout.CACHE_HIT),
        cache_miss=duration(layout.CACHE_MISS),
        executions=words[layout.EXECUTIONS],
        inferences=words[layout.INFERENCES],
        batch_rows=words[layout.BATCH_ROWS],
        compute_ns=dict(zip(COMPUTE_PARTS, words[layout.COMPUTE :], strict=False)),
        batches=_batches_of(rows),
        row_counts=counts(layout.ROWS, layout.ROW_BUCKETS),
        request_counts=counts(layout.REQUEST_TIMES, layout.TIME_BUCKETS),
        queue_counts=counts(layout.QUEUE_TIMES, layout.TIME_BUCKETS),
        compute_counts=counts(layout.COMPUTE_TIMES, layout.TIME_BUCKETS),
        response_bounds_ns=response_bounds_ns,
        response_counts=counts(layout.RESPONSE_TIMES, len(response_bounds_ns) + 1),
        last_inference_ms=max(row[layout.LATEST] for row in rows),
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
