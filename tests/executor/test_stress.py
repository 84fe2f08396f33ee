"""The gang protocol under sanitizers: see stress.c."""

import subprocess
from pathlib import Path

import pytest

from tests.executor.sanitized import SANITIZERS, build
from tests.helpers.sampled import sampled

HERE = Path(__file__).parent
NATIVE = HERE.parent.parent / "executor" / "native"
NAMES = ("gang", "lease", "phase", "place", "program", "region", "ring", "slot", "worker")
SOURCES = [*HERE.glob("stress*.c"), *(NATIVE / f"{name}.c" for name in NAMES)]


@pytest.fixture(scope="module", params=SANITIZERS)
def stress(request, programmes):
    return build(programmes, SOURCES, "stress", request.param)


@pytest.mark.parametrize(("seed", "workers"), sampled([(1, 2), (2, 4), (3, 8)], [(3, 8)]))
def test_every_task_once_and_nothing_hangs(stress, seed, workers):
    command = [str(stress), str(seed), "400", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rounds 400")
