"""A front end's loop is never long at one thing, whatever clients send at the same time."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http

from gangway.server.serving.loop import LAG_WINDOW_S
from testing.live_server import live_server
from tests.conftest import CompiledZoo
from tests.helpers.scraped_metrics import TIMEOUT_S, Scraped

MOST_LAG_S = 0.002
SMALL_CLIENTS = 4
LOOK_S = 0.5
PRIORITY = 1  # the scheduler has the same
# Sleeps above all others on one core, and writes the longest time by which it woke late: what the machine itself took.
STALLS = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(int(sys.argv[2])))
longest_s = 0.0
while True:
    begin_s = time.monotonic()
    time.sleep(0.0005)
    late_s = time.monotonic() - begin_s - 0.0005
    if late_s > longest_s:
        longest_s = late_s
        print(longest_s, flush=True)
"""


@pytest.fixture(scope="module")
def scraped(compiled_zoo: CompiledZoo) -> Iterator[Scraped]:
    with live_server(compiled_zoo.repository, [f"--cache-dir={compiled_zoo.cache_dir}"]) as server:
        yield Scraped(server)


def asking(module: Any, url: str, name: str, shape: list[int], over: threading.Event) -> int:
    """Ask until it is over; return how often."""
    tensor = module.InferInput("input", shape, "FP32")
    tensor.set_data_from_numpy(np.zeros(shape, np.float32))
    count = 0
    with module.InferenceServerClient(url) as client:
        while not over.is_set():
            client.infer(name, [tensor])
            count += 1
    return count


def without_waiting_for_cores(front_end: int) -> None:
    """Let nothing else of the machine run in a front end's place, where that is allowed: the loop alone is measured."""
    with suppress(PermissionError):
        for thread in os.listdir(f"/proc/{front_end}/task"):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(PRIORITY))


@contextmanager
def longest_stall(cores: Iterable[int], folder: Path) -> Iterator[Callable[[], float]]:
    """Yield what returns the longest time, in seconds, that a core did nothing for whoever has the highest priority.

    0 where a process may not have it.
    """
    logs = {core: folder / f"stalls{core}" for core in cores}
    with ExitStack() as stack:
        for core, log in logs.items():
            out = stack.enter_context(log.open("w"))
            command = [sys.executable, "-c", STALLS, str(core), str(PRIORITY + 1)]
            process = stack.enter_context(subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL))
            stack.callback(process.kill)
        yield lambda: max((float(line) for log in logs.values() for line in log.read_text().split()), default=0.0)


@pytest.mark.long  # three windows of the server; test_longest_turn.py measures what single clients do
@pytest.mark.alone
def test_the_loop_is_in_time_under_a_mixed_load(scraped: Scraped, tmp_path: Path) -> None:
    server, over = scraped.server, threading.Event()
    (front_end,) = server.pids()["front end"]
    without_waiting_for_cores(front_end)
    small, image = ("mlp", [1, 16], over), ("mobilenetv2", [1, 3, 224, 224], over)
    grpc, http = (triton, server.url), (triton_http, server.http_url)
    asks = [*[(*grpc, *small)] * SMALL_CLIENTS, (*grpc, *image), (*http, *small), (*http, *image)]
    cores = os.sched_getaffinity(front_end)
    with ThreadPoolExecutor(len(asks)) as threads, longest_stall(cores, tmp_path) as stall_s:
        counts = [threads.submit(asking, *ask) for ask in asks]
        begin_s = time.monotonic()
        try:
            lag_s = 1.0
            while (passed_s := time.monotonic() - begin_s) < LAG_WINDOW_S or lag_s > MOST_LAG_S + stall_s():
                assert passed_s < 3 * LAG_WINDOW_S, (lag_s, stall_s())  # the start is forgotten after two windows
                over.wait(LOOK_S)
                lag_s = scraped.scrape()("gangway_loop_lag_seconds")
        finally:
            over.set()
        assert all(count.result(TIMEOUT_S) > 0 for count in counts)
