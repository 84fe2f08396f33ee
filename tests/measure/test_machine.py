"""How much of the cores there is, all at once."""

import pytest

from gangway.artifact.profile import LEAST_WHOLE
from gangway.executor.launch import available_cores
from gangway.measure.machine import share_of_cores
from tests.helpers.busy_core import busy_core

pytestmark = pytest.mark.alone  # it takes cores from whoever else runs


def test_one_core_is_whole() -> None:
    assert share_of_cores(available_cores()[:1]) == 1.0


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_a_core_that_others_use_is_missed() -> None:
    first, *_, last = available_cores()
    assert 0 < share_of_cores((first, last)) <= 1
    with busy_core(last, count=3):
        assert share_of_cores((first, last)) < LEAST_WHOLE
