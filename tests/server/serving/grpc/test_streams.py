"""ModelStreamInfer against a front end whose scheduler does what the test says."""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from gangway.executor.messages import Submit
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import RequestError
from gangway.server.messages import ModelRemoved
from gangway.server.options.endpoints import GrpcOptions
from gangway.server.serving.grpc.front_end import GrpcFrontEnd
from gangway.server.serving.grpc.stream_messages import sequence_of
from gangway.server.serving.grpc.streams import StreamedCall, StreamLimits, Streams
from gangway.server.serving.loop import ServingLoop
from gangway.server.serving.pending import Offload
from gangway.server.serving.protocol import Health, Methods, ServerMethods
from testing.raw_connection import RawConnection
from testing.waiting import until
from tests.helpers.raw_stream import RawStream, simple_request

WAIT_S = 10
MANY = 48  # images: more than connections keep


@pytest.fixture
def stream(server: Any) -> Iterator[RawStream]:
    with RawStream(server.url) as opened:
        yield opened
    await_true(lambda: server.front_end.streams.idle)


def await_true(condition: Callable[[], object]) -> None:
    until(condition, timeout_s=WAIT_S)


class FunctionModel:
    """Answers requests by a function, each in a thread of its own."""

    def __init__(self, serving: ServingLoop, infer: Any) -> None:
        self._serving = serving
        self._infer = infer
        self.arrived = 0

    def order_of(self, header: bytes) -> str | None:
        self.arrived += 1
        return None

    def has_sequences(self, name: str) -> bool:
        return True

    def begin_message(self, message: bytes, call: Any) -> None:
        raise AssertionError("only streams are used")

    def arriving(self, begin: bytes, size_bytes: int) -> None:
        """No message is long."""

    def begin(self, header: bytes, request_id: bytes, raws: Any, call: Any, arrival_ns: int) -> None:
        def work() -> None:
            try:
                result = self._infer(header, request_id, raws, call, arrival_ns)
            except RequestError as error:
                result = error
            self._serving.call(call.answer, result)

        threading.Thread(target=work).start()


def front_end_of(serving: ServingLoop, model: FunctionModel, limits: StreamLimits) -> GrpcFrontEnd:
    """A server that has only this model."""
    streams = Streams(model.order_of, model.has_sequences, limits)
    methods = Methods({}, serving.loop, Offload(serving.aside, serving.call), lambda: None)
    return GrpcFrontEnd(serving, model, streams, methods, Health(ServerMethods()), GrpcOptions())


def held_by_rows(server: Any, count: int) -> dict[int, Submit]:
    """What the scheduler has got, by the number of rows: the order among requests of a stream is not defined."""
    held = [server.scheduler.held.get(timeout=WAIT_S) for _ in range(count)]
    return {server.scheduler.slots.request(submitted.slot).rows: submitted for submitted in held}


def image_request(identity: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="image", id=identity, raw_input_contents=[bytes(602112)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 3, 224, 224])
    return request


def test_answers_come_as_they_are_done(server: Any, stream: RawStream) -> None:
    server.scheduler.holding = True
    for rows in (1, 2, 3):
        stream.send(simple_request(f"{rows} rows", rows))
    held = held_by_rows(server, 3)
    for rows in (2, 3, 1):
        server.scheduler.answer(held[rows])
        assert stream.receive().infer_response.id == f"{rows} rows"


def test_answers_without_an_id_come_in_order(server: Any, stream: RawStream) -> None:
    server.scheduler.holding = True
    for rows in (1, 2, 3):
        stream.send(simple_request("" if rows < 3 else "third", rows))
    held = held_by_rows(server, 3)
    server.scheduler.answer(held[2])
    await_true(lambda: server.plane.usage().requests == 2)
    server.scheduler.answer(held[3])
    assert stream.receive().infer_response.id == "third"
    server.scheduler.answer(held[1])
    assert [list(stream.receive().infer_response.outputs[0].shape) for _ in range(2)] == [[1, 16], [2, 16]]


def test_answers_of_a_model_that_preserves_ordering_come_in_order(
    server: Any, stream: RawStream, announced: Any
) -> None:
    config = ModelConfig.FromString(announced.message.config)
    config.dynamic_batching.preserve_ordering = True
    encoded = config.SerializeToString()
    server.front_end.handle(replace(announced.message, name="ordered", config=encoded))
    server.scheduler.holding = True
    for rows in (1, 2, 3):
        stream.send(simple_request(f"{rows} rows", rows, "ordered" if rows < 3 else "simple"))
    held = held_by_rows(server, 3)
    server.scheduler.answer(held[2])
    await_true(lambda: server.plane.usage().requests == 2)
    server.scheduler.answer(held[3])
    assert stream.receive().infer_response.id == "3 rows"  # another model's overtake them
    server.scheduler.answer(held[1])
    assert [stream.receive().infer_response.id for _ in range(2)] == ["1 rows", "2 rows"]
    server.front_end.handle(ModelRemoved("ordered", 1))


