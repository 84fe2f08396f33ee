"""kill -9 under load: every request ends with the right answer or UNAVAILABLE; the service is soon back.

Steps of Python models that misbehave are no harm to others.
"""

import http.client
import os
import re
import signal
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress

import pytest
import tritonclient.grpc as triton

from benchmarks.faults.__main__ import BACK_WITHIN_S, VICTIMS, leaks, try_kills, wrong_answers
from benchmarks.faults.python_models import run
from testing.live_server import is_ready, live_server
from testing.load import RIGHT, Load, LoadProcess, run_for
from testing.reference import example_of
from tests.helpers.sampled import sampled
from tests.helpers.start_time import back_within_s

CLIENTS = 16
TIMEOUT_S = 30
MODULES = {
    "worker": "gangway.executor.worker",
    "scheduler": "gangway.scheduler.process",
    "front end": "gangway.server.serving.process",
}
GROWS = 1.1


@pytest.fixture(scope="module")
def server(compiled_zoo):
    with live_server(compiled_zoo.repository, [f"--cache-dir={compiled_zoo.cache_dir}"]) as running:
        yield running


@pytest.fixture(scope="module")
def example(compiled_zoo):
    return example_of("mobilenetv2", compiled_zoo.onnx_file("mobilenetv2"))


SCHEDULERS_OWN = (
    *("gangway_growths", "gangway_shrinks", "gangway_layers", "gangway_version_layers", "gangway_blocks_planned"),
    "gangway_core_busy",
)


@contextmanager
def scraping(url):
    """The texts of all scrapes that are answered while the block lasts."""
    texts, over = [], threading.Event()

    def scrape():
        while not over.wait(0.05):
            with suppress(OSError, http.client.HTTPException):  # nobody listens for a moment
                texts.append(urllib.request.urlopen(url, timeout=5).read().decode())

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield texts
    finally:
        over.set()
        thread.join()


def counters_in(text):
    """Samples of counters and histograms, without those that belong to the scheduler and the workers."""
    gauges = set(re.findall(r"^# TYPE (\S+) gauge$", text, re.MULTILINE))
    samples = [line.rpartition(" ") for line in text.splitlines() if not line.startswith(("#", *SCHEDULERS_OWN))]
    return {key: float(value) for key, _, value in samples if key.partition("{")[0] not in gauges}


def answered(server):
    deadline = time.monotonic() + TIMEOUT_S
    while not is_ready(server.url):
        assert time.monotonic() < deadline, "not back"
    with triton.InferenceServerClient(server.url) as client:
        return client.get_inference_statistics("mobilenetv2").model_stats[0].inference_stats.success.count


@pytest.mark.alone
@pytest.mark.parametrize("victim", sampled(VICTIMS, ["scheduler", "front end"]))
def test_killed_under_load(server, example, victim):
    before = answered(server)
    with LoadProcess(Load(server.url, example.request, example.outputs, CLIENTS)) as load:
        bound_s = back_within_s(MODULES[victim], BACK_WITHIN_S)
        load.stop()
    with scraping(server.metrics_url) as texts:
        trial = try_kills(server, example, victim, kills=2, clients=CLIENTS, pause_s=0.3, answering=True)
    # What a client has got has been counted; nothing that was counted is lost with a process.
    assert answered(server) - before >= sum(outcome.result == RIGHT for outcome in trial.outcomes)
    highest = {}
    for text in texts:
        counters = counters_in(text)
        assert [key for key, value in counters.items() if value < highest.get(key, 0)] == []
        highest |= counters
    assert highest['nv_inference_request_success{model="mobilenetv2",version="1"}'] > before
    assert wrong_answers(trial) == 0, {outcome.result for outcome in trial.outcomes}
    assert max(trial.outages_s()) < bound_s
    assert leaks(trial) == 0


@pytest.mark.long
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


def test_steps_that_misbehave_are_no_harm_to_others():
    """A slice of `benchmarks.faults`, without its bounds of time."""
    seen = run(("spins in children",), phase_s=0.2, rounds=1, positions=("beside ONNX", "decoupled"))
    assert not seen.not_right()
    for phases in seen.phases.values():
        assert phases.ends
        assert phases.leaks == 0
        assert max(phases.back_s) < TIMEOUT_S
