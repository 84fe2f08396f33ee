"""A ModelInferRequest as bytes: taken apart without a copy of the tensors, and the contents of its inputs.

A walk over the top level takes out `raw_input_contents` (field 7) and `id` (field 3). What is left, the header, is for
protobuf's own parser. It says nothing about one particular request, so equal headers are understood only once. The walk
is stricter than protobuf. It refuses a known field of another wire type, groups, over-long lengths and a second id,
because no client sends them in good faith.

Contents may be in the message, in its header, or in regions of shared memory.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from gangway.artifact.format import MAX_TENSORS
from gangway.base.memory_budget import MemoryFullError, memory_budget
from gangway.executor.frames import join_strings
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.python_backend.elements import check_elements
from gangway.server.errors import RequestError, invalid, unavailable
from gangway.server.models.tensors import Tensor, item_bytes
from gangway.server.requests.regions import REGION, Content, Contents, Region, RegionPart, RegionRange

REQUEST_ID = 3
RAW_INPUT_CONTENTS = 7
LENGTH_DELIMITED = 2
FIXED_SIZES = {1: 8, 5: 4}  # wire type -> bytes

# Parsed, a hostile header grows up to tenfold (one byte per empty message or per dimension), so its size has a limit of
# its own. Honest headers are a few hundred bytes; typed contents, the exception, are larger.
MAX_HEADER_BYTES = 32 * 1024 * 1024
MAX_FIELDS = 3 * MAX_TENSORS + 1024  # top-level fields of one request: inputs, their contents, outputs, and others
MAX_ID_BYTES = 64 * 1024
EMPTY_FINAL_PARAMETER = "triton_enable_empty_final_response"  # of a request to a decoupled model

_RAW_TAG = RAW_INPUT_CONTENTS << 3 | LENGTH_DELIMITED
_ID_TAG = REQUEST_ID << 3 | LENGTH_DELIMITED


Raws = list[memoryview] | Callable[[], list[memoryview]]  # a function, if they are to be read when all else is right


class MalformedRequestError(ValueError):
    """The bytes are no ModelInferRequest. Clients see INVALID_ARGUMENT."""


class SplitRequest(NamedTuple):
    """A request in three parts: all other fields in their order, the id (UTF-8), and views of the raw tensors."""

    header: bytes
    request_id: bytes
    raws: list[memoryview]


class _Cut(NamedTuple):
    """An id or a raw tensor in a message: where the field begins, and where its content does and ends."""

    tag: int
    begin: int
    content: int
    end: int


def split_request(message: bytes) -> SplitRequest:
    """Take a serialised ModelInferRequest apart. Tensors are not copied. Raises MalformedRequestError."""
    view = memoryview(message)
    header: list[memoryview] = []
    raws: list[memoryview] = []
    ids: list[memoryview] = []
    kept = 0
    for tag, begin, content, end in _cuts_in(message):
        header.append(view[kept:begin])
        kept = end
        (raws if tag == _RAW_TAG else ids).append(view[content:end])
    header.append(view[kept:])
    if len(message) > MAX_HEADER_BYTES:
        _check_header(header)
    if len(ids) > 1:
        raise MalformedRequestError(f"expected one id of at most {MAX_ID_BYTES} bytes")
    request_id = _checked_id(bytes(ids[0][: MAX_ID_BYTES + 1])) if ids else b""
    return SplitRequest(b"".join(header), request_id, raws)


def _cuts_in(message: bytes) -> list[_Cut]:
    cuts: list[_Cut] = []
    end = len(message)
    position = fields = 0
    while position < end:
        start = position
        fields += 1
        if fields > MAX_FIELDS:
            raise MalformedRequestError(f"more than {MAX_FIELDS} fields in one request")
        tag = message[position]
        if tag < 0x80:
            position += 1
        else:
            tag, position = read_varint(message, position, limit_bytes=5)
        if tag & 7 == LENGTH_DELIMITED:
            if position < end and (length := message[position]) < 0x80:
                position += 1
            else:
                length, position = read_varint(message, position, limit_bytes=5)
            content, position = position, position + length
            if position > end:
                raise MalformedRequestError(f"field {tag >> 3} has {length} bytes, but only {end - content} follow")
            if tag in (_RAW_TAG, _ID_TAG):
                cuts.append(_Cut(tag, start, content, position))
        else:
            position = _skip_unknown(message, tag, position)
        if tag >> 3 == 0 or tag >> 32:
            raise MalformedRequestError(f"field number {tag >> 3} at byte {start}")
    return cuts


class RequestHead(NamedTuple):
    """What stands before the raw tensors: all fields but the id, the id (UTF-8), and how many bytes that is."""

    header: bytes
    request_id: bytes
    size_bytes: int

    @classmethod
    def of(cls, begin: bytes) -> "RequestHead | None":
        """Return the head of a message that begins so; None if it is not complete, or not as all clients send it."""
        header, request_id, kept, position = b"", b"", 0, 0
        try:
            while begin[position] != _RAW_TAG:
                start, tag = position, begin[position]
                length, position = read_varint(begin, position + 1, limit_bytes=5)
                if tag & 7 != LENGTH_DELIMITED or not 8 <= tag < _RAW_TAG or position + length >= len(begin):
                    return None
                if tag == _ID_TAG:
                    if kept:  # a second one
                        return None
                    request_id = _checked_id(begin[position : position + length])
                    header, kept = header + begin[kept:start], position + length
                position += length
        except (IndexError, MalformedRequestError):
            return None
        return cls(header + begin[kept:position], request_id, position)


class MessageForm(NamedTuple):
    """Where messages that `split_request` takes apart alike have id and raw tensors, and between them what is fixed.

    Messages of one length whose fixed parts are equal have equal headers, and tensors of equal sizes.
    """

    fixed: tuple[slice, ...]
    request_id: slice
    raws: tuple[slice, ...]

    @classmethod
    def of(cls, message: bytes) -> "MessageForm":
        """Return the form of a message. Raises MalformedRequestError."""
        cuts = _cuts_in(message)
        between = zip([0, *(cut.end for cut in cuts)], [*(cut.content for cut in cuts), len(message)], strict=True)
        places = [(cut.tag, slice(cut.content, cut.end)) for cut in cuts]
        return cls(
            tuple(slice(begin, end) for begin, end in between),
            next((place for tag, place in places if tag == _ID_TAG), slice(0, 0)),
            tuple(place for tag, place in places if tag == _RAW_TAG),
        )

    def fixed_in(self, message: bytes) -> tuple[bytes, ...]:
        """Return the fixed parts of a message of the same length."""
        return tuple([message[place] for place in self.fixed])

    def split(self, message: bytes) -> tuple[bytes, list[memoryview]]:
        """Return id and raw tensors of a message of this form. Raises MalformedRequestError if the id is no text."""
        view, request_id = memoryview(message), message[self.request_id]
        return request_id and _checked_id(request_id), [view[place] for place in self.raws]


def _check_header(pieces: list[memoryview]) -> None:
    if sum(map(len, pieces)) > MAX_HEADER_BYTES:
        raise MalformedRequestError(
            f"more than {MAX_HEADER_BYTES} bytes outside raw_input_contents: send large tensors as raw contents"
        )


def _checked_id(content: bytes) -> bytes:
    if len(content) > MAX_ID_BYTES:
        raise MalformedRequestError(f"expected one id of at most {MAX_ID_BYTES} bytes")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise MalformedRequestError(f"the id is not UTF-8: {error}") from None
    return content


def read_varint(message: bytes | memoryview, position: int, limit_bytes: int) -> tuple[int, int]:
    """Return the number at `position` and where it ends. Raises MalformedRequestError."""
    value = shift = 0
    try:
        for _ in range(limit_bytes):
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
            shift += 7
    except IndexError:
        raise MalformedRequestError("the request ends within a number") from None
    raise MalformedRequestError(f"a number of more than {limit_bytes} bytes at byte {position - limit_bytes}")


def _skip_unknown(message: bytes, tag: int, position: int) -> int:
    """Return where a varint or fixed-size field ends; only fields this version does not know may have one."""
    field, wire_type = tag >> 3, tag & 7
    if field <= RAW_INPUT_CONTENTS:
        raise MalformedRequestError(f"field {field} has wire type {wire_type}, expected {LENGTH_DELIMITED}")
    position = skip_scalar(message, tag, position)
    if position > len(message):
        raise MalformedRequestError(f"field {field} is cut off")
    return position


def skip_scalar(message: bytes | memoryview, tag: int, position: int) -> int:
    """Return where a varint or fixed-size value would end. Raises MalformedRequestError."""
    field, wire_type = tag >> 3, tag & 7
    if wire_type == 0:
        return read_varint(message, position, limit_bytes=10)[1]
    if wire_type not in FIXED_SIZES:
        raise MalformedRequestError(f"field {field} has wire type {wire_type}: groups are not part of the protocol")
    return position + FIXED_SIZES[wire_type]


def length_prefix(field: int, size: int) -> bytes:
    """Return what stands before `size` bytes of a length-delimited field."""
    prefix = bytearray([field << 3 | LENGTH_DELIMITED])
    while size >= 0x80:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)


if TYPE_CHECKING:
    import numpy as np


# element type -> (field of InferTensorContents, numpy's name)
FIELDS: Final = {
    "BOOL": ("bool_contents", "bool"),
    "INT8": ("int_contents", "int8"),
    "INT16": ("int_contents", "int16"),
    "INT32": ("int_contents", "int32"),
    "INT64": ("int64_contents", "int64"),
    "UINT8": ("uint_contents", "uint8"),
    "UINT16": ("uint_contents", "uint16"),
    "UINT32": ("uint_contents", "uint32"),
    "UINT64": ("uint64_contents", "uint64"),
    "FP32": ("fp32_contents", "float32"),
    "FP64": ("fp64_contents", "float64"),
    "BYTES": ("bytes_contents", "object"),
}


def to_bytes(contents: pb.InferTensorContents, name: str, datatype: str, elements: int, model: str) -> bytes:
    """Return elements that came as protobuf numbers (`InferInputTensor.contents`) as raw bytes.

    Raises RequestError (INVALID_ARGUMENT).
    """
    if datatype not in FIELDS:
        invalid(f"input '{name}' for model '{model}': {datatype} is only possible in raw_input_contents")
    expected, dtype = FIELDS[datatype]
    others = [field.name for field, _ in contents.ListFields() if field.name != expected]
    if others:
        invalid(f"input '{name}' for model '{model}': expected {expected} for {datatype}, got {others[0]}")
    values = getattr(contents, expected)
    if len(values) != elements:
        invalid(f"input '{name}' for model '{model}': expected {elements} elements in {expected}, got {len(values)}")
    if datatype == "BYTES":
        return join_strings(values)
    import numpy as np  # noqa: PLC0415 - a front end need not wait for it: see `process.Listeners`

    try:
        return np.array(values, dtype=dtype).tobytes()
    except OverflowError as error:
        invalid(f"input '{name}' for model '{model}': an element does not fit into {datatype}: {error}")


LARGE_BYTES: Final = 64 * 1024  # of a header; protobuf reads less in a millisecond or two
MAX_REST_BYTES: Final = 1024 * 1024  # of a header without contents
MAX_VALUES: Final = 50_000  # that are walked over: strings, or numbers that are not packed, as those of no client are
SLICE_BYTES: Final = 32 * 1024  # of numbers are read without a pause
PAUSE_S: Final = 50e-6  # so that threads which wait for Python's lock get it
_MAX_VARINT_BYTES: Final = 10
_INPUTS, _CONTENTS = 5, 5  # in the request; in an input
_INPUT_TAG, _CONTENTS_TAG = (field << 3 | LENGTH_DELIMITED for field in (_INPUTS, _CONTENTS))
_NUMBERS: Final = {field.number: field.name for field in pb.InferTensorContents.DESCRIPTOR.fields}
_SIZES: Final = {"fp32_contents": 4, "fp64_contents": 8}
_SIGNED_32: Final = "int_contents"

TypedContents = dict[str, list[memoryview]]  # of an input: the values of each field, packed or one by one


def split_contents(parts: SplitRequest) -> tuple[bytes, bytes, Raws]:
    """Return a request with its typed contents as raw ones, which are still to be read, if its header is large.

    protobuf's parser holds Python's lock from the first byte to the last, and makes an object of each number. So typed
    contents of large requests are taken out before. A packed field of floats is the raw tensor itself; one of integers
    is decoded a slice at a time, by numpy. Both happen when the rest of the request has been found right.

    Raises MalformedRequestError. A request that has raw contents as well stays as it is: it is refused later.
    """
    header, request_id, raws = parts
    if len(header) <= LARGE_BYTES:
        return header, request_id, raws
    rest, inputs = _take_out(memoryview(header), keep=bool(raws))
    if len(rest) > MAX_REST_BYTES:
        raise MalformedRequestError(f"more than {MAX_REST_BYTES} bytes beside the tensors' contents")
    return rest, request_id, raws or (partial(_read_all, rest, inputs) if any(inputs) else [])


def _take_out(header: memoryview, keep: bool) -> tuple[bytes, list[TypedContents]]:
    """Return the header without contents (`keep`: with empty ones), and the contents of each input."""
    rest: list[bytes | memoryview] = []
    inputs: list[TypedContents] = []
    walk = _Walk()
    for tag, content, whole in walk.fields(header):
        if tag != _INPUT_TAG:
            rest.append(whole)
            continue
        given: TypedContents = defaultdict(list)
        tensor: list[bytes | memoryview] = []
        for inner_tag, inner_content, inner_whole in walk.fields(content):
            if inner_tag != _CONTENTS_TAG:
                tensor.append(inner_whole)
                continue
            tensor += [length_prefix(_CONTENTS, 0)] * keep
            for value_tag, value, _ in walk.fields(inner_content):
                if value_tag >> 3 in _NUMBERS:
                    given[_NUMBERS[value_tag >> 3]].append(value)
        rest += [length_prefix(_INPUTS, sum(map(len, tensor))), *tensor]
        inputs.append(given)
    return b"".join(rest), inputs


class _Walk:
    """Goes over the fields of messages, not more than MAX_VALUES in all."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def fields(self, message: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
        """Yield the tag of each field, its content, and the whole of it. Raises MalformedRequestError."""
        position, end = 0, len(message)
        while position < end:
            begin = position
            tag, content = read_varint(message, position, limit_bytes=5)
            if tag & 7 == LENGTH_DELIMITED:
                length, content = read_varint(message, content, limit_bytes=5)
                position = content + length
            else:
                position = skip_scalar(message, tag, content)
            if position > end:
                raise MalformedRequestError(f"field {tag >> 3} is cut off")
            self._left -= 1
            if self._left < 0:
                raise MalformedRequestError(
                    f"more than {MAX_VALUES} values that are not packed: send large tensors as raw contents"
                )
            yield tag, message[content:position], message[begin:position]


