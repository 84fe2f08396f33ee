"""Place recurrent layers: as one step of the program, or, if their matrices are large, as one for each of their steps.

A core that reads a matrix larger than its second level cache again and again waits for memory most of the time. Cut
into one layer for each step, the tiles of the matrix are divided among the cores of a gang, each of which finds its own
ones in its cache in the next step. A smaller matrix would gain less than the changes of layers cost. A step of a GRU
that resets its state before the product is two layers, since the second product needs the reset gates of all units.
"""

from dataclasses import replace

from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.specs import RawWeights, RecurrentSpec
from gangway.compiler.lower.layers import LoweredLayer, sequence
from gangway.compiler.place.memory import Buffer, PlacedLayer, PlacedMemory, refusal_texts

MAX_LAYERS = 1024  # of both directions together


def place_recurrent(memory: PlacedMemory, layer: LoweredLayer, spec: RecurrentSpec) -> None:
    """Append the steps of one recurrent layer."""
    x, *others = layer.inputs
    products = memory.blocked(x, sequence(spec.channels, spec.steps * spec.sequences))
    states = [memory.plain(name) for name in others]
    names = iter((layer.output, *layer.more_outputs))
    outputs = [memory.tensor(next(names)) if wanted else None for wanted in spec.outputs]
    if _is_divided(spec):
        _Divided(memory, layer, spec, products, states, outputs).place()
        return
    first, *more = filter(None, outputs)
    texts = refusal_texts(layer, spec)
    inputs = (products, *states)
    memory.steps.append(PlacedLayer(layer.name, layer.operator, spec, inputs, first, layer.weights, tuple(more), texts))


def _is_divided(spec: RecurrentSpec) -> bool:
    """Whether each step becomes a layer: if that pays, and the parts of all tensors lie side by side."""
    side_by_side = spec.sequences == 1 or not spec.sequences_first
    layers = spec.steps * spec.directions * len(spec.gate_groups)
    return not spec.is_cached and side_by_side and 1 < layers <= MAX_LAYERS and not spec.lengths


class _Divided:
    """The steps of a recurrent layer as layers of their own, one direction after the other."""

    def __init__(
        self,
        memory: PlacedMemory,
        layer: LoweredLayer,
        spec: RecurrentSpec,
        products: Buffer,
        states: list[Buffer],
        outputs: list[Buffer | None],
    ) -> None:
        self._memory, self._layer, self._spec, self._products = memory, layer, spec, products
        given = iter(states)
        self._initial = [next(given) if here else None for here in (spec.initial_h, spec.initial_c)]
        y, *self._last = outputs
        shape = (spec.steps, spec.directions, spec.sequences, spec.hidden)
        self._y = y or Buffer(TensorType(shape, "float32"), "plain", None)
        self._state = TensorType((spec.sequences, spec.hidden), "float32")

    def place(self) -> None:
        """All of them."""
        spec = self._spec
        for direction in range(spec.directions):
            backward = spec.reverse or direction == 1
            weights = {
                name: array.reshape(spec.directions, -1)[direction : direction + 1]
                for name, array in self._layer.weights.items()
            }
            states = [part and self._part(part, direction) for part in self._initial]
            for number in range(spec.steps):
                step = spec.steps - 1 - number if backward else number
                states = self._step(direction, step, states, weights, number == spec.steps - 1)

    def _part(self, whole: Buffer, index: int) -> Buffer:
        """Return the state of so many before it in a plain tensor."""
        size = self._spec.sequences * self._spec.hidden
        return Buffer(self._state, "plain", None, parent=whole, skipped=index * size)

    def _step(
        self, direction: int, step: int, states: list[Buffer | None], weights: RawWeights, is_last: bool
    ) -> list[Buffer | None]:
        """Append one step; return the states after it."""
        spec, lanes = self._spec, self._memory.lanes
        positions = spec.steps * spec.sequences
        skipped = direction * spec.gates * spec.units * positions + step * spec.sequences * lanes
        x = Buffer(self._state, "plain", None, parent=self._products, skipped=skipped)
        y = self._part(self._y, step * spec.directions + direction)
        h, c = (part and self._part(part, direction) if is_last else None for part in self._last)
        if spec.cell == "LSTM" and not is_last:
            c = Buffer(self._state, "plain", None)
        single = replace(
            spec,
            steps=1,
            activations=spec.activations[direction : direction + 1],
            reverse=False,
            sequences_first=False,
            initial_h=states[0] is not None,
            initial_c=states[1] is not None,
            outputs=(True, h is not None, c is not None),
            positions=positions,
        )
        inputs, more = (x, *filter(None, states)), tuple(filter(None, (h, c)))
        name, operator = f"{self._layer.name}:{direction}.{step}", self._layer.operator
        if len(spec.gate_groups) > 1:
            reset, update = (Buffer(self._state, "plain", None) for _ in range(2))
            gates = replace(single, part="gates", outputs=(True, False, False))
            self._memory.steps.append(PlacedLayer(f"{name}.gates", operator, gates, inputs, update, weights, (reset,)))
            single, inputs = replace(single, part="candidate"), (*inputs, reset, update)
        self._memory.steps.append(PlacedLayer(name, operator, single, inputs, y, weights, more))
        return [y, c]
