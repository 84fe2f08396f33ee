"""Mode `poll`: looks at the repositories every few seconds and has the server follow their changes."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from gangway.server.ensemble.control import in_order
from gangway.server.model_control import ModelControl
from gangway.server.repository import Entry, ModelVersion

Seen: TypeAlias = tuple[tuple[int, object], ...]
_log = logging.getLogger(__name__)


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
