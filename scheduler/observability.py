"""What is written down: counts of what scheduling did, why each decision was made, and which core did what."""

import dataclasses
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from gangway.artifact.precision import BF16
from gangway.base.files import append_whole
from gangway.executor.control import TOLD_S, DecisionBlock
from gangway.executor.messages import LeaseLeft
from gangway.executor.slots import SlotCounts, SlotStatus
from gangway.scheduler.gangs import Gang
from gangway.scheduler.policy import Decision, Query, Reject, Snapshot, Start, Wake
from gangway.scheduler.requests import NOTHING, Request
from gangway.scheduler.timeline import BatchPart, Slice, TimelineWriter

# Counts, by model and in total, and a line of them in the log once a minute.

PERIOD_US = 60e6
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start."""

    blocks: int = 0
    conflicts: int = 0  # blocks that got fewer cores than they wanted (VELTAIR's term)
    preemptions: int = 0  # blocks that were stopped before their end
    grown: int = 0
    shrunk: int = 0
    rejected: int = 0
    layers: int = 0  # executed
    versions: int = 0  # of them not in their default version
    planned_blocks: int = 0  # of the blocks, those that leases began by plan


class ModelCounters:
    """Counters by model name. Costs nothing between two lines in the log but the counting."""

    def __init__(self) -> None:
        self.models: dict[str, SchedulerCounters] = {}
        self._written: dict[str, tuple[int, ...]] = {}
        self._next_us = 0.0

    def of(self, model: str) -> SchedulerCounters:
        """Return a model's counters, to be counted up."""
        known = self.models.get(model)
        if known is None:
            known = self.models[model] = SchedulerCounters()
        return known

    def total(self) -> SchedulerCounters:
        """Return the sums over all models."""
        columns = zip(*(astuple(counters) for counters in self.models.values()), strict=True)
        return SchedulerCounters(*(sum(column) for column in columns))

    def write(self, now_us: float) -> None:
        """Log what is new, a line per model, unless that was done less than a minute ago."""
        if self._next_us == 0.0:
            self._next_us = now_us + PERIOD_US
        if now_us >= self._next_us:
            self._next_us = now_us + PERIOD_US
            self.write_now()

    def write_now(self) -> None:
        """Log each model's counts if they have changed since the last time."""
        for model, counters in self.models.items():
            counts = astuple(counters)
            if counts != self._written.get(model):
                self._written[model] = counts
                _log.info("%s: %s", model, describe_counts(counters))


def describe_counts(counters: SchedulerCounters) -> str:
    """Return the counts for people; zeros are left out."""
    named = [(field.name, getattr(counters, field.name)) for field in fields(counters)]
    return ", ".join(f"{name} {count}" for name, count in named if count) or "nothing yet"


# Why each decision was made: JSON lines, one per decision, for live servers (`--trace-decisions`) and simulations.
#
# Fields of a line: `time_us`, `decision` (its kind), the decision's own fields (`cores`, `end_layer`, `reason`, ...),
# and in short what the policy saw: `model`, `next_layer`, `age_us` and `slack_us` (to the deadline) of the query
# concerned, its `rows` and from how many `requests` they are, `batch` and `part` ("k of n") where it is one of a
# batch's gangs, `waiting` (how many by model), `running` ([query, model, layer, end_layer, cores, stopping]), `free`
# (cores), `level`.

BUFFER_BYTES = 1 << 16
FLUSH_US = 1e6
LIMIT_BYTES = 1 << 30  # of a file: what comes later is counted, not written


def _part_alone(query: Query) -> BatchPart:
    return BatchPart(query.rows)