def _read_all(header: bytes, inputs: Sequence[TypedContents]) -> list[memoryview]:
    """Return the raw contents of all inputs that have no region. Raises RequestError."""
    try:
        request = pb.ModelInferRequest.FromString(header)
    except DecodeError:
        invalid("the request is not a ModelInferRequest")
    return [
        _read(tensor, given, request.model_name)
        for tensor, given in zip(request.inputs, inputs, strict=True)
        if REGION not in tensor.parameters
    ]


def _read(tensor: pb.ModelInferRequest.InferInputTensor, given: TypedContents, model: str) -> memoryview:
    where = f"input '{tensor.name}' for model '{model}'"
    if tensor.datatype not in FIELDS:
        invalid(f"{where}: {tensor.datatype} is only possible in raw_input_contents")
    field, dtype = FIELDS[tensor.datatype]
    if others := [name for name in given if name != field]:
        invalid(f"{where}: expected {field} for {tensor.datatype}, got {others[0]}")
    values, expected = given.get(field, []), math.prod(tensor.shape)
    if tensor.datatype == "BYTES":
        _check_large_count(len(values), expected, field, where)
        return memoryview(join_strings([bytes(value) for value in values]))
    packed = values[0] if len(values) == 1 else memoryview(b"".join(values))
    if field in _SIZES:
        _check_large_count(len(packed) / _SIZES[field], expected, field, where)
        return packed
    try:
        return memoryview(_read_varints(packed, dtype, field, expected, where))
    except MemoryFullError as error:
        unavailable(str(error))


