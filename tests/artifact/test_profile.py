"""The profile's file: what is written is read again, and nothing damaged is."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gangway.artifact.profile import (
    InterferencePoint,
    LayerProfile,
    Profile,
    ProfiledMachine,
    ProfileError,
    better_of,
    keep_better,
    machine_id,
    profile_path,
    read_profile,
    write_profile,
)

MACHINE = ProfiledMachine(machine_id("some CPU", 2, "avx2"), "some CPU", 2, "avx2", 1e5, 2e4)
LAYER = LayerProfile("conv", (((10.0, 20.0), (5.5, 10.5)),), 1.0, 8.0, (0.5,), ((0.1,),))
PROFILE = Profile(
    key="ab" * 32,
    model_name="model",
    machine=MACHINE,
    cores=(1, 2),
    batches=(1, 2),
    layers=(LAYER,),
    isolated_us=((11.0, 21.0), (6.0, 11.0)),
    together_us=((12.0, 23.0), (6.0, 11.0)),
    interference=(InterferencePoint("stream", 50, 0.2),),
    interference_cores=1,
    runs=(9, 3),
    scatter=0.02,
    seconds=1.5,
    cores_whole=0.97,
)


def test_round_trip(tmp_path: Path) -> None:
    path = write_profile(tmp_path, PROFILE)
    assert path == profile_path(tmp_path, PROFILE.key, MACHINE.machine_id)
    assert read_profile(path) == PROFILE
    newer = replace(PROFILE, seconds=2.0)
    assert write_profile(tmp_path, newer) == path
    assert read_profile(path) == newer
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_no_interference(tmp_path: Path) -> None:
    alone = replace(PROFILE, layers=(replace(LAYER, slope=(), slowdown=()),), interference=(), interference_cores=0)
    assert read_profile(write_profile(tmp_path, alone)) == alone


def test_failed_write_leaves_the_old_one(tmp_path: Path) -> None:
    path = write_profile(tmp_path, PROFILE)
    with pytest.raises(TypeError):
        write_profile(tmp_path, replace(PROFILE, seconds=object()))  # type: ignore[arg-type]
    assert read_profile(path) == PROFILE
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_files_of_the_format_before_are_read(tmp_path: Path) -> None:
    path = write_profile(tmp_path, PROFILE)
    content = {**json.loads(path.read_text()), "format_version": 5}
    del content["agreeing"]
    for older in (content, {**content, "counters": {"events": ["a", "m"], "samples": []}, "format_version": 4}):
        path.write_text(json.dumps(older))
        assert read_profile(path) == PROFILE
        path.write_text(json.dumps({**older, "surprise": 1}))
        with pytest.raises(ProfileError, match="unknown field 'surprise'"):
            read_profile(path)


def measured(cores_whole: float, agreeing: int = 1) -> Profile:
    """A measurement; 0 agree if other processes took part of the cores meanwhile."""
    return replace(PROFILE, cores_whole=cores_whole, agreeing=agreeing, seconds=cores_whole)


def test_a_profile_is_in_doubt_until_its_cores_are_whole_or_three_measurements_agree() -> None:
    assert measured(0.79).doubtful
    assert not measured(0.8).doubtful
    assert measured(0.5, agreeing=2).doubtful
    assert not measured(0.5, agreeing=3).doubtful


@pytest.mark.parametrize(
    ("former", "newer", "kept"),
    [
        (measured(0.13), measured(0.6), measured(0.6)),
        (measured(0.6), measured(0.13), measured(0.6)),
        (measured(0.9), measured(0.6), measured(0.9)),
        (measured(0.6, agreeing=3), measured(0.3), measured(0.6, agreeing=3)),
        (measured(0.6, agreeing=3), measured(0.95), measured(0.95)),
        (measured(0.6, agreeing=2), measured(0.55), measured(0.6, agreeing=3)),
        (measured(0.55, agreeing=2), measured(0.6), measured(0.6, agreeing=3)),
        (measured(0.6, agreeing=2), measured(0.6, agreeing=0), measured(0.6, agreeing=2)),
        (measured(0.6, agreeing=2), measured(0.53), measured(0.6, agreeing=2)),
    ],
)
def test_the_better_of_two_measurements_is_kept(former: Profile, newer: Profile, kept: Profile, tmp_path: Path) -> None:
    assert better_of(former, newer) == kept
    path = write_profile(tmp_path, former)
    assert keep_better(tmp_path, newer) == read_profile(path) == kept


def test_of_whole_measurements_the_newer_one_is_kept() -> None:
    assert better_of(measured(1.0), measured(0.8)).seconds == 0.8


def test_a_measurement_is_kept_where_there_is_no_other(tmp_path: Path) -> None:
    assert keep_better(tmp_path, measured(0.1)) == measured(0.1)
    path = profile_path(tmp_path, PROFILE.key, MACHINE.machine_id)
    path.write_text('{"format_version": 1}')
    assert keep_better(tmp_path, measured(0.2)) == read_profile(path) == measured(0.2)


def test_each_machine_has_its_own() -> None:
    ids = {machine_id(*what) for what in (("a", 2, "avx2"), ("b", 2, "avx2"), ("a", 4, "avx2"), ("a", 2, "avx512"))}
    assert len(ids) == 4


DAMAGES = [
    ({"format_version": 1}, "format version 1"),
    ({"key": "../../etc"}, "64 hex digits"),
    ({"cores": [2, 1]}, "cores do not ascend"),
    ({"cores": [1, 2, 4]}, "isolated_us is not 3 cores x 2 batches"),
    ({"batches": []}, "batches do not ascend"),
    ({"layers": []}, "no layer"),
    ({"seconds": "long"}, "profile.seconds: expected `float`, got `str`"),
    ({"seconds": True}, "profile.seconds: expected `float`, got `bool`"),
    ({"seconds": float("nan")}, "profile is not JSON"),
    ({"isolated_us": [[1, 2], [3, -4]]}, "isolated_us has a negative time"),
    ({"together_us": [[1, 2]]}, "together_us is not 2 cores x 2 batches"),
    ({"interference": []}, "slope too many"),
    ({"cores_whole": 0}, "cores_whole is not a share"),
    ({"cores_whole": 1.5}, "cores_whole is not a share"),
    ({"agreeing": -1}, "agreeing is negative"),
    ({"counters": {}}, "unknown field 'counters'"),
    ({"surprise": 1}, "unknown field 'surprise'"),
]


@pytest.mark.parametrize(("changes", "reason"), DAMAGES, ids=[reason for _, reason in DAMAGES])
def test_wrong_content_is_refused(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    path = write_profile(tmp_path, PROFILE)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ProfileError, match=reason) as failure:
        read_profile(path)
    assert str(path) in str(failure.value)


def test_wrong_layer_is_refused(tmp_path: Path) -> None:
    path = write_profile(tmp_path, PROFILE)
    content = json.loads(path.read_text())
    content["layers"][0]["latency_us"] = [[[1.0, 2.0]]]
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match="latency_us of layer 'conv'"):
        read_profile(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_no_profile_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError):
        read_profile(path)
    with pytest.raises(ProfileError):
        read_profile(tmp_path / "absent.json")
