"""What one scrape reads: statistics of all front ends, and what the other processes say in shared memory.

Nothing is counted for metrics alone but what `statistics.py` adds up anyway. Requests that wait or run are counted in
the slot tables of all front ends.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

from gangway.executor.control import ControlSegment, ModelAccount, SchedulerStatus, ServerStatus, WorkerStatus
from gangway.executor.slots import SlotState
from gangway.server.front_end.shared import Peers
from gangway.server.models.served import Models, ServedModel
from gangway.server.requests.data_plane import DataPlane
from gangway.server.statistics import Figures

# Processor and memory of the whole machine, as Triton's CPU metrics have them. Linux's /proc.

PROC = Path("/proc")
_IDLE_FIELDS = (3, 4)  # idle, iowait
_COUNTED_FIELDS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already


@dataclass(frozen=True)
class MachineReading:
    """`utilization` is the share (0 to 1) of all cores' time that was not idle, since the last interval."""

    utilization: float
    memory_total_bytes: int
    memory_used_bytes: int


class _Ticks(NamedTuple):
    idle: int
    total: int


class Machine:
    """Reads when it is asked. The utilization is that of an interval of `interval_s` at least. Not safe for threads."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._begin = _read_ticks()
        self._begin_s = time.monotonic()
        self._utilization = 0.0

    def read(self) -> MachineReading:
        """Return how it is now. Raises OSError if /proc cannot be read."""
        now_s = time.monotonic()
        if now_s - self._begin_s >= self._interval_s:
            ticks = _read_ticks()
            if (total := ticks.total - self._begin.total) > 0:
                self._utilization = min(max(1 - (ticks.idle - self._begin.idle) / total, 0.0), 1.0)
            self._begin, self._begin_s = ticks, now_s
        total_bytes, used_bytes = _read_memory()
        return MachineReading(self._utilization, total_bytes, used_bytes)


def _read_ticks() -> _Ticks:
    with (PROC / "stat").open() as file:
        ticks = [int(field) for field in file.readline().split()[1 : 1 + _COUNTED_FIELDS]]
    return _Ticks(sum(ticks[field] for field in _IDLE_FIELDS), sum(ticks))


def _read_memory() -> tuple[int, int]:
    """Return bytes in all, and bytes that no process could have."""
    kilobytes = {}
    for line in (PROC / "meminfo").read_text().splitlines()[:8]:
        key, _, value = line.partition(":")
        kilobytes[key] = int(value.split()[0])
    total = kilobytes["MemTotal"]
    return total * 1024, (total - kilobytes["MemAvailable"]) * 1024


# Families of samples in Prometheus' text format, version 0.0.4.
#
# Written by hand: of 20 models prometheus_client makes the text in 24 ms, in which no request gets the interpreter,
# where this takes 3; and it wants `_total` at the end of every counter's name, which Triton's have not. Tests read
# with it.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["counter", "gauge"]
Labels = str  # as they are written, without braces: see `labels`
NO_LABELS: Labels = ""
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labels(values: Mapping[str, str]) -> Labels:
    """Return labels as they are written. Names must be such that Prometheus accepts them; values may be anything."""
    return ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items()])


def family(name: str, help_text: str, kind: Kind, samples: Iterable[tuple[Labels, float]]) -> str:
    """Return a family with one sample for each set of labels."""
    return _head(name, help_text, kind) + "".join([f"{name}{{{own}}} {value}\n" for own, value in samples])


def single(name: str, help_text: str, kind: Kind, value: float) -> str:
    """Return a family of one sample without labels."""
    return f"{_head(name, help_text, kind)}{name} {value}\n"


class HistogramFamily:
    """Histograms of one name. Bounds are in the unit of the name."""

    def __init__(self, name: str, help_text: str) -> None:
        self._name = name
        self._parts = [_head(name, help_text, "histogram")]

    def add(self, own: Labels, bounds: Sequence[float], counts: Sequence[int], total: float) -> None:
        """Add the histogram of one set of labels: values in each range, and the sum of all values."""
        begin = f"{self._name}_bucket{{{own}"
        ends = _ends(tuple(bounds))
        sums = list(accumulate(counts))
        self._parts += [f"{begin}{end}{count}\n" for end, count in zip(ends, sums, strict=True)]
        self._parts.append(f"{self._name}_count{{{own}}} {sums[-1]}\n{self._name}_sum{{{own}}} {total}\n")

    def text(self) -> str:
        """Return the family."""
        return "".join(self._parts)


@lru_cache(maxsize=256)
def _ends(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return what stands behind the other labels of each bucket."""
    return tuple([f',le="{edge}"}} ' for edge in (*map(float, bounds), "+Inf")])


