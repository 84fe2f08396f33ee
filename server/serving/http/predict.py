"""KServe's first protocol, which is TensorFlow Serving's: `instances` in, `predictions` out, or by columns.

A row of `instances` is the value of the model's one input, or an object of its inputs by their names. `inputs` has
whole tensors, one or an object of them; the answer has `outputs` then. Bytes are `{"b64": "..."}`. Source of the
format: KServe's "V1 protocol" and TensorFlow Serving's "RESTful API", section Predict.
"""

import base64
import binascii
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import methodcaller
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from gangway.artifact.datatypes import numbers_of
from gangway.protos import grpc_service_pb2 as pb
from gangway.python_backend.elements import join_elements, split_elements
from gangway.server.errors import invalid
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Tensor
from gangway.server.requests.contents import PAUSE_S
from gangway.server.serving.http.infer import BinaryOutputs, HttpRequest, Output, outputs_of, split_response
from gangway.server.serving.http.json_text import (
    MAX_OUTPUT_BYTES,
    MAX_RANK,
    NumberText,
    UnreadTensor,
    dump,
    dump_numbers,
    flatten,
    kind_of,
    parse_object,
    raw_of,
    utf8,
)

ROWS, COLUMNS = "instances", "inputs"
ANSWERS: Final = {ROWS: "predictions", COLUMNS: "outputs"}
B64: Final = "b64"
BYTES_SUFFIX: Final = "_bytes"  # of names of outputs whose strings are bytes
QUICK_NUMBERS: Final = 8192  # are written at once, however they are nested
_SCAN_BYTES: Final = 64 * 1024
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b"[,]"))


class Predict(NamedTuple):
    """What a body asks: a request, and whether it has rows or columns, as its answer will."""

    request: HttpRequest
    form: str


def read_predict(model: ServedModel, version: str, text: bytes | memoryview) -> Predict:
    """Understand the body of a predict request. Raises RequestError (INVALID_ARGUMENT)."""
    content = parse_object(text)
    where = f"predict request for model '{model.name}'"
    forms = [form for form in ANSWERS if form in content]
    if len(forms) != 1:
        invalid(f"{where}: expected either '{ROWS}' or '{COLUMNS}', got {'both' if forms else 'neither'}")
    (form,) = forms
    values = _by_rows(model, content[form], where) if form == ROWS else _by_columns(model, content[form], where)
    message = pb.ModelInferRequest(model_name=model.name, model_version=version)
    contents = [_add_input(message, model.inputs[name], value, model) for name, value in values.items()]
    header = message.SerializeToString(deterministic=True)
    return Predict(HttpRequest(header, b"", tuple(contents), BinaryOutputs()), form)


def _by_rows(model: ServedModel, instances: Any, where: str) -> Mapping[str, Any]:
    """Return the values of each input over all instances."""
    if isinstance(instances, NumberText):
        return {_only_input(model, where): instances}
    if not isinstance(instances, list) or not instances:
        found = "an empty one" if isinstance(instances, list) else kind_of(instances)
        invalid(f"{where}: expected an array of instances, got {found}")
    named = [_is_named(instance) for instance in instances]
    if not any(named):
        return {_only_input(model, where): instances}
    names = list(instances[0]) if named[0] else []
    if not all(named) or any(instance.keys() != set(names) for instance in instances):
        invalid(f"{where}: instances do not all have the same inputs")
    _check_names(model, names, where)
    return {name: [instance[name] for instance in instances] for name in names}


def _by_columns(model: ServedModel, inputs: Any, where: str) -> Mapping[str, Any]:
    if not _is_named(inputs):
        return {_only_input(model, where): inputs}
    _check_names(model, list(inputs), where)
    return dict(inputs)


def _is_named(value: Any) -> bool:
    """Whether a value is inputs by their names, rather than a tensor or its bytes."""
    return isinstance(value, dict) and set(value) != {B64}


