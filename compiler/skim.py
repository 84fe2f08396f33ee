"""Does an ONNX file keep weights in other files? Found by skipping from header to header, without reading its weights.

Every start must know, for the key of a model; to parse gigabytes, or to import onnx, would take longer than the rest.
"""

from pathlib import Path
from typing import BinaryIO

_GRAPH, _INITIALIZER, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 13, 14  # fields of ModelProto, GraphProto, TensorProto


class _DamagedError(Exception):
    """The bytes are no protocol buffer."""


def may_have_external_data(path: Path) -> bool:
    """Whether a weight of the ONNX file lies in another file; true, too, if the file is damaged. Raises OSError."""
    with path.open("rb") as file:
        try:
            return _search(file, path.stat().st_size, (_GRAPH, _INITIALIZER))
        except _DamagedError:
            return True


def _search(file: BinaryIO, end: int, path: tuple[int, ...]) -> bool:
    """Whether a message that ends at `end` has, down a path of fields, one that points to external data."""
    while file.tell() < end:
        field, wire_type = divmod(_varint(file), 8)
        if not path and field in (_EXTERNAL_DATA, _DATA_LOCATION):
            return True
        match wire_type:
            case 0:  # a number
                _varint(file)
            case 1:  # eight bytes
                file.seek(8, 1)
            case 5:  # four bytes
                file.seek(4, 1)
            case 2:  # a length, and so many bytes
                inner_end = _varint(file)
                inner_end += file.tell()
                if inner_end > end:
                    raise _DamagedError
                if path and field == path[0] and _search(file, inner_end, path[1:]):
                    return True
                file.seek(inner_end)
            case _:
                raise _DamagedError
    return False


def _varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            break
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise _DamagedError
