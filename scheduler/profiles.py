"""What policies know of a model: how long its layers take, on how many cores, and what is asked of it."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import sqrt
from typing import Any, Final

from gangway.artifact.precision import FP32
from gangway.artifact.profile import LEAST_RUNS, Profile
from gangway.executor.launch import thread_counts
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policy_config import SWITCH_US


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
    indivisible: bool = False  # a query is one task: nothing stops or resizes it
    measured: bool = False
    varies: bool = False  # its times depend on the shapes of a request: they are guesses, and bound nothing
    in_bf16: "ModelProfile | None" = None  # times in bf16, which requests with a deadline may have instead

    @property
    def cores(self) -> int:
        """For how many cores there are times."""
        return len(self.latency_us[0][0])

    def at(self, precision: str) -> "ModelProfile":
        """Return the times in a precision; those of the only one that there is; those in bf16 if deadlines choose."""
        return self if self.in_bf16 is None or precision == FP32 else self.in_bf16

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

    def work_us(self, rows: int) -> float:
        """Return the work of so many rows: their time one by one on single cores, the most efficient use of them."""
        return self._row_work_us * rows

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
    def _row_work_us(self) -> float:
        return self.rows_us(1, 1)

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


# What policies see of a model: its measured profile, or an estimate until there is one.

_UNKNOWN_LAYER_US = 1000.0
_LEAST_SHARED_US = 2000.0  # of a run of onnxruntime that several threads are taken to make faster, unmeasured
_SERIAL_SHARE = 0.3  # of it that they do not
_NO_GAIN_FACTOR = 1.03  # a model whose time on fewer cores is within this factor of the best has no use for more


def estimated_profile(spec: LoadModel, cores: int, isolated_us: float = 0.0) -> ModelProfile:
    """Return what policies see of a model that has no profile, for 1 to `cores` cores.

    Layers scale ideally up to the number of ranks that pay. Once the latency on all cores is known the times add up to
    it. What onnxruntime executes as a whole is tried on one core; if that takes long, more are taken to help it, too.
    """
    if spec.indivisible:
        return _estimated_whole(spec, cores, isolated_us)
    layer_us = spec.layer_us or (_UNKNOWN_LAYER_US,) * spec.layers
    layer_ranks = spec.layer_ranks or (spec.max_ranks,) * spec.layers
    grid = [
        [time_us / min(count, ranks) for count in range(1, cores + 1)]
        for time_us, ranks in zip(layer_us, layer_ranks, strict=True)
    ]
    scale = isolated_us / sum(times[-1] for times in grid) if isolated_us else 1.0
    return ModelProfile(
        model_id=spec.model_id,
        name=spec.name,
        layers=spec.layers,
        max_ranks=min(spec.max_ranks, cores),
        latency_us=tuple((tuple(time_us * scale for time_us in times),) for times in grid),
        isolated_us=isolated_us,
    )


def _estimated_whole(spec: LoadModel, cores: int, one_core_us: float) -> ModelProfile:
    threads = thread_counts(min(cores, spec.max_ranks)) if one_core_us >= _LEAST_SHARED_US else (1,)
    usable = [max(count for count in threads if count <= number) for number in range(1, cores + 1)]
    one_us = one_core_us or sum(spec.layer_us) or _UNKNOWN_LAYER_US
    times = tuple(one_us * (_SERIAL_SHARE + (1 - _SERIAL_SHARE) / count) for count in usable)
    return ModelProfile(
        model_id=spec.model_id,
        name=spec.name,
        layers=spec.layers,
        max_ranks=threads[-1],
        latency_us=((times,),) * spec.layers,
        isolated_us=one_core_us,
        indivisible=True,
    )


def is_misjudged(profile: ModelProfile, run_us: float) -> bool:
    """Whether the time of a run speaks against the number of threads that onnxruntime gets.

    Only of a model whose requests have sizes of their own: trials with some sizes say nothing of others.
    """
    if profile.measured or not profile.indivisible or not profile.varies:
        return False
    return run_us >= _LEAST_SHARED_US if profile.max_ranks == 1 else run_us < _LEAST_SHARED_US / 2


def seen_profile(profile: ModelProfile, spec: LoadModel, cores: int, run_us: float) -> ModelProfile:
    """Return what policies see of a misjudged model instead, given how long it ran."""
    seen = _estimated_whole(spec, cores, run_us)
    return replace(profile, max_ranks=seen.max_ranks, latency_us=seen.latency_us)


def served_profile(profile: Profile, spec: LoadModel, cores: int) -> ModelProfile:
    """Return what policies see of a measured model on a server of so many cores.

    Beyond the largest number of cores measured times stay as they are. `max_ranks` is the least number of cores on
    which the model is about as fast as on any.
    """
    measured = policy_profile(profile, spec.model_id, spec.name, spec.max_ranks)
    scaled = _by_threads if spec.indivisible else _for_cores
    latency_us = tuple(tuple(scaled(times, cores) for times in layer) for layer in measured.latency_us)
    total_us = [sum(layer[0][count] for layer in latency_us) for count in range(cores)]
    pays = next(count for count, time_us in enumerate(total_us, 1) if time_us <= _NO_GAIN_FACTOR * min(total_us))
    if spec.indivisible:  # what onnxruntime computes and reads is not known
        measured = replace(measured, memory_us=(), compute_us=())
    return replace(
        measured,
        latency_us=latency_us,
        rows_factor=measured.rows_factor[:cores],
        together_factor=measured.together_factor[:cores],
        max_ranks=min(pays, spec.max_ranks),
        indivisible=spec.indivisible,
    )


def _for_cores(times: tuple[float, ...], cores: int) -> tuple[float, ...]:
    return times[:cores] + times[-1:] * (cores - len(times))


def scaled_profile(profile: ModelProfile, one_core_us: float) -> ModelProfile:
    """Return a profile whose requests take so long on one core: of what it was measured with other sizes."""
    factor = one_core_us / sum(layer[0][0] for layer in profile.latency_us)
    grids = tuple(tuple(tuple(factor * us for us in times) for times in layer) for layer in profile.latency_us)
    return replace(profile, latency_us=grids)


def _by_threads(times: tuple[float, ...], cores: int) -> tuple[float, ...]:
    """Return the times on 1 to `cores` cores of what has as many threads as `thread_counts` says."""
    return tuple(times[min(thread_counts(count)[-1], len(times)) - 1] for count in range(1, cores + 1))


def policy_profile(profile: Profile, model_id: int, name: str, max_ranks: int) -> ModelProfile:
    """Return the policies' view of a profile: every number of cores from 1 to the largest measured.

    Numbers of cores between measured ones are interpolated by Amdahl's law: time is a + b / cores, through the two
    neighbours. More rows never take less time: where they seemed to, it was noise, and times beyond follow the slope.
    """
    alone_us = [every_count(profile.cores, list(times)) for times in zip(*profile.isolated_us, strict=True)]
    together_us = [every_count(profile.cores, list(times)) for times in zip(*profile.together_us, strict=True)]
    grids = [[[row[0] for row in grid] for grid in layer.latency_us] for layer in profile.layers]
    layers_us = every_count(profile.cores, [sum(times) for times in zip(*(grid[0] for grid in grids), strict=True)])
    return ModelProfile(
        model_id=model_id,
        name=name,
        layers=len(profile.layers),
        max_ranks=max_ranks,
        isolated_us=profile.isolated_us[-1][0],
        latency_us=tuple(tuple(every_count(profile.cores, times) for times in layer) for layer in grids),
        slope=tuple(layer.slope for layer in profile.layers) if profile.interference else (),
        memory_us=tuple(layer.memory_us for layer in profile.layers),
        compute_us=tuple(layer.compute_us for layer in profile.layers),
        rows_factor=_factors(alone_us, layers_us),
        together_factor=_factors(together_us, layers_us),
        batches=profile.batches,
        doubt=tuple(doubt(profile.scatter, runs) for runs in profile.runs),
        measured=True,
    )


def doubt(scatter: float, runs: int) -> float:
    """Return by what share two medians of so many runs may differ by chance: twice the deviation of their difference.

    That of a median of n normal values is 1.25 / sqrt(n) of theirs. Of one or two runs, either may be an outlier.
    """
    return 2 * 1.25 * scatter * sqrt(2 / runs) if runs >= LEAST_RUNS else 1.0


def _factors(by_batch: Sequence[Sequence[float]], layers_us: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Return, by number of cores, how many times as long as the layers of one row each batch takes."""
    return tuple(
        tuple(accumulate((time_us / one_us for time_us in times_us), max))
        for times_us, one_us in zip(zip(*by_batch, strict=True), layers_us, strict=True)
    )


