"""Frozen dataclasses that are made for every request, or for every decision.

To type checkers they are `dataclass(frozen=True, slots=True)`, which is what keeps them from being changed. At run time
nothing does: an `__init__` that goes around its own `__setattr__` takes ten times as long.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(field_specifiers=(dataclasses.field,))
def value(*, frozen: bool, slots: bool) -> Callable[[type[T]], type[T]]:
    """Make a dataclass that compares and hashes like a frozen one."""
    assert frozen
    return dataclasses.dataclass(slots=slots, unsafe_hash=True)
