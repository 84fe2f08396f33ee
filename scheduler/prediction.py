"""How much longer a query runs, on how many cores: what policies decide by. Pure.

`demands` says what VELTAIR's policies ask for, `forecast` what the `gangway` policy needs of all queries of a kind.
Times come from the profile: each layer in the version that is fastest at the present level of interference, as long as
it takes there.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil
from typing import Any

from gangway.scheduler.profiles import ModelProfile

# VELTAIR's layer blocks (ASPLOS 2022, section 4.2, Algorithm 2): core demands of layers, models, blocks; pivots.
#
# What does not depend on the time is computed once for a model: after that a decision is a few look-ups.
#
# What the paper leaves open, as it is read here:
#
# - The layers' operations share out the target (its Algorithm 1). The paper's layers all are convolutions or products
#   of matrices; others have few operations or none. So the roofline's time on one core, max(memory, compute), is shared
#   by: for a layer that computes it is in proportion to operations, for one that moves bytes to its bytes.
# - A layer that can never keep to its share has more, from the others: else the whole model would miss its target.
# - A layer or block that no number of cores makes fast enough asks for the fewest cores with which it is at most
#   `NO_GAIN_FACTOR` times as slow as it can be.
# - More cores never make a layer slower: a gang leaves those idle that do not pay.
# - `Algorithm 2` numbers the pivot's successor as the next beginning and says 0 for "none". Its text and Fig. 10 have
#   the pivot begin the next block; without one the block runs to the end.
# - Its text says that low load (a high threshold) lets each layer use as many cores as possible. By the algorithm a
#   high threshold finds no pivots, and the whole model is one block of its average demand. So there are two readings:
#   the threshold limits what a block needs, or it is what a block can use beyond the average (`uses_threshold`).

BEST_EFFORT_TARGET_FACTOR = 3.0  # times the isolated latency, for models without a target
NO_GAIN_FACTOR = 1.05  # cores that make it no faster than that are not worth having
LEVEL_STEP = 0.1  # levels of interference are told apart so finely, and up to MAX_LEVEL
MAX_LEVEL = 4.0
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Block:
    """Layers [begin, end) and the number of cores they ask for."""

    begin: int
    end: int
    cores: int


@dataclass(frozen=True)
class Demands:
    """What a model asks for at one level of interference, for one size of query.

    `versions[cores - 1][l]`: of a layer on so many cores. `time_us[cores - 1][l]`: predicted time of the layers before
    l (L + 1 numbers) in those; `target_us[l]`: their share of the target. `layer_cores[l]`: Core(l). `average_cores`:
    Avg_C, a fraction where the model needs no whole number.
    """

    versions: tuple[tuple[int, ...], ...]
    time_us: tuple[Sequence[float], ...]
    target_us: Sequence[float]
    layer_cores: tuple[int, ...] = ()
    average_cores: float = 1.0
    unit_us: float = 0.0  # what a unit takes beside its layers
    _pivots: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.target_us) - 1

    def versions_on(self, cores: int) -> tuple[int, ...]:
        """Return the version of each layer on so many cores; empty if all are the default ones."""
        return self.versions[min(cores, len(self.versions)) - 1]

    def span_us(self, begin: int, end: int, cores: int) -> float:
        """Return the predicted time of layers [begin, end)."""
        times = self.time_us[min(cores, len(self.time_us)) - 1]
        return times[end] - times[begin]

    def block_cores(self, begin: int, end: int) -> int:
        """Return the fewest cores with which layers [begin, end), as one unit, keep to the sum of their targets."""
        goal_us = (self.target_us[end] - self.target_us[begin]) * _ROUNDING - self.unit_us
        if self.span_us(begin, end, len(self.time_us)) > goal_us:
            return self.usable_cores(begin, end)
        return self._fewest_cores(begin, end, goal_us)

    def usable_cores(self, begin: int, end: int) -> int:
        """Return the cores beyond which layers [begin, end) get no faster."""
        return self._fewest_cores(begin, end, self.span_us(begin, end, len(self.time_us)) * NO_GAIN_FACTOR)

    def _fewest_cores(self, begin: int, end: int, within_us: float) -> int:
        return bisect_left(self.time_us, -within_us, key=lambda times: times[begin] - times[end]) + 1

    def pivot(self, begin: int, limit_cores: float) -> int:
        """Return the first layer after `begin` that asks for at least `limit_cores`, or the number of layers.

        A layer that asks for one core never is one: it cannot conflict.
        """
        limit = max(_whole(limit_cores), 2)
        pivots = self._pivots.get(limit)
        if pivots is None:
            pivots = self._pivots[limit] = _next_at_least(self.layer_cores, limit)
        return pivots[begin + 1]

    def next_block(self, begin: int, threshold_cores: float, uses_threshold: bool = False) -> Block:
        """Return the block that begins at a layer: up to the pivot, on at most Avg_C + threshold cores.

        It asks for those that its target needs, or, if it `uses_threshold`, for all that make it faster.
        """
        limit = self.average_cores + threshold_cores
        end = self.pivot(begin, limit)
        cores = self.usable_cores(begin, end) if uses_threshold else self.block_cores(begin, end)
        return Block(begin, end, min(cores, _whole(limit)))

    def blocks(self, threshold_cores: float, begin: int = 0) -> list[Block]:
        """Return all blocks from a layer to the model's end. O(layers)."""
        found = []
        while begin < self.layers:
            found.append(self.next_block(begin, threshold_cores))
            begin = found[-1].end
        return found


