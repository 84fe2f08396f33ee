"""What an instance is asked to execute: requests, their responses, and where these go."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gangway.python_backend import log, memory
from gangway.python_backend.cancellations import NEVER_CANCELLED, Flag, is_cancelled
from gangway.python_backend.messages import (
    ERROR_CODES,
    KNOWN_HEADER_BYTES,
    KNOWN_HEADERS,
    Buffer,
    Connection,
    Described,
    header_of,
    places,
)
from gangway.python_backend.tensors import array_of, content_of, numeric_type, size_of
from gangway.python_backend.triton_python_backend_utils import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    Tensor,
    TritonError,
    TritonModelException,
)

MAX_TEXT_BYTES = 1 << 20  # of a response's parameters
MAX_ERROR_CHARACTERS = 1000
DIMENSION_BYTES = 8
TOO_LARGE = "RESOURCE_EXHAUSTED"  # gRPC's code: Triton has none for it


class TooLargeError(TritonModelException):
    """A response, or a request to another model, has more bytes than can be sent."""


class Header(NamedTuple):
    """What a response says, as fields and as JSON. `size_bytes`: what it takes in the frame of an answer, at most."""

    fields: Mapping[str, Any]
    text: bytes
    size_bytes: int

    @classmethod
    def of(cls, **fields: Any) -> Header:
        """Return the header with these fields."""
        about = {key: fields[key] for key in ("error", "types", "parameters") if key in fields}
        outputs: Sequence[Described] = fields.get("outputs", ())
        rank = sum(len(shape) for _, _, shape, _ in outputs)
        sizes = [size_bytes for _, _, _, size_bytes in outputs]
        size_bytes = places([*sizes, 64 + len(json.dumps(about))])[1] + DIMENSION_BYTES * rank
        return cls(fields, json.dumps(fields).encode(), size_bytes)


@lru_cache(maxsize=KNOWN_HEADERS)
def _header_of(outputs: tuple[Described, ...], is_final: bool) -> Header:
    """Return the header of a response that has nothing but outputs."""
    return Header.of(outputs=outputs, final=is_final)


class Encoded(NamedTuple):
    """A response as header and payload."""

    header: Header
    payload: list[Buffer]


class CheckedOutputs(NamedTuple):
    """Outputs as they are sent. `types`: of those that have another one than the configuration says, by their names."""

    tensors: list[Tensor]
    types: dict[str, str]


class OutputCheck:
    """Compares responses with the configuration's outputs. `config`: a dictionary as config.pbtxt.

    Outputs that the configuration does not name are left out, and of equal names all but the first. Other types and
    shapes are passed on. `tell` is called with a sentence about each kind of difference, once. `is_strict`: numbers of
    another width are converted, and all other differences are errors.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        is_strict: bool = False,
        tell: Callable[[Mapping[str, str]], None] = lambda found: None,
    ) -> None:
        batch = [-1] if config.get("max_batch_size", 0) > 0 else []
        self._expected: dict[str, tuple[str, list[int]]] = {}
        self.model_name = str(config.get("name", ""))
        self._is_strict, self._tell = is_strict, tell
        self._told: set[str] = set()
        for output in config["output"]:
            dims = output["reshape"]["shape"] if output.get("reshape") else output["dims"]
            datatype = output["data_type"].replace("TYPE_STRING", "TYPE_BYTES").replace("TYPE_", "")
            self._expected[output["name"]] = datatype, batch + [int(size) for size in dims]

    def checked(self, tensors: Sequence[Tensor]) -> CheckedOutputs:
        """Return what is to be sent. Raises TritonModelException, if it is strict, for what the configuration has not.

        The message names the first output that differs.
        """
        found: dict[str, Tensor] = {}
        types: dict[str, str] = {}
        differences: dict[str, str] = {}
        for given in tensors:
            name = given.name()
            if name in found or name not in self._expected:
                what = "twice" if name in found else f"which is none of {list(self._expected)}"
                self._differs(differences, "names", f"the response has an output '{name}', {what}")
                continue
            datatype, shape = self._expected[name]
            tensor = found[name] = given.converted(datatype) if self._is_strict else given
            own_datatype, array = tensor.stored
            if own_datatype != datatype:
                types[name] = own_datatype
                text = f"output '{name}' is of type {own_datatype}, but the configuration says {datatype}"
                self._differs(differences, "types", text)
            if len(array.shape) != len(shape) or any(
                size not in (-1, own)
                for size, own in zip(shape, array.shape)  # noqa: B905 - Python 3.9
            ):
                text = f"output '{name}' has the shape {list(array.shape)}, but the configuration says {shape}"
                self._differs(differences, "shapes", text)
        if differences:
            self._tell(differences)
        return CheckedOutputs(list(found.values()), types)

    def _differs(self, differences: dict[str, str], kind: str, text: str) -> None:
        """Note a difference of a kind that has not been told. Raises TritonModelException if it is strict."""
        if self._is_strict:
            raise TritonModelException(text)
        if kind not in self._told:
            self._told.add(kind)
            differences[kind] = text


