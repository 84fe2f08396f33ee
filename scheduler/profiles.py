"""What policies see of a model: its measured profile, or an estimate until there is one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import sqrt

from gangway.artifact.format import Manifest
from gangway.artifact.profile import LEAST_RUNS, Profile
from gangway.scheduler.control import LoadModel
from gangway.scheduler.model_profile import ModelProfile

_BYTES_PER_US = 40_000.0  # one core of a current server, from its caches
_LEAST_LAYER_US = 1.0
_UNKNOWN_LAYER_US = 1000.0
_WORTH = 1.03  # a model whose time on fewer cores is within this factor of the best has no use for more


def estimated_layer_us(manifest: Manifest) -> tuple[float, ...]:
    """Return a guess, within a factor of two or three, for each layer of one row on one core."""
    return tuple(
        round(max(layer.row_ns / 1e3, layer.bytes / _BYTES_PER_US, _LEAST_LAYER_US), 1) for layer in manifest.layers
    )


def estimated_profile(spec: LoadModel, cores: int, isolated_us: float = 0.0) -> ModelProfile:
    """Return what policies see of a model that has no profile, for 1 to `cores` cores.

    Layers scale ideally up to the number of ranks that pay. Once the latency on all cores is known the times add up to
    it.
    """
    layer_us = spec.layer_us or (_UNKNOWN_LAYER_US,) * spec.layers
    layer_ranks = spec.layer_ranks or (spec.max_ranks,) * spec.layers
    if spec.indivisible:
        layer_ranks = (1,) * spec.layers
    grid = [
        [time_us / min(count, ranks) for count in range(1, cores + 1)]
        for time_us, ranks in zip(layer_us, layer_ranks, strict=True)
    ]
    scale = isolated_us / sum(times[-1] for times in grid) if isolated_us else 1.0
    return ModelProfile(
        model_id=spec.model_id,
        name=spec.name,
        layers=spec.layers,
        max_ranks=1 if spec.indivisible else spec.max_ranks,
        latency_us=tuple((tuple(time_us * scale for time_us in times),) for times in grid),
        isolated_us=isolated_us,
        indivisible=spec.indivisible,
    )


def served_profile(profile: Profile, spec: LoadModel, cores: int) -> ModelProfile:
    """Return what policies see of a measured model on a server of so many cores.

    Beyond the largest number of cores measured times stay as they are. `max_ranks` is the least number of cores on
    which the model is about as fast as on any.
    """
    measured = policy_profile(profile, spec.model_id, spec.name, spec.max_ranks)
    latency_us = tuple(tuple(_for_cores(times, cores) for times in layer) for layer in measured.latency_us)
    total_us = [sum(layer[0][count] for layer in latency_us) for count in range(cores)]
    pays = next(count for count, time_us in enumerate(total_us, 1) if time_us <= _WORTH * min(total_us))
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


def policy_profile(profile: Profile, model_id: int, name: str, max_ranks: int) -> ModelProfile:
    """Return the policies' view of a profile: every number of cores from 1 to the largest measured.

    Numbers of cores between measured ones are interpolated by Amdahl's law: time is a + b / cores, through the two
    neighbours. More rows never take less time: where they seemed to, it was noise, and times beyond follow the slope.
    """
    alone_us = [_every_count(profile.cores, list(times)) for times in zip(*profile.isolated_us, strict=True)]
    together_us = [_every_count(profile.cores, list(times)) for times in zip(*profile.together_us, strict=True)]
    grids = [[[row[0] for row in grid] for grid in layer.latency_us] for layer in profile.layers]
    layers_us = _every_count(profile.cores, [sum(times) for times in zip(*(grid[0] for grid in grids), strict=True)])
    return ModelProfile(
        model_id=model_id,
        name=name,
        layers=len(profile.layers),
        max_ranks=max_ranks,
        isolated_us=profile.isolated_us[-1][0],
        latency_us=tuple(tuple(_every_count(profile.cores, times) for times in layer) for layer in grids),
        slope=tuple(layer.slope for layer in profile.layers) if profile.interference else (),
        memory_us=tuple(layer.memory_us for layer in profile.layers),
        compute_us=tuple(layer.compute_us for layer in profile.layers),
        rows_factor=_factors(alone_us, layers_us),
        together_factor=_factors(together_us, layers_us),
        batches=profile.batches,
        doubt=tuple(_doubt(profile.scatter, runs) for runs in profile.runs),
        measured=True,
    )


def _doubt(scatter: float, runs: int) -> float:
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


def _every_count(counts: tuple[int, ...], times_us: list[float]) -> tuple[float, ...]:
    filled = [times_us[0]]
    for index in range(1, len(counts)):
        below, above = counts[index - 1], counts[index]
        for count in range(below + 1, above + 1):
            share = (1 / below - 1 / count) / (1 / below - 1 / above)
            filled.append(times_us[index - 1] + share * (times_us[index] - times_us[index - 1]))
    return tuple(filled)
