"""The rest of a request to a Python model, if it cannot be executed in one go.

An instance keeps such a request (`python_backend/host.py`): its model waits for other models, it waits for the
instance, or it has any number of responses. The front end connects to the instance. It executes requests to other
models as if a client had sent them, within the request's deadline, has the scheduler find a core when the instance
can go on, and takes the responses. All of it happens on the loop's thread.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from gangway.base.logs import OFTEN
from gangway.executor.python_instance import PATIENCE_MS
from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.python_backend.messages import BACKGROUND, Message, PayloadTooLargeError
from gangway.server.errors import RequestError, fault, invalid, unavailable
from gangway.server.models.served import MOST_ANSWER_BYTES
from gangway.server.models.settings import Terms
from gangway.server.requests.data_plane import PoolExhaustedError, Scheduling, Submission
from gangway.server.requests.python_codec import (
    CODES,
    KeptRequest,
    PythonCodec,
    PythonResponse,
    Waiting,
    error_of,
    set_parameter,
    values_of,
)
from gangway.server.serving.call import Begin, Call
from gangway.server.serving.inference.held_instances import Key
from gangway.server.serving.inference.instance_connection import InstanceConnection
from gangway.server.serving.inference.model_run import (
    LIMIT_SLACK_NS,
    MAX_WAIT_NS,
    ModelRun,
    RequestClock,
    failure,
    no_room,
)
from gangway.server.serving.pending import Pending, drive
from gangway.server.serving.slots import Slots

_log = logging.getLogger(__name__)

FORGET_NS: Final = 600 * 10**9
NO_TERMS: Final = Terms(target_us=0, priority=0, rejects_late=False, max_queue=0)
MOST_WAITING_BYTES: Final = 1 << 30  # of responses that are not taken as fast as they come
MESSAGE_BYTES: Final = 512  # what a response takes besides its contents
LARGE_BYTES: Final = 1 << 20  # of tensors: what copies them would hold the loop for too long


class InnerCall(Call):
    """The call of a request that a Python model makes for a client's request: it ends with that, and has its clock.

    `chain`: the models that wait for it, outermost first. `answered` is called once with the result; `respond` with
    each response before it, if the model wants any number of them. `is_step`: it is a step of an ensemble. `run`: how
    it is executed, once it is.
    """

    run: ModelRun | None = None

    def __init__(
        self,
        clock: RequestClock,
        chain: tuple[str, ...],
        answered: Callable[["InnerCall", bytes | RequestError], None],
        respond: Callable[[bytes | RequestError], None] | None,
        is_step: bool = False,
    ) -> None:
        self.clock, self.chain, self.is_step = clock, chain, is_step
        self.takes_many = respond is not None
        self._answered, self._respond = answered, respond

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None without one."""
        return (self.clock.limit_ns - time.monotonic_ns()) / 1e9 if self.clock.limit_ns else None

    def invocation_metadata(self) -> tuple[()]:
        """Return none: traces do not follow requests into models."""
        return ()

    def answer(self, result: bytes | RequestError) -> None:
        """Give the model its response, or why there is none."""
        self._answered(self, result)
        self.end()

    def respond(self, response: bytes | RequestError) -> None:
        """Give the model a response that is not the last one, or an error in its place."""
        if self._respond is not None:
            self._respond(response)

    def require_other(self, names: Sequence[str]) -> None:
        """Raise RequestError if one of these models waits for the request: it would wait for itself."""
        for name in names:
            if name in self.chain:
                invalid(f"model '{name}' waits for this request, so it cannot execute it")


