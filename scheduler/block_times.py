"""What the times of finished blocks say: about interference, and about how well they were predicted."""

import logging
from collections.abc import Sequence
from pathlib import Path

from gangway.scheduler.counter_interference import from_profiles
from gangway.scheduler.gangs import Gang
from gangway.scheduler.interference import Interference, SlowdownInterference, Unit
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.stretch import Stretches

_log = logging.getLogger(__name__)


class BlockTimes:
    """Feeds what learns from them. `cores`: of the workers, whose counters may say more."""

    def __init__(self, cores: Sequence[int]) -> None:
        self.interference: Interference = SlowdownInterference()
        self.stretches = Stretches()
        self._cores = cores

    def use_counters(self, profiles: Path, machine_id: str) -> None:
        """Take the level of interference from counters, if the folder of profiles says how and the machine can."""
        if isinstance(self.interference, SlowdownInterference):
            counters = from_profiles(profiles, machine_id, self._cores)
            if counters is not None:
                self.interference = counters
                _log.info("level of interference: from %s", counters.name)

    def finished(self, gang: Gang, profile: ModelProfile | None, end_layer: int, turned_ns: int) -> None:
        """Take into account the block that a gang ended before `end_layer` at that time, if it says something."""
        query = gang.unit.query
        if profile is None or not profile.measured or gang.resized or end_layer == query.next_layer:
            return
        time_us = (turned_ns - gang.joined_ns) / 1e3
        block = Unit(profile, query.next_layer, end_layer, gang.wanted, query.rows, gang.versions, time_us)
        self._learn(query.model_id, block, turned_ns / 1e3)

    def walked_through(self, profile: ModelProfile | None, joined_ns: int, ended_ns: int) -> None:
        """The same for a query of one row that one core has computed."""
        if profile is not None and profile.measured:
            block = Unit(profile, 0, profile.layers, 1, 1, (), (ended_ns - joined_ns) / 1e3)
            self._learn(profile.model_id, block, ended_ns / 1e3)

    def _learn(self, model_id: int, block: Unit, ended_us: float) -> None:
        self.interference.finished(block, ended_us)
        self.stretches.finished(model_id, block, self.interference.level(ended_us))
