"""The rest of a request to a Python model, if it cannot be executed in one go.

An instance keeps such a request (`python_backend/host.py`): its model waits for other models, it waits for the
instance, or it has any number of responses. The front end connects to the instance. It executes requests to other
models as if a client had sent them, within the request's deadline, has the scheduler find a core when the instance
can go on, and takes the responses.
"""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from gangway.executor.slots import SlotStatus
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.python_backend.messages import Connection, Message, PayloadTooLargeError, is_same_user
from gangway.server.errors import RequestError, unavailable
from gangway.server.front_end.model_run import LIMIT_SLACK_NS, InnerCall, InnerStream, RequestClock, failure, no_room
from gangway.server.models.settings import Terms
from gangway.server.requests.codecs import MAX_ANSWER_BYTES
from gangway.server.requests.data_plane import DataPlane, PoolExhaustedError, Submission
from gangway.server.requests.python_codec import CODES, Left, Outputs, PythonCodec, error_of, set_parameter

CONNECT_TIMEOUT_S: Final = 30.0
FORGET_NS: Final = 600 * 10**9
Infer = Callable[[bytes, bytes, Sequence[memoryview], InnerCall | InnerStream], bytes]


def refuse_inner(header: bytes, request_id: bytes, raws: Sequence[memoryview], call: InnerCall | InnerStream) -> bytes:
    """Stand for `Infer` where requests are of no Python model."""
    raise RequestError(StatusCode.UNIMPLEMENTED, "a request of this kind makes no requests to other models")


class PythonResponse(NamedTuple):
    """One response. `is_final`: no other one follows; then it may have no outputs."""

    outputs: Outputs
    parameters: Mapping[str, Any]
    is_final: bool
    is_empty: bool


