"""What all front ends must know before the client is answered that asked one of them for it.

A change goes to every front end, in the same order to each, so all of them come to the same result: a second region of
one name is refused by all. When the last one has answered, the change holds, and is told to successors of those that
die. One that dies is not waited for: its successor is told everything before it listens.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count

from gangway.server.front_end_messages import (
    OK,
    Agreed,
    Applied,
    Change,
    FrontEndMessage,
    RegionChange,
)
from gangway.server.tracing.settings import TraceOverrides

Send = Callable[[int, FrontEndMessage], None]


@dataclass
class _Round:
    """One change; `waiting` are the front ends that have not answered yet. None: they just come this far."""

    change: Change | None
    waiting: set[int]
    done: Callable[[str, str], None]
    answers: list[Applied] = field(default_factory=list)


class Agreements:
    """`send` tells a front end something, by its number; `present` are those that run; `holds` gets what holds now."""

    def __init__(
        self, send: Send, present: Callable[[], Collection[int]], holds: Callable[[Change], None] = lambda change: None
    ) -> None:
        self._send = send
        self._present = present
        self._holds = holds
        self._numbers = count(1)
        self._rounds: dict[int, _Round] = {}  # by number, ascending
        self._regions: dict[str, RegionChange] = {}
        self._traces: dict[str, TraceOverrides] = {}

    def known(self) -> list[FrontEndMessage]:
        """Return what a front end must be told that is started now, also what is just being agreed upon."""
        changes: list[Change] = [*self._traces.values(), *self._regions.values()]
        changes += [round_.change for round_ in self._rounds.values() if round_.change is not None]
        return [Agreed(0, change) for change in changes]

    def begin(self, change: Change | None, done: Callable[[str, str], None]) -> None:
        """Have all front ends make a change, then call `done` with the name of a gRPC status and a text.

        None changes nothing: when it is done, all have done what they were told before.
        """
        number, present = next(self._numbers), set(self._present())
        self._rounds[number] = _Round(change, present, done)
        for front_end in sorted(present):
            self._send(front_end, Agreed(number, change))
        self._end_if_complete(number)

    def applied(self, front_end: int, answer: Applied) -> None:
        """A front end has answered."""
        round_ = self._rounds.get(answer.number)
        if round_ is not None and front_end in round_.waiting:
            round_.waiting.remove(front_end)
            round_.answers.append(answer)
            self._end_if_complete(answer.number)

    def left(self, front_end: int) -> None:
        """A front end has died."""
        for number in list(self._rounds):
            self._rounds[number].waiting.discard(front_end)
            self._end_if_complete(number)

    def _end_if_complete(self, number: int) -> None:
        round_ = self._rounds[number]
        if round_.waiting:
            return
        del self._rounds[number]
        refused = [answer for answer in round_.answers if answer.code != OK]
        if round_.change is not None:
            if round_.answers and not refused:
                self._note(round_.change)
            elif len(refused) < len(round_.answers) or not round_.answers:
                self._undo(round_.change)
        first = refused[0] if refused else Applied(number)
        round_.done(first.code, first.message)

    def _note(self, change: Change) -> None:
        match change:
            case RegionChange("register", name):
                self._regions[name] = change
            case RegionChange("unregister", ""):
                self._regions.clear()
            case RegionChange("unregister", name):
                self._regions.pop(name, None)
            case TraceOverrides(model) if change.empty:
                self._traces.pop(model, None)
            case TraceOverrides(model):
                self._traces[model] = change
        self._holds(change)

    def _undo(self, change: Change) -> None:
        """Not all front ends could make the change, of which those have none left that could."""
        if isinstance(change, RegionChange) and change.kind == "register" and change.name not in self._regions:
            for front_end in sorted(self._present()):
                self._send(front_end, Agreed(0, RegionChange("unregister", change.name)))
