"""Requests that have no thread: the second one of a form, and all that follow."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from gangway.executor.slots import SlotStatus
from gangway.server.serving.inference import model_run
from gangway.server.serving.inference.request import ClientRequest
from gangway.server.serving.slots import DeferredWork
from gangway.server.tracing.settings import TraceOverrides
from testing.raw_connection import RawConnection
from testing.waiting import until
from tests.helpers.client_segments import A, B, Segments, inputs_in, outputs_in, values_in
from tests.helpers.raw_stream import simple_request

Inputs = Callable[..., list[triton.InferInput]]
EXPECTED_SUM = np.arange(16, dtype=np.int32) + 1
STALLED = 40


def success_count(server: Any) -> int:
    return int(server.client.get_inference_statistics("simple").model_stats[0].inference_stats.success.count)


@pytest.fixture
def known(server: Any, simple_inputs: Inputs) -> Any:
    """The server, which has seen the form of the requests."""
    server.client.infer("simple", simple_inputs())
    return server


def test_answers_of_many_clients(known: Any, simple_inputs: Inputs) -> None:
    def ask(number: int) -> tuple[str, Any]:
        result = known.client.infer("simple", simple_inputs(), request_id=str(number))
        return result.get_response().id, result.as_numpy("OUTPUT0")

    counted = success_count(known)
    with known.without_threads(), ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, range(200)))
    assert [number for number, _ in answers] == [str(number) for number in range(200)]
    assert all(np.array_equal(total, [EXPECTED_SUM]) for _, total in answers)
    assert success_count(known) == counted + 200


def test_tensors_in_regions(known: Any, segments: Segments) -> None:
    shm.set_shared_memory_region(segments.create("in"), [A, B])
    out = segments.create("out")
    known.client.infer("simple", inputs_in("in"), outputs=outputs_in("out"))
    with known.without_threads():
        for first in (B, A):
            shm.set_shared_memory_region(segments.handles["in"], [first, B])
            known.client.infer("simple", inputs_in("in"), outputs=outputs_in("out"))
            np.testing.assert_array_equal(values_in(out), [first + B])
    known.client.unregister_system_shared_memory("out")
    assert not segments.is_open("out")  # no request holds it
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'out'"):
        known.client.infer("simple", inputs_in("in"), outputs=outputs_in("out"))


@pytest.mark.parametrize("level", ["TIMESTAMPS", "TENSORS"])
def test_traces_cost_no_threads(known: Any, simple_inputs: Inputs, level: str) -> None:
    tracer = known.front_end.tracer
    tracer.override(TraceOverrides("", (level,), rate=2))
    with known.without_threads():
        for _ in range(3):
            known.client.infer("simple", simple_inputs())
    tracer.override(TraceOverrides("", ()))


def test_answers_come_as_requests_end(known: Any, simple_inputs: Inputs) -> None:
    known.scheduler.holding = True
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    held = []
    for number in range(3):
        known.client.async_infer(
            "simple",
            simple_inputs(),
            callback=lambda result, error: answers.put(error or result.get_response().id),
            request_id=str(number),
        )
        held.append(known.scheduler.held.get(timeout=10))
    for number in (2, 0, 1):
        known.scheduler.answer(held[number])
        assert answers.get(timeout=10) == str(number)


def test_a_client_that_goes_frees_its_request(known: Any, simple_inputs: Inputs) -> None:
    known.scheduler.holding = True
    with RawConnection(known.url) as connection:
        connection.call("ModelInfer", simple_request().SerializeToString(), timeout_s=0.05)
        submitted = known.scheduler.held.get(timeout=10)
        assert known.scheduler.cancelled.get(timeout=10).slot == submitted.slot
    errors: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call = known.client.async_infer("simple", simple_inputs(), callback=lambda result, error: errors.put(error))
    submitted = known.scheduler.held.get(timeout=10)
    call.cancel()
    assert known.scheduler.cancelled.get(timeout=10).slot == submitted.slot
    assert errors.get(timeout=10).status() == "StatusCode.CANCELLED"


def test_a_refusal_is_told(known: Any, simple_inputs: Inputs) -> None:
    known.scheduler.status = SlotStatus.LATE
    with pytest.raises(InferenceServerException, match="Request timeout expired for model 'simple'") as caught:
        known.client.infer("simple", simple_inputs())
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    wrong = triton.InferInput("INPUT0", [1, 16], "INT32")
    wrong.set_data_from_numpy(np.zeros((1, 16), np.int32))
    with pytest.raises(InferenceServerException, match="expected 2 inputs but got 1"):
        known.client.infer("simple", [wrong])


def test_waiting_ends_if_nobody_answers(known: Any, simple_inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_run, "MAX_WAIT_NS", 50_000_000)
    known.scheduler.holding = True
    with pytest.raises(InferenceServerException, match="could not be executed now") as caught:
        known.client.infer("simple", simple_inputs())
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    submitted = known.scheduler.held.get(timeout=10)
    assert known.scheduler.cancelled.get(timeout=10).slot == submitted.slot


def test_health_needs_no_thread(server: Any) -> None:
    with server.without_threads():
        ask_for_health(server)


def ask_for_health(server: Any) -> None:
    assert server.client.is_server_live() and server.client.is_server_ready() and server.client.is_model_ready("simple")
    assert not server.client.is_model_ready("nobody")
    with pytest.raises(InferenceServerException, match="version"):
        server.client.is_model_ready("simple", "x")
    with RawConnection(server.url) as connection:
        stream = connection.begin("/grpc.health.v1.Health/Check")
        connection.send(stream, b"\0\0\0\0\0", end=True)
        assert connection.answer(stream)[1].endswith(b"\x08\x01")  # SERVING
        stream = connection.begin("ServerLive")
        connection.send(stream, b"\0\0\0\0\1\xff", end=True)
        assert "not a ServerLiveRequest" in connection.answer(stream)[0]["grpc-message"]


def test_calls_whose_message_does_not_come_hold_no_thread(known: Any, simple_inputs: Inputs) -> None:
    with RawConnection(known.url) as connection, known.without_threads():
        for _ in range(STALLED):
            connection.send(connection.begin("ModelInfer"), b"\0\0\0\1")
        known.client.infer("simple", simple_inputs())
    until(lambda: not known.front_end.server.arriving_calls)  # once it hears that the connection is gone


def test_statistics_wait_for_answers_that_are_not_counted(
    known: Any, simple_inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, begun, may_count = success_count(known), threading.Event(), threading.Event()
    conclude = ClientRequest.conclude

    def late(self: ClientRequest, *answer: Any) -> None:
        begun.set()
        assert may_count.wait(20)
        conclude(self, *answer)

    def ask() -> int:
        statistics = known.front_end.models.find("simple", "").statistics
        return int(statistics.message("simple", 1, 0).inference_stats.success.count)

    monkeypatch.setattr(ClientRequest, "conclude", late)
    with ThreadPoolExecutor(2) as threads:
        answered = threads.submit(known.client.infer, "simple", simple_inputs())
        assert begun.wait(20)
        asked = threads.submit(ask)
        may_count.set()
        assert asked.result(20) == counted + 1
        assert answered.result(20)


def test_nobody_passes_what_is_left_of_an_answer() -> None:
    work, seen = DeferredWork(), []
    begun, may_end = threading.Event(), threading.Event()

    def rest() -> None:
        begun.set()
        assert may_end.wait(20)
        seen.append("counted")

    def look() -> None:
        work.do()
        seen.append("looked")

    work.add(rest)
    threads = [threading.Thread(target=target) for target in (work.do, look)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert seen == ["counted", "looked"]


def test_nothing_is_left_where_other_front_ends_count() -> None:
    seen: list[str] = []
    DeferredWork().add(lambda: seen.append("alone"))
    DeferredWork(at_once=True).add(lambda: seen.append("others count"))
    DeferredWork().add(lambda: seen.append("a region"), at_once=True)
    assert seen == ["others count", "a region"]


def test_a_fault_in_what_is_left_of_an_answer_spares_the_others() -> None:
    work, seen = DeferredWork(), []
    work.add(lambda: seen.append(1 // len(seen)))
    work.add(lambda: seen.append(2))
    work.do()
    assert seen == [2]
