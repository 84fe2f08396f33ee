"""The models that the scheduler knows, from LoadModel to ModelUnloaded, and their profiles."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from gangway.artifact.profile import Profile
from gangway.executor.messages import Load
from gangway.executor.slots import SlotStatus
from gangway.scheduler.batching.former import BatchFormer
from gangway.scheduler.limits import Limits
from gangway.scheduler.messages import LoadModel, SetProfile
from gangway.scheduler.profiles import ModelProfile, estimated_profile, served_profile


class ModelState(Enum):
    """LOADING: queries wait. SERVING: they run. UNLOADING: new ones are refused."""

    LOADING = auto()
    SERVING = auto()
    UNLOADING = auto()


@dataclass
class Model:
    """One loaded version of a model; `spec.model_id` names it everywhere."""

    spec: LoadModel
    state: ModelState = ModelState.LOADING
    refusal: SlotStatus = SlotStatus.UNAVAILABLE  # of requests that come while it is UNLOADING

    @property
    def load(self) -> Load:
        """The workers' command."""
        return Load(self.spec.model_id, self.spec.key)


class ModelTable:
    """Models by number, and the profiles that policies see (of those that are being served).

    `cores`: of the server; every profile has times for 1 to so many. `former`: is told of models, too.
    """

    def __init__(self, cores: int, former: BatchFormer | None = None) -> None:
        self._cores = cores
        self._former = former
        self._models: dict[int, Model] = {}
        self._profiles: dict[int, ModelProfile] = {}
        self.limits = Limits()
        self.any_loading = False  # a query may wait for a model without a profile
        self.any_unloading = False  # the end of a gang may be waited for
        self.changes = 0  # of models or their profiles, counted

    @property
    def profiles(self) -> Mapping[int, ModelProfile]:
        """Profiles of the models that queries may run on now."""
        return self._profiles

    def add(self, spec: LoadModel) -> Model:
        """Begin with a model."""
        model = self._models[spec.model_id] = Model(spec)
        self.limits.add(spec)
        if self._former is not None:
            self._former.add(spec)
        self._review()
        return model

    def get(self, model_id: int) -> Model | None:
        """Return the model, None for an unknown number."""
        return self._models.get(model_id)

    def specs(self) -> list[LoadModel]:
        """Return what was said of every model that is not unloaded yet."""
        return [model.spec for model in self._models.values()]

    def in_state(self, state: ModelState) -> list[Model]:
        """Return the models in one state."""
        return [model for model in self._models.values() if model.state is state]

    def loads(self) -> list[Load]:
        """Return what a new worker must load."""
        return [model.load for model in self._models.values() if model.state is not ModelState.UNLOADING]

    def serve(self, model: Model) -> None:
        """LOADING -> SERVING."""
        model.state = ModelState.SERVING
        self._review()
        self._profiles[model.spec.model_id] = estimated_profile(model.spec, self._cores)

    def set_profile(self, message: SetProfile) -> None:
        """Note a model's measured latency, and what is asked of it."""
        known = self._profiles.get(message.model_id)
        if known is not None:
            if not known.measured:
                known = estimated_profile(self._models[message.model_id].spec, self._cores, message.isolated_us)
            self.changes += 1
            self._profiles[message.model_id] = replace(
                known,
                isolated_us=message.isolated_us or known.isolated_us,
                qos_us=message.qos_us,
                rejects_late=message.rejects_late,
                varies=message.varies,
            )

    def use_profile(self, model_id: int, profile: Profile) -> None:
        """Show policies a measured profile; the latency of the whole model stays that of the live server."""
        known = self._profiles.get(model_id)
        if known is None or len(profile.layers) != known.layers:
            return
        measured = served_profile(profile, self._models[model_id].spec, self._cores)
        self.changes += 1
        self._profiles[model_id] = replace(
            measured,
            isolated_us=known.isolated_us or measured.isolated_us,
            qos_us=known.qos_us,
            rejects_late=known.rejects_late,
            varies=known.varies,
        )

    def restrict(self, model: Model, alone: bool) -> None:
        """Let only one query of a model be under way at a time, or as many as its limits allow."""
        own = (f"model {model.spec.model_id}", 1, 1)
        limits = tuple(limit for limit in model.spec.limits if limit != own)
        model.spec = replace(model.spec, limits=(*limits, own) if alone else limits)
        self.limits.remove(model.spec.model_id)
        self.limits.add(model.spec)
        self._review()

    def begin_unload(self, model: Model) -> None:
        """Any state -> UNLOADING."""
        model.state = ModelState.UNLOADING
        self._review()
        self._profiles.pop(model.spec.model_id, None)

    def remove(self, model: Model) -> None:
        """Forget it."""
        del self._models[model.spec.model_id]
        self.limits.remove(model.spec.model_id)
        if self._former is not None:
            self._former.remove(model.spec.model_id)
        self._review()

    def _review(self) -> None:
        self.changes += 1
        states = {model.state for model in self._models.values()}
        self.any_loading = ModelState.LOADING in states
        self.any_unloading = ModelState.UNLOADING in states