def describe(
    decision: Decision, snapshot: Snapshot, part_of: Callable[[Query], BatchPart] = _part_alone
) -> dict[str, object]:
    """Return one line's content. Names of models stand for their numbers. `part_of`: what of a batch a query is."""
    names = {model_id: model.name for model_id, model in snapshot.models.items()}
    line: dict[str, object] = {"time_us": round(snapshot.now_us, 1), "decision": type(decision).__name__}
    for field in dataclasses.fields(decision):
        line[field.name] = getattr(decision, field.name)
    query = _find(getattr(decision, "query_id", None), snapshot)
    if query is not None:
        line["model"] = names.get(query.model_id, "")
        line["next_layer"] = query.next_layer
        line["age_us"] = round(snapshot.now_us - query.arrival_us, 1)
        line["slack_us"] = None if query.deadline_us is None else round(query.deadline_us - snapshot.now_us, 1)
        line |= part_of(query).fields()
    line["waiting"] = dict(Counter(names.get(each.model_id, "") for each in snapshot.waiting))
    line["running"] = [
        [
            block.query.query_id,
            names.get(block.query.model_id, ""),
            block.layer,
            block.end_layer,
            block.cores,
            block.stopping,
        ]
        for block in snapshot.running
    ]
    line["free"] = snapshot.free_cores
    line["level"] = round(snapshot.level, 3)
    return line


