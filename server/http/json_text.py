"""JSON in and out. orjson does the work; what it does not know, NaN and Infinity, the standard library does.

Triton reads and writes NaN, Infinity and -Infinity as bare words, as Python does. Standard JSON has no word for them.
"""

import json
import math
import re
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np
import orjson
from gangway.server.errors import invalid

MAX_JSON_BYTES: Final = 16 * 1024 * 1024  # parsed, hostile JSON grows twentyfold
MAX_VALUES: Final = 100_000  # of a text that is larger: a file in base64 is one
LARGE_BYTES: Final = 1024 * 1024
_QUOTED_CHARACTERS: Final = 100  # of what was wrong, in messages
_SHOWN_CHARACTERS: Final = 40  # of a value, in messages
_SHOWN_ITEMS: Final = 8
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON can name half a character, which UTF-8 cannot hold

_large = threading.Lock()


def turn_for(text: bytes | bytearray | memoryview) -> AbstractContextManager[object]:
    """Return what to hold while a text is understood: large ones wait for each other, so that memory has a bound."""
    return _large if len(text) > LARGE_BYTES else nullcontext()


def parse(text: bytes | bytearray | memoryview) -> Any:
    """Return what the text says. Raises RequestError (INVALID_ARGUMENT) if it is no JSON or too large."""
    if len(text) > MAX_JSON_BYTES and _values(bytes(text)) > MAX_VALUES:
        invalid(f"JSON of more than {MAX_JSON_BYTES} bytes: send large tensors as binary data")
    try:
        return orjson.loads(text)
    except ValueError:
        return _parse_leniently(text)


def _values(text: bytes) -> int:
    return sum(map(text.count, (b",", b"[", b"{")))


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
    """Return a flat array of numbers or booleans as a JSON array."""
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
        case list():
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
    return kind_of(value) if isinstance(value, list | dict) else str(value)[:_SHOWN_CHARACTERS]
