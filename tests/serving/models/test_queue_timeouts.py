"""Queue policies with timeouts, as Triton has them: they bound the time in the queue, never that of computing.

How long a request computes stands in it, or its test says when it ends. Each model has one instance, so that a second
request waits.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.live_server import LiveServer, live_server
from testing.waiting import until
from tests.helpers import ensemble_configs, python_models
from tests.helpers.scraped_metrics import Scraped
from tests.helpers.served import inputs_of
from tests.helpers.stopped_workers import stopped_workers
from tests.helpers.tiny_model import SERVED_LAYERS, TASKS, orders_of, save_served
from tests.helpers.ways import WAYS, RefusedError, request_of

TIMEOUT_S = 60
QUEUE_S = 0.6  # the longest wait, which is also what a busy machine may take until it begins with a request
COMPUTE_S = 0.7  # what a request takes at least that keeps others waiting
REJECTED = "Request timeout expired for model '{}'"
ONE = "instance_group { count: 1 kind: KIND_CPU }"
UNTIL_TOLD = -1.0
COMPUTES_FIRST = -1.5  # and waits until it is told
SLEEPS = """
    def execute(self, requests):
        import os, time
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            seconds = float(x.ravel()[0])
            end = time.thread_time() + (seconds < -1) * 0.1
            while time.thread_time() < end:
                pass
            time.sleep(max(seconds, 0))
            if seconds < 0:
                open("BEGUN", "w").close()
            while seconds < 0 and os.path.exists("HOLD"):
                time.sleep(0.005)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return responses
"""


def policy(action: str = "REJECT", timeout_us: int = int(QUEUE_S * 1e6), more: str = "") -> str:
    return f"timeout_action: {action} default_timeout_microseconds: {timeout_us} {more}"


def batching(default: str, more: str = "") -> str:
    return f"dynamic_batching {{ default_queue_policy {{ {default} }} {more} }} {ONE}"


OVERRIDE = "allow_timeout_override: true"
LEVELS = (
    f"priority_levels: 2 default_priority_level: 1 priority_queue_policy {{ key: 2 value {{ {policy('REJECT')} }} }}"
)
CONFIGS = {
    "rejects": batching(policy()),
    "delays": batching(policy("DELAY")),
    "overrides": batching(policy(timeout_us=int(TIMEOUT_S * 1e6), more=OVERRIDE)),
    "asks": batching(policy(timeout_us=0, more=OVERRIDE)),
    "levels": batching(policy(timeout_us=0), LEVELS),
}
ALONE = batching(policy())  # of a model without max_batch_size
KINDS = ("heavy", "python")


@dataclass(frozen=True)
class Served:
    server: LiveServer
    client: triton.InferenceServerClient
    hold: Path  # while there is such a file, Python models compute what takes until it is told
    begun: Path  # which they write when they begin with that

    def infer(self, name: str, seconds: float, **more: Any) -> Any:
        return self.client.infer(name, inputs(name, seconds), client_timeout=TIMEOUT_S, **more)

    def send(self, name: str, seconds: float, **more: Any) -> "Future[Any]":
        """Send a request; the future is that of its answer."""
        answer: Future[Any] = Future()

        def done(result: Any, error: InferenceServerException | None) -> None:
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        self.client.async_infer(name, inputs(name, seconds), callback=done, **more)
        return answer

    @contextmanager
    def occupied(self, name: str, **more: Any) -> Iterator["Future[Any]"]:
        """A request computes while the block lasts, and for COMPUTE_S, which is longer than others may wait."""
        until(lambda: not self.server.busy_slots())  # an answer comes before its slot is free
        with ExitStack() as stack:
            if name.startswith("heavy"):
                stack.enter_context(stopped_workers(self.server))
            self.hold.touch()
            stack.callback(self.hold.unlink)
            self.begun.unlink(missing_ok=True)
            answer = self.send(name, 0 if name.startswith("heavy") else UNTIL_TOLD, **more)
            begin_s = time.monotonic()
            # A worker soon leaves a Python model that does not compute, and then the request's slot does not run.
            until(lambda: answer.done() or self.begun.exists() or self.server.busy_slots(running=True))
            if answer.done():
                answer.result()  # why it does not run
            yield answer
            assert not answer.done()
            time.sleep(max(0.0, begin_s + COMPUTE_S - time.monotonic()))
        answer.result(TIMEOUT_S)

    def failures(self, name: str, reason: str) -> float:
        return Scraped(self.server).scrape()("nv_inference_request_failure", model=name, reason=reason)


def inputs(name: str, seconds: float) -> list[triton.InferInput]:
    if name.startswith("heavy"):
        tensor = triton.InferInput("orders", [1, 16], "INT32")
        tensor.set_data_from_numpy(orders_of(1, seconds * 2e6 / (SERVED_LAYERS * TASKS)))
        return [tensor]
    batched = name.startswith("python") and name != "python_alone"
    return inputs_of({"x": np.full((1, 1) if batched else (1,), seconds, np.float32)})


@pytest.fixture(scope="module")
def served(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("queues")
    hold = tmp_path_factory.mktemp("hold") / "hold"
    begun = hold.with_name("begun")
    sleeps = SLEEPS.replace("HOLD", str(hold)).replace("BEGUN", str(begun))
    for name, config in CONFIGS.items():
        save_served(repository, f"heavy_{name}", model_cache, f"max_batch_size: 8 {config}")
        written = python_models.config_of("x:FP32:1", "y:FP32:1", 4, config)
        python_models.write(repository, f"python_{name}", sleeps, written)
    python_models.write(repository, "python_alone", sleeps, python_models.config_of("x:FP32:1", "y:FP32:1", 0, ALONE))
    steps = [("python_alone", "x=x", "y=y")]
    ensemble_configs.write(repository, "ensemble", ensemble_configs.config_of("x:FP32:1", "y:FP32:1", steps, batch=0))
    with (
        live_server(repository, [f"--cache-dir={model_cache}"]) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        yield Served(server, client, hold, begun)


@pytest.mark.parametrize("name", ["heavy_rejects", "python_rejects", "python_alone"])
def test_waiting_is_bounded_and_computing_is_not(served: Served, name: str) -> None:
    """A first request computes twice as long as a second one may wait. Afterwards nothing is refused.

    Not even one that computes as long, which is the first one of the second round.
    """
    for _ in range(2):
        before = served.failures(name, "REJECTED")
        with served.occupied(name):
            begin_s = time.monotonic()
            with pytest.raises(InferenceServerException, match=REJECTED.format(name)) as caught:
                served.infer(name, 0)
            assert time.monotonic() - begin_s >= QUEUE_S
            assert caught.value.status() == "StatusCode.UNAVAILABLE"
        served.infer(name, 0)
        assert served.failures(name, "REJECTED") == before + 1
    (model,) = served.client.get_inference_statistics(name).model_stats
    assert model.inference_stats.fail.count == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_queue_is_shed(served: Served, kind: str) -> None:
    """Requests that come at once: those whose turn comes in time are answered, and the server goes on."""
    name = f"{kind}_rejects"
    with ThreadPoolExecutor(24) as pool:
        gate = threading.Barrier(24)

        def ask(_: int) -> bool:
            gate.wait()
            try:
                served.infer(name, QUEUE_S / 3)
            except InferenceServerException as error:
                assert REJECTED.format(name) in str(error)
                return False
            return True

        answered = list(pool.map(ask, range(24)))
    assert 0 < sum(answered) < 24
    served.infer(name, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_may_wait_behind_others_instead(served: Served, kind: str) -> None:
    name = f"{kind}_delays"
    with served.occupied(name):
        others = [served.send(name, 0) for _ in range(3)]
    for answer in others:
        answer.result(TIMEOUT_S)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["overrides", "asks"])
def test_a_request_s_own_timeout(served: Served, kind: str, name: str) -> None:
    """It may be shorter than the policy's, or be the only one; it bounds the time in the queue, too."""
    name = f"{kind}_{name}"
    with served.occupied(name, timeout=int(QUEUE_S * 1e6)):
        patient, long = served.send(name, 0), served.send(name, 0, timeout=int(4 * TIMEOUT_S * 1e6))
        with pytest.raises(InferenceServerException, match=REJECTED.format(name)):
            served.infer(name, 0, timeout=int(QUEUE_S * 1e6))
    for answer in (patient, long):
        answer.result(TIMEOUT_S)


