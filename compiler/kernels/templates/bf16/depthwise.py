"""A convolution and the depthwise one after it, the first of them in bfloat16, by tiles of AMX or by vectors.

Tasks are those of the template for float32: lines of the first convolution exist in scratch memory only, as float32.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import ConvDepthwiseSpec, KernelPlan, PackedWeights, RawWeights
from gangway.compiler.kernels.templates import depthwise
from gangway.compiler.kernels.templates.amx.tiles import WORDS, begin_tiles, end_tiles
from gangway.compiler.kernels.templates.bf16 import convolution, work
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.bf16.convolution import Bf16Writer, Tiles, Vectors
from gangway.compiler.kernels.templates.bf16.work import LANES, Bf16Work
from gangway.compiler.kernels.templates.builder import Buffer, Expr, scratch, store
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.tiling import Tasks, UnsupportedSpecError


def computes(spec: ConvDepthwiseSpec, target: TargetSpec) -> bool:
    """Whether this template has a kernel for a pair."""
    return work.computes(spec.conv, target)


def is_faster(spec: ConvDepthwiseSpec, target: TargetSpec) -> bool:
    """Whether a pair has a kernel in bfloat16 that is faster than that in float32.

    By vectors, rounding a planar image line by line takes as long as is gained.
    """
    return computes(spec, target) and (bf16.has_tiles(target) or not spec.conv.input_planar)


def candidates(spec: ConvDepthwiseSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The plans of the template for float32. Raises `UnsupportedSpecError`."""
    if not computes(spec, target):
        raise UnsupportedSpecError(f"pair in bfloat16: {spec}")
    kind = "tiles" if bf16.has_tiles(target) else "vectors"
    for plan in depthwise.pair_candidates(spec, target):
        text = plan.description.replace("conv ", f"conv bf16 {kind} ")
        yield replace(plan, description=text)


def pack(spec: ConvDepthwiseSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights and bias of both, as each has them alone."""
    second = {"weights": raw["depthwise_weights"], "bias": raw["depthwise_bias"]}
    return (*convolution.pack(spec.conv, target, raw), *depthwise.pack(spec.depthwise, target, second))


def emit(spec: ConvDepthwiseSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, depthwise weights, depthwise bias, y."""
    conv = spec.conv
    weights = Bf16Work(conv, target, 1, conv.output_size[1]).weights
    lines = _TileLines if bf16.has_tiles(target) else _VectorLines
    return depthwise.pair_kernel(spec, plan, target, symbol, lines, weights, bf16.functions(target))


class _VectorLines(depthwise.Lines):
    """Writes the code for some lines of one group of channel blocks."""

    def _convolve_first(self, row: Expr, places: list[Expr]) -> None:
        _LineVectors(self._line_work, self._first, row).write(self._group, self._blocks, self._scratch, places)

    @property
    def _line_work(self) -> Bf16Work:
        conv = self._work.spec.conv
        return Bf16Work(conv, self._work.target, 1, conv.output_size[1])


class _TileLines(_VectorLines):
    """The same by tiles of AMX."""

    def write(self, first: Expr, tasks: Tasks) -> None:
        """The lines of y of a task, from line `first` on."""
        begin_tiles(scratch(WORDS, "int32"))
        super().write(first, tasks)
        end_tiles()

    def _convolve_first(self, row: Expr, places: list[Expr]) -> None:
        _LineTiles(self._line_work, self._first, row).write(self._group, self._blocks, self._scratch, places)


class _Line(Bf16Writer):
    """Writes the code for a line of the first convolution."""

    def write(self, group: Expr, blocks: int, line: Buffer, places: list[Expr]) -> None:
        """Fill the place of each block in `line`."""
        self._line, self._places = line, places
        self.patch.fill()
        self.blocks(group, blocks)

    def _store(self, values: list[Expr], first: Expr, row: Expr, column: Expr) -> None:
        for value, place in zip(values, self._places, strict=True):
            number = activate(value, self._work.spec.activation, LANES)
            store(self._line, place + column * LANES, number, LANES)


class _LineVectors(_Line, Vectors):
    """By register tiles."""


class _LineTiles(_Line, Tiles):
    """By tiles of AMX."""

    def blocks(self, group: Expr, blocks: int) -> None:
        """All outputs of a group of channel blocks."""
        self.make_sums()
        super().blocks(group, blocks)
