"""How much running queries slow each other down: the level of interference that policies see.

Level 1 means that a layer takes (1 + slope) times its isolated time, VELTAIR's definition with the slopes of the
profile. What measures it is behind one interface, fed with every unit (layer block) that ends.
"""

from collections import deque
from statistics import median
from typing import Final, Protocol

from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.values import value

WINDOW_US: Final = 250_000.0  # what is older says nothing about now
SAMPLES: Final = 15
SPACING_US: Final = 2000.0  # more often it costs more than it tells
LEAST_UNIT_US: Final = 100.0  # in shorter ones waking up counts for more than caches
LEAST_SLOPE: Final = 0.2  # mean of a unit: below it noise counts for more than interference
TOLERANCE: Final = 1.05  # so far from its isolated time a unit may be when it is alone
HIGHEST: Final = 4.0


@value(frozen=True, slots=True)
class Unit:
    """Layers [begin_layer, end_layer) of a query that ran in `time_us`, always on the same number of cores."""

    model: ModelProfile
    begin_layer: int
    end_layer: int
    cores: int
    rows: int
    versions: tuple[int, ...]  # one per layer; empty: the default ones
    time_us: float


class Interference(Protocol):
    """Says how much interference there is. `name`: where it takes that from, for the log."""

    name: str

    def finished(self, unit: Unit, now_us: float) -> None:
        """A unit has ended."""

    def level(self, now_us: float) -> float:
        """Return the level now; 0 when nothing is known."""


class SlowdownInterference:
    """The level by which the units just finished were slower than alone: the median of the last ones.

    Units of models without a measured profile, or whose layers hardly depend on memory, say nothing. The median,
    because a core that the front end or the system took away for a while is no interference.
    """

    name = "slowdown of finished units"

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)  # (when, level)
        self._level: float | None = 0.0  # None: to be found again

    def finished(self, unit: Unit, now_us: float) -> None:
        """Take the unit into account if it says something."""
        if self._samples and now_us < self._samples[-1][0] + SPACING_US:
            return
        if not unit.model.measured or not unit.model.slope:
            return
        isolated_us, slope_us = _isolated_us(unit)
        if isolated_us < LEAST_UNIT_US or slope_us < LEAST_SLOPE * isolated_us:
            return
        level = (unit.time_us - TOLERANCE * isolated_us) / slope_us
        self._samples.append((now_us, min(max(level, 0.0), HIGHEST)))
        self._level = None

    def level(self, now_us: float) -> float:
        """Return the median of the window."""
        samples = self._samples
        while samples and samples[0][0] < now_us - WINDOW_US:
            samples.popleft()
            self._level = None
        if self._level is None:
            self._level = median(level for _, level in samples) if samples else 0.0
        return self._level


def _isolated_us(unit: Unit) -> tuple[float, float]:
    """Return the unit's isolated time, and by how much a level of 1 lengthens it."""
    model, begin, end = unit.model, unit.begin_layer, unit.end_layer
    if not unit.versions:
        isolated_us = model.span_us(begin, end, unit.cores, unit.rows)
        return isolated_us, model.span_us(begin, end, unit.cores, unit.rows, 1.0) - isolated_us
    layers = list(zip(range(begin, end), unit.versions, strict=False))
    scale = model.rows_scale(unit.cores, unit.rows)
    isolated_us = sum(model.layer_us(layer, unit.cores, version) for layer, version in layers)
    disturbed_us = sum(model.layer_us(layer, unit.cores, version, 1.0) for layer, version in layers)
    return isolated_us * scale, (disturbed_us - isolated_us) * scale
