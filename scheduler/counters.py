"""What scheduling did, counted per model and in total, and a line of it in the log from time to time."""

import logging
from dataclasses import astuple, dataclass, fields

PERIOD_US = 60e6
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    blocks: int = 0
    conflicts: int = 0  # blocks that got fewer cores than they wanted (VELTAIR's term)
    preemptions: int = 0  # blocks that were stopped before their end
    grown: int = 0
    shrunk: int = 0
    rejected: int = 0
    layers: int = 0  # executed
    versions: int = 0  # of them not in their default version


class CounterBook:
    """Counters by model name. Costs nothing between two lines in the log but the counting."""

    def __init__(self) -> None:
        self.models: dict[str, Counters] = {}
        self._written: dict[str, tuple[int, ...]] = {}
        self._next_us = 0.0

    def of(self, model: str) -> Counters:
        """Return a model's counters, to be counted up."""
        known = self.models.get(model)
        if known is None:
            known = self.models[model] = Counters()
        return known

    def total(self) -> Counters:
        """Return the sums over all models."""
        columns = zip(*(astuple(counters) for counters in self.models.values()), strict=True)
        return Counters(*(sum(column) for column in columns))

    def write(self, now_us: float) -> None:
        """Log what is new, a line per model, unless that was done less than a minute ago."""
        if self._next_us == 0.0:
            self._next_us = now_us + PERIOD_US
        if now_us >= self._next_us:
            self._next_us = now_us + PERIOD_US
            self.write_now()

    def write_now(self) -> None:
        """Log each model's counts if they have changed since the last time."""
        for model, counters in self.models.items():
            counts = astuple(counters)
            if counts != self._written.get(model):
                self._written[model] = counts
                _log.info("%s: %s", model, describe(counters))


def describe(counters: Counters) -> str:
    """Return the counts for people; zeros are left out."""
    named = [(field.name, getattr(counters, field.name)) for field in fields(counters)]
    return ", ".join(f"{name} {count}" for name, count in named if count) or "nothing yet"
