"""The tensors between the steps of an ensemble: where they are, and how long they are needed."""

from collections.abc import Mapping
from dataclasses import dataclass

from gangway.server.requests.codecs import AnswerTensor, Shape, copy_content
from gangway.server.requests.data_plane import DataPlane, TensorPlace
from gangway.server.requests.ensemble_graphs import EnsembleGraph, EnsembleStep, TensorName
from gangway.server.requests.regions import Content


@dataclass
class EnsembleTensor:
    """A tensor. `content`: wherever it is; `place`: in the io segment, if it is there, in a block that is held."""

    datatype: str
    shape: Shape
    content: Content
    place: TensorPlace | None = None
    readers: int = 0  # steps, and the answer


class EnsembleTensors:
    """Tensors of one request to an ensemble: where they are, and how many have yet to read them.

    `wanted`: tensors that answers are made of. What follows from a response of a decoupled step has tensors of its own,
    and uses those from before that step (`outer`).
    """

    def __init__(
        self,
        plane: DataPlane,
        graph: EnsembleGraph,
        wanted: frozenset[TensorName],
        outer: "EnsembleTensors | None" = None,
    ) -> None:
        self._plane, self._graph, self._wanted, self._outer = plane, graph, wanted, outer
        self._level: int = 0 if outer is None else outer._level + 1
        self._tensors: dict[TensorName, EnsembleTensor] = {}

    def after_response(self) -> "EnsembleTensors":
        """Return those of what follows from a response."""
        return EnsembleTensors(self._plane, self._graph, self._wanted, self)

    def add(self, name: TensorName, value: EnsembleTensor) -> None:
        """Add a tensor that came with the request, or that a step has left, in a block that the caller holds."""
        counts = self._graph.reader_counts.get(name)
        own = counts[self._level] if counts is not None else 0
        is_kept = name in self._wanted or (counts is not None and own < sum(counts))  # any number may follow later
        value.readers = own + is_kept
        if value.readers:
            self._tensors[name] = value
            if value.place is not None:
                self._plane.share(value.place.block)

    def inputs_of(self, inputs: Mapping[str, TensorName]) -> dict[str, EnsembleTensor]:
        """Return the tensors of a step, by their names in its model, without those that are left out."""
        return {name: value for name, tensor in inputs.items() if (value := self._lookup(tensor)) is not None}

    def copied_bytes(self, step: EnsembleStep) -> int:
        """Return how many bytes are copied for a step: all of its inputs, or what a compiled model has no place of."""
        values = self.inputs_of(step.inputs).values()
        return sum(len(value.content) for value in values if value.place is None or not step.model.compiled)

    def placed(self, value: EnsembleTensor) -> TensorPlace:
        """Return where in the io segment a tensor is: it is copied there, once, if it is not.

        Raises PoolExhaustedError if there is no memory, RequestError if the client's region has become too small.
        """
        if value.place is None:
            block = self._plane.take(len(value.content))
            place = TensorPlace(block, block.offset, len(value.content))
            try:
                copy_content(value.content, self._plane.view(place))
            except BaseException:
                self._plane.drop(block)
                raise
            value.place, value.content = place, self._plane.view(place)
        return value.place

    def mark_read(self, inputs: Mapping[str, TensorName]) -> None:
        """A step has ended that has read these."""
        for name in set(inputs.values()):
            value = self._tensors.get(name)
            if value is not None:
                value.readers -= 1
                if not value.readers:
                    self._drop(name)

    def results(self) -> dict[TensorName, AnswerTensor]:
        """Return the tensors that the answer is made of, as far as steps have left them. They stay until `clear`."""
        found = {}
        for name in self._wanted:
            value = self._lookup(name)
            if value is not None:
                assert isinstance(value.content, memoryview), "written by a step"
                found[name] = AnswerTensor(value.datatype, value.shape, value.content)
        return found

    def clear(self) -> None:
        """Let go of everything."""
        for name in list(self._tensors):
            self._drop(name)

    def _lookup(self, name: TensorName) -> EnsembleTensor | None:
        value = self._tensors.get(name)
        return value if value is not None or self._outer is None else self._outer._lookup(name)

    def _drop(self, name: TensorName) -> None:
        value = self._tensors.pop(name)
        if value.place is not None:
            self._plane.drop(value.place.block)
