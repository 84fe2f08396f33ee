"""Tensors as JSON arrays, to and from the bytes that the protocol's raw contents have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

from gangway.artifact.datatypes import DTYPES
from gangway.executor.frames import join_strings, split_strings
from gangway.executor.memory_budget import MemoryFullError, memory_budget
from gangway.server.errors import invalid, unavailable
from gangway.server.http.json_numbers import Numbers, NumbersError
from gangway.server.http.json_text import dump, dump_numbers, kind_of, parse, shown
from gangway.server.http.messages import utf8

MAX_RANK: Final = 32
MAX_OUTPUT_BYTES: Final = 16 * 1024 * 1024  # of one tensor; as JSON it is five times larger
RAW_ONLY: Final = ("FP16", "BF16")  # Triton, too, has no JSON for them

_WHOLE: Final = frozenset({int})
_KINDS: Final = {
    **dict.fromkeys((name for name, dtype in DTYPES.items() if dtype.kind in "iu"), _WHOLE),
    "BOOL": frozenset({bool}),
    "FP32": frozenset({int, float}),
    "FP64": frozenset({int, float}),
    "BYTES": frozenset({str}),
}


@dataclass(frozen=True)
class LateTensor:
    """A tensor whose numbers have been counted, but not read. `where`: for messages."""

    numbers: Numbers
    datatype: str
    where: str

    def read(self) -> memoryview:
        """Return its raw contents. Raises RequestError (INVALID_ARGUMENT; UNAVAILABLE where memory is full)."""
        if self.datatype not in _KINDS or self.datatype == "BYTES":
            to_raw([0], self.datatype, self.where)
        dtype = np.dtype(DTYPES[self.datatype])
        try:
            memory_budget().take(self.numbers.count * dtype.itemsize)
            read = self.numbers.read(dtype.itemsize, lambda text: to_raw(parse(text), self.datatype, self.where))
        except NumbersError as error:
            invalid(f"{self.where}: failed to parse the request JSON: {error}")
        except MemoryFullError as error:
            unavailable(str(error))
        return memoryview(read)


def flatten(data: Any, where: str) -> "list[Any] | Numbers":
    """Return the elements of a nested or flat list, or of a single value. Raises RequestError (INVALID_ARGUMENT)."""
    if isinstance(data, Numbers):
        return data
    elements = data if isinstance(data, list) else [data]
    for _ in range(MAX_RANK):
        if not (elements and type(elements[0]) is list):
            return elements
        if set(map(type, elements)) != {list}:
            invalid(f"{where}: arrays and elements are mixed")
        elements = list(chain.from_iterable(elements))
    invalid(f"{where}: the arrays are nested deeper than {MAX_RANK} levels")


def raw_of(elements: "list[Any] | Numbers", datatype: str, where: str) -> "bytes | LateTensor":
    """Return elements as raw contents, those of a large array unread. Raises RequestError (INVALID_ARGUMENT)."""
    return LateTensor(elements, datatype, where) if isinstance(elements, Numbers) else to_raw(elements, datatype, where)


def count_of(elements: "list[Any] | Numbers") -> int:
    """Return how many elements there are."""
    return elements.count if isinstance(elements, Numbers) else len(elements)


def to_raw(elements: Sequence[Any], datatype: str, where: str) -> bytes:
    """Return elements as raw contents. Raises RequestError (INVALID_ARGUMENT) with `where` in front of it."""
    if datatype in RAW_ONLY:
        invalid(f"{where}: {datatype} data cannot be sent as JSON. Please use the binary data format")
    if datatype not in _KINDS:
        invalid(f"{where}: unknown datatype '{datatype}'")
    if strange := set(map(type, elements)) - _KINDS[datatype]:
        value = next(element for element in elements if type(element) in strange)
        invalid(f"{where}: {kind_of(value)} ({shown(value)}) is no element of {datatype}")
    if datatype == "BYTES":
        return join_strings([utf8(text, where).encode() for text in elements])
    try:
        with np.errstate(over="ignore"):
            numbers = np.array(elements, dtype=DTYPES[datatype])
    except OverflowError:
        invalid(f"{where}: an element is out of the range of {datatype}")
    infinite = np.flatnonzero(np.isinf(numbers)).tolist() if datatype == "FP32" else []
    if any(math.isfinite(elements[at]) for at in infinite):
        invalid(f"{where}: an element is out of the range of FP32")
    return numbers.tobytes()


def from_raw(raw: memoryview | bytes, datatype: str, elements: int, where: str) -> bytes:
    """Return raw contents as a flat JSON array. Raises RequestError (INVALID_ARGUMENT)."""
    if datatype in RAW_ONLY:
        invalid(f"{where}: {datatype} data cannot be sent as JSON. Please use the binary data format")
    if len(raw) > MAX_OUTPUT_BYTES:
        invalid(f"{where}: {len(raw)} bytes are too many for JSON. Please use the binary data format")
    if datatype == "BYTES":
        try:
            return dump(split_strings(raw, elements))
        except ValueError as error:
            invalid(f"{where}: {error}. Please use the binary data format")
    return dump_numbers(np.frombuffer(raw, DTYPES[datatype]))
