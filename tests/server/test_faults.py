"""kill -9 under load: every request ends with the right answer or UNAVAILABLE; the service is back within a second."""

import pytest

from benchmarks.faults import BACK_WITHIN_S, VICTIMS, leaks, try_kills, wrong_answers
from benchmarks.live_server import live_server
from benchmarks.reference import example_of

CLIENTS = 16


@pytest.fixture(scope="module")
def server(compiled_zoo):
    with live_server(compiled_zoo.repository, [f"--cache-dir={compiled_zoo.cache_dir}"]) as running:
        yield running


@pytest.fixture(scope="module")
def example(compiled_zoo):
    return example_of("mobilenetv2", compiled_zoo.onnx_file("mobilenetv2"))


@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_under_load(server, example, victim):
    trial = try_kills(server, example, victim, kills=3, clients=CLIENTS, pause_s=0.5)
    assert wrong_answers(trial) == 0, {outcome.result for outcome in trial.outcomes}
    assert max(trial.outages_s()) < BACK_WITHIN_S
    assert leaks(trial) == 0


@pytest.mark.parametrize("victim", VICTIMS)
def test_twenty_kills_in_a_row_leak_nothing(server, example, victim):
    trial = try_kills(server, example, victim, kills=20, clients=CLIENTS, pause_s=0.02)
    assert wrong_answers(trial) == 0, {outcome.result for outcome in trial.outcomes}
    assert leaks(trial) == 0
    assert trial.after.memory_mb < trial.before.memory_mb * 1.1
    assert server.process.poll() is None
