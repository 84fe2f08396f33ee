"""A front end's loop is never long at one thing, whatever clients send at the same time."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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


@pytest.mark.long  # three windows of the server; test_longest_turn.py measures what single clients do
@pytest.mark.alone
def test_the_loop_is_in_time_under_a_mixed_load(scraped: Scraped) -> None:
    server, over = scraped.server, threading.Event()
    (front_end,) = server.pids()["front end"]
    without_waiting_for_cores(front_end)
    small, image = ("mlp", [1, 16], over), ("mobilenetv2", [1, 3, 224, 224], over)
    grpc, http = (triton, server.url), (triton_http, server.http_url)
    asks = [*[(*grpc, *small)] * SMALL_CLIENTS, (*grpc, *image), (*http, *small), (*http, *image)]
    with ThreadPoolExecutor(len(asks)) as threads:
        counts = [threads.submit(asking, *ask) for ask in asks]
        begin_s = time.monotonic()
        try:
            lag_s = 1.0
            while (passed_s := time.monotonic() - begin_s) < LAG_WINDOW_S or lag_s > MOST_LAG_S:
                assert passed_s < 3 * LAG_WINDOW_S, lag_s  # the start is forgotten after two windows
                over.wait(LOOK_S)
                lag_s = scraped.scrape()("gangway_loop_lag_seconds")
        finally:
            over.set()
        assert all(count.result(TIMEOUT_S) > 0 for count in counts)
