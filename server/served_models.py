"""Which models are served, and which cannot be and why. Clients are told of every change, and ensembles follow it."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from gangway.server.ensemble.control import EnsembleControl
from gangway.server.front_end_control import FrontEndControl
from gangway.server.front_end_messages import UNLOADED, WHOLE_MODEL, ModelRemoved, ModelUnavailable
from gangway.server.loaded_model import LoadedModel
from gangway.server.lost_models import LostModels
from gangway.server.model_loader import ModelLoader
from gangway.server.model_releases import ModelReleases
from gangway.server.overrides import OverrideKeeper
from gangway.server.repository import BrokenModel, ModelVersion

MAX_REASON_CHARACTERS = 2000
_log = logging.getLogger(__name__)


class ServedModels:
    """Everything is called in the supervisor's event loop, and nothing takes time. `bring_back`: see LostModels."""

    def __init__(
        self,
        loader: ModelLoader,
        front_end: FrontEndControl,
        overrides: OverrideKeeper,
        bring_back: Callable[[ModelVersion, BrokenModel], Awaitable[bool]],
    ) -> None:
        self._loader = loader
        self._front_end = front_end
        self._served: dict[str, dict[int, LoadedModel]] = {}  # by name and version
        self._broken: dict[tuple[str, int], BrokenModel] = {}
        self.ensembles = EnsembleControl(self, self._served, self._broken)
        self.lost = LostModels(bring_back)
        self.releases = ModelReleases(
            loader, front_end, overrides, lambda: [*(model.entry for model in self.loaded), *self.lost.entries]
        )
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

    def of(self, name: str) -> dict[int, LoadedModel]:
        """Return what is served of one model, by version."""
        return dict(self._served.get(name, {}))

    # -- what is served

    def serve(self, loaded: list[LoadedModel]) -> None:
        """Give these models to all requests from now on; empties the list."""
        for model in loaded:
            entry = model.entry
            versions = self._served.setdefault(entry.name, {})
            before = versions.get(entry.version)
            versions[entry.version] = model
            self._broken.pop((entry.name, entry.version), None)
            self._broken.pop((entry.name, WHOLE_MODEL), None)
            self._front_end.announce(model.ready)
            self._loader.announced(model)
            if before is not None:
                self._release(before)
        names = {model.entry.name for model in loaded}
        loaded.clear()
        for name in names:
            self.ensembles.changed(name)

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
        self.ensembles.changed(name)

    def drop(self, loaded: list[LoadedModel]) -> None:
        """Unload models of which no client has heard; empties the list."""
        for model in loaded:
            self._loader.unload(model)
            self.ensembles.gone(model)
        loaded.clear()

    def _release(self, model: LoadedModel, leaving: ModelUnavailable | None = None, reason: str = UNLOADED) -> None:
        self.releases.release(model, leaving, reason)
        self.ensembles.gone(model)

    def is_refused(self, broken: BrokenModel) -> bool:
        """Whether nothing has become of a version since it was refused for this reason."""
        return self._broken.get((broken.name, broken.version)) is broken

    def _lost(self, model_id: int, reason: str, at_fault: bool) -> None:
        """No worker has it any more, or it has ended too many of them."""
        for model in self.loaded:
            if model.ready.model_id == model_id:
                del self._served[model.entry.name][model.entry.version]
                if not self._served[model.entry.name]:
                    del self._served[model.entry.name]
                broken = BrokenModel(model.entry.name, model.entry.version, reason, at_fault)
                self.refuse(broken)
                self.lost.lost(model.entry, broken)
                self._release(model)
                self.ensembles.changed(model.entry.name)

    # -- what is not

    def announce_loading(self, entry: ModelVersion) -> None:
        """Say that a version is on its way."""
        self._front_end.announce(ModelUnavailable(entry.name, entry.version, "it is being loaded", "LOADING"))

    def refuse(self, broken: BrokenModel) -> None:
        """Say of a version that cannot be served why."""
        which = "" if broken.is_whole else f", version {broken.version}"
        _log.error("model %s%s: %s", broken.name, which, broken.reason)
        self._broken[broken.name, broken.version] = broken
        reason = broken.reason[:MAX_REASON_CHARACTERS]
        self._front_end.announce(ModelUnavailable(broken.name, broken.version, reason, at_fault=broken.at_fault))

    def note(self, failures: Iterable[BrokenModel]) -> None:
        """Do the same for several, unless it has been said."""
        for failure in failures:
            if self._broken.get((failure.name, failure.version)) != failure:
                self.refuse(failure)

    def keep(
        self, before: Mapping[int, LoadedModel], failures: Sequence[BrokenModel], wanted: Sequence[ModelVersion]
    ) -> None:
        """A model has changed and cannot be loaded: what is served stays, and nothing else."""
        for entry in wanted:
            if entry.version not in before:
                self._front_end.announce(ModelUnavailable(entry.name, entry.version, UNLOADED))
        for failure in failures:
            _log.error("model %s: not reloaded, what is loaded stays: %s", failure.name, failure.reason)
            if not failure.is_whole and failure.version not in before:
                self.refuse(failure)

    def repaired(self, name: str, failures: Sequence[BrokenModel]) -> None:
        """Forget what was wrong with a model and, as `failures` say, is not any more."""
        for key in [key for key, broken in self._broken.items() if key[0] == name and broken not in failures]:
            del self._broken[key]
            if key[1] not in self._served.get(name, {}):
                self._front_end.announce(ModelRemoved(*key))

    def wanted_no_more(self, name: str, ensembles: Iterable[ModelVersion]) -> None:
        """Nobody asks for a model any more: what was wrong with it is of no interest. `ensembles`: its versions."""
        for entry in ensembles:
            known = self._front_end.entries.get((name, entry.version))
            if isinstance(known, ModelUnavailable) and known.state == "UNAVAILABLE":  # maybe for want of its models
                self._front_end.announce(ModelUnavailable(name, entry.version, UNLOADED))
        for key in [key for key in self._broken if key[0] == name]:
            del self._broken[key]
            self._front_end.announce(ModelUnavailable(*key, UNLOADED))

    def forget(self, name: str) -> None:
        """Have the index show nothing of a model any more, but what is still being unloaded."""
        for key in [key for key in self._broken if key[0] == name]:
            del self._broken[key]
        for (known, version), entry in list(self._front_end.entries.items()):
            if known == name and isinstance(entry, ModelUnavailable) and entry.state != "UNLOADING":
                self._front_end.announce(ModelRemoved(name, version))