def every_count(counts: Sequence[int], times_us: Sequence[float]) -> tuple[float, ...]:
    """Return times on 1, 2, 3, ... cores from those on `counts`, which ascend from 1, by Amdahl's law between them."""
    filled = [times_us[0]]
    for index in range(1, len(counts)):
        below, above = counts[index - 1], counts[index]
        for count in range(below + 1, above + 1):
            share = (1 / below - 1 / count) / (1 / below - 1 / above)
            filled.append(times_us[index - 1] + share * (times_us[index] - times_us[index - 1]))
    return tuple(filled)


# Which versions of a layer to keep: those whose absence would cost most (the end of VELTAIR's Algorithm 1).
#
# Pure functions of tables of measured or modelled times. A tuning drops with them what gains too little; the simulator
# takes from a model all but so many versions.

Table = Sequence[Sequence[float]]
"""Microseconds by version and situation: a level of interference, a number of cores."""


SAME: Final = 0.01  # relative: a measured difference below this is none


def absence_loss(version: int, kept: Sequence[int], tables: Sequence[Table], reference: int | None = None) -> float:
    """Return how much slower the best of `kept` gets without `version`, in the situation where that is most.

    Relative: 0.1 is 10 %. It is infinite if the others are slower than the version `reference` by more than SAME in any
    situation. The tables are independent measurements of the same; the least of them counts in each situation, since a
    difference that is not in all of them is noise.
    """
    others = [other for other in kept if other != version]
    if reference is not None and max(_losses(others, [reference], tables)) > SAME:
        return float("inf")
    return max(_losses(others, kept, tables))


