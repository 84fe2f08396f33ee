"""JSON in and out: values, large arrays of numbers, protobuf messages, and tensors.

orjson does the work, but for NaN, Infinity and -Infinity, which the standard library handles. Triton reads and writes
them as bare words, for which standard JSON has none. Protobuf messages are written with the names of the protocol,
since protobuf's own JSON writes 64-bit integers as strings, which Triton's clients do not expect.

A parser holds Python's lock from the first byte to the last, and makes many objects. So numpy scans what is large,
which lets other threads run. Large arrays of numbers are taken out, and read in slices when the rest of the request has
been found right.
"""

import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import orjson

from gangway.artifact.datatypes import DTYPES, RAW_ONLY
from gangway.base.memory_budget import MemoryFullError, memory_budget
from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.python_backend.elements import split_texts
from gangway.server.errors import invalid, unavailable
from gangway.server.requests.contents import PAUSE_S

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Read = Callable[[bytes], bytes]  # of a JSON array of numbers without arrays in it: the raw elements

LARGE_BYTES: Final = 64 * 1024  # smaller texts are parsed as they are: that takes a millisecond or two
MIN_ARRAY_BYTES: Final = 4096  # smaller arrays stay where they are
SLICE_BYTES: Final = 16 * 1024  # are read without a pause: some tenths of a millisecond
_SCAN_BYTES: Final = 64 * 1024  # are looked over without a pause
_BEFORE_BYTES: Final = 64  # from the quote behind a name to the bracket of its array, at most
_BEGIN: Final = re.compile(rb"\s*:\s*\[")
_QUOTE, _BACKSLASH, _COMMA, _OPEN, _CLOSE, _BRACE = b'"\\,[]{'
_SPACES: Final = bytes.maketrans(b"[]", b"  ")

# What a character is in an array of numbers, and which neighbours are wrong there, blanks left out.
_BLANK, _OPENS, _CLOSES, _SEPARATES, _OTHER = range(5)
_KINDS: Final = np.full(256, _OTHER, np.uint8)
_KINDS[list(b" \t\r\n")] = _BLANK
_KINDS[[_OPEN, _CLOSE, _COMMA]] = _OPENS, _CLOSES, _SEPARATES
_WRONG: Final = np.zeros((5, 5), bool)
for _pair in ("[]", "[,", ",]", ",,", "][", "]1", "1["):
    _WRONG[tuple(_KINDS[list(_pair.encode())])] = True

_turn = threading.Lock()  # one array is read at a time: no two could at once, and others get Python's lock sooner

MAX_JSON_BYTES: Final = 16 * 1024 * 1024  # of arrays of numbers
MAX_VALUES: Final = 50_000  # of a large text, outside of large arrays of numbers: made objects of in milliseconds
_QUOTED_CHARACTERS: Final = 100  # of what was wrong, in messages
_SHOWN_CHARACTERS: Final = 40  # of a value, in messages
_SHOWN_ITEMS: Final = 8
_SLICE_NUMBERS: Final = 8192  # are written without a pause
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON can name half a character, which UTF-8 cannot hold

_PLACE: Final = secrets.token_hex(16)  # what stands in a text for an array of numbers, with its number behind it

_large = threading.Lock()

MAX_UINT64 = 2**64 - 1
MAX_INT64 = 2**63 - 1

MAX_RANK: Final = 32
MAX_OUTPUT_BYTES: Final = 16 * 1024 * 1024  # of one tensor; as JSON it is five times larger

_WHOLE: Final = frozenset({int})
_ELEMENT_TYPES: Final = {
    **dict.fromkeys((name for name, dtype in DTYPES.items() if dtype.kind in "iu"), _WHOLE),
    "BOOL": frozenset({bool}),
    "FP32": frozenset({int, float}),
    "FP64": frozenset({int, float}),
    "BYTES": frozenset({str}),
}


def parse(text: bytes | bytearray | memoryview) -> Any:
    """Return what the text says, a large array of numbers as `NumberText`. Raises RequestError (INVALID_ARGUMENT).

    It does if the text is no JSON, or too large: values are counted before anything is made of them.
    """
    if len(text) <= LARGE_BYTES:
        return _parse(text)
    text = bytes(text)
    found = find_numbers(text)
    if found.values > MAX_VALUES or sum(end - begin for begin, end in found.arrays) > MAX_JSON_BYTES:
        invalid(
            f"JSON of more than {MAX_JSON_BYTES} bytes of numbers, or more than {MAX_VALUES} other values:"
            " send large tensors as binary data"
        )
    pieces, at = [], 0
    for index, (begin, end) in enumerate(found.arrays):
        pieces += [text[at:begin], b'"%b%d"' % (_PLACE.encode(), index)]
        at = end
    with _large:
        content = _parse(b"".join((*pieces, text[at:])))
    _put_back(content, [NumberText.at(text, begin, end) for begin, end in found.arrays])
    return content


