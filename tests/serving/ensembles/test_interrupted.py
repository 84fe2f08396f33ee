"""Ensembles of a real server in streams, and stopped in the middle of a step: by clients, and by `kill -9`.

`long` is a quick step, then another one and beside it one that takes as long as the request says. The last test kills
the front end.
"""

import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from gangway.zoo.repository import write_ensemble
from testing.live_server import is_ready
from testing.load import raw_channel
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers import ensemble_configs
from tests.helpers.ensemble_configs import config_of
from tests.helpers.raw_stream import RawStream
from tests.helpers.scraped_metrics import TIMEOUT_S, Scrape
from tests.helpers.served import Served, serving
from tests.helpers.tiny_model import SERVED_LAYERS, TASKS, orders_of, save_served

pytestmark = pytest.mark.long

ENDLESS_US = 10_000  # of a task of `slow`: five seconds of computing, which nobody waits for
LONG_US = 1000  # half a second
STREAMED = 40
MANY = 5
COUNTERS = SERVED_LAYERS * TASKS
STEPS = [
    ("simple", "INPUT0=INPUT0 INPUT1=INPUT1", "OUTPUT0=orders"),
    ("simple", "INPUT0=orders INPUT1=orders", "OUTPUT0=twice"),
    ("slow", "orders=orders", "counters=counters"),
]
LONG = config_of("INPUT0:INT32:16 INPUT1:INT32:16", f"counters:INT32:{COUNTERS} twice:INT32:16", STEPS, batch=8)
MODELS = ("long", "slow", "simple", "simple_diamond")


class Counted(Served):
    @contextmanager
    def changes(self) -> Iterator[Callable[[str, str], float]]:
        """Yields what tells how much a counter of a model has grown since; a failure by its reason."""
        before = self.scrape()
        yield lambda name, model: count_of(self.scrape(), name, model) - count_of(before, name, model)


def count_of(scrape: Scrape, name: str, model: str) -> float:
    if name in ("CANCELED", "REJECTED", "BACKEND", "OTHER"):
        return scrape("nv_inference_request_failure", model=model, reason=name)
    return scrape(f"nv_inference_{name}", model=model)


@pytest.fixture(scope="module")
def served(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    repository = tmp_path_factory.mktemp("models")
    cache_dir = compiled_zoo.linked_cache(tmp_path_factory.mktemp("cache"))
    save_served(repository, "slow", cache_dir)
    (repository / "simple").symlink_to(compiled_zoo.repository / "simple")
    write_ensemble(repository, "simple_diamond")
    ensemble_configs.write(repository, "long", LONG)
    flags = [f"--cache-dir={cache_dir}", "--metrics-interval-ms=1"]
    with serving(repository, *flags, kind=Counted) as served:
        yield served


def request_for(model: str, a: Any, b: Any, identity: str = "") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=identity)
    for name, value in (("INPUT0", a), ("INPUT1", b)):
        request.inputs.add(name=name, datatype="INT32", shape=value.shape)
        request.raw_input_contents.append(value.astype(np.int32).tobytes())
    return request


def long_request(task_us: int) -> pb.ModelInferRequest:
    """What the first step adds up is how long each task of the slow one takes."""
    orders = orders_of(task_us=task_us)
    return request_for("long", orders, np.zeros_like(orders))


def assert_right(response: pb.ModelInferResponse) -> None:
    """How often `slow` has counted depends on what was in memory before, and on kills."""
    outputs = dict(zip((output.name for output in response.outputs), response.raw_output_contents, strict=True))
    assert len(outputs["counters"]) == 4 * COUNTERS
    assert np.frombuffer(outputs["twice"], np.int32).tolist() == [2 * LONG_US * 1000] + [0] * 15


def test_a_stream_of_ensembles_is_counted_as_single_requests_are(served: Counted) -> None:
    """Some without ids, whose answers come in their order; some that are refused."""
    random = np.random.default_rng(1)
    pairs = [random.integers(-99, 99, (2, 1 + number % 8, 16)) for number in range(STREAMED)]
    before = {model: served.statistics(model) for model in MODELS}
    with served.changes() as grown, RawStream(served.server.url, timeout_s=TIMEOUT_S) as stream:
        for number, (a, b) in enumerate(pairs):
            stream.send(request_for("simple_diamond", a, b, identity=str(number) if number % 2 else ""))
            stream.send(request_for("simple_diamond", a, b[:, :8], identity="wrong"))
        stream.half_close()
        answers = list(stream.call)
        named = {answer.infer_response.id: answer for answer in answers}
        nameless = iter([answer for answer in answers if not answer.infer_response.id])
        assert sum("unexpected shape" in answer.error_message for answer in answers) == STREAMED
        for number, (a, b) in enumerate(pairs):
            response = (named[str(number)] if number % 2 else next(nameless)).infer_response
            for content, expected in zip(response.raw_output_contents, (2 * a + 2 * b, 2 * a - 2 * b), strict=True):
                assert content == expected.astype(np.int32).tobytes()
        rows = sum(len(a) for a, _ in pairs)
        assert (grown("request_success", "simple_diamond"), grown("count", "simple_diamond")) == (STREAMED, rows)
        assert (grown("request_success", "simple"), grown("count", "simple")) == (4 * STREAMED, 4 * rows)
        assert grown("queue_duration_us", "simple_diamond") == 0 < grown("compute_infer_duration_us", "simple_diamond")
    scrape = served.scrape()
    for model in MODELS:
        stats = served.statistics(model)
        assert count_of(scrape, "request_success", model) == stats.inference_stats.success.count
        assert count_of(scrape, "count", model) == stats.inference_count >= before[model].inference_count
        assert count_of(scrape, "exec_count", model) == stats.execution_count
    served.await_rest()


