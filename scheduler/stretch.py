"""By how much blocks take longer than predicted, for whatever reason: what deadlines have to be reckoned with.

A profile is measured model by model on cores that do nothing else. In the server a model finds caches that others have
filled, and front end and scheduler may have the cores for a while.
"""

from typing import Final

from gangway.scheduler.interference import Unit

LEAST_UNIT_US: Final = 500.0  # in shorter ones waking up counts for more than anything else
GAIN: Final = 1 / 8  # weight of the latest block
MOST: Final = 2.0  # a machine that stood still says nothing about the next query


class Stretches:
    """Per model the smoothed ratio of time to prediction.

    Nothing is added for how much times vary: whoever reckons with the worst gives up queries that would be in time.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self.factors: dict[int, float] = {}  # by model; none: nothing is known

    def finished(self, model_id: int, unit: Unit, level: float) -> None:
        """Take a unit into account that ended at this level of interference."""
        predicted_us = unit.model.span_us(unit.begin_layer, unit.end_layer, unit.cores, unit.rows, level)
        if not unit.model.measured or predicted_us < LEAST_UNIT_US:
            return
        ratio = min(unit.time_us / predicted_us, MOST)
        mean = self._means.get(model_id, ratio)
        self._means[model_id] = mean = mean + GAIN * (ratio - mean)
        self.factors[model_id] = max(mean, 1.0)

    def forget(self, model_id: int) -> None:
        """The model is not served any more, or has another profile."""
        for known in (self._means, self.factors):
            known.pop(model_id, None)
