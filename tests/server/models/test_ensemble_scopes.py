"""Which decoupled steps the steps of an ensemble follow."""

import pytest

from gangway.server.models.ensemble_scopes import DifferentOriginsError, Scope, scopes_of

# Steps as "tensors read > tensors written"; a decoupled one has a star.
RIGHT: dict[str, tuple[list[str], list[Scope]]] = {
    "none is decoupled": (["x > a", "a > b", "x b > y"], [(), (), ()]),
    "the last one": (["x > a", "a > y *"], [(), ()]),
    "in the middle": (["x > a *", "a > b", "b > y"], [(), (0,), (0,)]),
    "any order of the steps": (["b > y", "a > b", "x > a *"], [(2,), (2,), ()]),
    "one after the other": (["x > a *", "a > b *", "b > y"], [(), (0,), (0, 1)]),
    "a fork that meets": (["x > a *", "a > b", "a > c", "b c > y"], [(), (0,), (0,), (0,)]),
    "with what was there before": (["x > a *", "x > b", "a b > y"], [(), (), (0,)]),
    "with what was there before two": (["x > a *", "a > b *", "a > c", "b c x > y"], [(), (0,), (0,), (0, 1)]),
}
WRONG: dict[str, tuple[list[str], int]] = {
    "two side by side": (["x > a *", "x > b *", "a b > y"], 2),
    "two that follow one": (["x > a *", "a > b *", "a > c *", "c > d", "b d > y"], 4),
    "through others": (["x > a *", "x > b *", "a > c", "b > d", "d c > y"], 4),
}


def scopes(steps: list[str]) -> tuple[Scope, ...]:
    sides = [step.rstrip(" *").split(" > ") for step in steps]
    return scopes_of([a.split() for a, _ in sides], [b.split() for _, b in sides], [step[-1] == "*" for step in steps])


@pytest.mark.parametrize("name", RIGHT)
def test_what_steps_follow(name: str) -> None:
    steps, wanted = RIGHT[name]
    assert list(scopes(steps)) == wanted


@pytest.mark.parametrize("name", WRONG)
def test_tensors_of_different_decoupled_steps_do_not_meet(name: str) -> None:
    steps, place = WRONG[name]
    with pytest.raises(DifferentOriginsError, match="different decoupled steps") as caught:
        scopes(steps)
    assert caught.value.place == place