def _only_input(model: ServedModel, where: str) -> str:
    needed = [name for name, tensor in model.inputs.items() if not tensor.optional] or list(model.inputs)
    if len(needed) != 1:
        invalid(f"{where}: it has {len(needed)} inputs: expected objects with {', '.join(needed)}")
    return needed[0]


def _check_names(model: ServedModel, names: list[str], where: str) -> None:
    if unknown := [name for name in names if name not in model.inputs]:
        invalid(f"{where}: it has no input '{unknown[0][:100]}'; its inputs are {', '.join(model.inputs)}")


def _add_input(message: pb.ModelInferRequest, tensor: Tensor, value: Any, model: ServedModel) -> bytes | UnreadTensor:
    where = f"input '{tensor.name}' for model '{model.name}'"
    content: bytes | UnreadTensor
    if isinstance(value, list) and any(isinstance(row, NumberText) for row in value):
        shapes = {shape_of(row, where) for row in value}
        if len(shapes) > 1:
            invalid(f"{where}: its rows have different shapes")
        shape = (len(value), *shapes.pop())
        content = b"".join(_read(row, tensor.datatype, where) for row in value)
    else:
        shape, elements = shape_of(value, where), flatten(value, where)
        if tensor.datatype == "BYTES" and not isinstance(elements, NumberText):
            content = join_elements([_bytes_of(element, where) for element in elements])
        else:
            content = raw_of(elements, tensor.datatype, where)
    missing = tensor.shape[len(shape) :]
    if all(size == 1 for size in missing):  # a row of [1] may be written as a number, or a text
        shape += missing
    message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
    return content


def _read(row: Any, datatype: str, where: str) -> bytes | memoryview:
    content = raw_of(flatten(row, where), datatype, where)
    return content.read() if isinstance(content, UnreadTensor) else content


def _bytes_of(element: Any, where: str) -> bytes:
    """Return a string as UTF-8, or the bytes of {"b64": "..."}."""
    if isinstance(element, str):
        return utf8(element, where).encode()
    text = element.get(B64) if isinstance(element, dict) and len(element) == 1 else None
    if not isinstance(text, str):
        invalid(f'{where}: expected a string or {{"{B64}": "..."}}, got {kind_of(element)}')
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        invalid(f"{where}: not base64: {error}")


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    """Return the shape of nested arrays. Raises RequestError (INVALID_ARGUMENT) if they are not nested evenly."""
    if isinstance(value, NumberText):
        return _shape_of_text(value, where)
    shape: list[int] = []
    level = [value]
    while level and isinstance(level[0], list):
        sizes = {len(each) if isinstance(each, list) else -1 for each in level}
        if len(sizes) > 1 or len(shape) == MAX_RANK:
            invalid(f"{where}: its arrays are not nested evenly")
        shape.append(len(level[0]))
        level = list(chain.from_iterable(level))
    return tuple(shape)


def _shape_of_text(numbers: NumberText, where: str) -> tuple[int, ...]:
    """Return the shape of a large array of numbers from its brackets and commas alone.

    Each step takes the innermost arrays away, which are equal if they are nested evenly. That all numbers are at one
    depth is found out when they are read.
    """
    begins = range(numbers.begin, numbers.end, _SCAN_BYTES)
    parts = (numbers.text[begin : min(begin + _SCAN_BYTES, numbers.end)] for begin in begins)
    structure = _slowly(parts, methodcaller("translate", None, _NO_STRUCTURE))
    depth = len(structure[: MAX_RANK + 1]) - len(structure[: MAX_RANK + 1].lstrip(b"["))
    shape: list[int] = []
    while structure and len(shape) <= MAX_RANK:
        end = structure.find(b"]") + 1
        begin = structure.rfind(b"[", 0, end)
        if end == 0 or begin < 0:
            break
        shape.insert(0, end - begin - 1)
        structure = _slowly(_cut(structure), methodcaller("replace", structure[begin:end], b""))
    if structure or len(shape) != depth:
        invalid(f"{where}: its arrays are not nested evenly")
    return tuple(shape)


