"""Metrics that Python models make (`pb_utils.MetricFamily`), in two segments of shared memory.

`descriptions` has a record for each metric, which the supervisor alone writes (`supervisor/custom_metrics.py`) and
front ends read. `values` has a page for each, which the processes of instances write
(`python_backend/custom_metrics.py`): one process for all would be asked for every increment. A record has memory while
it is in use, and its values outlive the processes that count.

    descriptions  one page: u64 the records that may be in use. Then records of 16 KiB: u64 version, 0 while the record
                  is not in use, and never again what it was; u64 bytes of a text, and the text: a Description as JSON
    values        pages of 512 float64. Counters and gauges use the first one. Histograms have the sum of all values
                  first, and then how many values each bucket has got, the last one those above all bounds
"""

import math
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from gangway.executor.segment import Segment

RECORDS: Final = 4096
RECORD_BYTES: Final = 16384
PAGE_BYTES: Final = 4096  # also of `python_backend/custom_metrics.py`
COUNTER, GAUGE, HISTOGRAM = range(3)  # Triton's numbers
KINDS: Final = ("counter", "gauge", "histogram")
MOST_BOUNDS: Final = 256
_HEAD: Final = struct.Struct("<QQ")
_WORD: Final = struct.Struct("<Q")


class Description(msgspec.Struct, frozen=True):
    """One metric. `labels` are as Prometheus' text has them, without braces. `bounds`: of a histogram's buckets."""

    name: str
    help: str
    kind: int
    labels: str
    bounds: tuple[float, ...] = ()


class CustomMetric(NamedTuple):
    """A metric as it is now. `counts`: of a histogram, by bucket; its `value` is the sum."""

    about: Description
    value: float
    counts: tuple[int, ...] = ()


class CustomMetricsTable:
    """Both segments."""

    def __init__(self, descriptions: Segment, values: Segment) -> None:
        self.descriptions, self.values = descriptions, values
        self._words = values.view.cast("d")

    @classmethod
    def create(cls) -> "CustomMetricsTable":
        """Make the segments, without a record (the supervisor, once). Raises OSError."""
        descriptions = Segment.create(PAGE_BYTES + RECORDS * RECORD_BYTES, "metric-descriptions")
        return cls(descriptions, Segment.create(RECORDS * PAGE_BYTES, "metric-values"))

    @classmethod
    def attach(cls, descriptions_fd: int, values_fd: int) -> "CustomMetricsTable":
        """Map inherited segments."""
        return cls(Segment.attach(descriptions_fd), Segment.attach(values_fd))

    @property
    def fds(self) -> tuple[int, int]:
        """The descriptors, for `attach`."""
        return self.descriptions.fd, self.values.fd

    def begin(self, record: int, version: int, about: Description) -> None:
        """Put a record in use, with a value of 0 (the supervisor). `version`: one that no record has had.

        Raises ValueError for texts without room, OSError if there is no memory.
        """
        text, at = msgspec.json.encode(about), _offset(record)
        if _HEAD.size + len(text) > RECORD_BYTES:
            raise ValueError(f"name, description, labels and buckets have more than {RECORD_BYTES - _HEAD.size} bytes")
        self.values.zero(record * PAGE_BYTES, PAGE_BYTES)
        self.descriptions.zero(at, _HEAD.size + len(text))
        view = self.descriptions.view
        view[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        _WORD.pack_into(view, at + _WORD.size, len(text))
        _WORD.pack_into(view, at, version)  # the last: from now on it is read
        (used,) = _WORD.unpack_from(view, 0)
        _WORD.pack_into(view, 0, max(used, record + 1))

    def end(self, record: int) -> None:
        """Take a record out of use, and give its memory back (the supervisor)."""
        _WORD.pack_into(self.descriptions.view, _offset(record), 0)
        self.descriptions.punch(_offset(record), RECORD_BYTES)
        self.values.punch(record * PAGE_BYTES, PAGE_BYTES)

    def read(self) -> Iterator[CustomMetric]:
        """Yield all metrics in use."""
        (used,) = _WORD.unpack_from(self.descriptions.view, 0)
        for record in range(min(used, RECORDS)):
            metric = self._read(record)
            if metric is not None:
                yield metric

    def _read(self, record: int) -> CustomMetric | None:
        """Return a metric; None if the record is not in use, or goes in or out of use at this moment."""
        view, at = self.descriptions.view, _offset(record)
        version, text_bytes = _HEAD.unpack_from(view, at)
        if not version:
            return None
        text = bytes(view[at + _HEAD.size : at + _HEAD.size + text_bytes])
        if _WORD.unpack_from(view, at) != (version,):
            return None
        about = msgspec.json.decode(text, type=Description)
        first = record * PAGE_BYTES // self._words.itemsize
        value, counts = self._words[first], []
        if about.kind == HISTOGRAM:
            counts = self._words[first + 1 : first + 2 + len(about.bounds)].tolist()
        if _WORD.unpack_from(view, at) != (version,):
            return None
        return CustomMetric(about, value, tuple([int(count) if math.isfinite(count) else 0 for count in counts]))


def _offset(record: int) -> int:
    return PAGE_BYTES + record * RECORD_BYTES
