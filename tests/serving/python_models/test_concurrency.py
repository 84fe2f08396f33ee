"""`gangway_python_concurrency`: an instance takes requests while coroutines of others wait; on one core, too."""

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.waiting import until
from tests.helpers import ensemble_configs
from tests.helpers.python_models import config_of, four, parameter, write
from tests.helpers.served import TIMEOUT_S, Array, Served, inputs_of, serving

pytestmark = pytest.mark.long

CONCURRENCY = 8
HEAD = """import asyncio
import contextlib

import numpy as np
import triton_python_backend_utils as pb_utils


"""
# x[0] is how many must be there before any of them is answered; the answer's second number is the most there have been.
MEETS = """
    here, most, came = 0, 0, None

    async def meet(self, x):
        self.came = self.came or asyncio.Condition()
        async with self.came:
            self.here += 1
            self.most = max(self.most, self.here)
            self.came.notify_all()
            await self.came.wait_for(lambda: self.most >= x[0])
            self.here -= 1
        return np.array([x[0], self.most, x[2], x[3]], np.float32)

    async def execute(self, requests):
        found = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", await self.meet(x))]))
        return found
"""
# What x[0] asks for: 0 an answer, 1 an error, 2 to wait for ever, 3 to wait until nobody wants the answer, 4 to wait
# for ever whoever cancels that, 5 how many have begun to wait for ever.
FATES = """
    waiting = 0

    async def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        await asyncio.sleep(0.01)
        if x[0] == 1:
            raise ValueError(f"of request {x[1]:g}")
        if x[0] == 2:
            self.waiting += 1
            await asyncio.Event().wait()
        while x[0] == 4:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        while x[0] == 3 and not requests[0].is_cancelled():
            await asyncio.sleep(0.01)
        if x[0] == 3:
            print("noticed that it is cancelled")
        if x[0] == 5:
            x = np.full(4, self.waiting, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""
ASKS = """
    async def execute(self, requests):
        found = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="MODEL", inputs=[request.inputs()[0]], requested_output_names=["y"])
            response = await inner.async_exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", response.output_tensors()[0].as_numpy())]))
        return found
"""
ASKS_IN_THREADS = """
    async def execute(self, requests):
        x = requests[0].inputs()[0]
        for _ in range(2):
            inner = pb_utils.InferenceRequest(model_name="add", inputs=[x], requested_output_names=["y"])
            response = await asyncio.get_running_loop().run_in_executor(None, inner.exec)
            x = pb_utils.Tensor("x", response.output_tensors()[0].as_numpy())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())])]
"""
FETCHES = """
    async def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(x[0]))
        y = np.frombuffer(await reader.readexactly(16), np.float32)
        writer.close()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
"""
BATCHES = """
    here, most, came = 0, 0, None

    async def execute(self, requests):
        self.came = self.came or asyncio.Condition()
        rows = sum(len(request.inputs()[0].as_numpy()) for request in requests)
        async with self.came:
            self.here += 1
            self.most = max(self.most, self.here)
            self.came.notify_all()
            await self.came.wait_for(lambda: self.most >= 2)
            self.here -= 1
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("y", request.inputs()[0].as_numpy() + np.float32(1)),
            pb_utils.Tensor("entry", np.full((len(request.inputs()[0].as_numpy()), 2), (rows, self.most), np.int32)),
        ]) for request in requests]
"""
# Two sequences must be there; a sequence is never there twice.
SEQUENCES = """
    here, came = set(), None

    async def execute(self, requests):
        self.came = self.came or asyncio.Condition()
        identity = requests[0].correlation_id()
        async with self.came:
            assert identity not in self.here, "a sequence has one request at a time"
            self.here.add(identity)
            self.came.notify_all()
            is_first = requests[0].flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
            await self.came.wait_for(lambda: not is_first or len(self.here) == 2)
        await asyncio.sleep(0.005)
        self.here.discard(identity)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", requests[0].inputs()[0].as_numpy())])]
"""
STREAMS = """
    here, came = 0, None

    async def execute(self, requests):
        self.came = self.came or asyncio.Condition()
        for request in requests:
            x, sender = request.inputs()[0].as_numpy(), request.get_response_sender()
            async with self.came:
                self.here += 1
                self.came.notify_all()
                await self.came.wait_for(lambda: self.here >= x[0])
            for number in range(3):
                await asyncio.sleep(0.001)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + np.float32(number))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ADD = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy() + np.float32(1))])
                for r in requests]
