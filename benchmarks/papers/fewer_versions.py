"""A model with fewer versions of each layer than it was tuned to have: what so many versions are worth."""

from dataclasses import replace
from math import fsum

from gangway.scheduler.profiles import ModelProfile, Table, drop_versions

LEVELS = (0.0, 0.25, 0.5, 1.0)  # of interference, at which versions are compared
FIRST = 0  # version 0 is what policies run that know nothing of versions


def limit_versions(model: ModelProfile, most: int) -> ModelProfile:
    """Return the model with at most `most` versions of each layer, the first one among them.

    As in a tuning, the version whose absence costs least goes first (`scheduler/profiles.py`); what counts is the
    situation where it costs most: gangs of 1, 2, 4, ... cores, at each of `LEVELS`.
    """
    kept = [
        drop_versions([_situations(model, layer)], FIRST, least_loss=0.0, most=most) for layer in range(model.layers)
    ]
    return replace(
        model,
        latency_us=tuple(tuple(map(times.__getitem__, of)) for of, times in zip(kept, model.latency_us, strict=True)),
        slope=tuple(tuple(map(slopes.__getitem__, of)) for of, slopes in zip(kept, model.slope, strict=False)),
    )


def best_us(model: ModelProfile, cores: int, level: float) -> float:
    """Return the time of one row, the fastest version of each layer, on a gang at a level of interference."""
    return fsum(
        min(model.layer_us(layer, cores, version, level) for version in range(len(versions)))
        for layer, versions in enumerate(model.latency_us)
    )


def _situations(model: ModelProfile, layer: int) -> Table:
    counts = [1 << power for power in range(model.cores.bit_length())]
    return [
        [model.layer_us(layer, cores, version, level) for cores in counts for level in LEVELS]
        for version in range(len(model.latency_us[layer]))
    ]
