"""The tuning's file: what is written is read again, nothing damaged is, and its key covers what was chosen."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gangway.artifact.profile import InterferencePoint, whole_machine_id
from gangway.artifact.tuning import (
    CandidateTime,
    Finalist,
    KnobCandidate,
    TunedKernel,
    Tuning,
    TuningError,
    encode_tuning,
    find_tuning,
    find_tuning_by_result,
    read_tuning,
    write_tuning,
)

SMALL, LARGE = (KnobCandidate(f"bands={n}", f"conv {n}", 4, 1000 * n, 64 // n) for n in (1, 2))
KERNEL = TunedKernel(
    name="64 -> 64",
    operator="Conv",
    uses=2,
    qos_us=30.0,
    samples=(CandidateTime(SMALL, 9.0), CandidateTime(LARGE, 8.0)),
    finalists=(Finalist(0, 9.0, ((9.0, 10.0),), ((9.0, 5.0),)), Finalist(1, 8.0, ((8.0, 12.0),), ((8.0, 5.0),))),
    versions=(LARGE, SMALL),
)
TUNING = Tuning(
    key="ab" * 32,
    model_name="model",
    machine=whole_machine_id("avx2"),
    cores=2,
    gangs=(1, 2),
    interference_cores=1,
    interference=(InterferencePoint("stream", 50, 0.2),),
    isolated_us=18.0,
    qos_us=54.0,
    trials=2,
    most_versions=5,
    least_loss=0.1,
    kernels=(KERNEL,),
    layers=(0, 0),
    seconds=1.5,
)


def test_round_trip(tmp_path: Path) -> None:
    path = write_tuning(tmp_path, TUNING)
    assert read_tuning(path) == TUNING
    assert find_tuning(tmp_path, TUNING.key, "avx2") == TUNING
    assert find_tuning(tmp_path, TUNING.key, "avx512") is None
    assert find_tuning_by_result(tmp_path, TUNING.tuned_key, "avx2") == TUNING
    assert find_tuning_by_result(tmp_path, TUNING.key, "avx2") is None


def test_the_key_covers_the_choice_and_not_the_times() -> None:
    faster = replace(TUNING, seconds=9.0, kernels=(replace(KERNEL, qos_us=1.0),))
    assert faster.tuned_key == TUNING.tuned_key
    others = [
        replace(TUNING, kernels=(replace(KERNEL, versions=(SMALL, LARGE)),)),
        replace(TUNING, kernels=(replace(KERNEL, versions=(LARGE,)),)),
        replace(TUNING, layers=(0,)),
        replace(TUNING, key="cd" * 32),
    ]
    assert len({TUNING.key, TUNING.tuned_key, *(other.tuned_key for other in others)}) == 6


def changed(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: Any) -> None:
        *front, last = path
        for step in front:
            record = record[step]
        record[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed("format_version", value=9), "format version 9"),
        (changed("key", value="xyz"), "64 hex digits"),
        (changed("layers", value=[0, 1]), "a layer has no kernel"),
        (changed("layers", value=[]), "no layer"),
        (changed("kernels", 0, "versions", value=[]), "has 0 versions"),
        (changed("kernels", 0, "finalists", 0, "sample", value=2), "no sample"),
        (changed("kernels", 0, "finalists", 0, "disturbed_us", 0, value=[1.0]), "number of levels"),
        (changed("seconds", value="long"), "tuning.seconds: expected `float`, got `str`"),
    ],
)
def test_what_does_not_fit_is_refused_and_ignored(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tuning(tmp_path, TUNING)
    record = json.loads(encode_tuning(TUNING))
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(TuningError, match=said):
        read_tuning(path)
    with caplog.at_level(logging.WARNING):
        assert find_tuning(tmp_path, TUNING.key, "avx2") is None
    assert "damaged tuning ignored" in caplog.text
