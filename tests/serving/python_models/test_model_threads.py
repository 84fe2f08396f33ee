"""Threads of a Python model: they share their instance's core, and have it by turns while they make responses."""

import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from testing.waiting import until
from tests.helpers.python_models import ADD, config_of, four, write
from tests.helpers.scraped_metrics import Scraped
from tests.helpers.served import TIMEOUT_S, Served, inputs_of, serving

pytestmark = pytest.mark.long

TOKEN_S = 0.01  # of computing
LOWEST_NICE = 19
# A thread makes tokens of what `execute` puts into its queue: as many as x[0] says.
ENGINE = f"""
    def initialize(self, args):
        import queue, threading
        self.asked = queue.Queue()
        threading.Thread(target=self.make, daemon=True).start()

    def make(self):
        import time
        while True:
            sender, count = self.asked.get()
            for number in range(count):
                end = time.thread_time() + {TOKEN_S}
                while time.thread_time() < end:
                    pass
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full(4, number, np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            self.asked.put((request.get_response_sender(), int(x[0])))
"""
SPINS = """
    def initialize(self, args):
        import threading
        threading.Thread(target=self.spin, daemon=True).start()

    def spin(self):
        while True:
            pass

    def execute(self, requests):
        import time
        time.sleep(float(requests[0].inputs()[0].as_numpy()[0]))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
# Processes that compute, the second one of them started by the first, and itself in a session of its own.
LEAVES = """
    def execute(self, requests):
        import os
        if not hasattr(self, "child"):
            self.child = os.fork()
            if not self.child:
                os.setsid()
                os.fork()
                while True:
                    pass
        y = np.array([self.child, *os.sched_getaffinity(0), 0, 0][:4], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
"""
POOLED = """
    def initialize(self, args):
        import concurrent.futures
        self.pool = concurrent.futures.ThreadPoolExecutor(2)

    def execute(self, requests):
        import os
        own = os.sched_getaffinity(0)
        found = [self.pool.submit(os.sched_getaffinity, 0) for _ in range(4)]
        is_shared = all(each.result() == own for each in found)
        y = np.array([is_shared, len(own), *own, 0][:4], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
"""
# Most of what it computes, a thread of its own does.
HELPED = """
    def initialize(self, args):
        import concurrent.futures
        self.pool = concurrent.futures.ThreadPoolExecutor(1)

    def execute(self, requests):
        import time
        def compute():
            end = time.thread_time() + 0.15
            while time.thread_time() < end:
                pass
        self.pool.submit(compute).result()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
# Threads of a model that is not decoupled answer, too.
LATER = """
    def execute(self, requests):
        import threading, time
        def answer(request):
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                pass
            tensor = pb_utils.Tensor("y", request.inputs()[0].as_numpy())
            request.get_response_sender().send(
                pb_utils.InferenceResponse([tensor]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        for request in requests:
            threading.Thread(target=answer, args=(request,)).start()
"""
# `execute` computes for so many seconds, in the way of its model.
LONG = """
    def execute(self, requests):
        import time
        for request in requests:
            x = request.inputs()[0].as_numpy()
            end = time.thread_time() + float(x[0])
            while time.thread_time() < end:
                pass
            ANSWER
"""
AT_ONCE = (
    LONG.replace("ANSWER", "pass")
    + """
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
)
LONG_KINDS = {
    "plain": (AT_ONCE, config_of()),
    "coroutine": (AT_ONCE.replace("def execute", "async def execute"), config_of()),
    "sends": (
        LONG.replace(
            "ANSWER",
            "request.get_response_sender().send(pb_utils.InferenceResponse([pb_utils.Tensor('y', x)]), flags=1)",
        ),
        config_of(more="model_transaction_policy { decoupled: true }"),
    ),
}
DECOUPLED = config_of(more="model_transaction_policy { decoupled: true }")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """On one core, which all of them share."""
    repository = tmp_path_factory.mktemp("repository")
    write(repository, "engine", ENGINE, DECOUPLED)
    write(repository, "spins", SPINS)
    write(repository, "leaves", LEAVES)
    write(repository, "pooled", POOLED)
    write(repository, "helped", HELPED)
    write(repository, "later", LATER)
    write(repository, "add", ADD)
    for name, (code, config) in LONG_KINDS.items():
        write(repository, name, code, config)
    with serving(repository, f"--cores={min(os.sched_getaffinity(0))}") as served:
        yield served


class Tokens:
    """A request to the engine; the numbers of its tokens come one after the other."""

    def __init__(self, url: str, count: int) -> None:
        self._found: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self.client = triton.InferenceServerClient(url)
        self.client.start_stream(lambda result, error: self._found.put((result, error)))
        self.client.async_stream_infer("engine", inputs_of({"x": four(count)}))

    def next(self) -> float:
        result, error = self._found.get(timeout=TIMEOUT_S)
        assert error is None
        return float(result.as_numpy("y")[0])

    def close(self, cancels: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancels)
        self.client.close()


def classes(pid: int) -> set[int]:
    """The scheduling classes of a process's threads."""
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            found.add(os.sched_getscheduler(int(thread)))
        except OSError:
            continue  # it has ended
    return found


def rests(pid: int) -> bool:
    """Whether a thread of a process has hardly any weight."""
    nice = [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]
    return os.SCHED_IDLE in classes(pid) or LOWEST_NICE in nice


def busy_s(served: Served) -> float:
    """For how long cores were given to requests, as the scheduler counts it."""
    samples = Scraped(served.server).scrape().samples
    return sum(value for (name, _), value in samples.items() if name == "gangway_core_busy_seconds_total")


def test_a_thread_that_makes_tokens_has_a_core_in_the_scheduler_s_accounts(served: Served) -> None:
    (pid,) = served.instances("engine")
    before_s, count = busy_s(served), 30
    tokens = Tokens(served.server.url, count)
    for number in range(count):
        assert tokens.next() == number
        assert number == count - 1 or os.SCHED_IDLE not in classes(pid), "a request is open"
    tokens.close()
    until(lambda: busy_s(served) - before_s > 0.5 * count * TOKEN_S)


def test_others_have_their_turns_beside_it(served: Served) -> None:
    asked, count = 150, 0
    tokens = Tokens(served.server.url, asked)
    assert tokens.next() == 0
    over = threading.Event()

    def take() -> None:
        for number in range(1, asked):
            assert tokens.next() == number
        over.set()

    taking = threading.Thread(target=take)
    taking.start()
    while not over.is_set():
        assert np.array_equal(served.infer("add", x=four(count))["y"], four(count + 1))
        count += 1
    taking.join()
    tokens.close()
    assert count >= 3, "it computes for more than a second"


def test_a_request_that_nobody_wants_holds_no_core(served: Served) -> None:
    """The thread goes on, as it does not ask whether it is wanted; others have the core."""
    tokens = Tokens(served.server.url, 200)
    assert tokens.next() == 0
    tokens.close(cancels=True)
    (pid,) = served.instances("engine")
    until(lambda: rests(pid))
    for number in range(10):
        assert np.array_equal(served.infer("add", x=four(number))["y"], four(number + 1))
    tokens = Tokens(served.server.url, 3)  # it waits for the thread
    until(lambda: os.SCHED_IDLE not in classes(pid))
    assert [tokens.next() for _ in range(3)] == [0, 1, 2]
    tokens.close()


def test_a_thread_that_spins_rests_while_nobody_waits_for_the_model(served: Served) -> None:
    (pid,) = served.instances("spins")
    until(lambda: rests(pid))
    for _ in range(2):
        answering = threading.Thread(target=lambda: served.infer("spins", x=four(0.5)))
        answering.start()
        until(lambda: not rests(pid))
        answering.join()
        until(lambda: rests(pid))


def test_what_computes_for_requests_does_not_rest_after_them(served: Served) -> None:
    (pid,) = served.instances("helped")
    for number in range(4):
        served.infer("helped", x=four(number))
        assert os.SCHED_IDLE not in classes(pid)
    end = time.monotonic() + 1.5  # some looks
    while time.monotonic() < end:
        assert os.SCHED_IDLE not in classes(pid)
        time.sleep(0.05)


def test_processes_that_a_model_leaves_behind_rest(served: Served) -> None:
    """While no request is open, as its threads do, and whatever they have started."""
    child = int(served.infer("leaves", x=four(0))["y"][0])
    until(lambda: rests(child))
    children = Path(f"/proc/{child}/task/{child}/children")
    until(children.read_text)  # where the cores are busy, it rests before it has started anything
    (grandchild,) = map(int, children.read_text().split())
    until(lambda: rests(grandchild))
    for _ in range(2):
        served.infer("leaves", x=four(0))
        until(lambda: rests(child) and rests(grandchild))


@pytest.mark.parametrize("name", LONG_KINDS)
def test_others_have_their_turns_beside_an_execute_that_computes_for_long(served: Served, name: str) -> None:
    """Whatever way its model has of answering. Its request is answered all the same, and counted as one."""
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(name, inputs_of({"x": four(1.0)}))
        until(lambda: served.server.busy_slots(running=True) > 0)
        for number in range(5):
            assert np.array_equal(served.infer("add", x=four(number))["y"], four(number + 1))
        assert answers.empty(), "it computes for a second"
        result, error = answers.get(timeout=TIMEOUT_S)
    assert error is None
    assert np.array_equal(result.as_numpy("y"), four(1.0))


def test_threads_are_where_the_main_thread_is(served: Served) -> None:
    for _ in range(3):
        assert served.infer("pooled", x=four(0))["y"][0] == 1


def test_threads_of_a_model_that_is_not_decoupled_answer(served: Served) -> None:
    before_s = busy_s(served)
    for number in range(3):
        assert np.array_equal(served.infer("later", x=four(number))["y"], four(number))
    until(lambda: busy_s(served) - before_s > 0.3)
