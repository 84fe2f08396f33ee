"""The ensembles that are to be served, and what clients are told of them: made anew whenever a model of theirs changes.

Nothing is compiled or loaded for an ensemble, so this takes no time.
"""

import base64
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gangway.artifact.format import Engine, TensorSpec
from gangway.executor import _native
from gangway.protos.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from gangway.server.config_check import log_without_effect
from gangway.server.config_error import ConfigError
from gangway.server.ensemble.config import LATEST, MAX_DEPTH, MAX_STEPS, Step, composing_models
from gangway.server.ensemble.graph import longest_after
from gangway.server.ensemble.members import check_members
from gangway.server.front_end_messages import MAX_MESSAGE_BYTES, ModelReady, to_json
from gangway.server.isolated import Isolated
from gangway.server.labels import label_files
from gangway.server.loaded_model import LoadedModel
from gangway.server.model_config import datatype_name
from gangway.server.model_metrics import response_bounds_ns
from gangway.server.repository import ModelVersion
from gangway.server.targets import resolve_qos_us, warn_of_target

Served = Mapping[str, Mapping[int, LoadedModel]]  # by name and version

NOT_AVAILABLE: Final = "contains models that are not available"
_log = logging.getLogger(__name__)


class MissingModelError(ConfigError):
    """A model of an ensemble is not served."""


@dataclass(frozen=True)
class Made:
    """Of what an ensemble was made: the model of each step; how many steps that is with those of inner ensembles,
    and how deep these go.
    """

    members: Sequence[LoadedModel]
    steps: int
    depth: int


class EnsembleKeeper:
    """Everything is called in the supervisor's event loop."""

    def __init__(self) -> None:
        self._wanted: dict[str, tuple[ModelVersion, ...]] = {}
        self._made: dict[int, Made] = {}  # by number
        self._numbers = itertools.count(_native.MAX_MODELS)  # none that the executor may know

    def want(self, name: str, entries: Sequence[ModelVersion]) -> None:
        """Remember the versions of an ensemble that are to be served; none if it is no ensemble (any more)."""
        ensembles = tuple(entry for entry in entries if entry.is_ensemble)
        if ensembles:
            self._wanted[name] = ensembles
        else:
            self._wanted.pop(name, None)

    def forget(self, name: str) -> Sequence[ModelVersion]:
        """An ensemble is not wanted any more; return its versions."""
        return self._wanted.pop(name, ())

    def users_of(self, name: str) -> list[ModelVersion]:
        """Return the wanted ensembles that have this model in a step."""
        wanted = [entry for entries in self._wanted.values() for entry in entries]
        return [entry for entry in wanted if name in composing_models(entry.config)]

    def make(self, entry: ModelVersion, served: Served) -> LoadedModel:
        """Return an ensemble of what is served. Raises ConfigError if that does not go together."""
        steps = entry.config.ensemble_scheduling.step
        self._check_circle(entry)
        members = _members(entry, served)
        config = _completed(entry)
        check_members(entry.name, config, [_config_of(member) for member in members])
        number = next(self._numbers)
        made = self._made_of(entry, members)
        isolated = _isolated(steps, members)
        ready = ModelReady(
            model_id=number,
            name=entry.name,
            version=entry.version,
            config=base64.b64encode(config.SerializeToString()).decode(),
            inputs=tuple(_spec(tensor, config) for tensor in config.input),
            outputs=tuple(_spec(tensor, config) for tensor in config.output),
            max_batch_size=config.max_batch_size,
            max_rows=config.max_batch_size or 1,
            batched=config.max_batch_size > 0,
            qos_us=resolve_qos_us(entry.qos, isolated),
            labels=tuple(_labels(entry, config, members).items()),
            isolated_us=isolated.compute_us if isolated else 0.0,
        )
        if (size_bytes := len(to_json(ready))) > MAX_MESSAGE_BYTES:
            raise ConfigError(f"tensors and configuration take {size_bytes} bytes, at most {MAX_MESSAGE_BYTES} can be")
        warn_of_target(ready, entry.qos, isolated)
        log_without_effect(entry.name, entry.without_effect)
        _log.info("ensemble %s, version %d: ready, %d steps", entry.name, entry.version, made.steps)
        self._made[number] = made
        return LoadedModel(entry, ready, isolated, Engine.NATIVE, None)

    def gone(self, model: LoadedModel) -> None:
        """An ensemble is not served any more."""
        self._made.pop(model.ready.model_id, None)

    def is_as_made(self, model: LoadedModel, served: Served) -> bool:
        """Whether a served ensemble is made of what is served now."""
        try:
            return self._made[model.ready.model_id].members == _members(model.entry, served)
        except MissingModelError:
            return False

    def _check_circle(self, entry: ModelVersion) -> None:
        """Raise ConfigError if the ensemble needs itself, through others that are wanted."""
        waiting, seen = [(name, entry.name) for name in composing_models(entry.config)], set[str]()
        while waiting:
            name, user = waiting.pop()
            if name == entry.name:
                chain = name if user == name else f"{name} -> ... -> {user}"
                raise ConfigError(f"circular dependency between ensembles: {chain} -> {name}")
            if name not in seen:
                seen.add(name)
                inner = self._wanted.get(name, ())
                waiting += [(needed, name) for each in inner for needed in composing_models(each.config)]

    def _made_of(self, entry: ModelVersion, members: Sequence[LoadedModel]) -> Made:
        inner = [self._made.get(member.ready.model_id) for member in members]
        steps = sum(1 if each is None else each.steps for each in inner)
        depth = 1 + max(0 if each is None else each.depth for each in inner)
        if steps > MAX_STEPS or depth > MAX_DEPTH:
            raise ConfigError(
                f"ensemble {entry.name} has {steps} steps with those of inner ensembles, {depth} levels deep;"
                f" at most {MAX_STEPS} and {MAX_DEPTH} are possible"
            )
        return Made(members, steps, depth)


