"""Models that were served and are not any more although somebody wants them: they are loaded again.

A model that no worker can load any more is tried at once, then after growing pauses: its artifact may have been swept,
and the file that it is made of may be there. One that ended worker processes is left alone for a minute, and each time
longer. A client's load or unload, or a change of the repository, ends that.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from gangway.scheduler.pauses import Pauses
from gangway.server.repository import BrokenModel, ModelVersion

FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0
FIRST_QUARANTINE_SECONDS: Final = 60.0
LONGEST_QUARANTINE_SECONDS: Final = 3600.0


class LostModels:
    """`bring` loads a version again, unless it is no longer refused for that reason; False if it has to be tried again.

    Everything is called in the supervisor's event loop.
    """

    def __init__(self, bring: Callable[[ModelVersion, BrokenModel], Awaitable[bool]]) -> None:
        self._bring = bring
        self._pauses: dict[tuple[str, int, bool], Pauses] = {}
        self._entries: dict[asyncio.Task[None], ModelVersion] = {}

    @property
    def entries(self) -> Iterable[ModelVersion]:
        """The versions that are to be loaded again."""
        return self._entries.values()

    def lost(self, entry: ModelVersion, broken: BrokenModel) -> None:
        """Bring back a version that is refused from now on, for this reason."""
        task = asyncio.get_running_loop().create_task(self._bring_back(entry, broken))
        self._entries[task] = entry
        task.add_done_callback(self._entries.pop)

    def stop(self) -> None:
        """Bring back nothing any more."""
        for task in list(self._entries):
            task.cancel()

    async def _bring_back(self, entry: ModelVersion, broken: BrokenModel) -> None:
        key = (entry.name, entry.version, broken.at_fault)
        pauses = self._pauses.setdefault(key, _quarantine() if broken.at_fault else _pauses())
        await asyncio.sleep(pauses.failed())
        while not await self._bring(entry, broken):
            await asyncio.sleep(pauses.failed())
        pauses.works()


def _pauses() -> Pauses:
    return Pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, free=1)


def _quarantine() -> Pauses:
    return Pauses(FIRST_QUARANTINE_SECONDS, LONGEST_QUARANTINE_SECONDS, LONGEST_QUARANTINE_SECONDS)
