"""A Python model holds a core by computing, not by waiting, whatever it waits for. On one core, which all others need.

What a model waits for is a `Gate`, which the test opens: until then it waits, however long others take.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.waiting import until
from tests.helpers import adder_models, ensemble_configs
from tests.helpers.own_time import within
from tests.helpers.python_models import TEXTS, config_of, executes, four, parameter, write
from tests.helpers.served import TIMEOUT_S, Served, inputs_of, serving

pytestmark = pytest.mark.long

LIMIT_S = 4
TWO = "instance_group { count: 2 kind: KIND_CPU }"
BATCHES = "dynamic_batching { max_queue_delay_microseconds: 200000 }"
CALLS = """
    def execute(self, requests):
        found = []
        for request in requests:
            inner = pb_utils.InferenceRequest(model_name="waits", inputs=request.inputs(), requested_output_names=["y"])
            found.append(pb_utils.InferenceResponse(inner.exec().output_tensors()))
        return found
"""
SENDS = """
    def execute(self, requests):
        for request in requests:
            exec(request.inputs()[0].as_numpy()[0].decode(), {})
            y = pb_utils.Tensor("y", np.array([b"went on"], dtype=object))
            request.get_response_sender().send(pb_utils.InferenceResponse([y]), 1)
"""
START = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }'

WAYS = {
    "socket": "s.recv(1)",
    "sleep": "s.setblocking(False)\nwhile not over(): time.sleep(0.05)",
    "lock": "lock = threading.Semaphore(0)\n"
    "threading.Thread(target=lambda: (s.recv(1), lock.release())).start()\nlock.acquire()",
    "threads": "list(ThreadPoolExecutor(3).map(lambda _: s.recv(1), range(3)))",
    "coroutine": "asyncio.run(asyncio.to_thread(s.recv, 1))",
    "child": "subprocess.run([sys.executable, '-c', 'import os; os.read(0, 1)'], stdin=s)",
    "shell": "subprocess.run('cat; true', shell=True, stdin=s)",
    "processes": "with ProcessPoolExecutor(2) as pool: pool.submit(os.read, os.dup(s.fileno()), 1).result()",
    "Python's lock": "ctypes.PyDLL(None).read(s.fileno(), ctypes.create_string_buffer(1), 1)",
}
BEGIN = """
import asyncio, ctypes, os, socket, subprocess, sys, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
s = socket.create_connection(("127.0.0.1", PORT))
def over():
    try:
        return s.recv(1) == b""
    except BlockingIOError:
        return False
