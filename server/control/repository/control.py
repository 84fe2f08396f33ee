"""How what is served follows what the repositories hold, or what clients ask for.

A model is reloaded while it serves. The new version is compiled, loaded, warmed up and measured beside the old one. So
is a model that onnxruntime serves until it is compiled. Then the front ends give it to all further requests, and the
old one is unloaded when its last request has ended. A model that cannot be loaded leaves in place what is served
already.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

from gangway.base.backoff import Backoff
from gangway.protos import StatusCode
from gangway.server.control.repository.ensembles import (
    EnsembleBuilder,
    MissingModelError,
    in_load_order,
    needs_of,
    with_members,
)
from gangway.server.control.repository.loaded import LoadedModel, require_loaded_files
from gangway.server.control.repository.loader import ModelLoader
from gangway.server.control.repository.remote import sync
from gangway.server.control.repository.repository import (
    NO_FOLDER,
    NOT_FOUND,
    BrokenModel,
    Entry,
    ModelVersion,
    Override,
    OverrideStore,
    find_models,
    misplaced_models,
    read_model,
    read_only_one,
)
from gangway.server.control.repository.start_progress import StartProgress
from gangway.server.control.supervisor.announcements import Announcements
from gangway.server.control.supervisor.model_life import VersionState, state_of
from gangway.server.errors import LOAD_ERRORS, CompileError, ConfigError, RequestError, unavailable
from gangway.server.messages import DUPLICATE, UNLOADED, WHOLE_MODEL, FirstAnswer, ModelRemoved, ModelUnavailable
from gangway.server.models.config import MAX_DEPTH
from gangway.server.options.server import ALL_MODELS, RepositoryOptions

_log = logging.getLogger(__name__)

LONG_SECONDS: Final = 10.0  # of a load, until others begin beside it whatever it does
RETIRE_SECONDS = 660.0  # no request lasts longer
UNLOAD_SECONDS = 60.0  # workers do it beside their queries

FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0
FIRST_QUARANTINE_SECONDS: Final = 60.0
LONGEST_QUARANTINE_SECONDS: Final = 3600.0
FIRST_COMPILE_PAUSE_SECONDS: Final = 30.0

MAX_REASON_CHARACTERS = 2000


class ModelStartError(Exception):
    """Models that are to be served from the start cannot be loaded; the message names them."""


class ModelControl:
    """Loads and unloads models: one load or unload of a name after the other, those of other names beside it."""

    def __init__(
        self, options: RepositoryOptions, loader: ModelLoader, clients: Announcements, overrides: OverrideStore
    ) -> None:
        self._options = options
        self._loader = loader
        self._clients = clients
        self.served = ServedModels(loader, clients, overrides, self._load_again, self._complete)
        self._ensembles = self.served.ensembles
        self._along: set[str] = set()  # models that were loaded because ensembles need them
        # There only while a task holds one or waits for it, which has them in their order.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._pauses: dict[tuple[str, int, bool], Backoff] = {}  # by version, and whether it was at fault
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)
        self._is_first = True

    async def start(self, listening: Callable[[], Awaitable[str]], progress: StartProgress) -> dict[str, list[Entry]]:
        """Load what is to be served from the start, and return it. A broken model hinders no other one.

        `progress` hears how far that is.

        Clients are told that it is there when they can connect everywhere: then `listening` returns.

        Raises OSError when a repository cannot be listed, ModelStartError if that is to be the end of the server.
        """
        found = self._wanted_at_start(await asyncio.to_thread(self.read_all))
        for sentence in await asyncio.to_thread(
            lambda: list(misplaced_models(self._options.folders, {file for _, file in self._options.files}))
        ):
            _log.warning("%s", sentence)
        for name, entries in found.items():
            self._ensembles.want(name, entries)
            for entry in entries:
                if isinstance(entry, ModelVersion):
                    self.served.announce_loading(entry)
        progress.begin(len(found))
        versions = [entry for entries in found.values() for entry in entries if isinstance(entry, ModelVersion)]
        await self._loader.look_up(versions)
        tasks = list(self.beside_each_other(found).values())
        for task in tasks:
            task.add_done_callback(progress.tried)
        await asyncio.gather(*tasks)
        if (broken := self.served.broken) and self._options.exit_on_error:
            raise ModelStartError(f"models cannot be loaded: {', '.join(sorted({each.name for each in broken}))}")
        await listening()
        self._clients.initial_load_done(self._options.strict_readiness)
        return found

    def beside_each_other(self, found: Mapping[str, Sequence[Entry]]) -> dict[str, "asyncio.Task[None]"]:
        """Begin to serve what repositories hold of these models, which are in load order; return a task for each.

        An ensemble waits for its models. As many as there are cores are under way, and those that take long.
        """
        tasks: dict[str, asyncio.Task[None]] = {}

        async def one(name: str, entries: Sequence[Entry], needed: Sequence["asyncio.Task[None]"]) -> None:
            async with self._lock_of(name):
                if needed:
                    await asyncio.wait(needed)
                await self._slots.acquire()
                slot = asyncio.get_running_loop().call_later(LONG_SECONDS, self._slots.release)
                try:
                    await self._follow(name, entries)
                finally:
                    if slot.when() > asyncio.get_running_loop().time() and not slot.cancelled():
                        slot.cancel()
                        self._slots.release()

        for name, entries in found.items():
            needed = [tasks[each] for each in needs_of(entries) if each in tasks]
            tasks[name] = asyncio.get_running_loop().create_task(one(name, entries, needed))
        return tasks

    async def load(self, name: str, override: Override | None, users: tuple[str, ...] = ()) -> None:
        """Load or reload what the repositories hold of a model, or the override. Raises RequestError.

        A version whose files have not changed since it was loaded stays as it is. One of a Python model is initialised
        anew: what it has read elsewhere may be another. What an ensemble needs is loaded before it, unless it is there.
        `users`: the ensembles for which this one is loaded, the innermost last.
        """
        if self._options.remotes and (override is None or override.folder is None):
            try:
                await asyncio.to_thread(sync, self._options.remotes, name)
            except OSError as error:
                unavailable(f"{NOT_FOUND.format(name)}: {error}")
        await self._load_members(name, override, users)
        async with self._lock_of(name):
            entries = await asyncio.to_thread(self._read, name, override)
            if not entries:
                raise RequestError(StatusCode.INTERNAL, NO_FOLDER.format(name))
            if _is_duplicate(entries):
                raise RequestError(StatusCode.INTERNAL, f"{NOT_FOUND.format(name)}: {DUPLICATE}")
            failures = await self._serve_entries(name, entries, is_asked=True)
            if override is not None and override.folder is not None and not self.served.of(name):
                self.served.forget(name)  # a model that no repository has does not count as missing
            self.served.remove_unused(override)
        if not users:
            self._along.discard(name)
        if failures:
            reasons = " ".join(
                entry.reason if entry.is_whole else f"version {entry.version} is at UNAVAILABLE state: {entry.reason};"
                for entry in failures
            )
            raise RequestError(StatusCode.INVALID_ARGUMENT, f"load failed for model '{name}': {reasons}")

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Unload all versions of a model; return when none takes new requests. One that is not loaded stays so.

        `dependents`: also what was loaded along with it, an ensemble, and no other one needs.
        """
        async with self._lock_of(name):
            ensembles, along = self._not_wanted(name)
            self.served.withdraw(name)
            self.served.forget_failures(name, ensembles)
        for member in along if dependents else ():
            await self.unload(member, dependents=True)

    async def remove(self, name: str) -> None:
        """Unload a model that no repository has any more, and forget it."""
        async with self._lock_of(name):
            self._not_wanted(name)
            self.served.withdraw(name, reason="")
            self.served.forget(name)

    def stop(self) -> None:
        """End what goes on in the background."""
        self.served.stop()

    # -- what there is

    def read_all(self) -> dict[str, list[Entry]]:
        """Return what the repositories hold, by name. Reads files; may be called in any thread. Raises OSError.

        Copies of remote repositories are brought up to date, and the first time read as a whole.
        """
        sync(self._options.remotes, whole=self._is_first)
        self._is_first = False
        found = find_models(self._options.folders, self._options.files)
        named = self._options.config_name
        return {name: read_only_one(name, folders, config_name=named) for name, folders in found.items()}

    async def needs(self, name: str) -> Sequence[str]:
        """Return the models of which the repository's model is made, if it is an ensemble that can be read."""
        try:
            return needs_of(await asyncio.to_thread(self._read, name, None))
        except (RuntimeError, RequestError):
            return ()

    def _read(self, name: str, override: Override | None) -> list[Entry]:
        """Return what there is of one model; nothing if there is nothing.

        Raises RequestError (UNAVAILABLE) when a repository cannot be listed.
        """
        if override is not None and override.folder is not None:
            return read_model(override.folder, name, override)
        try:
            folders = find_models(self._options.folders, self._options.files).get(name, [])
        except OSError as error:
            unavailable(f"{NOT_FOUND.format(name)}: {error}")
        return read_only_one(name, folders, override, self._options.config_name) if folders else []

    def _wanted_at_start(self, found: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        """Return what is to be served of it, ensembles after their models."""
        wanted = self._options.load_models
        if self._options.mode == "explicit" and wanted != (ALL_MODELS,):
            absent = {name: _absent(name) for name in wanted if name not in found}
            names = with_members(wanted, found)
            found = {name: entries for name, entries in found.items() if name in names} | absent
            self._along.update(name for name in names if name not in wanted)
        return in_load_order(found)

    # -- steps

    async def _follow(self, name: str, entries: Sequence[Entry]) -> None:
        """Serve what the repositories hold of a model. The caller holds the name's lock."""
        if _is_duplicate(entries):
            self._not_wanted(name)
            self.served.withdraw(name, reason=DUPLICATE)
            self.served.note([BrokenModel(name, WHOLE_MODEL, DUPLICATE)])
        else:
            await self._serve_entries(name, entries)

    async def _serve_entries(self, name: str, entries: Iterable[Entry], is_asked: bool = False) -> list[BrokenModel]:
        """Serve these versions of a model and no others; return those that cannot be.

        If there are any, what is served of the model already goes on being served. The caller holds the name's lock.
        `is_asked`: a client, or a model, has asked to load it.
        """
        models = self.served
        before, broken_before = models.of(name), models.broken_of(name)
        wanted = [entry for entry in entries if isinstance(entry, ModelVersion)]
        failures = [entry for entry in entries if isinstance(entry, BrokenModel)]
        self._ensembles.want(name, wanted)
        loaded: list[LoadedModel] = []
        for entry in wanted:
            is_same = entry.version in before and before[entry.version].entry.is_same(entry)
            if (failures and before) or (is_same and not (is_asked and entry.is_python)):
                continue
            try:
                loaded.append(await self._load(entry))
            except LOAD_ERRORS as error:
                failures.append(BrokenModel(name, entry.version, str(error)))
            except BaseException:
                models.drop(loaded)
                models.give_up(name)
                raise
            if not before:
                models.serve(loaded)
        if failures and before:
            models.drop(loaded)
            models.keep(name, before, failures)
            self._ensembles.want(name, [model.entry for model in before.values()])
            return failures
        models.serve(loaded)
        for version in before.keys() - {entry.version for entry in wanted}:
            models.withdraw(name, version)
        models.repaired(broken_before, failures)
        models.note(failures)
        return failures

    async def _load(self, entry: ModelVersion) -> LoadedModel:
        if entry.version not in self.served.of(entry.name):
            self.served.announce_loading(entry)
        if entry.is_ensemble:
            return self._ensembles.make(entry, self.served.by_name)
        return await self._loader.load(entry, at_once=True)

    async def _load_again(self, entry: ModelVersion, broken: BrokenModel) -> None:
        """Load a version again that has failed while it is wanted, until it is served, or something else becomes of it.

        What no worker can load is tried at once, then after growing pauses: its artifact may have been removed from the
        cache, while its source file is there. What ended worker processes is left alone for a minute, and each time
        longer. A client's load or unload, or a change of the repository, ends that.
        """
        key = (entry.name, entry.version, broken.at_fault)
        pauses = self._pauses.setdefault(key, _quarantine() if broken.at_fault else _pauses())
        await asyncio.sleep(pauses.failed())
        while not await self._is_settled(entry, broken):
            await asyncio.sleep(pauses.failed())
        pauses.works()

    async def _is_settled(self, entry: ModelVersion, broken: BrokenModel) -> bool:
        """Serve a version again, unless it is no longer refused for this reason; return whether it needs no more."""
        async with self._lock_of(entry.name):
            if not self.served.is_refused(broken):
                return True
            try:
                loaded = [await self._loader.load(entry, at_once=not broken.at_fault)]
            except LOAD_ERRORS as error:
                _log.error("model %s: loading it again failed, and is tried again later: %s", entry.title, error)
                return False
            self.served.serve(loaded)
        return True

    async def _complete(self, model: LoadedModel) -> None:
        """Compile a model that onnxruntime serves meanwhile, and serve it compiled. No lock is held while that lasts.

        What will never succeed, or has failed for the files' sake, leaves it as it is. What may succeed later is tried
        again after growing pauses.
        """
        entry, pending = model.entry, model.pending_compilation
        assert pending is not None, "otherwise there is nothing to complete"
        pauses = Backoff(FIRST_COMPILE_PAUSE_SECONDS, LONGEST_QUARANTINE_SECONDS, LONGEST_QUARANTINE_SECONDS)
        loaded: list[LoadedModel] = []
        try:
            while not loaded:
                try:
                    require_loaded_files(entry.path, pending.files)
                    loaded.append(await self._loader.load(entry))
                    require_loaded_files(entry.path, pending.files)
                except LOAD_ERRORS as error:
                    self.served.drop(loaded)
                    is_final = error.is_final if isinstance(error, CompileError) else isinstance(error, ConfigError)
                    then = "" if is_final else "; compiling it is tried again later"
                    _log.warning("model %s: onnxruntime goes on serving it%s: %s", entry.title, then, error)
                    if is_final:
                        return
                    await asyncio.sleep(pauses.failed())
            async with self._lock_of(entry.name):
                self.served.complete(model, loaded)
        finally:
            self.served.drop(loaded)

    async def _load_members(self, name: str, override: Override | None, users: tuple[str, ...]) -> None:
        """Load what an ensemble needs. No lock is held meanwhile, so two of them cannot wait for each other."""
        if len(users) >= MAX_DEPTH:
            return
        entries = await asyncio.to_thread(self._read, name, override)
        for member in needs_of(entries):
            if member in self.served.by_name or member in (*users, name):
                continue  # it is there, or a circle, which is found when all of its ensembles are known
            try:
                await self.load(member, None, (*users, name))
            except RequestError as error:
                _log.error("ensemble %s: a model of it cannot be loaded: %s", name, error.message)
            else:
                self._along.add(member)

    def _not_wanted(self, name: str) -> tuple[Sequence[ModelVersion], list[str]]:
        """Return the versions of a model, if it is an ensemble, and what was loaded for it alone."""
        self._along.discard(name)
        entries, users_of = self._ensembles.forget(name), self._ensembles.users_of
        return entries, [each for each in needs_of(entries) if each in self._along and not users_of(each)]

    def _lock_of(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _pauses() -> Backoff:
    return Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, free=1)


def _quarantine() -> Backoff:
    return Backoff(FIRST_QUARANTINE_SECONDS, LONGEST_QUARANTINE_SECONDS, LONGEST_QUARANTINE_SECONDS)


def _absent(name: str) -> list[Entry]:
    return [BrokenModel(name, WHOLE_MODEL, NO_FOLDER.format(name))]


def _is_duplicate(entries: Sequence[Entry]) -> bool:
    return len(entries) == 1 and isinstance(entries[0], BrokenModel) and entries[0].reason == DUPLICATE


class RepositoryPoller:
    """Mode `poll`: follows the changes of the repositories every few seconds.

    `first`: what was found at the start. What could not be loaded is tried again when its files have changed.
    """

    def __init__(self, control: ModelControl, seconds: float, first: Mapping[str, Sequence[Entry]]) -> None:
        self._control = control
        self._seconds = seconds
        self._seen = {name: _seen(entries) for name, entries in first.items()}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by model that is being followed

    async def run(self) -> None:
        """Poll, until cancelled; not at all if the time is 0."""
        while self._seconds:
            await asyncio.sleep(self._seconds)
            await self.poll()

    async def poll(self) -> None:
        """Follow what has changed since the last time. A model that takes long is looked at again when it is done."""
        try:
            found = await asyncio.to_thread(self._control.read_all)
        except (OSError, RuntimeError) as error:  # no thread, or a folder is away: until there is, everything stays
            _log.warning("a model repository cannot be listed, so what is served stays: %s", error)
            return
        for name, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[name]
                task.result()
        for name in (self._seen.keys() | self._control.served.names) - found.keys() - self._tasks.keys():
            self._seen.pop(name, None)
            await self._control.remove(name)
        changed = {}
        for name, entries in in_load_order(found).items():
            seen = _seen(entries)
            if self._seen.get(name) != seen and name not in self._tasks:
                self._seen[name], changed[name] = seen, entries
        self._tasks |= self._control.beside_each_other(changed)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=LONG_SECONDS)


