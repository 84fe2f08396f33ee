"""Cumulative times of a model's layers: a block under constant conditions is two look-ups."""

from collections.abc import Sequence
from itertools import accumulate

from gangway.scheduler.profiles import ModelProfile

MAX_TABLES = 20_000  # of some hundred numbers each


class TimeTables:
    """`times(...)[l]`: microseconds from the query's first layer to the beginning of layer l, for one row.

    One table for each (model, versions, number of cores, interference level), made when it is asked for first.
    """

    def __init__(self, level_step: float) -> None:
        self._level_step = level_step
        self._times: dict[tuple[int, tuple[int, ...], int, int, int], list[float]] = {}
        self._memory: dict[int, list[float]] = {}

    def times(
        self, model: ModelProfile, cores: int, steps: int, begin: int = 0, versions: tuple[int, ...] = ()
    ) -> list[float]:
        """Return the table at interference level `steps` x level_step; `versions` are those from layer `begin` on."""
        key = (model.model_id, versions, begin if versions else 0, cores, steps)
        table = self._times.get(key)
        if table is None:
            if len(self._times) >= MAX_TABLES:
                self._times.clear()
            table = self._times[key] = self._make(model, cores, steps * self._level_step, begin, versions)
        return table

    def demand(self, model: ModelProfile, begin: int, end: int, times: Sequence[float]) -> float:
        """Return the mean demand for memory of layers [begin, end), in one core's bandwidth; 0 if it is not known."""
        if not model.memory_us:
            return 0.0
        memory = self._memory.get(model.model_id)
        if memory is None:
            memory = self._memory[model.model_id] = list(accumulate(model.memory_us, initial=0.0))
        time_us = times[end] - times[begin]
        return (memory[end] - memory[begin]) / time_us if time_us > 0 else 0.0

    def _make(
        self, model: ModelProfile, cores: int, level: float, begin: int, versions: tuple[int, ...]
    ) -> list[float]:
        chosen = [0] * model.layers
        chosen[begin : begin + len(versions)] = versions
        return list(
            accumulate(
                (model.layer_us(layer, cores, chosen[layer], level) for layer in range(model.layers)), initial=0.0
            )
        )
