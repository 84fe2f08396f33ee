"""The process of an instance, started as the supervisor does it, and asked as workers do."""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gangway.executor.python_program import Instance
from gangway.python_backend.messages import Connection
from gangway.server.control.supervisor.python_instances import HOST
from tests.helpers.python_models import TIMEOUT_S, config_of, write

SIZE = 150_000
PAGES = 4 * SIZE // 4096  # of an array
BODY = """
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            parts = [x * np.float32(number) for number in range(4)]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", parts[1] + parts[0])]))
        return responses
"""
CONFIG = {
    "max_batch_size": 0,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [SIZE]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [SIZE]}],
}


class Host(NamedTuple):
    """The process that executes the model, and the address of its socket."""

    pid: int
    address: str


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """An instance that is ready."""
    folder = write(tmp_path, "own", BODY, config_of(f"x:FP32:{SIZE}", f"y:FP32:{SIZE}"))
    name = f"\0gangway-test-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    ours, theirs = socket.socketpair()
    values, flags = os.memfd_create("values"), os.memfd_create("flags")
    os.ftruncate(flags, 1 << 16)
    fds = (theirs.fileno(), listener.fileno(), values, flags)
    process = subprocess.Popen([sys.executable, str(HOST), *map(str, fds), str(os.getpid())], pass_fds=fds)
    listener.close()
    theirs.close()
    os.close(values)
    os.close(flags)
    control = Connection(ours)
    arguments = {"model_version": "1", "model_instance_name": "own_0", "model_name": "own"}
    order = {"folder": str(folder), "filename": "model.py", "arguments": arguments, "memory_bytes": 0}
    order["strict_outputs"] = False
    control.send({**order, "completes": False, "config": json.dumps(CONFIG)})
    pid = control.receive().header["begun"]
    assert "ready" in control.receive().header
    yield Host(pid, name)
    control.send({"finalize": True})
    assert process.wait(TIMEOUT_S) == 0
    control.close()


def run(worker: Instance, core: int) -> dict[str, Any]:
    """Have it execute a request on a core; return the outcome."""
    x = np.arange(SIZE, dtype=np.float32)
    about = {
        "inputs": [("x", "FP32", [SIZE], x.nbytes)],
        "wanted": ["y"],
        "room_bytes": 2 * x.nbytes,
        "most_bytes": 1 << 20,
    }
    (outcome,) = worker.ask({"run": [about], "core": core}, [memoryview(x).cast("B")], TIMEOUT_S)["done"]
    if "outputs" in outcome:
        assert np.array_equal(np.frombuffer(worker.memory[: x.nbytes], np.float32), x)
    return outcome


def test_an_instance_that_has_answered_is_free(host: Host) -> None:
    """The worker that has the answer may keep its core to itself, so another one must not have to wait for it."""
    workers, cores = [Instance(host.address) for _ in range(2)], sorted(os.sched_getaffinity(0))
    for number in range(200):
        outcome = run(workers[number % 2], cores[number % 2 % len(cores)])
        assert not workers[0].is_occupied
        assert "outputs" in outcome, "it is not left for later"
    for worker in workers:
        worker.close()


def test_arrays_of_requests_lie_where_others_lay(host: Host) -> None:
    """Pages that the kernel gives and clears for each request cost more than most models compute."""
    worker, core = Instance(host.address), min(os.sched_getaffinity(0))
    faults = []
    for _ in range(30):
        run(worker, core)
        faults.append(int(Path(f"/proc/{host.pid}/stat").read_text().rpartition(")")[2].split()[7]))
    worker.close()
    assert faults[-1] - faults[9] < 20 * PAGES / 10, faults
