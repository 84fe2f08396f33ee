"""Where the supervisor takes clients' calls to the repository: each in a task of its own, each answered once."""

import asyncio
import logging

import grpc

from gangway.server.errors import RequestError, unavailable
from gangway.server.front_end_control import FrontEndControl
from gangway.server.front_end_messages import RepositoryAnswer, RepositoryCall
from gangway.server.model_control import ModelControl
from gangway.server.options.repository import RepositoryOptions
from gangway.server.overrides import OverrideKeeper
from gangway.server.repository_index import refresh_index

NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"  # Triton says so in both other modes
_log = logging.getLogger(__name__)


class RepositoryDesk:
    """Calls for one model are carried out one after the other, others at the same time."""

    def __init__(
        self,
        front_end: FrontEndControl,
        control: ModelControl,
        overrides: OverrideKeeper,
        options: RepositoryOptions,
    ) -> None:
        self._front_end = front_end
        self._control = control
        self._overrides = overrides
        self._options = options
        self._tasks: set[asyncio.Task[None]] = set()
        front_end.on_repository_call = self._take

    def stop(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()

    def _take(self, call: RepositoryCall) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: RepositoryCall) -> None:
        try:
            await self._do(call)
            answer = RepositoryAnswer(call.number)
        except RequestError as error:
            answer = RepositoryAnswer(call.number, error.code.name, error.message)
        except Exception:
            _log.exception("%s of model %s failed unexpectedly", call.kind, call.name)
            message = "internal error, see the server's log"
            answer = RepositoryAnswer(call.number, grpc.StatusCode.INTERNAL.name, message)
        self._front_end.answer(answer)

    async def _do(self, call: RepositoryCall) -> None:
        if call.kind == "index":
            await refresh_index(self._options.folders, self._front_end)
            return
        if self._options.mode != "explicit":
            unavailable(NOT_EXPLICIT)
        if call.kind == "unload":
            await self._control.unload(call.name, call.dependents)
            return
        try:
            override = await asyncio.to_thread(self._overrides.take, call.path)
        except FileNotFoundError:
            unavailable("the front end that has the request is gone")
        await self._control.load(call.name, override)