def _seen(entries: Sequence[Entry]) -> tuple[tuple[int, object], ...]:
    """Return what tells whether a model has changed."""
    return tuple((entry.version, entry.stamp if isinstance(entry, ModelVersion) else entry.reason) for entry in entries)


class ServedModels:
    """Which models are served, and which cannot be and why. Clients are told of every change, and ensembles follow it.

    A model that is served no more is unloaded when the last request has ended that uses it. Nothing
    takes time here. `load_again` does so with a version that is refused for a reason, `complete` with a model that
    onnxruntime serves until it is compiled; that ends when the model is not served any more.
    """

    def __init__(
        self,
        loader: ModelLoader,
        clients: Announcements,
        overrides: OverrideStore,
        load_again: Callable[[ModelVersion, BrokenModel], Coroutine[Any, Any, None]],
        complete: Callable[[LoadedModel], Coroutine[Any, Any, None]],
    ) -> None:
        self._loader = loader
        self._clients = clients
        self._overrides = overrides
        self.by_name: dict[str, dict[int, LoadedModel]] = {}  # and version
        self._broken: dict[tuple[str, int], BrokenModel] = {}
        self.ensembles = EnsembleBuilder(loader.schedules)
        self._load_again = load_again
        self._failed: dict[asyncio.Task[None], ModelVersion] = {}  # versions that are being brought back
        self._releases: set[asyncio.Task[None]] = set()
        self._complete = complete
        self._completions: dict[int, asyncio.Task[None]] = {}  # by number of the model that serves meanwhile

    @property
    def loaded(self) -> list[LoadedModel]:
        """What is served."""
        return [model for versions in self.by_name.values() for model in versions.values()]

    @property
    def broken(self) -> list[BrokenModel]:
        """What cannot be served."""
        return list(self._broken.values())

    @property
    def names(self) -> set[str]:
        """The models of which anything is served, or could not be."""
        return self.by_name.keys() | {name for name, _ in self._broken}

    def of(self, name: str) -> dict[int, LoadedModel]:
        """Return what is served of one model, by version."""
        return dict(self.by_name.get(name, {}))

    def broken_of(self, name: str) -> list[BrokenModel]:
        """Return what cannot be served of one model."""
        return [broken for (known, _), broken in self._broken.items() if known == name]

    # -- what is served

    def serve(self, loaded: list[LoadedModel], continues: bool = False) -> None:
        """Give these models to all requests from now on; empties the list.

        `continues`: for clients they are the same as before, so their counters go on.
        """
        for model in loaded:
            entry = model.entry
            versions = self.by_name.setdefault(entry.name, {})
            before = versions.get(entry.version)
            versions[entry.version] = model
            self._broken.pop((entry.name, entry.version), None)
            self._broken.pop((entry.name, WHOLE_MODEL), None)
            self._clients.announce(model.ready, before.ready.model_id if before is not None and continues else None)
            self._loader.announced(model)
            if before is not None:
                self._release(before)
            if model.pending_compilation is not None:
                self._begin_to_complete(model)
        names = {model.entry.name for model in loaded}
        loaded.clear()
        for name in names:
            self._follow(name)

    def complete(self, before: LoadedModel, loaded: list[LoadedModel]) -> None:
        """Give a model that is compiled to all requests from now on, if the same before that is still served."""
        served = self.of(before.entry.name).get(before.entry.version)
        if served is not None and served.ready.model_id == before.ready.model_id:
            self.serve(loaded, continues=True)

    def _begin_to_complete(self, model: LoadedModel) -> None:
        number = model.ready.model_id
        task = asyncio.get_running_loop().create_task(self._complete(model))
        self._completions[number] = task
        task.add_done_callback(lambda _: self._completions.pop(number, None))

    def first_answer(self, message: FirstAnswer) -> None:
        """Let the target of a model count whose time alone was not known, and those of ensembles with it."""
        model = self.by_name.get(message.name, {}).get(message.version)
        if model is None or model.ready.model_id != message.model_id or model.isolated is not None:
            return  # another front end was first, or another model has its place
        self._measured(model, message.row_us, "first request")

    def profiled(self, model_id: int, compute_us: float) -> None:
        """Let the target of a model that has been measured follow its profile, and those of ensembles with it."""
        for model in [each for versions in self.by_name.values() for each in versions.values()]:
            if model.ready.model_id == model_id and not model.entry.is_ensemble:
                self._measured(model, compute_us, "profile")
        self._loader.shapes.profiled(model_id, compute_us)

    def _measured(self, model: LoadedModel, row_us: float, source: str) -> None:
        """The time of a model alone is known, or known better: targets that are multiples change."""
        changed = [self._loader.measured(model, row_us, source)]
        while changed:
            model = changed.pop()
            self.by_name[model.entry.name][model.entry.version] = model
            self._clients.announce_target(model.ready)
            users = [self.of(user.name).get(user.version) for user in self.ensembles.users_of(model.entry.name)]
            changed += [self.ensembles.measured(user, self.by_name) for user in users if user is not None]

    def withdraw(self, name: str, version: int | None = None, reason: str = UNLOADED) -> None:
        """Give one version of a model, or all, to no further request.

        `reason`: what clients are told afterwards; empty: nothing, since no repository has it.
        """
        versions = self.by_name.get(name, {})
        for number in [version] if version is not None else list(versions):
            model = versions.pop(number, None)
            if model is None:  # it has failed meanwhile
                continue
            leaving = ModelUnavailable(name, number, "it is being unloaded", "UNLOADING")
            self._clients.announce(leaving)
            self._release(model, leaving, reason)
        if not versions:
            self.by_name.pop(name, None)
        self._follow(name)

    def drop(self, loaded: list[LoadedModel]) -> None:
        """Unload models of which no client has heard; empties the list."""
        for model in loaded:
            self._loader.unload(model)
            self.ensembles.remove(model)
        loaded.clear()

    def _follow(self, name: str) -> None:
        """What is served of a model has changed: so do the ensembles that it belongs to, and those that these do.

        Their own files have not, so their counters go on.
        """
        for entry in self.ensembles.users_of(name):
            before = self.of(entry.name).get(entry.version)
            if before is not None and self.ensembles.is_as_made(before, self.by_name):
                continue
            try:
                model = self.ensembles.make(entry, self.by_name)
            except ConfigError as error:
                self._unmade(entry, before, error)
            else:
                self.serve([model], continues=before is not None and before.entry.is_same(entry))

    def _unmade(self, entry: ModelVersion, before: LoadedModel | None, error: ConfigError) -> None:
        """An ensemble does not go together, and may have done so before."""
        if before is not None:
            _log.warning("ensemble %s: not served any more: %s", entry.title, error)
            # A client that unloads a model unloads its ensembles with it, so they do not count as missing.
            reason = f"{UNLOADED}: {error}" if isinstance(error, MissingModelError) else str(error)
            self.withdraw(entry.name, entry.version, reason)
        elif (entry.name, entry.version) in self._broken:
            self.note([BrokenModel(entry.name, entry.version, str(error))])

    def _release(self, model: LoadedModel, leaving: ModelUnavailable | None = None, reason: str = UNLOADED) -> None:
        """Unload a model, which no further request gets, as soon as no request uses it.

        `leaving`: what clients are told of it until then; afterwards it is `reason`, or that there is no such model.
        None: another one has its place.
        """
        self._clients.begin_to_retire(model.ready.model_id)
        self._loader.withdrawn(model)
        completion = self._completions.pop(model.ready.model_id, None)
        if completion not in (None, asyncio.current_task()):
            completion.cancel()
        task = asyncio.get_running_loop().create_task(self._unload_when_unused(model, leaving, reason))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        self.ensembles.remove(model)

    async def _unload_when_unused(self, model: LoadedModel, leaving: ModelUnavailable | None, reason: str) -> None:
        name, version, title = model.entry.name, model.entry.version, model.entry.title
        if not await self._clients.retired(model.ready.model_id, RETIRE_SECONDS):
            _log.warning("%s: unloaded although requests that use it have not ended in time", title)
        self._loader.unload(model)
        if not await self._loader.unloaded(model, UNLOAD_SECONDS):
            _log.warning("%s: workers still hold its memory %.0f s after it was unloaded", title, UNLOAD_SECONDS)
        await self._loader.discard(model)
        self.remove_unused(model.entry.override)
        if leaving is not None or not model.entry.is_ensemble:  # an ensemble follows its models, and has no files
            _log.info("model %s: %s unloaded", title, "is" if leaving else "the previous files are")
        if leaving is not None and self._clients.entries.get((name, version)) is leaving:
            self._clients.announce(ModelUnavailable(name, version, reason) if reason else ModelRemoved(name, version))

    def remove_unused(self, override: Override | None) -> None:
        """Remove what came with a client's request, unless something is made of it that is or shall be served."""
        in_use = [*(model.entry for model in self.loaded), *self._failed.values()]
        if override is not None and not any(entry.override is override for entry in in_use):
            self._overrides.remove(override)

    def stop(self) -> None:
        """Wait for nothing any more, and bring back nothing."""
        for task in (*self._releases, *self._failed, *self._completions.values()):
            task.cancel()

    def is_refused(self, broken: BrokenModel) -> bool:
        """Whether nothing has become of a version since it was refused for this reason."""
        return self._broken.get((broken.name, broken.version)) is broken

    def model_failed(self, model_id: int, reason: str, at_fault: bool) -> None:
        """No worker has a model any more, or it has ended too many of them (`at_fault`)."""
        is_part = self._loader.part_failed(model_id, reason, at_fault)
        for model in self.loaded:
            if model.ready.model_id == model_id and not is_part:
                del self.by_name[model.entry.name][model.entry.version]
                if not self.by_name[model.entry.name]:
                    del self.by_name[model.entry.name]
                broken = BrokenModel(model.entry.name, model.entry.version, reason, at_fault)
                self.refuse(broken)
                task = asyncio.get_running_loop().create_task(self._load_again(model.entry, broken))
                self._failed[task] = model.entry
                task.add_done_callback(self._failed.pop)
                self._release(model)
                self._follow(model.entry.name)

    # -- what is not

    def announce_loading(self, entry: ModelVersion) -> None:
        """Say that a version is on its way, unless that is known."""
        loading = ModelUnavailable(entry.name, entry.version, "it is being loaded", "LOADING")
        if self._clients.entries.get((entry.name, entry.version)) != loading:
            self._clients.announce(loading)

    def give_up(self, name: str) -> None:
        """Say that what is on its way of a model is not loaded after all."""
        for (known, version), entry in list(self._clients.entries.items()):
            if known == name and state_of(entry) is VersionState.LOADING:
                self._clients.announce(ModelUnavailable(name, version, UNLOADED))

    def refuse(self, broken: BrokenModel) -> None:
        """Say of a version that cannot be served why."""
        which = "" if broken.is_whole else f", version {broken.version}"
        _log.error("model %s%s: not served: %s", broken.name, which, broken.reason)
        self._broken[broken.name, broken.version] = broken
        self._clients.announce(_unavailable(broken))

    def note(self, failures: Iterable[BrokenModel]) -> None:
        """Do the same for several, unless clients know it: one that was on its way may fail as it has before."""
        for failure in failures:
            if self._clients.entries.get((failure.name, failure.version)) != _unavailable(failure):
                self.refuse(failure)

    def keep(self, name: str, before: Mapping[int, LoadedModel], failures: Sequence[BrokenModel]) -> None:
        """A model has changed and cannot be loaded: what is served stays, and nothing else."""
        for failure in failures:
            _log.error(
                "model %s: the new files cannot be loaded, so the loaded model stays: %s", failure.name, failure.reason
            )
            if not failure.is_whole and failure.version not in before:
                self.refuse(failure)
        self.give_up(name)

    def repaired(self, before: Sequence[BrokenModel], failures: Sequence[BrokenModel]) -> None:
        """Forget what was wrong with a model `before` a load and, as `failures` say, is not any more.

        What has failed meanwhile, in workers, stays known.
        """
        still = {failure.version for failure in failures}
        for broken in before:
            if self.is_refused(broken) and broken.version not in still:
                del self._broken[broken.name, broken.version]
                self._clients.announce(ModelRemoved(broken.name, broken.version))

    def forget_failures(self, name: str, ensembles: Iterable[ModelVersion]) -> None:
        """Forget why a model failed that is not wanted any more. `ensembles`: its versions."""
        for entry in ensembles:
            known = self._clients.entries.get((name, entry.version))
            if state_of(known) is VersionState.UNLOADED:  # maybe for want of its models
                self._clients.announce(ModelUnavailable(name, entry.version, UNLOADED))
        for key in [key for key in self._broken if key[0] == name]:
            del self._broken[key]
            self._clients.announce(ModelUnavailable(*key, UNLOADED))

    def forget(self, name: str) -> None:
        """Have the index show nothing of a model any more, but what is still being unloaded."""
        for key in [key for key in self._broken if key[0] == name]:
            del self._broken[key]
        for (known, version), entry in list(self._clients.entries.items()):
            if known == name and state_of(entry) in (VersionState.UNKNOWN, VersionState.UNLOADED, VersionState.FAILED):
                self._clients.announce(ModelRemoved(name, version))


def _unavailable(broken: BrokenModel) -> ModelUnavailable:
    reason = broken.reason[:MAX_REASON_CHARACTERS]
    return ModelUnavailable(broken.name, broken.version, reason, at_fault=broken.at_fault)