class InnerCalls:
    """Requests that a model makes to other models, over a connection of its instance. `chain`: who waits for them."""

    def __init__(self, slots: Slots, begin: Begin, chain: tuple[str, ...], connection: InstanceConnection) -> None:
        self._slots, self._begin, self._chain, self._connection = slots, begin, chain, connection
        self._calls: dict[int, InnerCall] = {}  # which the model waits for, by its numbers
        self._is_over = False

    @property
    def are_waited_for(self) -> bool:
        """Whether the model waits for any."""
        return bool(self._calls)

    def end(self) -> None:
        """End all of them: nobody waits any more."""
        self._is_over = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end()

    def cancel(self, number: int) -> None:
        """End one, which the model wants no more."""
        if (call := self._calls.pop(number, None)) is not None:
            call.end()

    def begin(self, message: Message, clock: RequestClock, fail: Callable[[RequestError], None]) -> None:
        """Execute a request, and send the instance its responses. `fail`: the time of its client is over."""
        number = message.header["infer"]
        unsent: deque[_Result] = deque()

        def send(response: bytes | RequestError, is_final: bool) -> None:
            unsent.append(_Result(response, is_final))
            if len(unsent) == 1:
                drive(self._send_results(number, unsent))

        def answered(call: InnerCall, result: bytes | RequestError) -> None:
            if self._calls.pop(number, None) is None:
                return  # the model does not want it any more
            left_s = call.time_remaining()
            if isinstance(result, RequestError) and left_s is not None and left_s < LIMIT_SLACK_NS / 1e9:
                fail(result)  # no answer of the model's, but of this client's time
            else:
                send(result, is_final=True)

        def respond(response: bytes | RequestError) -> None:
            send(response, is_final=False)

        call = InnerCall(clock, self._chain, answered, respond if message.header["stream"] else None)
        self._calls[number] = call
        try:
            request = _request_of(message)
        except RequestError as error:
            call.answer(error)
            return
        self._begin(*request, call, time.monotonic_ns())

    async def _send_results(self, number: int, unsent: deque["_Result"]) -> None:
        """Send the instance responses, in their order; an empty one says that there is no other."""
        while unsent:
            response, is_final = unsent[0]
            header: dict[str, Any] = {"result": number, "final": is_final}
            contents: list[bytes] = []
            if isinstance(response, RequestError):
                header["error"] = CODES.get(response.code, "INTERNAL"), response.message
            else:
                parsed = await parsed_response(self._slots, response)
                contents = list(parsed.raw_output_contents)
                header["outputs"] = [
                    (output.name, output.datatype, list(output.shape), len(content))
                    for output, content in zip(parsed.outputs, contents, strict=True)
                ]
                header["parameters"] = values_of(parsed.parameters)
            if not self._is_over:
                self._connection.send(header, contents)
            unsent.popleft()


class AttendedInstance:
    """An instance whose model makes requests while it has none itself. `lost` is called when its process has ended."""

    def __init__(self, slots: Slots, address: str, begin: Begin, lost: Callable[[], object]) -> None:
        """Begin to connect. Raises OSError."""
        self._lost = lost
        connection = InstanceConnection(slots.serving, address, MOST_ANSWER_BYTES, self._received, self._end)
        self._calls = InnerCalls(slots, begin, (), connection)
        connection.send({"attach": BACKGROUND, "request": 0})

    def _received(self, message: Message) -> None:
        if "infer" in message.header:
            self._calls.begin(message, RequestClock.without_client(), fail=lambda error: None)
        elif "cancel" in message.header:
            self._calls.cancel(message.header["cancel"])

    def _end(self, error: Exception) -> None:
        self._calls.end()
        self._lost()


