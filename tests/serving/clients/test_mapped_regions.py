"""Shared memory of clients in place, with a real server: workers use it, whatever the client does to its file."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from testing.live_server import LiveServer
from testing.waiting import until

TIMEOUT_S = 30
ROWS = 8  # so that the output is large enough to be in place
IMAGE_BYTES = 3 * 224 * 224 * 4
INPUT_BYTES, OUTPUT_BYTES = ROWS * IMAGE_BYTES, ROWS * 1000 * 4
ROUNDS = 4
Check = Callable[[], bool]


@dataclass(frozen=True)
class Answer:
    values: Any
    in_place: int  # tensors


class Segment:
    """A POSIX segment, registered under its key, with images at its beginning and room for answers behind them."""

    def __init__(self, client: triton.InferenceServerClient, images: Any) -> None:
        self.client = client
        self.name = f"in-place-test-{uuid.uuid4().hex[:12]}"
        self.path = Path("/dev/shm") / self.name
        self.rows = len(images)
        self.size_bytes = images.nbytes + OUTPUT_BYTES + 4096
        self.handle = shm.create_shared_memory_region(self.name, f"/{self.name}", self.size_bytes)
        shm.set_shared_memory_region(self.handle, [images])
        self.register()

    def register(self) -> None:
        self.client.register_system_shared_memory(self.name, f"/{self.name}", self.size_bytes)

    def ask(self, input_at: int = 0, output_at: int | None = None, own_output: bool = False) -> Answer:
        """Have the server compute from the segment, into it or, if `own_output`, into the answer."""
        at = self.rows * IMAGE_BYTES if output_at is None else output_at
        tensor = triton.InferInput("input", [self.rows, 3, 224, 224], "FP32")
        tensor.set_shared_memory(self.name, self.rows * IMAGE_BYTES, input_at)
        output = triton.InferRequestedOutput("output")
        if not own_output:
            output.set_shared_memory(self.name, self.rows * 4000, at)
        result = self.client.infer(
            "mobilenetv2", [tensor], outputs=[output], client_timeout=TIMEOUT_S, parameters={"gangway_stats": True}
        )
        if own_output:
            values = result.as_numpy("output")
        else:
            values = shm.get_contents_as_numpy(self.handle, np.float32, [self.rows, 1000], at).copy()
        return Answer(values, result.get_response().parameters["in_place"].int64_param)

    def ask_in_place(self, tensors: int, own_output: bool = False) -> Answer:
        """Ask until the workers have mapped the region, which they do in the background."""
        end = time.monotonic() + TIMEOUT_S
        while (answer := self.ask(own_output=own_output)).in_place != tensors:
            assert time.monotonic() < end, answer.in_place
        return answer

    def is_known_to(self, pids: list[int]) -> list[bool]:
        """Whether each process has the segment open or mapped."""
        return [self._is_known_to(pid) for pid in pids]

    def _is_known_to(self, pid: int) -> bool:
        names = []
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                names.append(os.readlink(descriptor))
        return str(self.path) in names or str(self.path) in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture(scope="module")
def images() -> Any:
    return np.random.default_rng(0).standard_normal((ROWS, 3, 224, 224), dtype=np.float32)


@pytest.fixture(scope="module")
def client(gangway_server: LiveServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(gangway_server.url) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(client: triton.InferenceServerClient, images: Any) -> Any:
    """What the server makes of the images when they are in messages: all of them in one, and each in one."""
    return {rows: _by_message(client, images[:rows]) for rows in (1, ROWS)}


def _by_message(client: triton.InferenceServerClient, images: Any) -> Any:
    tensor = triton.InferInput("input", images.shape, "FP32")
    tensor.set_data_from_numpy(images)
    return client.infer("mobilenetv2", [tensor], client_timeout=TIMEOUT_S).as_numpy("output")


@pytest.fixture
def make_segment(client: triton.InferenceServerClient) -> Iterator[Callable[[Any], Segment]]:
    made: list[Segment] = []

    def make(images: Any) -> Segment:
        made.append(Segment(client, images))
        return made[-1]

    yield make
    client.unregister_system_shared_memory()
    for segment in made:
        shm.destroy_shared_memory_region(segment.handle)


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Processes that stand still for the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_workers_use_the_clients_memory(
    gangway_server: LiveServer, make_segment: Any, images: Any, expected: Any
) -> None:
    segment = make_segment(images)
    np.testing.assert_array_equal(segment.ask_in_place(2).values, expected[ROWS])
    shm.set_shared_memory_region(segment.handle, [images[::-1].copy()])
    np.testing.assert_array_equal(segment.ask_in_place(2).values, expected[ROWS][::-1])
    pids = gangway_server.pids()
    assert all(segment.is_known_to(pids["worker"]))
    segment.client.unregister_system_shared_memory(segment.name)
    everybody = [pid for same in pids.values() for pid in same]
    until(lambda: not any(segment.is_known_to(everybody)))


@pytest.mark.parametrize(("input_at", "output_at", "in_place"), [(2, None, 1), (4, None, 2), (0, INPUT_BYTES + 1, 1)])
def test_where_tensors_may_begin(
    make_segment: Any, images: Any, expected: Any, input_at: int, output_at: int | None, in_place: int
) -> None:
    segment = make_segment(images)
    segment.ask_in_place(2)
    shm.set_shared_memory_region(segment.handle, [images], offset=input_at)
    answer = segment.ask(input_at, INPUT_BYTES + 64 if output_at is None else output_at)
    assert answer.in_place == in_place
    np.testing.assert_array_equal(answer.values, expected[ROWS])


def test_nobody_touches_what_the_client_has_not(
    client: triton.InferenceServerClient, make_segment: Any, images: Any, expected: Any
) -> None:
    """Holes are read as zeros, and stay holes: what the server touches would be its memory. Answers fill theirs."""
    segment = make_segment(images)
    segment.ask_in_place(2)
    os.truncate(segment.path, 0)
    os.truncate(segment.path, segment.size_bytes)
    zeros = _by_message(client, np.zeros_like(images))
    for in_place in (0, 1):  # of the output, which is written to memory from the second time on
        answer = segment.ask()
        assert answer.in_place == in_place
        np.testing.assert_array_equal(answer.values, zeros)
        assert segment.path.stat().st_blocks * 512 < OUTPUT_BYTES + 2 * 4096
    shm.set_shared_memory_region(segment.handle, [images])
    np.testing.assert_array_equal(segment.ask_in_place(2).values, expected[ROWS])


def test_an_output_over_the_input(make_segment: Any, images: Any, expected: Any) -> None:
    segment = make_segment(images)
    segment.ask_in_place(2)
    answer = segment.ask(output_at=0)
    assert answer.in_place == 1
    np.testing.assert_array_equal(answer.values, expected[ROWS])


def test_a_file_that_shrinks_while_it_is_used(
    gangway_server: LiveServer, make_segment: Any, images: Any, expected: Any
) -> None:
    """No worker dies, the others are answered, the request fails, and the region works again when it is whole."""
    segment, other = make_segment(images), make_segment(images[:1])
    segment.ask_in_place(2)
    other.ask_in_place(1)
    pids = gangway_server.pids()
    with ThreadPoolExecutor(2) as pool:
        with stopped(pids["worker"]):
            asked = pool.submit(segment.ask)
            until(lambda: gangway_server.busy_slots() == 1)
            beside = pool.submit(other.ask)
            until(lambda: gangway_server.busy_slots() == 2)
            os.truncate(segment.path, 0)
        with pytest.raises(InferenceServerException, match="has shrunk since it was registered") as caught:
            asked.result(TIMEOUT_S)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        answer = beside.result(TIMEOUT_S)
        assert answer.in_place == 1
        np.testing.assert_array_equal(answer.values, expected[1])
    assert gangway_server.pids() == pids
    until(lambda: f"shared memory region '{segment.name}' is shorter than registered" in gangway_server.log.read_text())
    os.truncate(segment.path, segment.size_bytes)
    shm.set_shared_memory_region(segment.handle, [images])
    answer = segment.ask()
    assert answer.in_place == 0  # it is copied from now on
    np.testing.assert_array_equal(answer.values, expected[ROWS])
    segment.client.unregister_system_shared_memory(segment.name)
    segment.register()
    np.testing.assert_array_equal(segment.ask_in_place(2).values, expected[ROWS])


def test_files_that_shrink_in_the_middle_of_many_requests(
    gangway_server: LiveServer, make_segment: Any, images: Any, expected: Any
) -> None:
    pids = gangway_server.pids()
    other = make_segment(images[1:2])
    right = other.ask_in_place(1, own_output=True).values
    stopping = threading.Event()

    def keep_asking() -> int:
        count = 0
        while not stopping.is_set():
            np.testing.assert_array_equal(other.ask(own_output=True).values, right)
            count += 1
        return count

    def ask(segment: Segment) -> str:
        try:
            np.testing.assert_array_equal(segment.ask(own_output=True).values, expected[1])
        except InferenceServerException as error:
            return str(error.message())
        return "right"

    with ThreadPoolExecutor(5) as pool:
        asking = pool.submit(keep_asking)
        try:
            for number in range(ROUNDS):
                segment = make_segment(images[:1])
                segment.ask_in_place(1, own_output=True)
                asked = [pool.submit(ask, segment) for _ in range(8)]
                asked[number].result(TIMEOUT_S)
                os.truncate(segment.path, 0 if number % 2 else IMAGE_BYTES // 2)
                found = [job.result(TIMEOUT_S) for job in asked]
                assert all(text == "right" or "has shrunk since it was registered" in text for text in found), found
                assert "has shrunk since it was registered" in ask(segment)
        finally:
            stopping.set()
        assert asking.result(TIMEOUT_S) > 0
    assert gangway_server.pids() == pids


def test_a_new_worker_has_the_regions(
    gangway_server: LiveServer, make_segment: Any, images: Any, expected: Any
) -> None:
    segment = make_segment(images[:1])
    segment.ask_in_place(1)
    before = gangway_server.pids()["worker"]
    victim = before[0]
    os.kill(victim, signal.SIGKILL)

    def has_successor() -> bool:
        answer = segment.ask()
        assert answer.in_place == 1
        np.testing.assert_array_equal(answer.values, expected[1])
        workers = gangway_server.pids()["worker"]
        return len(workers) == len(before) and victim not in workers and all(segment.is_known_to(workers))

    until(has_successor)