class Unary:
    """A call of its own. Each of these three can be given up."""

    def __init__(self, served: Counted) -> None:
        self._channel = grpc.insecure_channel(served.server.url)
        call = self._channel.unary_unary(SERVICE + "ModelInfer")
        self._future = call.future(long_request(ENDLESS_US).SerializeToString(), timeout=TIMEOUT_S)

    def give_up(self) -> None:
        self._future.cancel()
        self._channel.close()


class Streamed:
    """A stream."""

    def __init__(self, served: Counted) -> None:
        self._stream = RawStream(served.server.url)
        self._stream.send(long_request(ENDLESS_US))

    def give_up(self) -> None:
        self._stream.close()


class OverHttp:
    """A connection that is closed."""

    def __init__(self, served: Counted) -> None:
        self._connection = http.client.HTTPConnection(served.server.http_url, timeout=TIMEOUT_S)
        request = long_request(ENDLESS_US)
        inputs = [
            {"name": name, "datatype": "INT32", "shape": [1, 16], "data": np.frombuffer(raw, np.int32).tolist()}
            for name, raw in zip(("INPUT0", "INPUT1"), request.raw_input_contents, strict=True)
        ]
        self._connection.request("POST", "/v2/models/long/infer", json.dumps({"inputs": inputs}))

    def give_up(self) -> None:
        self._connection.close()


WAYS: Mapping[str, Callable[[Counted], Any]] = {"unary": Unary, "stream": Streamed, "http": OverHttp}


@pytest.mark.parametrize("way", WAYS)
def test_given_up_in_the_middle_of_a_step(served: Counted, way: str) -> None:
    """The step that runs ends at its next layer; those before have been counted, those after never begin."""
    with served.changes() as grown:
        request = WAYS[way](served)
        until(lambda: served.server.busy_slots(running=True) == 1 and grown("request_success", "simple") == 2)
        request.give_up()
        served.await_rest()
        until(lambda: grown("CANCELED", "long") == 1)
        assert (grown("CANCELED", "slow"), grown("request_success", "slow")) == (1, 0)
        assert (grown("request_success", "simple"), grown("request_success", "long")) == (2, 0)


def test_many_given_up_with_their_stream(served: Counted) -> None:
    """Whatever step each of them has come to."""
    with served.changes() as grown, RawStream(served.server.url) as stream:
        for _ in range(MANY):
            stream.send(long_request(ENDLESS_US))
        until(lambda: served.scrape()("gangway_requests_in_flight", model="long") == MANY)
        until(lambda: served.server.busy_slots(running=True) > 0)
        stream.close()
        served.await_rest()
        until(lambda: grown("CANCELED", "long") == MANY)
        assert (grown("request_success", "slow"), grown("request_success", "long")) == (0, 0)


def test_the_call_s_deadline_in_the_middle_of_a_step(served: Counted) -> None:
    with served.changes() as grown, grpc.insecure_channel(served.server.url) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(long_request(ENDLESS_US).SerializeToString(), timeout=0.4)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        served.await_rest()
        until(lambda: grown("CANCELED", "long") + grown("OTHER", "long") == 1)
        assert (grown("request_success", "slow"), grown("request_success", "long")) == (0, 0)


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_a_kill_in_the_middle_of_a_step(served: Counted, role: str) -> None:
    """That step is executed again; those that have ended are not."""
    with served.changes() as grown, ThreadPoolExecutor(1) as pool, raw_channel(served.server.url) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer", response_deserializer=pb.ModelInferResponse.FromString)
        answer = pool.submit(call, long_request(LONG_US).SerializeToString(), timeout=TIMEOUT_S)
        until(lambda: served.server.busy_slots(running=True) == 1 and grown("request_success", "simple") == 2)
        os.kill(served.server.pids()[role][0], signal.SIGKILL)
        assert_right(answer.result(TIMEOUT_S))
        assert (grown("request_success", "simple"), grown("request_success", "slow")) == (2, 1)
        assert grown("request_success", "long") == 1
    served.await_rest()


def test_a_front_end_killed_in_the_middle_of_a_step(served: Counted) -> None:
    (front_end,) = served.server.pids()["front end"]
    with grpc.insecure_channel(served.server.url) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer")
        waiting = call.future(long_request(ENDLESS_US).SerializeToString(), timeout=TIMEOUT_S)
        until(lambda: served.server.busy_slots(running=True) == 1)
        os.kill(front_end, signal.SIGKILL)
        assert waiting.exception(TIMEOUT_S).code() is grpc.StatusCode.UNAVAILABLE
    until(lambda: served.server.pids()["front end"] not in ([], [front_end]) and is_ready(served.server.url))
    with raw_channel(served.server.url) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer", response_deserializer=pb.ModelInferResponse.FromString)
        assert_right(call(long_request(LONG_US).SerializeToString(), timeout=TIMEOUT_S))
    served.await_rest()
