"""An ensemble as the front end carries it out: steps, each one model, connected by tensors.

The steps of an ensemble that is itself a step stand in its place, so there is one graph, whatever is within what.
Tensors of the outermost ensemble have their names; those that only an inner one knows have the way to it before them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import grpc

from gangway.server.errors import RequestError
from gangway.server.models.config import LATEST, MAX_DEPTH, MAX_STEPS, longest_after
from gangway.server.models.served import Models, ServedModel

TensorName: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One model's part. `title` says where it stands, for people. Maps go from the model's names to tensors.

    `ensembles`: the inner ensembles that it belongs to, outermost first, as places in `Graph.inner`.
    """

    title: str
    model: ServedModel
    inputs: Mapping[str, TensorName]
    outputs: Mapping[str, TensorName]
    ensembles: tuple[int, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Steps of the ensemble `model`. `inner`: the ensembles among its steps, and among theirs."""

    model: ServedModel
    steps: tuple[Step, ...]
    inner: tuple[ServedModel, ...] = ()

    @cached_property
    def members(self) -> tuple[ServedModel, ...]:
        """All models that take part, each once."""
        models = [*(step.model for step in self.steps), *self.inner]
        return tuple({model.load: model for model in models}.values())

    def needed(self, outputs: Sequence[str]) -> "Graph":
        """Return the part that computes these outputs of the ensemble."""
        writers = {tensor: index for index, step in enumerate(self.steps) for tensor in step.outputs.values()}
        wanted: list[TensorName] = [(name,) for name in outputs]
        kept: set[int] = set()
        while wanted:
            writer = writers.get(wanted.pop())
            if writer is not None and writer not in kept:
                kept.add(writer)
                wanted += self.steps[writer].inputs.values()
        if len(kept) == len(self.steps):
            return self
        return Graph(self.model, tuple(self.steps[index] for index in sorted(kept)), self.inner)

    @cached_property
    def readers(self) -> Mapping[TensorName, tuple[int, ...]]:
        """The steps that read each tensor that any step reads."""
        found: dict[TensorName, list[int]] = {}
        for index, step in enumerate(self.steps):
            for tensor in dict.fromkeys(step.inputs.values()):
                found.setdefault(tensor, []).append(index)
        return {tensor: tuple(steps) for tensor, steps in found.items()}

    @cached_property
    def waits(self) -> tuple[int, ...]:
        """For each step how many of its tensors other steps write."""
        written = {tensor for step in self.steps for tensor in step.outputs.values()}
        return tuple(len(written.intersection(step.inputs.values())) for step in self.steps)

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """For each step those that wait for it."""
        readers = self.readers
        return tuple(
            tuple({reader: None for tensor in step.outputs.values() for reader in readers.get(tensor, ())})
            for step in self.steps
        )

    @cached_property
    def remaining_us(self) -> tuple[float, ...]:
        """For each step how long the longest chain of the steps after it takes, at least, as far as that is known."""
        return longest_after([step.model.isolated_us for step in self.steps], self.followers)


class Graphs:
    """The graphs of one set of models, made as they are needed. Safe for threads."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._graphs: dict[int, Graph] = {}  # by `load`

    def of(self, model: ServedModel) -> Graph:
        """Return the graph of a served ensemble. Raises RequestError if one of its models cannot be used now."""
        graph = self._graphs.get(model.load)
        if graph is None:
            builder = _Builder(self._models, model.name)
            builder.add(model, (), {}, ())
            graph = self._graphs[model.load] = Graph(model, tuple(builder.steps), tuple(builder.inner))
        return graph


@dataclass
class _Builder:
    models: Models
    name: str  # of the outermost ensemble
    steps: list[Step] = field(default_factory=list)
    inner: list[ServedModel] = field(default_factory=list)

    def add(
        self, model: ServedModel, path: tuple[str, ...], names: Mapping[str, TensorName], ensembles: tuple[int, ...]
    ) -> None:
        """Add the steps of an ensemble that stands at `path`; `names`: those of its tensors that others know, too."""
        for index, step in enumerate(model.config.ensemble_scheduling.step):
            title = f"step {'.'.join((*path, str(index)))} ('{step.model_name}')"
            member = self._find(step.model_name, step.model_version, title)
            inputs = {name: names.get(tensor, (*path, tensor)) for name, tensor in step.input_map.items()}
            outputs = {name: names.get(tensor, (*path, tensor)) for name, tensor in step.output_map.items()}
            self._check_names(member, inputs, outputs, title)
            if not member.is_ensemble:
                self.steps.append(Step(title, member, inputs, outputs, ensembles))
                self._check(path)
                continue
            self._check(path)
            self.inner.append(member)
            self.add(member, (*path, str(index)), inputs | outputs, (*ensembles, len(self.inner) - 1))

    def _check(self, path: tuple[str, ...]) -> None:
        """The supervisor has looked at it, but an inner ensemble may have been replaced since."""
        if len(self.steps) > MAX_STEPS or len(path) >= MAX_DEPTH:
            message = f"ensemble '{self.name}' has more than {MAX_STEPS} steps with those of inner ensembles"
            raise RequestError(grpc.StatusCode.UNAVAILABLE, message)

    def _check_names(
        self, member: ServedModel, inputs: Mapping[str, TensorName], outputs: Mapping[str, TensorName], title: str
    ) -> None:
        strangers = [name for name in inputs if name not in member.inputs]
        strangers += [name for name in outputs if name not in member.outputs]
        if strangers:
            message = f"in ensemble '{self.name}', {title}: the model has no tensor '{strangers[0]}'"
            raise RequestError(grpc.StatusCode.UNAVAILABLE, message)
        if member.sequence is not None:
            message = f"in ensemble '{self.name}', {title}: the model has sequences, which steps cannot have"
            raise RequestError(grpc.StatusCode.UNAVAILABLE, message)

    def _find(self, name: str, version: int, title: str) -> ServedModel:
        try:
            is_latest = version == LATEST or (not version and self.models.served_as(name, 0) is None)
            return self.models.find(name, "" if is_latest else str(version))
        except RequestError as error:
            # A composing model that is gone is no mistake of the client's.
            message = f"in ensemble '{self.name}', {title}: {error.message}"
            raise RequestError(grpc.StatusCode.UNAVAILABLE, message) from None
