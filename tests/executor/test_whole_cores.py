"""How much of the cores there is, all at once."""

import subprocess
import sys

import pytest
from gangway.artifact.profile import LEAST_WHOLE
from gangway.executor.cores import available_cores
from gangway.executor.whole_cores import share_of_cores

pytestmark = pytest.mark.alone  # it takes cores from whoever else runs

SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True: pass
"""


def test_one_core_is_whole() -> None:
    assert share_of_cores(available_cores()[:1]) == 1.0


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_a_core_that_others_use_is_missed() -> None:
    first, *_, last = available_cores()
    assert 0 < share_of_cores((first, last)) <= 1
    spinners = [
        subprocess.Popen([sys.executable, "-c", SPIN, str(last)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    try:
        for spinner in spinners:
            assert spinner.stdout is not None and spinner.stdout.readline() == "\n"
        assert share_of_cores((first, last)) < LEAST_WHOLE
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.communicate()
