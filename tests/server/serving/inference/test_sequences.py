"""Turns and states of sequences, over real shared memory; the tests stand for scheduler and workers."""

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import text_format

from gangway.artifact.format import Engine, TensorSpec
from gangway.executor.slots import SlotStatus
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository.completed_config import complete_config
from gangway.server.errors import RequestError
from gangway.server.messages import ModelReady
from gangway.server.models.served import Models
from gangway.server.requests.data_plane import NO_EXTERNAL, DataPlane, Submission, Usage
from gangway.server.requests.validation import RequestPlan, make_plan
from gangway.server.serving.inference.sequences import Sequences
from gangway.server.serving.loop import ServingLoop
from gangway.server.serving.pending import result_of
from tests.server.requests.test_data_plane import Bench

STATE = 'state { input_name: "sum_in" output_name: "sum_out" data_type: TYPE_INT32 dims: [1] }'
NUMBER = {"datatype": "INT32", "shape": (-1, 1), "row_bytes": 4}
INPUTS = (TensorSpec("x", **NUMBER), TensorSpec("sum_in", **NUMBER))
OUTPUTS = (TensorSpec("y", **NUMBER), TensorSpec("sum_out", **NUMBER))
TIMEOUT_S = 20


def announced(more: str = "", slots: int = 1, idle_us: int = 10**9, engine: Engine = Engine.NATIVE) -> ModelReady:
    """A model that adds up, with so many slots."""
    batching = f"oldest {{ max_candidate_sequences: {slots} }} max_sequence_idle_microseconds: {idle_us} {STATE}"
    text = f"max_batch_size: 4 instance_group {{ count: 1 }} sequence_batching {{ {batching} }} {more}"
    config = complete_config(text_format.Parse(text, ModelConfig()), "sums", INPUTS, OUTPUTS, batched=True)
    encoded = config.SerializeToString()
    return ModelReady(0, "sums", 1, encoded, INPUTS, OUTPUTS, 4, 4, batched=True, engine=engine)


class Caller:
    """A remote call that a test can end."""

    front_end = "GRPC"

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.remaining_s: float | None = None

    def invocation_metadata(self) -> None:
        return None

    def answer(self, result: bytes | RequestError) -> None:
        raise AssertionError("the test answers")

    def time_remaining(self) -> float | None:
        return self.remaining_s

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return True

    def end(self) -> None:
        for callback in self.callbacks:
            on_loop(callback)


class Front:
    """Sequences of one model, and requests for them."""

    serving: ServingLoop

    def __init__(self, message: ModelReady, heap_bytes: int = 64 * 1024) -> None:
        self.bench = Bench(heap_bytes)
        self.plane: DataPlane = self.bench.plane
        self.sequences = Sequences(self.plane, self.serving)
        self.serve(message)

    def serve(self, message: ModelReady) -> None:
        self.models = Models().updated(message)
        self.sequences.keep({model.load for model in self.models.served()})
        on_loop(lambda: None)  # it has done so

    def plan(self, identity: int | str, start: bool = False, end: bool = False, timeout_us: int = 0) -> RequestPlan:
        request = pb.ModelInferRequest(model_name="sums")
        request.inputs.add(name="x", datatype="INT32", shape=[1, 1])
        kind = "int64_param" if isinstance(identity, int) else "string_param"
        setattr(request.parameters["sequence_id"], kind, identity)
        request.parameters["sequence_start"].bool_param = start
        request.parameters["sequence_end"].bool_param = end
        request.parameters["timeout"].int64_param = timeout_us
        return make_plan(self.models, request.SerializeToString(), has_raws=True)

    @contextmanager
    def turn(self, identity: int | str, start: bool = False, end: bool = False, timeout_us: int = 0) -> Iterator[Any]:
        plan = self.plan(identity, start, end, timeout_us)
        with self.turn_of(plan, Caller()) as own:
            yield own

    @contextmanager
    def turn_of(self, plan: RequestPlan, caller: Caller) -> Iterator[Any]:
        turn = result_of(self.serving, self.sequences.turn(plan, caller, time.monotonic_ns()))
        try:
            yield turn.plan
        finally:
            on_loop(turn.leave)

    @contextmanager
    def opened(self, plan: RequestPlan, value: int) -> Iterator[Submission]:
        contents = [struct.pack("<i", value)]
        states = plan.codec.states
        external = NO_EXTERNAL if states is None else states.tensors()
        with self.plane.open(plan.codec.layout(contents), 1, external) as request:
            plan.codec.write(request, contents)
            yield request

    def add(self, identity: int | str, value: int, start: bool = False, end: bool = False) -> int:
        """Execute a request as a worker would."""
        with self.turn(identity, start, end) as plan, self.opened(plan, value) as request:
            compute(request)
            response = plan.codec.answer(b"", request)
            assert response is not None
            return number(pb.ModelInferResponse.FromString(response).raw_output_contents[0])

    def state_of(self, identity: int | str) -> int:
        """Look at the state that a sequence's next request would get."""
        with self.turn(identity) as plan, self.opened(plan, 0) as request:
            return number(request.inputs[1])


