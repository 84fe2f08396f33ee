"""What is made for every request compares, hashes and is replaced like any dataclass, by an `__init__` of its own."""

import inspect
from dataclasses import fields, replace

import pytest

from gangway.scheduler.policy import Query, RunningBlock, Snapshot, Start

QUERY = Query(1, 2, 3, 4.0, None)


@pytest.mark.parametrize("kind", [Query, RunningBlock, Snapshot, Start])
def test_its_fields_are_what_it_is_made_of(kind: type) -> None:
    made_of = list(inspect.signature(kind).parameters)
    assert made_of == [field.name for field in fields(kind)]
    values = {name: object() for name in made_of}
    made = kind(**values)
    assert all(getattr(made, name) is value for name, value in values.items())
    assert not hasattr(made, "__dict__")


def test_it_is_equal_to_its_like() -> None:
    start = Start(1, 5, (0,), reason="idle")
    assert start == Start(1, 5, (0,), reason="idle") != replace(start, cores=(0, 1))
    assert replace(start, cores=(0, 1)) == Start(1, 5, (0, 1), reason="idle")
    assert repr(start).startswith("Start(query_id=1, end_layer=5, cores=(0,), versions=(), wanted=0, reason='idle'")


def test_it_can_be_a_key() -> None:
    assert {QUERY: 1, Start(1, 5, (0,)): 2}[replace(QUERY)] == 1
