"""The tensors of one request to an ensemble: where they are, and who is yet to read them."""

from collections.abc import Mapping
from dataclasses import dataclass

from gangway.server.calls import Content, copy_content
from gangway.server.ensemble.graph import Graph, TensorName
from gangway.server.ensemble.memory import Block, Place, SharedMemoryPool
from gangway.server.ensemble.ways import Shape


@dataclass
class Value:
    """A tensor. `content`: wherever it is; `place`: in the io segment, if it is there, in a block that is held."""

    datatype: str
    shape: Shape
    content: Content
    readers: int  # steps, and the answer
    place: Place | None = None
    block: Block | None = None


class Values:
    """For the one thread that executes the request. `wanted`: tensors that the answer is made of."""

    def __init__(self, pool: SharedMemoryPool, graph: Graph, wanted: tuple[TensorName, ...]) -> None:
        self._pool = pool
        self._readers: Mapping[TensorName, tuple[int, ...]] = graph.readers
        self._wanted = frozenset(wanted)
        self._values: dict[TensorName, Value] = {}

    def give(self, name: TensorName, datatype: str, shape: Shape, content: Content) -> None:
        """Add a tensor that came with the request."""
        self._add(name, Value(datatype, shape, content, 0))

    def write(self, name: TensorName, datatype: str, shape: Shape, place: Place, block: Block) -> None:
        """Add a tensor that a step has left at a place in a block, which the caller holds."""
        value = Value(datatype, shape, self._pool.view(place), 0, place, block)
        if self._add(name, value):
            self._pool.hold(block)

    def _add(self, name: TensorName, value: Value) -> bool:
        value.readers = len(self._readers.get(name, ())) + (name in self._wanted)
        if value.readers:
            self._values[name] = value
        return value.readers > 0

    def of(self, inputs: Mapping[str, TensorName]) -> dict[str, Value]:
        """Return the tensors of a step, by their names in its model, without those that the request has left out."""
        return {name: self._values[tensor] for name, tensor in inputs.items() if tensor in self._values}

    def placed(self, value: Value) -> tuple[Place, Block]:
        """Return where in the io segment a tensor is: it is copied there, once, if it is not.

        Raises PoolExhaustedError if there is no memory, RequestError if the client's region has become too small.
        """
        if value.place is None or value.block is None:
            block = self._pool.take(len(value.content))
            value.block = block  # from here on it is given back, whatever happens
            place = block.offset, len(value.content)
            view = self._pool.view(place)
            copy_content(value.content, view)
            value.place, value.content = place, view
        return value.place, value.block

    def read(self, inputs: Mapping[str, TensorName]) -> None:
        """A step has ended that has read these."""
        for name in set(inputs.values()):
            value = self._values.get(name)
            if value is not None:
                value.readers -= 1
                if not value.readers:
                    self._drop(name)

    def results(self) -> dict[TensorName, tuple[Shape, memoryview]]:
        """Return the tensors that the answer is made of, which stay until `clear`."""
        found = {}
        for name in self._wanted:
            value = self._values[name]
            assert isinstance(value.content, memoryview), "written by a step"
            found[name] = value.shape, value.content
        return found

    def clear(self) -> None:
        """Let go of everything."""
        for name in list(self._values):
            self._drop(name)

    def _drop(self, name: TensorName) -> None:
        value = self._values.pop(name)
        if value.block is not None:
            self._pool.let_go(value.block)
