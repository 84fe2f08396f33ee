"""What policies see of a measured profile."""

from dataclasses import replace

import pytest

from gangway.artifact.profile import LayerProfile, Profile, ProfiledMachine
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.profiles import estimated_profile, policy_profile, scaled_profile, served_profile

MACHINE = ProfiledMachine("0" * 12, "CPU", 6, "avx2", 1e5, 2e4)


def profile(cores: tuple[int, ...], times_us: tuple[float, ...]) -> Profile:
    grid = tuple((time_us, 2 * time_us) for time_us in times_us)
    return of_grids(cores, (1, 2), grid, grid)


def of_grids(
    cores: tuple[int, ...],
    batches: tuple[int, ...],
    isolated_us: tuple[tuple[float, ...], ...],
    together_us: tuple[tuple[float, ...], ...],
) -> Profile:
    layer = LayerProfile("layer", (isolated_us, isolated_us), 1.0, 1.0, (), ())
    runs = (8, 2, *[1] * (len(batches) - 2))[: len(batches)]
    return Profile(
        "ab" * 32, "model", MACHINE, cores, batches, (layer,), isolated_us, together_us, (), 0, runs, 0.04, 1.0
    )


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


def test_onnxruntime_has_1_2_or_4_threads_on_a_gang() -> None:
    measured = profile((1, 2, 4), (100.0, 60.0, 40.0))
    seen = served_profile(measured, spec(layers=1, max_ranks=16, indivisible=True), cores=6)
    assert seen.latency_us[0][0] == (100.0, 60.0, 60.0, 40.0, 40.0, 40.0)
    assert (seen.max_ranks, seen.indivisible, seen.compute_us) == (4, True, ())
    scaled = scaled_profile(seen, one_core_us=50.0)
    assert scaled.latency_us[0][0] == (50.0, 30.0, 30.0, 20.0, 20.0, 20.0)
    narrow = profile((1, 2), (100.0, 99.0))
    assert served_profile(narrow, spec(layers=1, max_ranks=16, indivisible=True), cores=2).max_ranks == 1


def test_batches_alone_and_beside_others_like_them() -> None:
    measured = of_grids(
        (1, 2, 4),
        (1, 2, 4),
        isolated_us=((100.0, 180.0, 340.0), (60.0, 100.0, 180.0), (40.0, 60.0, 100.0)),
        together_us=((110.0, 210.0, 400.0), (60.0, 110.0, 200.0), (40.0, 60.0, 100.0)),
    )
    seen = served_profile(measured, spec(layers=1, max_ranks=4), cores=4)
    assert [seen.rows_us(1, rows) for rows in (1, 2, 3, 4, 8)] == pytest.approx([100, 180, 260, 340, 660])
    assert [seen.together_us(1, rows) for rows in (1, 2, 3, 4, 8)] == pytest.approx([110, 210, 305, 400, 780])
    assert seen.together_us(2, 4) == pytest.approx(200)
    assert [seen.together_us(4, rows) for rows in (1, 3, 9)] == [seen.rows_us(4, rows) for rows in (1, 3, 9)]
    between = seen.together_us(3, 2)
    assert 60 < between < 110, "three cores are between two and four"
    assert seen.together_us(64, 2) == seen.together_us(4, 2), "more cores than were measured: as with all of these"


def test_batches_take_what_whole_runs_took_though_their_layers_add_up_to_less() -> None:
    """One row on one core was disturbed in most runs, each time in another layer."""
    measured = of_grids((1, 2), (1, 2), ((130.0, 200.0), (70.0, 110.0)), ((120.0, 220.0), (70.0, 110.0)))
    layer = LayerProfile("layer", (((100.0, 190.0), (60.0, 105.0)),), 1.0, 1.0, (), ())
    seen = policy_profile(replace(measured, layers=(layer,)), 0, "model", 2)
    assert [seen.remaining_us(0, cores) for cores in (1, 2)] == [100.0, 60.0]
    assert [seen.rows_us(cores, rows) for cores in (1, 2) for rows in (1, 2)] == pytest.approx([130, 200, 70, 110])
    assert [seen.together_us(1, rows) for rows in (1, 2)] == pytest.approx([120, 220])
    assert seen.remaining_us(0, 2, rows=2) == pytest.approx(110)


def test_more_rows_never_take_less_time() -> None:
    noisy = ((100.0, 90.0, 360.0),)
    seen = policy_profile(of_grids((1,), (1, 2, 4), noisy, noisy), 0, "model", 1)
    assert [seen.rows_us(1, rows) for rows in (1, 2, 3, 4)] == pytest.approx([100, 100, 230, 360])
    assert seen.together_us(1, 2) == pytest.approx(100)


def test_times_are_doubted_the_more_the_fewer_runs_there_were() -> None:
    seen = policy_profile(profile((1, 2), (100.0, 60.0)), 0, "model", 2)
    assert seen.doubt_of(1) == pytest.approx(2 * 1.25 * 0.04 * 0.5)
    assert seen.doubt_of(2) == seen.doubt_of(3) == 1.0, "either of two runs may be an outlier"
    assert estimated_profile(spec(), cores=2).doubt_of(5) == 0.0


def test_without_measured_batches_time_is_in_proportion_to_rows() -> None:
    estimated = estimated_profile(spec(layer_us=(40.0, 10.0), layer_ranks=(2, 1)), cores=2)
    assert (estimated.rows_us(1, 8), estimated.together_us(1, 8)) == (400.0, 400.0)
    one_batch = policy_profile(of_grids((1, 2), (1,), ((50.0,), (30.0,)), ((60.0,), (30.0,))), 0, "model", 2)
    assert (one_batch.rows_us(1, 8), one_batch.together_us(1, 8)) == pytest.approx((400.0, 480.0))
