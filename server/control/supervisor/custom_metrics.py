"""Which metrics Python models have made: the names, and who uses them. The values lie in shared memory.

Families of the same name are one, and so are metrics of the same labels, whichever models and instances make them. A
metric is there while an instance of a loaded model uses it. What an instance uses stays its own when its process ends,
so that counters do not go backwards when another process takes its place.
"""

import heapq
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any, Final, NamedTuple

from gangway.server.custom_metrics import HISTOGRAM, KINDS, MOST_BOUNDS, RECORDS, CustomMetricsTable, Description
from gangway.server.errors import shortened

MOST_OF_MODEL: Final = 1000  # metrics of one model, and families
MOST_CHARACTERS: Final = 4000  # of a family
RESERVED: Final = ("nv_", "gangway_")
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_HISTOGRAM_SUFFIXES: Final = ("_bucket", "_sum", "_count")


class MetricError(ValueError):
    """A model asks for a metric that cannot be; the message is for the model."""


class User(NamedTuple):
    """An instance of a model, which has this number."""

    model_id: int
    instance: int


class Made(NamedTuple):
    """A metric: its record in shared memory, and the bounds of its buckets."""

    record: int
    bounds: tuple[float, ...]


@dataclass
class _CustomFamily:
    help: str
    kind: int
    users: set[User] = field(default_factory=set)
    metrics: dict[str, int] = field(default_factory=dict)  # records by labels


@dataclass
class _CustomMetric:
    family: str
    about: Description
    users: set[User] = field(default_factory=set)