class TraceWriter:
    """Writes a line per decision; a context manager. Lines reach the file when 64 KiB are full, or by `tick`.

    A file that has reached its limit is left as it is; lines that find no space on the disk are not written: `dropped`
    counts. Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._left_bytes = limit_bytes - self._file.tell()
        self._flushed_us = 0.0
        self.dropped = 0

    def add(
        self,
        decisions: Sequence[Decision],
        snapshot: Snapshot,
        part_of: Callable[[Query], BatchPart] = _part_alone,
    ) -> None:
        """Write what was decided on one snapshot, before it is carried out."""
        for decision in decisions:
            line = (json.dumps(describe(decision, snapshot, part_of), separators=(",", ":")) + "\n").encode()
            if len(line) > self._left_bytes:
                self._left_bytes = 0
                self.dropped += 1
                continue
            self._left_bytes -= len(line)
            self._held.append(line)
            self._held_bytes += len(line)
        if self._held_bytes > BUFFER_BYTES:
            self._flush()

    def tick(self, now_us: float) -> None:
        """Let everything be in the file, but not more often than once a second. To be called now and then."""
        if now_us - self._flushed_us > FLUSH_US:
            self._flushed_us = now_us
            self._flush()

    def close(self) -> None:
        """Write the rest, if it can be written. Calling it again does nothing."""
        if not self._file.closed:
            self._flush()
            self._file.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self) -> None:
        lines, self._held, self._held_bytes = self._held, [], 0
        try:
            append_whole(self._file.fileno(), b"".join(lines))
        except OSError:
            self.dropped += len(lines)


def _find(query_id: int | None, snapshot: Snapshot) -> Query | None:
    queries = (*snapshot.waiting, *(block.query for block in snapshot.running))
    return next((query for query in queries if query.query_id == query_id), None)


_USUAL = SlotCounts(1)


class Accounts:
    """Is told what happens to gangs. `timeline` None: nobody wants one."""

    def __init__(self, timeline: TimelineWriter | None = None) -> None:
        self.counters = ModelCounters()
        self._timeline = timeline
        self._joined: dict[tuple[int, int], int] = {}  # (lease, rank) -> the layer at which it joined; for the timeline

    def begins(self, gang: Gang, start: Start, requests: Sequence[Request]) -> None:
        """A block is about to begin: count it for its model, and for each of its requests."""
        counters = self.counters.of(gang.model)
        conflict = start.wanted > len(start.cores)
        gang.blocks += 1
        counters.blocks += 1
        counters.conflicts += conflict
        for request in requests:
            request.counts = _add_block(request.counts, conflict, gang.unit.query.precision == BF16)
        if self._timeline is not None:
            self._note_ranks(gang, range(len(start.cores)), gang.unit.query.next_layer)

    def completed_without_gang(self, model: str, count: int, layers: int, versions: Sequence[int]) -> None:
        """So many queries were begun without a decision, and answered. `versions`: of each, as in Start."""
        counters = self.counters.of(model)
        counters.blocks += count
        counters.layers += count * layers
        counters.versions += count * (len(versions) - versions.count(0))

    def grows(self, gang: Gang, first: int) -> None:
        """Ranks from this number on are about to join."""
        self.counters.of(gang.model).grown += 1
        if self._timeline is not None:
            self._note_ranks(gang, range(first, gang.wanted), gang.shared.position()[1])

    def shrinks(self, gang: Gang) -> None:
        """Ranks have been told to leave."""
        self.counters.of(gang.model).shrunk += 1

    def left(self, gang: Gang, core: int, message: LeaseLeft) -> None:
        """A rank has left that was on this core."""
        if self._timeline is None:
            return
        begin_layer = self._joined.pop((gang.lease, message.rank), 0)
        end_layer = max(gang.shared.position()[1], begin_layer + 1)
        first = gang.unit.query.next_layer
        self._timeline.add(
            Slice(
                core=core,
                begin_us=message.joined_ns / 1e3,
                end_us=message.left_ns / 1e3,
                query_id=gang.unit.query.query_id,
                model=gang.model,
                begin_layer=begin_layer,
                end_layer=end_layer,
                rank=message.rank,
                ranks=max(len(gang.cores), message.rank + 1),
                versions=gang.versions[begin_layer - first : end_layer - first],
                part=gang.unit.batch_part,
            )
        )

    def ended(self, gang: Gang, next_layer: int, wanted_by: Sequence[Request]) -> None:
        """All ranks have left; what they did is of use. `wanted_by`: the requests, none if all were dropped."""
        counters = self.counters.of(gang.model)
        counters.layers += next_layer - gang.unit.query.next_layer
        _, blocks, version_layers = gang.shared.blocks()
        counters.blocks += blocks - gang.planned_blocks
        counters.planned_blocks += blocks - gang.planned_blocks
        counters.versions += version_layers - gang.version_layers
        gang.planned_blocks, gang.version_layers = blocks, version_layers
        if next_layer < gang.end_layer and wanted_by:
            counters.preemptions += 1
            for request in wanted_by:
                request.counts = request.counts._replace(preemptions=request.counts.preemptions + 1)

    def refused(self, model: str, status: SlotStatus) -> None:
        """The scheduler has answered a request; count it if its queue policy was the reason."""
        if status in REFUSALS:
            self.counters.of(model).rejected += 1

    def _note_ranks(self, gang: Gang, ranks: range, layer: int) -> None:
        self._joined.update({(gang.lease, rank): layer for rank in ranks})


def _add_block(counts: SlotCounts, conflict: bool, in_bf16: bool) -> SlotCounts:
    """Planned blocks and versions are counted by the workers."""
    if counts is NOTHING and not (conflict or in_bf16):
        return _USUAL
    return counts._replace(blocks=counts.blocks + 1, conflicts=counts.conflicts + conflict, bf16=int(in_bf16))


# The last decisions about each model, for those who watch the server. While nobody watches, a decision costs a look at
# one flag. While somebody does, it costs a tuple in a queue of bounded length. Once a second the queues become a text.

REFUSALS: Final[Mapping[SlotStatus, str]] = {  # why the scheduler refuses a request, for people
    SlotStatus.LATE: "it is certain to miss its deadline, and its queue policy rejects late requests",
    SlotStatus.QUEUE_FULL: "the queue of its model is full",
    SlotStatus.CROWDED: "more late work waits than the backlog limit allows",
}
KEPT_DECISIONS: Final = 8  # decisions about one model
TELLING_PERIOD_US: Final = 1e6  # between two texts
REASON_CHARACTERS: Final = 160


class _Noted(NamedTuple):
    """A decision, with what the scheduler knew then. `decision` None: a request was refused, as `reason` says."""

    at_us: float
    decision: Decision | None
    query: Query
    cores: tuple[int, ...]  # that the query gets, or has had
    free: int
    waiting: int
    reason: str


class DecisionLog:
    """Keeps the last decisions of each model while `block` is watched, and writes them there."""

    def __init__(self, block: DecisionBlock) -> None:
        self._block = block
        self._next_us = 0.0
        self._entries: dict[int, deque[_Noted]] = {}
        self._is_new = False
        self.is_watched = False

    def add(self, decisions: Sequence[Decision], snapshot: Snapshot) -> None:
        """Note what was decided on one snapshot; of what is rejected `refused` hears. Only while watched."""
        decided = {each.query_id: each for each in decisions if not isinstance(each, (Wake, Reject))}
        held = {block.query.query_id: block.cores for block in snapshot.running}
        waiting = max(len(snapshot.waiting), snapshot.waiting_count)
        for query in (*(block.query for block in snapshot.running), *snapshot.waiting):
            if not decided:
                return
            if (decision := decided.pop(query.query_id, None)) is None:
                continue
            cores = getattr(decision, "cores", held.get(query.query_id, ()))
            entry = _Noted(
                snapshot.now_us, decision, query, cores, len(snapshot.free_cores), waiting, decision.reason
            )  # fmt: skip
            self._of(query.model_id).append(entry)

    def refused(self, query: Query, status: SlotStatus, now_us: float, free: int, waiting: int) -> None:
        """Note that a request was refused for a reason of `REFUSALS`. Only while watched."""
        self._of(query.model_id).append(_Noted(now_us, None, query, (), free, waiting, REFUSALS[status]))

    def poll(self, now_us: float) -> None:
        """See whether somebody watches, and write the text once a second. To be called now and then."""
        self.is_watched = self._block.is_watched()
        if not self.is_watched:
            self._entries.clear()
        elif self._is_new and now_us >= self._next_us:
            self._next_us = now_us + TELLING_PERIOD_US
            self._is_new = False
            self._block.write(self._text(now_us))

    def _of(self, model_id: int) -> deque[_Noted]:
        self._is_new = True
        entries = self._entries.get(model_id)
        if entries is None:
            entries = self._entries[model_id] = deque(maxlen=KEPT_DECISIONS)
        return entries

    def _text(self, now_us: float) -> bytes:
        """Return a line of JSON for each, in order of time; the newest ones, if there is no room for all."""
        for model_id, entries in list(self._entries.items()):
            if now_us - entries[-1].at_us > TOLD_S * 1e6:
                del self._entries[model_id]
        found = [(entry, model_id) for model_id, entries in self._entries.items() for entry in entries]
        lines: list[bytes] = []
        room = self._block.MAX_TEXT_BYTES
        for entry, model_id in sorted(found, key=lambda item: -item[0].at_us):
            line = json.dumps(_fields(entry, model_id), separators=(",", ":")).encode() + b"\n"
            room -= len(line)
            if room < 0:
                break
            lines.append(line)
        return b"".join(reversed(lines))


def _fields(entry: _Noted, model_id: int) -> dict[str, Any]:
    query, decision = entry.query, entry.decision
    return {
        "at_us": round(entry.at_us),
        "model_id": model_id,
        "decision": "Refuse" if decision is None else type(decision).__name__,
        "cores": entry.cores,
        "wanted": decision.wanted if isinstance(decision, Start) else 0,
        "rows": query.rows,
        "layer": query.next_layer,
        "end_layer": decision.end_layer if isinstance(decision, Start) else 0,
        "blocks": len(getattr(decision, "blocks", ())),
        "age_us": round(entry.at_us - query.arrival_us),
        "slack_us": None if query.deadline_us is None else round(query.deadline_us - entry.at_us),
        "free": entry.free,
        "waiting": entry.waiting,
        "reason": entry.reason[:REASON_CHARACTERS],
    }
