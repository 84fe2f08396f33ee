"""The small files of measured models, made of profiles."""

import os
from dataclasses import replace

import pytest

from gangway.artifact.format import MANIFEST_FILE, OPTIMISED_ONNX_FILE, Engine, FileSpec
from gangway.artifact.precision import BF16
from gangway.artifact.profile import (
    InterferencePoint,
    LayerProfile,
    Profile,
    ProfiledMachine,
    ProfileError,
    note_name,
    write_profile,
)
from gangway.artifact.reader import read_manifest
from gangway.base.json_codec import encode
from gangway.simulator.kernel_generation import recorded_generation
from gangway.simulator.measured import (
    UNKNOWN_GENERATION,
    main,
    measured_model,
    merge,
    profiled_models,
    read_measured,
    session_spread,
)
from tests.helpers.started_command import status_of

OTHER_MACHINE = ProfiledMachine("1" * 12, "cpu", 2, "avx2", 1.0, 1.0)


def profile_of(key, layers, factor=1.0, levels=(0.1, 0.3, 0.6), batches=(1,)):
    grid = tuple(tuple(rows * time_us for rows in batches) for time_us in (20.0 * factor, 11.0 / factor))
    layer = LayerProfile("layer", (grid,), 2.0, 9.0, (factor,), ((0.0,) * 3,))
    points = tuple(
        InterferencePoint("stream", share, level) for share, level in zip((25, 50, 100), levels, strict=True)
    )
    machine = ProfiledMachine("0" * 12, "cpu", 2, "avx2", 1.0, 1.0)
    return Profile(
        key, "mlp", machine, (1, 2), batches, (layer,) * layers, grid, grid, points, 1, (5,) * len(batches), 0.01, 1.0
    )


def test_the_quietest_of_several_profiles():
    quiet, felt, noisy = (
        profile_of("0" * 64, 2),
        profile_of("0" * 64, 2, 2.0, (0.1, 0.4, 0.8)),
        profile_of("0" * 64, 2, 3.0, (2.0, 0.1, 1.0)),
    )
    merged = merge([quiet, felt, noisy])
    assert merged.layers[0].latency_us == (((20.0,), (11.0 / 3,)),)
    assert merged.layers[0].slope == (2.0,), "the generators were felt most, and it was they that were felt"
    with pytest.raises(ProfileError, match="different machines"):
        merge([quiet, replace(quiet, cores=(1,))])


def test_batches_that_all_profiles_have():
    long, short = profile_of("0" * 64, 2, batches=(1, 2, 4)), profile_of("0" * 64, 2, 2.0, batches=(1, 2))
    merged = merge([long, short])
    assert merged.batches == (1, 2)
    assert merged.layers[0].latency_us == (((20.0, 40.0), (5.5, 11.0)),)
    assert merged.isolated_us == merged.together_us == ((20.0, 40.0), (5.5, 11.0))


def test_the_spread_is_of_the_quietest_sessions():
    def took(*times_us):
        return replace(profile_of("0" * 64, 1), isolated_us=tuple((time_us,) for time_us in times_us))

    sessions = [took(100.0, 51.0), took(140.0, 80.0), took(102.0, 50.0), took(101.0, 53.0)]
    assert session_spread(sessions) == pytest.approx(51 / 50 - 1)
    assert session_spread(sessions[:2]) == pytest.approx(80 / 51 - 1)
    assert session_spread(sessions[:1]) == pytest.approx(2 * 1.25 * 0.01 * (2 / 5) ** 0.5), "what its runs scatter by"


def test_profiles_in_a_cache_become_files_that_can_be_read(compiled_zoo, tmp_path, capsys):
    artifact = compiled_zoo.artifact("mlp")
    layers = len(read_manifest(artifact).layers)
    (tmp_path / artifact.name).symlink_to(artifact)
    path = write_profile(tmp_path, profile_of(artifact.name, layers, batches=(1, 2, 4)))
    assert main([str(path), "-o", str(tmp_path / "out"), "--cache-dir", str(tmp_path)]) == 0
    packed = read_measured(tmp_path / "out" / "mlp.json")
    profile = profile_of(artifact.name, layers, batches=(1, 2, 4))
    made = measured_model([profile], read_manifest(artifact), recorded_generation().number)
    assert packed.spread == pytest.approx(made.spread, rel=1e-3)
    assert packed == replace(made, spread=packed.spread)
    assert replace(made, kernel_generation=UNKNOWN_GENERATION) == read_measured(path)
    assert packed.batch_us[0] == ((20.0, 40.0, 80.0), (11.0, 22.0, 44.0))
    (tmp_path / artifact.name).unlink()
    with pytest.raises(ProfileError, match="artifact is needed"):
        read_measured(path)
    assert main([str(tmp_path / "absent.json")]) == 1
    assert "absent.json" in capsys.readouterr().err


