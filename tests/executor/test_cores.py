"""Affinity and CPU quotas are honoured."""

import os

import pytest

from gangway.executor.launch import available_cores

ALL = sorted(os.sched_getaffinity(0))


def group(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_quota_limits_the_cores_but_leaves_one(tmp_path):
    group(tmp_path, {"cpu.max": "10000 100000"})
    assert available_cores("all", tmp_path, "0::/") == ALL[:1]
    if len(ALL) > 1:
        with pytest.raises(ValueError, match=r"quota of this container pays for 0\.10"):
            available_cores(",".join(map(str, ALL)), tmp_path, "0::/")


def test_request(tmp_path):
    assert available_cores("all", tmp_path, "0::/") == ALL
    assert available_cores(str(ALL[-1]), tmp_path, "0::/") == [ALL[-1]]
    assert available_cores(f"{ALL[0]}-{ALL[0]},{ALL[-1]}", tmp_path, "0::/") == sorted({ALL[0], ALL[-1]})
    assert available_cores(f"{ALL[-1]}x3", tmp_path, "0::/") == [ALL[-1]] * 3


def test_affinity_is_honoured(tmp_path):
    try:
        os.sched_setaffinity(0, ALL[-1:])
        assert available_cores("all", tmp_path, "0::/") == ALL[-1:]
    finally:
        os.sched_setaffinity(0, ALL)


@pytest.mark.parametrize("request_text", ["", "x", "1-", "-1", "0,,1", "3-1", "0x", "0x0", "x2", "0xx2"])
def test_malformed_request(tmp_path, request_text):
    with pytest.raises(ValueError):
        available_cores(request_text, tmp_path, "0::/")


def test_core_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cores 4000 are not available"):
        available_cores("0,4000", tmp_path, "0::/")
