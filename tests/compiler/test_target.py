"""The host is detected, and an override is checked against it."""

import pytest

from gangway.compiler.target import TARGETS, UnsupportedTargetError, detect, machine_features, supported


def test_the_detected_target_runs_here() -> None:
    target = detect()
    assert supported(target, machine_features())
    better = list(TARGETS.values())[: list(TARGETS.values()).index(target)]
    assert not any(supported(other, machine_features()) for other in better)


def test_an_override_is_taken() -> None:
    assert detect("baseline") is TARGETS["baseline"]


def test_a_machine_lacking_one_feature_is_refused() -> None:
    assert supported(TARGETS["avx2"], frozenset(TARGETS["avx2"].features))
    for feature in TARGETS["avx2"].features:
        assert not supported(TARGETS["avx2"], frozenset(TARGETS["avx2"].features) - {feature})


def test_unknown_targets_are_named() -> None:
    with pytest.raises(UnsupportedTargetError, match="unknown target 'neon', expected one of avx512"):
        detect("neon")
