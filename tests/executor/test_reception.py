"""Requests that begin without a decision, under sanitizers: see reception.c. And what the native part refuses."""

import subprocess
from pathlib import Path

import pytest

from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.fast_path import Reception
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotTable
from tests.executor.sanitized import SANITIZERS, build

HERE = Path(__file__).parent
NATIVE = HERE.parent.parent / "executor" / "native"
NAMES = ("gang", "lease", "page", "place", "reception", "region", "ring", "slot", "worker")
SOURCES = [HERE / "reception.c", *(NATIVE / f"{name}.c" for name in NAMES)]


@pytest.fixture(scope="module", params=SANITIZERS)
def binary(request, tmp_path_factory):
    return build(SOURCES, tmp_path_factory.mktemp("reception") / "reception", request.param)


@pytest.mark.parametrize(("seed", "workers"), [(1, 1), (2, 2), (3, 8)])
def test_every_request_is_computed_once_in_an_arena_of_its_own(binary, seed, workers):
    command = [str(binary), str(seed), "3000", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right")


@pytest.fixture
def reception():
    control = ControlSegment.create(ControlLayout(workers=2, front_ends=1, leases=4))
    table = SlotTable(Segment.create(1 << 16, "io"), 8)
    table.init()
    return Reception(control, [table], 1000)


def test_what_leads_outside_is_refused(reception):
    with pytest.raises(ValueError, match="at most 1024 models"):
        reception.open(1024, 1, 10, 64, [0] * reception.desks)
    with pytest.raises(ValueError, match="at most 1024 models"):
        reception.close(1024)
    with pytest.raises(ValueError, match="no such model: 0 layers"):
        reception.open(1, 0, 10, 64, [0] * reception.desks)
    with pytest.raises(ValueError, match="3 arenas"):
        reception.open(1, 1, 10, 64, [0] * 3)
    with pytest.raises(ValueError, match="no lease 4"):
        reception.attend([4] * reception.desks, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="3 leases"):
        reception.attend([0] * 3, 0, 0, 0, 0)


def test_it_returns_when_the_time_is_up_or_a_letter_has_come(reception):
    leases = list(range(reception.desks))
    assert reception.attend(leases, 0, 0, 1000, 1000) == ([], [])
    assert reception.attend(leases, 1, 0, 60_000_000, 1000) == ([], [])