def _head(name: str, help_text: str, kind: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


_NO_LABEL_CHARACTER = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True)
class ModelReading:
    """One version of a model. `waiting` requests have not begun; `in_flight` counts those, too."""

    labels: Labels
    model: ServedModel
    figures: Figures
    waiting: int
    in_flight: int
    account: ModelAccount


@dataclass(frozen=True)
class Reading:
    """Everything at about one moment. The scheduler's part may be a second old."""

    models: tuple[ModelReading, ...]
    scheduler: SchedulerStatus
    server: ServerStatus
    workers: tuple[WorkerStatus, ...]
    leases: int  # that there are
    slots: int
    slots_in_use: int
    heap_bytes: int  # in use
    heap_capacity_bytes: int
    refused_unread: int
    machine: MachineReading | None


class Source:
    """Reads when it is asked. `machine` None: nothing of the machine. `peers`: other front ends.

    Not safe for threads.
    """

    def __init__(
        self,
        models: Callable[[], Models],
        plane: DataPlane,
        control: ControlSegment,
        machine: Machine | None,
        peers: Peers = Peers(),  # noqa: B008 - frozen
    ) -> None:
        self._models = models
        self._plane = plane
        self._control = control
        self._machine = machine
        self._peers = peers

    def read(self) -> Reading:
        """Return how things are."""
        served = self._models().served()
        states = Counter(self._plane.slots.in_use())
        usage = self._plane.usage()
        requests, front_ends = usage.requests, 1 + len(self._peers.tables)
        for table in self._peers.tables:
            theirs = Counter(table.in_use())
            states += theirs
            requests += theirs.total()
        scheduler = self._control.scheduler_block.read({model_id for model in served for model_id in ids_of(model)})
        return Reading(
            models=tuple([_read_model(model, states, scheduler) for model in served]),
            scheduler=scheduler,
            server=self._control.server_block.read(),
            workers=tuple([self._control.status(rank) for rank in range(self._control.layout.workers)]),
            leases=len(self._control.leases),
            slots=self._plane.slots.slots * front_ends,
            slots_in_use=requests,
            heap_bytes=usage.heap_bytes + self._peers.heap_bytes,
            heap_capacity_bytes=self._plane.heap.capacity_bytes * front_ends,
            refused_unread=self._plane.admission.refused + self._peers.refused_unread,
            machine=None if self._machine is None else self._machine.read(),
        )


def memory_bytes(model: ServedModel, control: ControlSegment) -> int:
    """Return what a model is known to hold: its weights, which all workers share, and its arenas."""
    ids = ids_of(model)
    return model.weights_bytes + control.scheduler_block.read(ids).account(ids).arena_bytes


def ids_of(model: ServedModel) -> frozenset[int]:
    """Return the numbers under which the model is executed: its own, and those of what is compiled of it."""
    if model.is_ensemble:
        return frozenset()  # its models have numbers
    return frozenset((model.model_id, *(part.layout.model_id for part in model.compiled.values())))


def labels_of(model: ServedModel) -> Labels:
    """Return Triton's labels: name, version, and the config's `metric_tags` with an underline before their keys.

    What cannot stand in a label's name becomes an underline.
    """
    tags = {f"_{_NO_LABEL_CHARACTER.sub('_', key)}": value for key, value in model.config.metric_tags.items()}
    return labels({"model": model.name, "version": str(model.version), **tags})


def _read_model(
    model: ServedModel, states: Mapping[tuple[SlotState, int], int], scheduler: SchedulerStatus
) -> ModelReading:
    ids = ids_of(model)
    waiting, running, done = (
        sum(states.get((state, model_id), 0) for model_id in ids)
        for state in (SlotState.SUBMITTED, SlotState.RUNNING, SlotState.DONE)
    )
    return ModelReading(
        labels=labels_of(model),
        model=model,
        figures=model.statistics.figures(),
        waiting=waiting,
        in_flight=model.uses.count if model.is_ensemble else waiting + running + done,
        account=scheduler.account(ids),
    )