def _members(entry: ModelVersion, served: Served) -> list[LoadedModel]:
    """Return the model of each step. Raises MissingModelError."""
    missing = [name for name in composing_models(entry.config) if name not in served]
    if missing:
        raise MissingModelError(f"ensemble {entry.name} {NOT_AVAILABLE}: {', '.join(missing)}")
    members = []
    for step in entry.config.ensemble_scheduling.step:
        versions = served[step.model_name]
        wanted = step.model_version
        version = max(versions) if wanted == LATEST or (not wanted and 0 not in versions) else wanted
        if version not in versions:
            raise MissingModelError(
                f"ensemble {entry.name} depends on {step.model_name} whose required version {version} is not loaded"
            )
        members.append(versions[version])
    return members


def _config_of(member: LoadedModel) -> ModelConfig:
    return ModelConfig.FromString(base64.b64decode(member.ready.config))


def _completed(entry: ModelVersion) -> ModelConfig:
    response_bounds_ns(entry.config)  # raises what is wrong with them
    complete = ModelConfig()
    complete.CopyFrom(entry.config)
    complete.name = entry.name
    if not entry.config.HasField("version_policy"):
        complete.version_policy.latest.num_versions = 1
    return complete


def _spec(tensor: ModelInput | ModelOutput, config: ModelConfig) -> TensorSpec:
    shape = (-1, *tensor.dims) if config.max_batch_size else tuple(tensor.dims)
    optional = isinstance(tensor, ModelInput) and tensor.optional
    return TensorSpec(tensor.name, datatype_name(tensor.data_type), shape, 0, optional=optional)


def _labels(entry: ModelVersion, config: ModelConfig, members: Sequence[LoadedModel]) -> dict[str, str]:
    """Return the label file of each output that has one: its own, or that of the model which computes it."""
    files: dict[str, str] = {}
    outputs = {tensor.name for tensor in config.output}
    for step, member in zip(config.ensemble_scheduling.step, members, strict=True):
        theirs = dict(member.ready.labels)
        files |= {
            tensor: theirs[name] for name, tensor in step.output_map.items() if tensor in outputs and name in theirs
        }
    return files | label_files(entry.folder, entry.config)


def _isolated(steps: Sequence[Step], members: Sequence[LoadedModel]) -> Isolated | None:
    """Return how fast the ensemble is when it is alone: as its longest chain, asked for step by step.

    None if that of a step is not known.
    """
    known = [member.isolated for member in members if member.isolated is not None]
    if len(known) < len(members):
        return None
    after = [
        [place for place, other in enumerate(steps) if set(step.output_map.values()) & set(other.input_map.values())]
        for step in steps
    ]
    compute_us = longest_after([0.0, *(each.compute_us for each in known)], _with_start(after))[0]
    latency_us = longest_after([0.0, *(each.latency_us for each in known)], _with_start(after))[0]
    cost_us, busy_cost_us = max((one.request_cost_us, one.busy_cost_us) for one in known)
    return Isolated(compute_us, latency_us, cost_us, busy_cost_us)


def _with_start(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the followers with one step more in front, which all others wait for."""
    return [list(range(1, len(after) + 1)), *([place + 1 for place in places] for places in after)]
