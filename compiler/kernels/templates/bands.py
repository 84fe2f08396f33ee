"""Convolutions of numbers other than float32, cut into bands: what those in bfloat16 and of 8 bits have in common.

A task computes a *band* of the output for some groups of channel blocks: some rows or, of an image without gaps between
pixels, some pixels. `bf16/` and `int8/` say what a word holds, which instructions multiply words, what that costs, and
what becomes of sums. No search, no measurement: a static cost model chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import ConvSpec, KernelPlan
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr
from gangway.compiler.kernels.templates.tiling import BandCut, Tasks, cut_line, cut_rows, is_line, knob, make_plan


@dataclass(frozen=True)
class Bands:
    """A convolution, cut into bands of `rows` rows and `columns`; an image without gaps is one row."""

    spec: ConvSpec
    target: TargetSpec
    rows: int
    columns: int

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width of the output, 1 of an image that is one row."""
        height, width = self.spec.output_size
        return (1, height * width) if self.is_line else (height, width)

    @cached_property
    def is_line(self) -> bool:
        """Whether the image is one row."""
        return is_line(self.spec)

    @cached_property
    def column_bands(self) -> int:
        """How many bands are beside each other; the last one may overlap the one before it."""
        return -(-self.size[1] // self.columns)

    @cached_property
    def bands(self) -> int:
        """How many there are; the last ones may overlap those before them."""
        return -(-self.size[0] // self.rows) * self.column_bands

    def cut_into(self, tile_pixels: int) -> BandCut:
        """A band in register tiles of at most so many pixels."""
        return cut_line(self.columns, tile_pixels) if self.is_line else cut_rows(self.rows, self.columns, tile_pixels)

    def plan(self, tasks: Tasks, kind: str, blocks: int, blocking_bytes: int, sums: int) -> KernelPlan:
        """The plan with these tasks; `kind`: what multiplies; `blocks`: channel blocks of a group."""
        knobs: dict[str, int | str] = {"rows": self.rows, "columns": self.columns, "groups": tasks.groups_per_task}
        text = f"conv {kind} {self.rows}x{self.columns} pixels, {tasks.groups_per_task}x{blocks} blocks"
        return make_plan(self.spec, knobs, tasks.count, text, blocking_bytes, sums)


class BandWriter:
    """Writes the code for a band. `buffers`: by the names of arguments."""

    def __init__(self, work: Bands, buffers: Mapping[str, Buffer], band: Expr) -> None:
        self._buffers, self._weights, self._y = buffers, buffers["weights"], buffers["y"]
        (height, width), beside = work.size, work.column_bands
        self._row: Expr = 0
        self._column: Expr = 0
        if not work.is_line:
            self._row = T.bind(T.at_most(T.quotient(band, beside) * work.rows, height - work.rows))
        if work.is_line or beside > 1:
            across = band if work.is_line else T.remainder(band, beside)
            self._column = T.bind(T.at_most(across * work.columns, width - work.columns))

    def begin(self) -> None:
        """What all groups of channel blocks need."""

    def group(self, group: Expr) -> None:
        """All outputs of a group of channel blocks."""
        raise NotImplementedError

    def end(self) -> None:
        """After all groups."""


def band_kernel(
    plan: KernelPlan,
    symbol: str,
    cut: tuple[int, int],
    writer: Callable[[Mapping[str, Buffer], Expr], BandWriter],
    arguments: Sequence[Argument],
    functions: str,
) -> Any:
    """The kernel of a plan that is `cut` into so many groups and bands; `functions`: see `builder.kernel`."""
    tasks = Tasks(*cut, knob(plan, "groups"), 1, pixels_first=False)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        chunk, band = tasks.first(number)
        named = {argument.name: buffer for argument, buffer in zip(arguments, buffers, strict=True)}
        one = writer(named, T.bind(band))
        one.begin()
        first = T.bind(chunk)
        T.repeat(T.at_most(tasks.groups_per_task, tasks.groups - first), lambda i: one.group(first + i))
        one.end()

    return T.kernel(symbol, arguments, task, functions)
