"""Frozen dataclasses to JSON and back: files of the cache, messages between processes, options of a process.

The declared types of the fields are the schema. What `decode` accepts:

| declared | JSON |
|---|---|
| a dataclass | an object with every field and no other, defaults included |
| a union of dataclasses | the same with one member more, `type`: the name of the class |
| `T \\| None` | null, or what T takes |
| `tuple[T, ...]`, `tuple[T, U]` | an array: of any length, of exactly so many |
| `dict[str, T]` | an object |
| `bool`, `str`, `Path` | a boolean, a string, a string |
| `int` | a number without fraction and exponent, from -2^63 to 2^64 - 1; no boolean |
| `float` | a finite number, an `int` included |
| `Enum`, `Literal` | one of the values |

Of equal keys of an object the last counts. NaN and Infinity are no finite numbers. A text that nests too deeply for the
parser is refused. No value is read deeper than its type says. Callers bound the size of the text: packets have at most
`MAX_MESSAGE_BYTES`, files are the user's own. Whatever is wrong raises ValueError, whose text begins with the path of
the value: `manifest.layers[3].flops is not an integer`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

MIN_INT, MAX_INT = -(1 << 63), (1 << 64) - 1  # what 64 bits hold, with a sign or without
TAG = "type"  # of a union's object

ValueT = TypeVar("ValueT")
Decoder = Callable[[Any], Any]


def encode(value: Any, indent: int | None = None) -> bytes:
    """Return a dataclass as JSON, ASCII. Raises ValueError for a number that is not finite."""
    encoder = _COMPACT if indent is None else json.JSONEncoder(indent=indent, allow_nan=False, default=_plain)
    return encoder.encode(_members(value)).encode()


def encode_tagged(message: Any) -> bytes:
    """Return a member of a union of dataclasses as JSON, ASCII. Raises ValueError for a number that is not finite."""
    return _COMPACT.encode(_tagged(message)).encode()


def decode(kind: type[ValueT], text: bytes | str, where: str) -> ValueT:
    """Return the dataclass that `text` holds; `where` is its name in messages. Raises ValueError."""
    value: ValueT = decode_any(kind, text, where)
    return value


def decode_any(kind: Any, text: bytes | str, where: str) -> Any:
    """Return what `text` holds of any type of the table above, such as a union. Raises ValueError."""
    try:
        content = _PARSER.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    try:
        return _decoder(kind)(content)
    except _MismatchError as error:
        raise ValueError(f"{where}{error.path} {error.problem}") from None


class _MismatchError(Exception):
    """A value that is not of its type. The containers around it complete `path` while the error passes them."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def inside(self, step: str) -> "_MismatchError":
        """Return the same, seen from the container."""
        self.path = step + self.path
        return self


