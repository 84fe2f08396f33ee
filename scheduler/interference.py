"""What the times of finished blocks say: how much queries slow each other down, and how well times are predicted.

Level 1 of interference means that a layer takes (1 + slope) times its isolated time, with the slopes of the profile:
VELTAIR's definition (ASPLOS 2022).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from gangway.executor.fast_path import Completed
from gangway.scheduler.gangs import Gang
from gangway.scheduler.policy import LoneStart
from gangway.scheduler.policy_config import ERROR, INTERFERENCE, SLOWDOWN
from gangway.scheduler.profiles import ModelProfile


@dataclass(frozen=True, slots=True)
class FinishedBlock:
    """Layers [begin_layer, end_layer) of a query, which took `time_us` on the same cores and by one plan."""

    model: ModelProfile
    begin_layer: int
    end_layer: int
    cores: int
    rows: int
    versions: tuple[int, ...]  # one per layer; empty: the default ones
    time_us: float


class Interference:
    """The level by which the blocks just finished were slower than alone: the median of the last ones.

    Blocks of models without a measured profile, or whose layers hardly depend on memory, say nothing. The median,
    because a core that the front end or the system took away for a while is no interference.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=INTERFERENCE.max_samples)  # (when, level)
        self._level: float | None = 0.0  # None: to be found again

    def finished(self, block: FinishedBlock, now_us: float) -> None:
        """Take the block into account if it says something."""
        if self._samples and now_us < self._samples[-1][0] + INTERFERENCE.min_spacing_us:
            return
        if not block.model.measured or not block.model.slope:
            return
        isolated_us, slope_us = _isolated_us(block)
        if isolated_us < INTERFERENCE.min_block_us or slope_us < INTERFERENCE.min_slope * isolated_us:
            return
        level = (block.time_us - INTERFERENCE.tolerance_factor * isolated_us) / slope_us
        self._samples.append((now_us, min(max(level, 0.0), INTERFERENCE.max_level)))
        self._level = None

    def level(self, now_us: float) -> float:
        """Return the median of the window."""
        samples = self._samples
        while samples and samples[0][0] < now_us - INTERFERENCE.window_us:
            samples.popleft()
            self._level = None
        if self._level is None:
            self._level = median(level for _, level in samples) if samples else 0.0
        return self._level


def _isolated_us(block: FinishedBlock) -> tuple[float, float]:
    """Return the block's isolated time, and by how much a level of 1 lengthens it."""
    model, begin, end = block.model, block.begin_layer, block.end_layer
    if not block.versions:
        isolated_us = model.span_us(begin, end, block.cores, block.rows)
        return isolated_us, model.span_us(begin, end, block.cores, block.rows, 1.0) - isolated_us
    layers = list(zip(range(begin, end), block.versions, strict=False))
    scale = model.rows_scale(block.cores, block.rows)
    isolated_us = sum(model.layer_us(layer, block.cores, version) for layer, version in layers)
    disturbed_us = sum(model.layer_us(layer, block.cores, version, 1.0) for layer, version in layers)
    return isolated_us * scale, (disturbed_us - isolated_us) * scale


# By how much blocks take longer than predicted, for whatever reason: what deadlines have to be reckoned with.
#
# A profile is measured model by model on cores that do nothing else. In the server a model finds caches that others
# have filled, and front end and scheduler may have the cores for a while. Then all of a gang wait at the next layer
# boundary for the rank whose core they have, so gangs of several cores lose more than those of one.


class PredictionErrors:
    """Per model the smoothed ratio of time to prediction, plus its smoothed deviation.

    The estimator of TCP's retransmission time-out (Jacobson, SIGCOMM 1988): cheap, and wide where times vary.
    """

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}
        self._deviation: dict[int, float] = {}
        self._narrow = self._wide = 1.0  # means over all models: gangs of one core, and of several
        self.factors: dict[int, float] = {}  # by model; none: nothing is known

    @property
    def gang_slowdown(self) -> float:
        """By how much gangs of several cores exceed predictions more than gangs of one, all models together."""
        return max(1.0, self._wide / self._narrow)

    def finished(self, model_id: int, block: FinishedBlock, level: float) -> None:
        """Take a block into account that ended at this level of interference."""
        isolated_us, slope_us = _isolated_us(block)
        predicted_us = isolated_us + level * slope_us
        if not block.model.measured or predicted_us < ERROR.min_predicted_us:
            return
        ratio = block.time_us / predicted_us
        self._note_width(block.cores, min(ratio, SLOWDOWN.max_ratio))
        ratio = min(ratio, ERROR.max_factor)
        mean = self._mean.setdefault(model_id, ratio)
        error = ratio - mean
        deviation = self._deviation.get(model_id, 0.0)
        self._mean[model_id] = mean = mean + ERROR.mean_gain * error
        self._deviation[model_id] = deviation = deviation + ERROR.deviation_gain * (abs(error) - deviation)
        self.factors[model_id] = min(max(mean + deviation, 1.0), ERROR.max_factor)

    def _note_width(self, cores: int, ratio: float) -> None:
        if cores == 1:
            self._narrow += SLOWDOWN.gain * (ratio - self._narrow)
        else:
            self._wide += SLOWDOWN.gain * (ratio - self._wide)

    def forget(self, model_id: int) -> None:
        """The model is not served any more, or has another profile."""
        for known in (self._mean, self._deviation, self.factors):
            known.pop(model_id, None)


class BlockTimes:
    """Both of these, fed with each block that ends."""

    def __init__(self) -> None:
        self.interference = Interference()
        self.errors = PredictionErrors()

    def finished(self, gang: Gang, profile: ModelProfile | None, end_layer: int, turned_ns: int) -> None:
        """Take into account the block that a gang ended before `end_layer` at that time, if it says something."""
        query, begin_layer, began_ns = gang.unit.query, gang.steady_layer, gang.joined_ns
        if profile is None or not profile.measured or gang.resized or end_layer <= begin_layer:
            return
        if begin_layer > query.next_layer:
            began_ns = gang.shared.layer_end_ns(begin_layer - 1, begin_layer)[0]
        versions = gang.versions[begin_layer - query.next_layer :]
        time_us = (turned_ns - began_ns) / 1e3
        block = FinishedBlock(profile, begin_layer, end_layer, gang.wanted, query.rows, versions, time_us)
        self._learn(block, turned_ns / 1e3)

    def completed_without_gang(self, profile: ModelProfile, start: LoneStart, requests: Sequence[Completed]) -> None:
        """The same for queries of one row that were begun without a decision, one after the other."""
        if not profile.measured:
            return
        least = FinishedBlock(profile, 0, profile.layers, start.cores, 1, start.versions, 0.0)
        isolated_us, slope_us = _isolated_us(least)
        if isolated_us + INTERFERENCE.max_level * slope_us < min(INTERFERENCE.min_block_us, ERROR.min_predicted_us):
            return  # such a block never says anything
        for request in requests:
            self._learn(replace(least, time_us=request.end_us - request.joined_us), request.end_us)

    def _learn(self, block: FinishedBlock, ended_us: float) -> None:
        self.interference.finished(block, ended_us)
        self.errors.finished(block.model.model_id, block, self.interference.level(ended_us))
