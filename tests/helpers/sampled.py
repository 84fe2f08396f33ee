"""Parameters of which `make test` takes some, and `make test-long` the others, which are of the same kinds."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """All values of one argument, or tuples of several ones'; those that are not `kept` are marked `long`."""
    found = list(values)
    assert all(value in found for value in kept), "a value that is kept is none of them"
    return [value if value in kept else _long(value) for value in found]


def _long(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
