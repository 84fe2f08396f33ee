"""Steps on 8-bit numbers in the place of those on float32 ones, where the model says what integers its tensors hold.

A tensor is quantised if the layer that computes it ends with a pair of QuantizeLinear and DequantizeLinear, or only
moves such numbers. If kernels can, its home is a tensor of bytes; float32 numbers are made of it once something else
reads them. What is a function of the numbers of one such tensor is a table of 256 bytes, whatever layers it comes from.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np

from gangway.artifact.format import MemorySpace, TargetSpec
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.int8_specs import Int8HaloSpec, Int8TableSpec
from gangway.compiler.kernels.plain_specs import (
    CopySpec,
    GatherSpec,
    PlainPoolSpec,
    PointwiseSpec,
    ReduceSpec,
    contiguous,
)
from gangway.compiler.kernels.specs import (
    NONE,
    PIXELS_CHANNELS,
    Array,
    BlockedElementwiseSpec,
    ConvSpec,
    GlobalPoolSpec,
    KernelSpec,
    Layout,
    PackSpec,
    PoolSpec,
    RawWeights,
    SequencePackSpec,
    UnpackSpec,
)
from gangway.compiler.kernels.templates import winograd
from gangway.compiler.kernels.templates.elementwise import combined
from gangway.compiler.kernels.templates.int8 import depthwise as int8_depthwise
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.kernels.templates.int8 import work as int8_work
from gangway.compiler.place.dynamic_int8 import DynamicProducts, in_integers, rounds
from gangway.compiler.place.integers import (
    MOST,
    STEPS,
    Quantisation,
    activated,
    integer_bias,
    integer_weights,
    quantisation,
)
from gangway.compiler.place.memory import Buffer, PlacedLayer, copied

LEAST_VECTOR_WEIGHTS = 1 << 13  # of a layer of one pixel: below, steps between bytes and float32 take longer
MOST_SUM = (1 << 31) - 1
MOST_LOST = 0.15  # of the time of products in float32: more is not gained by others in integers
NO_INTEGERS = "float32, since the processor has no AVX2"
_MOVES = PackSpec | SequencePackSpec
_DROPPABLE = _MOVES | UnpackSpec | PointwiseSpec | ReduceSpec | BlockedElementwiseSpec | Int8TableSpec


def with_int8(steps: Sequence[PlacedLayer], target: TargetSpec) -> list[PlacedLayer]:
    """Return equivalent steps, before halos are settled; the same ones if the target has no instructions for it."""
    if not int8.multiplies(target) or not any(_quantises(step) or rounds(step) for step in steps):
        return list(steps)
    found = _rewritten(steps, target, frozenset())
    if kept := _slower(steps, found, target):
        found = _rewritten(steps, target, kept)
    return _needed(found)


def _rewritten(steps: Sequence[PlacedLayer], target: TargetSpec, kept: frozenset[str]) -> list[PlacedLayer]:
    """Return equivalent steps; convolutions called `kept` stay float32."""
    rewriting = _Rewriting(steps, target, kept)
    for step in steps:
        rewriting.add(step)
    return rewriting.steps


def _slower(before: Sequence[PlacedLayer], after: Sequence[PlacedLayer], target: TargetSpec) -> frozenset[str]:
    """Return the convolutions that take longer in integers, if that is much of the model's time.

    Without VNNI 3x3 convolutions may: Winograd's algorithm has fewer products, of float32 numbers.
    """
    if int8.has_words(target):
        return frozenset()
    floats = {step.name: step.spec for step in before if isinstance(step.spec, ConvSpec) and step.spec.groups == 1}
    times_us = {name: winograd.least_us(spec, target) for name, spec in floats.items()}
    lost_us = {
        step.name: int8_work.least_us(step.spec, target) - times_us[step.name]
        for step in after
        if _is_int8(step.spec) and step.name in floats and winograd.best_work(floats[step.name], target)
    }
    slower = frozenset(name for name, lost in lost_us.items() if lost > 0)
    much = sum(lost_us[name] for name in slower) > MOST_LOST * sum(times_us.values())
    return slower if much else frozenset()


def integers_of(steps: Sequence[PlacedLayer], target: TargetSpec) -> str:
    """Return what multiplies a model's 8-bit numbers, for people; empty if it has none."""
    if any(_is_int8(step.spec) for step in steps):
        return int8.name_of(target)
    quantised = any(_quantises(step) or rounds(step) for step in steps)
    return NO_INTEGERS if quantised and not int8.multiplies(target) else ""