def encode_tensors(tensors: Sequence[Tensor], most_bytes: int, what: str) -> tuple[list[Described], list[Buffer]]:
    """Return descriptions and contents of tensors. Raises TooLargeError, before anything is copied.

    `what`: the message's subject, if their contents have more than `most_bytes`.
    """
    described: list[Described] = []
    contents: list[Buffer] = []
    stored = [(tensor.name(), *tensor.stored) for tensor in tensors]
    size_bytes = sum(size_of(array, most_bytes) for _, _, array in stored)
    if size_bytes > most_bytes:
        raise TooLargeError(f"{what} has {size_bytes} bytes, {most_bytes} are possible")
    for name, datatype, array in stored:
        contents.append(content_of(array))
        described.append((name, datatype, array.shape, len(contents[-1])))
    return described, contents


def decode_tensors(described: Sequence[Described], payload: memoryview) -> list[Tensor]:
    """Return copies of tensors, which lie one after the other. Raises ValueError."""
    offsets = [0, *itertools.accumulate(size_bytes for _, _, _, size_bytes in described)]
    return [
        Tensor.of(name, datatype, array_of(datatype, shape, payload[at : at + size_bytes]))
        for (name, datatype, shape, size_bytes), at in zip(described, offsets)  # noqa: B905 - Python 3.9
    ]


def encode_response(
    response: InferenceResponse | None, wanted: Sequence[str], check: OutputCheck, most_bytes: int, is_final: bool
) -> Encoded:
    """Return a response to a request that wants these outputs. Raises TritonModelException. None: an empty one."""
    if response is None:
        return Encoded(Header.of(final=is_final), [])
    if not isinstance(response, InferenceResponse):
        raise TritonModelException(f"expected an InferenceResponse, got {type(response).__name__}")
    error = response.error()
    if error is not None:
        return encode_error(error, is_final=is_final)
    outputs, types = check.checked(response.output_tensors())
    what = f"the answer of model '{check.model_name}'"
    described, contents = encode_tensors([each for each in outputs if each.name() in wanted], most_bytes, what)
    parameters = response.stored_parameters
    if not (types or parameters):
        return Encoded(_header_of(tuple(described), is_final), contents)
    fields: dict[str, Any] = {"outputs": described, "final": is_final}
    if types:
        fields["types"] = types
    if parameters:
        text = response.parameters()
        if len(text) > MAX_TEXT_BYTES:
            raise TooLargeError(f"{what} has parameters of {len(text)} bytes, {MAX_TEXT_BYTES} are possible")
        fields["parameters"] = json.loads(text)
    return Encoded(Header.of(**fields), contents)


def encode_error(error: BaseException, where: str = "", is_final: bool = True) -> Encoded:
    """Return the response that says what an exception says."""
    if isinstance(error, TritonError):
        return encode_failure(ERROR_CODES[error.code()], error.message()[:MAX_ERROR_CHARACTERS], is_final)
    said = log.text_of(error)
    text = said if isinstance(error, TritonModelException) else f"{type(error).__name__}: {said}"
    code, about = TOO_LARGE if isinstance(error, TooLargeError) else "INTERNAL", memory.about(error)
    return encode_failure(code, f"{where}{text}"[: MAX_ERROR_CHARACTERS - len(about)] + about, is_final)


def encode_failure(code: str, message: str, is_final: bool = True) -> Encoded:
    """Return the response that says this."""
    return Encoded(Header.of(error=(code, message), final=is_final), [])


def decode_response(header: Mapping[str, Any], payload: memoryview) -> InferenceResponse:
    """Return the response to a request to another model."""
    parameters = header.get("parameters")
    if header.get("error"):
        code, message = header["error"]
        return InferenceResponse(error=TritonError(message, ERROR_CODES.index(code)), parameters=parameters)
    return InferenceResponse(decode_tensors(header.get("outputs", ()), payload), parameters=parameters)


