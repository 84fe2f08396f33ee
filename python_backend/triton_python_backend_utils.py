"""The module that a model.py imports as `pb_utils`, with Triton's names.

Source: https://github.com/triton-inference-server/python_backend, its README and src/pb_stub.cc.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gangway.python_backend import auto_complete, custom_metrics, log, model_control, supervisor_link
from gangway.python_backend.messages import ERROR_CODES
from gangway.python_backend.tensors import (
    BF16,
    BF16_NUMBER,
    DATATYPES,
    capsule_of,
    content_of,
    converted,
    datatype_of,
    from_capsule,
    strings_of,
)

ModelConfig = auto_complete.ModelConfig
TritonModelException = supervisor_link.TritonModelException
Metric, MetricFamily, MetricKind = custom_metrics.Metric, custom_metrics.MetricFamily, custom_metrics.MetricKind
COUNTER, GAUGE, HISTOGRAM = MetricKind

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    f"TYPE_{'STRING' if name == 'BYTES' else name}": bool if name == "BOOL" else numpy_type
    for name, (_, numpy_type) in DATATYPES.items()
}
_JSON = ",", ":"  # without blanks, as in Triton
_NUMBERS = {name: number for name, (number, _) in DATATYPES.items()} | {BF16: BF16_NUMBER}


class TritonError(Exception):
    """An error that a response carries. `code`: one of the constants."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self._message, self._code = str(message), int(code)
        if not 0 <= self._code < len(ERROR_CODES):
            raise TritonModelException(f"there is no error code {code}")

    def message(self) -> str:
        """Return the text."""
        return self._message

    def code(self) -> int:
        """Return the code."""
        return self._code