"""


class Gate:
    """Something to wait for: connections that are closed when it opens."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def code(self, way: str, then: str = "found = 'went on'") -> str:
        """What waits for it in some way, and does something then."""
        begin = BEGIN.replace("PORT", str(self._listener.getsockname()[1]))
        return f"{begin}{WAYS[way]}\ns.close()\n{then}\n"

    @property
    def waiting(self) -> int:
        """How many have come."""
        return len(self._connections)

    def open(self) -> None:
        """Let all go on that have come."""
        connections, self._connections = self._connections, []
        for each in connections:
            each.shutdown(socket.SHUT_RDWR)  # a process may have it that the model has forked
            each.close()

    def close(self) -> None:
        """Let all go on, and nobody come any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.open()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                self._connections.append(connected)


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    waits = executes('"np": np')
    limit = parameter("gangway_python_timeout_s", LIMIT_S)
    write(repository, "waits", waits, config_of(*TEXTS, more=TWO))
    write(repository, "one", waits, config_of(*TEXTS))
    write(repository, "limited", waits, config_of(*TEXTS, more=limit))
    write(
        repository,
        "batched",
        waits.replace("[0].decode", "[0, 0].decode").replace("object)", "object)[None]"),
        config_of(*TEXTS, batch=4, more=BATCHES),
    )
    write(repository, "sends", SENDS, config_of(*TEXTS, more="model_transaction_policy { decoupled: true }"))
    write(repository, "calls", CALLS, config_of(*TEXTS, more=TWO))
    write(repository, "sequence", waits, config_of(*TEXTS, more=f"sequence_batching {{ {START} }}"))
    write(repository, "add")
    adder_models.write(repository, "two", 2)
    steps = [("waits", "x=x", "y=a"), ("waits", "x=a", "y=y")]
    texts = "x:STRING:1", "y:STRING:1"
    ensemble_configs.write(repository, "chain", ensemble_configs.config_of(*texts, steps, batch=0))
    with serving(repository, "--cores=0", cwd=repository.parent) as served:
        yield served


def others_are_answered(served: Served) -> None:
    """Other models are, on the same core."""
    for _ in range(10):
        assert np.array_equal(served.infer("two", x=four(1)[None])["y"][0], four(3))
        assert np.array_equal(served.infer("add", x=four(1))["y"], four(2))


def works_again(served: Served, name: str) -> None:
    """A model answers, as soon as the process is there again that was ended."""

    def answered() -> bool:
        x = four(1) if name == "add" else np.array([b"found = 7"], dtype=object)
        try:
            y = served.infer(name, x=x)["y"]
        except InferenceServerException as error:
            assert "UNAVAILABLE" in str(error), error
            return False
        return y.tolist() in ([2] * 4, [b"7"])

    until(answered)


@pytest.mark.parametrize("way", WAYS)
def test_whatever_it_waits_for(served: Served, gate: Gate, way: str) -> None:
    """More requests than instances wait, and more instances than cores."""
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(served.executed, "waits", gate.code(way)) for _ in range(3)]
        until(lambda: gate.waiting == 2)
        others_are_answered(served)
        gate.open()
        until(lambda: gate.waiting == 1)
        others_are_answered(served)
        gate.open()
        assert [each.result(TIMEOUT_S) for each in answers] == ["went on"] * 3


def sent(served: Served, name: str, code: str, pool: ThreadPoolExecutor, gate: Gate) -> list["Future[str]"]:
    """Requests to a model in its own way; they wait."""
    x = np.array([code.encode()], dtype=object)
    if name == "batched":
        answers = [pool.submit(one_of_a_batch, served, x) for _ in range(2)]
    elif name == "sequence":
        answers = [pool.submit(first_of_a_sequence, served, x)]
    elif name in ("sends", "stream"):
        answers = [pool.submit(streamed, served, "one" if name == "stream" else name, x)]
    else:
        answers = [pool.submit(served.executed, name, code)]
    until(lambda: gate.waiting == 1)
    return answers


def one_of_a_batch(served: Served, x: Any) -> str:
    """The answer to a request that waits for others, to be executed with them."""
    return str(served.infer("batched", x=x[None])["y"][0, 0].decode())


def first_of_a_sequence(served: Served, x: Any) -> str:
    """The answer to the first request of one."""
    result = served.client.infer("sequence", inputs_of({"x": x}), sequence_id=5, sequence_start=True)
    return str(result.as_numpy("y")[0].decode())


def streamed(served: Served, name: str, x: Any) -> str:
    """The only response of a stream."""
    came: Future[str] = Future()

    def take(result: Any, error: Any) -> None:
        if error is not None:
            came.set_exception(error)
        else:
            came.set_result(result.as_numpy("y")[0].decode())

    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(take)
        client.async_stream_infer(name, inputs_of({"x": x}))
        return came.result(TIMEOUT_S)


@pytest.mark.parametrize("name", ["batched", "sends", "stream", "calls", "sequence"])
def test_whoever_asks_it(served: Served, gate: Gate, name: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = sent(served, name, gate.code("socket"), pool, gate)
        others_are_answered(served)
        if name == "batched":
            gate.open()
            until(lambda: gate.waiting == 1)
            others_are_answered(served)
        gate.open()
        assert {each.result(TIMEOUT_S) for each in answers} == {"went on"}


def test_a_step_of_an_ensemble(served: Served, gate: Gate) -> None:
    """Its second step executes what the first one has answered."""
    with ThreadPoolExecutor(2) as pool:
        then = f"found = '''{gate.code('lock')}'''"
        (answer,) = sent(served, "chain", gate.code("child", then), pool, gate)
        others_are_answered(served)
        gate.open()
        until(lambda: gate.waiting == 1)
        others_are_answered(served)
        gate.open()
        assert answer.result(TIMEOUT_S) == "went on"


SPIN = "end = time.thread_time() + 0.5\nwhile time.thread_time() < end: pass\n"


def test_requests_are_joined_while_instances_wait(served: Served, gate: Gate) -> None:
    """They wait in the queue of their model, not with an instance, which would execute one after the other."""
    with ThreadPoolExecutor(6) as pool:
        answers = sent(served, "batched", gate.code("socket"), pool, gate)
        until(lambda: gate.waiting == 1)
        statistics = served.client.get_inference_statistics("batched").model_stats[0]
        x = np.array([b"found = 3"], dtype=object)
        answers += [pool.submit(one_of_a_batch, served, x) for _ in range(4)]
        until(lambda: served.server.waiting_slots() == 4)
        gate.open()
        until(lambda: gate.waiting == 1)
        gate.open()
        assert sorted(each.result(TIMEOUT_S) for each in answers) == ["3"] * 4 + ["went on"] * 2
    after = served.client.get_inference_statistics("batched").model_stats[0]
    assert after.inference_count - statistics.inference_count == 6
    assert after.execution_count - statistics.execution_count <= 3


PLACE = "(len(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0))"


def test_what_goes_on_has_a_core_again(served: Served, gate: Gate) -> None:
    """What computes after a wait is pinned to a core and has its weight, as before the wait."""
    then = f"{SPIN}found.append({PLACE})"
    code = gate.code("socket", then).replace("s = socket", f"found = [{PLACE}]; s = socket")
    before, after = eval(served_while_open(served, gate, code))
    assert after == before
    assert before[0] == 1


def served_while_open(served: Served, gate: Gate, code: str) -> str:
    """What `one` answers, after the others were answered."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.executed, "one", code)
        until(lambda: gate.waiting == 1)
        others_are_answered(served)
        gate.open()
        return answer.result(TIMEOUT_S)


