"""Give every activation a place and a layout: insert packing layers, decide halos, choose what is read in place.

Layouts are those of `specs.py`. A *vector* (1 x 1 pixels) is the same in blocked and plain memory once its surplus
channels exist, so dense layers, global means and elementwise layers hand vectors to each other without copies.
"""

import math
from dataclasses import replace

import numpy as np
from gangway.artifact.format import Space
from gangway.compiler.buffers import Buffer, Step
from gangway.compiler.graph import TensorType
from gangway.compiler.layers import Concat, Geometry, Layer, Program, Transpose, geometry_of
from gangway.compiler.memory import Memory, datatype, unpack_spec
from gangway.compiler.movement import place_concat, place_transpose
from gangway.compiler.specs import (
    BlockedElementwiseSpec,
    ConvSpec,
    ElementwiseSpec,
    GlobalPoolSpec,
    PackSpec,
    PoolSpec,
    SoftmaxSpec,
    UnpackSpec,
)


def place(program: Program, layers: list[Layer], lanes: int) -> list[Step]:
    """Return the steps that run the layers on memory, with final specs. Raises UnsupportedModelError."""
    memory = Memory(program, lanes)
    placer = _Placer(memory)
    for layer in layers:
        placer.place(layer)
    for index, name in enumerate(program.graph.outputs):
        placer.deliver(index, name)
    _settle_halos(memory.steps)
    return [_with_halos(step) for step in memory.steps]


class _Placer:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def place(self, layer: Layer) -> None:
        """Append the layer after whatever its inputs need."""
        match layer.spec:
            case ConvSpec():
                self._place_conv(layer, layer.spec)
            case ElementwiseSpec():
                self._place_elementwise(layer, layer.spec)
            case SoftmaxSpec():
                memory = self._memory
                memory.append(layer, layer.spec, tuple(memory.plain(name) for name in layer.inputs), "plain")
            case Concat():
                place_concat(self._memory, layer, layer.spec.axis)
            case Transpose():
                place_transpose(self._memory, layer, layer.spec.order)
            case _:
                inputs = tuple(self._memory.blocked(name) for name in layer.inputs)
                self._memory.append(layer, layer.spec, inputs, "blocked")

    def _place_conv(self, layer: Layer, spec: ConvSpec) -> None:
        name = layer.inputs[0]
        haloed = any(spec.pads)
        # With few channels most lanes of a blocked input would be idle; a planar one is also packed faster.
        planar = spec.groups == 1 and spec.in_channels < self._memory.lanes and not self._memory.image(name).is_vector
        if planar and self._memory.home(name).layout == "plain":
            spec = replace(spec, input_planar=True)
            x = self._memory.planar(name) if haloed else self._memory.plain(name)
        else:
            x = self._memory.blocked(name, haloed)
        residual = tuple(self._memory.blocked(other) for other in layer.inputs[1:])
        self._memory.append(layer, spec, (x, *residual), "blocked")

    def _place_elementwise(self, layer: Layer, spec: ElementwiseSpec) -> None:
        kind = self._memory.program.type(layer.output)
        image = geometry_of(kind)
        if image is None or image.is_vector or not self._wants_blocked(layer, image):
            inputs = tuple(self._spread(name, kind) for name in layer.inputs)
            self._memory.append(layer, spec, inputs, "plain")
            return
        inputs = tuple(self._operand(name) for name in layer.inputs)
        blocked = BlockedElementwiseSpec(
            spec.operator,
            image.channels,
            image.height,
            image.width,
            tuple(buffer.is_vector for buffer in inputs),
            tuple(0 for _ in inputs),
            spec.activation,
        )
        self._memory.append(layer, blocked, inputs, "blocked")

    def _wants_blocked(self, layer: Layer, image: Geometry) -> bool:
        """Whether an operand is blocked already, or one per channel, for which there is no plain kernel."""
        activations = [name for name in layer.inputs if name not in self._memory.program.constants]
        return any(
            self._memory.home(name).is_blocked(image) or self._memory.image(name) != image for name in activations
        )

    def _operand(self, name: str) -> Buffer:
        """Return a blocked tensor, or one of one number per channel."""
        if name not in self._memory.program.constants:
            return self._memory.blocked(name)
        value = self._memory.program.constants[name]
        kind = TensorType(value.shape, value.dtype.name)
        _, channels, height, width = value.shape
        padded = np.pad(value[0], ((0, -channels % self._memory.lanes), (0, 0), (0, 0)))
        packed = padded.reshape(-1, self._memory.lanes, height, width).transpose(0, 2, 3, 1)
        return Buffer(kind, "blocked", geometry_of(kind), Space.WEIGHTS, constant=packed)

    def _spread(self, name: str, kind: TensorType) -> Buffer:
        """Return a plain tensor; a constant is repeated until it has the shape of `kind`."""
        if name not in self._memory.program.constants:
            return self._memory.plain(name)
        value = np.broadcast_to(self._memory.program.constants[name], kind.shape)
        return Buffer(kind, "plain", None, Space.WEIGHTS, constant=value)

    def deliver(self, index: int, name: str) -> None:
        """Make output `index` of the model hold the tensor: let its producer write there, or copy it at the end."""
        home = self._memory.home(name)
        if self._can_move_out(home):
            home.space, home.index = Space.OUTPUT, index
            return
        kind = self._memory.program.type(name)
        target = Buffer(kind, "plain", geometry_of(kind), Space.OUTPUT, index)
        if home.layout == "blocked" and home.image:
            self._memory.steps.append(Step(f"{name}:unpack", "Unpack", unpack_spec(home.image), (home,), target))
        else:
            spec = ElementwiseSpec("copy", datatype(name, kind), math.prod(kind.shape))
            self._memory.steps.append(Step(f"{name}:copy", "Copy", spec, (self._memory.plain(name),), target))

    def _can_move_out(self, home: Buffer) -> bool:
        """Whether a tensor, or its parts, can be computed in an output: plain, without surplus, and read by nobody."""
        written = [step.output for step in self._memory.steps if step.output.is_in(home)]
        read = any(buffer.is_in(home) for step in self._memory.steps for buffer in step.inputs)
        plain = home.layout == "plain" or (home.is_vector and not home.surplus(self._memory.lanes))
        return bool(written) and home.space == Space.ARENA and not home.parent and plain and not read


def _settle_halos(steps: list[Step]) -> None:
    """Give each buffer the largest halo that a reader needs, of itself or of another part of the same tensor."""
    for step in steps:
        if isinstance(step.spec, ConvSpec):
            whole = step.inputs[0].root
            whole.halo = max(whole.halo, *step.spec.pads)
    for step in steps:
        for buffer in (*step.inputs, step.output):
            buffer.settle_part()


def _with_halos(step: Step) -> Step:
    halos = [buffer.halo for buffer in step.inputs]
    match step.spec:
        case ConvSpec() as spec:
            residual = halos[1] if spec.residual else 0
            return replace(
                step,
                spec=replace(spec, input_halo=halos[0], residual_halo=residual, output_halo=step.output.halo),
            )
        case PoolSpec() as spec:
            return replace(step, spec=replace(spec, input_halo=halos[0], output_halo=step.output.halo))
        case GlobalPoolSpec() | UnpackSpec() as spec:
            return replace(step, spec=replace(spec, input_halo=halos[0]))
        case PackSpec() as spec:
            return replace(step, spec=replace(spec, output_halo=step.output.halo))
        case BlockedElementwiseSpec() as spec:
            return replace(step, spec=replace(spec, input_halos=tuple(halos), output_halo=step.output.halo))
    return step
