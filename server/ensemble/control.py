"""How ensembles follow their models: which are loaded with them, and what becomes of them when one changes or goes."""

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from gangway.server.config_error import ConfigError
from gangway.server.ensemble.config import composing_models
from gangway.server.ensemble.keeper import EnsembleKeeper, MissingModelError, Served
from gangway.server.ensemble.members import load_order
from gangway.server.front_end_messages import UNLOADED
from gangway.server.loaded_model import LoadedModel
from gangway.server.repository import BrokenModel, Entry, ModelVersion

_log = logging.getLogger(__name__)


class Control(Protocol):
    """What an ensemble needs of whoever serves models."""

    def serve(self, loaded: list[LoadedModel]) -> None:
        """Give these to all requests from now on."""

    def withdraw(self, name: str, version: int | None = None, reason: str = UNLOADED) -> None:
        """Give a version to no further request; `reason` is what clients are told."""

    def note(self, failures: Iterable[BrokenModel]) -> None:
        """Say of versions that are not served why."""


class EnsembleControl:
    """Everything is called in the supervisor's event loop, and nothing takes time.

    `served` and `broken`: the control's own, the latter by name and version.
    """

    def __init__(self, control: Control, served: Served, broken: Container[tuple[str, int]]) -> None:
        self._control = control
        self._served = served
        self._broken = broken
        self._keeper = EnsembleKeeper()
        self._along: set[str] = set()  # models that were loaded because ensembles need them

    def want(self, name: str, entries: Iterable[Entry]) -> None:
        """These versions are to be served, as far as they are of ensembles."""
        self._keeper.want(name, [entry for entry in entries if isinstance(entry, ModelVersion)])

    def load(self, entry: ModelVersion) -> LoadedModel:
        """Return an ensemble of what is served at this moment. Raises ConfigError."""
        return self._keeper.make(entry, self._served)

    def gone(self, model: LoadedModel) -> None:
        """A model is not served any more, or by another one."""
        self._keeper.gone(model)

    def changed(self, name: str) -> None:
        """What is served of a model has changed: so do the ensembles that it belongs to, and those that these do."""
        for entry in self._keeper.users_of(name):
            before = self._served.get(entry.name, {}).get(entry.version)
            if before is not None and self._keeper.is_as_made(before, self._served):
                continue
            try:
                model = self._keeper.make(entry, self._served)
            except ConfigError as error:
                self._unmade(entry, before, error)
            else:
                self._control.serve([model])

    def _unmade(self, entry: ModelVersion, before: LoadedModel | None, error: ConfigError) -> None:
        """An ensemble does not go together, and may have done so before."""
        if before is not None:
            _log.warning("ensemble %s, version %d: %s", entry.name, entry.version, error)
            # Who unloads a model knows that its ensembles go with it: nobody misses them.
            reason = f"{UNLOADED}: {error}" if isinstance(error, MissingModelError) else str(error)
            self._control.withdraw(entry.name, entry.version, reason)
        elif (entry.name, entry.version) in self._broken:
            self._control.note([BrokenModel(entry.name, entry.version, str(error))])

    def missing(self, entries: Iterable[Entry]) -> list[str]:
        """Return the models that these need, if they are of ensembles, and that are not served."""
        return [name for name in needs_of(entries) if name not in self._served]

    def loaded_along(self, name: str) -> None:
        """A model was loaded because an ensemble needs it."""
        self._along.add(name)

    def loaded_by_name(self, name: str) -> None:
        """Somebody has asked for the model itself."""
        self._along.discard(name)

    def unloaded(self, name: str) -> tuple[Sequence[ModelVersion], list[str]]:
        """A model is wanted no more: return its versions, if it is an ensemble, and what was loaded for it alone."""
        self._along.discard(name)
        entries = self._keeper.forget(name)
        needed = needs_of(entries)
        return entries, [member for member in needed if member in self._along and not self._keeper.users_of(member)]


def needs_of(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the names of the models that these are made of."""
    names = [name for entry in entries if isinstance(entry, ModelVersion) for name in composing_models(entry.config)]
    return tuple(dict.fromkeys(names))


def in_order(found: Mapping[str, list[Entry]]) -> dict[str, list[Entry]]:
    """Return the same such that each ensemble comes after its models."""
    return {name: found[name] for name in load_order({name: needs_of(entries) for name, entries in found.items()})}


def with_members(names: Iterable[str], found: Mapping[str, list[Entry]]) -> list[str]:
    """Return these names and those of all models that they need, as far as there are any."""
    wanted: dict[str, None] = {}
    waiting = [name for name in names if name in found]
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted[name] = None
            waiting += [needed for needed in needs_of(found[name]) if needed in found]
    return list(wanted)
