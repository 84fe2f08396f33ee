"""The executions of an instance: which wait to begin, which are open, and which of them have a core.

Workers, front ends and the main thread read and change them with one lock held. Workers are shown how many are open.
"""

from __future__ import annotations

import threading

from gangway.python_backend.calls import ATTACH_SECONDS
from gangway.python_backend.executions import Execution
from gangway.python_backend.inbox import Inbox
from gangway.python_backend.messages import BACKGROUND, OCCUPIED
from gangway.python_backend.model_threads import Status


class OpenExecutions:
    """They, and what the main thread does with them. `most_open`: so many have begun at the same time.

    `all`: by their numbers, as long as somebody may ask for them. `waiting`: to begin. `open`: those that have begun,
    and have not ended. `is_computing`: the main thread, for these. `is_at_inbox`: it waits there.
    """

    def __init__(self, status: Status, most_open: int) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.inbox = Inbox()
        self.all: dict[int, Execution] = {}
        self.waiting: list[Execution] = []
        self.open: list[Execution] = []
        self.is_stopping = self.is_computing = self.is_at_inbox = False
        self._status, self._most_open = status, most_open

    def notify(self) -> None:
        """Tell all threads that something has changed; the lock is held."""
        self.changed.notify_all()
        if self.is_at_inbox:
            self.inbox.wake()

    def note(self, is_computing: bool) -> None:
        """Let workers know whether a run could begin at once; the lock is held."""
        self.is_computing = is_computing and bool(self.open)
        self._status.load = min(len(self.open), OCCUPIED - 1) if self.can_begin else OCCUPIED

    @property
    def can_begin(self) -> bool:
        """Whether a run could begin at once."""
        return not (self.waiting or self.is_computing or len(self.open) >= self._most_open)

    @property
    def startable(self) -> Execution | None:
        """What can begin."""
        if self.is_stopping or len(self.open) >= self._most_open:
            return None
        return next((each for each in self.waiting if each.worker is not None or each.attached), None)

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be executed any more that somebody waits for."""
        return self.is_stopping and all(each.is_abandoned(ATTACH_SECONDS) for each in self.open)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for something of the model."""
        return any(
            not (each.number == BACKGROUND or each.is_answered or each.is_abandoned(ATTACH_SECONDS))
            for each in (*self.all.values(), *self.open)
        )

    def having_core(self) -> Execution | None:
        """Return one that has a core for the main thread."""
        return next((each for each in (*self.open, *self.waiting) if each.worker is not None), None)

    def beside_with_core(self) -> Execution | None:
        """Return one that has a core for threads of the model."""
        return next((each for each in self.all.values() if each.is_beside and each.worker is not None), None)

    def has_core(self, execution: Execution) -> bool:
        """Whether one has a core; threads that make responses have that of the main thread, too."""
        if execution.is_beside and (self.beside_with_core() or self.having_core()) is not None:
            return True
        return execution.worker is not None