def threshold_share(core_count: int, average: float, active_sum: float) -> float:
    """Return a model's share of the cores that are idle on average (section 4.3), in proportion to its own average.

    `active_sum` is the sum of the averages of all queries that run, its own included. 0 if no core is idle.
    """
    return max(core_count - active_sum, 0.0) * average / active_sum


def query_level(level: float) -> float:
    """Return the level of interference, rounded to those that are told apart."""
    return min(round(level / LEVEL_STEP) * LEVEL_STEP, MAX_LEVEL)


def demands(
    profile: ModelProfile,
    level: float = 0.0,
    rows: int = 1,
    adaptive: bool = False,
    share: float = 1.0,
    unit_us: float = 0.0,
) -> Demands:
    """Return a model's demands; computed once for each of the level's steps and each power of two of rows.

    `adaptive`: each layer takes the version that is fastest at this level on as many cores, else version 0. `share`:
    how much of the target the layers may use; the rest is for waiting. `unit_us`: what each unit takes beside its
    layers. Every layer's target has room for it, as far as the layers' fastest times leave any; a block needs it only
    once.
    """
    key = (demands, round(min(level, MAX_LEVEL) / LEVEL_STEP), (rows - 1).bit_length(), adaptive, share, unit_us)
    known: Demands | None = profile.derived.get(key)
    if known is None:
        known = profile.derived[key] = _compute(profile, query_level(level), 1 << key[2], adaptive, share, unit_us)
    return known


def target_us(profile: ModelProfile) -> float:
    """Return the model's latency target; 3 times the isolated latency where it has none."""
    if profile.qos_us is not None:
        return profile.qos_us
    return BEST_EFFORT_TARGET_FACTOR * (profile.isolated_us or profile.span_us(0, profile.layers, profile.cores))


def target_shares(profile: ModelProfile) -> list[float]:
    """Return each layer's share of the target; they sum up to 1."""
    weights = [max(pair) for pair in zip(profile.memory_us, profile.compute_us, strict=True)]
    if not sum(weights):
        weights = [layer[0][0] for layer in profile.latency_us]
    total = sum(weights) or 1.0
    return [weight / total for weight in weights]