class CustomMetrics:
    """The families and metrics of all models. What models give may be anything."""

    def __init__(self, table: CustomMetricsTable) -> None:
        self._table = table
        self._families: dict[str, _CustomFamily] = {}
        self._metrics: dict[int, _CustomMetric] = {}  # by record
        self._samples: dict[str, str] = {}  # families by the names that their samples have
        self._counts: Counter[tuple[int, str]] = Counter()  # by model and kind
        self._free = list(range(RECORDS))
        self._versions = count(1)

    @property
    def values_fd(self) -> int:
        """The descriptor of the memory of values, for instances to inherit."""
        return self._table.values.fd

    def family(self, user: User, name: Any, description: Any, kind: Any) -> None:
        """Let an instance use the family of this name, which is made if it is new. Raises MetricError."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise MetricError(f"{shortened(repr(name))} is no name of a metric: expected letters, digits, '_' and ':'")
        if name.startswith(RESERVED):
            raise MetricError(f"'{name}': names that begin with {' or '.join(RESERVED)} are the server's own")
        if not isinstance(description, str):
            raise MetricError(f"the description is {shortened(repr(description))}, expected a text")
        if len(name) + len(description) > MOST_CHARACTERS:
            raise MetricError(f"name and description have more than {MOST_CHARACTERS} characters")
        if not isinstance(kind, int) or kind not in range(len(KINDS)):
            raise MetricError(f"the kind is {shortened(repr(kind))}, expected COUNTER, GAUGE or HISTOGRAM")
        family = self._families.get(name)
        if family is not None and family.kind != kind:
            raise MetricError(f"'{shortened(name)}' is a {KINDS[family.kind]} already, so it cannot be a {KINDS[kind]}")
        if family is None:
            samples = _samples_of(name, kind)
            other = next((self._samples[sample] for sample in samples if sample in self._samples), None)
            if other is not None:
                raise MetricError(f"'{shortened(name)}' would have samples of the same name as '{shortened(other)}'")
            family = _CustomFamily(description, kind)
        self._join(user, family.users, "families")
        self._families[name] = family
        self._samples |= dict.fromkeys(_samples_of(name, kind), name)

    def metric(self, user: User, name: Any, labels: Any, buckets: Any) -> Made:
        """Let an instance use a metric of a family that it uses, which is made if it is new. Raises MetricError."""
        family = self._families.get(name)
        if family is None or user not in family.users:
            raise MetricError(f"there is no family {shortened(repr(name))}")
        text = _labels_of(labels, family.kind)
        record = family.metrics.get(text)
        if record is None:
            about = Description(name, family.help.translate(_HELP_ESCAPES), family.kind, text, _bounds_of(buckets))
            users: set[User] = set()
            self._join(user, users, "metrics")
            try:
                record = self._begin(about)
            except MetricError:
                self._leave(user, users, "metrics")
                raise
            family.metrics[text] = record
            self._metrics[record] = _CustomMetric(name, about, users)
        metric = self._metrics[record]
        self._join(user, metric.users, "metrics")
        return Made(record, metric.about.bounds)

    def release_family(self, user: User, name: Any) -> None:
        """An instance does not use a family any more."""
        family = self._families.get(name)
        if family is None or user not in family.users:
            return
        self._leave(user, family.users, "families")
        self._drop_unused(name, family)

    def release_metric(self, user: User, record: Any) -> None:
        """An instance does not use a metric any more; the last one's end is the metric's."""
        metric = self._metrics.get(record)
        if metric is None or user not in metric.users:
            return
        self._leave(user, metric.users, "metrics")
        if not metric.users:
            del self._metrics[record]
            family = self._families[metric.family]
            del family.metrics[metric.about.labels]
            self._table.end(record)
            heapq.heappush(self._free, record)
            self._drop_unused(metric.family, family)

    def forget(self, model_id: int) -> None:
        """A model has been unloaded."""
        for record, metric in list(self._metrics.items()):
            for user in [each for each in metric.users if each.model_id == model_id]:
                self.release_metric(user, record)
        for name, family in list(self._families.items()):
            for user in [each for each in family.users if each.model_id == model_id]:
                self.release_family(user, name)

    def _join(self, user: User, users: set[User], what: str) -> None:
        """Add a user, and count what its model begins to use. Raises MetricError if it has too much."""
        if user in users:
            return
        if all(each.model_id != user.model_id for each in users):
            if self._counts[user.model_id, what] >= MOST_OF_MODEL:
                raise MetricError(f"the model has {MOST_OF_MODEL} {what}, more cannot be")
            self._counts[user.model_id, what] += 1
        users.add(user)

    def _leave(self, user: User, users: set[User], what: str) -> None:
        """Take a user out, and count what its model does not use any more."""
        users.discard(user)
        if all(each.model_id != user.model_id for each in users):
            self._counts[user.model_id, what] -= 1

    def _begin(self, about: Description) -> int:
        if not self._free:
            raise MetricError(f"the models of the server have {RECORDS} metrics, more cannot be")
        try:
            self._table.begin(self._free[0], next(self._versions), about)
        except (ValueError, OSError) as error:
            raise MetricError(str(error)) from error
        return heapq.heappop(self._free)

    def _drop_unused(self, name: str, family: _CustomFamily) -> None:
        if not family.users and not family.metrics:
            del self._families[name]
            for sample in _samples_of(name, family.kind):
                del self._samples[sample]


def _samples_of(name: str, kind: int) -> list[str]:
    """Return the names that stand in Prometheus' text."""
    return [name, *(name + suffix for suffix in _HISTOGRAM_SUFFIXES if kind == HISTOGRAM)]


def _labels_of(labels: Any, kind: int) -> str:
    if not isinstance(labels, Mapping):
        raise MetricError(f"labels are {shortened(repr(labels))}, expected a dictionary")
    for name, value in labels.items():
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name) or (kind == HISTOGRAM and name == "le"):
            raise MetricError(f"{shortened(repr(name))} is no name of a label: expected letters, digits and '_'")
        if not isinstance(value, str):
            raise MetricError(f"label '{shortened(name)}' is {shortened(repr(value))}, expected a text")
    return ",".join([f'{name}="{labels[name].translate(_ESCAPES)}"' for name in sorted(labels)])


def _bounds_of(buckets: Any) -> tuple[float, ...]:
    """Return the bounds of a histogram's buckets; of others there are none."""
    bounds = buckets or ()
    if not isinstance(bounds, Sequence) or not all(isinstance(bound, int | float) for bound in bounds):
        raise MetricError(f"buckets are {shortened(repr(buckets))}, expected a list of numbers")
    if len(bounds) > MOST_BOUNDS:
        raise MetricError(f"there are {len(bounds)} buckets, at most {MOST_BOUNDS} can be")
    ascends = all(low < high for low, high in pairwise(bounds))
    if not ascends or not all(map(math.isfinite, bounds)):
        raise MetricError(f"buckets are {shortened(repr(buckets))}, expected finite numbers in ascending order")
    return tuple(map(float, bounds))
