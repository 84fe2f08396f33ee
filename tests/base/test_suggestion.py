"""Which known name a wrong one probably means."""

import pytest

from gangway.base.suggestion import MAX_CHARACTERS, did_you_mean, nearest

KNOWN = ("qos_ms", "late", "max_queue_size", "gangway_buckets", "gangway_least_ms", "--grpc-port", "--http-port")


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("Late", "late"),
        ("qos-ms", "qos_ms"),
        ("qos_mss", "qos_ms"),
        ("qos", "qos_ms"),  # without its unit
        ("max_queue", "max_queue_size"),
        ("gangway", ""),  # two names begin so
        ("--http-prt", "--http-port"),
        ("precision", ""),
        ("x" * (MAX_CHARACTERS + 1), ""),
    ],
)
def test_the_nearest_name(word: str, near: str) -> None:
    assert nearest(word, KNOWN) == near
    assert did_you_mean(word, KNOWN) == (f"; did you mean {near!r}?" if near else "")
