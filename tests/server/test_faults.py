"""kill -9 under load: every request ends with the right answer or UNAVAILABLE; the service is soon back."""

import os
import signal
import time
import urllib.request

import pytest

from benchmarks.faults import BACK_WITHIN_S, RIGHT, VICTIMS, leaks, try_kills, wrong_answers
from benchmarks.live_server import is_ready, live_server
from benchmarks.load import Load, LoadProcess, run_for
from benchmarks.reference import example_of
from tests.pace import back_within_s

CLIENTS = 16
TIMEOUT_S = 30
MODULES = {
    "worker": "gangway.executor.worker",
    "scheduler": "gangway.scheduler.process",
    "front end": "gangway.server.front_end",
}
GROWS = 1.1


@pytest.fixture(scope="module")
def server(compiled_zoo):
    with live_server(compiled_zoo.repository, [f"--cache-dir={compiled_zoo.cache_dir}"]) as running:
        yield running


@pytest.fixture(scope="module")
def example(compiled_zoo):
    return example_of("mobilenetv2", compiled_zoo.onnx_file("mobilenetv2"))


@pytest.mark.alone
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_under_load(server, example, victim):
    with LoadProcess(Load(server.url, example.request, example.outputs, CLIENTS)) as load:
        bound_s = back_within_s(MODULES[victim], BACK_WITHIN_S)
        load.stop()
    trial = try_kills(server, example, victim, kills=3, clients=CLIENTS, pause_s=0.3, answering=True)
    assert wrong_answers(trial) == 0, {outcome.result for outcome in trial.outcomes}
    assert max(trial.outages_s()) < bound_s
    assert leaks(trial) == 0


@pytest.mark.parametrize("pause_s", [0.01, 0.15], ids=["while it starts", "while it works"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_many_kills_in_a_row_leak_nothing(server, example, victim, pause_s):
    trial = try_kills(server, example, victim, kills=10, clients=CLIENTS, pause_s=pause_s)
    assert wrong_answers(trial) == 0, {outcome.result for outcome in trial.outcomes}
    assert leaks(trial) == 0
    if trial.after.memory_mb > trial.before.memory_mb * GROWS:
        # More queries were under way at a time than ever before, each with an arena that is kept. A leak grows again.
        trial = try_kills(server, example, victim, kills=10, clients=CLIENTS, pause_s=pause_s)
    assert trial.after.memory_mb < trial.before.memory_mb * GROWS
    deadline = time.monotonic() + TIMEOUT_S
    while not is_ready(server.url):
        assert time.monotonic() < deadline, "not back"
    afterwards = run_for(Load(server.url, example.request, example.outputs, CLIENTS), seconds=0.3)
    assert {outcome.result for outcome in afterwards.outcomes} == {RIGHT}


def test_http_is_back_at_the_same_port(server):
    """Whoever keeps asking the port that was announced is answered again."""
    (front_end,) = server.pids()["front end"]
    os.kill(front_end, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready", timeout=5) as answer:
                assert answer.status == 200
                break
        except OSError:  # refused, or not ready yet
            assert time.monotonic() < deadline
    assert server.pids()["front end"] != [front_end]
