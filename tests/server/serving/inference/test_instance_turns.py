"""Steps take turns for the instances of a Python model: the most urgent one first, and never too many."""

from functools import partial

from gangway.server.serving.inference.instance_turns import InstanceTurns, StepTurn, Urgency

MODEL, OTHER = 1, 2


def urgency(priority: int = 0, deadline: float = float("inf"), arrival: int = 0) -> Urgency:
    return priority, deadline, arrival


class Begun:
    """Which turns have begun, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.turns = InstanceTurns()

    def take(self, name: str, most: int = 1, model: int = MODEL, urgent: Urgency = (0, float("inf"), 0)) -> StepTurn:
        return self.turns.take(model, most, urgent, partial(self._begin, name))

    def _begin(self, name: str, turn: StepTurn) -> None:
        assert not turn.waits
        self.names.append(name)


def test_a_turn_begins_when_another_one_ends() -> None:
    begun = Begun()
    turns = [begun.take(name) for name in "abc"]
    assert begun.names == ["a"]
    assert [turn.waits for turn in turns] == [False, True, True]
    turns[0].end()
    turns[0].end()
    assert begun.names == ["a", "b"]
    turns[1].end()
    assert begun.names == ["a", "b", "c"]


def test_as_many_as_there_may_be_and_each_model_for_itself() -> None:
    begun = Begun()
    turns = [begun.take(name, most=2) for name in "abc"]
    begun.take("other", model=OTHER)
    assert begun.names == ["a", "b", "other"]
    turns[1].end()
    assert begun.names[-1] == "c"


def test_the_most_urgent_one_is_next() -> None:
    begun = Begun()
    first = begun.take("first")
    begun.take("late", urgent=urgency(arrival=2))
    begun.take("early", urgent=urgency(arrival=1))
    begun.take("by deadline", urgent=urgency(deadline=5.0, arrival=3))
    begun.take("low class", urgent=urgency(priority=1, deadline=1.0))
    begun.take("high class", urgent=urgency(priority=-1, arrival=4))
    first.end()
    assert begun.names == ["first", "high class"]


def test_one_that_ends_while_it_waits_takes_no_turn() -> None:
    begun = Begun()
    first, second = begun.take("a"), begun.take("b")
    begun.take("c")
    second.end()
    assert begun.names == ["a"]
    first.end()
    assert begun.names == ["a", "c"]


def test_a_turn_that_ends_as_it_begins_lets_the_next_one_begin() -> None:
    turns, begun = InstanceTurns(), []

    def fail(turn: StepTurn) -> None:
        begun.append(turn)
        turn.end()

    first = turns.take(MODEL, 1, urgency(), begun.append)
    failing = [turns.take(MODEL, 1, urgency(), fail) for _ in range(2000)]
    last = turns.take(MODEL, 1, urgency(), begun.append)
    first.end()
    assert begun == [first, *failing, last]