def test_a_cache_s_models_are_those_in_the_precision_that_is_asked_for(compiled_zoo, tmp_path):
    manifest = read_manifest(compiled_zoo.artifact("mlp"))
    (tmp_path / manifest.key).symlink_to(compiled_zoo.artifact("mlp"))
    in_bf16 = tmp_path / ("f" * 64)
    in_bf16.mkdir()
    for name in manifest.files:
        (in_bf16 / name).symlink_to(compiled_zoo.artifact("mlp") / name)
    (in_bf16 / MANIFEST_FILE).write_bytes(encode(replace(manifest, key=in_bf16.name, precision=BF16)))
    layers = len(manifest.layers)
    former, current, fast = (
        write_profile(tmp_path, profile_of(manifest.key, layers)),
        write_profile(tmp_path, replace(profile_of(manifest.key, layers, 1.5), machine=OTHER_MACHINE)),
        write_profile(tmp_path, profile_of(in_bf16.name, layers, 0.5)),
    )
    for age_s, path in enumerate((fast, current, former)):
        os.utime(path, (1000 - age_s, 1000 - age_s))
    assert profiled_models(tmp_path, []) == {"mlp": read_measured(current)}, "the newest in fp32"
    assert profiled_models(tmp_path, [], BF16) == {"mlp": read_measured(fast)}
    assert profiled_models(tmp_path, [former], BF16) == {"mlp": read_measured(former)}, "a file that is named"


@pytest.fixture
def cache_of_sizes(compiled_zoo, tmp_path):
    """A function that puts an artifact with a first input of this shape into a cache; it returns the profile's path."""
    manifest = read_manifest(compiled_zoo.artifact("mlp"))

    def put(number, shape):
        artifact = tmp_path / f"{number:064x}"
        artifact.mkdir()
        first = replace(manifest.inputs[0], shape=shape)
        made = replace(manifest, key=artifact.name, inputs=(first,))
        if -1 in shape[1:]:
            one = replace(manifest.layers[0].versions[0], tasks=1, batch=None)
            layer = replace(manifest.layers[0], arguments=(), versions=(one,), max_ranks=1)
            files = {OPTIMISED_ONNX_FILE: FileSpec(0, "0" * 64)}
            made = replace(
                made, engine=Engine.ONNXRUNTIME, fallback_reason="open", layers=(layer,), arena_bytes=0, files=files
            )
            (artifact / OPTIMISED_ONNX_FILE).parent.mkdir()
            (artifact / OPTIMISED_ONNX_FILE).touch()
        for name in manifest.files:
            (artifact / name).symlink_to(compiled_zoo.artifact("mlp") / name)
        (artifact / MANIFEST_FILE).write_bytes(encode(made))
        path = write_profile(tmp_path, profile_of(artifact.name, len(made.layers)))
        os.utime(path, (1000 + number, 1000 + number))
        return path

    return put


def test_a_model_is_known_by_all_names_under_which_servers_have_loaded_it(cache_of_sizes, tmp_path, capsys):
    path = cache_of_sizes(1, (-1, 16))
    note_name(path, "mine")
    models = profiled_models(tmp_path, [])
    assert models == {"mlp": read_measured(path), "mine": replace(read_measured(path), model_name="mine")}
    assert status_of("capacity", "mine=1@3x", "mlp=1@3x", "--cores=2", "--queries=50", f"--cache-dir={tmp_path}") == 0
    assert "mine of " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shapes", "source", "warning"),
    [
        ([(-1, 16)], "16; in", None),
        ([(-1, 16), (-1, 32)], "with input [-1, 32]; in", "mlp was measured in 2 sizes, the last time with input"),
        ([(-1, 16), (-1, -1)], "with input [-1, -1]; in", "as onnxruntime computes sizes that"),
    ],
    ids=["one size", "two sizes", "any size"],
)
def test_capacity_says_which_size_was_measured_if_requests_may_have_others(
    cache_of_sizes, tmp_path, capsys, shapes, source, warning
):
    for number, shape in enumerate(shapes):
        cache_of_sizes(number, shape)
    assert status_of("capacity", "mlp=1@3x", "--cores=2", "--queries=50", f"--cache-dir={tmp_path}") == 0
    errors = capsys.readouterr().err
    assert source in errors
    assert ("--dimension NAME=SIZE" in errors) == (warning is not None)
    assert warning is None or warning in errors
