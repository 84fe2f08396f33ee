"""A convolution and the depthwise one after it, the first of them by tiles of AMX.

Tasks are those of the template for float32: lines of the first convolution exist in scratch memory only, as float32.
"""

from collections.abc import Iterator
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import ConvDepthwiseSpec, KernelPlan, PackedWeights, RawWeights
from gangway.compiler.kernels.templates import depthwise
from gangway.compiler.kernels.templates.amx.tiles import WORDS, begin_tiles, end_tiles
from gangway.compiler.kernels.templates.bf16 import convolution, work
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.bf16.convolution import Tiles
from gangway.compiler.kernels.templates.bf16.work import LANES, Work
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, scratch, store
from gangway.compiler.kernels.templates.float32_math import activate
from gangway.compiler.kernels.templates.tiling import Tasks, UnsupportedSpecError


def computes(spec: ConvDepthwiseSpec, target: TargetSpec) -> bool:
    """Whether this template has a kernel for a pair."""
    return bf16.has_tiles(target) and work.computes(spec.conv, target)


def candidates(spec: ConvDepthwiseSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The plans of the template for float32, with tiles. Raises `UnsupportedSpecError`."""
    if not computes(spec, target):
        raise UnsupportedSpecError(f"pair in bfloat16: {spec}")
    for plan in depthwise.pair_candidates(spec, target):
        text = plan.description.replace("conv ", "conv bf16 tiles ")
        yield KernelPlan(spec, plan.knobs, plan.tasks, text, plan.blocking_bytes, plan.parallelism)


def pack(spec: ConvDepthwiseSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """Weights and bias of both, as each has them alone."""
    second = {"weights": raw["depthwise_weights"], "bias": raw["depthwise_bias"]}
    return (*convolution.pack(spec.conv, target, raw), *depthwise.pack(spec.depthwise, target, second))


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, weights, bias, depthwise weights, depthwise bias, y."""
    assert isinstance(plan.spec, ConvDepthwiseSpec)
    geometry = depthwise.Work(plan.spec, target).geometry
    weights = Argument("weights", Work(geometry, 1, geometry.output.width).weight_words, "int32")
    return depthwise.pair_kernel(plan, target, symbol, _TileLines, weights, bf16.functions(target))


class _TileLines(depthwise.Lines):
    """Writes the code for some lines of one group of channel blocks."""

    def write(self, first: Expr, tasks: Tasks) -> None:
        """The lines of y of a task, from line `first` on."""
        begin_tiles(scratch(WORDS, "int32"))
        super().write(first, tasks)
        end_tiles()

    def _convolve_first(self, row: Expr, places: list[Expr]) -> None:
        geometry = self._work.geometry
        tiles = _LineTiles(Work(geometry, 1, geometry.output.width), self._first, row)
        tiles.write(self._group, self._blocks, self._scratch, places)


class _LineTiles(Tiles):
    """Writes the code for a line of the first convolution."""

    def write(self, group: Expr, blocks: int, line: Buffer, places: list[Expr]) -> None:
        """Fill the place of each block in `line`."""
        self._line, self._places = line, places
        self.patch.fill()
        self.make_sums()
        self.group(group, blocks)

    def _store(self, values: list[Expr], first: Expr, row: Expr, column: Expr) -> None:
        for value, place in zip(values, self._places, strict=True):
            number = activate(value, self._work.spec.activation, LANES)
            store(self._line, place + column * LANES, number, LANES)
