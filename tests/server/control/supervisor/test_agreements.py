"""Changes that all front ends make: the supervisor's side, without processes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import pytest

from gangway.protos import StatusCode
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository.loader import require_one_front_end
from gangway.server.control.supervisor.front_ends import Agreements
from gangway.server.control.supervisor.shared_memory import place
from gangway.server.errors import ConfigError, RequestError
from gangway.server.messages import (
    Agreed,
    Applied,
    Change,
    FrontEndMessage,
    LogSettings,
    Proposed,
    RegionChange,
    Settled,
)
from gangway.server.serving import supervisor_calls
from gangway.server.serving.loop import ServingLoop
from gangway.server.serving.pending import drive, result_of
from gangway.server.serving.supervisor_calls import MAX_WAITING_CHANGES, SharedChanges
from gangway.server.tracing.settings import TraceOverrides

REGION = RegionChange("register", "r", "/key", 0, 64)
GONE = RegionChange("unregister", "r")


@dataclass
class Scene:
    """Two front ends, which have been told what is in `told`."""

    present: set[int] = field(default_factory=lambda: {1, 2})
    told: dict[int, list[FrontEndMessage]] = field(default_factory=lambda: {1: [], 2: []})
    results: list[tuple[str, str]] = field(default_factory=list)
    holding: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.agreements = Agreements(
            lambda number, message: self.told[number].append(message), lambda: self.present, self.holding.append
        )

    def begin(self, change: Change | None) -> int:
        """Returns the number under which all have been told."""
        self.agreements.begin(change, lambda code, text: self.results.append((code, text)))
        numbers = {self.told[each][-1].number for each in self.present}  # type: ignore[union-attr]
        (number,) = numbers
        return number

    def die(self, number: int) -> None:
        self.present.discard(number)
        self.agreements.left(number)

    def known(self) -> list[Change]:
        return [message.change for message in self.agreements.known()]  # type: ignore[union-attr, misc]


def test_a_change_holds_when_the_last_one_has_made_it() -> None:
    scene = Scene()
    number = scene.begin(REGION)
    assert scene.told[1] == scene.told[2] == [Agreed(number, REGION)]
    scene.agreements.applied(1, Applied(number))
    scene.agreements.applied(1, Applied(number))  # twice is once
    assert scene.results == []
    assert scene.known() == [REGION], "whoever is started now must have it, too"
    scene.agreements.applied(2, Applied(number))
    assert scene.results == [("OK", "")]
    assert scene.known() == scene.holding == [REGION]
    number = scene.begin(GONE)
    for front_end in (1, 2):
        scene.agreements.applied(front_end, Applied(number))
    assert scene.known() == []


def test_all_refuse_what_one_refuses() -> None:
    scene = Scene()
    for refusal in ({1, 2}, {2}):
        number = scene.begin(REGION)
        for front_end in (1, 2):
            answer = Applied(number, "INVALID_ARGUMENT", "no") if front_end in refusal else Applied(number)
            scene.agreements.applied(front_end, answer)
    assert scene.results == [("INVALID_ARGUMENT", "no")] * 2
    assert scene.known() == scene.holding == []
    assert [message.change for message in scene.told[1]] == [REGION, REGION, GONE], "1 had made it"  # type: ignore[union-attr]


def test_a_second_registration_does_not_undo_the_first() -> None:
    scene = Scene()
    number = scene.begin(REGION)
    for front_end in (1, 2):
        scene.agreements.applied(front_end, Applied(number))
    number = scene.begin(REGION)
    scene.agreements.applied(1, Applied(number, "ALREADY_EXISTS", "there"))
    scene.die(2)
    assert scene.results[-1] == ("ALREADY_EXISTS", "there")
    assert scene.known() == [REGION]
    assert len(scene.told[1]) == 2


def test_the_dead_are_not_waited_for() -> None:
    scene = Scene()
    number = scene.begin(REGION)
    scene.agreements.applied(1, Applied(number))
    scene.die(2)
    assert scene.results == [("OK", "")]
    scene.die(1)
    scene.agreements.begin(None, lambda code, text: scene.results.append((code, text)))
    assert scene.results == [("OK", "")] * 2, "nobody is there"
    assert scene.known() == [REGION]


def test_settings_are_kept_for_successors() -> None:
    scene = Scene()
    changes = (TraceOverrides("m", rate=3), TraceOverrides("", ("TIMESTAMPS",)), TraceOverrides("m"), LogSettings())
    for change in changes:
        number = scene.begin(change)
        for front_end in (1, 2):
            scene.agreements.applied(front_end, Applied(number))
    assert scene.known() == [TraceOverrides("", ("TIMESTAMPS",))], "the log's are told in another way"
    assert scene.holding == list(changes)


def proposing(serving: ServingLoop, answer: Callable[[Proposed], Settled | None]) -> SharedChanges:
    """A front end whose supervisor answers like this; None: never."""

    def ask(message: FrontEndMessage) -> bool:
        assert isinstance(message, Proposed)
        if (settled := answer(message)) is not None:
            changes.calls.answered(settled)
        return True

    changes = SharedChanges(serving.loop, lambda change: None, ask)
    return changes


def test_a_client_hears_what_all_have_said(serving: ServingLoop) -> None:
    result_of(serving, proposing(serving, lambda message: Settled(message.number)).make(REGION))
    refusing = proposing(serving, lambda message: Settled(message.number, "NOT_FOUND", "no"))
    with pytest.raises(RequestError, match="no") as caught:
        result_of(serving, refusing.make(REGION))
    assert caught.value.code is StatusCode.NOT_FOUND


def test_so_many_changes_wait_and_all_are_told_of_the_end(serving: ServingLoop) -> None:
    changes = proposing(serving, lambda message: None)
    told: SimpleQueue[RequestError] = SimpleQueue()

    async def make() -> None:
        try:
            await changes.make(REGION)
        except RequestError as error:
            told.put(error)

    for _ in range(MAX_WAITING_CHANGES + 1):
        serving.call(drive, make())
    assert told.get(timeout=5).message == "this cannot be changed now; it may be tried again"
    serving.call(changes.calls.refuse, "the server is stopping")
    errors = [told.get(timeout=5) for _ in range(MAX_WAITING_CHANGES)]
    assert {(error.code, error.message) for error in errors} == {(StatusCode.UNAVAILABLE, "the server is stopping")}


def test_a_change_that_is_never_answered_ends(serving: ServingLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_calls, "WAIT_SECONDS", 0.01)
    with pytest.raises(RequestError, match="not known to all front ends") as caught:
        result_of(serving, proposing(serving, lambda message: None).make(REGION))
    assert caught.value.code is StatusCode.UNAVAILABLE


def test_sequences_need_one_front_end() -> None:
    config = ModelConfig()
    require_one_front_end(config, 2)
    config.sequence_batching.max_sequence_idle_microseconds = 1
    require_one_front_end(config, 1)
    with pytest.raises(ConfigError, match="--front-ends is 2, and must be 1"):
        require_one_front_end(config, 2)


def test_front_ends_have_cores_of_their_own_while_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    spare = place([0, 1, 2, 3], front_ends=2)
    assert (spare.front_ends, spare.scheduler, spare.shared) == ((7, 6), 5, False)
    assert place([0, 1, 2, 3, 4, 5, 6], front_ends=2).front_ends == (7, 7)
    crowded = place(range(8), front_ends=2)
    assert (crowded.front_ends, crowded.scheduler, crowded.shared) == ((7, 6), 5, True)
    assert place(range(8)).front_ends == (7,)
    assert [place([0, 1], front_ends=number).scheduler for number in (1, 2)] == [6, 5]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    two = place([0, 1], front_ends=2)
    assert (two.front_ends, two.scheduler) == ((1, 0), 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    one = place([0], front_ends=1)
    assert (one.front_ends, one.scheduler) == ((0,), 0)
