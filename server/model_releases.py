"""The end of models that are served no more: they are unloaded when the last request has ended that they began."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from gangway.server.front_end_control import FrontEndControl
from gangway.server.front_end_messages import UNLOADED, ModelUnavailable
from gangway.server.loaded_model import LoadedModel
from gangway.server.model_loader import ModelLoader
from gangway.server.overrides import Override, OverrideKeeper
from gangway.server.repository import ModelVersion

RETIRE_SECONDS = 660.0  # no request lasts longer
UNLOAD_SECONDS = 60.0  # workers do it beside their queries
_log = logging.getLogger(__name__)


class ModelReleases:
    """Everything is called in the supervisor's event loop. `in_use`: what is or shall be served at that moment."""

    def __init__(
        self,
        loader: ModelLoader,
        front_end: FrontEndControl,
        overrides: OverrideKeeper,
        in_use: Callable[[], Iterable[ModelVersion]],
    ) -> None:
        self._loader = loader
        self._front_end = front_end
        self._overrides = overrides
        self._in_use = in_use
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, model: LoadedModel, leaving: ModelUnavailable | None = None, reason: str = UNLOADED) -> None:
        """Unload a model, which no further request gets, as soon as nobody uses it.

        `leaving`: what clients are told of it until then; afterwards it is `reason`. None: another one has its place.
        """
        self._loader.withdrawn(model)
        task = asyncio.get_running_loop().create_task(self._unload_when_unused(model, leaving, reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def remove_unused(self, override: Override | None) -> None:
        """Remove what came with a client's request, unless something is made of it that is or shall be served."""
        if override is not None and not any(entry.override is override for entry in self._in_use()):
            self._overrides.remove(override)

    def stop(self) -> None:
        """Wait for nothing any more."""
        for task in self._tasks:
            task.cancel()

    async def _unload_when_unused(self, model: LoadedModel, leaving: ModelUnavailable | None, reason: str) -> None:
        name, version = model.entry.name, model.entry.version
        if not await self._front_end.retired(model.ready.model_id, RETIRE_SECONDS):
            _log.warning("%s, version %d: unloaded although requests have not ended", name, version)
        self._loader.unload(model)
        if not await self._loader.unloaded(model, UNLOAD_SECONDS):
            _log.warning("%s, version %d: its memory is not given back yet", name, version)
        self.remove_unused(model.entry.override)
        _log.info("model %s, version %d: %sunloaded", name, version, "" if leaving else "the one before is ")
        if leaving is not None and self._front_end.entries.get((name, version)) is leaving:
            self._front_end.announce(ModelUnavailable(name, version, reason))