@pytest.mark.parametrize(("milliseconds", "times", "most"), [(1, 300, 5), (10, 60, 12)])
def test_short_waits_are_no_switches(served: Served, milliseconds: int, times: int, most: int) -> None:
    """A model that computes and waits by turns keeps its core: it is weighed anew by each switch."""
    code = f"""
import os, time
before, found = None, 0
for _ in range({times}):
    end = time.thread_time() + {milliseconds / 1000}
    while time.thread_time() < end: pass
    place = {PLACE}
    found += before not in (None, place)
    before = place
    time.sleep({milliseconds / 1000})
"""
    assert int(served.executed("one", code)) <= most


def test_a_wait_that_is_too_long_is_ended(served: Served, gate: Gate) -> None:
    with pytest.raises(InferenceServerException, match=rf"UNAVAILABLE.*did not end within {LIMIT_S} s and was ended"):
        served.executed("limited", gate.code("sleep"))
    works_again(served, "limited")


@pytest.mark.parametrize("name", ["one", "chain", "calls"])
def test_a_client_that_does_not_wait(served: Served, gate: Gate, name: str) -> None:
    """It has its answer in time, and the instance its next request as soon as it is free."""
    x = {"x": np.array([gate.code("sleep").encode()], dtype=object)}
    with within(1), pytest.raises(InferenceServerException, match=r"(?i)deadline"):
        served.infer(name, timeout_s=0.3, **x)
    others_are_answered(served)
    gate.open()
    assert served.executed("one" if name == "one" else "waits", "found = 8") == "8"
    until(lambda: served.server.busy_slots() == 0)


def test_what_nobody_wants_any_more_gets_a_core(served: Served, gate: Gate) -> None:
    """It computes on, so that its instance is free for others."""
    note = f"open({str(served.repository / 'place')!r}, 'w').write(str({PLACE}))"
    x = {"x": np.array([gate.code("socket", SPIN + note).encode()], dtype=object)}
    with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
        served.infer("one", timeout_s=0.3, **x)
    gate.open()
    assert served.executed("one", f"import os; found = {PLACE}") == (served.repository / "place").read_text()


def test_a_killed_instance_is_replaced(served: Served, gate: Gate) -> None:
    with ThreadPoolExecutor(1) as pool:
        (answer,) = sent(served, "one", gate.code("processes"), pool, gate)
        others_are_answered(served)
        (pid,) = served.instances("one")[:1]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*was lost"):
            answer.result(TIMEOUT_S)
    works_again(served, "one")


def test_a_killed_worker_is_nothing_to_what_waits(served: Served, gate: Gate) -> None:
    instances = served.instances("one")
    with ThreadPoolExecutor(1) as pool:
        (answer,) = sent(served, "one", gate.code("socket"), pool, gate)
        others_are_answered(served)
        for pid in served.server.pids()["worker"]:
            os.kill(pid, signal.SIGKILL)
        others_are_answered(served)
        gate.open()
        assert answer.result(TIMEOUT_S) == "went on"
    assert served.instances("one") == instances


def test_a_killed_front_end_leaves_nothing_behind(served: Served, gate: Gate) -> None:
    instances = served.instances("one")
    with ThreadPoolExecutor(1) as pool:
        (answer,) = sent(served, "one", gate.code("socket"), pool, gate)
        others_are_answered(served)
        for pid in served.server.pids()["front end"]:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(InferenceServerException):
            answer.result(TIMEOUT_S)
    works_again(served, "add")
    others_are_answered(served)
    gate.open()
    works_again(served, "one")
    assert served.instances("one") == instances
    until(lambda: served.server.busy_slots() == 0)


def test_statistics_count_a_wait_as_the_model_s_time(served: Served, gate: Gate) -> None:
    """As Triton does: the time of `execute`. What a request waits for its instance is queue."""

    def times() -> tuple[int, int]:
        (entry,) = served.client.get_inference_statistics("one").model_stats
        return entry.inference_stats.compute_infer.ns, entry.inference_stats.queue.ns

    def pending() -> float:
        return served.scrape()("nv_inference_pending_request_count", model="one")

    until(lambda: served.server.busy_slots() == 0)
    before, waits_ns = times(), []
    with ThreadPoolExecutor(2) as pool:
        begin_ns = time.monotonic_ns()
        answers = [pool.submit(served.executed, "one", gate.code("socket"))]
        until(lambda: gate.waiting == 1 and pending() == 0)
        answers += [pool.submit(served.executed, "one", gate.code("socket"))]
        for waiting in (1, 0):
            until(lambda waiting=waiting: gate.waiting == 1 and pending() == waiting)  # type: ignore[misc]
            both_ns = time.monotonic_ns()
            others_are_answered(served)
            waits_ns.append(time.monotonic_ns() - both_ns)
            gate.open()
        assert [each.result(TIMEOUT_S) for each in answers] == ["went on"] * 2
    until(lambda: served.server.busy_slots() == 0)
    most_ns = 2 * (time.monotonic_ns() - begin_ns)
    infer_ns, queue_ns = (after - earlier for after, earlier in zip(times(), before, strict=True))
    assert infer_ns >= sum(waits_ns) and queue_ns >= waits_ns[0] and infer_ns + queue_ns <= most_ns
