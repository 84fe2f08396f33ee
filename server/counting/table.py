"""The segment of all counters. The supervisor makes it and says which models have rows; front ends count in them."""

import struct
from collections.abc import Iterator

from gangway.executor.segment import Segment
from gangway.server.counting import layout
from gangway.server.counting.figures import Figures, figures_of
from gangway.server.counting.row import Row
from gangway.server.histogram import TIME_BOUNDS_NS
from gangway.server.statistics import Statistics

_HEADER = struct.Struct("<4I")


class StatisticsTable:
    """Stretches of `front_ends` processes, which are counted from 0."""

    def __init__(self, segment: Segment, front_ends: int) -> None:
        self.segment = segment
        self.front_ends = front_ends
        self._pages = [
            segment.view[offset : offset + layout.PAGE_BYTES].cast("Q")
            for offset in map(layout.stretch_offset, range(front_ends))
        ]

    @classmethod
    def create(cls, front_ends: int) -> "StatisticsTable":
        """Make the segment, without a row (the supervisor, once). Raises OSError."""
        segment = Segment.create(layout.stretch_offset(front_ends), "statistics")
        segment.allocate(0, layout.PAGE_BYTES)
        for front_end in range(front_ends):
            segment.allocate(layout.stretch_offset(front_end), layout.PAGE_BYTES)
        _HEADER.pack_into(segment.view, 0, layout.MAGIC, layout.VERSION, front_ends, layout.MODELS)
        return cls(segment, front_ends)

    @classmethod
    def attach(cls, fd: int) -> "StatisticsTable":
        """Map an inherited segment. Raises ValueError if `fd` is none, or has another layout."""
        segment = Segment.attach(fd)
        magic, version, front_ends, models = _HEADER.unpack_from(segment.view, 0)
        if magic != layout.MAGIC or segment.size_bytes != layout.stretch_offset(front_ends):
            raise ValueError(f"file descriptor {fd} is not a segment of statistics")
        if (version, models) != (layout.VERSION, layout.MODELS):
            known = f"layout {layout.VERSION} of {layout.MODELS} models"
            raise ValueError(f"statistics have layout {version} of {models} models, this program knows {known}")
        return cls(segment, front_ends)

    def begin(self, row: int) -> None:
        """Let a model have rows, all zeros (the supervisor). Raises OSError if there is no memory."""
        for offset in self._offsets(row):
            self.segment.zero(offset, layout.ROW_BYTES)

    def end(self, row: int) -> None:
        """Give the memory of a model's rows back (the supervisor)."""
        for offset in self._offsets(row):
            self.segment.punch(offset, layout.ROW_BYTES)

    def statistics(self, front_end: int, row: int, response_bounds_ns: tuple[int, ...]) -> Statistics:
        """Return the counters of a model that has rows, for this front end to count; what is read is that of all."""
        rows = list(self._rows(row))
        own = rows.pop(front_end)
        return Statistics(response_bounds_ns, own, rows)

    def figures(self, row: int, response_bounds_ns: tuple[int, ...] = TIME_BOUNDS_NS) -> Figures:
        """Return what all front ends have counted of a model that has rows."""
        return figures_of([each.read() for each in self._rows(row)], response_bounds_ns)

    def set_heap_bytes(self, front_end: int, size_bytes: int) -> None:
        """Tell how many bytes of tensors the requests of a front end have."""
        self._pages[front_end][layout.HEAP_BYTES] = size_bytes

    def heap_bytes(self, front_end: int) -> int:
        """Return what a front end has told last, or was told of it."""
        return self._pages[front_end][layout.HEAP_BYTES]

    def refused_unread_word(self, front_end: int) -> memoryview:
        """Return the word where a front end counts the calls that it refuses unread."""
        return self._pages[front_end][layout.REFUSED_UNREAD : layout.REFUSED_UNREAD + 1]

    def refused_unread(self, front_end: int) -> int:
        """Return how many calls a front end has refused unread."""
        return self._pages[front_end][layout.REFUSED_UNREAD]

    def _rows(self, row: int) -> Iterator[Row]:
        return (Row(self.segment.view, offset) for offset in self._offsets(row))

    def _offsets(self, row: int) -> list[int]:
        return [layout.row_offset(front_end, row) for front_end in range(self.front_ends)]