@dataclass(frozen=True)
class GivesCore:
    """Has a core given to an execution that an instance has kept, with deadline and priority of its request."""

    slots: Slots
    codec: PythonCodec
    kept: KeptRequest
    clock: RequestClock
    terms: Terms

    @property
    def urgency(self) -> tuple[int, int]:
        """Its priority, then its deadline; that of the first one is less."""
        return self.terms.priority, self.clock.deadline_ns or self.clock.arrival_ns + MAX_WAIT_NS

    @property
    def _key(self) -> Key:
        return self.kept.address, self.kept.execution

    def hold(self, who: object) -> None:
        """Somebody sees to its end: until then its instance is taken, unless its model takes any number of requests."""
        if not self.codec.model.is_decoupled:
            self.slots.held.hold(self.codec.model.model_id, self._key, who)

    def drop(self, who: object) -> None:
        """He sees to it no more. Calling it again does nothing."""
        self.slots.held.drop(self.codec.model.model_id, self._key, who)

    def unwanted(self) -> "GivesCore":
        """Return the same for nobody: an execution that has begun goes on until its end."""
        return replace(self, clock=RequestClock.without_client())

    async def give_core(self, patience_ms: int = PATIENCE_MS) -> Sequence[int]:
        """Have a worker give it a core until it has computed little for so long; return when that has ended.

        It has the core by turns if it computes for long: others that wait have theirs in between.
        Returns the instance's processes if it waits, else none. Raises RequestError.
        """
        clock, given, has_had_turn = self.clock, Waiting(goes_on=True), self.kept.goes_on
        while given.goes_on:
            if has_had_turn:
                clock = clock._replace(arrival_ns=time.monotonic_ns())
            given, has_had_turn = await self._give_core(clock, patience_ms), True
        return given.pids

    async def _give_core(self, clock: RequestClock, patience_ms: int) -> Waiting:
        slots, codec = self.slots, self.codec
        contents = codec.resume_contents(self.kept, patience_ms)
        with slots.open(codec.layout(contents), 1) as submission:
            codec.write(submission, contents)
            ended = slots.expect(submission.slot, clock.end_ns)
            try:
                scheduling = Scheduling(clock.deadline_ns, self.terms.priority, clock.arrival_ns, clock.limit_ns)
                submission.submit(scheduling, by_bell=True, goes_on=True)
            except PoolExhaustedError as error:
                slots.forget(submission.slot)
                raise no_room(error) from error
            if not await ended:
                raise failure(codec.model.name, clock.status_at_end, 0)
            outcome = submission.outcome()
            if outcome.status is not SlotStatus.OK:
                status = clock.status_of(outcome.status, time.monotonic_ns())
                raise failure(codec.model.name, status, 0, outcome.reason)
            return codec.waiting(submission.outputs[0])


@dataclass(frozen=True)
class Origin:
    """For whom a model makes requests to others: `begin` executes them, within `clock`, and `chain` waits for them."""

    clock: RequestClock
    begin: Begin
    chain: tuple[str, ...]


