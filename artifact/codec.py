"""Frozen dataclasses to JSON and back, strictly: every field present, no other, every value of the declared type."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import IntEnum, StrEnum
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gangway.artifact.format import Manifest

RecordT = TypeVar("RecordT")


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON text, UTF-8."""
    return json.dumps(asdict(manifest), indent=1).encode()


def decode(text: bytes) -> Manifest:
    """Return the manifest that `text` holds. Raises ValueError that names the offending field."""
    return decode_record(Manifest, text, "manifest")


def decode_record(kind: type[RecordT], text: bytes, where: str) -> RecordT:
    """Return the dataclass `kind` that `text` holds; `where` is its name in messages. Raises ValueError."""
    record = _value(kind, json.loads(text), where)
    assert isinstance(record, kind)
    return record


def _value(kind: Any, value: Any, where: str) -> Any:
    """Return JSON `value` as an instance of type `kind`, which is one of those that the schema uses."""
    if is_dataclass(kind):
        return _record(kind, value, where)
    origin = get_origin(kind)
    if origin is UnionType:
        (kind, absent) = get_args(kind)
        assert absent is NoneType
        return None if value is None else _value(kind, value, where)
    if origin is tuple:
        (item, _ellipsis) = get_args(kind)
        _expect(isinstance(value, list), where, "a list")
        return tuple(_value(item, part, f"{where}[{index}]") for index, part in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object")
        return {key: _value(get_args(kind)[1], part, f"{where}.{key}") for key, part in value.items()}
    if kind is bool or kind is str:
        _expect(type(value) is kind, where, "a boolean" if kind is bool else "a string")
        return value
    if issubclass(kind, StrEnum):
        _expect(type(value) is str, where, "a string")
        return kind(value)
    if kind is float:
        _expect(type(value) in (int, float) and isfinite(value), where, "a finite number")
        return float(value)
    _expect(type(value) is int, where, "an integer")
    return kind(value) if issubclass(kind, IntEnum) else value


def _record(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object")
    hints = _hints(kind)
    if wrong := set(hints) ^ set(value):
        name = min(wrong)
        raise ValueError(f"{where} has {'no' if name in hints else 'an unknown'} field '{name}'")
    return kind(**{name: _value(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def _expect(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{where} is not {what}")
