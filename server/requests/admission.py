"""Admission control under overload. Deterministic, given the clocks.

A full queue makes the scheduler refuse one request for each further one (`scheduler/admission.py`). By then its message
has been received. Receiving large messages is most of a front end's work, and takes the cores that should compute. So a
front end that is full, or whose requests the scheduler refuses, receives only as many messages as a share of one core's
time allows. It receives at least nearly as many as it answers, and refuses the other calls unread.

Answers within their target admit further calls: a request that can meet its target goes before all that wait, so more
of them should be available to choose from. If too many come, fewer meet their target, and admit fewer.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from gangway.base.logs import OFTEN

_log = logging.getLogger(__name__)

FULL_SHARE: Final = 7 / 8  # of the room: an overload begins when this share is taken
ROOM_SHARE: Final = 3 / 4  # of the room: it ends when no more is taken,
OVERLOAD_S: Final = 1.0  # and the scheduler has refused no request for lack of room for so long
CPU_SHARE: Final = 0.2  # of a core that this process may use for messages in an overload, besides what answers admit
MAX_BUDGET_S: Final = 0.02  # of CPU that may be spent at once
FOR_EACH_ANSWER: Final = 0.9  # calls are admitted: fewer than end, so that the queue gets shorter
MORE_FOR_EACH_IN_TIME: Final = 3.0  # if the answer met its target
MOST_AT_ONCE: Final = 8.0  # after many answers in a row
MIXED_PRIORITIES_S: Final = 10.0  # no call is refused unread for so long after the priority of requests has changed
OVERLOADED: Final = "Exceeds maximum queue size: the server is overloaded"


class AdmissionController:
    """Decides which calls are received. For the loop's thread. `room`: how many calls fit.

    `now_s`: any steady clock; `cpu_s`: CPU time of this process. A message must be read to learn its priority, so no
    call is refused here while requests have different priorities.
    """

    def __init__(
        self, room: int, now_s: Callable[[], float] = time.monotonic, cpu_s: Callable[[], float] = time.process_time
    ) -> None:
        self._full = int(FULL_SHARE * room)
        self._reopens_at = int(ROOM_SHARE * room)
        self._now_s, self._cpu_s = now_s, cpu_s
        self._inside = 0
        self._allowed = 0.0  # calls, for answers
        self._updated_s = self._updated_cpu_s = 0.0
        self._budget_s = 0.0  # of CPU
        self._priority = 0
        self._mixed_until_s = self._overload_until_s = -MIXED_PRIORITIES_S
        self._refused = memoryview(bytearray(8)).cast("Q")  # a word of our own, until there is one that others see
        self.is_overloaded = False
        self.full_reason = ""  # why no call is admitted, while the server's memory is full

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
            self._refused[0] += 1
            return False
        if not self.is_overloaded or self._now_s() < self._mixed_until_s:
            return True
        if not self._stays_overloaded():
            return True
        if self._allowed >= 1.0:
            self._allowed -= 1.0
            return True
        self._update_budget()
        if self._budget_s > 0.0:
            return True
        self._refused[0] += 1
        return False

    def enter(self) -> None:
        """A message has been received. A call without a message takes no place."""
        self._inside += 1
        if self._inside >= self._full:
            self._overload()

    def leave(self, answered: bool) -> None:
        """The call of a message has ended, with an answer or without."""
        self._inside -= 1
        if self.is_overloaded:
            if answered:
                self._allow(FOR_EACH_ANSWER)
            self._stays_overloaded()

    def met_target(self) -> None:
        """A request is being answered, before its target."""
        if self.is_overloaded:
            self._allow(MORE_FOR_EACH_IN_TIME)

    def scheduler_refused(self) -> None:
        """The scheduler has refused a request because of all that waits."""
        self._overload_until_s = self._now_s() + OVERLOAD_S
        self._overload()

    def note_priority(self, priority: int) -> None:
        """A request of this class has come."""
        if priority != self._priority:
            self._priority = priority
            self._mixed_until_s = self._now_s() + MIXED_PRIORITIES_S

    def _allow(self, calls: float) -> None:
        self._allowed = min(self._allowed + calls, MOST_AT_ONCE)

    def _overload(self) -> None:
        if not self.is_overloaded:
            self.is_overloaded, self._allowed = True, 0.0
            self._update_budget()
            _log.warning("overload: %d calls wait, so new ones are refused with UNAVAILABLE", self._inside, extra=OFTEN)

    def _stays_overloaded(self) -> bool:
        self.is_overloaded = self._inside > self._reopens_at or self._now_s() < self._overload_until_s
        return self.is_overloaded

    def _update_budget(self) -> None:
        """Bring the account of CPU up to date. The first look only sets its start."""
        now_s, cpu_s = self._now_s(), self._cpu_s()
        earned_s = (now_s - self._updated_s) * CPU_SHARE
        spent_s = cpu_s - self._updated_cpu_s
        self._budget_s = max(-MAX_BUDGET_S, min(MAX_BUDGET_S, self._budget_s + earned_s - spent_s))
        self._updated_s, self._updated_cpu_s = now_s, cpu_s
