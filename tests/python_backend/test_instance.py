"""The process of an instance, started as the supervisor does it, and asked as workers do."""

import json
import os
import signal
import socket
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gangway.artifact.format import Manifest, TensorSpec
from gangway.executor.frames import plan_frame, read_frame, write_header
from gangway.executor.instance_addresses import InstanceAddresses
from gangway.executor.python_instance import MOST_UNREAD, Instance
from gangway.executor.python_program import PythonModel
from gangway.python_backend.messages import OCCUPIED, Connection
from testing.waiting import until
from tests.helpers.served import TIMEOUT_S
from tests.python_backend.instances import Host, instance_of

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


@pytest.fixture
def body() -> str:
    """Of its model."""
    return BODY


@pytest.fixture
def host(tmp_path: Path, body: str) -> Iterator[Host]:
    """An instance that is ready."""
    with instance_of(tmp_path, body, SIZE) as host:
        yield host


def run(worker: Instance, core: int) -> dict[str, Any]:
    """Have it execute a request on a core; return the outcome."""
    x = np.arange(SIZE, dtype=np.float32)
    about = {
        "inputs": [("x", "FP32", [SIZE], x.nbytes)],
        "wanted": ["y"],
        "room_bytes": 2 * x.nbytes,
        "most_bytes": 1 << 20,
    }
    (outcome,) = worker.ask({"run": [about], "core": core}, [memoryview(x).cast("B")], TIMEOUT_S).header["done"]
    if "outputs" in outcome:
        assert np.array_equal(np.frombuffer(worker.memory[: x.nbytes], np.float32), x)
    return outcome


def test_an_instance_that_has_answered_is_free(host: Host) -> None:
    """The worker that has the answer may keep its core to itself, so another one must not have to wait for it."""
    workers, cores = [Instance(host.address) for _ in range(2)], sorted(os.sched_getaffinity(0))
    for number in range(200):
        outcome = run(workers[number % 2], cores[number % 2 % len(cores)])
        assert workers[0].load == 0
        assert "outputs" in outcome, "it is not left for later"
    for worker in workers:
        worker.close()


WAITS = """
    def execute(self, requests):
        import ctypes, time
        x = requests[0].inputs()[0].as_numpy()
        seconds, holds_lock = float(x[1]), bool(x[2])
        if holds_lock:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        else:
            time.sleep(seconds)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""


def asked(worker: Instance, number: float, seconds: float, holds_lock: bool = False) -> tuple[bool, float]:
    """Whether the worker has left a request, and what the answer to it is, whoever gets it."""
    x = np.zeros(SIZE, np.float32)
    x[:3] = number, seconds, holds_lock
    about = {
        "inputs": [("x", "FP32", [SIZE], x.nbytes)],
        "wanted": ["y"],
        "room_bytes": 2 * x.nbytes,
        "most_bytes": 1 << 20,
    }
    answer = worker.ask(
        {"run": [about], "core": min(os.sched_getaffinity(0))}, [memoryview(x).cast("B")], TIMEOUT_S
    ).header
    if "waits" in answer:
        return True, number_of(worker, answer["waits"])
    (outcome,) = answer["done"]
    if "left" in outcome:  # by the instance, which was occupied
        return True, number_of(worker, outcome["left"][0])
    return False, float(np.frombuffer(worker.memory[:4], np.float32)[0])


def number_of(worker: Instance, execution: int) -> float:
    """What a front end gets that has a core given to the execution if it is asked for one."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(TIMEOUT_S)
        connected.connect(worker.address)
        front_end = Connection(connected)
        assert "hello" in front_end.receive().header
        front_end.send({"attach": execution, "request": 0})
        response = front_end.receive()
        while "final" not in response.header:
            if "grant" in response.header:
                worker.ask({"resume": execution, "core": min(os.sched_getaffinity(0))}, [], TIMEOUT_S)
            response = front_end.receive()
        assert response.header["final"]
        return float(np.frombuffer(response.payload[:4], np.float32)[0])


@pytest.mark.parametrize("body", [WAITS])
@pytest.mark.parametrize("holds_lock", [False, True])
def test_an_instance_that_waits_is_left(host: Host, holds_lock: bool) -> None:
    """It is, and its answer is not lost, at whichever moment it comes; also where it cannot say anything meanwhile."""
    worker = Instance(host.address)
    assert asked(worker, -1, 0)[1] == -1
    left = []
    for number in range(60):
        until(lambda: worker.load == 0)  # an answer to a front end may come before that
        is_left, value = asked(worker, number, 0.004 + 0.0002 * (number % 30), holds_lock)
        assert value == number
        left.append(is_left)
    assert {False, True} == set(left)
    until(lambda: worker.load == 0)
    assert asked(worker, 7, 0.1, holds_lock) == (True, 7)
    worker.close()


