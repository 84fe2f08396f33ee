"""Frozen dataclasses to JSON and back, nested ones too: messages, and how a process gets all its options.

Options come on standard input, not as an argument: every user of the machine can read those, and options may hold a
secret.
"""

import json
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


def dumps(value: Any) -> str:
    """Return a dataclass as JSON. Its values may be dataclasses, tuples, None, paths, enums and what JSON has."""
    return json.dumps(asdict(value), default=str, separators=(",", ":"))


@contextmanager
def as_stdin(value: Any) -> Iterator[int]:
    """Yield a descriptor for the standard input of a process that calls `from_stdin`."""
    descriptor = os.memfd_create("options")
    try:
        os.pwrite(descriptor, dumps(value).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def from_stdin(kind: type[Kind]) -> Kind:
    """Return what whoever has started this process gave to `as_stdin`. Raises ValueError for anything else."""
    return loads(kind, sys.stdin.read())


def loads(kind: type[Kind], text: str) -> Kind:
    """Return what `dumps` wrote of a `kind`. Raises ValueError for anything else."""
    try:
        made: Kind = make(kind, json.loads(text))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error
    return made


def make(kind: Any, value: Any) -> Any:
    """Return what stands for `value`, as a `kind`: JSON has no tuples, paths and enums.

    A union of several kinds is left as it is. Raises KeyError, TypeError, AttributeError or ValueError for no `kind`.
    """
    if is_dataclass(kind):
        return _record(kind, value)
    arguments = get_args(kind)
    origin = get_origin(kind)
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(make(each, item) for each, item in zip(kinds, value, strict=True))
    if origin in (Union, types.UnionType):
        others = [each for each in arguments if each is not types.NoneType]
        return value if value is None or len(others) > 1 else make(others[0], value)
    if isinstance(kind, type) and issubclass(kind, (Path, Enum)):
        return kind(value)
    return value


def _record(kind: Any, value: Any) -> Any:
    hints = _hints(kind)
    return kind(**{name: make(hints[name], item) for name, item in value.items()})


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)