class KeptRun:
    """One request that an instance has kept. Its maker calls `cancel`.

    `refused_ns`: it is refused if it has not begun by then; 0: it waits as long as it takes.
    """

    def __init__(
        self, slots: Slots, codec: PythonCodec, kept: KeptRequest, origin: Origin, terms: Terms, refused_ns: int
    ) -> None:
        """Begin to take the responses. Raises RequestError."""
        self._slots, self._codec, self._kept = slots, codec, kept
        self._clock = clock = origin.clock
        self._core = GivesCore(slots, codec, kept, clock, terms)
        self._responses: deque[Message] = deque()
        self._waiting_bytes = 0  # of these
        self._error: RequestError | None = None  # instead of further responses
        self._waiting: Pending[None] | None = None  # for a response, or an error
        self._is_over = self._has_final = self._is_given = False
        self._begun_ns = 0  # of an execution that has waited for the instance
        serving, most_bytes = slots.serving, codec.model.most_answer_bytes
        try:
            self._connection = slots.connections.take(kept.address, most_bytes, self._received, self._lost)
        except OSError as error:
            unavailable(f"the server has no descriptor for this request: {error.strerror}")
        self._calls = InnerCalls(slots, origin.begin, (*origin.chain, codec.model.name), self._connection)
        rest_ns = max(0, clock.end_ns - time.monotonic_ns())
        self._timers = [serving.loop.call_later(rest_ns / 1e9, self._expire)]
        if refused_ns and not kept.is_begun:
            wait_ns = max(0, refused_ns - time.monotonic_ns())
            self._timers.append(serving.loop.call_later(wait_ns / 1e9, self._end_wait))
        self._connection.send({"attach": kept.execution, "request": kept.request})
        if not codec.model.is_decoupled:
            self._core.hold(self)
        if kept.pids:
            self._watch()

    async def next(self) -> PythonResponse:
        """Return the next response. Raises RequestError, also for a last response that is an error."""
        while not self._responses:
            if self._error is not None:
                raise self._error.without_traceback()
            self._waiting = Pending()
            await self._waiting
        message = self._responses.popleft()
        self._waiting_bytes -= len(message.payload) + MESSAGE_BYTES
        header = message.header
        error, is_final = header.get("error"), bool(header["final"])
        if error and is_final:
            raise error_of(*error)
        described = header.get("outputs", ())
        outputs = self._codec.outputs_in(described, message.payload)
        if not self._codec.model.is_decoupled:
            self._codec.expect(described)
        failed = error_of(*error) if error else None
        return PythonResponse(outputs, header.get("parameters", {}), is_final, "outputs" not in header, failed)

    def outcome_of(self, outcome: SlotOutcome) -> SlotOutcome:
        """Return that of the whole execution, up to this moment. `outcome`: of the run after which it was kept.

        What the model waits for is its time, as Triton counts it. What it waits for the instance is no time of its.
        """
        arrival_ns = self._clock.arrival_ns
        queue_us = (self._begun_ns - arrival_ns) / 1e3 if self._begun_ns else outcome.queue_us
        compute_us = (time.monotonic_ns() - arrival_ns) / 1e3 - queue_us
        return outcome._replace(queue_us=queue_us, compute_us=compute_us)

    def cancel(self) -> None:
        """Want no further responses, and end what is executed for the request. Repeatedly."""
        if self._is_over:
            return
        self._is_over = True
        self._slots.waiting.leave(self._kept, self, self._has_final)
        self._core.drop(self)
        for timer in self._timers:
            timer.cancel()
        if self._has_final and self._error is None and not self._calls.are_waited_for:
            self._is_given = True
            self._calls.end()
            self._slots.connections.give(self._kept.address, self._connection)
            return
        self._connection.close()  # first: other clients of the execution may go on with what is cancelled here
        self._calls.end()
        self._fail(failure(self._codec.model.name, SlotStatus.CANCELLED, 0))

    def _fail(self, error: RequestError) -> None:
        """Have this error, unless there is another one already, in place of further responses."""
        self._error = self._error or error
        if not self._is_given:
            self._connection.close()
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.settle(None)

    def _expire(self) -> None:
        self._fail(failure(self._codec.model.name, self._clock.status_at_end, 0))

    def _end_wait(self) -> None:
        if not self._begun_ns:
            self._fail(failure(self._codec.model.name, SlotStatus.LATE, 0))

    def _lost(self, error: Exception) -> None:
        if isinstance(error, PayloadTooLargeError):
            self._fail(self._codec.too_large(error.size_bytes))
            return
        message = (
            f"an instance of model '{self._codec.model.name}' was lost: its process has ended; it is started again"
        )
        self._fail(RequestError(StatusCode.UNAVAILABLE, message))

    def _received(self, message: Message) -> None:
        if "grant" in message.header:
            drive(self._resume())
        elif "begun" in message.header:
            if not (self._kept.is_begun or self._begun_ns):
                self._begun_ns = time.monotonic_ns()
        elif "hello" in message.header:
            self._slots.waiting.leave_out(self._kept, message.header["idle"])
        elif "infer" in message.header:
            self._calls.begin(message, self._clock, self._fail)
        elif "cancel" in message.header:
            self._calls.cancel(message.header["cancel"])
        elif "final" in message.header:
            self._responses.append(message)
            self._has_final = self._has_final or bool(message.header["final"])
            self._waiting_bytes += len(message.payload) + MESSAGE_BYTES
            if self._waiting_bytes > MOST_WAITING_BYTES:
                name = self._codec.model.name
                text = f"model '{name}' sends responses faster than they are taken: {MOST_WAITING_BYTES} bytes wait"
                self._fail(RequestError(StatusCode.RESOURCE_EXHAUSTED, text))
            if len(self._responses) == 1:
                self._slots.serving.turn.at_end(self._wake)  # with all that have come together

    async def _resume(self) -> None:
        self._slots.waiting.forget(self._kept)
        try:
            pids = await self._core.give_core()
        except RequestError as error:
            self._fail(error)
        except Exception:
            _log.exception("a Python model could not go on: a fault of the server", extra=OFTEN)
            self._fail(fault())
        else:
            if pids:
                self._kept = self._kept._replace(pids=pids, goes_on=False)
                self._core = replace(self._core, kept=self._kept)
                self._watch()

    def _watch(self) -> None:
        """Have the execution, which waits without a core, go on when it computes; also if nobody waits for it."""
        if self._is_over:
            self._slots.waiting.watch(self._core)
        else:
            self._slots.waiting.watch(self._core, self, self._fail)
            self._slots.waiting.leave_out(self._kept, self._connection.hello.get("idle", ()))


