"""One thread that waits for the answers of many requests, and has each dealt with as it comes."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from gangway.executor.log_limit import OFTEN
from gangway.server.data_plane import DataPlane

LOOK_NS = 10**9  # how often requests are looked for that nobody shall wait for any longer

_log = logging.getLogger(__name__)


class Waiting(Protocol):
    """What must be known of a request."""

    @property
    def model_id(self) -> int:
        """Of the model that it is for."""

    @property
    def until_ns(self) -> int:
        """When waiting ends at the latest, CLOCK_MONOTONIC."""


WaitingT = TypeVar("WaitingT", bound=Waiting)


class Answering(Generic[WaitingT]):
    """Calls `ended` with each request that has ended, and `given_up` with those whose time is over; in its thread.

    The requests are in slots of `plane`, and their answers are told by its bell.
    """

    def __init__(
        self, plane: DataPlane, ended: Callable[[WaitingT], None], given_up: Callable[[WaitingT], None]
    ) -> None:
        self._plane = plane
        self._ended = ended
        self._given_up = given_up
        # By slot. Single operations on it are atomic, so requests need no lock here.
        self._waiting: dict[int, WaitingT] = {}
        self._look_ns = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, whatever still waits; return when the thread has."""
        self._stopping = True
        self._plane.slots.bell.ring()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, slot: int, request: WaitingT) -> None:
        """Wait for this slot's answer, too. To be called before it is submitted."""
        self._waiting[slot] = request

    def discard(self, slot: int) -> bool:
        """Wait for it no more; False if it is being dealt with already."""
        return self._waiting.pop(slot, None) is not None

    def _run(self) -> None:
        bell = self._plane.slots.bell
        while not self._stopping:
            seen = bell.seen()
            slots = self._plane.answered(self._waiting)
            for slot in slots:
                self._deal_with(slot, self._ended)
            if not slots:
                bell.wait(seen, self._spin_us(), LOOK_NS // 1000)
            if (now_ns := time.monotonic_ns()) >= self._look_ns:
                self._look_ns = now_ns + LOOK_NS
                self._give_up(now_ns)

    def _spin_us(self) -> int:
        """Return how long to wait awake: see `DataPlane.spin_for`."""
        waiting = list(self._waiting.values())
        return self._plane.spin_for(waiting[0].model_id) if len(waiting) == 1 else 0

    def _give_up(self, now_ns: int) -> None:
        for slot, request in list(self._waiting.items()):
            if request.until_ns < now_ns:
                self._deal_with(slot, self._given_up)

    def _deal_with(self, slot: int, how: Callable[[WaitingT], None]) -> None:
        request = self._waiting.pop(slot, None)
        if request is not None:
            try:
                how(request)
            except Exception:  # the others' answers must not be lost by it
                _log.exception("an answer could not be given", extra=OFTEN)
