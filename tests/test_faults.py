"""kill -9 under load: no wrong answer, soon back, nothing left behind. The benchmark does the same for longer."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.faults import BACK_WITHIN_S, VICTIMS, leaks, try_kills, wrong_answers
from benchmarks.live_server import LiveServer, live_server
from benchmarks.load import RIGHT
from benchmarks.reference import Example, example_of


@pytest.fixture(scope="module")
def example(compiled_zoo: Any) -> Example:
    return example_of("mobilenetv2", compiled_zoo.onnx_file("mobilenetv2"))


@pytest.fixture(scope="module")
def server(compiled_zoo: Any) -> Iterator[LiveServer]:
    with live_server(compiled_zoo.repository, [f"--cache-dir={compiled_zoo.cache_dir}"]) as running:
        yield running


@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_under_load(server: LiveServer, example: Example, victim: str) -> None:
    trial = try_kills(server, example, victim, kills=4, clients=16, pause_s=0.5)
    assert wrong_answers(trial) == 0
    assert leaks(trial) == 0
    assert max(trial.outages_s()) < BACK_WITHIN_S
    assert trial.outcomes[-1].result == RIGHT