def _slowly(parts: Iterable[bytes], change: Callable[[bytes], bytes]) -> bytes:
    """Return all parts, changed, with pauses in which other threads run."""
    changed = []
    for part in parts:
        changed.append(change(part))
        time.sleep(PAUSE_S)
    return b"".join(changed)


def _cut(structure: bytes) -> Iterator[bytes]:
    """Yield parts that end behind a closing bracket, so that none cuts an innermost array."""
    at = 0
    while at < len(structure):
        end = structure.rfind(b"]", at, at + _SCAN_BYTES) + 1 or structure.find(b"]", at) + 1 or len(structure)
        yield structure[at:end]
        at = end


# -- the answer


def predicted(response: bytes, form: str) -> bytes:
    """Return a response as the JSON that belongs to this form of request. Raises RequestError (INVALID_ARGUMENT)."""
    header, _, raws = split_response(response)
    message = pb.ModelInferResponse.FromString(header)
    outputs = outputs_of(message, raws)
    if len(outputs) == 1 and (form == COLUMNS or outputs[0].tensor.shape):
        found = _json_of(outputs[0])
    elif form == COLUMNS:
        members = (dump(output.tensor.name) + b":" + _json_of(output) for output in outputs)
        found = b"{" + b",".join(members) + b"}"
    else:
        found = b"[" + b",".join(_rows_of(outputs, message.model_name)) + b"]"
    return b'{"%b":%b}' % (ANSWERS[form].encode(), found)


def _rows_of(outputs: list[Output], model: str) -> Iterator[bytes]:
    """Yield an object of all outputs for each row."""
    first_sizes = {output.tensor.shape[0] if output.tensor.shape else -1 for output in outputs}
    if len(first_sizes) != 1 or -1 in first_sizes:
        invalid(f"model '{model}': its outputs do not have the same first dimension: send '{COLUMNS}', not '{ROWS}'")
    names = [dump(output.tensor.name) for output in outputs]
    arrays = [_array_of(output) for output in outputs]
    for row in range(first_sizes.pop()):
        members = (name + b":" + _nested(array[row, ...]) for name, array in zip(names, arrays, strict=True))
        yield b"{" + b",".join(members) + b"}"


def _json_of(output: Output) -> bytes:
    return _nested(_array_of(output))


def _array_of(output: Output) -> Any:
    """Return an output as an array, of FP16 and BF16 as float32, of BYTES as objects that JSON has."""
    tensor, raw = output
    where = f"output '{tensor.name}'"
    if raw is None:
        invalid(f"{where}: it is in shared memory")
    if len(raw) > MAX_OUTPUT_BYTES:
        invalid(f"{where}: {len(raw)} bytes are too many for JSON")
    shape = tuple(tensor.shape)
    if tensor.datatype == "BYTES":
        texts = [_text_of(each, tensor.name) for each in split_elements(raw, math.prod(shape))]
        array = np.empty(len(texts), object)
        array[:] = texts
        return array.reshape(shape)
    array = numbers_of(raw, tensor.datatype).reshape(shape)
    return array.astype(np.float32) if tensor.datatype == "FP16" else array


def _text_of(element: bytes, name: str) -> str | dict[str, str]:
    if not name.endswith(BYTES_SUFFIX):
        try:
            return element.decode()
        except UnicodeDecodeError:
            pass
    return {B64: base64.b64encode(element).decode()}


def _nested(array: Any) -> bytes:
    """Return an array as nested JSON, made slice by slice if it is large."""
    if array.dtype == object:
        return dump(array.tolist() if array.ndim else array[()])
    if array.ndim == 0:
        return dump_numbers(array.reshape(1))[1:-1]
    if array.ndim == 1:
        return dump_numbers(array)
    if array.size <= QUICK_NUMBERS and (array.dtype.kind != "f" or np.isfinite(array).all()):
        return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"[" + b",".join(map(_nested, array)) + b"]"
