"""Requests in slots of shared memory: coroutines wait for what they have handed to the scheduler."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from gangway.base.logs import OFTEN
from gangway.executor.slots import SlotTable
from gangway.server.requests.data_plane import (
    NO_EXTERNAL,
    DataPlane,
    ExternalTensors,
    PoolExhaustedError,
    RequestLayout,
    Submission,
)
from gangway.server.serving.inference.held_instances import HeldInstances
from gangway.server.serving.inference.instance_connection import InstanceConnections
from gangway.server.serving.inference.instance_turns import InstanceTurns
from gangway.server.serving.inference.model_run import no_room
from gangway.server.serving.inference.waiting_executions import WaitingExecutions
from gangway.server.serving.loop import ServingLoop, logged
from gangway.server.serving.pending import Offload, Pending

_log = logging.getLogger(__name__)


class DeferredWork:
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
        if not self._left:
            return
        with self._lock:
            while self._left:
                try:
                    self._left[0]()
                except Exception:  # the others' must not be lost by it
                    _log.exception("an answered request could not be counted: a fault of the server", extra=OFTEN)
                self._left.popleft()  # not before: until then others wait for it


POLL_S: Final = 0.1
GIVE_UP_S: Final = 0.25


class Completions:
    """Says on the loop which requests in slots of `slots` have ended. They are submitted with `by_bell`.

    Workers and scheduler make the bell's eventfd readable only once after the loop has found no further answer: while
    it is busy with answers these cost them no system call. `rest` is called when a few have been dealt with. All
    methods are for the loop's thread.
    """

    def __init__(self, serving: ServingLoop, slots: SlotTable, rest: Callable[[], object] = lambda: None) -> None:
        """Begin to look. Raises ValueError if the slots' bell has no eventfd."""
        self._loop, self._turn = serving.loop, serving.turn
        self._slots = slots
        self._event_fd = slots.bell.event_fd
        if not self._event_fd:
            raise ValueError("the bell of the slots has no eventfd")
        self._rest = rest
        self._waiting: dict[int, tuple[int, Pending[bool]]] = {}  # by slot, until when
        serving.call(self._loop.add_reader, self._event_fd, self._rung)
        serving.call(self._poll)
        serving.every(POLL_S, self._poll)  # a worker that was killed while it rang has woken nobody
        serving.every(GIVE_UP_S, self._give_up)

    def expect(self, slot: int, end_ns: int) -> Pending[bool]:
        """Return what will be True once the request in this slot has ended, False if it has not by `end_ns`.

        It is to be called before the request is submitted. `end_ns`: CLOCK_MONOTONIC.
        """
        pending: Pending[bool] = Pending()
        self._waiting[slot] = end_ns, pending
        return pending

    def forget(self, slot: int) -> bool:
        """Wait for it no more: it has not been submitted, or nobody wants to know. False: nobody waited for it."""
        return self._waiting.pop(slot, None) is not None

    def _rung(self) -> None:
        os.eventfd_read(self._event_fd)
        self._poll()

    def _poll(self) -> None:
        """Deal with all that have ended, then have the bell wake the loop."""
        waiting = self._waiting
        if done := self._done():
            self._turn.begin()
            # One of them may forget another, whose slot then serves a new request.
            for slot, ended in [(slot, waiting[slot]) for slot in done]:
                if waiting.get(slot) is ended:
                    del waiting[slot]
                    logged(ended[1].settle, True)
            self._turn.end()
            logged(self._rest)
        self._slots.bell.arm()
        if self._done():  # it ended before that
            self._loop.call_soon(self._poll)  # others on the loop have their turn

    def _done(self) -> list[int]:
        return self._slots.done(tuple(self._waiting))

    def _give_up(self) -> None:
        """Look for requests whose time is over. Most are cancelled by their calls before."""
        now_ns = time.monotonic_ns()
        for slot, (end_ns, pending) in list(self._waiting.items()):
            if end_ns < now_ns and self.forget(slot):
                pending.settle(False)


class Slots:
    """Opens requests in slots of `plane`, and says which have ended, and which have not in their time.

    For the loop's thread. `deferred`: is done when a few have ended. `aside`: threads for what would hold the loop for
    too long. `waiting`: what waits for something within a Python model. `connections`: to instances of such.
    `held`: those that are taken. `turns`: of steps that wait for one.
    """

    def __init__(self, serving: ServingLoop, plane: DataPlane, deferred: DeferredWork) -> None:
        self.serving = serving
        self.plane = plane
        self.deferred = deferred
        self.aside = Offload(serving.aside, serving.call)
        plane.wake_by_turns(serving.turn.at_end)
        completions = Completions(serving, plane.slots, deferred.do)
        self.expect, self.forget = completions.expect, completions.forget
        self.waiting = WaitingExecutions(serving.loop)
        self.connections = InstanceConnections(serving)
        self.held = HeldInstances(serving, plane.send)
        self.turns = InstanceTurns()

    def open(
        self,
        layout: RequestLayout,
        rows: int,
        external: ExternalTensors = NO_EXTERNAL,
        most_cold_bytes: int | None = None,
    ) -> Submission:
        """Take a slot and memory. Raises RequestError; then nothing external is used any more.

        Raises ColdError as the data plane does.
        """
        try:
            try:
                return self.plane.open(layout, rows, external, most_cold_bytes)
            except PoolExhaustedError:
                self.deferred.do()  # requests that are answered may have all slots
                return self.plane.open(layout, rows, external, most_cold_bytes)
        except PoolExhaustedError as error:
            external.release()
            raise no_room(error) from error