def parse_object(text: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return a JSON object; no text at all is an empty one. Raises RequestError (INVALID_ARGUMENT)."""
    if not text:
        return {}
    content = parse(text)
    if not isinstance(content, dict):
        invalid(f"expected a JSON object, got {kind_of(content)}")
    return content


def _parse(text: bytes | bytearray | memoryview) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return _parse_leniently(text)


def _parse_leniently(text: bytes | bytearray | memoryview) -> Any:
    try:
        content = json.loads(str(text, "utf-8"), parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except UnicodeEncodeError as error:
        invalid(f"failed to parse the request JSON: the string is not UTF-8: {error.reason}")
    except RecursionError:
        invalid("failed to parse the request JSON: it is nested too deeply")
    except ValueError as error:
        invalid(f"failed to parse the request JSON: {str(error)[:_QUOTED_CHARACTERS]}")


def _finite(text: str) -> float:
    """A number that is written with digits is none of the infinities, which have words."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:_SHOWN_CHARACTERS]} is out of range")
    return value


def dump(content: Any) -> bytes:
    """Return compact JSON."""
    return orjson.dumps(content)


def dump_numbers(numbers: "np.ndarray[Any, np.dtype[Any]]") -> bytes:
    """Return a flat array of numbers or booleans as a JSON array, made slice by slice if it is large."""
    if len(numbers) <= _SLICE_NUMBERS:
        return _dump_slice(numbers)
    pieces = []
    for at in range(0, len(numbers), _SLICE_NUMBERS):
        pieces.append(_dump_slice(numbers[at : at + _SLICE_NUMBERS])[1:-1])
        time.sleep(PAUSE_S)
    return b"[" + b",".join(pieces) + b"]"


def _dump_slice(numbers: "np.ndarray[Any, np.dtype[Any]]") -> bytes:
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        return json.dumps(numbers.tolist(), separators=(",", ":")).encode()
    return orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)


def kind_of(value: Any) -> str:
    """Return JSON's name for a kind of value, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | NumberText():
            return "an array"
        case _:
            return "an object"


def shown(value: Any) -> str:
    """Return the beginning of a value as JSON has it, for messages: it may be large, and nested too deep to print."""
    if isinstance(value, list):
        items = [_scalar(item) for item in value[:_SHOWN_ITEMS]]
        return f"[{', '.join(items)}{', ...' if len(value) > _SHOWN_ITEMS else ''}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, list | dict | NumberText):
        return kind_of(value)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)[:_SHOWN_CHARACTERS]


def set_parameters(target: Any, content: Any, where: str) -> None:
    """Copy a JSON object of parameters to a map of InferParameter. Raises RequestError (INVALID_ARGUMENT)."""
    if not isinstance(content, dict):
        invalid(f"{where}: expected 'parameters' to be an object, got {kind_of(content)}")
    for name, value in content.items():
        set_parameter(target[name], value, f"{where}: parameter '{name}'")


def set_parameter(target: pb.InferParameter, value: Any, where: str) -> None:
    """Give a parameter its value, in the kind that JSON has for it. Raises RequestError (INVALID_ARGUMENT)."""
    match value:
        case bool():
            target.bool_param = value
        case int() if -MAX_INT64 - 1 <= value <= MAX_INT64:
            target.int64_param = value
        case int() if MAX_INT64 < value <= MAX_UINT64:
            target.uint64_param = value
        case int():
            invalid(f"{where}: the number has more than 64 bits")
        case float():
            target.double_param = value
        case str():
            target.string_param = utf8(value, where)
        case _:
            invalid(f"{where}: expected a string, a number or a boolean, got {kind_of(value)}")


def parameters_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a map of parameters, or settings, as a JSON object; one without value is null."""
    content = {}
    for name in sorted(parameters):
        choice = parameters[name].WhichOneof("parameter_choice")
        content[name] = getattr(parameters[name], choice) if choice else None
    return content


