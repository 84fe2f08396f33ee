"""What policies know of a model: how long its layers take, on how many cores, and what is asked of it."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

SWITCH_US: Final = 300.0  # what it costs to stop a query and to start it again


@dataclass(frozen=True)
class ModelProfile:
    """One model. Times are microseconds.

    `latency_us[layer][version][cores - 1]`: isolated time of a layer of one row. Drivers always fill it: estimated
    when the model is loaded, measured later (`measured`); for every number of cores from 1 to the machine's.
    `slope[layer][version]`: at interference level i a layer takes (1 + slope i) times as long; empty: not known.
    `memory_us[layer]`, `compute_us[layer]`: Layerweaver+'s m and c of one row on one core; empty: not known.
    `rows_factor[cores - 1][i]`: a query of `batches[i]` rows takes so many times as long as the layers of one row.
    `together_factor[cores - 1][i]`: so many times, if gangs of as many cores with as many rows each fill the machine;
    empty: as if each were alone.
    """

    model_id: int
    name: str
    layers: int
    max_ranks: int  # more cores than this never help any layer
    latency_us: tuple[tuple[tuple[float, ...], ...], ...] = ()
    slope: tuple[tuple[float, ...], ...] = ()
    memory_us: tuple[float, ...] = ()
    compute_us: tuple[float, ...] = ()
    rows_factor: tuple[tuple[float, ...], ...] = ()
    together_factor: tuple[tuple[float, ...], ...] = ()
    batches: tuple[int, ...] = (1,)
    doubt: tuple[float, ...] = ()  # by batches: the share by which two of their times may differ by chance; empty: none
    isolated_us: float = 0.0  # as served: all cores, one row, alone; 0 until measured
    qos_us: float | None = None  # latency target, from arrival; None: best effort
    rejects_late: bool = False  # default queue policy: queries certain to be late are refused instead of served late
    indivisible: bool = False  # a query is one task on one core: nothing stops it
    measured: bool = False
    varies: bool = False  # its times depend on the shapes of a request: they are guesses, and bound nothing

    @property
    def cores(self) -> int:
        """For how many cores there are times."""
        return len(self.latency_us[0][0])

    def layer_us(self, layer: int, cores: int, version: int = 0, level: float = 0.0) -> float:
        """Return the time of one layer of one row."""
        time_us = self.latency_us[layer][version][min(cores, self.cores) - 1]
        return time_us * (1 + level * self.slope[layer][version]) if level and self.slope else time_us

    def span_us(self, begin: int, end: int, cores: int, rows: int = 1, level: float = 0.0) -> float:
        """Return the time of layers [begin, end), version 0 of each. Constant time."""
        index = min(cores, self.cores) - 1
        rest = self._rest_us[index]
        time_us = rest[begin] - rest[end]
        if level and self.slope:
            weighted = self._rest_slope_us[index]
            time_us += level * (weighted[begin] - weighted[end])
        return time_us * self.rows_scale(cores, rows)

    def remaining_us(self, layer: int, cores: int, rows: int = 1, level: float = 0.0) -> float:
        """Return the time from the beginning of `layer` to the model's end, version 0 of each. Constant time."""
        return self.span_us(layer, self.layers, cores, rows, level)

    def fastest_us(self, layer: int, cores: int, rows: int = 1) -> float:
        """Return the least time from the beginning of `layer` to the model's end. Constant time for one row.

        Every layer with its best version, on its best number of cores, at most `cores`. What is not known is left out:
        without measured batches all rows count as one, without times it is 0.
        """
        if self.varies or not self.latency_us or not (self.measured or self.isolated_us):
            return 0.0
        most = max(1, min(cores, self.cores))
        as_one = rows == 1 or len(self.batches) == 1
        scale = 1.0 if as_one else min(self.rows_scale(count, rows) for count in range(1, most + 1))
        return self._least_us[most - 1][layer] * scale

    def rows_us(self, cores: int, rows: int) -> float:
        """Return the time of the whole model, version 0 of each layer, for so many rows on a gang that is alone.

        That is a whole run's, for one row too, so that batches are compared by one measure. Layers' own medians add up
        to some percent less: what disturbs a run disturbs few of its layers.
        """
        if not self.rows_factor:
            return self.remaining_us(0, cores, rows)
        return self.remaining_us(0, cores) * self._between(self._factors(cores), rows)

    def together_us(self, cores: int, rows: int) -> float:
        """Return that time if gangs like this one, with as many rows, have all other cores (Packrat's instances)."""
        if not self.together_factor:
            return self.rows_us(cores, rows)
        factors = self.together_factor[min(cores, len(self.together_factor)) - 1]
        return self.remaining_us(0, cores) * self._between(factors, rows)

    def doubt_of(self, rows: int) -> float:
        """Return by what share measured times of so many rows may differ by chance: that of the next measured batch."""
        return self.doubt[min(bisect_left(self.batches, rows), len(self.batches) - 1)] if self.doubt else 0.0

    def rows_scale(self, cores: int, rows: int) -> float:
        """Return how many times as long as one row `rows` rows take: linear between measured numbers, and beyond."""
        if rows == 1:
            return 1.0
        if len(self.batches) == 1:
            return float(rows)
        return self._between(self._factors(cores), rows)

    @cached_property
    def is_brief(self) -> bool:
        """Whether a row takes next to nothing: less than stopping somebody for it. What is not known does not."""
        return 0.0 < self.fastest_us(0, self.cores) <= SWITCH_US

    @cached_property
    def derived(self) -> dict[object, Any]:
        """What is computed of this profile once, by whoever computes it; keys begin with the computing function."""
        return {}

    @cached_property
    def _rest_us(self) -> tuple[tuple[float, ...], ...]:
        return tuple(self._suffixes(cores, weighted=False) for cores in range(1, self.cores + 1))

    @cached_property
    def _rest_slope_us(self) -> tuple[tuple[float, ...], ...]:
        return tuple(self._suffixes(cores, weighted=True) for cores in range(1, self.cores + 1))

    @cached_property
    def _least_us(self) -> tuple[tuple[float, ...], ...]:
        best = [accumulate(map(min, zip(*layer, strict=True)), min) for layer in self.latency_us]  # by cores, of layers
        by_cores = zip(*best, strict=True)
        return tuple(tuple(reversed(list(accumulate(reversed(times), initial=0.0)))) for times in by_cores)

    def _factors(self, cores: int) -> Sequence[float]:
        return self.rows_factor[min(cores, len(self.rows_factor)) - 1]

    def _between(self, factors: Sequence[float], rows: int) -> float:
        """Return the factor for so many rows; beyond the largest measured batch by the slope of the last two."""
        if len(self.batches) == 1:
            return factors[0] * rows
        upper = max(1, min(bisect_left(self.batches, rows), len(self.batches) - 1))
        below, above = self.batches[upper - 1], self.batches[upper]
        low, high = factors[upper - 1], factors[upper]
        return low + (high - low) * (rows - below) / (above - below)

    def _suffixes(self, cores: int, weighted: bool) -> tuple[float, ...]:
        times = [
            self.latency_us[layer][0][cores - 1] * (self.slope[layer][0] if weighted else 1.0)
            for layer in range(self.layers)
        ]
        return tuple(reversed(list(accumulate(reversed(times), initial=0.0))))
