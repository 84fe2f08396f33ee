"""What policies see of a measured profile."""

from gangway.artifact.profile import LayerProfile, Machine, Profile
from gangway.scheduler.control import LoadModel
from gangway.scheduler.profiles import estimated_profile, policy_profile, served_profile

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


def spec(**fields: object) -> LoadModel:
    values = {"layers": 2, "max_ranks": 2, "arena_bytes": 64, "max_rows": 1, **fields}
    return LoadModel(7, "model", "key", **values)  # type: ignore[arg-type]


def test_a_model_without_a_profile_is_estimated_for_all_cores() -> None:
    loaded = spec(layer_us=(40.0, 10.0), layer_ranks=(3, 1))
    seen = estimated_profile(loaded, cores=4)
    assert seen.latency_us == (((40.0, 20.0, 40 / 3, 40 / 3),), ((10.0, 10.0, 10.0, 10.0),))
    assert (seen.measured, seen.isolated_us, seen.cores) == (False, 0.0, 4)
    scaled = estimated_profile(loaded, cores=2, isolated_us=90.0)
    assert scaled.latency_us == (((120.0, 60.0),), ((30.0, 30.0),))
    assert scaled.span_us(0, 2, cores=2) == 90.0


def test_estimates_of_what_is_not_known() -> None:
    whole = estimated_profile(spec(layers=1, indivisible=True), cores=2, isolated_us=500.0)
    assert (whole.latency_us, whole.max_ranks, whole.indivisible) == ((((500.0, 500.0),),), 1, True)
    assert estimated_profile(spec(), cores=2).cores == 2


def test_a_profile_serves_any_number_of_cores() -> None:
    measured = profile((1, 2, 4), (100.0, 60.0, 59.0))
    seen = served_profile(measured, spec(layers=1, max_ranks=4), cores=6)
    assert seen.latency_us[0][1][3:] == (59.0, 59.0, 59.0)
    assert seen.max_ranks == 2, "two more cores are worth nothing"
    assert served_profile(measured, spec(layers=1, max_ranks=4), cores=1).latency_us == (((100.0,), (100.0,)),)
