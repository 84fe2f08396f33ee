"""Values compare, hash and are replaced like any frozen dataclass, though nothing freezes them at run time."""

from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest

from gangway.scheduler.policy import Query, Start, value


@value(frozen=True, slots=True)
class Quick:
    """Made by `value`."""

    number: int
    text: str = "none"


@dataclass(frozen=True, slots=True)
class Frozen:
    """The same, frozen."""

    number: int
    text: str = "none"


def test_a_value_is_like_a_frozen_dataclass() -> None:
    quick, frozen = Quick(3, "three"), Frozen(3, "three")
    assert quick == Quick(3, "three") != Quick(3)
    assert hash(quick) == hash(frozen) == hash(Quick(3, "three"))
    assert repr(quick).removeprefix("Quick") == repr(frozen).removeprefix("Frozen")
    assert replace(quick, number=4) == Quick(4, "three")
    assert [field.name for field in fields(quick)] == [field.name for field in fields(frozen)]
    assert not hasattr(quick, "__dict__")
    with pytest.raises(FrozenInstanceError):
        frozen.number = 4  # type: ignore[misc]


def test_what_policies_see_can_be_a_key() -> None:
    query = Query(1, 2, 3, 4.0, None)
    assert {query: 1, Start(1, 5, (0,)): 2}[replace(query)] == 1