class Tensor:
    """An input or output. `numpy_array`: any shape; elements of BYTES are bytes, or what `str` makes a text of.

    One of BF16, which numpy does not have, comes from DLPack and goes there.
    """

    def __init__(self, name: str, numpy_array: Any) -> None:
        if not isinstance(numpy_array, (np.ndarray, np.generic)):
            raise TritonModelException(f"tensor '{name}' is made of {type(numpy_array).__name__}, expected an array")
        array: Any = np.asarray(numpy_array)
        try:
            self._datatype = datatype_of(array)
        except ValueError as error:
            raise TritonModelException(f"tensor '{name}': {error}") from None
        self._name = text_of(name)
        self._array: Any = array

    @classmethod
    def of(cls, name: str, datatype: str, array: Any) -> Tensor:
        """Return a tensor of this datatype, whose array may be the bits of BF16."""
        tensor = cls.__new__(cls)
        tensor._name, tensor._datatype, tensor._array = name, datatype, array
        return tensor

    def name(self) -> str:
        """Return the name."""
        return self._name

    def as_numpy(self) -> Any:
        """Return the array, which is the caller's. Raises TritonModelException for BF16."""
        if self._datatype == BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._array

    @property
    def stored(self) -> tuple[str, Any]:
        """The datatype, and the array as `tensors.py` has it."""
        return self._datatype, self._array

    def converted(self, datatype: str) -> Tensor:
        """Return it as this datatype, if it is of the same kind: integers that fit, or floats that numpy has."""
        if datatype == self._datatype or BF16 in (datatype, self._datatype):
            return self
        array = converted(self._array, datatype)
        return self if array is self._array else Tensor(self._name, array)

    def triton_dtype(self) -> int:
        """Return the number of the datatype."""
        return _NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        """Return the dimensions."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Whether it is in the memory of the processor: always."""
        return True

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Return a tensor that shares the memory of a DLPack capsule, or of an object with `__dlpack__`."""
        if isinstance(tensor, np.ndarray):
            return Tensor(name, tensor)
        try:
            array, is_bfloat16 = from_capsule(tensor.__dlpack__() if hasattr(tensor, "__dlpack__") else tensor)
            return Tensor.of(text_of(name), BF16, array) if is_bfloat16 else Tensor(name, array)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"tensor '{name}' cannot be made of a DLPack tensor: {error}") from None

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule."""
        return self.__dlpack__()

    def __dlpack__(self, stream: Any = None) -> Any:
        """Return a DLPack capsule: of a copy, if the array is read-only. Raises TritonModelException for texts."""
        if self._datatype == "BYTES":
            raise TritonModelException(f"tensor '{self._name}' is of BYTES, which DLPack does not have")
        return capsule_of(self._array, self._datatype == BF16)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the processor."""
        return (1, 0)


class InferenceResponse:
    """One response. Its error stands in the place of its tensors."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._output_tensors = list(output_tensors)
        if not all(isinstance(tensor, Tensor) for tensor in self._output_tensors):
            raise TritonModelException("output_tensors: expected tensors of pb_utils.Tensor")
        self._error = error
        self._parameters = parameters_of(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Return the tensors."""
        return self._output_tensors

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, if it is one."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._parameters, separators=_JSON)

    @property
    def stored_parameters(self) -> Mapping[str, Any]:
        """The parameters."""
        return self._parameters


class MemoryType(enum.IntEnum):
    """Where tensors lie."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU


class PreferredMemory:
    """Where outputs are wanted. There is no GPU, so it means nothing here."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.memory_type, self.device_id = preferred_memory_type, preferred_device_id


class InferenceTrace:
    """Stands for a trace of the server, which a model does not see."""

    def get_context(self) -> None:
        """Return None: there is no context."""


@runtime_checkable
class InferenceResponseSender(Protocol):
    """What sends a request's responses."""

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or with TRITONSERVER_RESPONSE_COMPLETE_FINAL the last one, or that there is none more."""

    def is_cancelled(self) -> bool:
        """Whether no client waits for responses."""
        ...


class Responses(Protocol):
    """The responses to a request, as an iterator of threads and of coroutines."""

    def __next__(self) -> InferenceResponse:
        """Return the next response. Blocks."""
        ...

    async def __anext__(self) -> InferenceResponse:
        """Return the next response."""
        ...

    def cancel(self) -> None:
        """Have the request ended."""
        ...


class Runtime(Protocol):
    """What the process of the instance does for a model (`host.py`)."""

    def infer(self, request: InferenceRequest, is_stream: bool) -> Responses:
        """Begin to execute a request to another model; return its responses."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which what is executed in this thread has no core."""
        ...


runtime: Runtime | None = None  # set by the process of the instance
model_dir = ""  # the same


class InferenceRequest:
    """A request: one that the model is to execute, or one that it makes to another model (`exec`)."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> None:
        self._request_id = text_of(request_id)
        self._correlation_id = correlation_id if isinstance(correlation_id, int) else text_of(correlation_id)
        self._inputs, self._outputs = list(inputs), [text_of(name) for name in requested_output_names]
        if not all(isinstance(tensor, Tensor) for tensor in self._inputs):
            raise TritonModelException("inputs: expected tensors of pb_utils.Tensor")
        self._model_name, self._model_version = text_of(model_name), int(model_version)
        self._flags, self._timeout, self._priority = int(flags), int(timeout), int(priority)
        self._preferred_memory, self._trace = preferred_memory, trace or InferenceTrace()
        self._parameters = parameters_of(parameters)
        self._sender: InferenceResponseSender | None = None

    def received(
        self, own: Mapping[str, Any], inputs: list[Tensor], sender: InferenceResponseSender
    ) -> InferenceRequest:
        """Return a request like this one, with what it has not in common with others: `id`, `parameters`."""
        request = InferenceRequest.__new__(InferenceRequest)
        request.__dict__.update(self.__dict__)
        request._inputs, request._outputs, request._sender = inputs, list(self._outputs), sender
        request._request_id = own.get("id", "")
        if "parameters" in own:
            request._parameters = parameters_of(own["parameters"])
        return request

    def inputs(self) -> list[Tensor]:
        """Return the inputs."""
        return self._inputs

    def request_id(self) -> str:
        """Return the id that the client has given."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the id of its sequence, 0 if it has none."""
        return self._correlation_id

    def flags(self) -> int:
        """Return TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags."""
        self._flags = flags

    def timeout(self) -> int:
        """Return the timeout in microseconds, 0 if there is none."""
        return self._timeout

    def priority(self) -> int:
        """Return the priority, 0 if none was given."""
        return self._priority

    def preferred_memory(self) -> PreferredMemory | None:
        """Return where its outputs are wanted."""
        return self._preferred_memory

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._parameters, separators=_JSON)

    def trace(self) -> InferenceTrace:
        """Return its trace."""
        return self._trace

    def requested_output_names(self) -> list[str]:
        """Return the names of the outputs that are wanted."""
        return self._outputs

    def model_name(self) -> str:
        """Return the name of the model that is to execute it."""
        return self._model_name

    def model_version(self) -> int:
        """Return its version, -1 for the latest one."""
        return self._model_version

    def get_response_sender(self) -> InferenceResponseSender:
        """Return what sends responses to this request. Raises TritonModelException for a request to another model."""
        if self._sender is None:
            raise TritonModelException("only a request that the model executes has a response sender")
        return self._sender

    def is_cancelled(self) -> bool:
        """Whether no client waits for responses."""
        return self._sender is not None and self._sender.is_cancelled()

    def set_release_flags(self, flags: int) -> None:
        """Raise TritonModelException for TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, which is not supported."""
        if flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            raise TritonModelException("requests cannot be rescheduled: iterative sequences are not supported")

    def exec(self, decoupled: bool = False) -> Any:
        """Execute a request to another model. Return the response; with `decoupled` an iterator of all of them.

        While it waits, the instance holds no core. Raises TritonModelException in `initialize`.
        """
        responses = _runtime().infer(self, decoupled)
        return ResponseIterator(responses) if decoupled else next(responses)

    def async_exec(self, decoupled: bool = False) -> Awaitable[Any]:
        """Do the same in a coroutine, in any loop. Raises RuntimeError where no loop runs.

        If what it returns is cancelled, so is the request.
        """
        loop = asyncio.get_running_loop()
        responses = _runtime().infer(self, decoupled)
        if not decoupled:
            task = loop.create_task(responses.__anext__())
            task.add_done_callback(lambda done: responses.cancel() if done.cancelled() else None)
            return task
        found = loop.create_future()
        found.set_result(ResponseIterator(responses))
        return found


