"""What a client changes for all front ends, as the front end sees it that the client has asked."""

import logging
from collections.abc import Callable

from gangway.server.errors import RequestError
from gangway.server.front_end_messages import Agreed, Applied, Change, FrontEndMessage, Proposed, Settled
from gangway.server.questions import Questions

MAX_WAITING = 64  # each has a thread
WAIT_SECONDS = 10.0  # every wait ends; the others are told nevertheless
NOT_NOW = "this cannot be changed now; it may be tried again"
_log = logging.getLogger(__name__)


class Changes:
    """`apply` makes a change in this process, and may raise RequestError. Safe for threads.

    `ask` says whether the supervisor could be told; None: there are no other processes to agree with.
    """

    def __init__(self, apply: Callable[[Change], None], ask: Callable[[FrontEndMessage], bool] | None = None) -> None:
        self._apply = apply
        self._ask = ask
        self._questions = Questions(MAX_WAITING, NOT_NOW)

    def make(self, change: Change) -> None:
        """Return when every front end has made the change. Raises RequestError: then none has made it."""
        ask = self._ask
        if ask is None:
            self._apply(change)
            return
        unanswered = f"not known to all front ends within {WAIT_SECONDS:.0f} seconds"
        self._questions.ask(lambda number: ask(Proposed(number, change)), WAIT_SECONDS, NOT_NOW, unanswered)

    def agreed(self, message: Agreed) -> Applied | None:
        """Make a change that goes to all front ends; return what the supervisor is to be told, if anything."""
        answer = Applied(message.number)
        try:
            if message.change is not None:
                self._apply(message.change)
        except RequestError as error:
            answer = Applied(message.number, error.code.name, error.message)
            if not message.number:
                _log.warning("not here what other front ends have: %s", error.message)
        return answer if message.number else None

    def settled(self, message: Settled) -> None:
        """All front ends have answered to what was asked of them."""
        self._questions.answered(message)

    def refuse(self, reason: str) -> None:
        """Answer everything with UNAVAILABLE from now on, also what waits."""
        self._questions.refuse(reason)
