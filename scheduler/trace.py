"""Why each decision was made: JSON lines, one per decision, for live servers (`--trace-decisions`) and simulations.

Fields of a line: `time_us`, `decision` (its kind), the decision's own fields (`cores`, `end_layer`, `reason`, ...), and
in short what the policy saw: `model`, `next_layer`, `age_us` and `slack_us` (to the deadline) of the query concerned,
its `rows` and from how many `requests` they are, `batch` and `part` ("k of n") where it is one of a batch's gangs,
`waiting` (how many by model), `running` ([query, model, layer, end_layer, cores, stopping]), `free` (cores), `level`.
"""

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from gangway.scheduler.policy import Decision, Query, Snapshot
from gangway.scheduler.timeline import Place

BUFFER_BYTES = 1 << 16
FLUSH_US = 1e6
LIMIT_BYTES = 1 << 30  # of a file: what comes later is counted, not written


def _place_alone(query: Query) -> Place:
    return Place(query.rows)


def describe(
    decision: Decision, snapshot: Snapshot, place: Callable[[Query], Place] = _place_alone
) -> dict[str, object]:
    """Return one line's content. Names of models stand for their numbers. `place`: what of a batch a query is."""
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
        line |= place(query).fields()
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

    A file that has reached its limit, or cannot be written any more, is left as it is: `dropped` counts. Raises OSError
    when the file cannot be opened.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8", buffering=BUFFER_BYTES)
        self._left_bytes = limit_bytes - self._file.tell()
        self._flushed_us = 0.0
        self.dropped = 0

    def add(
        self,
        decisions: Sequence[Decision],
        snapshot: Snapshot,
        place: Callable[[Query], Place] = _place_alone,
    ) -> None:
        """Write what was decided on one snapshot, before it is carried out."""
        for decision in decisions:
            line = json.dumps(describe(decision, snapshot, place), separators=(",", ":")) + "\n"
            self._left_bytes -= len(line)
            if self._left_bytes < 0 or not self._write(line):
                self._left_bytes = 0
                self.dropped += 1

    def tick(self, now_us: float) -> None:
        """Let everything be in the file, but not more often than once a second. To be called now and then."""
        if now_us - self._flushed_us > FLUSH_US:
            self._flushed_us = now_us
            with contextlib.suppress(OSError):
                self._file.flush()

    def close(self) -> None:
        """Write the rest, if it can be written."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, line: str) -> bool:
        try:
            self._file.write(line)
        except OSError:
            return False
        return True


def _find(query_id: int | None, snapshot: Snapshot) -> Query | None:
    queries = (*snapshot.waiting, *(block.query for block in snapshot.running))
    return next((query for query in queries if query.query_id == query_id), None)
