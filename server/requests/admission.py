"""Admission control under overload. Deterministic, given the lock and the clocks.

A full queue makes the scheduler refuse one request for each further one (`scheduler/admission.py`). By then its message
has been received. Receiving large messages is most of a front end's work, and takes the cores that should compute. So a
front end that is full, or whose requests the scheduler refuses, receives only as many messages as a share of one core's
time allows, and at least nearly as many as it answers. It refuses the other calls unread.

Answers within their target admit further calls: a request that can meet its target goes before all that wait, so more
of them should be available to choose from. If too many come, fewer meet their target, and admit fewer.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from gangway.executor.logs import OFTEN

_log = logging.getLogger(__name__)

FULL: Final = 7 / 8  # of the room is taken: calls are refused from now on,
ROOM_AGAIN: Final = 3 / 4  # until there is so much, and
TURNED_AWAY_S: Final = 1.0  # since the scheduler last refused one because of all that waits
CPU_SHARE: Final = 0.2  # of a core that this process takes then, unless answers let more calls in
SAVED_S: Final = 0.02  # of CPU at most that may be spent at once
FOR_EACH_ANSWER: Final = 0.9  # calls are let in: fewer than leave, so that the queue is worked off
MORE_FOR_EACH_IN_TIME: Final = 3.0  # if the answer met its target
MOST_AT_ONCE: Final = 8.0  # after many answers in a row
ONE_CLASS_S: Final = 10.0  # as long ago requests of several priorities must be for calls to be refused unseen
OVERLOADED: Final = "Exceeds maximum queue size: the server is overloaded"


class AdmissionController:
    """Decides which calls are received. Safe for threads. `room`: how many calls fit.

    `now_s`: any steady clock; `cpu_s`: CPU time of this process. A message must be read to learn its priority, so no
    call is refused here while requests have different priorities.
    """

    def __init__(
        self, room: int, now_s: Callable[[], float] = time.monotonic, cpu_s: Callable[[], float] = time.process_time
    ) -> None:
        self._full = int(FULL * room)
        self._room_again = int(ROOM_AGAIN * room)
        self._now_s, self._cpu_s = now_s, cpu_s
        self._lock = threading.Lock()
        self._inside = 0
        self._allowed = 0.0  # calls, for answers
        self._looked_s = self._looked_cpu_s = 0.0
        self._budget_s = 0.0  # of CPU
        self._priority = 0
        self._mixed_until_s = self._turned_away_until_s = -ONE_CLASS_S
        self._refused = memoryview(bytearray(8)).cast("Q")  # a word of our own, until there is one that others see
        self.is_crowded = False
        self.full_reason = ""  # why nobody is let in, as long as the server's memory is full

    @property
    def refusal(self) -> str:
        """The text for refused calls."""
        return self.full_reason or OVERLOADED

    def count_in(self, word: memoryview) -> None:
        """Count refused calls in this word from now on, on top of what it says."""
        self._refused = word

    @property
    def refused(self) -> int:
        """How many calls were refused."""
        return self._refused[0]

    def admits(self) -> bool:
        """Return whether the message of a call that has come shall be received; if so, `enter` when it has been."""
        if self.full_reason:
            with self._lock:
                self._refused[0] += 1
            return False
        if not self.is_crowded or self._now_s() < self._mixed_until_s:
            return True
        with self._lock:
            if not self._stays_crowded():
                return True
            if self._allowed >= 1.0:
                self._allowed -= 1.0
                return True
            self._look()
            if self._budget_s > 0.0:
                return True
            self._refused[0] += 1
        return False

    def enter(self) -> None:
        """A message has been received. A call without a message takes no place."""
        with self._lock:
            self._inside += 1
            if self._inside >= self._full:
                self._crowd()

    def leave(self, answered: bool) -> None:
        """The call of a message has ended, with an answer or without."""
        with self._lock:
            self._inside -= 1
            if self.is_crowded:
                if answered:
                    self._allow(FOR_EACH_ANSWER)
                self._stays_crowded()

    def in_time(self) -> None:
        """A request is being answered, before its target."""
        if self.is_crowded:
            with self._lock:
                self._allow(MORE_FOR_EACH_IN_TIME)

    def turned_away(self) -> None:
        """The scheduler has refused a request because of all that waits."""
        with self._lock:
            self._turned_away_until_s = self._now_s() + TURNED_AWAY_S
            self._crowd()

    def see(self, priority: int) -> None:
        """A request of this class has come."""
        if priority != self._priority:
            self._priority = priority
            self._mixed_until_s = self._now_s() + ONE_CLASS_S

    def _allow(self, calls: float) -> None:
        self._allowed = min(self._allowed + calls, MOST_AT_ONCE)

    def _crowd(self) -> None:
        if not self.is_crowded:
            self.is_crowded, self._allowed = True, 0.0
            self._look()
            _log.warning("overload: %d calls wait, so new ones are refused with UNAVAILABLE", self._inside, extra=OFTEN)

    def _stays_crowded(self) -> bool:
        self.is_crowded = self._inside > self._room_again or self._now_s() < self._turned_away_until_s
        return self.is_crowded

    def _look(self) -> None:
        """Bring the account of CPU up to date. The first look only sets its start."""
        now_s, cpu_s = self._now_s(), self._cpu_s()
        earned_s = (now_s - self._looked_s) * CPU_SHARE
        spent_s = cpu_s - self._looked_cpu_s
        self._budget_s = max(-SAVED_S, min(SAVED_S, self._budget_s + earned_s - spent_s))
        self._looked_s, self._looked_cpu_s = now_s, cpu_s
