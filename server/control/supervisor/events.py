"""What one part of the supervisor says that concerns another: one queue of events, which the supervisor hands out.

Parts are made one after the other, and say something to those that are made later. They have the queue for that.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gangway.scheduler.messages import ArtifactLost, ModelFailed, ModelIdle, ModelLoaded, ModelUnloaded, WorkerStuck
from gangway.server import messages

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class InstanceCall:
    """An instance of model `asker`, in process `pid`, asks something of the repository; `answer` gets the answer.

    `is_loading`: the model is being loaded. `call`: what has been said, which may be anything.
    """

    asker: str
    is_loading: bool
    pid: int
    call: Mapping[str, Any]
    answer: "asyncio.Future[dict[str, Any]]"


@dataclass(frozen=True)
class ReadinessCall:
    """A front end asks, by a ReadinessAsked of this number, whether a Python model says that it is ready."""

    front_end: int
    number: int
    model_id: int


Event: TypeAlias = (
    WorkerStuck | ModelUnloaded | ModelLoaded | ModelIdle | ModelFailed | ArtifactLost  # from the scheduler
    | messages.ShapeWanted | messages.FirstAnswer | messages.RepositoryCall | messages.LogSettings  # from front ends
    | messages.ModelPresence | messages.InstanceAttended | InstanceCall  # from instances of Python models
    | ReadinessCall  # from front ends, for these instances
)  # fmt: skip


class EventQueue:
    """Events in their order, each of which `handle` gets in a turn of the event loop of its own."""

    def __init__(self, handle: Callable[[Event], None]) -> None:
        self._handle = handle
        self._loop = asyncio.get_running_loop()

    def put(self, event: Event) -> None:
        """Have an event handled after those before it."""
        self._loop.call_soon(self._hand_out, event)

    def _hand_out(self, event: Event) -> None:
        try:
            self._handle(event)
        except ValueError:
            _log.exception("an event within this server is ignored: %s", type(event).__name__)