def _check_large_count(count: float, expected: int, field: str, where: str) -> None:
    if count != expected:
        invalid(f"{where}: expected {expected} elements in {field}, got {count:g}")


def _read_varints(packed: memoryview, dtype: str, field: str, expected: int, where: str) -> bytearray:
    import numpy as np  # noqa: PLC0415 - a front end need not wait for it: see `process.Listeners`

    everything = np.frombuffer(packed, np.uint8)
    parts = [everything[at : at + SLICE_BYTES] for at in range(0, len(packed), SLICE_BYTES)]
    _check_large_count(sum(int(np.count_nonzero(part < 0x80)) for part in parts), expected, field, where)
    memory_budget().take(expected * np.dtype(dtype).itemsize)
    raw = bytearray(expected * np.dtype(dtype).itemsize)
    numbers, at, rest = np.frombuffer(raw, dtype), 0, everything[:0]
    for part in parts:
        joined = np.concatenate((rest, part))
        ends = np.flatnonzero(joined < 0x80)
        values = _varints(joined, ends, where)
        rest = joined[ends[-1] + 1 :] if len(ends) else joined
        if len(rest) > _MAX_VARINT_BYTES:
            invalid(f"{where}: a number of more than {_MAX_VARINT_BYTES} bytes")
        if field == _SIGNED_32:
            values = values.astype(np.int32)
        if dtype.startswith("int"):
            values = values.view(np.int32 if field == _SIGNED_32 else np.int64)
        if dtype != "bool" and len(values):
            limits = np.iinfo(dtype)
            if values.min() < limits.min or values.max() > limits.max:
                invalid(f"{where}: an element does not fit into {dtype.upper()}")
        numbers[at : at + len(values)] = values
        at += len(values)
        time.sleep(PAUSE_S)
    if len(rest):
        invalid(f"{where}: {field} ends within a number")
    return raw


