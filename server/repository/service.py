"""Where the supervisor takes clients' calls to the repository: each in a task of its own, each answered once."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import grpc

from gangway.server.errors import RequestError, unavailable
from gangway.server.messages import (
    DUPLICATE,
    WHOLE_MODEL,
    ModelRemoved,
    ModelUnavailable,
    RepositoryAnswer,
    RepositoryCall,
)
from gangway.server.options.repository import RepositoryOptions
from gangway.server.repository.control import ModelControl
from gangway.server.repository.ensembles import in_order
from gangway.server.repository.repository import Entry, ModelVersion, OverrideStore, find_models
from gangway.server.supervisor.front_ends import FrontEndControl

# The index shows what the repositories hold at this moment, also what nobody has asked for.

_log = logging.getLogger(__name__)


async def refresh_index(repositories: Sequence[Path], front_end: FrontEndControl) -> None:
    """Tell clients of models that are new in the repositories, and nothing more of those that have gone."""
    try:
        found = await asyncio.to_thread(find_models, repositories)
    except OSError as error:
        _log.warning("a repository cannot be listed: %s", error)
        return
    known = {name for name, _ in front_end.entries}
    for name, folders in found.items():
        if name not in known:
            several = ModelUnavailable(name, WHOLE_MODEL, DUPLICATE)
            front_end.announce(several if len(folders) > 1 else ModelUnavailable(name, WHOLE_MODEL, "", "UNKNOWN"))
    for (name, version), entry in list(front_end.entries.items()):
        is_idle = isinstance(entry, ModelUnavailable) and not entry.is_missed and entry.state != "UNLOADING"
        if is_idle and name not in found:
            front_end.announce(ModelRemoved(name, version))


# Mode `poll`: looks at the repositories every few seconds and has the server follow their changes.

Seen: TypeAlias = tuple[tuple[int, object], ...]


class RepositoryPoller:
    """`first`: what was found at the start. What could not be loaded is tried again when its files have changed."""

    def __init__(self, control: ModelControl, seconds: float, first: Mapping[str, Sequence[Entry]]) -> None:
        self._control = control
        self._seconds = seconds
        self._seen = {name: _seen(entries) for name, entries in first.items()}

    async def run(self) -> None:
        """Look, until cancelled; not at all if the time is 0."""
        while self._seconds:
            await asyncio.sleep(self._seconds)
            await self.look()

    async def look(self) -> None:
        """Follow what has changed since the last time, one model after the other."""
        try:
            found = await asyncio.to_thread(self._control.read_all)
        except (OSError, RuntimeError) as error:  # no thread, or a folder is away: until there is, everything stays
            _log.warning("a repository cannot be listed: %s", error)
            return
        for name in (self._seen.keys() | self._control.names) - found.keys():
            self._seen.pop(name, None)
            await self._control.remove(name)
        for name, entries in in_order(found).items():
            seen = _seen(entries)
            if self._seen.get(name) != seen:
                self._seen[name] = seen
                await self._control.follow(name, entries)


def _seen(entries: Sequence[Entry]) -> Seen:
    """Return what tells whether a model has changed."""
    return tuple((entry.version, entry.stamp if isinstance(entry, ModelVersion) else entry.reason) for entry in entries)


NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"  # Triton says so in both other modes


class RepositoryService:
    """Calls for one model are carried out one after the other, others at the same time."""

    def __init__(
        self,
        front_end: FrontEndControl,
        control: ModelControl,
        overrides: OverrideStore,
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