def with_filled_halos(steps: Sequence[PlacedLayer]) -> list[PlacedLayer]:
    """Return the steps, and those that write zero points into halos; zeros are there already."""
    result = []
    for step in steps:
        result.append(step)
        output = step.output
        if output.layout == "bytes" and output.halo and output.zero and not isinstance(step.spec, PackSpec):
            assert output.image is not None
            image = output.image
            spec = Int8HaloSpec(image.channels, image.height, image.width, output.halo)
            raw = {"zero": np.array([output.zero], np.uint8)}
            result.append(PlacedLayer(f"{step.name}:halo", "Halo", spec, (), output, raw))
    return result


def _is_int8(spec: KernelSpec) -> TypeGuard[ConvSpec]:
    return isinstance(spec, ConvSpec) and spec.precision == "int8"


def _quantises(step: PlacedLayer) -> bool:
    return _result(step.spec) is not None


def _result(spec: KernelSpec) -> Quantisation | None:
    """What integers a kernel's results are, if they are."""
    if isinstance(spec, ConvSpec | BlockedElementwiseSpec):
        return quantisation(spec.activation.name, (spec.activation.alpha, spec.activation.beta))
    if isinstance(spec, PointwiseSpec) and spec.program[-1].parameters:
        return quantisation(spec.program[-1].operator, spec.program[-1].parameters)
    return None


def _moves(spec: KernelSpec) -> bool:
    """Whether a kernel's results are numbers of its first input."""
    if isinstance(spec, PoolSpec | PlainPoolSpec):
        return (spec if isinstance(spec, PoolSpec) else spec.pool).mode == "max"
    return isinstance(spec, _MOVES | UnpackSpec | CopySpec | GatherSpec)


def _needed(steps: Sequence[PlacedLayer]) -> list[PlacedLayer]:
    """Return the steps whose results are read, or belong to the outputs."""
    read: set[Buffer] = set()
    kept = []
    for step in reversed(steps):
        pool = isinstance(step.spec, PoolSpec) and step.spec.has("bytes")
        free = (pool or isinstance(step.spec, _DROPPABLE)) and not step.checks and not step.more
        if free and step.output.root.space == MemorySpace.ARENA and step.output.root not in read:
            continue
        kept.append(step)
        read.update(buffer.root for buffer in step.inputs)
    return kept[::-1]


@dataclass(frozen=True)
class _Table:
    """What a tensor is of the bytes of another one, in float32."""

    root: Buffer
    values: Array