def _varints(part: Any, ends: Any, where: str) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return the numbers that end at these places."""
    import numpy as np  # noqa: PLC0415 - see above

    begins = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    lengths = ends - begins + 1
    longest = int(lengths.max(initial=0))
    if longest > _MAX_VARINT_BYTES:
        invalid(f"{where}: a number of more than {_MAX_VARINT_BYTES} bytes")
    values = np.zeros(len(ends), np.uint64)
    for index in range(longest):
        longer = lengths > index
        values[longer] |= (part[begins[longer] + index] & 0x7F).astype(np.uint64) << np.uint64(7 * index)
    return values


MAX_REGION_BYTES = 256 << 20  # of all inputs of a request: as much as one message may have

Inputs = Sequence[tuple[Tensor, tuple[int, ...]]]  # in the request's order, with the shapes that it gives them
Sources = Sequence[RegionRange | None]  # where they are, in the same order; None: in the message


def check_contents(tensor: Tensor, shape: tuple[int, ...], content: Content, model: str) -> None:
    """Raise RequestError (INVALID_ARGUMENT) unless the contents are as large as the shape says."""
    if tensor.datatype == "BYTES":
        assert not isinstance(content, RegionPart), "BYTES are read before they are checked"
        try:
            check_elements(content, math.prod(shape))
        except ValueError as error:
            invalid(f"input '{tensor.name}' for model '{model}': {error}")
        return
    expected = math.prod(shape) * item_bytes(tensor.datatype)
    if len(content) != expected:
        invalid(
            f"input byte size mismatch for input '{tensor.name}' for model '{model}'."
            f" Expected {expected}, got {len(content)}"
        )


def raw_contents(inputs: Inputs, raws: Contents, model: str) -> Contents:
    """Return the contents of inputs that are all in the message, checked. Raises RequestError."""
    _check_count(len(raws), len(inputs), model)
    for (tensor, shape), raw in zip(inputs, raws, strict=True):
        check_contents(tensor, shape, raw, model)
    return raws


def mixed_contents(
    inputs: Inputs, sources: Sources, others: Contents, regions: Mapping[str, Region], model: str
) -> Contents:
    """Return the contents of inputs, checked; those that have no source are `others`, in their order.

    Raises RequestError.
    """
    _check_count(len(others), sum(source is None for source in sources), model)
    rest = iter(others)
    contents: list[Content] = []
    for (tensor, shape), source in zip(inputs, sources, strict=True):
        content = next(rest) if source is None else _from_region(source, tensor, regions)
        check_contents(tensor, shape, content, model)
        contents.append(content)
    return contents


def check_sources(sources: Sources, model: str) -> None:
    """Raise RequestError (RESOURCE_EXHAUSTED) for more than a message may have: a request shall not take all memory."""
    size_bytes = sum(source.size_bytes for source in sources if source is not None)
    if size_bytes > MAX_REGION_BYTES:
        message = f"inputs of {size_bytes} bytes for model '{model}', {MAX_REGION_BYTES} are possible"
        raise RequestError(StatusCode.RESOURCE_EXHAUSTED, message)


def _from_region(source: RegionRange, tensor: Tensor, regions: Mapping[str, Region]) -> Content:
    """BYTES are looked into before they are used, so the client must not be able to change them in between."""
    part = source.within(regions)
    return part.read() if tensor.datatype == "BYTES" else part


def _check_count(count: int, expected: int, model: str) -> None:
    if count != expected:
        invalid(f"expected {expected} raw_input_contents but got {count} for model '{model}'")