"""
SEVERAL = parameter("gangway_python_concurrency", CONCURRENCY)


@pytest.fixture(scope="module", params=["0", "all"], ids=["one core", "all cores"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    write(repository, "add", ADD, head=HEAD)
    several = config_of(more=SEVERAL)
    for name, body in (("meets", MEETS), ("fates", FATES), ("fetches", FETCHES), ("threads", ASKS_IN_THREADS)):
        write(repository, name, body, several, HEAD)
    write(repository, "limited", FATES, several + parameter("gangway_python_timeout_s", 1.5), HEAD)
    write(repository, "outer", ASKS.replace("MODEL", "inner"), several, HEAD)
    write(repository, "inner", MEETS, several, HEAD)
    write(repository, "step", MEETS, several, HEAD)
    steps = ensemble_configs.config_of("x:FP32:4", "y:FP32:4", [("step", "x=x", "y=y")], batch=0)
    ensemble_configs.write(repository, "ensemble", steps)
    write(repository, "alone", MEETS, head=HEAD)
    write(repository, "not_a_coroutine", ADD, several, HEAD)
    batches = config_of("x:FP32:4", "y:FP32:4 entry:INT32:2", 4, "dynamic_batching { }\n" + SEVERAL)
    write(repository, "batches", BATCHES, batches, HEAD)
    write(repository, "sequences", SEQUENCES, config_of(more="sequence_batching { }\n" + SEVERAL), HEAD)
    write(repository, "streams", STREAMS, config_of(more="model_transaction_policy { decoupled: true }"), HEAD)
    with serving(repository, f"--cores={request.param}", cwd=repository.parent) as served:
        yield served


def x_of(first: float, second: float = 0) -> Array:
    return np.array([first, second, 0, 0], np.float32)


def at_once(pool: ThreadPoolExecutor, ask: Callable[[int], Array], count: int) -> "list[Future[Array]]":
    return [pool.submit(ask, number) for number in range(count)]


@pytest.mark.parametrize("name", ["meets", "outer", "ensemble"])
def test_an_instance_takes_so_many_requests_at_a_time(served: Served, name: str) -> None:
    """Each waits until eight are there, and further ones do not come to them: also where other models wait."""
    with ThreadPoolExecutor(3 * CONCURRENCY) as pool:
        for future in at_once(pool, lambda _: served.infer(name, x=x_of(CONCURRENCY))["y"], 3 * CONCURRENCY):
            assert future.result(TIMEOUT_S)[1] == CONCURRENCY
    assert np.array_equal(served.infer("add", x=four(1))["y"], four(2))


def test_without_the_parameter_it_takes_one(served: Served) -> None:
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for future in at_once(pool, lambda _: served.infer("alone", x=x_of(1))["y"], 2 * CONCURRENCY):
            assert future.result(TIMEOUT_S)[1] == 1


def test_an_execute_that_is_no_coroutine_is_called_as_ever(served: Served) -> None:
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = at_once(pool, lambda value: served.infer("not_a_coroutine", x=four(value))["y"], 24)
        assert [future.result(TIMEOUT_S)[0] for future in answers] == list(range(1, 25))


def test_clients_of_http(served: Served) -> None:
    def ask(_: int) -> Array:
        return served.over("HTTP", "meets", x=x_of(CONCURRENCY))["y"]

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for future in at_once(pool, ask, CONCURRENCY):
            assert future.result(TIMEOUT_S)[1] == CONCURRENCY


def test_what_waits_for_a_socket(served: Served) -> None:
    """The server that they ask answers when all of them have asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(CONCURRENCY) as pool:
        listener.settimeout(TIMEOUT_S)
        port = listener.getsockname()[1]
        answers = at_once(pool, lambda _: served.infer("fetches", x=x_of(port))["y"], CONCURRENCY)
        connected = [listener.accept()[0] for _ in range(CONCURRENCY)]
        assert np.array_equal(served.infer("add", x=four(1))["y"], four(2))
        for number, each in enumerate(connected):
            with each:
                each.sendall(four(number).tobytes())
        assert sorted(future.result(TIMEOUT_S)[0] for future in answers) == list(range(CONCURRENCY))


def test_threads_of_coroutines_ask_others(served: Served) -> None:
    """They give cores back whenever they wait, also one that has just come for the coroutines."""
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = at_once(pool, lambda value: served.infer("threads", x=four(value))["y"], 400)
        assert [future.result(TIMEOUT_S)[0] for future in answers] == [value + 2 for value in range(400)]


