"""How a step gets its slot: where its tensors lie, and what is copied for it, which is little."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from gangway.server.ensemble.memory import Block, Place, SharedMemoryPool, SharedRequest, places_within, total_bytes
from gangway.server.ensemble.values import Value, Values
from gangway.server.ensemble.ways import Shape, StepWay
from gangway.server.errors import RequestError
from gangway.server.models import ServedModel


class Output(NamedTuple):
    """A tensor that a step has left."""

    shape: Shape
    place: Place
    block: Block


@dataclass(frozen=True)
class Prepared:
    """A request that is ready to be handed over. `blocks` are held by whoever has it; the last one has the outputs."""

    request: SharedRequest
    blocks: Sequence[Block]
    places: Sequence[Place]  # of the outputs: of each, or of the frame of all
    compiled: bool

    def outputs(self, model: ServedModel, way: StepWay) -> Mapping[str, Output] | None:
        """Return what a request has left that is DONE, by name; None if there was too little room.

        Raises RequestError if it cannot be used.
        """
        block = self.blocks[-1]
        if self.compiled:
            return {
                name: Output(way.output_shapes[name], self.places[tensor.index], block)
                for name, tensor in model.outputs.items()
            }
        (view,), ((begin, _),) = self.request.outputs, self.places
        try:
            parts = way.frame.parts_in(view)
        except ValueError as error:
            message = f"model '{model.name}' has left what is no answer: {error}"
            raise RequestError(grpc.StatusCode.INTERNAL, message) from error
        if parts is None:
            return None
        found = {}
        for name, tensor in model.outputs.items():
            part = parts[tensor.index]
            found[name] = Output(tensor.client_shape(part.shape), (begin + part.offset, part.size_bytes), block)
        return found


def prepare_compiled(
    pool: SharedMemoryPool, values: Values, model: ServedModel, way: StepWay, inputs: Mapping[str, Value]
) -> Prepared:
    """Prepare a step of a compiled model: it reads its inputs where they are, and has a block for its outputs.

    One without rows computes a row of zeros, and leaves outputs without contents. Raises PoolExhaustedError, and
    RequestError.
    """
    assert way.compiled is not None, "so the caller says"
    layout, rows = way.compiled.layout, way.shapes.rows
    places: list[Place] = [(0, 0)] * len(layout.input_bytes)
    blocks = []
    for name, value in inputs.items() if not way.shapes.is_empty else ():
        index = model.inputs[name].index
        places[index], block = values.placed(value)
        blocks.append(block)
        expected = rows * layout.input_bytes[index]
        if places[index][1] != expected:
            message = f"input '{name}' for model '{model.name}' has {places[index][1]} bytes, expected {expected}"
            raise RequestError(grpc.StatusCode.INTERNAL, message)
    sizes = [rows * row_bytes for row_bytes in layout.output_bytes]
    taken = [pool.take(total_bytes(sizes))]
    try:
        outputs = places_within(taken[-1], sizes)
        if way.shapes.is_empty:
            taken.insert(0, pool.take(total_bytes(layout.input_bytes)))
            places = places_within(taken[0], layout.input_bytes)
            for place in places:
                pool.view(place)[:] = bytes(place[1])
        request = pool.open(layout, rows, places, outputs, [*blocks, *taken])
    except BaseException:
        for block in taken:
            pool.let_go(block)
        raise
    left = [(at, 0) for at, _ in outputs] if way.shapes.is_empty else outputs
    return Prepared(request, tuple(taken), left, compiled=True)


def prepare_frame(pool: SharedMemoryPool, way: StepWay, inputs: Sequence[Value]) -> Prepared:
    """Prepare a step for onnxruntime: its inputs are copied into one frame, which has to be in one piece.

    Raises PoolExhaustedError, and RequestError.
    """
    contents = [value.content for value in inputs]
    layout = way.frame.layout(contents)
    taken: list[Block] = []
    try:
        places = []
        for size_bytes in layout.frame_bytes:
            taken.append(pool.take(size_bytes))
            places.append((taken[-1].offset, size_bytes))
        request = pool.open(layout, way.shapes.rows, places[:1], places[1:], taken)
        try:
            way.frame.write(request, contents)
        except BaseException:
            request.close()
            raise
    except BaseException:
        for block in taken:
            pool.let_go(block)
        raise
    return Prepared(request, tuple(taken), places[1:], compiled=False)
