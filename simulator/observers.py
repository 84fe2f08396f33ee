"""What a simulation can write down as it goes: a timeline of the cores, and why each decision was made."""

import csv
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from gangway.scheduler.policy import Decision, Reject, Resize, Start, StartOver, Stop, Wake
from gangway.scheduler.timeline import Slice, TimelineWriter
from gangway.simulator.block import Block
from gangway.simulator.cores import Observer


class Recorder(Observer):
    """Writes what it is told to files; a context manager. Raises OSError."""

    def __init__(self, cores: int, timeline: Path | None, decisions: Path | None, title: str) -> None:
        self._timeline = TimelineWriter(timeline, cores, title=title) if timeline else None
        self._file = decisions.open("w", newline="") if decisions else None
        self._rows = csv.writer(self._file) if self._file else None
        if self._rows:
            self._rows.writerow(("time_us", "decision", "query", "end_layer", "cores", "wanted", "versions", "reason"))

    def ran(self, block: Block, begin_layer: int, end_layer: int, begin_us: float, end_us: float) -> None:
        """Write a slice for each core."""
        if self._timeline:
            versions = block.versions[begin_layer - block.begin : end_layer - block.begin]
            number, name, part = block.query.query_id, block.model.name, block.batch_part
            core_slice = Slice(0, begin_us, end_us, number, name, begin_layer, end_layer, 0, 0, versions, part)
            self._timeline.add_block(core_slice, block.cores)

    def decided(self, now_us: float, decision: Decision) -> None:
        """Write a row."""
        if self._rows:
            self._rows.writerow((f"{now_us:.3f}", type(decision).__name__, *_fields(decision)))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timeline:
            self._timeline.close()
        if self._file:
            self._file.close()


def _fields(decision: Decision) -> Sequence[object]:
    match decision:
        case Start(query_id, end_layer, cores, versions, wanted, reason):
            return query_id, end_layer, _text(cores), wanted, _text(versions), reason
        case Stop(query_id, at_once, reason):
            return query_id, "", "", "", "", f"at once {reason}" if at_once else reason
        case Resize(query_id, cores, reason):
            return query_id, "", _text(cores), "", "", reason
        case Reject(query_id, reason) | StartOver(query_id, reason):
            return query_id, "", "", "", "", reason
        case Wake(at_us):
            return "", "", "", "", "", f"at {at_us:.3f}"


def _text(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
