"""Clients' calls to the repository, as the supervisor answers them: each in a task of its own, each answered once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from gangway.protos import StatusCode
from gangway.server.control.repository.repository import (
    NO_FOLDER,
    NOT_FOUND,
    Override,
    OverrideStore,
    find_models,
)
from gangway.server.control.supervisor.announcements import Announcements
from gangway.server.errors import RequestError, unavailable
from gangway.server.messages import (
    DUPLICATE,
    OK,
    WHOLE_MODEL,
    ModelRemoved,
    ModelUnavailable,
    RepositoryAnswer,
    RepositoryCall,
)
from gangway.server.options.server import RepositoryOptions

_log = logging.getLogger(__name__)


async def refresh_index(options: RepositoryOptions, clients: Announcements) -> None:
    """Show in the index what the repositories hold: announce new models, and remove those that have gone."""
    try:
        found = await asyncio.to_thread(find_models, options.folders, options.files)
    except OSError as error:
        _log.warning("a model repository cannot be listed, so what is served stays: %s", error)
        return
    known = {name for name, _ in clients.entries}
    for name, folders in found.items():
        if name not in known:
            several = ModelUnavailable(name, WHOLE_MODEL, DUPLICATE)
            clients.announce(several if len(folders) > 1 else ModelUnavailable(name, WHOLE_MODEL, "", "UNKNOWN"))
    for (name, version), entry in list(clients.entries.items()):
        is_idle = isinstance(entry, ModelUnavailable) and not entry.is_missed and entry.state != "UNLOADING"
        if is_idle and name not in found:
            clients.announce(ModelRemoved(name, version))


def _log_failure(task: "asyncio.Task[RepositoryAnswer]") -> None:
    """Tell the log what no client waits for."""
    if not task.cancelled() and task.result().code != OK:
        _log.warning("a load that no client waits for: %s", task.result().message)


# Triton says so in both other modes; what to do is ours.
NOT_EXPLICIT = (
    "explicit model load / unload is not allowed if polling is enabled: start the server with"
    " --model-control-mode=explicit"
)


@dataclass(eq=False)
class RepositoryService:
    """`load` and `unload` carry out calls for one model one after the other, for others at the same time.

    They raise RequestError; `unload` gets whether to unload dependents, too. `answer` gets the answer to each call.
    """

    options: RepositoryOptions
    clients: Announcements
    overrides: OverrideStore
    load: Callable[[str, Override | None], Awaitable[None]]
    unload: Callable[[str, bool], Awaitable[None]]
    answer: Callable[[RepositoryAnswer], None]
    _tasks: set[asyncio.Task[RepositoryAnswer]] = field(default_factory=set, init=False)

    def stop(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()

    def take(self, call: RepositoryCall) -> None:
        """Carry out a call of a front end, beside others."""
        self.perform(call).add_done_callback(self._send)

    def perform(self, call: RepositoryCall) -> "asyncio.Task[RepositoryAnswer]":
        """Begin to carry out a call, whose answer is the task's result."""
        return self._begin(self._answer_after(call, self._do(call)))

    def _begin(self, work: Coroutine[Any, Any, RepositoryAnswer]) -> "asyncio.Task[RepositoryAnswer]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _send(self, task: "asyncio.Task[RepositoryAnswer]") -> None:
        if not task.cancelled():
            self.answer(task.result())

    async def _answer_after(self, call: RepositoryCall, work: Awaitable[None]) -> RepositoryAnswer:
        try:
            await work
            return RepositoryAnswer(call.number)
        except RequestError as error:
            return RepositoryAnswer(call.number, error.code.name, error.message)
        except Exception:
            _log.exception(
                "the %s of model %s failed by a fault of the server; its client is told INTERNAL", call.kind, call.name
            )
            message = "internal error, see the server's log"
            return RepositoryAnswer(call.number, StatusCode.INTERNAL.name, message)

    async def _require(self, name: str) -> None:
        """Raise RequestError for a name that no repository has."""
        try:
            found = await asyncio.to_thread(find_models, self.options.folders, self.options.files)
        except OSError as error:
            unavailable(f"{NOT_FOUND.format(name)}: {error}")
        if name not in found:
            raise RequestError(StatusCode.INTERNAL, NO_FOLDER.format(name))

    async def _do(self, call: RepositoryCall) -> None:
        if call.kind == "index":
            await refresh_index(self.options, self.clients)
            return
        if self.options.mode != "explicit":
            unavailable(NOT_EXPLICIT)
        if call.kind == "unload":
            await self.unload(call.name, call.dependents)
            return
        try:
            override, waits = await asyncio.to_thread(self.overrides.take, call.path)
        except FileNotFoundError:
            unavailable("the front end that has the request has ended")
        if waits:
            await self.load(call.name, override)
        else:
            if (override is None or override.folder is None) and not self.options.remotes:
                await self._require(call.name)  # which no index would tell
            self._begin(self._answer_after(call, self.load(call.name, override))).add_done_callback(_log_failure)
