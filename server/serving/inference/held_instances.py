"""Tells the scheduler which instances of Python models are taken although no run of theirs is under way.

An instance whose execution waits, or that has kept a request for later, executes nothing else. Further requests to its
model are better off in the scheduler: there they are joined to batches, and their queue policies hold.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from gangway.executor.messages import Held
from gangway.server.serving.loop import ServingLoop

AGAIN_S: Final = 0.01  # until the scheduler is told again whose ring was full

Key = tuple[str, int]  # an execution: address of its instance, and its number there


class HeldInstances:
    """For the loop's thread. `send`: `DataPlane.send`."""

    def __init__(self, serving: ServingLoop, send: Callable[[bytes, bool], bool]) -> None:
        self._serving, self._send = serving, send
        self._users: dict[Key, set[int]] = {}  # who sees to the end of an execution
        self._counts: Counter[int] = Counter()  # of executions, by model
        self._told: Counter[int] = Counter()
        self._changed: set[int] = set()

    def hold(self, model_id: int, key: Key, who: object) -> None:
        """Somebody sees to the end of an execution."""
        if key not in self._users:
            self._users[key] = set()
            self._count(model_id, 1)
        self._users[key].add(id(who))

    def drop(self, model_id: int, key: Key, who: object) -> None:
        """He sees to it no more: it has ended, or another one does. Calling it again does nothing."""
        users = self._users.get(key)
        if users is None:
            return
        users.discard(id(who))
        if not users:
            del self._users[key]
            self._count(model_id, -1)

    def _count(self, model_id: int, more: int) -> None:
        self._counts[model_id] += more
        if not self._changed:
            self._serving.turn.at_end(self._tell)
        self._changed.add(model_id)

    def _tell(self) -> None:
        for model_id in tuple(self._changed):
            count = self._counts[model_id]
            if not self._send(Held(model_id, count).pack(), count < self._told[model_id]):
                self._serving.loop.call_later(AGAIN_S, self._tell)
                return
            self._told[model_id] = count
            self._changed.discard(model_id)
            if not count:
                del self._counts[model_id], self._told[model_id]
