"""Which groups of an ensemble's steps run by a schedule that `gangway compose` has found for these artifacts.

A schedule is looked for when the ensemble is loaded, and counts until it is loaded again.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.scheduler.messages import LoadModel, UseSchedule
from gangway.server.control.supervisor.scheduler import SchedulerControl
from gangway.server.messages import Compounds

LEAST_GAIN_US = 100.0  # over one model after the other: a compound task is decided about, where others need not be
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UsedSchedule:
    """A schedule in use. `places`: of the steps in their ensemble, by stream. `time_us`: as measured, alone."""

    number: int
    model_ids: tuple[int, ...]
    places: tuple[int, ...]
    time_us: float


def compounds_of(used: Sequence[UsedSchedule]) -> Compounds:
    """Return what front ends are to know of them."""
    return tuple((each.number, each.model_ids) for each in used)


class StoredSchedules:
    """Those in the cache. `cores`: of the server. `target`: returns what the artifacts are built for."""

    def __init__(self, cache_dir: Path, cores: int, scheduler: SchedulerControl, target: Callable[[], str]) -> None:
        self._cache_dir = cache_dir
        self._cores = cores
        self._scheduler = scheduler
        self._target = target
        self._numbers = itertools.count(1)

    def use(self, title: str, groups: Sequence[Sequence[int]], model_ids: Sequence[int]) -> list[UsedSchedule]:
        """Begin to use what there is for groups of independent steps, which are places in `model_ids`.

        The scheduler is told. The log has what is used, and what is not.
        """
        used = []
        for group in groups:
            specs = [(place, self._scheduler.spec_of(model_ids[place])) for place in group]
            known = [(place, spec) for place, spec in specs if spec is not None]  # an inner ensemble has none
            if len(known) > 1 and (schedule := self._of_group(title, known)) is not None:
                used.append(schedule)
        return used

    def drop(self, used: Sequence[UsedSchedule]) -> None:
        """Tell the scheduler that they are not used any more."""
        for each in used:
            self._scheduler.drop_schedule(each.number)

    def busy_cores(self, model_id: int) -> float:
        """Return how many cores a model keeps busy when it is alone, as a share of all; 1 if that is not known."""
        spec = self._scheduler.spec_of(model_id)
        if spec is None or not spec.layer_us:
            return 1.0
        alone_us = sum(
            time_us / min(self._cores, ranks) for time_us, ranks in zip(spec.layer_us, spec.layer_ranks, strict=True)
        )
        return min(1.0, sum(spec.layer_us) / alone_us / self._cores)

    def _of_group(self, title: str, steps: Sequence[tuple[int, LoadModel]]) -> UsedSchedule | None:
        # Few servers have such ensembles, and each would import the scheduler's prediction when it starts.
        from gangway.scheduler.stages.schedule_file import find_schedule, schedule_path  # noqa: PLC0415

        specs = [spec for _, spec in steps]
        keys, names = tuple(spec.key for spec in specs), ", ".join(spec.name for spec in specs)
        target = self._target()
        found = find_schedule(self._cache_dir, keys, target)
        if found is None:
            return None
        obstacle = ""
        if found.cores != self._cores:
            obstacle = f"it is made for {found.cores} cores, and this server has {self._cores}"
        elif self._scheduler.node_count > 1:
            obstacle = "its gangs may have cores of several NUMA nodes, which this server keeps apart"
        elif found.layers != tuple(spec.layers for spec in specs):
            obstacle = "its models have other layers"
        elif limited := [spec.name for spec in specs if spec.limits or spec.preserve_ordering]:
            obstacle = f"requests to {limited[0]} may have to wait for each other"
        elif found.sequential_us - found.time_us < LEAST_GAIN_US:
            _log.info("%s: steps %s need no schedule: one after the other they are as fast", title, names)
            return None
        if obstacle:
            _log.warning("%s: the schedule of steps %s is not used: %s", title, names, obstacle)
            return None
        number, model_ids = next(self._numbers), tuple(spec.model_id for spec in specs)
        path = schedule_path(self._cache_dir, keys, found.machine)
        self._scheduler.use_schedule(UseSchedule(number, model_ids, str(path)))
        times_ms = (found.time_us / 1e3, found.sequential_us / 1e3)
        _log.info("%s: steps %s run by a schedule, in %.3g ms; one after the other %.3g ms", title, names, *times_ms)
        return UsedSchedule(number, model_ids, tuple(place for place, _ in steps), found.time_us)
