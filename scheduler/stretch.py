"""By how much blocks take longer than predicted, for whatever reason: what deadlines have to be reckoned with.

A profile is measured model by model on cores that do nothing else. In the server a model finds caches that others have
filled, and front end and scheduler may have the cores for a while. Then all of a gang wait at the next layer boundary
for the rank whose core they have, so gangs of several cores lose more than those of one.
"""

from typing import Final

from gangway.scheduler.interference import Unit

LEAST_UNIT_US: Final = 500.0  # in shorter ones waking up counts for more than anything else
MEAN_GAIN: Final = 1 / 8
DEVIATION_GAIN: Final = 1 / 4
MOST: Final = 2.0  # a machine that stood still says nothing about the next query
WIDTH_GAIN: Final = 1 / 32  # of all models together
MOST_OF_A_WIDTH: Final = 4.0  # times its prediction a block counts at most


class Stretches:
    """Per model the smoothed ratio of time to prediction, plus its smoothed deviation.

    The estimator of TCP's retransmission time-out (Jacobson, SIGCOMM 1988): cheap, and wide where times vary.
    """

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}
        self._deviation: dict[int, float] = {}
        self._narrow = self._wide = 1.0  # means over all models: gangs of one core, and of several
        self.factors: dict[int, float] = {}  # by model; none: nothing is known

    @property
    def wide_stretch(self) -> float:
        """By how much gangs of several cores exceed predictions more than gangs of one, all models together."""
        return max(1.0, self._wide / self._narrow)

    def finished(self, model_id: int, unit: Unit, level: float) -> None:
        """Take a unit into account that ended at this level of interference."""
        predicted_us = unit.model.span_us(unit.begin_layer, unit.end_layer, unit.cores, unit.rows, level)
        if not unit.model.measured or predicted_us < LEAST_UNIT_US:
            return
        ratio = unit.time_us / predicted_us
        self._see_width(unit.cores, min(ratio, MOST_OF_A_WIDTH))
        ratio = min(ratio, MOST)
        mean = self._mean.setdefault(model_id, ratio)
        error = ratio - mean
        deviation = self._deviation.get(model_id, 0.0)
        self._mean[model_id] = mean = mean + MEAN_GAIN * error
        self._deviation[model_id] = deviation = deviation + DEVIATION_GAIN * (abs(error) - deviation)
        self.factors[model_id] = min(max(mean + deviation, 1.0), MOST)

    def _see_width(self, cores: int, ratio: float) -> None:
        if cores == 1:
            self._narrow += WIDTH_GAIN * (ratio - self._narrow)
        else:
            self._wide += WIDTH_GAIN * (ratio - self._wide)

    def forget(self, model_id: int) -> None:
        """The model is not served any more, or has another profile."""
        for known in (self._mean, self._deviation, self.factors):
            known.pop(model_id, None)
