"""Metrics of a model's own. The supervisor knows their names, and their values lie in memory that all instances share.

`MetricFamily` and `Metric` are Triton's. A value has a page (the layout: `server/custom_metrics.py`). An instance that
changes it locks its first byte, which the kernel unlocks if the process ends.
"""

from __future__ import annotations

import bisect
import enum
import fcntl
import mmap
import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gangway.python_backend.supervisor_link import TritonModelException, linked

PAGE_BYTES = 4096
_lock = threading.Lock()  # of what the supervisor is told, and of the next one
_uses: Counter[tuple[str, Any]] = Counter()  # objects of this process that have a family (name) or metric (record)
_dropped: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()  # by objects that have gone


class MetricKind(enum.IntEnum):
    """What a metric counts."""

    COUNTER, GAUGE, HISTOGRAM = range(3)


COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


class _Value:
    """The page of a metric. A context of it keeps other threads and instances from changing it."""

    def __init__(self, record: int, bounds: Sequence[float]) -> None:
        self.record, self.bounds = record, bounds
        self._fd, self._at = linked().values_fd, record * PAGE_BYTES
        self.words: Any = memoryview(mmap.mmap(self._fd, PAGE_BYTES, offset=self._at)).cast("d")
        self._lock = threading.Lock()

    def __enter__(self) -> Any:
        self._lock.acquire()
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, self._at)
        return self.words

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._at)
        self._lock.release()


class Metric:
    """A value with labels, made by `MetricFamily.Metric`. All of the same family and labels have one value."""

    def __init__(self, kind: MetricKind, value: _Value) -> None:
        self._kind = kind
        self._value: _Value | None = value

    def increment(self, value: float) -> None:
        """Add to a counter or gauge. Raises TritonModelException for less than 0 of a counter."""
        self._require("increment metric value", "Increment", COUNTER, GAUGE)
        amount = float(value)
        if self._kind is COUNTER and not amount >= 0:
            raise TritonModelException(
                "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented"
                f" monotonically by non-negative values, got {amount}"
            )
        with self._held as words:
            words[0] += amount

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._require("set metric value", "Set", GAUGE)
        with self._held as words:
            words[0] = float(value)

    def observe(self, value: float) -> None:
        """Count a value in its bucket of a histogram."""
        self._require("observe metric value", "Observe", HISTOGRAM)
        observed = float(value)
        with self._held as words:
            words[0] += observed
            words[1 + bisect.bisect_left(self._held.bounds, observed)] += 1

    def value(self) -> float:
        """Return the value of a counter or gauge."""
        self._require("get metric value", "Value", COUNTER, GAUGE)
        return float(self._held.words[0])

    def _require(self, what: str, name: str, *kinds: MetricKind) -> None:
        """Raise TritonModelException for what is not to be done with a metric of this kind."""
        if self._value is None:
            raise TritonModelException(
                f"Failed to {what}: the 'MetricFamily' has been deleted, which is to be done after its metrics"
            )
        if self._kind not in kinds:
            raise TritonModelException(
                f"Failed to {what}: TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {name}"
            )

    @property
    def _held(self) -> _Value:
        assert self._value is not None, "required before"
        return self._value

    def _drop(self) -> None:
        """Let go of the value."""
        if self._value is not None:
            _dropped.put(("metric", self._value.record))
            self._value = None


class MetricFamily:
    """Metrics of one name. Families of the same name are one, which keeps its first description and kind.

    A metric is there until this family is deleted, and all others of the same name that have it.
    """

    COUNTER, GAUGE, HISTOGRAM = COUNTER, GAUGE, HISTOGRAM
    _is_made = False

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._metrics: dict[tuple[tuple[str, str], ...], Metric] = {}  # by labels
        self._name = name
        self._making = threading.Lock()
        try:
            self._kind = MetricKind(kind)
        except ValueError:
            raise TritonModelException(f"Error when creating MetricFamily: there is no kind {kind!r}") from None
        _ask("MetricFamily", family=[name, description, int(self._kind)])
        self._is_made = True

    def Metric(  # noqa: N802 - Triton's name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the metric with these labels, which is made if it is new. `buckets`: bounds, of a histogram only.

        Raises TritonModelException.
        """
        wrong = ""
        if labels is not None and not isinstance(labels, dict):
            wrong = "Labels must be a dictionary."
        elif labels and not all(isinstance(text, str) for pair in labels.items() for text in pair):
            wrong = "Names and values of labels must be texts."
        elif buckets is not None and not isinstance(buckets, list):
            wrong = "Buckets must be a list."
        elif buckets is not None and self._kind is not HISTOGRAM:
            wrong = "Unexpected buckets found."
        elif buckets is None and self._kind is HISTOGRAM:
            wrong = "Missing required buckets."
        if wrong:
            raise TritonModelException(f"Failed to create metric. {wrong}")
        key = tuple(sorted((labels or {}).items()))
        with self._making:
            if key not in self._metrics:
                bounds = None if buckets is None else [float(bound) for bound in buckets]
                value = _ask("Metric", metric=[self._name, labels or {}, bounds])
                self._metrics[key] = Metric(self._kind, value)
            return self._metrics[key]

    def __del__(self) -> None:
        """Drop its metrics. It may come at any moment, so that the supervisor is told later."""
        if self._is_made:
            for metric in self._metrics.values():
                metric._drop()
            _dropped.put(("family", self._name))


def flush() -> None:
    """Tell the supervisor what the process does not use any more."""
    with _lock:
        _flush()


def _flush() -> None:
    while not _dropped.empty():
        what = _dropped.get()
        _uses[what] -= 1
        if not _uses[what]:
            del _uses[what]
            linked().say({"release": what})


def _ask(kind: str, **what: Any) -> Any:
    """Have the supervisor make a family, or a metric, whose value is returned. Raises TritonModelException."""
    try:
        with _lock:
            _flush()
            answer = linked().call(**what)
            if kind == "MetricFamily":
                _uses["family", what["family"][0]] += 1
                return None
            _uses["metric", answer["record"]] += 1
            return _Value(answer["record"], answer["bounds"])
    except (TritonModelException, TypeError, ValueError, OSError) as error:  # also of what is no JSON
        raise TritonModelException(f"Error when creating {kind}: {error}") from None