class LeftRun:
    """One request that an instance has kept. `infer` executes a request to another model.

    One thread takes the responses; any thread may call `cancel`. Raises RequestError where the instance is not there.
    """

    def __init__(
        self,
        plane: DataPlane,
        codec: PythonCodec,
        left: Left,
        clock: RequestClock,
        terms: Terms,
        infer: Infer,
        chain: tuple[str, ...],
    ) -> None:
        self._plane, self._codec, self._left = plane, codec, left
        self._clock, self._terms, self._infer = clock, terms, infer
        self._call = InnerCall(clock, (*chain, codec.model.name))
        self._error: RequestError | None = None
        try:
            self._socket = socket.socket(socket.AF_UNIX)
        except OSError as error:
            unavailable(f"the server has no descriptor for this request: {error.strerror}")
        self._connection = Connection(self._socket, MAX_ANSWER_BYTES)
        try:
            self._socket.settimeout(CONNECT_TIMEOUT_S)
            self._socket.connect(left.address)
            if not is_same_user(self._socket):
                raise OSError("another user's process has the address of an instance")
            self._connection.send({"attach": left.execution, "request": left.request})
        except OSError as error:
            self._connection.close()
            raise self._lost() from error

    def responses(self) -> Iterator[PythonResponse]:
        """Yield the responses as they come. Raises RequestError, also for a response that is an error."""
        try:
            while True:
                message = self._receive()
                header = message.header
                if message.descriptor >= 0:
                    os.close(message.descriptor)
                if "grant" in header:
                    self._start(self._resume)
                elif "infer" in header:
                    self._start(self._infer_other, message)
                elif "final" in header:
                    if header.get("error"):
                        raise error_of(*header["error"])
                    outputs = _outputs_of(header.get("outputs", ()), message.payload)
                    is_final, is_empty = bool(header["final"]), "outputs" not in header
                    yield PythonResponse(outputs, header.get("parameters", {}), is_final, is_empty)
                    if is_final:
                        return
        finally:
            self.cancel()

    def only(self) -> PythonResponse:
        """Return the response of a request that has exactly one. Raises RequestError."""
        return next(self.responses())

    def __enter__(self) -> "LeftRun":
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Want no further responses, and end what is executed for the request. From any thread, repeatedly."""
        self._connection.close()  # first: other clients of the execution may go on with what is cancelled here
        self._call.end()

    def _receive(self) -> Message:
        try:
            left_s = (self._clock.end_ns - time.monotonic_ns()) / 1e9
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            return self._connection.receive()
        except TimeoutError:
            raise failure(self._codec.model.name, self._clock.status_at_end, 0) from None
        except PayloadTooLargeError as error:
            raise self._codec.too_large(error.size_bytes) from error
        except (EOFError, OSError, ValueError) as error:
            raise self._error or self._lost() from error

    def _lost(self) -> RequestError:
        if self._call.is_over:
            return failure(self._codec.model.name, SlotStatus.CANCELLED, 0)
        message = f"an instance of model '{self._codec.model.name}' was lost; it is started again"
        return RequestError(StatusCode.UNAVAILABLE, message)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            threading.Thread(target=self._guarded, args=(work, *arguments), name="python", daemon=True).start()
        except RuntimeError:
            self._fail(RequestError(StatusCode.UNAVAILABLE, "no thread can be started"))

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except RequestError as error:
            self._fail(error)
        except OSError:
            pass  # the instance has gone, which the thread that receives finds

    def _fail(self, error: RequestError) -> None:
        self._error = self._error or error
        self._connection.close()

    def _resume(self) -> None:
        """Have a worker give the execution its core; return when that has ended."""
        contents, clock = self._codec.resume_contents(self._left), self._clock
        try:
            with self._plane.open(self._codec.layout(contents), 1) as submission:
                self._codec.write(submission, contents)
                submission.submit(
                    clock.deadline_ns,
                    self._terms.priority,
                    clock.arrival_ns,
                    clock.limit_ns,
                    alone=True,
                )
                outcome = submission.wait(clock.end_ns)
                if outcome is None:
                    raise failure(self._codec.model.name, clock.status_at_end, 0)
                if outcome.status is not SlotStatus.OK:
                    status = clock.status_of(outcome.status, time.monotonic_ns())
                    raise failure(self._codec.model.name, status, 0, outcome.reason)
                self._codec.read(submission.outputs[0])
        except PoolExhaustedError as error:
            raise no_room(error) from error

    def _infer_other(self, message: Message) -> None:
        """Execute a request to another model, and send the instance its response."""
        number = message.header["infer"]

        def respond(response: bytes) -> None:
            with suppress(OSError):  # the instance has gone, which the thread that receives finds
                self._send_result(number, response, is_final=False)

        call = InnerStream(self._call, respond) if message.header["stream"] else self._call
        try:
            response = self._infer(*_request_of(message), call)
        except RequestError as error:
            left_s = self._call.time_remaining()
            if self._call.is_over or (left_s is not None and left_s < LIMIT_SLACK_NS / 1e9):
                raise  # no answer of the model's, but of this client's time
            code = CODES.get(error.code, "INTERNAL")
            self._connection.send({"result": number, "error": (code, error.message), "final": True})
        else:
            self._send_result(number, response, is_final=True)

    def _send_result(self, number: int, serialised: bytes, is_final: bool) -> None:
        """Send the instance a response; an empty one says that there is no other."""
        response = pb.ModelInferResponse.FromString(serialised)
        contents = list(response.raw_output_contents)
        described = [
            (output.name, output.datatype, list(output.shape), len(content))
            for output, content in zip(response.outputs, contents, strict=True)
        ]
        parameters = {
            key: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
            for key, value in response.parameters.items()
        }
        header_of_result = {"result": number, "outputs": described, "parameters": parameters, "final": is_final}
        self._connection.send(header_of_result, contents)


def forget_left(codec: PythonCodec, submission: Submission) -> None:
    """Wait, in a thread, for the end of a request that nobody wants any more, and have its instance forget it."""

    def wait() -> None:
        with submission:
            if submission.wait(time.monotonic_ns() + FORGET_NS) is not None:
                tell_gone(codec, submission)

    submission.cancel()
    with suppress(RuntimeError):  # else the instance waits for it for some seconds
        threading.Thread(target=wait, name="forget", daemon=True).start()


def tell_gone(codec: PythonCodec, submission: Submission) -> None:
    """Tell the instance that has kept a request, if one has, that nobody wants it."""
    with suppress(RequestError, OSError, ValueError), socket.socket(socket.AF_UNIX) as instance:
        found = codec.read(submission.outputs[0])
        if isinstance(found, Left):
            instance.settimeout(CONNECT_TIMEOUT_S)
            instance.connect(found.address)
            Connection(instance).send({"attach": found.execution, "request": found.request})


def _outputs_of(described: Sequence[Any], payload: memoryview) -> Outputs:
    ends = list(itertools.accumulate(size for _, _, _, size in described))
    return {
        name: (tuple(shape), payload[end - size : end])
        for (name, _, shape, size), end in zip(described, ends, strict=True)
    }


def _request_of(message: Message) -> tuple[bytes, bytes, list[memoryview]]:
    """Return a model's request as a client's: header, id, contents."""
    asked = message.header
    request = pb.ModelInferRequest(model_name=asked["model"])
    if asked["version"] >= 0:
        request.model_version = str(asked["version"])
    raws = []
    ends = itertools.accumulate(size for _, _, _, size in asked["inputs"])
    for (name, datatype, shape, size), end in zip(asked["inputs"], ends, strict=True):
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        raws.append(message.payload[end - size : end])
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
    with suppress(ValueError):
        return request.SerializeToString(), str(asked["id"]).encode(), raws
    raise RequestError(StatusCode.INVALID_ARGUMENT, "a request to another model is too large")