def utf8(text: str, where: str) -> str:
    """Return a string that can be sent: JSON may name half a character. Raises RequestError (INVALID_ARGUMENT)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        invalid(f"{where}: the string is not UTF-8: {error.reason}")
    return text


def string_of(content: Mapping[str, Any], name: str, where: str) -> str:
    """Return a member that must be a string. Raises RequestError (INVALID_ARGUMENT)."""
    value = content.get(name)
    if not isinstance(value, str):
        invalid(f"{where}: expected a string as '{name}', got {kind_of(value) if name in content else 'nothing'}")
    return utf8(value, where)


def number_in(content: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """Return a member that must be a number from 0 to 2^64 - 1. Raises RequestError (INVALID_ARGUMENT)."""
    value = content.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_UINT64:
        invalid(f"{where}: expected a number from 0 as '{name}', got {shown(value)}")
    return value


class NumbersError(ValueError):
    """The text is no array of numbers, or its arrays are not nested evenly."""


@dataclass(frozen=True, eq=False)
class NumberText:
    """A large array of numbers that has not been read: `text` between `begin` and `end`, brackets included.

    `count`: its commas and one.
    """

    text: bytes
    begin: int
    end: int
    count: int

    @classmethod
    def at(cls, text: bytes, begin: int, end: int) -> "NumberText":
        """Return the array that is there, its elements counted."""
        scanned = _parts(np.frombuffer(text, np.uint8), begin, end)
        return cls(text, begin, end, 1 + sum(int(np.count_nonzero(part == _COMMA)) for part in scanned))

    def read(self, element_bytes: int, read: Read) -> bytearray:
        """Return the raw elements. Raises NumbersError, or what `read` raises."""
        raw, at = bytearray(self.count * element_bytes), 0
        nested = self.text.find(b"[", self.begin + 1, self.end) > 0
        check = _Nesting()
        for piece in _slices(self.text, self.begin + 1, self.end - 1):
            if nested:
                check.feed(piece)
            with _turn:
                elements = read(b"[" + (piece.translate(_SPACES) if nested else piece) + b"]")
            if at + len(elements) > len(raw):
                raise NumbersError("there are more elements than commas")
            raw[at : at + len(elements)] = elements
            at += len(elements)
            time.sleep(PAUSE_S)
        if check.depth or at != len(raw):
            raise NumbersError("its brackets and commas do not match")
        return raw


def _slices(text: bytes, begin: int, end: int) -> Iterator[bytes]:
    """Yield the text in pieces, cut at commas, which are left out."""
    while end - begin > SLICE_BYTES:
        cut = text.rfind(b",", begin, begin + SLICE_BYTES)
        if cut < 0:  # one number, or blanks
            cut = text.find(b",", begin, end)
        if cut < 0:
            break
        yield text[begin:cut]
        begin = cut + 1
    yield text[begin:end]


class _Nesting:
    """Follows the brackets of an array from slice to slice; `depth` of those within it that are open."""

    def __init__(self) -> None:
        self.depth = 0
        self._elements: int | None = None  # depth of all elements

    def feed(self, piece: bytes) -> None:
        """Look at the next slice. Raises NumbersError."""
        kinds = _KINDS[np.frombuffer(piece, np.uint8)]
        kinds = kinds[kinds != _BLANK]
        around = np.concatenate(([_SEPARATES], kinds, [_SEPARATES]))
        if not len(kinds) or _WRONG[around[:-1], around[1:]].any():
            raise NumbersError("its brackets and commas do not match")
        steps = (kinds == _OPENS).astype(np.int32) - (kinds == _CLOSES)
        depths = np.cumsum(steps, dtype=np.int32) + self.depth
        elements = depths[kinds == _OTHER]
        if self._elements is None and len(elements):
            self._elements = int(elements[0])
        if depths.min() < 0 or (elements != self._elements).any():
            raise NumbersError("arrays and elements are mixed")
        self.depth = int(depths[-1])


@dataclass(frozen=True)
class Findings:
    """The large arrays of numbers of a text, where they are, and how many values there are outside of them."""

    arrays: tuple[tuple[int, int], ...]
    values: int


def find_numbers(text: bytes) -> Findings:
    """Look a JSON text over. What is no JSON may give anything, which a parser will find out."""
    everything = np.frombuffer(text, np.uint8)
    values, arrays, quote, inside = 0, [], -1, False
    for at, part, quotes, is_inside in _scanned(everything):
        values += _count_values(part[~is_inside])
        places = np.flatnonzero(quotes) + at
        if len(places):
            gaps = np.diff(places, prepend=quote)
            for index in np.flatnonzero(gaps > MIN_ARRAY_BYTES).tolist():
                if not inside ^ bool(index & 1):  # the gap before an opening quote
                    arrays += _array_in(text, int(places[index] - gaps[index]) + 1, int(places[index]))
            quote, inside = int(places[-1]), bool(is_inside[-1])
    if not inside and len(text) - quote > MIN_ARRAY_BYTES:
        arrays += _array_in(text, quote + 1, len(text))
    for begin, end in arrays:
        values -= sum(map(_count_values, _parts(everything, begin, end)))
    return Findings(tuple(arrays), values)


def _parts(text: Bytes, begin: int, end: int) -> Iterator[Bytes]:
    for at in range(begin, end, _SCAN_BYTES):
        yield text[at : min(at + _SCAN_BYTES, end)]
        time.sleep(PAUSE_S)


def _scanned(text: Bytes) -> Iterator[tuple[int, Bytes, Any, Any]]:
    """Yield parts of the text: where, the bytes, which are quotes around strings, which are in strings."""
    inside, backslashes = False, 0
    at = 0
    for part in _parts(text, 0, len(text)):
        quotes = part == _QUOTE
        if backslashes or (part == _BACKSLASH).any():
            escaped, backslashes = _escaped(part, backslashes)
            quotes &= ~escaped
        is_inside = np.logical_xor.accumulate(quotes)
        if inside:
            is_inside = ~is_inside
        inside = bool(is_inside[-1])
        yield at, part, quotes, is_inside
        at += len(part)


def _escaped(part: Bytes, backslashes: int) -> tuple[Any, int]:
    """Return which bytes have an odd number of backslashes before them, and how many the part ends with.

    `backslashes`: how many stand before the part.
    """
    index = np.arange(len(part), dtype=np.int32)
    others = np.where(part == _BACKSLASH, np.int32(-1 - backslashes), index)
    run = index - np.maximum.accumulate(others)  # of backslashes, up to each byte
    escaped = np.empty(len(part), bool)
    escaped[0] = backslashes & 1
    escaped[1:] = run[:-1] & 1
    return escaped, int(run[-1])


def _count_values(part: Bytes) -> int:
    """Return how many values begin there, at most: commas and opening brackets."""
    return int(np.count_nonzero(part == _COMMA) + np.count_nonzero(part | 0x20 == _BRACE))


def _array_in(text: bytes, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the array between two strings, the first of which is its name; nothing if it is small or there is none."""
    found = _BEGIN.match(text, begin, min(end, begin + _BEFORE_BYTES))
    if found is None:
        return []
    start = found.end() - 1
    brace = text.find(b"}", start, end)
    stop = text.rfind(b"]", start, end if brace < 0 else brace) + 1
    is_whole = text.count(b"[", start, stop) == text.count(b"]", start, stop)  # else a string is in it, too
    return [(start, stop)] if is_whole and stop - start > MIN_ARRAY_BYTES else []