def test_errors_are_those_of_their_requests(served: Served) -> None:
    def ask(number: int) -> str:
        try:
            return str(served.infer("fates", x=x_of(number % 2, number))["y"][1])
        except InferenceServerException as error:
            return str(error)

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for number, answer in enumerate(pool.map(ask, range(4 * CONCURRENCY))):
            assert f"ValueError: of request {number}" in answer if number % 2 else answer == str(float(number))


def test_deadlines_and_cancellations_are_those_of_their_requests(served: Served) -> None:
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        waiting = [pool.submit(served.infer, "fates", 2.0, x=x_of(3)) for _ in range(CONCURRENCY - 1)]
        until(lambda: np.array_equal(served.infer("fates", x=x_of(0, 5))["y"], x_of(0, 5)))
        for future in waiting:
            with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
                future.result(TIMEOUT_S)
    until(lambda: served.log().count("noticed that it is cancelled") >= CONCURRENCY - 1)
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = at_once(pool, lambda value: served.infer("fates", x=x_of(0, value))["y"], 16)
        assert [future.result(TIMEOUT_S)[1] for future in answers] == list(range(16))
    until(lambda: served.server.busy_slots() == 0)


def test_an_instance_that_is_killed(served: Served) -> None:
    (pid,) = served.instances("fates")
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        waiting = at_once(pool, lambda _: served.infer("fates", x=x_of(2))["y"], CONCURRENCY - 1)
        until(lambda: served.infer("fates", x=x_of(5))["y"][0] == CONCURRENCY - 1)  # else some come when it has gone
        others = at_once(pool, lambda value: served.infer("add", x=four(value))["y"], 8)
        os.kill(pid, signal.SIGKILL)
        for future in waiting:
            with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*was lost"):
                future.result(TIMEOUT_S)
        assert [future.result(TIMEOUT_S)[0] for future in others] == list(range(1, 9))

    def answered() -> bool:
        with suppress(InferenceServerException):
            return bool(served.infer("fates", x=x_of(0)))
        return False

    until(answered)


def test_a_coroutine_that_takes_too_long_is_ended(served: Served) -> None:
    """Only where it does not end is the process ended, too."""
    (pid,) = served.instances("limited")
    with ThreadPoolExecutor(4) as pool:
        late = at_once(pool, lambda _: served.infer("limited", x=x_of(2))["y"], 2)
        while not all(future.done() for future in late):
            assert np.array_equal(served.infer("limited", x=x_of(0, 1))["y"], x_of(0, 1))
        for future in late:
            with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*a request .* did not end within 1.5 s"):
                future.result()
        assert served.instances("limited") == [pid]
        with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*did not end within 1.5 s"):
            served.infer("limited", x=x_of(4))
    until(lambda: served.instances("limited") not in ([], [pid]))


def test_each_entry_is_a_batch(served: Served) -> None:
    """Two batches are there at a time, of which one at least has several requests."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda value: served.infer("batches", x=four(value)[None]), range(32)))
    assert [answer["y"][0, 0] for answer in answers] == list(range(1, 33))
    rows, most = zip(*(answer["entry"][0].tolist() for answer in answers), strict=True)
    assert max(rows) > 1
    assert 2 <= max(most) <= CONCURRENCY


def test_a_sequence_has_one_request_at_a_time(served: Served) -> None:
    answers: queue.Queue[float | InferenceServerException] = queue.Queue()

    def take(result: triton.InferResult | None, error: InferenceServerException | None) -> None:
        answers.put(error if result is None else float(result.as_numpy("y")[0]))

    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(take)
        for number in range(5):
            for identity in (1, 2):
                where = {"sequence_id": identity, "sequence_start": number == 0, "sequence_end": number == 4}
                client.async_stream_infer("sequences", inputs_of({"x": four(number)}), **where)
        found = [answers.get(timeout=TIMEOUT_S) for _ in range(10)]
    assert sorted(map(float, found)) == sorted([0.0, 1.0, 2.0, 3.0, 4.0] * 2)  # type: ignore[arg-type]


def test_coroutines_of_a_decoupled_model(served: Served) -> None:
    """Of them any number is there: each waits for all others."""
    count, ended, found = 3 * CONCURRENCY, threading.Event(), []

    def take(result: triton.InferResult | None, error: InferenceServerException | None) -> None:
        found.append(str(error) if result is None else float(result.as_numpy("y")[0]))
        if error is not None or len(found) == 3 * count:
            ended.set()

    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(take)
        for _ in range(count):
            client.async_stream_infer("streams", inputs_of({"x": four(count)}))
        assert ended.wait(TIMEOUT_S)
    assert sorted(map(float, found)) == sorted([count + number for number in range(3)] * count)
