"""What one scrape reads: statistics of all front ends, and what the other processes say in shared memory.

Nothing is counted for metrics alone but what `statistics.py` adds up anyway. Requests that wait or run are counted in
the slot tables of all front ends.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gangway.executor.control import ControlSegment, WorkerStatus
from gangway.executor.slots import SlotState
from gangway.executor.status_blocks import ModelAccount, SchedulerStatus, ServerStatus
from gangway.server.counting.figures import Figures
from gangway.server.data_plane import DataPlane
from gangway.server.front_ends.shared import Peers
from gangway.server.metrics.families import Labels, labels
from gangway.server.metrics.machine import Machine, MachineReading
from gangway.server.models import Models, ServedModel

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
            refused_unread=self._plane.door.refused + self._peers.refused_unread,
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
