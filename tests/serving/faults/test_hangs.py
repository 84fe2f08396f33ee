"""Processes that hang: they are replaced, and the server's health says meanwhile that it does not serve."""

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gangway.executor.launch import available_cores
from testing.live_server import LiveServer, live_server
from testing.load import RIGHT, Load, run_for
from testing.reference import Example, example_of
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers.busy_core import SPIN, busy_core

REPLACED_WITHIN_S = 8.0  # on a busy machine; 2 where nothing else runs
STALE_S = 2.0


@pytest.fixture(scope="module")
def server(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    repository = tmp_path_factory.mktemp("models")
    (repository / "simple").symlink_to(compiled_zoo.repository / "simple")
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--front-ends=2"]
    with live_server(repository, flags) as running:
        yield running
    assert running.process.returncode == 0


@pytest.fixture(scope="module")
def example(compiled_zoo: CompiledZoo) -> Example:
    return example_of("simple", compiled_zoo.onnx_file("simple"))


def statuses(server: LiveServer) -> dict[str, int]:
    """Status of each health page, 0 without an answer."""
    return {page: status_of(server, page) for page in ("live", "ready", "model")}


def status_of(server: LiveServer, page: str) -> int:
    path = "models/simple/ready" if page == "model" else f"health/{page}"
    try:
        with urllib.request.urlopen(f"http://{server.http_url}/v2/{path}", timeout=REPLACED_WITHIN_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGCONT)


def test_a_hung_scheduler_and_a_hung_front_end_are_replaced(server: LiveServer, example: Example) -> None:
    before = server.pids()
    scheduler, front_end = before["scheduler"][0], before["front end"][0]
    begin = time.monotonic()
    with stopped(scheduler, front_end):
        until(lambda: not {scheduler, front_end} & {pid for pids in server.pids().values() for pid in pids})
        assert time.monotonic() - begin < REPLACED_WITHIN_S
    until(lambda: len((now := server.pids())["front end"]) == 2 and now["scheduler"])
    until(lambda: statuses(server) == {"live": 200, "ready": 200, "model": 200})
    answers = run_for(Load(server.url, example.request, example.outputs, 2), seconds=0.1)
    assert RIGHT in {outcome.result for outcome in answers.outcomes}
    text = server.log.read_text()
    for what, pid in (("scheduler", scheduler), ("front end 1", front_end)):
        assert f"the {what} (process {pid}) makes no progress; it is killed and replaced" in text


def test_health_tells_of_a_hung_supervisor(server: LiveServer) -> None:
    with stopped(server.process.pid):
        time.sleep(STALE_S)
        until(lambda: statuses(server) == {"live": 200, "ready": 400, "model": 400})
    until(lambda: statuses(server) == {"live": 200, "ready": 200, "model": 200})


@pytest.mark.long
@pytest.mark.alone
def test_who_waits_for_a_core_is_not_taken_for_hung(server: LiveServer) -> None:
    """Scheduler and front ends share a core with a process that goes before them, and has nearly all of it."""
    before = server.pids()
    victims = [*before["scheduler"], *before["front end"]]
    core = available_cores()[0]
    for pid in victims:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(int(thread), {core})
    with busy_core(core, SPIN):
        time.sleep(1.5 * STALE_S)
    assert server.pids() == before