@pytest.mark.parametrize("body", [WAITS])
def test_a_worker_that_comes_while_a_model_keeps_python_from_answering(host: Host) -> None:
    """It cannot be greeted; all the same its request is left, and executed after the others'."""
    workers = [Instance(host.address)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(asked, workers[0], 1, 0.5, True)
        until(lambda: workers[0].load == OCCUPIED)
        workers.append(Instance(host.address))
        assert asked(workers[1], 2, 0) == (True, 2)
        assert first.result() == (True, 1)
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("body", [WAITS])
def test_requests_that_cannot_begin_are_left_at_once(host: Host) -> None:
    """Their worker waits for no word of the instance, which what it executes may keep from speaking."""
    worker, (addresses, model) = Instance(host.address), model_of(host)
    executed(model, 0, {})  # the instance has said hello
    with ThreadPoolExecutor(1) as pool:
        occupied = pool.submit(asked, worker, 0, 0.2)
        until(lambda: worker.load == OCCUPIED)
        os.kill(host.pid, signal.SIGSTOP)
        try:
            left = [left_of(executed(model, number, {}, takes_any=True)) for number in range(1, 1 + MOST_UNREAD)]
        finally:
            os.kill(host.pid, signal.SIGCONT)
        assert occupied.result()[1] == 0
    for number, (address, execution, *how) in enumerate(left, 1):
        assert (address, how) == (host.address, [0, [], False])
        assert number_of(worker, execution) == number
    until(lambda: worker.load == 0)
    worker.close()
    os.close(addresses.fd)


@pytest.mark.parametrize("body", [WAITS])
def test_a_core_that_is_taken_before_the_model_has_seen_it_is_asked_for_again(host: Host) -> None:
    first, second = Instance(host.address), Instance(host.address)
    core = min(os.sched_getaffinity(0))
    with ThreadPoolExecutor(1) as pool:
        for number in range(10):
            occupied = pool.submit(asked, first, number, 0.2)
            until(lambda: first.load == OCCUPIED)
            x = np.full(SIZE, 0, np.float32)
            about = {
                "inputs": [("x", "FP32", [SIZE], x.nbytes)],
                "wanted": ["y"],
                "room_bytes": 0,
                "most_bytes": 1 << 20,
            }
            answer = second.ask({"run": [about], "core": core}, [memoryview(x).cast("B")], TIMEOUT_S).header
            execution = answer["done"][0]["left"][0] if "done" in answer else answer["waits"]
            with socket.socket(socket.AF_UNIX) as ours, socket.socket(socket.AF_UNIX) as hasty:
                for each in (ours, hasty):
                    each.settimeout(TIMEOUT_S)
                    each.connect(host.address)
                front_end, worker = Connection(ours), Connection(hasty)
                front_end.send({"attach": execution, "request": 0})
                assert occupied.result()[1] == number
                response = next(header for header in headers(front_end) if "hello" not in header)
                if "grant" in response:
                    os.kill(host.pid, signal.SIGSTOP)
                    worker.send({"resume": execution, "core": core}, [b"5"])
                    worker.send({"leave": 5})
                    os.kill(host.pid, signal.SIGCONT)
                    response = next(headers(front_end))
                    while "final" not in response:
                        if "grant" in response:
                            first.ask({"resume": execution, "core": core}, [], TIMEOUT_S)
                        response = next(headers(front_end))
                assert response["final"]
            until(lambda: first.load == 0)
    for each in (first, second):
        each.close()


def headers(connection: Connection) -> Iterator[dict[str, Any]]:
    while True:
        yield connection.receive().header


def test_arrays_of_requests_lie_where_others_lay(host: Host) -> None:
    """Pages that the kernel gives and clears for each request cost more than most models compute."""
    worker, core = Instance(host.address), min(os.sched_getaffinity(0))
    faults = []
    for _ in range(30):
        run(worker, core)
        faults.append(int(Path(f"/proc/{host.pid}/stat").read_text().rpartition(")")[2].split()[7]))
    worker.close()
    assert faults[-1] - faults[9] < 20 * PAGES / 10, faults


ASKS = """
    async def execute(self, requests):
        inner = pb_utils.InferenceRequest(model_name="other", inputs=[], requested_output_names=["y"])
        response = await inner.async_exec()
        y = np.full(1, response.output_tensors()[0].as_numpy()[0] + 1, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
"""


@pytest.mark.parametrize("body", [ASKS])
def test_a_worker_that_goes_as_soon_as_it_has_given_a_core(host: Host) -> None:
    """The instance asks for another one, whether it has seen the first or not."""
    worker, core = Instance(host.address), min(os.sched_getaffinity(0))
    for number in range(30):
        execution = left_by(worker)
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(TIMEOUT_S)
            connected.connect(host.address)
            front_end = Connection(connected)
            front_end.send({"attach": execution, "request": 0})
            granted = 0
            while "final" not in (message := front_end.receive()).header:
                if "infer" in message.header:
                    y = np.full(1, number, np.float32)
                    result = {
                        "result": message.header["infer"],
                        "outputs": [("y", "FP32", [1], y.nbytes)],
                        "final": True,
                    }
                    front_end.send(result, [y.tobytes()])
                elif "grant" in message.header and granted < 3:
                    granted += 1
                    with socket.socket(socket.AF_UNIX) as other:
                        other.connect(host.address)
                        Connection(other).send({"resume": execution, "core": core}, [b"1"])
                elif "grant" in message.header:
                    worker.ask({"resume": execution, "core": core}, [], TIMEOUT_S)
            assert np.frombuffer(message.payload, np.float32) == [number + 1]
        until(lambda: worker.load == 0)
    worker.close()


def left_by(worker: Instance) -> int:
    """Have it execute a request; return the execution that it has left to a front end."""
    x = np.zeros(SIZE, np.float32)
    about = {"inputs": [("x", "FP32", [SIZE], x.nbytes)], "wanted": ["y"], "room_bytes": 100, "most_bytes": 1 << 20}
    answer = worker.ask({"run": [about], "core": min(os.sched_getaffinity(0))}, [memoryview(x).cast("B")], TIMEOUT_S)
    execution: int = answer.header["done"][0]["left"][0]
    return execution


def model_of(host: Host) -> tuple[InstanceAddresses, PythonModel]:
    """Return a worker's program of its model, and where that finds it."""
    addresses = InstanceAddresses.create()
    addresses.set(0, 0, host.address)
    x, y = (TensorSpec(name, "FP32", (SIZE,), 4 * SIZE) for name in "xy")
    manifest = cast("Manifest", SimpleNamespace(model_name="own", inputs=(x,), outputs=(y,)))
    return addresses, PythonModel(manifest, addresses, 0, 0, kept=lambda: None)


def left_of(answer: memoryview) -> list[Any]:
    """Return where a request is left."""
    status = read_frame(answer).parts[-1]
    found: list[Any] = json.loads(bytes(answer[status.offset : status.offset + status.size_bytes]))["left"]
    return found


def executed(model: PythonModel, number: float, parameters: dict[str, Any], takes_any: bool = False) -> memoryview:
    """Have it execute a request of this number and zeros; return the block of the answer."""
    values = np.zeros(SIZE, np.float32)
    values[0] = number
    asked = {"wanted": ["y"], "most_bytes": 1 << 24, "parameters": parameters}
    common = {"request": asked, "instances": 1, "timeout_s": TIMEOUT_S, "instance": -1, "takes_any": takes_any}
    told = b"{}\n" + json.dumps(common).encode()
    frame = plan_frame([((SIZE,), values.nbytes), ((), len(told))])
    request, answer = memoryview(bytearray(frame.size_bytes)), memoryview(bytearray(1 << 23))
    write_header(request, frame)
    for part, content in zip(frame.parts, (memoryview(values).cast("B"), told), strict=True):
        request[part.offset : part.offset + part.size_bytes] = content
    model([(request, answer)], (min(os.sched_getaffinity(0)),))
    return answer


ECHOES = """
    def execute(self, requests):
        import json
        responses = []
        for request in requests:
            y = pb_utils.Tensor("y", request.inputs()[0].as_numpy())
            responses.append(pb_utils.InferenceResponse([y], parameters=json.loads(request.parameters())))
        return responses
"""


@pytest.mark.parametrize("body", [ECHOES])
def test_a_worker_remembers_no_long_texts(host: Host) -> None:
    """What equal requests and responses say is remembered, but not if it takes much memory."""
    addresses, model = model_of(host)

    def text_of(text: str) -> str:
        """Return the parameter that comes back with the values."""
        answer = executed(model, 7, {"text": text})
        found, status = read_frame(answer).parts
        values = np.frombuffer(answer[found.offset : found.offset + found.size_bytes], np.float32)
        assert (values[0], values[1:].any()) == (7, False)
        parameters = json.loads(bytes(answer[status.offset : status.offset + status.size_bytes]))["parameters"]
        return str(parameters["text"])

    assert text_of("short") == text_of("short") == "short"
    tracemalloc.start()
    try:
        for number in range(20):
            text = f"{number:04}" * 100_000
            assert text_of(text) == text
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()
        os.close(addresses.fd)
