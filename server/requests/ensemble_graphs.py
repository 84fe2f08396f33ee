"""The steps of an ensemble, and how tensors connect them.

Each step is one model, and tensors connect the steps. The steps of an ensemble that is itself a step stand in its
place, so there is one graph at any depth. Tensors of the outermost ensemble have their names; those of an inner one
have the way to it before their names.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import NoReturn, TypeAlias

import msgspec

from gangway.executor.slots import compound_number
from gangway.server.errors import RequestError, unavailable
from gangway.server.messages import Compounds
from gangway.server.models.config import LATEST, MAX_DEPTH, MAX_STEPS, longest_after
from gangway.server.models.ensemble_scopes import DifferentOriginsError, Scope, scopes_of
from gangway.server.models.served import Models, ServedModel

TensorName: TypeAlias = tuple[str, ...]


class EnsembleStep(msgspec.Struct, frozen=True):
    """One model's part. `title` says where it stands, for people. Maps go from the model's names to tensors.

    `ensembles`: the inner ensembles that it belongs to, outermost first, as places in `EnsembleGraph.inner`.
    """

    title: str
    model: ServedModel
    inputs: Mapping[str, TensorName]
    outputs: Mapping[str, TensorName]
    ensembles: tuple[int, ...] = ()


@dataclass(frozen=True)
class EnsembleGraph:
    """Steps of the ensemble `model`. `inner`: the ensembles among its steps, and among theirs."""

    model: ServedModel
    steps: tuple[EnsembleStep, ...]
    inner: tuple[ServedModel, ...] = ()

    @cached_property
    def members(self) -> tuple[ServedModel, ...]:
        """All models that take part, each once."""
        models = [*(step.model for step in self.steps), *self.inner]
        return tuple({model.load: model for model in models}.values())

    def needed(self, outputs: Sequence[str]) -> "EnsembleGraph":
        """Return the part that computes these outputs of the ensemble."""
        wanted: list[TensorName] = [(name,) for name in outputs]
        kept: set[int] = set()
        while wanted:
            writer = self.writers.get(wanted.pop())
            if writer is not None and writer not in kept:
                kept.add(writer)
                wanted += self.steps[writer].inputs.values()
        if len(kept) == len(self.steps):
            return self
        return EnsembleGraph(self.model, tuple(self.steps[index] for index in sorted(kept)), self.inner)

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
    def writers(self) -> Mapping[TensorName, int]:
        """The step that writes each tensor that any step writes."""
        return {tensor: index for index, step in enumerate(self.steps) for tensor in step.outputs.values()}

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """For each step the decoupled steps that it follows, and at last those that the outputs follow.

        Each is the beginning of the last one, as far as all steps are needed. Raises DifferentOriginsError.
        """
        outputs = [(name,) for name in self.model.outputs if (name,) in self.writers]
        reads = [*(tuple(step.inputs.values()) for step in self.steps), outputs]
        writes = [*(tuple(step.outputs.values()) for step in self.steps), ()]
        return scopes_of(reads, writes, [*(step.model.is_decoupled for step in self.steps), False])

    @cached_property
    def streams(self) -> Scope:
        """The decoupled steps, in their order."""
        return self.scopes[-1]

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """For each step how many decoupled steps it follows."""
        return tuple(len(scope) for scope in self.scopes[:-1])

    @cached_property
    def by_level(self) -> tuple[tuple[int, ...], ...]:
        """The steps of each level."""
        steps = range(len(self.steps))
        return tuple(
            tuple(index for index in steps if self.levels[index] == level) for level in range(len(self.streams) + 1)
        )

    @cached_property
    def reader_counts(self) -> Mapping[TensorName, tuple[int, ...]]:
        """How many steps of each level read a tensor that any step reads."""
        levels = range(len(self.streams) + 1)
        return {
            tensor: tuple(sum(self.levels[reader] == level for reader in readers) for level in levels)
            for tensor, readers in self.readers.items()
        }

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """For each step those that wait for it."""
        readers = self.readers
        return tuple(
            tuple({reader: None for tensor in step.outputs.values() for reader in readers.get(tensor, ())})
            for step in self.steps
        )

    @cached_property
    def compounds(self) -> Compounds:
        """The compound tasks among its steps that have a schedule, and among those of inner ensembles."""
        return tuple(compound for model in (self.model, *self.inner) for compound in model.compounds)

    @cached_property
    def remaining_us(self) -> tuple[float, ...]:
        """For each step how long the longest chain of the steps after it takes, at least, as far as that is known."""
        return longest_after([step.model.isolated_us for step in self.steps], self.followers)


def compound_numbers(graph: EnsembleGraph, model_ids: Sequence[int], counts: Iterator[int]) -> deque[int]:
    """Return for each step of those that begin together the number of its compound task, 0 if it is of none.

    `model_ids`: of the steps, -1 for one that cannot be a member. `counts` has a number for each compound task.
    """
    numbers = [0] * len(model_ids)
    for schedule, members in graph.compounds:
        places: list[int] = []
        for model_id in members:
            free = (i for i, own in enumerate(model_ids) if own == model_id and not numbers[i] and i not in places)
            places.extend(islice(free, 1))
        if len(places) == len(members):
            number = compound_number(schedule, next(counts))
            for place in places:
                numbers[place] = number
    return deque(numbers)


class Graphs:
    """The graphs of one set of models, made as they are needed. Safe for threads."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._graphs: dict[int, EnsembleGraph] = {}  # by `load`

    def of(self, model: ServedModel) -> EnsembleGraph:
        """Return the graph of a served ensemble. Raises RequestError if one of its models cannot be used now."""
        graph = self._graphs.get(model.load)
        if graph is None:
            builder = _Builder(self._models, model.name)
            builder.add(model, (), {}, ())
            graph = EnsembleGraph(model, tuple(builder.steps), tuple(builder.inner))
            builder.check_scopes(graph)
            self._graphs[model.load] = graph
        return graph


