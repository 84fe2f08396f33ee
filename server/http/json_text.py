"""JSON in and out. orjson does the work; what it does not know, NaN and Infinity, the standard library does.

Triton reads and writes NaN, Infinity and -Infinity as bare words, as Python does. Standard JSON has no word for them.
"""

import json
import math
import re
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson

from gangway.server.errors import invalid
from gangway.server.http.json_numbers import LARGE_BYTES, Numbers, find_numbers
from gangway.server.large_contents import PAUSE_S

MAX_JSON_BYTES: Final = 16 * 1024 * 1024  # of arrays of numbers
MAX_VALUES: Final = 50_000  # of a large text, outside of large arrays of numbers: made objects of in milliseconds
_QUOTED_CHARACTERS: Final = 100  # of what was wrong, in messages
_SHOWN_CHARACTERS: Final = 40  # of a value, in messages
_SHOWN_ITEMS: Final = 8
_SLICE_NUMBERS: Final = 8192  # are written without a pause
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON can name half a character, which UTF-8 cannot hold

_PLACE: Final = secrets.token_hex(16)  # what stands in a text for an array of numbers, with its number behind it

_large = threading.Lock()


def parse(text: bytes | bytearray | memoryview) -> Any:
    """Return what the text says, a large array of numbers as `Numbers`. Raises RequestError (INVALID_ARGUMENT).

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
    _put_back(content, [Numbers.at(text, begin, end) for begin, end in found.arrays])
    return content


def _put_back(content: Any, arrays: Sequence[Numbers]) -> None:
    """Put arrays of numbers in their places."""
    rest = [content] if arrays else []
    while rest:
        value = rest.pop()
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, dict | list):
                rest.append(item)
            elif isinstance(item, str) and item.startswith(_PLACE):
                value[key] = arrays[int(item.removeprefix(_PLACE))]


def _parse(text: bytes | bytearray | memoryview) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return _parse_leniently(text)


def parse_object(text: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return a JSON object; no text at all is an empty one. Raises RequestError (INVALID_ARGUMENT)."""
    if not text:
        return {}
    content = parse(text)
    if not isinstance(content, dict):
        invalid(f"expected a JSON object, got {kind_of(content)}")
    return content


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
        case list() | Numbers():
            return "an array"
        case _:
            return "an object"


def shown(value: Any) -> str:
    """Return the beginning of a value, for messages: it may be large, and nested deeper than Python can print."""
    if isinstance(value, list):
        items = [_scalar(item) for item in value[:_SHOWN_ITEMS]]
        return f"[{', '.join(items)}{', ...' if len(value) > _SHOWN_ITEMS else ''}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    return kind_of(value) if isinstance(value, list | dict | Numbers) else str(value)[:_SHOWN_CHARACTERS]