class _Rewriting:
    """The steps so far, and where tensors are. Buffers are those of the steps that are replaced."""

    def __init__(self, steps: Sequence[PlacedLayer], target: TargetSpec, kept: frozenset[str]) -> None:
        self.steps: list[PlacedLayer] = []
        self._kept = kept
        self._target = target
        self._found: dict[Buffer, Quantisation] = {}
        self._bytes: dict[Buffer, Buffer] = {}
        self._tables: dict[Buffer, _Table] = {}
        self._missing: dict[Buffer, PlacedLayer] = {}  # float32 tensors that are not computed, and what would do it
        self._writers = {step.output: step for step in steps}
        self._packed: dict[tuple[Buffer, Layout], Buffer] = {}
        self._weights: dict[int, tuple[Array, tuple[Array, Array] | None]] = {}
        self._dynamic = DynamicProducts(self._writers, self.steps.append, self._floats, target)
        self._readers: dict[Buffer, list[PlacedLayer]] = defaultdict(list)
        for step in steps:
            for buffer in step.inputs:
                self._readers[buffer.root].append(step)

    def add(self, step: PlacedLayer) -> None:
        """The next step, or what replaces it."""
        if result := _result(step.spec):
            self._found[step.output] = result
        elif _moves(step.spec) and (moved := self._rounding(step.inputs[0])):
            self._found[step.output] = moved
        match step.spec:
            case ConvSpec() if step.name not in self._kept and (
                self._dynamic.add(step, step.spec) or self._convolution(step, step.spec)
            ):
                return
            case BlockedElementwiseSpec() if self._elementwise(step, step.spec):
                return
            case PoolSpec() if self._pool(step, step.spec):
                return
            case GlobalPoolSpec() if self._global_pool(step, step.spec):
                return
        self._keep(step)

    def _rounding(self, buffer: Buffer | None) -> Quantisation | None:
        """What integers a tensor's numbers are, or those that it is a part of."""
        while buffer is not None and buffer not in self._found:
            buffer = buffer.parent
        return None if buffer is None else self._found[buffer]

    def _keep(self, step: PlacedLayer) -> None:
        for buffer in step.inputs:
            self._floats(buffer)
        self.steps.append(step)

    def _floats(self, buffer: Buffer) -> Buffer:
        """The tensor itself, computed by now."""
        step = self._missing.pop(buffer.root, None)
        if step is None:
            return buffer
        if buffer.root not in self._bytes:
            self._keep(step)
            return buffer
        self._dequantise(step)
        return buffer

    def _stored(self, buffer: Buffer) -> Buffer | None:
        """The tensor in bytes, if it is quantised."""
        if buffer in self._bytes:
            return self._bytes[buffer]
        if buffer not in self._found or buffer.layout != "blocked" or buffer.image is None or buffer.parent:
            return None
        name, result = f"{self._writers[buffer].name}:bytes", self._found[buffer]
        if table := self._tables.get(buffer):
            source, found = self._bytes[table.root], result.quantise(table.values)
            if np.array_equal(found, np.arange(STEPS)):
                self._bytes[buffer] = source
                return source
            image = buffer.image
            self._bytes[buffer] = _bytes_of(buffer, result)
            table_spec = Int8TableSpec(image.channels, image.height, image.width)
            operator = self._writers[buffer].operator
            self.steps.append(PlacedLayer(name, operator, table_spec, (source,), self._bytes[buffer], {"table": found}))
            return self._bytes[buffer]
        spec = replace(copied(buffer.image), input_layouts=("blocked",), output_layout="bytes")
        self._bytes[buffer] = _bytes_of(buffer, result)
        self.steps.append(
            PlacedLayer(
                name, "Quantise", spec, (self._floats(buffer),), self._bytes[buffer], self._factors([None], result)
            )
        )
        return self._bytes[buffer]

    def _is_stored(self, buffer: Buffer) -> bool:
        """Whether a tensor is in bytes, or can be by a table."""
        return buffer in self._bytes or (buffer in self._tables and buffer in self._found)

    def _give(self, step: PlacedLayer, result: Quantisation) -> Buffer:
        """Memory of bytes for the result of a step, which float32 numbers are made of if they are needed."""
        output = step.output
        self._bytes[output], self._missing[output] = _bytes_of(output, result), step
        self._found[output] = result
        return self._bytes[output]

    def _finish(self, step: PlacedLayer) -> None:
        """Make float32 numbers at once of what is a part of something else, or an output."""
        if step.output.parent or step.output.space != MemorySpace.ARENA:
            del self._missing[step.output]
            self._dequantise(step)

    def _dequantise(self, step: PlacedLayer) -> None:
        output = step.output
        assert output.image is not None
        spec = replace(copied(output.image), input_layouts=("bytes",))
        factors = self._factors([self._found[output]], None)
        self.steps.append(
            PlacedLayer(f"{step.name}:float", "Dequantise", spec, (self._bytes[output],), output, factors)
        )

    def _convolution(self, step: PlacedLayer, spec: ConvSpec) -> bool:
        if spec.residual or not (spec.groups == 1 or spec.is_depthwise):
            return False
        source = step.inputs[0]
        pixels = spec.input_planar and spec.in_channels <= PIXELS_CHANNELS
        single = spec.height == spec.width == 1
        if single and spec.in_channels * spec.out_channels < LEAST_VECTOR_WEIGHTS:
            return False
        found = self._found.get(source)
        if found is None or (spec.input_planar and not pixels):
            return False
        result = self._found.get(step.output)
        if result is None and spec.activation.name not in ("none", "clip"):
            return False
        if result is None and spec.is_depthwise:
            return False
        raw = self._integers(step, spec, found, result)
        if raw is None:
            return False
        wanted = replace(spec, diagonal_blocks=1)
        if result:
            wanted = replace(wanted, output_layout="bytes", activation=NONE)
        new = in_integers(wanted, raw["weights"], pixels, self._target)
        x = self._input(source, pixels) if new else None
        if new is None or x is None:
            return False
        output = self._give(step, result) if result else step.output
        self.steps.append(replace(step, spec=new, inputs=(x,), weights=raw, output=output))
        if result:
            self._finish(step)
        return True

    def _integers(
        self, step: PlacedLayer, spec: ConvSpec, x: Quantisation, y: Quantisation | None
    ) -> RawWeights | None:
        """Integer weights, biases that count for the zero point of x, and factors of the sums."""
        weights = step.weights["weights"]
        if id(weights) not in self._weights:
            self._weights[id(weights)] = weights, integer_weights(weights)
        found = self._weights[id(weights)][1]
        if found is None:
            return None
        integers, scales = found
        steps = scales * np.float32(x.scale)  # rounded like onnxruntime's: it decides where a sum is half a step
        bias = integer_bias(step.weights["bias"], steps)
        if bias is None:
            return None
        sums = integers.reshape(len(integers), -1).astype(np.int64).sum(1)
        multiplier = steps if y is None else steps / np.float32(y.scale)
        products = integers[0].size * MOST * (STEPS - 1) + np.abs(bias).max(initial=0)
        if products > MOST_SUM or (y and products * multiplier.max() >= MOST_SUM):
            return None
        if spec.is_depthwise and products >= int8_depthwise.MOST_SUM:
            return None
        return {
            "weights": integers,
            "bias": (bias - x.zero * sums).astype(np.int32),
            "multiplier": multiplier,
            "zero": np.array([y.zero if y else 0], np.float32),
        }

    def _input(self, buffer: Buffer, pixels: bool) -> Buffer | None:
        """An input of a convolution in bytes, or in pixels."""
        if not pixels and self._is_stored(buffer):
            return self._stored(buffer)
        plain = self._plain(buffer)
        if plain is not None:
            return self._pack(plain, buffer, "pixels" if pixels else "bytes")
        return None if pixels else self._stored(buffer)

    def _plain(self, buffer: Buffer) -> Buffer | None:
        """The plain tensor, of float32 numbers, that a buffer holds in another layout or is."""
        writer = self._writers.get(buffer)
        if writer and isinstance(writer.spec, PackSpec):
            return writer.inputs[0]
        return buffer if buffer.layout == "plain" else None

    def _pack(self, plain: Buffer, buffer: Buffer, layout: Layout) -> Buffer | None:
        if (plain, layout) in self._packed:
            return self._packed[plain, layout]
        image, result = buffer.image, self._rounding(plain)
        if image is None or result is None or (image.channels_last and not image.is_vector):
            return None
        source, writer = self._floats(plain), self._writers.get(plain)
        if writer and isinstance(writer.spec, PointwiseSpec) and _only_quantises(writer.spec):
            source = self._floats(writer.inputs[0])
        packed = _bytes_of(buffer, result, layout)
        factors = np.array([result.scale, *result.limits], np.float32)
        spec = PackSpec(image.channels, image.height, image.width, layout)
        name = f"{writer.name if writer else f'part{len(self._packed)}'}:{layout}"
        self.steps.append(PlacedLayer(name, "Quantise", spec, (source,), packed, {"factors": factors}))
        self._packed[plain, layout] = packed
        return packed

    def _elementwise(self, step: PlacedLayer, spec: BlockedElementwiseSpec) -> bool:
        if self._tabulate(step, spec):
            return True
        result, output = self._found.get(step.output), step.output
        stored = [
            self._is_stored(buffer) and not vector for buffer, vector in zip(step.inputs, spec.vectors, strict=True)
        ]
        if output.image is None or output.is_vector or output.parent or output.space != MemorySpace.ARENA:
            return False
        if not any(stored) and not (result and self._is_wanted(output)):
            return False
        if result is None and spec.activation.name not in ("none", "clip"):
            return False
        integers = all(known or vector for known, vector in zip(stored, spec.vectors, strict=True))
        if result is not None and not self._is_wanted(output) and not integers:
            return False
        inputs = [
            self._stored(buffer) if known else self._floats(buffer)
            for buffer, known in zip(step.inputs, stored, strict=True)
        ]
        if any(buffer is None or (buffer.layout == "plain" and not buffer.is_vector) for buffer in inputs):
            return False
        known = [self._found[buffer] if here else None for buffer, here in zip(step.inputs, stored, strict=True)]
        layouts: tuple[Layout, ...] = tuple("bytes" if here else "blocked" for here in stored)
        new = replace(spec, input_layouts=layouts)
        if result:
            new = replace(new, output_layout="bytes", activation=NONE)
        into = self._give(step, result) if result else output
        self.steps.append(
            replace(
                step,
                spec=new,
                inputs=tuple(filter(None, inputs)),
                output=into,
                weights=self._steps_factors(known, result) if new.in_steps else self._factors(known, result),
            )
        )
        return True

    def _tabulate(self, step: PlacedLayer, spec: BlockedElementwiseSpec) -> bool:
        """Remember a step as a table of bytes, if it is one."""
        roots, values = set[Buffer](), list[Array]()
        if step.output.parent or step.output.space != MemorySpace.ARENA:
            return False
        for buffer in step.inputs:
            if buffer.constant is not None:
                number = buffer.constant.reshape(-1)[0]
                channels = 1 if buffer.image is None else buffer.image.channels
                if not np.all(buffer.constant.reshape(-1)[:channels] == number):
                    return False
                values.append(np.full(STEPS, number, np.float32))
            elif table := self._tables.get(buffer):
                roots.add(table.root)
                values.append(table.values)
            elif buffer in self._bytes:
                roots.add(buffer)
                values.append(self._found[buffer].values)
            else:
                return False
        value = None
        if len(roots) == 1:
            with np.errstate(all="ignore"):
                value = activated(spec.activation, combined(spec.operator, values))
        if value is None:
            return False
        self._tables[step.output] = _Table(roots.pop(), value)
        self._missing[step.output] = step
        return True

    def _is_wanted(self, buffer: Buffer) -> bool:
        """Whether something reads bytes."""
        return any(
            isinstance(step.spec, ConvSpec | PoolSpec | GlobalPoolSpec)
            or (isinstance(step.spec, BlockedElementwiseSpec) and _result(step.spec) is not None)
            for step in self._readers[buffer]
        )

    def _pool(self, step: PlacedLayer, spec: PoolSpec) -> bool:
        source = step.inputs[0]
        if spec.mode != "max" or not self._is_stored(source):
            return False
        x = self._stored(source)
        if x is None:
            return False
        into = self._give(step, self._found[source])
        new = replace(spec, input_layout="bytes", output_layout="bytes")
        self.steps.append(replace(step, spec=new, inputs=(x,), output=into))
        self._finish(step)
        return True

    def _global_pool(self, step: PlacedLayer, spec: GlobalPoolSpec) -> bool:
        source = step.inputs[0]
        if spec.mode != "average" or not self._is_stored(source):
            return False
        x, found = self._stored(source), self._found[source]
        if x is None:
            return False
        factors = np.array([found.scale / (spec.height * spec.width), -found.zero * found.scale], np.float32)
        new = replace(spec, input_layout="bytes")
        self.steps.append(replace(step, spec=new, inputs=(x,), weights={"factors": factors}))
        return True

    def _steps_factors(self, inputs: Sequence[Quantisation | None], output: Quantisation | None) -> RawWeights:
        """The same in steps of the output's scale."""
        assert output is not None
        scales = [found.scale / output.scale for found in inputs if found]
        shift = -sum(found.zero * scale for found, scale in zip(filter(None, inputs), scales, strict=True))
        numbers = [number for scale in scales for number in (scale, shift)]
        return {"factors": np.array([*numbers, 1.0, output.zero], np.float32)}

    def _factors(self, inputs: Sequence[Quantisation | None], output: Quantisation | None) -> RawWeights:
        numbers = [
            number for found in inputs for number in ((found.scale, -found.zero * found.scale) if found else (1.0, 0.0))
        ]
        numbers += [1 / output.scale, output.zero] if output else [1.0, 0.0]
        return {"factors": np.array(numbers, np.float32)}


def _bytes_of(buffer: Buffer, result: Quantisation, layout: Layout = "bytes") -> Buffer:
    """New memory for a tensor in bytes or pixels."""
    return Buffer(TensorType(buffer.kind.shape, "uint8"), layout, buffer.image, zero=result.zero)


def _only_quantises(spec: PointwiseSpec) -> bool:
    """Whether a kernel rounds the numbers of one tensor, in their order, and nothing else."""
    quantises = all(quantisation(item.operator, item.parameters or (0, 0)) for item in spec.program)
    same = len({item.parameters for item in spec.program}) == 1
    (first, *others) = spec.operands
    in_order = first.dtype == "float32" and _ordered(first.strides, spec.shape)
    return quantises and same and in_order and not others


def _ordered(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    wanted = contiguous(shape)
    return all(a == b for a, b, length in zip(strides, wanted, shape, strict=True) if length > 1)
