"""From a measured profile to what policies see."""

from gangway.artifact.profile import Profile
from gangway.scheduler.model_profile import ModelProfile


def policy_profile(profile: Profile, model_id: int, name: str, max_ranks: int) -> ModelProfile:
    """Return the policies' view of a profile: every number of cores from 1 to the largest measured.

    Numbers of cores between measured ones are interpolated by Amdahl's law: time is a + b / cores, through the two
    neighbours.
    """
    by_batch = [_every_count(profile.cores, list(times)) for times in zip(*profile.isolated_us, strict=True)]
    grids = [[[row[0] for row in grid] for grid in layer.latency_us] for layer in profile.layers]
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
        rows_factor=tuple(tuple(time_us / row[0] for time_us in row) for row in zip(*by_batch, strict=True)),
        batches=profile.batches,
        measured=True,
    )


def _every_count(counts: tuple[int, ...], times_us: list[float]) -> tuple[float, ...]:
    filled = [times_us[0]]
    for index in range(1, len(counts)):
        below, above = counts[index - 1], counts[index]
        for count in range(below + 1, above + 1):
            share = (1 / below - 1 / count) / (1 / below - 1 / above)
            filled.append(times_us[index - 1] + share * (times_us[index] - times_us[index - 1]))
    return tuple(filled)