def layer_targets(profile: ModelProfile, goal_us: float, unit_us: float = 0.0) -> list[float]:
    """Return how much of a goal each layer has: room for being a unit, then its share.

    A layer whose share is below what it takes on the best number of cores has that, from the others' shares.
    """
    least = [min(layer[0]) * NO_GAIN_FACTOR for layer in profile.latency_us]
    weights = target_shares(profile)
    spare_us = goal_us - sum(least)
    if spare_us <= 0:
        return [goal_us * weight for weight in weights]
    fixed_us = min(unit_us, spare_us / profile.layers)
    rest_us, sharing = goal_us - profile.layers * fixed_us, set(range(profile.layers))
    shares = least
    while sharing:
        per_weight = rest_us / (sum(weights[layer] for layer in sharing) or 1.0)
        short = {layer for layer in sharing if weights[layer] * per_weight < least[layer]}
        if not short:
            shares = [weight * per_weight if layer in sharing else least[layer] for layer, weight in enumerate(weights)]
            break
        sharing -= short
        rest_us -= sum(least[layer] for layer in short)
    return [fixed_us + share_us for share_us in shares]


def _compute(profile: ModelProfile, level: float, rows: int, adaptive: bool, share: float, unit_us: float) -> Demands:
    goal_us = share * target_us(profile)
    targets = _sums(layer_targets(profile, goal_us, unit_us))
    most = min(profile.cores, profile.max_ranks)
    best = [float("inf")] * profile.layers
    tables, chosen = [], []
    for cores in range(1, most + 1):
        scale = profile.rows_scale(cores, rows)
        versions = fastest_versions(profile, level, cores) if adaptive else ()
        for layer, time_us in enumerate(layer_times_us(profile, cores, versions, level)):
            best[layer] = min(best[layer], scale * time_us)
        tables.append(_sums(best))
        chosen.append(versions)
    bare = Demands(tuple(chosen), tuple(tables), targets, unit_us=unit_us)
    layer_cores = tuple(bare.block_cores(layer, layer + 1) for layer in range(profile.layers))
    return replace(bare, layer_cores=layer_cores, average_cores=_fractional_cores(bare))


def layer_times_us(profile: ModelProfile, cores: int, versions: Sequence[int], level: float) -> list[float]:
    """Return what `ModelProfile.layer_us` does of each layer in its version. `versions`: empty: the default ones."""
    index = min(cores, profile.cores) - 1
    slope = profile.slope if level else ()
    found = []
    for layer, latency_us in enumerate(profile.latency_us):
        version = versions[layer] if versions else 0
        time_us = latency_us[version][index]
        found.append(time_us * (1 + level * slope[layer][version]) if slope else time_us)
    return found


def _fractional_cores(of: Demands) -> float:
    """Return the cores, as a fraction, with which the whole model just meets its target: time is a + b / cores."""
    goal_us = of.target_us[-1] - of.unit_us
    whole = of.block_cores(0, of.layers)
    time_us = of.time_us[whole - 1][-1]
    if whole == 1:
        return min(time_us / goal_us, 1.0) if goal_us > 0 else 1.0
    if time_us > goal_us:
        return float(whole)
    fewer_us = of.time_us[whole - 2][-1]
    part = (fewer_us - goal_us) / (fewer_us - time_us)
    return 1 / ((1 - part) / (whole - 1) + part / whole)


def fastest_versions(profile: ModelProfile, level: float, cores: int) -> tuple[int, ...]:
    """Return the fastest version of each layer on so many cores at a level; empty if all are the default ones."""
    if all(len(versions) == 1 for versions in profile.latency_us):
        return ()
    times_us = [
        [profile.layer_us(layer, cores, version, level) for version in range(len(profile.latency_us[layer]))]
        for layer in range(profile.layers)
    ]
    versions = tuple(times.index(min(times)) for times in times_us)
    return versions if any(versions) else ()


def _whole(cores: float) -> int:
    return ceil(cores / _ROUNDING)