def test_the_first_error_ends_a_stream_that_wants_a_status(server: Any) -> None:
    with RawStream(server.url, metadata=[("triton_grpc_error", "true")]) as stream:
        stream.send(simple_request("right"))
        assert stream.receive().infer_response.id == "right"
        stream.send(simple_request("wrong", model="nobody"))
        with pytest.raises(grpc.RpcError) as caught:
            stream.receive()
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "Request for unknown model: 'nobody' is not found"


def test_cancelling_a_stream_cancels_its_requests(server: Any, stream: RawStream) -> None:
    server.scheduler.holding = True
    for rows in (1, 2, 3):
        stream.send(simple_request(str(rows), rows))
    held = held_by_rows(server, 3)
    stream.call.cancel()
    cancelled = {server.scheduler.cancelled.get(timeout=WAIT_S).slot for _ in range(3)}
    assert cancelled == {submitted.slot for submitted in held.values()}


def test_the_deadline_of_a_stream(server: Any) -> None:
    server.scheduler.holding = True
    with RawConnection(server.url) as connection:
        stream = connection.call("ModelStreamInfer", simple_request().SerializeToString(), timeout_s=0.1)
        submitted = server.scheduler.held.get(timeout=WAIT_S)
        assert server.scheduler.cancelled.get(timeout=WAIT_S).slot == submitted.slot
        assert connection.answer(stream)[0]["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])


def test_a_request_s_own_timeout(server: Any, stream: RawStream) -> None:
    server.scheduler.holding = True
    request = simple_request()
    request.parameters["timeout"].int64_param = 5_000_000
    stream.send(request)
    submitted = server.scheduler.held.get(timeout=WAIT_S)
    seen = server.scheduler.slots.request(submitted.slot)
    assert seen.deadline_ns - seen.arrival_ns == 5e9
    assert 19e9 < seen.limit_ns - seen.arrival_ns < 20.1e9
    server.scheduler.answer(submitted)
    assert stream.receive().error_message == ""


def test_no_more_requests_are_read_than_may_be_under_way(server: Any, stream: RawStream) -> None:
    server.scheduler.holding = True
    limit = server.front_end.streams.limits.in_flight
    for number in range(limit + 2):
        stream.send(simple_request(str(number)))
    held = [server.scheduler.held.get(timeout=WAIT_S) for _ in range(limit)]
    assert server.client.is_server_live()
    assert server.plane.usage().requests == limit
    assert server.scheduler.held.empty()
    for submitted in held[:2]:
        server.scheduler.answer(submitted)
        held.append(server.scheduler.held.get(timeout=WAIT_S))
    for submitted in held[2:]:
        server.scheduler.answer(submitted)
    assert {stream.receive().infer_response.id for _ in range(limit + 2)} == set(map(str, range(limit + 2)))


def test_too_many_streams_are_refused_and_hold_nobody(server: Any, simple_inputs: Callable[..., Any]) -> None:
    limit = server.front_end.streams.limits.streams
    with ExitStack() as stack:
        streams = [stack.enter_context(RawStream(server.url)) for _ in range(limit)]
        for stream in streams:
            stream.send(simple_request())
            stream.receive()
        with RawStream(server.url) as further, pytest.raises(grpc.RpcError) as caught:
            further.receive()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == f"{limit} streams are open already"
        server.client.infer("simple", simple_inputs())
        streams[0].half_close()
        with pytest.raises(StopIteration):
            streams[0].receive()
        await_true(lambda: server.front_end.streams.count < limit)
        with RawStream(server.url) as another:
            another.send(simple_request("again"))
            assert another.receive().infer_response.id == "again"
    await_true(lambda: server.front_end.streams.idle)


def test_a_client_that_takes_no_answers_holds_nobody(
    server: Any, stream: RawStream, simple_inputs: Callable[..., Any]
) -> None:
    streams = server.front_end.streams
    for number in range(MANY):
        stream.send(image_request(str(number)))
    unsent = 602112 * (streams.limits.in_flight - 1)  # and perhaps the one that is being sent
    await_true(lambda: streams.unsent_bytes > unsent)
    await_true(lambda: server.plane.usage().requests == 0)
    server.client.infer("simple", simple_inputs())
    await_true(streams.end_stalled)
    with pytest.raises(grpc.RpcError) as caught:
        list(stream.call)
    assert caught.value.code() == grpc.StatusCode.CANCELLED


def test_too_many_unsent_answers_end_the_stream_that_has_most(server: Any, stream: RawStream) -> None:
    streams = server.front_end.streams
    for number in range(MANY):
        stream.send(image_request(str(number)))
    settled = 602112 * (streams.limits.in_flight - 1)  # the connection takes no more
    await_true(lambda: streams.unsent_bytes > settled)
    with RawStream(server.url) as modest:
        modest.send(image_request("modest"))
        await_true(streams.bound_unsent)
        with pytest.raises(grpc.RpcError):
            list(stream.call)
        assert modest.receive().infer_response.id == "modest"
        assert not streams.bound_unsent()


def test_requests_of_a_sequence_are_executed_one_after_the_other(serving: ServingLoop) -> None:
    """No model here keeps state, so the model is this function."""
    running: dict[object, int] = {}
    order: list[bytes] = []
    lock = threading.Lock()
    others = threading.Barrier(2)  # both sequences are executed at the same time

    def infer(header: bytes, identity: bytes, raws: list[memoryview], call: StreamedCall, arrival_ns: int) -> bytes:
        sequence = sequence_of(header)
        with lock:
            running[sequence] = running.get(sequence, 0) + 1
            assert running[sequence] == 1
            order.append(identity)
        others.wait(WAIT_S)
        with lock:
            running[sequence] -= 1
        if identity.endswith(b"1"):
            raise RequestError(StatusCode.INVALID_ARGUMENT, "not this one")
        return pb.ModelInferResponse(id=identity.decode()).SerializeToString()

    front_end = front_end_of(serving, FunctionModel(serving, infer), StreamLimits())
    address = front_end.bind("127.0.0.1:0")
    front_end.start()
    with RawStream(address) as stream:
        for number in range(5):
            for sequence in ("a", "b"):
                request = pb.ModelInferRequest(id=f"{sequence}{number}")
                request.parameters["sequence_id"].string_param = sequence
                stream.send(request)
        stream.half_close()
        answers = list(stream.call)
    front_end.stop(1)
    for sequence in ("a", "b"):
        expected = [f"{sequence}{number}" for number in range(5)]
        assert [identity.decode() for identity in order if identity.startswith(sequence.encode())] == expected
        mine = [answer for answer in answers if answer.infer_response.id.startswith(sequence)]
        assert [answer.infer_response.id for answer in mine] == expected
        assert [bool(answer.error_message) for answer in mine] == [False, True, False, False, False]


class FailingModel(FunctionModel):
    """Refuses every request at once, but for the first, which waits for `release`. `depths`: frames below each."""

    def __init__(self, serving: ServingLoop) -> None:
        super().__init__(serving, None)
        self.depths: list[int] = []
        self.release: Callable[[], None] = lambda: None

    def begin(self, header: bytes, request_id: bytes, raws: Any, call: Any, arrival_ns: int) -> None:
        self.depths.append(sum(1 for _ in traceback.walk_stack(None)))
        if len(self.depths) > 1:
            call.answer(RequestError(StatusCode.INVALID_ARGUMENT, "not this one"))
        else:
            self.release = partial(call.answer, RequestError(StatusCode.INVALID_ARGUMENT, "nor this one"))


def test_a_row_of_requests_of_a_sequence_that_fail_needs_no_deeper_stack(serving: ServingLoop) -> None:
    model, limits = FailingModel(serving), StreamLimits()
    front_end = front_end_of(serving, model, limits)
    address = front_end.bind("127.0.0.1:0")
    front_end.start()
    request = pb.ModelInferRequest()
    request.parameters["sequence_id"].int64_param = 7
    with RawStream(address) as stream:
        for number in range(limits.in_flight):
            request.id = str(number)
            stream.send(request)
        await_true(lambda: model.arrived == limits.in_flight)
        serving.call(model.release)
        answers = [stream.receive() for _ in range(limits.in_flight)]
    front_end.stop(1)
    assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(limits.in_flight)]
    assert [answer.error_message for answer in answers] == ["nor this one"] + ["not this one"] * (limits.in_flight - 1)
    assert max(model.depths[1:]) - min(model.depths[1:]) < 10