class Form:
    """What requests have in common with others, as `about` says it. `begin`: where their inputs lie in shared memory.

    Raises ValueError for inputs whose contents are not of their shapes.
    """

    def __init__(self, about: Mapping[str, Any], begin: int = 0) -> None:
        self.wanted: list[str] = about["wanted"]
        self.room_bytes: int = about["room_bytes"]
        self.most_bytes: int = about["most_bytes"]
        self.request = InferenceRequest(
            correlation_id=about.get("correlation_id", 0),
            requested_output_names=self.wanted,
            flags=about.get("flags", 0),
            timeout=about.get("timeout", 0),
            parameters=about.get("parameters"),
            priority=about.get("priority", 0),
        )
        described: Sequence[Described] = about.get("inputs", ())
        offsets, self.size_bytes = places([size_bytes for _, _, _, size_bytes in described])
        self._inputs = []
        for (name, datatype, shape, size_bytes), at in zip(described, offsets):  # noqa: B905 - Python 3.9
            number = numeric_type(datatype)
            if number is not None and number.itemsize * math.prod(shape) != size_bytes:
                raise ValueError(f"input '{name}' of shape {shape} has {size_bytes} bytes")
            self._inputs.append((name, datatype, number, tuple(shape), begin + at, size_bytes))

    def inputs(self, memory: memoryview) -> list[Tensor]:
        """Return copies of a request's inputs. Raises ValueError, TypeError where they are not there."""
        return [
            Tensor.of(
                name,
                datatype,
                array_of(datatype, shape, memory[at : at + size_bytes])
                if number is None
                else np.ndarray(shape, number, memory, at).copy(),
            )
            for name, datatype, number, shape, at, size_bytes in self._inputs
        ]


def forms_of(run: bytes) -> Sequence[Form]:
    """Return the forms of the requests of a run, whose header this is."""
    return _forms_of(run) if len(run) <= KNOWN_HEADER_BYTES else _forms_of.__wrapped__(run)


@lru_cache(maxsize=KNOWN_HEADERS)
def _forms_of(run: bytes) -> list[Form]:
    forms: list[Form] = []
    begin = 0
    for about in header_of(run)["run"]:
        forms.append(Form(about, begin))
        begin += forms[-1].size_bytes
    return forms


class ResponseSender:
    """What a model has of a responder."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, as `Responder.send` does."""
        self._responder.send(response, flags)

    def is_cancelled(self) -> bool:
        """Whether no client waits for responses, and some were still to come."""
        return self._responder.is_cancelled()

    def __del__(self) -> None:
        """Note that the model can send nothing more. No lock is taken, as this may come in the middle of anything."""
        self._responder.is_let_go = True


