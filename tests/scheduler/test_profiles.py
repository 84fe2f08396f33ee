"""What policies see of a measured profile."""

from gangway.artifact.profile import LayerProfile, Machine, Profile
from gangway.scheduler.profiles import policy_profile

MACHINE = Machine("0" * 12, "CPU", 6, "avx2", 1e5, 2e4)


def profile(cores: tuple[int, ...], times_us: tuple[float, ...]) -> Profile:
    grid = tuple((time_us, 2 * time_us) for time_us in times_us)
    layer = LayerProfile("layer", (grid, grid), 1.0, 1.0, (), ())
    return Profile("ab" * 32, "model", MACHINE, cores, (1, 2), (layer,), grid, (), 0, 1, 1.0)


def test_measured_counts_are_kept() -> None:
    seen = policy_profile(profile((1, 2), (100.0, 60.0)), model_id=7, name="model, version 1", max_ranks=2)
    assert (seen.model_id, seen.name, seen.layers, seen.max_ranks) == (7, "model, version 1", 1, 2)
    assert seen.isolated_us == 60.0
    assert seen.latency_us == (((100.0, 60.0), (100.0, 60.0)),)


def test_counts_between_follow_amdahl() -> None:
    amdahl = {count: 10 + 120 / count for count in range(1, 7)}
    measured = tuple(amdahl[count] for count in (1, 2, 4, 6))
    (versions,) = policy_profile(profile((1, 2, 4, 6), measured), 0, "model", 6).latency_us
    assert [round(time_us, 6) for time_us in versions[0]] == [round(amdahl[count], 6) for count in range(1, 7)]
