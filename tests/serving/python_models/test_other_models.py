"""Python models that execute requests to other models, and those with any number of responses; on one core, too."""

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.processes import cpu_ns
from testing.waiting import until
from tests.helpers import adder_models, ensemble_configs
from tests.helpers.own_time import within
from tests.helpers.python_models import SLOW, config_of, four, write
from tests.helpers.served import TIMEOUT_S, Served, inputs_of, serving
from tests.helpers.ways import WAYS

pytestmark = pytest.mark.long

ASKS = """
    def ask(self, name, x, **more):
        inputs = [pb_utils.Tensor("x", x)]
        return pb_utils.InferenceRequest(model_name=name, inputs=inputs, requested_output_names=["y"], **more)

    def check(self, response):
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "y").as_numpy()
"""
SYNC = (
    ASKS
    + """
    def execute(self, requests):
        found = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            for name in ("two", "chain", "add"):
                x = self.check(self.ask(name, x).exec())
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return found
"""
)
ASYNC = (
    ASKS
    + """
    async def execute(self, requests):
        import asyncio
        found = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            calls = [self.ask(name, x).async_exec() for name in ("two", "add", "two", "slow")]
            responses = await asyncio.gather(*calls)
            await asyncio.sleep(0.001)
            y = sum(self.check(each) for each in responses)
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return found
"""
)
ANYBODY = (
    ASKS
    + """
    def execute(self, requests):
        found = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "who").as_numpy()[0]
            response = self.ask(name, np.zeros(4, np.float32), model_version=-1).exec()
            if response.has_error():
                error = response.error()
                found.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(error.message(), error.code())))
            else:
                found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", self.check(response))]))
        return found
"""
)
THREADS = (
    ASKS
    + """
    def execute(self, requests):
        from concurrent.futures import ThreadPoolExecutor
        found = []
        with ThreadPoolExecutor(4) as pool:
            for request in requests:
                x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
                parts = list(pool.map(lambda name: self.check(self.ask(name, x).exec()), ["two", "add", "slow"]))
                found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", sum(parts))]))
        return found
"""
)
# Sends 0, 1, ... n - 1 to a request for n, from threads if `late` is set, and notes requests that were cancelled.
COUNTS = """
    def execute(self, requests):
        import threading
        for request in requests:
            n, late = (int(value) for value in pb_utils.get_input_tensor_by_name(request, "x").as_numpy())
            sender = request.get_response_sender()
            if late:
                threading.Thread(target=self.send, args=(request, sender, n), daemon=True).start()
            else:
                self.send(request, sender, n)

    def send(self, request, sender, n):
        import time
        for number in range(abs(n)):
            if request.is_cancelled():
                print("noticed that it is cancelled")
                break
            if n < 0:
                time.sleep(0.02)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COROUTINES = """
    async def execute(self, requests):
        import asyncio
        for request in requests:
            n, _ = (int(value) for value in pb_utils.get_input_tensor_by_name(request, "x").as_numpy())
            sender = request.get_response_sender()
            for number in range(n):
                await asyncio.sleep(0.001)
                last = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if number == n - 1 else 0
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number], np.int32))]), last)
"""
FAILS_LATER = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([0], np.int32))]))
        raise ValueError("after a response")
"""
SUMS = """
    def execute(self, requests):
        found = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            inner = pb_utils.InferenceRequest(model_name="counts", inputs=[x], requested_output_names=["y"])
            total = 0
            for response in inner.exec(decoupled=True):
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                total += sum(int(tensor.as_numpy()[0]) for tensor in response.output_tensors())
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([total], np.int64))]))
        return found
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
COUNTED = config_of("x:INT32:2", "y:INT32:1", more=DECOUPLED)


@pytest.fixture(scope="module", params=["0", "all"], ids=["one core", "all cores"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    write(repository, "add")
    write(repository, "slow", SLOW)
    adder_models.write(repository, "two", 2, config='max_batch_size: 0 input { name: "x" dims: [-1, 4] }')
    for name, body in (("sync", SYNC), ("async", ASYNC), ("threads", THREADS)):
        write(repository, name, body.replace('"two"', '"plus"'))
    write(
        repository,
        "plus",
        head="import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\n",
        body=SLOW.replace("0.2", "0.0").replace(".as_numpy())", ".as_numpy() + np.float32(2))"),
    )
    write(repository, "anybody", ANYBODY, config_of("who:STRING:1", "y:FP32:4"))
    write(repository, "itself", SYNC.replace('("two", "chain", "add")', '("add", "itself")'))
    write(repository, "counts", COUNTS, COUNTED)
    write(repository, "coroutines", COROUTINES, COUNTED)
    write(repository, "fails_later", FAILS_LATER, COUNTED)
    write(repository, "sums", SUMS, config_of("x:INT32:2", "y:INT64:1"))
    write(
        repository,
        "sums_one",
        SUMS.replace("inner.exec(decoupled=True)", "[inner.exec()]"),
        config_of("x:INT32:2", "y:INT64:1"),
    )
    steps = [("add", "x=x", "y=a"), ("plus", "x=a", "y=y")]
    ensemble_configs.write(repository, "chain", ensemble_configs.config_of("x:FP32:4", "y:FP32:4", steps, batch=0))
    steps = [("sync", "x=x", "y=a"), ("async", "x=a", "y=y")]
    ensemble_configs.write(repository, "outer", ensemble_configs.config_of("x:FP32:4", "y:FP32:4", steps, batch=0))
    with serving(repository, f"--cores={request.param}", cwd=repository.parent) as served:
        yield served


def stream(served: Served, name: str, *asked: tuple[int, int], **options: Any) -> list[tuple[str, int | None, str]]:
    """(id, number, error) of each response to these requests, in the order in which they came."""
    found: list[tuple[str, int | None, str]] = []
    ended, left = threading.Event(), {str(index) for index in range(len(asked))}

    def take(result: Any, error: Any) -> None:
        if error is not None:
            found.append(("", None, str(error)))
            ended.set()
            return
        response = result.get_response()
        y = result.as_numpy("y")
        if y is not None:
            found.append((response.id, int(y[0]), ""))
        if response.parameters["triton_final_response"].bool_param:
            left.discard(response.id)
        if not left:
            ended.set()

    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(take)
        for index, (n, late) in enumerate(asked):
            x = inputs_of({"x": np.array([n, late], np.int32)})
            client.async_stream_infer(name, x, request_id=str(index), enable_empty_final_response=True, **options)
        assert ended.wait(TIMEOUT_S)
    return found


def test_one_after_the_other(served: Served) -> None:
    assert np.array_equal(served.infer("sync", x=four(1))["y"], four(1 + 2 + 3 + 1))


def test_side_by_side(served: Served) -> None:
    assert np.array_equal(served.infer("async", x=four(1))["y"], four(3 + 2 + 3 + 1))


def test_from_threads_of_the_model(served: Served) -> None:
    assert np.array_equal(served.infer("threads", x=four(1))["y"], four(3 + 2 + 1))


def test_in_steps_of_an_ensemble(served: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: served.infer("outer", x=four(1))["y"], range(4)):
            assert np.array_equal(y, four(4 * 7 + 2 + 1 + 2))


def test_many_clients_of_one_instance(served: Served) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda value: (value, served.infer("sync", x=four(value))["y"]), range(48))
        assert all(np.array_equal(y, four(value + 6)) for value, y in answers)
    for way in WAYS:
        assert np.array_equal(served.over(way, "sync", x=four(2))["y"], four(8)), way


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("nobody", "NOT_FOUND", "unknown model: 'nobody'"),
        ("itself", "INTERNAL", "model 'itself' waits for this request, so it cannot execute it"),
        ("sums", "INVALID_ARGUMENT", "expects 'INT32'"),
        ("counts", "(UNIMPLEMENTED|INVALID_ARGUMENT)", "."),
    ],
)
def test_what_another_model_refuses(served: Served, name: str, status: str, message: str) -> None:
    with pytest.raises(InferenceServerException, match=f"{status}.*{message}"):
        served.infer("anybody", who=np.array([name.encode()], dtype=object))


def test_a_model_that_waits_leaves_the_core_to_others(served: Served) -> None:
    """`slow` sleeps for 0.2 s with the core, `anybody` waits for it: others' requests go on between."""
    threads = [
        threading.Thread(target=served.infer, args=("anybody",), kwargs={"who": np.array([b"slow"], dtype=object)})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert np.array_equal(served.infer("add", x=four(1))["y"], four(2))
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_the_deadline_of_the_client_holds_for_all(served: Served) -> None:
    with within(0.19), pytest.raises(InferenceServerException, match=r"(?i)deadline"):
        served.infer("anybody", timeout_s=0.1, who=np.array([b"slow"], dtype=object))
    until(lambda: np.array_equal(served.infer("add", x=four(1))["y"], four(2)))
    assert np.array_equal(served.infer("anybody", who=np.array([b"add"], dtype=object))["y"], four(1))


def test_an_instance_that_is_killed_while_it_waits(served: Served) -> None:
    (pid,) = served.instances("anybody")
    timer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*was lost"):
        served.infer("anybody", who=np.array([b"slow"], dtype=object))
    until(lambda: served.instances("anybody") and served.client.is_model_ready("anybody"))

    def answered() -> bool:
        try:
            return bool(served.infer("anybody", who=np.array([b"add"], dtype=object)))
        except InferenceServerException as error:
            assert "UNAVAILABLE" in str(error)
            return False

    until(answered)


@pytest.mark.parametrize("late", [0, 1])
def test_any_number_of_responses(served: Served, late: int) -> None:
    found = stream(served, "counts", (3, late), (0, late), (5, late))
    for index, n in enumerate((3, 0, 5)):
        assert [number for key, number, _ in found if key == str(index)] == list(range(n))
    assert not any(error for *_, error in found)


def test_responses_of_a_coroutine(served: Served) -> None:
    assert [number for _, number, _ in stream(served, "coroutines", (4, 0))] == [0, 1, 2, 3]


def test_responses_come_while_the_model_goes_on(served: Served) -> None:
    times: queue.Queue[float] = queue.Queue()
    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(lambda result, error: times.put(time.monotonic()))
        client.async_stream_infer("counts", inputs_of({"x": np.array([-10, 0], np.int32)}))
        came = [times.get(timeout=TIMEOUT_S) for _ in range(10)]
    assert came[-1] - came[0] > 0.1


def test_thousands_of_responses(served: Served) -> None:
    assert [number for _, number, _ in stream(served, "counts", (3000, 1))] == list(range(3000))


def test_an_error_after_a_response(served: Served) -> None:
    found = stream(served, "fails_later", (1, 0))
    assert found[0][1] == 0
    assert "ValueError: after a response" in found[1][2]


def test_a_stream_that_ends_cancels_the_request(served: Served) -> None:
    client = triton.InferenceServerClient(served.server.url)
    first = threading.Event()
    client.start_stream(lambda result, error: first.set())
    client.async_stream_infer("counts", inputs_of({"x": np.array([-1000, 1], np.int32)}))
    assert first.wait(TIMEOUT_S)
    client.stop_stream(cancel_requests=True)
    client.close()
    until(lambda: "noticed that it is cancelled" in served.log())


def test_decoupled_models_need_a_stream(served: Served) -> None:
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*is decoupled: .* ModelStreamInfer"):
        served.infer("counts", x=np.array([1, 0], np.int32))
    with pytest.raises(InferenceServerException, match=r"'counts' is decoupled: .* need exec\(decoupled=True\)"):
        served.infer("sums_one", x=np.array([1, 0], np.int32))


def test_responses_of_another_model(served: Served) -> None:
    for late in (0, 1):
        assert served.infer("sums", x=np.array([6, late], np.int32))["y"] == [15]
    with pytest.raises(InferenceServerException, match="unexpected shape"):
        served.infer("sums", x=np.array([6, 1, 1], np.int32))


def test_idle_instances_take_no_time(served: Served) -> None:
    pids = [pid for name in ("sync", "async", "counts") for pid in served.instances(name)]
    before = sum(map(cpu_ns, pids))
    time.sleep(1)
    assert sum(map(cpu_ns, pids)) - before < 20e6


def test_clients_that_do_not_wait_leave_nothing_behind(served: Served) -> None:
    """Requests end before their instance has asked anybody, while it waits, and while they wait for it."""
    who = {"who": np.array([b"slow"], dtype=object)}
    for timeout_s in (0.002, 0.01, 0.05, 0.1, 0.15) * 3:
        with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
            served.infer("anybody", timeout_s=timeout_s, **who)
    with within(4):  # else the instance waits for clients that have gone
        assert np.array_equal(served.infer("anybody", **who)["y"], four(0))
    until(lambda: served.server.busy_slots() == 0)
