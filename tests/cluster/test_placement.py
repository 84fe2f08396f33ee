"""The policy of placement, with a predictor whose answers can be worked out by hand."""

import itertools
from collections.abc import Mapping

import pytest

from gangway.cluster.placement import Loads, Move, PlacedMachine, PlacedModel, Placement, make_plan, ordered_moves

MIB = 1 << 20


class Fluid:
    """A machine answers in time what its cores can do: one request of any model takes one core a second."""

    def estimate(self, cores: int, loads: Loads) -> tuple[float, ...]:
        asked = sum(rate for _, rate in loads)
        return tuple(min(1.0, cores / asked) for _ in loads)

    def simulate(self, cores: int, loads: Loads) -> tuple[float, ...]:
        return self.estimate(cores, loads)

    def work_us(self, model: str) -> float:
        return 1e6


def machines(count: int, cores: int = 1, memory_mib: int = 100) -> list[PlacedMachine]:
    return [PlacedMachine(f"m{number}", cores, memory_mib * MIB) for number in range(count)]


def model(name: str, rate_per_s: float, memory_mib: int = 10) -> PlacedModel:
    return PlacedModel(name, rate_per_s, memory_mib * MIB)


def replay(present: Placement, moves: tuple[Move, ...]) -> dict[str, frozenset[str]]:
    """Return what is loaded after the moves, which must make sense one by one."""
    loaded = dict(present)
    for move in moves:
        assert (move.model in loaded.get(move.server, frozenset())) is not move.load
        loaded[move.server] = loaded.get(move.server, frozenset()) ^ {move.model}
    return loaded


def test_a_popular_model_gets_the_machines_that_it_needs() -> None:
    plan = make_plan([model("hot", 2.5), model("cold", 0.2)], machines(4), {}, Fluid())
    hosts = {name: sum(name in names for names in plan.placement.values()) for name in ("hot", "cold")}
    assert hosts == {"hot": 3, "cold": 1}
    assert plan.after == pytest.approx({"hot": 1.0, "cold": 1.0})
    assert replay({}, plan.moves) == plan.placement


def test_two_busy_models_get_a_machine_each() -> None:
    plan = make_plan([model("a", 0.9), model("b", 0.9)], machines(2), {}, Fluid())
    assert sorted(plan.placement.values(), key=sorted) == [frozenset("a"), frozenset("b")]


def test_a_shift_of_load_moves_the_replicas() -> None:
    before = make_plan([model("a", 1.9), model("b", 0.5)], machines(3), {}, Fluid()).placement
    plan = make_plan([model("a", 0.5), model("b", 1.9)], machines(3), before, Fluid())
    assert plan.after["b"] > plan.before["b"] + 0.3
    assert sum("b" in names for names in plan.placement.values()) == 2
    assert replay(before, plan.moves) == plan.placement


def test_a_model_without_requests_makes_room_for_one_with() -> None:
    """It is where only one fits, and there is room for it elsewhere."""
    places = [PlacedMachine("m0", 1, 25 * MIB), PlacedMachine("m1", 1, 15 * MIB)]
    present = {"m0": frozenset("b"), "m1": frozenset("a")}
    plan = make_plan([model("a", 0.0), model("b", 1.5)], places, present, Fluid())
    assert plan.placement == {"m0": frozenset("ab"), "m1": frozenset("b")}
    assert [move.load for move in plan.moves] == [True, False, True]  # a is never away


def test_nothing_moves_without_a_gain() -> None:
    models = [model("a", 0.5), model("b", 0.5)]
    for first, second in itertools.product(machines(2), repeat=2):
        present = {"m0": frozenset[str](), "m1": frozenset[str]()}
        present = {name: frozenset(m for m, at in (("a", first), ("b", second)) if at.name == name) for name in present}
        assert make_plan(models, machines(2), present, Fluid()).moves == ()


def test_a_model_that_is_loaded_nowhere_is_placed_even_if_nobody_asks_for_it() -> None:
    plan = make_plan([model("a", 0.0), model("b", 0.9)], machines(2), {"m0": frozenset("b")}, Fluid())
    assert [move.model for move in plan.moves] == ["a"]
    assert plan.before["a"] == 0.0
    assert plan.after["a"] == 1.0


def test_memory_is_never_exceeded_and_what_fits_nowhere_is_named() -> None:
    models = [model("large", 0.5, 90), model("small", 0.5, 20), model("giant", 0.5, 101)]
    plan = make_plan(models, machines(2), {}, Fluid())
    assert plan.unplaced == ("giant",)
    assert plan.after["giant"] == 0.0
    size = {each.name: each.memory_bytes for each in models}
    assert all(sum(size[name] for name in names) <= 100 * MIB for names in plan.placement.values())
    assert {name for names in plan.placement.values() for name in names} == {"large", "small"}


def test_a_model_goes_only_where_its_files_are() -> None:
    limited = PlacedModel("limited", 3.0, MIB, frozenset({"m1"}))
    plan = make_plan([limited], machines(3), {}, Fluid())
    assert [name for name, names in plan.placement.items() if names] == ["m1"]


def test_the_same_input_gives_the_same_plan_whatever_its_order() -> None:
    models = [model(f"model{number}", 0.1 * (number % 7)) for number in range(12)]
    first = make_plan(models, machines(4), {}, Fluid())
    second = make_plan(models[::-1], machines(4), {}, Fluid())
    assert first == second


SIZES: Mapping[str, int] = {"a": 60, "b": 60, "c": 30}


@pytest.mark.parametrize(
    ("present", "planned", "expected"),
    [
        # There is room: load first.
        ([{"c"}, set()], [set(), {"c"}], [("c", "m1", True), ("c", "m0", False)]),
        # No room, but another replica: unload there, then load.
        ([{"a"}, {"a"}], [{"a"}, {"b"}], [("a", "m1", False), ("b", "m1", True)]),
        # Two models change places, and neither machine has room for both: one must be away for a moment.
        ([{"a"}, {"b"}], [{"b"}, {"a"}], None),
        ([{"a", "c"}, {"b"}], [{"b", "c"}, {"a"}], None),
    ],
)
def test_the_order_of_moves(
    present: list[set[str]], planned: list[set[str]], expected: list[tuple[str, str, bool]] | None
) -> None:
    models = [model(name, 1.0, size) for name, size in SIZES.items()]
    places = machines(2)
    before = {place.name: frozenset(names) for place, names in zip(places, present, strict=True)}
    after = {place.name: frozenset(names) for place, names in zip(places, planned, strict=True)}
    moves = tuple(ordered_moves(before, after, models, places))
    if expected is not None:
        assert [(move.model, move.server, move.load) for move in moves] == expected
    assert replay(before, moves) == after
    loaded = dict(before)
    for move in moves:
        loaded[move.server] ^= {move.model}
        assert all(sum(SIZES[name] for name in names) <= 100 for names in loaded.values())