def test_a_request_that_waits_for_an_instance_instead(served: Served) -> None:
    """Its timeout holds there, too. A front end that is away does not tell that a model waits, as if it had ended."""
    (front_end,) = served.server.pids()["front end"]
    until(lambda: not served.server.busy_slots())
    served.hold.touch()
    try:
        first = served.send("python_overrides", COMPUTES_FIRST)
        second = served.send("python_overrides", 0, timeout=int(COMPUTE_S * 1e6))
        until(lambda: served.server.waiting_slots() == 1)
        os.kill(front_end, signal.SIGSTOP)
        until(lambda: served.server.waiting_slots() == 0)
        os.kill(front_end, signal.SIGCONT)
        with pytest.raises(InferenceServerException, match=REJECTED.format("python_overrides")):
            second.result(TIMEOUT_S)
        assert not first.done()
    finally:
        os.kill(front_end, signal.SIGCONT)
        served.hold.unlink()
    first.result(TIMEOUT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_timeout_that_may_not_be_overridden(served: Served, kind: str) -> None:
    served.infer(f"{kind}_rejects", QUEUE_S / 3, timeout=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_level_has_its_own(served: Served, kind: str) -> None:
    name = f"{kind}_levels"
    with served.occupied(name):
        urgent = served.send(name, 0, priority=1)
        with pytest.raises(InferenceServerException, match=REJECTED.format(name)):
            served.infer(name, 0, priority=2)
    urgent.result(TIMEOUT_S)


def test_a_model_and_a_step_of_an_ensemble_in_each_way(served: Served) -> None:
    """A step waits for its model as others do. All of them wait at the same time."""

    def ask(name: str, way: str) -> None:
        with pytest.raises(RefusedError, match=REJECTED.format("python_alone")) as caught:
            WAYS[way](served.server, request_of(name, {"x": np.zeros(1, np.float32)}))
        assert caught.value.is_of("UNAVAILABLE")

    with served.occupied("ensemble"), ThreadPoolExecutor(2 * len(WAYS)) as pool:
        list(pool.map(ask, ["ensemble", "python_alone"] * len(WAYS), sorted([*WAYS, *WAYS])))
