"""Requests that begin without a decision, under sanitizers: see fast_path.c. And what the native part refuses."""

import subprocess
from pathlib import Path

import pytest

from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.fast_path import FastPath, OpenModel
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotTable
from tests.executor.sanitized import SANITIZERS, build

HERE = Path(__file__).parent
NATIVE = HERE.parent.parent / "executor" / "native"
NAMES = ("gang", "lease", "phase", "place", "program", "fast_path", "region", "ring", "slot", "worker")
SOURCES = [HERE / "fast_path.c", *(NATIVE / f"{name}.c" for name in NAMES)]


@pytest.fixture(scope="module", params=SANITIZERS)
def binary(request, programmes):
    return build(programmes, SOURCES, "fast_path", request.param)


@pytest.mark.parametrize(("seed", "workers"), [(1, 1), (2, 2), (3, 8)])
def test_every_request_is_computed_once_in_an_arena_of_its_own(binary, seed, workers):
    command = [str(binary), str(seed), "3000", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right")


@pytest.fixture
def path():
    control = ControlSegment.create(ControlLayout(workers=2, front_ends=1, leases=4))
    table = SlotTable(Segment.create(1 << 16, "io"), 8)
    table.init()
    return FastPath(control, [table], 1000)


def test_what_leads_outside_is_refused(path):
    fine = OpenModel(1, 3, 10, 2, 0, False, 64, (0, 64), bytes(3))
    path.open(fine)
    for wrong, said in [
        (fine._replace(model_id=1024), "at most 1024 models"),
        (fine._replace(layers=0, versions=b""), "no such model: 0 layers"),
        (fine._replace(layers=5000, versions=b""), "no such model: 5000 layers"),
        (fine._replace(ranks=0), "on 0 cores"),
        (fine._replace(ranks=3), "on 3 cores"),
        (fine._replace(versions=bytes(2)), "no such model"),
        (fine._replace(versions=b"\0\5\0"), "version 5"),
    ]:
        with pytest.raises(ValueError, match=said):
            path.open(wrong)
    with pytest.raises(OverflowError):
        path.open(fine._replace(arenas=(-1,)))
    with pytest.raises(ValueError, match="at most 1024 models"):
        path.close(1024)
    with pytest.raises(ValueError, match="no lease 4"):
        path.poll([4] * path.worker_slots, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="3 leases"):
        path.poll([0] * 3, 0, 0, 0, 0)


def test_it_returns_when_the_time_is_up_or_the_control_sequence_has_grown(path):
    leases = list(range(path.worker_slots))
    assert path.poll(leases, 0, 0, 1000, 1000) == ([], [])
    assert path.poll(leases, 1, 0, 60_000_000, 1000) == ([], [])
