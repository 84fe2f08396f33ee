"""How what is served follows what the repositories hold, or what clients ask for.

A model is reloaded while it serves: the new version is compiled, loaded, warmed up and measured beside the old one,
then the front end gives it to all further requests, and the old one goes when its last request has ended. What cannot
be loaded leaves in place what is served already.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

import grpc

from gangway.server.ensemble.config import MAX_DEPTH
from gangway.server.ensemble.control import in_order, with_members
from gangway.server.errors import RequestError
from gangway.server.front_end_control import FrontEndControl
from gangway.server.front_end_messages import DUPLICATE, WHOLE_MODEL
from gangway.server.loaded_model import LoadedModel
from gangway.server.model_loader import LOAD_ERRORS, ModelLoader
from gangway.server.name_locks import NameLocks
from gangway.server.options.repository import ALL_MODELS, RepositoryOptions
from gangway.server.overrides import Override, OverrideKeeper
from gangway.server.repository import (
    BrokenModel,
    Entry,
    ModelVersion,
    find_models,
    misplaced,
    read_model,
    read_only_one,
)
from gangway.server.served_models import ServedModels

NOT_FOUND = "failed to load '{}', failed to poll from model repository"
_log = logging.getLogger(__name__)


class StartError(Exception):
    """Models that are to be served from the start cannot be loaded; the message names them."""


class ModelControl:
    """Everything is called in the supervisor's event loop."""

    def __init__(
        self,
        options: RepositoryOptions,
        loader: ModelLoader,
        front_end: FrontEndControl,
        overrides: OverrideKeeper,
    ) -> None:
        self._options = options
        self._loader = loader
        self._front_end = front_end
        self._models = ServedModels(loader, front_end, overrides, self._bring_back)
        self._ensembles = self._models.ensembles
        self._locks = NameLocks()

    @property
    def loaded(self) -> list[LoadedModel]:
        """What is served."""
        return self._models.loaded

    @property
    def broken(self) -> list[BrokenModel]:
        """What cannot be served."""
        return self._models.broken

    @property
    def names(self) -> set[str]:
        """The models of which anything is served, or could not be."""
        return self._models.names

    async def start(self) -> dict[str, list[Entry]]:
        """Load what is to be served from the start, and return it. A broken model hinders no other one.

        Raises OSError when a repository cannot be listed, StartError if that is to be the end of the server.
        """
        found = self._wanted_at_start(await asyncio.to_thread(self.read_all))
        for sentence in await asyncio.to_thread(lambda: list(misplaced(self._options.folders))):
            _log.warning("%s", sentence)
        for name, entries in found.items():
            self._ensembles.want(name, entries)
            for entry in entries:
                if isinstance(entry, ModelVersion):
                    self._models.announce_loading(entry)
                else:
                    self._models.refuse(entry)
        versions = [entry for entries in found.values() for entry in entries if isinstance(entry, ModelVersion)]
        await self._loader.look_up(versions)
        for name, entries in found.items():
            async with self._locks.hold(name):
                await self._bring(name, entries)
        if self.broken and self._options.exit_on_error:
            raise StartError(f"models cannot be loaded: {', '.join(sorted({broken.name for broken in self.broken}))}")
        self._front_end.initial_load_done(self._options.strict_readiness)
        return found

    async def load(self, name: str, override: Override | None, users: tuple[str, ...] = ()) -> None:
        """Load or reload what the repositories hold of a model, or the override. Raises RequestError.

        A version whose files have not changed since it was loaded stays as it is. What an ensemble needs is loaded
        before it, unless it is there. `users`: the ensembles for which this one is loaded, the innermost last.
        """
        await self._load_members(name, override, users)
        async with self._locks.hold(name):
            entries = await asyncio.to_thread(self._read, name, override)
            if not entries:
                raise RequestError(grpc.StatusCode.INTERNAL, NOT_FOUND.format(name))
            if _is_duplicate(entries):
                raise RequestError(grpc.StatusCode.INTERNAL, f"{NOT_FOUND.format(name)}: {DUPLICATE}")
            failures = await self._bring(name, entries)
            if override is not None and override.folder is not None and not self._models.of(name):
                self._models.forget(name)  # nobody shall miss what no repository has
            self._models.releases.remove_unused(override)
        if not users:
            self._ensembles.loaded_by_name(name)
        if failures:
            reasons = " ".join(
                entry.reason if entry.is_whole else f"version {entry.version} is at UNAVAILABLE state: {entry.reason};"
                for entry in failures
            )
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"load failed for model '{name}': {reasons}")

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Unload all versions of a model; return when none takes new requests. One that is not loaded stays so.

        `dependents`: also what was loaded along with it, an ensemble, and no other one needs.
        """
        async with self._locks.hold(name):
            ensembles, along = self._ensembles.unloaded(name)
            self._models.withdraw(name)
            self._models.wanted_no_more(name, ensembles)
        for member in along if dependents else ():
            await self.unload(member, dependents=True)

    async def follow(self, name: str, entries: Sequence[Entry]) -> None:
        """Serve what the repositories now hold of a model."""
        async with self._locks.hold(name):
            if _is_duplicate(entries):
                self._ensembles.unloaded(name)
                self._models.withdraw(name, reason=DUPLICATE)
                self._models.note([BrokenModel(name, WHOLE_MODEL, DUPLICATE)])
            else:
                await self._bring(name, entries)

    async def remove(self, name: str) -> None:
        """Unload a model that no repository has any more, and forget it."""
        async with self._locks.hold(name):
            self._ensembles.unloaded(name)
            self._models.withdraw(name)
            self._models.forget(name)

    def stop(self) -> None:
        """End what goes on in the background."""
        self._models.lost.stop()
        self._models.releases.stop()

    # -- what there is

    def read_all(self) -> dict[str, list[Entry]]:
        """Return what the repositories hold, by name. Reads files; may be called in any thread. Raises OSError."""
        return {name: read_only_one(folders) for name, folders in find_models(self._options.folders).items()}

    def _read(self, name: str, override: Override | None) -> list[Entry]:
        """Return what there is of one model; nothing if there is nothing."""
        if override is not None and override.folder is not None:
            return read_model(override.folder, name, override)
        folders = find_models(self._options.folders).get(name, [])
        if len(folders) == 1:
            return read_model(folders[0], name, override)
        return read_only_one(folders) if folders else []

    def _wanted_at_start(self, found: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        """Return what is to be served of it, ensembles after their models."""
        wanted = self._options.load_models
        if self._options.mode == "explicit" and wanted != (ALL_MODELS,):
            absent = {name: _absent(name) for name in wanted if name not in found}
            names = with_members(wanted, found)
            found = {name: entries for name, entries in found.items() if name in names} | absent
            for name in names:
                if name not in wanted:
                    self._ensembles.loaded_along(name)
        return in_order(found)

    # -- steps

    async def _bring(self, name: str, entries: Iterable[Entry]) -> list[BrokenModel]:
        """Serve these versions of a model and no others; return those that cannot be.

        If there are any, what is served of the model already goes on being served. The caller holds the name's lock.
        """
        models = self._models
        before = models.of(name)
        wanted = [entry for entry in entries if isinstance(entry, ModelVersion)]
        failures = [entry for entry in entries if isinstance(entry, BrokenModel)]
        self._ensembles.want(name, wanted)
        loaded: list[LoadedModel] = []
        for entry in wanted:
            if (failures and before) or (entry.version in before and before[entry.version].entry.is_same(entry)):
                continue
            try:
                loaded.append(await self._load(entry))
            except LOAD_ERRORS as error:
                failures.append(BrokenModel(name, entry.version, str(error)))
            except BaseException:
                models.drop(loaded)
                raise
            if not before:
                models.serve(loaded)
        if failures and before:
            models.drop(loaded)
            models.keep(before, failures, wanted)
            self._ensembles.want(name, [model.entry for model in before.values()])
            return failures
        models.serve(loaded)
        for version in before.keys() - {entry.version for entry in wanted}:
            models.withdraw(name, version)
        models.note(failures)
        models.repaired(name, failures)
        return failures

    async def _load(self, entry: ModelVersion) -> LoadedModel:
        if entry.is_ensemble:
            return self._ensembles.load(entry)
        if entry.version not in self._models.of(entry.name):
            self._models.announce_loading(entry)
        return await self._loader.load(entry)

    async def _bring_back(self, entry: ModelVersion, broken: BrokenModel) -> bool:
        """Serve again what has been lost, unless something else has become of it; return whether it needs no more."""
        async with self._locks.hold(entry.name):
            if not self._models.is_refused(broken):
                return True
            try:
                loaded = [await self._loader.load(entry)]
            except LOAD_ERRORS as error:
                _log.error("model %s, version %d: not loaded again yet: %s", entry.name, entry.version, error)
                return False
            self._models.serve(loaded)
        return True

    async def _load_members(self, name: str, override: Override | None, users: tuple[str, ...]) -> None:
        """Load what an ensemble needs. No lock is held meanwhile, so two of them cannot wait for each other."""
        if len(users) >= MAX_DEPTH:
            return
        entries = await asyncio.to_thread(self._read, name, override)
        for member in self._ensembles.missing(entries):
            if member in (*users, name):
                continue  # a circle, which is found when all of its ensembles are known
            try:
                await self.load(member, None, (*users, name))
            except RequestError as error:
                _log.error("ensemble %s: %s", name, error.message)
            else:
                self._ensembles.loaded_along(member)


def _absent(name: str) -> list[Entry]:
    return [BrokenModel(name, WHOLE_MODEL, NOT_FOUND.format(name))]


def _is_duplicate(entries: Sequence[Entry]) -> bool:
    return len(entries) == 1 and isinstance(entries[0], BrokenModel) and entries[0].reason == DUPLICATE