class ResponseIterator:
    """The responses to a request, in their order: for threads, and with `async for` for coroutines."""

    def __init__(self, responses: Responses) -> None:
        self._responses: Responses | None = responses

    def __iter__(self) -> ResponseIterator:
        """Return itself."""
        return self

    def __next__(self) -> InferenceResponse:
        """Return the next response. Blocks."""
        if self._responses is None:
            raise StopIteration
        return next(self._responses)

    def __aiter__(self) -> ResponseIterator:
        """Return itself."""
        return self

    async def __anext__(self) -> InferenceResponse:
        """Return the next response."""
        if self._responses is None:
            raise StopAsyncIteration
        return await self._responses.__anext__()

    def cancel(self) -> None:
        """Cancel the request, and take no further responses."""
        responses, self._responses = self._responses, None
        if responses is not None:
            responses.cancel()


class Logger:
    """Writes to the server's log."""

    class LogLevel(enum.IntEnum):
        """How important a line is. The value is the level of syslog."""

        ERROR, WARNING, INFO, VERBOSE = 3, 4, 6, 7

    INFO, WARNING, ERROR, VERBOSE = LogLevel.INFO, LogLevel.WARNING, LogLevel.ERROR, LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        """Write a message."""
        log.write("\n".join(f"<{int(level)}>{line}" for line in str(message).splitlines() or [""]))

    @staticmethod
    def log_info(message: str) -> None:
        """Write an information."""
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a warning."""
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Write an error."""
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write a detail."""
        Logger.log(message, Logger.VERBOSE)


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model; return when it answers requests. While it waits, the instance holds no core.

    `config`: JSON, in the place of config.pbtxt. `files`: contents by "file:" and path, in the place of the
    repository's. Raises TritonModelException with the reason if it cannot be loaded.
    """
    with _waiting():
        model_control.load(model_name, config, files)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; return when it takes no new requests. Raises TritonModelException.

    `unload_dependents`: also what was loaded because this one, an ensemble, needs it.
    """
    with _waiting():
        model_control.unload(model_name, unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model answers requests; `model_version` empty: any version. Raises TritonModelException."""
    return model_control.is_ready(model_name, model_version)


def get_model_dir() -> str:
    """Return the folder of the model's version. Raises TritonModelException outside of an instance."""
    if not model_dir:
        raise TritonModelException("there is a model's folder in an instance only")
    return model_dir


def serialize_byte_tensor(input_tensor: Any) -> Any:
    """Return the elements of an array of texts or bytes one after the other, each behind its length, as bytes.

    As in Triton, it is () for an array without elements, and None for one of numbers.
    """
    if not input_tensor.size:
        return ()
    return content_of(input_tensor) if input_tensor.dtype.kind in "OS" else None


def deserialize_bytes_tensor(encoded_tensor: Any) -> Any:
    """Return the elements that `serialize_byte_tensor` has made bytes of, as an array of one dimension.

    Raises TritonModelException if something is cut off.
    """
    try:
        return strings_of(memoryview(encoded_tensor if len(encoded_tensor) else b"").cast("B"))
    except ValueError as error:
        raise TritonModelException(f"the elements cannot be read: {error}") from None


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input of this name, None if there is none."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the output of this name, None if there is none."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return what a configuration says of an input, None if it has none of this name."""
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return what a configuration says of an output, None if it has none of this name."""
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether requests may have any number of responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return numpy's type of a name such as TYPE_FP32."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return numpy's type of the number of a datatype."""
    return next((numpy_type for number, numpy_type in DATATYPES.values() if number == data_type), None)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number of numpy's type."""
    if data_type == np.bytes_:
        return _NUMBERS["BYTES"]
    return next((number for number, numpy_type in DATATYPES.values() if data_type == numpy_type), None)


def parameters_of(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return parameters of a request or response. Raises TritonModelException unless all are numbers, flags, texts."""
    found = json.loads(given) if isinstance(given, str) else dict(given or {})
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, (bool, int, float, str)):
            raise TritonModelException(f"parameter {key!r}: expected a text, number or flag, got {value!r}")
    return found


def text_of(value: str | bytes) -> str:
    """Return a text, which may be an element of a tensor. Raises TritonModelException for anything else."""
    if not isinstance(value, (str, bytes)):
        raise TritonModelException(f"expected a text, got {type(value).__name__}")
    return value.decode() if isinstance(value, bytes) else str(value)


def _waiting() -> AbstractContextManager[None]:
    return nullcontext() if runtime is None else runtime.waiting()


def _runtime() -> Runtime:
    if runtime is None:
        raise TritonModelException("requests to other models need a request in progress")
    return runtime