def _losses(kept: Sequence[int], those: Sequence[int], tables: Sequence[Table]) -> list[float]:
    """Return by how much the best of `kept` is slower than the best of `those`, relative, in each situation."""
    return [
        min(_best(kept, table, place) / _best(those, table, place) - 1 for table in tables)
        for place in range(len(tables[0][0]))
    ]


def thin_out(
    tables: Sequence[Table], always: int, reference: int | None = None
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield all versions, then ever one less, that whose absence costs least, until only `always` is left.

    With each set comes what its next reduction will cost (infinity for the last one). `reference`: see `absence_loss`.
    """
    kept = tuple(range(len(tables[0])))
    while True:
        losses = {version: absence_loss(version, kept, tables, reference) for version in kept if version != always}
        if not losses:
            yield kept, float("inf")
            return
        least = min(losses, key=losses.__getitem__)
        yield kept, losses[least]
        kept = tuple(version for version in kept if version != least)


def drop_versions(
    tables: Sequence[Table], always: int, least_loss: float, most: int, reference: int | None = None
) -> tuple[int, ...]:
    """Return the versions that are kept: each one's absence costs at least `least_loss`, and there are at most `most`.

    `always` is kept in any case. As far as `most` allows, the best of them is as fast as `reference` in each situation.
    """
    thinned = thin_out(tables, always, reference)
    return next(kept for kept, loss in thinned if loss >= least_loss and len(kept) <= most)


def mean_loss(kept: Sequence[int], tables: Sequence[Table]) -> float:
    """Return how much slower the best of `kept` is than the best of all, relative, on average over the situations.

    As in `absence_loss`, the least of the tables counts in each.
    """
    losses = _losses(kept, range(len(tables[0])), tables)
    return sum(losses) / len(losses)


def _best(versions: Sequence[int], table: Table, place: int) -> float:
    return max(1e-3, min(table[version][place] for version in versions))