def on_loop(function: Callable[[], None]) -> None:
    """Have the loop call it; return when it has."""

    async def call() -> None:
        function()

    result_of(Front.serving, call())


@pytest.fixture(scope="module", autouse=True)
def serving() -> Iterator[None]:
    Front.serving = ServingLoop()
    Front.serving.start()
    yield
    Front.serving.stop()


def number(content: bytes | memoryview) -> int:
    return int(struct.unpack("<i", content)[0])


def compute(request: Submission) -> None:
    total = struct.pack("<i", number(request.inputs[0]) + number(request.inputs[1]))
    request.outputs[0][:] = request.outputs[1][:] = total


@pytest.fixture
def front() -> Front:
    return Front(announced())


def test_state_goes_from_request_to_request(front: Front) -> None:
    assert [front.add(5, value, start=value == 1, end=value == 4) for value in range(1, 5)] == [1, 3, 6, 10]
    assert front.add(5, 7, start=True) == 7
    assert front.add(5, 1, start=True) == 1  # anew, though it has not ended
    assert front.add(5, 1, end=True) == 2
    assert front.sequences.state_bytes == front.sequences.open == 0
    assert front.plane.usage() == Usage(0, 0)


def test_two_buffers_take_turns(front: Front) -> None:
    places = set()
    for value in range(4):
        with front.turn("a", start=not value) as plan, front.opened(plan, value) as request:
            request.submit()
            message = front.bench.start()
            seen = front.bench.slots.request(message.slot)
            places.add((seen.input_offsets[1], seen.output_offsets[1]))
            assert not (seen.input_offsets[1] | seen.output_offsets[1]) % 64
            compute(request)
            front.bench.finish(message)
            plan.codec.answer(b"", request)
    (first, second) = places
    assert first == second[::-1]
    assert front.plane.usage().requests == 0 and front.plane.usage().heap_bytes == front.sequences.state_bytes > 0


def test_a_request_that_fails_changes_nothing(front: Front) -> None:
    front.add(5, 3, start=True)
    with pytest.raises(ZeroDivisionError), front.turn(5) as plan, front.opened(plan, 4) as request:
        compute(request)
        _ = 1 // 0
    assert front.state_of(5) == 3
    assert front.add(5, 1, end=True) == 4


def test_a_buffer_that_may_still_be_written_is_not_used(front: Front) -> None:
    """The client has gone while ranks compute: the request is closed, but not finished."""
    front.add(5, 3, start=True)
    with front.turn(5) as plan, front.opened(plan, 4) as request:
        request.submit()
        message = front.bench.start()
        abandoned = front.bench.slots.request(message.slot).output_offsets[1]
    with front.turn(5) as plan, front.opened(plan, 10) as request:
        front.bench.io.view[abandoned : abandoned + 4] = b"\xff" * 4  # a rank writes late
        compute(request)
        plan.codec.answer(b"", request)
    assert front.add(5, 1, end=True) == 14
    assert front.sequences.state_bytes == 0 and front.plane.usage().requests == 1
    front.bench.finish(message, SlotStatus.CANCELLED)
    assert front.plane.usage() == Usage(0, 0)


@pytest.mark.parametrize("engine", [Engine.NATIVE, Engine.ONNXRUNTIME])
def test_states_have_bounded_memory(engine: Engine) -> None:
    front = Front(announced(slots=10_000, engine=engine), heap_bytes=64 * 1024)
    begun = 0
    with pytest.raises(RequestError) as caught:
        while begun < 10_000:
            begun += 1
            with front.turn(begun, start=True) as plan:
                plan.codec.states.tensors()
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert "the states of sequences may have 16384 bytes in all" in caught.value.message
    assert front.sequences.state_bytes <= 16384
    front.serve(announced())
    assert front.sequences.state_bytes == front.sequences.open == 0


def test_many_sequences_leave_nothing() -> None:
    front = Front(announced(slots=3))
    for identity in range(1, 1_001):
        with front.turn(identity, start=True, end=True) as plan, front.opened(plan, 1):
            pass
    assert front.sequences.open == front.sequences.state_bytes == front.sequences.requests == 0
    assert front.plane.usage() == Usage(0, 0)


def refused(front: Front, identity: int | str, code: StatusCode, text: str, **more: int | bool) -> None:
    with pytest.raises(RequestError, match=text) as caught, front.turn(identity, **more):
        raise AssertionError("it may not be executed")
    assert caught.value.code is code


