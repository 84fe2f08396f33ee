"""A server in a container with little memory: ordinary clients and floods are answered or refused, and nothing dies."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.live_server import LiveServer, live_server
from tests.conftest import CompiledZoo
from tests.helpers.http_requests import ask_http

pytestmark = pytest.mark.long

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_MIB = 240
SECONDS = 2.5
LEAST_ANSWERS = 6
PATIENCE_S = 30.0  # with them, on a machine that has much else to do
IMAGE = (3, 224, 224)
LARGEST_BYTES = (LIMIT_MIB << 20) // 32


@contextmanager
def started_with(limit_mib: int) -> Iterator[Path]:
    """What is started in the block may have so much memory, with all that it starts. Skips where that cannot be had."""
    line = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "")
    own, group = GROUPS / line.rpartition(":")[2].lstrip("/"), GROUPS / f"gangway-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs root and cgroups of version 1")
    try:
        (group / "memory.limit_in_bytes").write_text(f"{limit_mib}M")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield group
    finally:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@pytest.fixture(scope="module")
def small(compiled_zoo: CompiledZoo) -> Iterator[tuple[LiveServer, Path]]:
    own = Path("/proc/self/cgroup").read_text()
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--model-control-mode=explicit"]
    flags += ["--load-model=mlp", "--load-model=mobilenetv2"]
    with started_with(LIMIT_MIB) as group, live_server(compiled_zoo.repository, flags) as server:
        line = next(line for line in own.splitlines() if ":memory:" in line)
        (GROUPS / line.rpartition(":")[2].lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        pids = server.pids()
        seen: Counter[str] = Counter()  # a batch that has been answered once is not too large later
        images(server, time.monotonic(), seen)
        assert set(seen) == {"answered"}, seen
        yield server, group
        assert server.pids() == pids
        assert "oom_kill 0" in (group / "memory.oom_control").read_text()


def test_a_model_that_does_not_fit_is_refused(small: tuple[LiveServer, Path]) -> None:
    limit = rf"of {LIMIT_MIB} MiB of memory \(memory.limit_in_bytes of the cgroup\) \d+ MiB are left"
    with triton.InferenceServerClient(small[0].url) as client:
        with pytest.raises(InferenceServerException, match=limit):
            client.load_model("resnet50")
        assert client.is_model_ready("mobilenetv2")


def is_over(end_s: float, seen: Counter[str]) -> bool:
    """Whether the time is over, and something has come of it."""
    late_s = time.monotonic() - end_s
    answers = seen["answered"] + seen["StatusCode.INVALID_ARGUMENT"]
    return late_s >= 0 and (answers >= LEAST_ANSWERS or late_s >= PATIENCE_S)


def images(server: LiveServer, end_s: float, seen: Counter[str]) -> None:
    with triton.InferenceServerClient(server.url) as client:
        given = triton.InferInput("input", [8, *IMAGE], "FP32")
        given.set_data_from_numpy(np.zeros((8, *IMAGE), np.float32))
        while not is_over(end_s, seen):
            try:
                client.infer("mobilenetv2", [given])
                seen["answered"] += 1
            except InferenceServerException as error:
                seen[str(error.status())] += 1


def texts(server: LiveServer, end_s: float, seen: Counter[str]) -> None:
    data = np.random.default_rng(0).random(150528).tolist()
    given = {"name": "input", "shape": [1, *IMAGE], "datatype": "FP32", "data": data}
    body = json.dumps({"inputs": [given]}).encode()
    while not is_over(end_s, seen):
        status = ask_http(server.http_url, "POST", "/v2/models/mobilenetv2/infer", body).status
        seen["answered" if status == 200 else f"http {status}"] += 1


def flood(server: LiveServer, end_s: float, seen: Counter[str]) -> None:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.url, options) as channel:
        infer: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        while not is_over(end_s, seen):
            try:
                infer(bytes(LARGEST_BYTES), timeout=20)
            except grpc.RpcError as error:
                seen[f"StatusCode.{error.code().name}"] += 1


@pytest.mark.parametrize(("kinds", "clients"), [((images, texts), 6), ((flood,), 24)])
def test_clients_are_answered_or_refused(small: tuple[LiveServer, Path], kinds: Any, clients: int) -> None:
    server, _ = small
    seen: Counter[str] = Counter()
    end_s = time.monotonic() + SECONDS
    threads = [threading.Thread(target=kind, args=(server, end_s, seen)) for kind in kinds for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allowed = {"answered", "StatusCode.UNAVAILABLE", "http 503", "StatusCode.INVALID_ARGUMENT"}
    assert set(seen) <= allowed, seen
    assert seen["answered"] + seen["StatusCode.INVALID_ARGUMENT"] >= LEAST_ANSWERS, seen
    with triton.InferenceServerClient(server.url) as client:
        assert client.is_server_live() and client.is_model_ready("mlp")