@cache
def _decoder(kind: Any) -> Decoder:
    """Return the function that makes a `kind` of a parsed value. Raises TypeError for a type not in the table."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    if is_dataclass(kind):
        return _record_decoder(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _union_decoder(arguments)
    if origin is tuple:
        return _list_decoder(arguments[0]) if arguments[-1] is Ellipsis else _tuple_decoder(arguments)
    if origin is dict and arguments[0] is str:
        return _dict_decoder(arguments[1])
    if origin is Literal:
        return _choice_decoder({value: value for value in arguments})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choice_decoder({member.value: member for member in kind})
    raise TypeError(f"{kind} has no form in JSON")


def _record_decoder(kind: Any) -> Decoder:
    hints = get_type_hints(kind)
    names = tuple(field.name for field in fields(kind))
    decoders = tuple((name, _decoder(hints[name])) for name in names)
    expected = frozenset(names)

    def decode_record(value: Any) -> Any:
        if type(value) is not dict:
            raise _MismatchError("is not an object")
        if value.keys() != expected:
            name = min(expected ^ value.keys())
            raise _MismatchError(f"has {'no' if name in expected else 'an unknown'} field '{name}'")
        parts: list[Any] = []
        try:
            for name, decoder in decoders:
                parts.append(decoder(value[name]))
        except _MismatchError as error:
            raise error.inside(f".{names[len(parts)]}") from None
        return kind(*parts)

    return decode_record


def _union_decoder(kinds: Sequence[Any]) -> Decoder:
    others = [kind for kind in kinds if kind is not NoneType]
    inner = _decoder(others[0]) if len(others) == 1 else _tagged_decoder(others)
    if len(others) == len(kinds):
        return inner
    return lambda value: None if value is None else inner(value)


def _tagged_decoder(kinds: Sequence[Any]) -> Decoder:
    if not all(map(is_dataclass, kinds)):
        raise TypeError(f"a union of {kinds} has no form in JSON")
    decoders = {kind.__name__: _decoder(kind) for kind in kinds}

    def decode_tagged(value: Any) -> Any:
        if type(value) is not dict:
            raise _MismatchError("is not an object")
        name = value.pop(TAG, None)
        if type(name) is not str or name not in decoders:
            raise _MismatchError(f"is not one of {', '.join(decoders)}", f".{TAG}")
        return decoders[name](value)

    return decode_tagged


def _list_decoder(kind: Any) -> Decoder:
    decoder = _decoder(kind)

    def decode_list(value: Any) -> Any:
        if type(value) is not list:
            raise _MismatchError("is not a list")
        parts: list[Any] = []
        try:
            for part in value:
                parts.append(decoder(part))
        except _MismatchError as error:
            raise error.inside(f"[{len(parts)}]") from None
        return tuple(parts)

    return decode_list


def _tuple_decoder(kinds: Sequence[Any]) -> Decoder:
    decoders = tuple(map(_decoder, kinds))

    def decode_tuple(value: Any) -> Any:
        if type(value) is not list or len(value) != len(decoders):
            raise _MismatchError(f"is not a list of {len(decoders)}")
        parts: list[Any] = []
        try:
            for decoder, part in zip(decoders, value, strict=True):
                parts.append(decoder(part))
        except _MismatchError as error:
            raise error.inside(f"[{len(parts)}]") from None
        return tuple(parts)

    return decode_tuple


def _dict_decoder(kind: Any) -> Decoder:
    decoder = _decoder(kind)

    def decode_dict(value: Any) -> Any:
        if type(value) is not dict:
            raise _MismatchError("is not an object")
        parts: dict[str, Any] = {}
        for key, part in value.items():
            try:
                parts[key] = decoder(part)
            except _MismatchError as error:
                raise error.inside(f".{key}") from None
        return parts

    return decode_dict


def _choice_decoder(choices: Mapping[Any, Any]) -> Decoder:
    types = {type(value) for value in choices}  # True equals 1, and a list cannot be looked up

    def decode_choice(value: Any) -> Any:
        if type(value) not in types or value not in choices:
            raise _MismatchError(f"is not one of {', '.join(map(str, choices))}")
        return choices[value]

    return decode_choice


def _bool(value: Any) -> bool:
    if value is not True and value is not False:
        raise _MismatchError("is not a boolean")
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise _MismatchError("is not an integer")
    if not MIN_INT <= value <= MAX_INT:
        raise _MismatchError("is not an integer of 64 bits")
    return value


def _float(value: Any) -> float:
    if type(value) is float and isfinite(value):
        return value
    if type(value) is int and MIN_INT <= value <= MAX_INT:
        return float(value)
    raise _MismatchError("is not a finite number")


def _str(value: Any) -> str:
    if type(value) is not str:
        raise _MismatchError("is not a string")
    return value


def _path(value: Any) -> Path:
    return Path(_str(value))


def _tagged(message: Any) -> dict[str, Any]:
    return {TAG: type(message).__name__, **_members(message)}


def _members(record: Any) -> dict[str, Any]:
    """Return a dataclass as the object that the encoder completes: it asks `_plain` for what is inside."""
    names, unions = _layout(record.__class__)
    members = {name: getattr(record, name) for name in names}
    for name in unions:
        if members[name] is not None:
            members[name] = _tagged(members[name])
    return members


@cache
def _layout(kind: Any) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of a dataclass's fields, and those whose values are members of a union of dataclasses."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    return names, [name for name in names if sum(map(is_dataclass, get_args(hints[name]))) > 1]


def _plain(value: Any) -> Any:
    """Return what stands in JSON for a value that the encoder does not know."""
    if is_dataclass(value):
        return _members(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_SCALARS: Mapping[Any, Decoder] = {bool: _bool, int: _int, float: _float, str: _str, Path: _path}
_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=_plain)
_PARSER = json.JSONDecoder()
