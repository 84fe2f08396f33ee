"""Requests in slots of shared memory: coroutines wait for what they have handed to the scheduler."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from gangway.executor.logs import OFTEN
from gangway.server.requests.data_plane import (
    NO_EXTERNAL,
    DataPlane,
    ExternalTensors,
    Layout,
    PoolExhaustedError,
    Submission,
)
from gangway.server.serving.inference.model_run import no_room
from gangway.server.serving.loop import Completions, ServingLoop
from gangway.server.serving.pending import Offload, Pending

_log = logging.getLogger(__name__)


class Afterwork:
    """What is left to do for answers that are sent: no client need wait for it. Safe for threads.

    It is added before the answer is sent. Whoever sees something of it calls `do` before. `at_once`: it is done when it
    is added, because other processes see something of it.
    """

    def __init__(self, at_once: bool = False) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._left: deque[Callable[[], None]] = deque()

    def add(self, rest: Callable[[], None], at_once: bool = False) -> None:
        """Do it later, or `at_once`."""
        self._left.append(rest)
        if at_once or self._at_once:
            self.do()

    def do(self) -> None:
        """Return when nothing is left."""
        while self._left:
            with self._lock:
                if self._left:
                    try:
                        self._left[0]()
                    except Exception:  # the others' must not be lost by it
                        _log.exception("an answered request could not be counted: a fault of the server", extra=OFTEN)
                    self._left.popleft()  # not before: until then others wait for it


LOOK_S: Final = 0.25  # how often requests are looked for whose time is over; most are cancelled by their calls before


class Slots:
    """Opens requests in slots of `plane`, and says which have ended, and which have not in their time.

    For the loop's thread. `afterwork`: is done when a few have ended. `aside`: threads for what would hold the loop for
    too long.
    """

    def __init__(self, serving: ServingLoop, plane: DataPlane, afterwork: Afterwork) -> None:
        self.serving = serving
        self.plane = plane
        self.afterwork = afterwork
        self.aside = Offload(serving.aside, serving.call)
        plane.wake_by_turns(serving.turn.at_end)
        self._completions = Completions(serving, plane.slots, afterwork.do)
        self._waiting: dict[int, tuple[int, Pending[bool]]] = {}  # by slot, until when
        serving.every(LOOK_S, self._look)

    def open(self, layout: Layout, rows: int, external: ExternalTensors = NO_EXTERNAL) -> Submission:
        """Take a slot and memory. Raises RequestError; then nothing external is used any more."""
        try:
            try:
                return self.plane.open(layout, rows, external)
            except PoolExhaustedError:
                self.afterwork.do()  # requests that are answered may have all slots
                return self.plane.open(layout, rows, external)
        except PoolExhaustedError as error:
            external.release()
            raise no_room(error) from error

    def expect(self, slot: int, end_ns: int) -> Pending[bool]:
        """Return what will be True once the request in this slot has ended, False if it has not by `end_ns`.

        It is to be called before the request is submitted by the bell. `end_ns`: CLOCK_MONOTONIC.
        """
        pending: Pending[bool] = Pending()
        self._waiting[slot] = end_ns, pending
        self._completions.expect(slot, partial(self._ended, slot, pending))
        return pending

    def forget(self, slot: int) -> None:
        """Wait for it no more: it has not been submitted, or nobody wants to know. Otherwise this does nothing."""
        if self._completions.forget(slot):
            del self._waiting[slot]

    def _ended(self, slot: int, pending: Pending[bool]) -> None:
        del self._waiting[slot]
        pending.settle(True)

    def _look(self) -> None:
        now_ns = time.monotonic_ns()
        for slot, (end_ns, pending) in list(self._waiting.items()):
            if end_ns < now_ns and self._completions.forget(slot):
                del self._waiting[slot]
                pending.settle(False)
