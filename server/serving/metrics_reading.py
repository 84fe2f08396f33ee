"""What one scrape of the metrics reads, and what front ends know of each other.

Statistics of all front ends lie in shared memory (`statistics.py`), and nothing but what they add up is counted for
metrics. Requests that wait or run are counted in the slot tables of all front ends.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from gangway.executor.control import ControlSegment, ModelAccount, SchedulerStatus, ServerStatus, WorkerStatus
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotState, SlotTable
from gangway.server.models.served import Models, ServedModel, own_statistics
from gangway.server.requests.data_plane import DataPlane
from gangway.server.statistics import CacheFigures, Statistics, StatisticsTable, VersionFigures


class Peers(msgspec.Struct, frozen=True):
    """What a front end sees of the others: their slots, and counters of their memory and of calls refused unread."""

    tables: tuple[SlotTable, ...] = ()
    statistics: StatisticsTable | None = None
    sections: tuple[int, ...] = ()

    @property
    def heap_bytes(self) -> int:
        """Bytes of tensors of their requests in flight, as they were within the last second or so."""
        return 0 if self.statistics is None else sum(map(self.statistics.heap_bytes, self.sections))

    @property
    def caches(self) -> CacheFigures | None:
        """The response caches of all front ends; None: they have none."""
        figures = None if self.statistics is None else self.statistics.cache()
        return figures if figures is not None and figures.size_bytes else None

    @property
    def refused_unread(self) -> int:
        """How many calls they have refused unread."""
        return 0 if self.statistics is None else sum(map(self.statistics.refused_unread, self.sections))


class SharedStatistics:
    """Attaches to the table of statistics and the io segments of others. Raises ValueError if they are something else.

    `index`: the front end's number. `statistics_fd`: -1: there is no table.
    """

    def __init__(self, index: int, statistics_fd: int, other_io_fds: Sequence[int], plane: DataPlane) -> None:
        self._plane = plane
        self._section = index - 1  # number 0 is the supervisor, which counts nothing
        self._table = StatisticsTable.attach(statistics_fd) if statistics_fd >= 0 else None
        tables = tuple(SlotTable(Segment.attach(fd), plane.slots.slots) for fd in other_io_fds)
        if self._table is not None:
            plane.admission.count_in(self._table.refused_unread_word(self._section))
        sections = range(self._table.front_ends) if self._table else ()
        self.peers = Peers(tables, self._table, tuple(number for number in sections if number != self._section))

    def make_statistics(self, row: int, response_bounds_ns: tuple[int, ...]) -> Statistics:
        """Return the counters of a model that has been announced with this row; -1: it has none."""
        if self._table is None or row < 0:
            return own_statistics(row, response_bounds_ns)
        return self._table.statistics(self._section, row, response_bounds_ns)

    def count_cache(self, count_in: Callable[[memoryview], None]) -> None:
        """Have our response cache count where all front ends see it."""
        if self._table is not None:
            count_in(self._table.cache_words(self._section))

    def heap_bytes(self) -> int:
        """Return how many bytes of tensors our requests have, and let the others know."""
        used_bytes = self._plane.usage().heap_bytes
        if self._table is not None:
            self._table.set_heap_bytes(self._section, used_bytes)
        return used_bytes


PROC = Path("/proc")
_IDLE_FIELDS = (3, 4)  # idle, iowait
_COUNTED_FIELDS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already


class MachineReading(msgspec.Struct, frozen=True):
    """`utilization` is the share (0 to 1) of all cores' time that was not idle, since the last interval."""

    utilization: float
    memory_total_bytes: int
    memory_used_bytes: int


class _Ticks(NamedTuple):
    idle: int
    total: int


class MachineMeter:
    """Processor and memory of the whole machine, as Triton's CPU metrics have them, from Linux's /proc.

    The utilization is that of an interval of `interval_s` at least. Not safe for threads.
    """

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


Labels = str  # as they are written, without braces: see `labels`
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_NO_LABEL_CHARACTER = re.compile(r"[^a-zA-Z0-9_]")


class ModelReading(msgspec.Struct, frozen=True):
    """One version of a model. `waiting` requests have not begun; `in_flight` counts those, too."""

    labels: Labels
    model: ServedModel
    figures: VersionFigures
    waiting: int
    in_flight: int
    account: ModelAccount
    is_idle: bool = False

    @property
    def weights_bytes(self) -> int:
        """Those that workers map at this moment."""
        return 0 if self.is_idle else self.model.weights_bytes


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
    loop_lag_s: float
    cache: CacheFigures | None
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
        machine: MachineMeter | None,
        peers: Peers = Peers(),  # noqa: B008 - frozen
    ) -> None:
        self._models = models
        self._plane = plane
        self._control = control
        self._machine = machine
        self._peers = peers

    def read(self) -> Reading:
        """Return how things are."""
        *_, reading = self.steps()
        assert reading is not None, "the last step"
        return reading

    def steps(self) -> Iterator[Reading | None]:
        """Yield None after each model, for who has something else to do meanwhile, and then how things are."""
        known = self._models()
        served = known.served()
        states = Counter(self._plane.slots.in_use())
        usage = self._plane.usage()
        requests, front_ends = usage.requests, 1 + len(self._peers.tables)
        for table in self._peers.tables:
            theirs = Counter(table.in_use())
            states += theirs
            requests += theirs.total()
        scheduler = self._control.scheduler_block.read({model_id for model in served for model_id in ids_of(model)})
        models = []
        for model in served:
            models.append(_read_model(model, states, scheduler, known.is_idle(model)))
            yield None
        yield Reading(
            models=tuple(models),
            scheduler=scheduler,
            server=self._control.server_block.read(),
            workers=tuple([self._control.status(rank) for rank in range(self._control.layout.workers)]),
            leases=len(self._control.leases),
            slots=self._plane.slots.slots * front_ends,
            slots_in_use=requests,
            heap_bytes=usage.heap_bytes + self._peers.heap_bytes,
            heap_capacity_bytes=self._plane.heap.capacity_bytes * front_ends,
            refused_unread=self._plane.admission.refused + self._peers.refused_unread,
            loop_lag_s=self._control.heartbeats.loop_lag_s(),
            cache=self._peers.caches,
            machine=None if self._machine is None else self._machine.read(),
        )


def memory_bytes(model: ServedModel, is_idle: bool, control: ControlSegment) -> int:
    """Return what a model is known to hold: its weights, which all workers share unless it is idle, and its arenas."""
    ids = ids_of(model)
    return model.weights_bytes * (not is_idle) + control.scheduler_block.read(ids).account(ids).arena_bytes


def ids_of(model: ServedModel) -> frozenset[int]:
    """Return the numbers under which the model is executed: its own, and those of what is compiled of it."""
    if model.is_ensemble:
        return frozenset()  # its models have numbers
    return frozenset((model.model_id, *(part.model_id for part in model.compiled.values())))


def labels(values: Mapping[str, str]) -> Labels:
    """Return labels as they are written. Names must be such that Prometheus accepts them; values may be anything."""
    return ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items()])


def labels_of(model: ServedModel) -> Labels:
    """Return Triton's labels: name, version, and the config's `metric_tags` with an underline before their keys.

    What cannot stand in a label's name becomes an underline.
    """
    tags = {f"_{_NO_LABEL_CHARACTER.sub('_', key)}": value for key, value in model.config.metric_tags.items()}
    return labels({"model": model.name, "version": str(model.version), **tags})


def _read_model(
    model: ServedModel, states: Mapping[tuple[SlotState, int], int], scheduler: SchedulerStatus, is_idle: bool
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
        is_idle=is_idle,
    )