async def parsed_response(slots: Slots, response: bytes) -> pb.ModelInferResponse:
    """Return a serialised response, parsed: a long one aside of the loop."""
    parse = pb.ModelInferResponse.FromString
    return await slots.aside.run(parse, response) if len(response) > LARGE_BYTES else parse(response)


class _Result(NamedTuple):
    """A response of another model, or why there is none."""

    response: bytes | RequestError
    is_final: bool


async def forget_kept(slots: Slots, codec: PythonCodec, submission: Submission) -> None:
    """Have the instance forget a request that nobody wants any more, when the worker has given it up."""
    ended = slots.expect(submission.slot, time.monotonic_ns() + FORGET_NS)
    submission.cancel()
    if await ended:
        tell_gone(slots, codec, submission)
    submission.close()


def tell_gone(slots: Slots, codec: PythonCodec, submission: Submission) -> None:
    """Tell the instance that has kept a request, if one has, that nobody wants it."""
    with suppress(RequestError, OSError, ValueError):
        found = codec.read(submission.outputs[0])
        if isinstance(found, KeptRequest):
            if found.pids:
                slots.waiting.watch(GivesCore(slots, codec, found, RequestClock.without_client(), NO_TERMS))
            instance = InstanceConnection(slots.serving, found.address, 0, lambda message: None, lambda error: None)
            instance.send({"attach": found.execution, "request": found.request})
            instance.finish()


def _request_of(message: Message) -> tuple[bytes, bytes, list[memoryview]]:
    """Return a model's request as a client's: header, id, contents. Raises RequestError."""
    asked = message.header
    raws = []
    ends = itertools.accumulate(size for _, _, _, size in asked["inputs"])
    for (_, _, _, size), end in zip(asked["inputs"], ends, strict=True):
        raws.append(message.payload[end - size : end])
    try:
        return header_of(asked), str(asked["id"]).encode(), raws
    except ValueError as error:
        raise RequestError(StatusCode.INVALID_ARGUMENT, f"a request to another model cannot be sent: {error}") from None


def header_of(asked: Mapping[str, Any]) -> bytes:
    """Return the header of a request. Raises ValueError for what the protocol cannot have."""
    request = pb.ModelInferRequest(model_name=asked["model"])
    if asked["version"] >= 0:
        request.model_version = str(asked["version"])
    for name, datatype, shape, _ in asked["inputs"]:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
    for name in asked["wanted"]:
        request.outputs.add(name=name)
    for key, value in asked["parameters"].items():
        set_parameter(request.parameters[key], value)
    if asked["correlation_id"]:
        set_parameter(request.parameters["sequence_id"], asked["correlation_id"])
        for bit, name in ((1, "sequence_start"), (2, "sequence_end")):
            request.parameters[name].bool_param = bool(asked["flags"] & bit)
    for key in ("timeout", "priority"):
        if asked[key]:
            request.parameters[key].int64_param = asked[key]
    return request.SerializeToString()