class Responder:
    """One request of an execution, and its responses. `is_let_go`: the model has no sender of them any more.

    `own`: what the request has not in common with others of its form. Responses are kept until the request is `left` to
    the front end and that has attached. Safe for threads.
    """

    def __init__(
        self, form: Form, own: Mapping[str, Any], inputs: list[Tensor], check: OutputCheck, is_stream: bool
    ) -> None:
        self.wanted, self.room_bytes, self.most_bytes = form.wanted, form.room_bytes, form.most_bytes
        self.is_let_go = False
        self._request: InferenceRequest | None = form.request.received(own, inputs, ResponseSender(self))
        self.connection: Connection | None = None
        self.is_left = self.is_closed = self.was_attached = False
        self._check, self._is_stream = check, is_stream
        self._flag: Sequence[int] = own.get("cancellation", NEVER_CANCELLED)
        self._is_cancelled = False
        self._kept: list[Encoded] = []
        self._lock = threading.Lock()
        self.begins: Callable[[], None] = lambda: None  # is called before the first of several responses
        self.ended: Callable[[], None] = lambda: None  # is called when the last response is there

    def take_request(self) -> InferenceRequest:
        """Return the request, once: its tensors go when the model lets go of it."""
        request, self._request = self._request, None
        assert request is not None, "a request is executed once"
        return request

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response. Raises TritonModelException, and nothing is sent; one that is too large ends the request."""
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"flags are {flags}, expected 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL")
        if response is None and not (flags and self._is_stream):
            raise TritonModelException("a response is None: that only ends a request of a decoupled model")
        try:
            is_final = bool(flags) or not self._is_stream
            encoded = encode_response(response, self.wanted, self._check, self.most_bytes, is_final)
        except TooLargeError as error:
            self.fail(encode_error(error))
            raise
        if not (is_final or self.is_left or self.is_closed):
            self.begins()
        self._put(encoded)

    def fail(self, error: Encoded) -> None:
        """End the request by an error, unless it has ended."""
        if not self.is_closed:
            self._put(error)

    def end_if_let_go(self) -> None:
        """End the request if no response can come any more: with an error, unless there may be any number of them."""
        if self.is_let_go and not self.is_closed:
            name = self._check.model_name
            what = "its final response" if self._is_stream else "a response"
            text = f"model '{name}' has let go of a request without {what}: nobody has its response sender any more"
            log.write(f"{name}: {text}")
            with suppress(TritonModelException):  # another thread has ended it
                self._put(Encoded(Header.of(final=True), []) if self._is_stream else encode_failure("INTERNAL", text))

    def is_cancelled(self) -> bool:
        """Whether no client waits for responses, and some were still to come."""
        self._is_cancelled = self._is_cancelled or (not self.is_closed and is_cancelled(Flag(*self._flag)))
        return self._is_cancelled

    def take_only(self) -> Encoded | None:
        """Return the response, if it is the only one, all are there, and the caller has room for it."""
        with self._lock:
            if self.is_left or not self.is_closed or len(self._kept) != 1:
                return None
            if self._kept[0].header.size_bytes > self.room_bytes:
                return None
            if self._is_stream and not {"outputs", "error"} & self._kept[0].header.fields.keys():
                return None  # it only says that there is none
            return self._kept.pop()

    def keep_again(self, response: Encoded) -> None:
        """Keep the only response, which was taken and nobody has read."""
        with self._lock:
            self._kept.append(response)

    def leave(self) -> None:
        """From now on responses go to the front end."""
        with self._lock:
            self.is_left = True
            self._flush()

    def attach(self, connection: Connection) -> None:
        """The front end has come for the responses."""
        with self._lock:
            self.connection, self.was_attached = connection, True
            self._flush()

    @property
    def is_sent(self) -> bool:
        """Whether nothing is to come, and nothing is kept."""
        return self.is_closed and not self._kept

    def detach(self) -> None:
        """The front end has gone: with all responses, or because no client waits."""
        with self._lock:
            self.connection = None
            self._is_cancelled = self._is_cancelled or not self.is_closed
            self._kept.clear()

    def _put(self, encoded: Encoded) -> None:
        with self._lock:
            if self.is_closed:
                raise TritonModelException("the request has had its final response")
            self.is_closed = encoded.header.fields["final"]
            if self._is_stream:  # what is kept must not change if the model goes on writing into its arrays
                encoded = Encoded(encoded.header, [bytes(part) for part in encoded.payload])
            self._kept.append(encoded)
            self._flush()
        if self.is_closed:
            self.ended()

    def _flush(self) -> None:
        if self.is_left and self.connection is not None and self._kept:
            for each in self._kept:
                try:
                    self.connection.send(each.header.text, each.payload)
                except OSError:
                    break  # the thread that receives finds the end
            self._kept.clear()
            if self.is_closed:
                self.connection = None  # it may be used for another request


class Execution:
    """Requests that are executed together. `worker`: whose core it uses, if it does; `is_run`: that waits for `done`.

    `ask`: the number of that worker's message. `is_begun`: the model executes it, with a core or, while it waits,
    without one. `is_beside`: threads of the model make its responses, since `execute` has returned. `is_answering`: its
    answer is being written. `timeout_seconds`: of all of it, but for other models'
    time. Changed with the host's lock held.
    """

    def __init__(self, number: int, responders: list[Responder], worker: Connection | None, core: int) -> None:
        self.number = self.ask = number
        self.responders = responders
        self.worker: Connection | None = worker
        self.core = core
        self.is_begun = self.is_beside = self.is_answering = False
        self.timeout_seconds = math.inf
        self._looked_at = self._seconds = 0.0
        self.is_run = True
        self.wants_core = False
        self.coroutine: Any = None  # which executes it
        self.left_at: float | None = None  # when responses began to be the front ends' to fetch

    def begin(self) -> None:
        """The model begins to execute it."""
        self.is_begun, self._looked_at = True, time.monotonic()

    def is_late(self, waits_for_others: bool) -> bool:
        """Whether the model has had it for too long. Asked now and then; the time in which it waits does not count."""
        begin, self._looked_at = self._looked_at, time.monotonic()
        if not waits_for_others:
            self._seconds += self._looked_at - begin
        return self._seconds > self.timeout_seconds

    def leave(self) -> None:
        """Let the front ends fetch all responses that no worker has got."""
        self.left_at = time.monotonic()
        for each in self.responders:
            each.leave()

    @property
    def attached(self) -> list[Connection]:
        """The front ends that are there for it."""
        return [each.connection for each in self.responders if each.connection is not None]

    @property
    def is_answered(self) -> bool:
        """Whether the model has given all responses."""
        return all(each.is_closed for each in self.responders)

    @property
    def is_over(self) -> bool:
        """Whether all responses are there, and none waits for a front end."""
        return all(each.is_sent for each in self.responders)

    def is_abandoned(self, patience_seconds: float) -> bool:
        """Whether nobody waits for it: all front ends have gone, or none has come since it was left to them."""
        if self.worker is not None or self.left_at is None or self.attached:
            return False
        return self.was_wanted or time.monotonic() - self.left_at > patience_seconds

    @property
    def was_wanted(self) -> bool:
        """Whether front ends have come for all of it, and have gone."""
        return not self.attached and all(each.was_attached for each in self.responders)
