"""How ensembles follow their models: which are loaded with them, and what becomes of them when one changes or goes."""

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gangway.artifact.format import Engine, TensorSpec
from gangway.base.peer import MAX_MESSAGE_BYTES
from gangway.executor import _native
from gangway.protos.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput
from gangway.server.control.repository.embedding_files import complete_embeddings
from gangway.server.control.repository.loaded import (
    IsolatedLatency,
    LoadedModel,
    config_of,
    resolve_qos_us,
    warn_of_target,
)
from gangway.server.control.repository.repository import Entry, ModelVersion
from gangway.server.control.repository.schedules import StoredSchedules, UsedSchedule, compounds_of
from gangway.server.errors import ConfigError, shortened
from gangway.server.messages import ModelReady, to_json
from gangway.server.models.config import (
    LATEST,
    MAX_DEPTH,
    MAX_STEPS,
    StepConfig,
    composing_models,
    log_without_effect,
    longest_after,
)
from gangway.server.models.ensemble_scopes import DifferentOriginsError, scopes_of
from gangway.server.models.settings import label_files, response_bounds_ns
from gangway.server.models.tensors import spec_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Known:
    """What a tensor must be like, according to `model`, which names it first. `dims` leave out the batch.

    A scalar counts as one element.
    """

    model: str
    data_type: "DataType"
    dims: tuple[int, ...]
    batched: bool

    @classmethod
    def of(cls, model: str, tensor: ModelInput | ModelOutput, config: ModelConfig) -> "_Known":
        batched = config.max_batch_size > 0
        return cls(model, tensor.data_type, tuple(tensor.dims) or (1,) * (not batched), batched)

    @property
    def full_dims(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batched else self.dims


def check_members(ensemble: str, config: ModelConfig, members: Sequence[ModelConfig]) -> None:
    """Raise ConfigError unless the ensemble's checked config fits those of its models, by step, which are complete.

    What is refused, and the texts of the messages, are Triton's.
    """
    tensors = {tensor.name: _Known.of(ensemble, tensor, config) for tensor in config.input}
    tensors |= {tensor.name: _Known.of(ensemble, tensor, config) for tensor in config.output}
    optional = {tensor.name for tensor in config.input if tensor.optional}
    for step, member in zip(config.ensemble_scheduling.step, members, strict=True):
        if 0 < member.max_batch_size < config.max_batch_size:
            raise ConfigError(
                f"ensemble {ensemble} allows maximum batch size {config.max_batch_size}, but it contains model"
                f" {step.model_name} which only allows maximum batch size to be {member.max_batch_size}"
            )
        _check_inputs(ensemble, step, member, tensors, optional)
        _check_outputs(ensemble, step, member, tensors)
    _check_origins(ensemble, config, [member.model_transaction_policy.decoupled for member in members])


def _check_origins(ensemble: str, config: ModelConfig, decoupled: Sequence[bool]) -> None:
    """Refuse tensors that meet in a step, or in the answer, and follow from responses of different models."""
    steps = config.ensemble_scheduling.step
    reads = [*(step.input_map.values() for step in steps), [tensor.name for tensor in config.output]]
    writes = [*(step.output_map.values() for step in steps), ()]
    try:
        scopes_of(reads, writes, [*decoupled, False])
    except DifferentOriginsError as error:
        if error.place == len(steps):
            raise ConfigError(f"in ensemble {ensemble}, outputs originate from different decoupled models") from None
        raise ConfigError(
            f"in ensemble {ensemble}, step of model '{steps[error.place].model_name}' receives inputs originated from"
            " different decoupled models"
        ) from None


def _check_inputs(
    ensemble: str, step: StepConfig, member: ModelConfig, tensors: dict[str, _Known], optional: set[str]
) -> None:
    known = {tensor.name: tensor for tensor in member.input}
    for name, tensor in step.input_map.items():
        if name not in known:
            raise ConfigError(
                f"in ensemble {ensemble}, ensemble tensor {shortened(tensor)} is mapping to non-existing input"
                f" {shortened(name)} in model {step.model_name}"
            )
        if tensor in optional and not known[name].optional:
            raise ConfigError(
                f"in ensemble {ensemble}, the optional input {shortened(tensor)} is mapped to input {shortened(name)}"
                f" in model {step.model_name}, which is not optional"
            )
        _agree(ensemble, tensor, _Known.of(step.model_name, known[name], member), tensors)
    for name, given in known.items():
        if name not in step.input_map and not given.optional:
            raise ConfigError(
                f"in ensemble {ensemble}, input {shortened(name)} in model {step.model_name} is not mapped to any"
                " ensemble tensors"
            )


def _check_outputs(ensemble: str, step: StepConfig, member: ModelConfig, tensors: dict[str, _Known]) -> None:
    known = {tensor.name: tensor for tensor in member.output}
    for name, tensor in step.output_map.items():
        if name not in known:
            raise ConfigError(
                f"in ensemble {ensemble}, ensemble tensor {shortened(tensor)} is mapped from non-existing output"
                f" {shortened(name)} in model {step.model_name}"
            )
        _agree(ensemble, tensor, _Known.of(step.model_name, known[name], member), tensors)


def _agree(ensemble: str, tensor: str, found: _Known, tensors: dict[str, _Known]) -> None:
    """Compare with what is known of a tensor, or remember it. A size that is not fixed is compared in each request."""
    first = tensors.setdefault(tensor, found)
    where = f"in ensemble {ensemble}, ensemble tensor {shortened(tensor)}"
    if first.data_type != found.data_type:
        raise ConfigError(
            f"{where}: inconsistent data type: {DataType.Name(first.data_type)} is inferred from model"
            f" {first.model} while {DataType.Name(found.data_type)} is inferred from model {found.model}"
        )
    if not (_compatible(first.dims, found.dims) or _compatible(first.full_dims, found.full_dims)):
        raise ConfigError(
            f"{where}: inconsistent shape: {list(first.full_dims)} is inferred from model {first.model} while"
            f" {list(found.full_dims)} is inferred from model {found.model}"
        )


def _compatible(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(-1 in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))


def load_order(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names such that each comes after those that it needs, as far as these are among the names.

    A name that needs itself comes somewhere. There is no recursion, since chains of ensembles may be long.
    """
    order: dict[str, None] = {}
    begun: set[str] = set()
    for name in needs:
        stack = [(name, iter(needs[name]))] if name not in begun else []
        begun.add(name)
        while stack:
            current, rest = stack[-1]
            needed = next((other for other in rest if other in needs and other not in begun), None)
            if needed is None:
                order[current] = None
                stack.pop()
            else:
                begun.add(needed)
                stack.append((needed, iter(needs[needed])))
    return list(order)


Served = Mapping[str, Mapping[int, LoadedModel]]  # by name and version

NOT_AVAILABLE: Final = "contains models that are not available"


class MissingModelError(ConfigError):
    """A model of an ensemble is not served."""


@dataclass(frozen=True)
class MadeEnsemble:
    """Of what an ensemble was made: the model of each step; how many steps that is with those of inner ensembles,
    and how deep these go. `schedules`: by which groups of its steps run.
    """

    members: Sequence[LoadedModel]
    steps: int
    depth: int
    schedules: Sequence[UsedSchedule] = ()


class EnsembleBuilder:
    """The ensembles that are to be served, made again whenever a model of theirs changes.

    Nothing is compiled or loaded for an ensemble, so this takes no time.
    """

    def __init__(self, schedules: StoredSchedules) -> None:
        self._schedules = schedules
        self._wanted: dict[str, tuple[ModelVersion, ...]] = {}
        self._made: dict[int, MadeEnsemble] = {}  # by number
        self._numbers = itertools.count(_native.MAX_MODELS)  # none that the executor may know

    def want(self, name: str, entries: Iterable[Entry]) -> None:
        """Remember the versions of an ensemble that are to be served; none if it is no ensemble (any more)."""
        ensembles = tuple(entry for entry in entries if isinstance(entry, ModelVersion) and entry.is_ensemble)
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
        config = _completed(entry, members)
        check_members(entry.name, config, [config_of(member.ready) for member in members])
        tokenizer = complete_embeddings(config, entry.title, entry.folder, entry.path.parent)
        number = next(self._numbers)
        made = self._made_of(entry, members)
        used = self._schedules.use(
            f"ensemble {entry.title}", together(steps), [member.ready.model_id for member in members]
        )
        made = replace(made, schedules=used)
        isolated = self._isolated(steps, made)
        ready = ModelReady(
            model_id=number,
            name=entry.name,
            version=entry.version,
            config=config.SerializeToString(),
            inputs=tuple(spec_of(tensor, config) for tensor in config.input),
            outputs=tuple(_with_classes(spec_of(tensor, config), config, members) for tensor in config.output),
            max_batch_size=config.max_batch_size,
            max_rows=config.max_batch_size or 1,
            batched=config.max_batch_size > 0,
            qos_us=resolve_qos_us(entry.qos, isolated),
            labels=tuple(_labels(entry, config, members).items()),
            isolated_us=isolated.compute_us if isolated else 0.0,
            compounds=compounds_of(used),
            tokenizer=tokenizer,
        )
        if (size_bytes := len(to_json(ready))) > MAX_MESSAGE_BYTES:
            self._schedules.drop(used)
            raise ConfigError(f"tensors and configuration take {size_bytes} bytes, at most {MAX_MESSAGE_BYTES} can be")
        warn_of_target(ready, entry.qos, isolated)
        log_without_effect(entry.name, entry.without_effect)
        _log.info("ensemble %s: ready, %d steps", entry.title, made.steps)
        self._made[number] = made
        return LoadedModel(entry, ready, isolated, Engine.NATIVE, None)

    def remove(self, model: LoadedModel) -> None:
        """An ensemble is not served any more."""
        made = self._made.pop(model.ready.model_id, None)
        if made is not None:
            self._schedules.drop(made.schedules)

    def measured(self, model: LoadedModel, served: Served) -> LoadedModel:
        """Return a served ensemble with the times of what is served now, of which no model has been loaded again."""
        members = _members(model.entry, served)
        number = model.ready.model_id
        made = self._made[number] = replace(self._made[number], members=members)
        isolated = self._isolated(model.entry.config.ensemble_scheduling.step, made)
        if isolated is None:
            return model
        qos_us = resolve_qos_us(model.entry.qos, isolated)
        return replace(
            model, ready=replace(model.ready, qos_us=qos_us, isolated_us=isolated.compute_us), isolated=isolated
        )

    def is_as_made(self, model: LoadedModel, served: Served) -> bool:
        """Whether a served ensemble is made of what is served now."""
        try:
            return self._made[model.ready.model_id].members == _members(model.entry, served)
        except MissingModelError:
            return False

    def _isolated(self, steps: Sequence[StepConfig], made: MadeEnsemble) -> IsolatedLatency | None:
        busy = [self._schedules.busy_cores(member.ready.model_id) for member in made.members]
        return isolated_of(steps, [member.isolated for member in made.members], busy, made.schedules)

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

    def _made_of(self, entry: ModelVersion, members: Sequence[LoadedModel]) -> MadeEnsemble:
        inner = [self._made.get(member.ready.model_id) for member in members]
        steps = sum(1 if each is None else each.steps for each in inner)
        depth = 1 + max(0 if each is None else each.depth for each in inner)
        if steps > MAX_STEPS or depth > MAX_DEPTH:
            raise ConfigError(
                f"ensemble {entry.name} has {steps} steps with those of inner ensembles, {depth} levels deep;"
                f" at most {MAX_STEPS} and {MAX_DEPTH} are possible"
            )
        return MadeEnsemble(members, steps, depth)


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


def _completed(entry: ModelVersion, members: Sequence[LoadedModel]) -> ModelConfig:
    response_bounds_ns(entry.config)  # raises what is wrong with them
    complete = ModelConfig()
    complete.CopyFrom(entry.config)
    complete.name = entry.name
    if not entry.config.HasField("version_policy"):
        complete.version_policy.latest.num_versions = 1
    if any(config_of(member.ready).model_transaction_policy.decoupled for member in members):
        complete.model_transaction_policy.decoupled = True
        if complete.response_cache.enable:
            raise ConfigError("response_cache: the responses of a decoupled model are not kept")
    elif complete.model_transaction_policy.decoupled:  # it is up to the steps, as Triton has it
        complete.ClearField("model_transaction_policy")
    return complete


def _with_classes(spec: TensorSpec, config: ModelConfig, members: Sequence[LoadedModel]) -> TensorSpec:
    """Return an output's spec with the names of classes that the model which computes it has."""
    for step, member in zip(config.ensemble_scheduling.step, members, strict=True):
        for theirs in member.ready.outputs:
            if theirs.classes and step.output_map.get(theirs.name) == spec.name:
                return replace(spec, classes=theirs.classes)
    return spec


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


def together(steps: Sequence[StepConfig]) -> list[list[int]]:
    """Return the places of the steps that can begin at the same moment, since they wait for the same ones."""
    groups: dict[frozenset[int], list[int]] = {}
    writer = {tensor: place for place, step in enumerate(steps) for tensor in step.output_map.values()}
    for place, step in enumerate(steps):
        waits = frozenset(writer[tensor] for tensor in writer.keys() & step.input_map.values())
        groups.setdefault(waits, []).append(place)
    return [group for group in groups.values() if len(group) > 1]


def isolated_of(
    steps: Sequence[StepConfig],
    isolated: Sequence[IsolatedLatency | None],
    busy_cores: Sequence[float],
    schedules: Sequence[UsedSchedule] = (),
) -> IsolatedLatency | None:
    """Return how fast the ensemble is when it is alone: as its longest chain, asked for step by step.

    It is not faster than its steps together leave the cores: `busy_cores` is the share of all that each keeps busy.
    Steps that run by a schedule take as long as that. None if the time of a step is not known.
    """
    known = [each for each in isolated if each is not None]
    if len(known) < len(isolated):
        return None
    after = [
        [place for place, other in enumerate(steps) if set(step.output_map.values()) & set(other.input_map.values())]
        for step in steps
    ]
    computes_us = [each.compute_us for each in known]
    shares_us = [time_us * share for time_us, share in zip(computes_us, busy_cores, strict=True)]
    for used in schedules:
        for place in used.places:
            computes_us[place] = used.time_us
            shares_us[place] = used.time_us / len(used.places)
    ways_us = [time_us + each.latency_us - each.compute_us for time_us, each in zip(computes_us, known, strict=True)]
    chain_us = longest_after([0.0, *computes_us], _with_start(after))[0]
    compute_us = max(chain_us, sum(shares_us))
    latency_us = longest_after([0.0, *ways_us], _with_start(after))[0] + compute_us - chain_us
    return IsolatedLatency(compute_us, latency_us, max(one.busy_cost_us for one in known))


def _with_start(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the followers with one step more in front, which all others wait for."""
    return [list(range(1, len(after) + 1)), *([place + 1 for place in places] for places in after)]


def needs_of(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the names of the models that these are made of."""
    names = [name for entry in entries if isinstance(entry, ModelVersion) for name in composing_models(entry.config)]
    return tuple(dict.fromkeys(names))


def in_load_order(found: Mapping[str, list[Entry]]) -> dict[str, list[Entry]]:
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
