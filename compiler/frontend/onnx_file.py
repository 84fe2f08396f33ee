"""Read an ONNX file without its large weights, and where those lie. Needs the standard library only.

Parsing keeps every weight twice, as bytes of the file and in the parsed message. So the file is split here: everything
but large weights is parsed, weights are read one by one, each once, where they are wanted. The walk over the protocol
buffer goes from header to header; contents are skipped, not read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LARGE_BYTES = 4096
_GRAPH, _INITIALIZER = 7, 5  # fields of ModelProto and GraphProto
_KEY, _VALUE = 1, 2  # fields of StringStringEntryProto
_LOCATION = b"location"  # the key beside the name of a file
_MOST_DEPTH = 100  # of messages in one another, as for protobuf's parser
_MOST_TAG = (1 << 32) - 1  # of what stands in front of a field
_MODEL, _TENSOR, _INITIALIZERS = "ModelProto", "TensorProto", "TensorProto of a graph"
_TENSORS = (_TENSOR, _INITIALIZERS)
_BODIES = ("GraphProto", "FunctionProto")
_PARTS: Mapping[str, Mapping[int, str]] = {  # fields that hold tensors or have them in them, and what they hold
    _MODEL: {_GRAPH: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": dict.fromkeys((1, 2), "GraphProto"),
    "GraphProto": {1: "NodeProto", _INITIALIZER: _INITIALIZERS, 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        **dict.fromkeys((5, 10), _TENSOR),
        **dict.fromkeys((6, 11), "GraphProto"),
        **dict.fromkeys((22, 23), "SparseTensorProto"),
    },
    "SparseTensorProto": dict.fromkeys((1, 2), _TENSOR),
}
_DATA_TYPE, _NAME, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 2, 8, 9, 13, 14  # fields of TensorProto
_WHOLE_BYTES = {1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13}  # element types that numpy reads as they stand
_FIXED_BYTES = {1: 8, 5: 4}  # by wire type
LENGTH_DELIMITED = 2


class DamagedError(Exception):
    """The bytes are no protocol buffer."""


@dataclass(frozen=True)
class Stretch:
    """Bytes of a file."""

    begin: int
    size_bytes: int


@dataclass(frozen=True)
class Reference:
    """Bytes of another file, which hold a tensor. `size_bytes`: None: all that follow."""

    location: str
    offset: int
    size_bytes: int | None


@dataclass(frozen=True)
class Field:
    """One field: its number, and where in the file its header, its content and the next field begin.

    `value` is the content of a number, 0 for all others.
    """

    number: int
    wire_type: int
    begin: int
    content: int
    end: int
    value: int = 0


def split(path: Path) -> tuple[bytes, dict[str, Stretch]]:
    """Return the ModelProto without the bytes of large weights, and where in the file those stand, by name.

    What is damaged comes back whole, for the parser to refuse. Raises OSError.
    """
    weights: dict[str, Stretch] = {}
    with path.open("rb") as file:
        try:
            content = b"".join(
                message(_GRAPH, _graph(file, field, weights)) if field.number == _GRAPH else _read(file, field)
                for field in fields(file, 0, path.stat().st_size)
            )
        except DamagedError:
            return path.read_bytes(), {}
    return content, weights


def _graph(file: BinaryIO, graph: Field, weights: dict[str, Stretch]) -> bytes:
    return b"".join(
        message(_INITIALIZER, _tensor(file, field, weights)) if field.number == _INITIALIZER else _read(file, field)
        for field in fields(file, graph.content, graph.end)
    )


def _tensor(file: BinaryIO, tensor: Field, weights: dict[str, Stretch]) -> bytes:
    parts = list(fields(file, tensor.content, tensor.end))
    raw = [part for part in parts if part.number == _RAW_DATA]
    names = [_content(file, part) for part in parts if part.number == _NAME]
    types = {part.value for part in parts if part.number == _DATA_TYPE}
    if len(raw) == len(names) == 1 and types <= _WHOLE_BYTES and raw[0].end - raw[0].content >= LARGE_BYTES:
        name = names[0].decode(errors="replace")
        if name not in weights:
            weights[name] = Stretch(raw[0].content, raw[0].end - raw[0].content)
            parts.remove(raw[0])
    return b"".join(_read(file, part) for part in parts)


def references(path: Path) -> list[Reference]:
    """Return the parts of other files that hold initializers, of the graph and of graphs inside nodes.

    Every start must know the files, for the key of a model. Raises DamagedError for what cannot be walked to its end,
    ValueError for a reference that is not plain, or of another tensor than an initializer: a reader of the file might
    look for that in any folder. Raises OSError.
    """
    with path.open("rb") as file:
        whole = Field(0, LENGTH_DELIMITED, 0, 0, path.stat().st_size)
        return list(dict.fromkeys(_references(file, whole, _MODEL)))


def _references(
    file: BinaryIO, message: Field, kind: str, depth: int = 0, is_searched: bool = False
) -> Iterator[Reference]:
    """Yield the references of a message, however deep they are; `kind`: of message, a key of _PARTS, or of tensor.

    `is_searched`: the word of a reference stands in it. Nodes without that word are not walked: they have thousands of
    fields.
    """
    if depth > _MOST_DEPTH:
        raise DamagedError
    if kind in _TENSORS:
        yield from _references_of_tensor(file, message, kind)
        return
    for part in fields(file, message.content, message.end):
        inner = _PARTS[kind].get(part.number)
        if inner is None or part.wire_type != LENGTH_DELIMITED:
            continue
        searches = kind in _BODIES and inner not in _TENSORS and not is_searched
        if not searches or _LOCATION in _read(file, part):
            yield from _references(file, part, inner, depth + 1, is_searched or searches)


def _references_of_tensor(file: BinaryIO, tensor: Field, kind: str) -> Iterator[Reference]:
    parts = list(fields(file, tensor.content, tensor.end))
    if not any(part.number == _DATA_LOCATION and part.value for part in parts):
        return
    if kind != _INITIALIZERS:
        raise ValueError("a tensor that is no initializer of a graph is in another file")
    entries: dict[bytes, bytes] = {}
    for part in parts:
        if part.number == _EXTERNAL_DATA and part.wire_type == LENGTH_DELIMITED:
            strings = (each for each in fields(file, part.content, part.end) if each.wire_type == LENGTH_DELIMITED)
            entry = {each.number: _content(file, each) for each in strings}
            key = entry.get(_KEY, b"")
            if key in entries:
                raise ValueError(f"'{key.decode(errors='replace')}' of a tensor is given twice")
            entries[key] = entry.get(_VALUE, b"")
    try:
        location, length = entries[b"location"].decode(), entries.get(b"length")
        yield Reference(location, int(entries.get(b"offset", b"0")), None if length is None else int(length))
    except (KeyError, ValueError):
        raise ValueError("a tensor in another file has no location, or one that is no text and numbers") from None


def fields(file: BinaryIO, begin: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message in bytes [begin, end). Raises DamagedError, OSError."""
    while begin < end:
        file.seek(begin)
        tag = _varint(file)
        number, wire_type = divmod(tag, 8)
        if not number or tag > _MOST_TAG:
            raise DamagedError
        field = _field(file, number, wire_type, begin)
        if field.end > end:
            raise DamagedError
        yield field
        begin = field.end


def _field(file: BinaryIO, number: int, wire_type: int, begin: int) -> Field:
    if wire_type == 0:
        content = file.tell()
        value = _varint(file)
        return Field(number, wire_type, begin, content, file.tell(), value)
    if wire_type == LENGTH_DELIMITED:
        length = _varint(file)
        return Field(number, wire_type, begin, file.tell(), file.tell() + length)
    if wire_type in _FIXED_BYTES:
        return Field(number, wire_type, begin, file.tell(), file.tell() + _FIXED_BYTES[wire_type])
    raise DamagedError


def message(number: int, content: bytes) -> bytes:
    """Return a length-delimited field."""
    return _encoded(number * 8 + LENGTH_DELIMITED) + _encoded(len(content)) + content


def _encoded(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(parts) + bytes([value])


def _varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            break
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise DamagedError


def _read(file: BinaryIO, field: Field) -> bytes:
    """The whole field."""
    return _bytes(file, field.begin, field.end)


def _content(file: BinaryIO, field: Field) -> bytes:
    return _bytes(file, field.content, field.end)


def _bytes(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)
