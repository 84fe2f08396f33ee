"""Requests that the worker's loop hands over to an instance without Python, and those that need Python all the same."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from gangway.artifact.format import Manifest, TensorSpec
from gangway.executor import _native
from gangway.executor.frames import plan_frame, read_frame, write_header
from gangway.executor.instance_addresses import InstanceAddresses
from gangway.executor.python_instance import Instance
from gangway.executor.python_program import PythonModel
from gangway.python_backend.messages import OCCUPIED
from testing.waiting import until
from tests.helpers.served import TIMEOUT_S
from tests.python_backend.instances import Host, instance_of

SIZE = 16
SLEEPS, COMPUTES, KEEPS, TELLS, FAILS = range(1, 6)  # places of what the request asks for
BODY = """
    def execute(self, requests):
        import time
        responses = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            time.sleep(float(x[1]))
            end = time.thread_time() + float(x[2])
            while time.thread_time() < end:
                pass
            if x[5]:
                raise ValueError("it is odd")
            y = pb_utils.Tensor("y", x[: int(x[3]) or None] + 1)
            responses.append(pb_utils.InferenceResponse([y], parameters={"told": True} if x[4] else None))
        return responses
"""


def values_of(number: float, asked: dict[int, float]) -> Any:
    """Return what a request has: `number` everywhere, but for what is asked for."""
    values = np.full(SIZE, number, np.float32)
    values[1:6] = [asked.get(place, 0) for place in range(1, 6)]
    return values


class Answered(NamedTuple):
    """What the block of an answer holds: y, and the status."""

    y: list[float]
    status: dict[str, Any]


class Memory:
    """A worker, and the memory of a request and its answer."""

    def __init__(self, host: Host) -> None:
        self._addresses = InstanceAddresses.create()
        self._addresses.set(0, 0, host.address)
        x, y = (TensorSpec(name, "FP32", (SIZE,), 4 * SIZE) for name in "xy")
        manifest = cast("Manifest", SimpleNamespace(model_name="own", inputs=(x,), outputs=(y,)))
        self.kept = self.plain = 0  # runs that the instance keeps, and that need no Python
        self._model = PythonModel(manifest, self._addresses, 0, 0, self._keep)
        self._request, self._block = memoryview(bytearray(1 << 14)), memoryview(bytearray(1 << 14))
        self._header = b""
        self.write()

    def _keep(self) -> None:
        self.kept += 1

    def write(self, number: float = 0, asked: dict[int, float] | None = None, flags: int = 0) -> list[float]:
        """Write a request; return what its answer is to be."""
        values = values_of(number, asked or {})
        request = {"wanted": ["y"], "most_bytes": 1 << 20, "flags": flags}
        common = {"request": request, "instances": 1, "timeout_s": TIMEOUT_S, "instance": -1, "takes_any": False}
        told = b'{"cancellation":[0,0]}\n' + json.dumps(common).encode()
        frame = plan_frame([((SIZE,), values.nbytes), ((), len(told))])
        write_header(self._request, frame)
        for part, content in zip(frame.parts, (memoryview(values).cast("B"), told), strict=True):
            self._request[part.offset : part.offset + part.size_bytes] = content
        self._block[:] = bytes(len(self._block))
        return [float(each) for each in values + 1]

    def execute(self, again: bool = False) -> Any:
        """Execute the request in Python; return what that says of the next one."""
        (result,) = self._model([(self._request, self._block)], (min(os.sched_getaffinity(0)),), again)
        return result

    def prepared(self) -> _native.Handover:
        """Execute the request; return how the next one is handed over."""
        header, self._header, handover = self.execute(again=True)
        assert bytes(self._request[: len(header)]) == header
        assert isinstance(handover, _native.Handover)
        return handover

    def answered(self) -> Answered:
        """Return what is in the block."""
        part, status = read_frame(self._block).parts
        y = np.frombuffer(self._block[part.offset : part.offset + part.size_bytes], np.float32)
        return Answered(y.tolist(), json.loads(bytes(self._block[status.offset : status.offset + status.size_bytes])))

    def answered_by(self, handover: _native.Handover) -> Answered:
        """Hand the request over; return what is in the block when it begins as the loop has it."""
        done = handover()
        if done is None:
            self.plain += 1
            self._block[: len(self._header)] = self._header
        assert done in (None, True)
        return self.answered()

    def close(self) -> None:
        os.close(self._addresses.fd)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with instance_of(tmp_path, BODY, SIZE) as host:
        yield host


@pytest.fixture
def memory(host: Host) -> Iterator[Memory]:
    memory = Memory(host)
    yield memory
    memory.close()


def test_requests_of_one_kind_are_answered(memory: Memory) -> None:
    handover, expected = memory.prepared(), [0.0]
    for number in range(100):
        expected = memory.write(number)
        assert memory.answered_by(handover) == (expected, {})
    assert memory.plain > 50, "all but those that others keep from computing"
    assert memory.execute() is False, "nobody has asked how the next one is"
    assert memory.answered() == (expected, {})
    assert memory.answered_by(handover) == (expected, {}), "that has changed nothing"


def test_one_that_computes_for_long_keeps_its_core(memory: Memory) -> None:
    handover = memory.prepared()
    expected = memory.write(5, {COMPUTES: 0.06})
    assert memory.answered_by(handover) == (expected, {})
    assert not memory.kept


def test_one_that_waits_is_left(memory: Memory) -> None:
    handover = memory.prepared()
    memory.write(5, {SLEEPS: 0.3})
    assert handover() is True
    address, _, request, pids, is_begun, goes_on = memory.answered().status["left"]
    assert address and request == 0 and pids and is_begun and not goes_on
    assert memory.kept == 1
    memory.write(6)
    assert handover() is False, "the instance is occupied"
    memory.execute()
    assert "left" in memory.answered().status


@pytest.mark.parametrize("asked", [{KEEPS: 3}, {TELLS: 1}, {KEEPS: 3, TELLS: 1}])
def test_an_answer_of_another_kind(memory: Memory, asked: dict[int, float]) -> None:
    handover = memory.prepared()
    for number in range(3):
        expected = memory.write(number, asked)[: int(asked.get(KEEPS, SIZE))]
        assert memory.answered_by(handover) == (expected, {"parameters": {"told": True}} if TELLS in asked else {})
        assert not memory.plain
    expected = memory.write(4)
    assert memory.answered_by(handover) == (expected, {})


def test_an_error_of_the_model(memory: Memory) -> None:
    handover = memory.prepared()
    memory.write(1, {FAILS: 1})
    assert handover() is True
    assert "it is odd" in memory.answered().status["error"][1]


def test_a_request_of_another_kind_is_not_handed_over(memory: Memory) -> None:
    handover = memory.prepared()
    memory.write(1, flags=1)
    assert handover() is False
    expected = memory.write(1)
    assert memory.answered_by(handover) == (expected, {})


def test_an_instance_that_is_occupied_gets_nothing(host: Host, memory: Memory) -> None:
    handover, other, shown = memory.prepared(), Memory(host), Instance(host.address)
    other.write(1, {COMPUTES: 0.3})
    with ThreadPoolExecutor(1) as pool:
        occupies = pool.submit(other.execute)
        until(lambda: shown.load == OCCUPIED)
        assert handover() is False
        occupies.result()
    until(lambda: shown.load == 0)
    expected = memory.write(2)
    assert memory.answered_by(handover) == (expected, {})
    shown.close()
    other.close()


def test_an_instance_that_ends(tmp_path: Path) -> None:
    """What it has is lost, further requests are not handed over to it."""
    with instance_of(tmp_path, BODY, SIZE, ends_well=False) as host:
        memory, shown = Memory(host), Instance(host.address)
        handover = memory.prepared()
        memory.write(1, {COMPUTES: 20})
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(handover)
            until(lambda: shown.load == OCCUPIED)
            os.kill(host.pid, signal.SIGKILL)
            assert lost.result() is True
        code, message = memory.answered().status["error"]
        assert code == "UNAVAILABLE" and "its process has ended" in message
        assert handover() is NotImplemented
        shown.close()
        memory.close()


def test_an_instance_that_has_ended_gets_nothing(tmp_path: Path) -> None:
    with instance_of(tmp_path, BODY, SIZE, ends_well=False) as host:
        memory, shown = Memory(host), Instance(host.address)
        handover = memory.prepared()
        os.kill(host.pid, signal.SIGKILL)
        until(lambda: shown.has_ended)
        assert handover() is False
        memory.execute()
        assert memory.answered().status["error"][0] == "UNAVAILABLE"
        assert handover() is NotImplemented
        shown.close()
        memory.close()
