"""A walk over the top level of a serialised ModelInferRequest, so that tensors are not copied by a protobuf parser.

`raw_input_contents` (field 7) and `id` (field 3) are taken out; what is left, the header, is for protobuf's own parser.
It says nothing about one particular request, so equal headers need to be understood only once.

The walk is stricter than protobuf: what protobuf would accept and ignore (a known field of another wire type, groups,
over-long lengths, a second id) is refused here, because no client sends it in good faith.
"""

from collections.abc import Callable
from typing import NamedTuple

from gangway.artifact.format import MAX_TENSORS

REQUEST_ID = 3
RAW_INPUT_CONTENTS = 7
LENGTH_DELIMITED = 2
FIXED_SIZES = {1: 8, 5: 4}  # wire type -> bytes

# Parsed, a hostile header grows up to tenfold (one byte per empty message or per dimension), so its size has a limit of
# its own. Honest headers are a few hundred bytes; typed contents, the exception, are larger.
MAX_HEADER_BYTES = 32 * 1024 * 1024
MAX_FIELDS = 1024  # top-level fields of one request
MAX_ID_BYTES = 64 * 1024

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


def split_request(message: bytes) -> SplitRequest:
    """Take a serialised ModelInferRequest apart. Tensors are not copied. Raises MalformedRequestError."""
    view = memoryview(message)
    end = len(message)
    header: list[memoryview] = []
    raws: list[memoryview] = []
    ids: list[memoryview] = []
    position = kept = fields = 0
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
                header.append(view[kept:start])
                kept = position
                (raws if tag == _RAW_TAG else ids).append(view[content:position])
        else:
            position = _skip_unknown(message, tag, position)
        if tag >> 3 == 0 or tag >> 32:
            raise MalformedRequestError(f"field number {tag >> 3} at byte {start}")
    header.append(view[kept:])
    if end > MAX_HEADER_BYTES:
        _check_header(header)
    request_id = _checked_id(ids) if ids else b""
    if len(raws) > MAX_TENSORS:
        raise MalformedRequestError(f"{len(raws)} raw_input_contents, at most {MAX_TENSORS} are possible")
    return SplitRequest(b"".join(header), request_id, raws)


def _check_header(pieces: list[memoryview]) -> None:
    if sum(map(len, pieces)) > MAX_HEADER_BYTES:
        raise MalformedRequestError(
            f"more than {MAX_HEADER_BYTES} bytes outside raw_input_contents: send large tensors as raw contents"
        )


def _checked_id(ids: list[memoryview]) -> bytes:
    content = bytes(ids[0][: MAX_ID_BYTES + 1])
    if len(ids) > 1 or len(content) > MAX_ID_BYTES:
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
