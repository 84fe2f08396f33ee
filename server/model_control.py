"""What is served, and how it follows what the repositories hold or what clients ask for.

A model is reloaded while it serves: the new version is compiled, loaded, warmed up and measured beside the old one,
then the front end gives it to all further requests, and the old one goes when its last request has ended. What cannot
be loaded leaves in place what is served already.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

import grpc
from gangway.server.ensemble.config import MAX_DEPTH
from gangway.server.ensemble.control import EnsembleControl, in_order, with_members
from gangway.server.errors import RequestError
from gangway.server.front_end_control import FrontEndControl
from gangway.server.front_end_messages import DUPLICATE, UNLOADED, ModelRemoved, ModelUnavailable
from gangway.server.loaded_model import LoadedModel
from gangway.server.model_loader import LOAD_ERRORS, ModelLoader
from gangway.server.name_locks import NameLocks
from gangway.server.options.repository import ALL_MODELS, RepositoryOptions
from gangway.server.overrides import Override, OverrideKeeper
from gangway.server.repository import BrokenModel, Entry, ModelVersion, find_models, read_model, read_only_one

RETIRE_SECONDS = 660.0  # no request lasts longer
UNLOAD_SECONDS = 60.0  # workers do it beside their queries
MAX_REASON_CHARACTERS = 2000
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
        self._overrides = overrides
        self._served: dict[str, dict[int, LoadedModel]] = {}  # by name and version
        self._broken: dict[tuple[str, int], BrokenModel] = {}
        self._ensembles = EnsembleControl(self, self._served, self._broken)
        self._locks = NameLocks()
        self._releases: set[asyncio.Task[None]] = set()
        loader.on_model_lost = self._lost

    @property
    def loaded(self) -> list[LoadedModel]:
        """What is served."""
        return [model for versions in self._served.values() for model in versions.values()]

    @property
    def broken(self) -> list[BrokenModel]:
        """What cannot be served."""
        return list(self._broken.values())

    @property
    def names(self) -> set[str]:
        """The models of which anything is served, or could not be."""
        return self._served.keys() | {name for name, _ in self._broken}

    async def start(self) -> dict[str, list[Entry]]:
        """Load what is to be served from the start, and return it. A broken model hinders no other one.

        Raises OSError when a repository cannot be listed, StartError if that is to be the end of the server.
        """
        found = await asyncio.to_thread(self.read_all)
        wanted = self._options.load_models
        if self._options.mode == "explicit" and wanted != (ALL_MODELS,):
            absent = {name: _absent(name) for name in wanted if name not in found}
            names = with_members(wanted, found)
            found = {name: entries for name, entries in found.items() if name in names} | absent
            for name in names:
                if name not in wanted:
                    self._ensembles.loaded_along(name)
        found = in_order(found)
        for name, entries in found.items():
            self._ensembles.want(name, entries)
            for entry in entries:
                if isinstance(entry, ModelVersion):
                    self._announce_loading(entry)
                else:
                    self._refuse(entry)
        for name, entries in found.items():
            async with self._locks.hold(name):
                await self._bring(name, entries)
        if self._broken and self._options.exit_on_error:
            raise StartError(f"models cannot be loaded: {', '.join(sorted({name for name, _ in self._broken}))}")
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
            if override is not None and override.folder is not None and name not in self._served:
                self._forget(name)  # nobody shall miss what no repository has
            self._remove_unused(override)
        if not users:
            self._ensembles.loaded_by_name(name)
        if failures:
            reasons = " ".join(
                f"version {entry.version} is at UNAVAILABLE state: {entry.reason};" if entry.version else entry.reason
                for entry in failures
            )
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"load failed for model '{name}': {reasons}")

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Unload all versions of a model; return when none takes new requests. One that is not loaded stays so.

        `dependents`: also what was loaded along with it, an ensemble, and no other one needs.
        """
        async with self._locks.hold(name):
            ensembles, along = self._ensembles.unloaded(name)
            self.withdraw(name)
            for entry in ensembles:
                self._tell_unloaded(name, entry.version)  # it may be waiting for one of its models
            for key in [key for key in self._broken if key[0] == name]:
                del self._broken[key]
                self._front_end.announce(ModelUnavailable(*key, UNLOADED))
        for member in along if dependents else ():
            await self.unload(member, dependents=True)

    async def follow(self, name: str, entries: Sequence[Entry]) -> None:
        """Serve what the repositories now hold of a model."""
        async with self._locks.hold(name):
            if _is_duplicate(entries):
                self._ensembles.unloaded(name)
                self.withdraw(name, reason=DUPLICATE)
                self.note([BrokenModel(name, 0, DUPLICATE)])
            else:
                await self._bring(name, entries)

    async def remove(self, name: str) -> None:
        """Unload a model that no repository has any more, and forget it."""
        async with self._locks.hold(name):
            self._ensembles.unloaded(name)
            self.withdraw(name)
            self._forget(name)

    async def _bring(self, name: str, entries: Iterable[Entry]) -> list[BrokenModel]:
        """Serve these versions of a model and no others; return those that cannot be.

        If there are any, what is served of the model already goes on being served. The caller holds the name's lock.
        """
        before = dict(self._served.get(name, {}))
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
                self._drop(loaded)
                raise
            if not before:
                self.serve(loaded)
        if failures and before:
            self._drop(loaded)
            self._keep(before, failures, wanted)
            self._ensembles.want(name, [model.entry for model in before.values()])
            return failures
        self.serve(loaded)
        for version in before.keys() - {entry.version for entry in wanted}:
            self.withdraw(name, version)
        self.note(failures)
        self._clear_broken(name, failures)
        return failures

    def stop(self) -> None:
        """End what goes on in the background."""
        for task in self._releases:
            task.cancel()

    # -- steps

    def read_all(self) -> dict[str, list[Entry]]:
        """Return what the repositories hold, by name. Reads files; may be called in any thread. Raises OSError."""
        return {name: read_only_one(folders) for name, folders in find_models(self._options.folders).items()}

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

    def _tell_unloaded(self, name: str, version: int) -> None:
        entry = self._front_end.entries.get((name, version))
        if isinstance(entry, ModelUnavailable) and entry.state == "UNAVAILABLE":
            self._front_end.announce(ModelUnavailable(name, version, UNLOADED))

    def _read(self, name: str, override: Override | None) -> list[Entry]:
        """Return what there is of one model; nothing if there is nothing."""
        if override is not None and override.folder is not None:
            return read_model(override.folder, name, override)
        folders = find_models(self._options.folders).get(name, [])
        if len(folders) == 1:
            return read_model(folders[0], name, override)
        return read_only_one(folders) if folders else []

    async def _load(self, entry: ModelVersion) -> LoadedModel:
        if entry.is_ensemble:
            return self._ensembles.load(entry)
        if entry.version not in self._served.get(entry.name, {}):
            self._announce_loading(entry)
        return await self._loader.load(entry)

    def _announce_loading(self, entry: ModelVersion) -> None:
        self._front_end.announce(ModelUnavailable(entry.name, entry.version, "it is being loaded", "LOADING"))

    def serve(self, loaded: list[LoadedModel]) -> None:
        """Give these models to all requests from now on; empties the list."""
        for model in loaded:
            entry = model.entry
            versions = self._served.setdefault(entry.name, {})
            before = versions.get(entry.version)
            versions[entry.version] = model
            self._broken.pop((entry.name, entry.version), None)
            self._broken.pop((entry.name, 0), None)
            self._front_end.announce(model.ready)
            self._loader.announced(model)
            if before is not None:
                self._release(before)
        names = {model.entry.name for model in loaded}
        loaded.clear()
        for name in names:
            self._ensembles.changed(name)

    def _drop(self, loaded: list[LoadedModel]) -> None:
        """Unload models of which no client has heard."""
        for model in loaded:
            self._loader.unload(model)
            self._ensembles.gone(model)
        loaded.clear()

    def _keep(
        self, before: Mapping[int, LoadedModel], failures: Sequence[BrokenModel], wanted: Sequence[ModelVersion]
    ) -> None:
        """A model has changed and cannot be loaded: what is served stays, and nothing else."""
        for entry in wanted:
            if entry.version not in before:
                self._front_end.announce(ModelUnavailable(entry.name, entry.version, UNLOADED))
        for failure in failures:
            _log.error("model %s: not reloaded, what is loaded stays: %s", failure.name, failure.reason)
            if failure.version and failure.version not in before:
                self._refuse(failure)

    def withdraw(self, name: str, version: int | None = None, reason: str = UNLOADED) -> None:
        """Give one version of a model, or all, to no further request; `reason` is what clients are told afterwards."""
        versions = self._served.get(name, {})
        for number in [version] if version is not None else list(versions):
            model = versions.pop(number, None)
            if model is None:  # lost meanwhile
                continue
            leaving = ModelUnavailable(name, number, "it is being unloaded", "UNLOADING")
            self._front_end.announce(leaving)
            self._release(model, leaving, reason)
        if not versions:
            self._served.pop(name, None)
        self._ensembles.changed(name)

    def _release(self, model: LoadedModel, leaving: ModelUnavailable | None = None, reason: str = UNLOADED) -> None:
        self._loader.withdrawn(model)
        self._ensembles.gone(model)
        task = asyncio.get_running_loop().create_task(self._unload_when_unused(model, leaving, reason))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _unload_when_unused(self, model: LoadedModel, leaving: ModelUnavailable | None, reason: str) -> None:
        name, version = model.entry.name, model.entry.version
        if not await self._front_end.retired(model.ready.model_id, RETIRE_SECONDS):
            _log.warning("%s, version %d: unloaded although requests have not ended", name, version)
        self._loader.unload(model)
        if not await self._loader.unloaded(model, UNLOAD_SECONDS):
            _log.warning("%s, version %d: its memory is not given back yet", name, version)
        self._remove_unused(model.entry.override)
        _log.info("model %s, version %d: %sunloaded", name, version, "" if leaving else "the one before is ")
        if leaving is not None and self._front_end.entries.get((name, version)) is leaving:
            self._front_end.announce(ModelUnavailable(name, version, reason))

    def _remove_unused(self, override: Override | None) -> None:
        if override is not None and not any(model.entry.override is override for model in self.loaded):
            self._overrides.remove(override)

    def note(self, failures: Iterable[BrokenModel]) -> None:
        """Say of versions that cannot be served why."""
        for failure in failures:
            if self._broken.get((failure.name, failure.version)) != failure:
                self._refuse(failure)

    def _clear_broken(self, name: str, failures: Sequence[BrokenModel]) -> None:
        """Forget what was wrong with a model and is not any more."""
        for key in [key for key, broken in self._broken.items() if key[0] == name and broken not in failures]:
            del self._broken[key]
            if key[1] not in self._served.get(name, {}):
                self._front_end.announce(ModelRemoved(*key))

    def _refuse(self, broken: BrokenModel) -> None:
        _log.error("model %s%s: %s", broken.name, f", version {broken.version}" * bool(broken.version), broken.reason)
        self._broken[broken.name, broken.version] = broken
        self._front_end.announce(ModelUnavailable(broken.name, broken.version, broken.reason[:MAX_REASON_CHARACTERS]))

    def _forget(self, name: str) -> None:
        """Have the index show nothing of a model any more, but what is still being unloaded."""
        for key in [key for key in self._broken if key[0] == name]:
            del self._broken[key]
        for (known, version), entry in list(self._front_end.entries.items()):
            if known == name and isinstance(entry, ModelUnavailable) and entry.state != "UNLOADING":
                self._front_end.announce(ModelRemoved(name, version))

    def _lost(self, model_id: int, reason: str) -> None:
        """A worker's successor cannot load what its predecessor had."""
        for model in self.loaded:
            if model.ready.model_id == model_id:
                del self._served[model.entry.name][model.entry.version]
                if not self._served[model.entry.name]:
                    del self._served[model.entry.name]
                self._refuse(BrokenModel(model.entry.name, model.entry.version, reason))
                self._release(model)
                self._ensembles.changed(model.entry.name)


def _absent(name: str) -> list[Entry]:
    return [BrokenModel(name, 0, NOT_FOUND.format(name))]


def _is_duplicate(entries: Sequence[Entry]) -> bool:
    return len(entries) == 1 and isinstance(entries[0], BrokenModel) and entries[0].reason == DUPLICATE
