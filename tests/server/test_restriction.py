"""What restrictions may look like, whom they admit, and that every method has a category."""

import pytest

from gangway.protos import grpc_service_pb2, health_pb2
from gangway.server.access import CATEGORY_OF_METHOD, Category, Restrictions, parse_restriction


def test_a_restriction_is_read() -> None:
    restriction = parse_restriction("health,model-repository:Admin-Key=a=b:c")
    assert restriction.categories == (Category.HEALTH, Category.MODEL_REPOSITORY)
    assert (restriction.key, restriction.value) == ("admin-key", "a=b:c")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected CATEGORY"),
        ("health", "expected CATEGORY"),
        ("health:key", "expected CATEGORY"),
        ("health:=value", "expected CATEGORY"),
        ("health:key=", "expected CATEGORY"),
        (":key=value", "expected CATEGORY"),
        ("wealth:key=value", "unknown category 'wealth'; known: health, metadata,"),
        ("health,:key=value", "unknown category ''"),
        ("health:my key=value", "'my key' cannot be a header's name"),
        (f"health:{'k' * 257}=value", "cannot be a header's name"),
        ("health:key=ü", "the value of 'key' cannot be a header's"),
        ("health:key= value", "the value of 'key' cannot be a header's"),
    ],
)
def test_others_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_restriction(text)


def test_only_the_right_value_is_admitted() -> None:
    restriction = parse_restriction("health:key=secret")
    assert restriction.admits(["secret"])
    assert restriction.admits(["other", b"secret"])
    assert not any(restriction.admits([wrong]) for wrong in ("", "Secret", "secret ", "secre", b"\xff", "ü"))
    assert not restriction.admits([])


def test_a_category_is_in_one_group_at_most() -> None:
    health, both = parse_restriction("health:a=1"), parse_restriction("trace,health:b=2")
    assert Restrictions((health, both)).duplicate() is Category.HEALTH
    assert Restrictions((parse_restriction("health,health:a=1"),)).duplicate() is Category.HEALTH
    alone = Restrictions((health,))
    assert alone.duplicate() is None
    assert alone.of(Category.HEALTH) is health
    assert alone.of(Category.TRACE) is None


def test_every_method_can_be_restricted() -> None:
    services = (grpc_service_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)
    names = {
        method.name for file in services for service in file.services_by_name.values() for method in service.methods
    }
    assert set(CATEGORY_OF_METHOD) == names
    assert set(CATEGORY_OF_METHOD.values()) == set(Category)