def _put_back(content: Any, arrays: Sequence[NumberText]) -> None:
    """Put arrays of numbers in their places."""
    rest = [content] if arrays else []
    while rest:
        value = rest.pop()
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, dict | list):
                rest.append(item)
            elif isinstance(item, str) and item.startswith(_PLACE):
                value[key] = arrays[int(item.removeprefix(_PLACE))]


@dataclass(frozen=True)
class UnreadTensor:
    """A tensor whose numbers have been counted, but not read. `where`: for messages."""

    numbers: NumberText
    datatype: str
    where: str

    def read(self) -> memoryview:
        """Return its raw contents. Raises RequestError (INVALID_ARGUMENT; UNAVAILABLE where memory is full)."""
        if self.datatype not in _ELEMENT_TYPES or self.datatype == "BYTES":
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


def flatten(data: Any, where: str) -> "list[Any] | NumberText":
    """Return the elements of a nested or flat list, or of a single value. Raises RequestError (INVALID_ARGUMENT)."""
    if isinstance(data, NumberText):
        return data
    elements = data if isinstance(data, list) else [data]
    for _ in range(MAX_RANK):
        if not (elements and type(elements[0]) is list):
            return elements
        if set(map(type, elements)) != {list}:
            invalid(f"{where}: arrays and elements are mixed")
        elements = list(chain.from_iterable(elements))
    invalid(f"{where}: the arrays are nested deeper than {MAX_RANK} levels")


def raw_of(elements: "list[Any] | NumberText", datatype: str, where: str) -> "bytes | UnreadTensor":
    """Return elements as raw contents, those of a large array unread. Raises RequestError (INVALID_ARGUMENT)."""
    return (
        UnreadTensor(elements, datatype, where)
        if isinstance(elements, NumberText)
        else to_raw(elements, datatype, where)
    )


def element_count(elements: "list[Any] | NumberText") -> int:
    """Return how many elements there are."""
    return elements.count if isinstance(elements, NumberText) else len(elements)


def to_raw(elements: Sequence[Any], datatype: str, where: str) -> bytes:
    """Return elements as raw contents. Raises RequestError (INVALID_ARGUMENT) with `where` in front of it."""
    if datatype in RAW_ONLY:
        invalid(f"{where}: {datatype} data cannot be sent as JSON. Please use the binary data format")
    if datatype not in _ELEMENT_TYPES:
        invalid(f"{where}: unknown datatype '{datatype}'")
    if strange := set(map(type, elements)) - _ELEMENT_TYPES[datatype]:
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
            return dump(split_texts(raw, elements))
        except ValueError as error:
            invalid(f"{where}: {error}. Please use the binary data format")
    return dump_numbers(np.frombuffer(raw, DTYPES[datatype]))