@dataclass
class _Builder:
    models: Models
    name: str  # of the outermost ensemble
    steps: list[EnsembleStep] = field(default_factory=list)
    inner: list[ServedModel] = field(default_factory=list)

    def add(
        self, model: ServedModel, path: tuple[str, ...], names: Mapping[str, TensorName], ensembles: tuple[int, ...]
    ) -> None:
        """Add the steps of an ensemble that stands at `path`; `names`: those of its tensors that others know, too."""
        for index, step in enumerate(model.config.ensemble_scheduling.step):
            title = f"step {'.'.join((*path, str(index)))} ('{step.model_name}')"
            member = self._find(step.model_name, step.model_version, title)
            # Maps of a message have no order: that of the model's inputs is what a Python model sees.
            order = {name: place for place, name in enumerate(member.inputs)}
            ordered = sorted(step.input_map.items(), key=lambda item: order.get(item[0], len(order)))
            inputs = {name: names.get(tensor, (*path, tensor)) for name, tensor in ordered}
            outputs = {name: names.get(tensor, (*path, tensor)) for name, tensor in step.output_map.items()}
            self._check_names(member, inputs, outputs, title)
            if not member.is_ensemble:
                self.steps.append(EnsembleStep(title, member, inputs, outputs, ensembles))
                self._check(path)
                continue
            self._check(path)
            self.inner.append(member)
            self.add(member, (*path, str(index)), inputs | outputs, (*ensembles, len(self.inner) - 1))

    def check_scopes(self, graph: EnsembleGraph) -> None:
        """Refuse steps that read tensors of different decoupled models; the same holds for the outputs."""
        try:
            _ = graph.scopes
        except DifferentOriginsError as error:
            title = self.steps[error.place].title if error.place < len(self.steps) else "outputs"
            self._refuse(title, "inputs originate from different decoupled models")

    def _check(self, path: tuple[str, ...]) -> None:
        """The supervisor has looked at it, but an inner ensemble may have been replaced since."""
        if len(self.steps) > MAX_STEPS or len(path) >= MAX_DEPTH:
            unavailable(f"ensemble '{self.name}' has more than {MAX_STEPS} steps with those of inner ensembles")

    def _check_names(
        self, member: ServedModel, inputs: Mapping[str, TensorName], outputs: Mapping[str, TensorName], title: str
    ) -> None:
        strangers = [name for name in inputs if name not in member.inputs]
        strangers += [name for name in outputs if name not in member.outputs]
        if strangers:
            self._refuse(title, f"the model has no tensor '{strangers[0]}'")

    def _find(self, name: str, version: int, title: str) -> ServedModel:
        try:
            is_latest = version == LATEST or (not version and self.models.served_as(name, 0) is None)
            return self.models.find(name, "" if is_latest else str(version))
        except RequestError as error:
            self._refuse(title, error.message)

    def _refuse(self, title: str, reason: str) -> NoReturn:
        """A composing model that is gone is no mistake of the client's."""
        unavailable(f"in ensemble '{self.name}', {title}: {reason}")
