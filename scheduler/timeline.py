"""Which core did what when, as a trace that Perfetto and chrome://tracing open. For live servers and simulations alike.

Chrome's trace event format, JSON object form: one row ("thread") per core, one complete event ("X") per slice of
work, coloured by model. Written as it comes, so that nothing grows.
"""

import json
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from gangway.base.files import append_whole

_log = logging.getLogger(__name__)

# Colour names that both viewers know; models take turns.
COLOURS = (
    "thread_state_running",
    "rail_response",
    "rail_animation",
    "rail_idle",
    "rail_load",
    "thread_state_iowait",
    "cq_build_passed",
    "cq_build_failed",
    "startup",
)
WRITE_CHARACTERS = 1 << 16
_HEAD = '{"displayTimeUnit":"ms","traceEvents":[\n'


class BatchPart(NamedTuple):
    """What a gang executes: rows of so many requests, and `part` of the `parts` of a batch (its number; 0: of none)."""

    rows: int = 1
    requests: int = 1
    batch: int = 0
    part: int = 1
    parts: int = 1

    def fields(self) -> dict[str, object]:
        """Return it for people to read: the batch only if there is one."""
        fields: dict[str, object] = {"rows": self.rows, "requests": self.requests}
        if self.batch:
            fields |= {"batch": self.batch, "part": f"{self.part} of {self.parts}"}
        return fields


ALONE = BatchPart()


class Slice(NamedTuple):
    """One core at work on one block without a change: layers [begin_layer, end_layer) of a query.

    Where a gang grows, shrinks or stops inside a layer, that layer is in two slices. `versions` are those of these
    layers; empty: the default ones.
    """

    core: int
    begin_us: float
    end_us: float
    query_id: int
    model: str
    begin_layer: int
    end_layer: int
    rank: int
    ranks: int
    versions: tuple[int, ...] = ()
    part: BatchPart = ALONE


class TimelineWriter:
    """Writes slices to a file; a context manager. Memory does not grow with their number.

    The file is valid JSON after each write, of 64 KiB, and when it has been closed. `limit`: later slices are counted,
    not written, as are all when the disk is full. Raises OSError when the file cannot be made.
    """

    def __init__(self, path: Path, cores: int, limit: int = 1_000_000, title: str = "gangway") -> None:
        self._file = path.open("wb", buffering=0)
        self._limit = limit
        self._colours: dict[str, str] = {}
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self._held: list[str] = []
        self._held_characters = self._held_slices = 0
        self._tail = b""
        self.written = 0
        self.dropped = 0
        self._hold(_HEAD + _event({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}))
        for core in range(cores):
            self._hold(",\n" + _event({**_row(core), "name": "thread_name", "args": {"name": f"core {core}"}}))
            self._hold(",\n" + _event({**_row(core), "name": "thread_sort_index", "args": {"sort_index": core}}))

    def add(self, core_slice: Slice) -> None:
        """Write one slice. A negative duration (clocks of two processes) counts as none."""
        if self.written >= self._limit:
            self.dropped += 1
            return
        self.written += 1
        self._held_slices += 1
        self._hold(",\n" + _event(self._complete_event(core_slice)))

    def add_block(self, core_slice: Slice, cores: Sequence[int]) -> None:
        """Write the same slice for every core of a gang, by rank; the slice's own core, rank and ranks are void."""
        for rank, core in enumerate(cores):
            self.add(core_slice._replace(core=core, rank=rank, ranks=len(cores)))

    def close(self) -> None:
        """Complete the file. Calling it again does nothing."""
        if not self._file.closed:
            self._flush(ends=True)
            self._file.close()

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._held_characters += len(text)
        if self._held_characters >= WRITE_CHARACTERS:
            self._flush()

    def _flush(self, ends: bool = False) -> None:
        """Write what is held, and the end of the list, which the next write replaces: in a pipe only the last one."""
        tail = f'\n],"otherData":{{"written":{self.written},"dropped":{self.dropped}}}}}\n'.encode()
        tail = tail if ends or self._is_regular else b""
        try:
            append_whole(self._file.fileno(), "".join(self._held).encode() + tail, self._tail)
            self._tail = tail
        except OSError as error:  # whoever is watched goes on
            self.written -= self._held_slices
            self.dropped += self._held_slices
            if self._limit:
                _log.error("the timeline %s ends here, because it cannot be written: %s", self._file.name, error)
            self._limit = 0
        self._held, self._held_characters, self._held_slices = [], 0, 0

    def __enter__(self) -> "TimelineWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _complete_event(self, core_slice: Slice) -> dict[str, object]:
        colour = self._colours.setdefault(core_slice.model, COLOURS[len(self._colours) % len(COLOURS)])
        return {
            "name": f"{core_slice.model} {core_slice.begin_layer}-{core_slice.end_layer}",
            "cat": core_slice.model,
            "ph": "X",
            "pid": 0,
            "tid": core_slice.core,
            "ts": round(core_slice.begin_us, 3),
            "dur": round(max(0.0, core_slice.end_us - core_slice.begin_us), 3),
            "cname": colour,
            "args": {
                "query": core_slice.query_id,
                "rank": core_slice.rank,
                "ranks": core_slice.ranks,
                "layers": f"{core_slice.begin_layer}-{core_slice.end_layer}",
                "versions": list(core_slice.versions),
                **core_slice.part.fields(),
            },
        }


def _row(core: int) -> dict[str, object]:
    return {"ph": "M", "pid": 0, "tid": core}


def _event(fields: dict[str, object]) -> str:
    return json.dumps(fields, separators=(",", ":"))