def _next_at_least(counts: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return for each layer, and the end, the first one from it on with such a count, or the number of layers."""
    found = [len(counts)] * (len(counts) + 1)
    for layer in range(len(counts) - 1, -1, -1):
        found[layer] = layer if counts[layer] >= limit else found[layer + 1]
    return tuple(found)


def _sums(values: Iterable[float]) -> Sequence[float]:
    return array("d", accumulate(values, initial=0.0))


class Forecast:
    """What is predicted of all queries of a model with about as many rows, at one level, on so many cores.

    Computed once: see `forecast`. Times are microseconds. `most`: cores that such a query can use.
    `whole_us[cores - 1]`: the whole query. `isolated_us`: on all cores that it can use. `fastest_us[layer]`: the
    profile's for one row, from that layer on; empty for more rows. `has_versions`: not only the default ones.
    """

    __slots__ = (
        "_efficient", "_rests", "cuts", "fastest_us", "has_versions", "isolated_us", "most", "table", "whole_us",
    )  # fmt: skip

    def __init__(self, model: ModelProfile, level: float, rows: int, core_count: int) -> None:
        self.table = table = demands(model, level, rows, True)
        self.has_versions = any(table.versions)
        self.most = min(len(table.time_us), core_count)
        self.whole_us = tuple([table.span_us(0, table.layers, cores + 1) for cores in range(len(table.time_us))])
        self.isolated_us = self.whole_us[self.most - 1]
        layers = range(table.layers + 1) if rows == 1 else ()
        self.fastest_us = tuple([model.fastest_us(layer, self.most) for layer in layers])
        self._efficient: dict[float, int] = {}
        self.cuts: dict[tuple[int, int, int, float], Any] = {}  # blocks, by those who cut them
        self._rests: dict[int, tuple[Sequence[float], Sequence[int]]] = {}  # by layer, see `_rest`

    def efficient_cores(self, efficiency: float) -> int:
        """Return what `efficient_cores` does for such a query."""
        known = self._efficient.get(efficiency)
        if known is None:
            known = self._efficient[efficiency] = efficient_cores(self.whole_us[: self.most], efficiency)
        return known

    def cores_within(self, layer: int, within_us: float) -> int:
        """Return on how many cores the layers from this one on take no longer, and the least cores x time of all such.

        All that it can use if there are none.
        """
        rest = self._rests.get(layer)
        if rest is None:
            rest = self._rests[layer] = self._rest(layer)
        times, cheapest = rest
        return cheapest[min(bisect_left(times, -within_us), self.most - 1)]

    def _rest(self, layer: int) -> tuple[Sequence[float], Sequence[int]]:
        """Return minus the time from a layer to the end, by cores, ascending, and the cheapest of so many and more."""
        times = array("d", [each[layer] - each[-1] for each in self.table.time_us[: self.most]])
        cheapest = [self.most] * self.most
        for count in range(self.most - 1, 0, -1):
            wider = cheapest[count]
            cheapest[count - 1] = count if -times[count - 1] * count < -times[wider - 1] * wider else wider
        return times, cheapest


def forecast(model: ModelProfile, level: float, rows: int, core_count: int) -> Forecast:
    """Return what is predicted of such queries, remembered for each model, like its demands."""
    key = (forecast, round(level / LEVEL_STEP) if level else 0, (rows - 1).bit_length(), core_count)
    known: Forecast | None = model.derived.get(key)
    if known is None:
        known = model.derived[key] = Forecast(model, level, rows, core_count)
    return known


def efficient_cores(times_us: Sequence[float], efficiency: float) -> int:
    """Return on how many cores speed - `efficiency` x cores is largest. `times_us`: on 1, 2, ... cores.

    Speed counts a single core as 1. So that is the widest gang that each step to it is worth: on the concave hull of
    the speed the last cores add at least this share of what a single one does. The share that cores do on average would
    let in those that add nothing.
    """
    speeds = [times_us[0] / time_us if time_us > 0 else 1.0 for time_us in times_us]
    return max(range(1, len(speeds) + 1), key=lambda count: speeds[count - 1] - efficiency * count)
