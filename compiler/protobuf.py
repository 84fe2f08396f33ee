"""Walk over a protocol buffer in a file from header to header; contents are skipped, not read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_FIXED_BYTES = {1: 8, 5: 4}  # by wire type
LENGTH_DELIMITED = 2


class DamagedError(Exception):
    """The bytes are no protocol buffer."""


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


def fields(file: BinaryIO, begin: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message in bytes [begin, end). Raises DamagedError, OSError."""
    while begin < end:
        file.seek(begin)
        number, wire_type = divmod(_varint(file), 8)
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
