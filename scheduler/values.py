"""Frozen dataclasses that are made for every request, or for every decision.

To mypy they are `dataclass(frozen=True, slots=True)`, which is what keeps them from being changed. At run time nothing
does: an `__init__` that has to go around its own `__setattr__` takes ten times as long, which was a sixth of what the
scheduler spent on a small request.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool) -> Callable[[type[T]], type[T]]:
        """Make a dataclass that compares and hashes like a frozen one."""
        assert frozen
        return dataclasses.dataclass(slots=slots, unsafe_hash=True)


__all__ = ["value"]
