"""Chunks of equal kind against cases worked out by hand."""

from gangway.scheduler.policies.layerweaver import Chunk, Chunks
from gangway.scheduler.profiles import ModelProfile


def model(*layers_us: tuple[float, float], indivisible: bool = False) -> ModelProfile:
    """Layers with these m and c."""
    return ModelProfile(
        1,
        "",
        len(layers_us),
        4,
        memory_us=tuple(layer[0] for layer in layers_us),
        compute_us=tuple(layer[1] for layer in layers_us),
        indivisible=indivisible,
    )


def test_a_chunk_ends_where_the_kind_changes() -> None:
    profile = model((10.0, 200.0), (20.0, 200.0), (300.0, 5.0), (1.0, 100.0))
    assert Chunks().chunk(profile, 0) == Chunk(0, 2, 30.0, 400.0)
    assert Chunks().chunk(profile, 2) == Chunk(2, 3, 300.0, 5.0)
    assert Chunks().chunk(profile, 1) == Chunk(1, 3, 320.0, 205.0)  # 200 us alone would be too short
    assert Chunks().chunk(profile, 1).memory_bound


def test_short_layers_share_a_chunk_and_long_runs_are_cut() -> None:
    short = model(*[(10.0, 5.0), (5.0, 10.0)] * 40)
    assert Chunks().chunk(short, 0).end == 30  # 30 layers of 10 us
    uniform = model(*[(1.0, 900.0)] * 9)
    assert Chunks().chunk(uniform, 0).end == 3  # 2700 us; 1800 were not enough
    assert Chunks().chunk(uniform, 7).end == 9
    assert Chunks().chunk(model(*[(1.0, 900.0)] * 9, indivisible=True), 0).end == 9


def test_a_new_profile_is_not_mistaken_for_the_old_one() -> None:
    chunks = Chunks()
    assert chunks.chunk(model((1.0, 2.0)), 0).compute_us == 2.0
    assert chunks.chunk(model((1.0, 3.0)), 0).compute_us == 3.0


def test_without_memory_times_all_is_compute() -> None:
    profile = ModelProfile(1, "", 2, 1, latency_us=(((500.0,),), ((100.0,),)))
    assert Chunks().chunk(profile, 0) == Chunk(0, 2, 0.0, 600.0)