def test_responses_that_come_together_keep_their_order(serving: ServingLoop) -> None:
    """Many small ones, more than are sent at once, and some that are long, of two requests at the same time."""
    sizes = [3] * 3000 + [100_000, 3, 3, 500_000] + [3] * 100

    def infer(header: bytes, request_id: bytes, raws: Any, call: Any, arrival_ns: int) -> bytes:
        def respond(part: range) -> None:
            for number in part:
                text = str(number).encode()
                response = pb.ModelInferResponse(id=request_id.decode())
                response.raw_output_contents.extend((text, bytes(sizes[number])))
                call.respond(response.SerializeToString())

        for begin in range(0, len(sizes), 250):
            serving.call(respond, range(begin, min(begin + 250, len(sizes))))
        return pb.ModelInferResponse(id=request_id.decode()).SerializeToString()

    front_end = front_end_of(serving, FunctionModel(serving, infer), StreamLimits())
    address = front_end.bind("127.0.0.1:0")
    front_end.start()
    with RawStream(address) as opened:
        for identity in ("a", "b"):
            opened.send(pb.ModelInferRequest(model_name="many", id=identity))
        expected = {"a": 0, "b": 0}
        while any(number <= len(sizes) for number in expected.values()):
            answer = opened.receive().infer_response
            number = expected[answer.id]
            expected[answer.id] += 1
            is_last = number == len(sizes)
            assert answer.parameters["triton_final_response"].bool_param == is_last
            if not is_last:
                assert answer.raw_output_contents[0] == str(number).encode()
                assert len(answer.raw_output_contents[1]) == sizes[number]
    front_end.stop(1)