def test_what_is_no_sequence(front: Front) -> None:
    invalid = StatusCode.INVALID_ARGUMENT
    refused(
        front, 5, invalid, "inference request for sequence 5 to model 'sums' must specify the START flag on the first"
    )
    front.add(5, 1, start=True)
    refused(front, "5", invalid, "must specify the START flag")
    refused(front, 0, invalid, "must specify a non-zero or non-empty correlation ID")
    refused(front, "", invalid, "must specify a non-zero or non-empty correlation ID")
    front.serve(announced())
    refused(front, 5, invalid, "must specify the START flag")


def test_a_request_waits_for_a_slot_no_longer_than_it_says(front: Front) -> None:
    front.add(1, 1, start=True)
    text = "timeout of the corresponding sequence has been expired"
    refused(front, 2, StatusCode.UNAVAILABLE, text, start=True, timeout_us=1000)
    refused(front, 2, StatusCode.INVALID_ARGUMENT, "must specify the START flag")
    assert front.add(1, 1) == 2


def test_late_requests_are_refused_where_the_model_says_so() -> None:
    late = 'parameters { key: "late" value: { string_value: "reject" } }'
    front = Front(announced(late))
    with front.turn(1, start=True):
        refused(front, 1, StatusCode.UNAVAILABLE, "Request timeout expired", timeout_us=1000)


class Waiting:
    """A request in a thread of its own, which has to wait."""

    def __init__(self, front: Front, plan: RequestPlan) -> None:
        self.front = front
        self.caller = Caller()
        self.error: RequestError | None = None
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(plan,))
        waiting = front.sequences.requests
        self._thread.start()
        while self._thread.is_alive() and (front.sequences.requests == waiting or not self.caller.callbacks):
            time.sleep(0.0005)

    def _run(self, plan: RequestPlan) -> None:
        try:
            with self.front.turn_of(plan, self.caller):
                self.begun.set()
        except RequestError as error:
            self.error = error

    def result(self) -> tuple[bool, str]:
        """Return whether it was executed, and why not."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        return self.begun.is_set(), self.error.code.name if self.error else ""


def test_the_next_one_begins_when_a_slot_is_free(front: Front) -> None:
    front.add(1, 1, start=True)
    first = Waiting(front, front.plan(2, start=True))
    later = Waiting(front, front.plan(3, start=True))
    assert not (first.begun.is_set() or later.begun.is_set() or not front.sequences.requests)
    front.add(1, 1, end=True)
    assert first.result() == (True, "")
    assert not later.begun.is_set()
    front.add(2, 1, end=True)
    assert later.result() == (True, "")


def test_an_idle_sequence_makes_room_for_another() -> None:
    front = Front(announced(idle_us=20_000))
    front.add(1, 1, start=True)
    assert Waiting(front, front.plan(2, start=True)).result() == (True, "")


def test_a_client_that_goes_ends_its_sequence(front: Front) -> None:
    with front.turn(1, start=True):
        gone, behind = Waiting(front, front.plan(1)), Waiting(front, front.plan(1))
        gone.caller.end()
        assert gone.result() == (False, "CANCELLED") and behind.result() == (False, "CANCELLED")
        assert behind.error is not None and "an earlier request was cancelled" in behind.error.message
    refused(front, 1, StatusCode.INVALID_ARGUMENT, "must specify the START flag")
    assert front.sequences.open == 0 and front.sequences.state_bytes == 0


def test_a_deadline_while_a_request_waits(front: Front) -> None:
    front.add(1, 1, start=True)
    waiting = Waiting(front, front.plan(2, start=True))
    waiting.caller.remaining_s = 0.0
    waiting.caller.end()
    assert waiting.result() == (False, "DEADLINE_EXCEEDED")


def test_a_model_s_queue_is_bounded() -> None:
    front = Front(announced('parameters { key: "max_queue_size" value: { string_value: "1" } }'))
    front.add(1, 1, start=True)
    waiting = Waiting(front, front.plan(2, start=True))
    refused(front, 3, StatusCode.UNAVAILABLE, "Exceeds maximum queue size: 1 requests of", start=True)
    front.sequences.refuse("the server is stopping")
    assert waiting.result() == (False, "UNAVAILABLE")


def test_all_that_wait_are_bounded(front: Front) -> None:
    """A front end with four slots: two may wait."""
    front.add(1, 1, start=True)
    waiting = [Waiting(front, front.plan(identity, start=True)) for identity in (2, 3)]
    refused(front, 4, StatusCode.UNAVAILABLE, "Exceeds maximum queue size", start=True)
    front.serve(replace(announced(), model_id=1))  # the model is loaded anew
    assert [one.result() for one in waiting] == [(False, "UNAVAILABLE")] * 2
    assert waiting[0].error is not None and "has been replaced or unloaded" in waiting[0].error.message
