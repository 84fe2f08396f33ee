"""Products of matrices that are both computed at run time.

Columns are cut into panels a few vectors wide. A panel of B is packed into local memory once, then multiplied by tile
after tile of A's rows, whose numbers are read where they lie. If there are very few columns, y' = B' A' is computed.
Very few rows with columns that are contiguous need no panels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import KernelPlan, MatMulSpec
from gangway.compiler.templates.base import FLOAT_BYTES, UnsupportedSpecError, knob, make_plan
from gangway.compiler.templates.builder import Argument, Buffer, Expr, bind, either, kernel, quotient, remainder
from gangway.compiler.templates.cost import Traffic, tasks_cost
from gangway.compiler.templates.matmul_dots import Dots
from gangway.compiler.templates.matmul_panel import Matrix, Panel
from gangway.compiler.templates.product import most_numbers
from gangway.compiler.templates.spread import Priced, spread
from gangway.compiler.templates.tiling import Cut, Tasks, all_tasks, cut_line

PANEL_VECTORS = 4  # the wider, the less often A is read
TILE_VECTORS = 2
FEW_ROWS = 3  # for so few rows tiles as wide as panels: more sums hide the latency of multiply-adds
PACKING_OPERATIONS = 16  # moving a number into a panel takes as long as so many operations, at most
MOST_ELEMENTS = 1 << 31


@dataclass(frozen=True)
class Layout:
    """How a product is computed: whether transposed, its panels, its tiles of rows."""

    spec: MatMulSpec
    target: TargetSpec

    @cached_property
    def swapped(self) -> bool:
        """Whether vectors run along A's rows."""
        return self.spec.columns < min(self.spec.rows, self.target.lanes)

    @cached_property
    def rows(self) -> int:
        """Rows of what is computed."""
        return self.spec.columns if self.swapped else self.spec.rows

    @cached_property
    def columns(self) -> int:
        """Columns of what is computed."""
        return self.spec.rows if self.swapped else self.spec.columns

    @cached_property
    def operands(self) -> tuple[Matrix, Matrix, Matrix]:
        """A, B and y of the spec."""
        spec, batch_strides, stride = self.spec, [], self.spec.rows * self.spec.columns
        for length in reversed(spec.batch_shape):
            batch_strides.append(stride)
            stride *= length
        a = Matrix(*spec.a_strides, spec.a_batch_strides)
        b = Matrix(*spec.b_strides, spec.b_batch_strides)
        return a, b, Matrix(spec.columns, 1, tuple(reversed(batch_strides)))

    @cached_property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        """A, B and y of what is computed."""
        a, b, y = self.operands
        return (b.transposed, a.transposed, y.transposed) if self.swapped else (a, b, y)

    @cached_property
    def dots(self) -> bool:
        """Whether sums run along vectors: packing so much for so few rows would take most of the time."""
        a, b, _ = self.matrices
        contiguous = (a.column, b.row) == (1, 1) and b.column != 1
        return contiguous and self.rows <= FEW_ROWS and self.spec.inner >= 2 * self.target.lanes

    @cached_property
    def vectors(self) -> int:
        """Vectors of a whole panel."""
        return min(PANEL_VECTORS, -(-self.columns // self.target.lanes))

    @cached_property
    def tile_vectors(self) -> int:
        """Vectors of a register tile."""
        return min(self.vectors, PANEL_VECTORS if self.rows <= FEW_ROWS else TILE_VECTORS)

    @cached_property
    def width(self) -> int:
        """Columns of a whole panel."""
        return self.vectors * self.target.lanes

    @cached_property
    def panels(self) -> int:
        """Number of panels of one product, the partial one included."""
        return -(-self.columns // self.width)

    @cached_property
    def cut(self) -> Cut:
        """Rows cut into tiles."""
        return cut_line(self.rows, most_numbers(self.target, self.tile_vectors))

    @cached_property
    def batches(self) -> int:
        """Number of products."""
        return math.prod(self.spec.batch_shape)

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Numbers behind each pointer of the kernel."""
        spec = self.spec
        shapes = (spec.rows, spec.inner), (spec.inner, spec.columns), (spec.rows, spec.columns)
        pairs = zip(self.operands, shapes, strict=True)
        return tuple(matrix.reach(shape, spec.batch_shape) for matrix, shape in pairs)


def candidates(spec: MatMulSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The default plan, then other cuts into tasks. Raises `UnsupportedSpecError`."""
    layout = Layout(spec, target)
    if not spec.flops or max(layout.elements) >= MOST_ELEMENTS:
        raise UnsupportedSpecError(f"product of {spec.batch_shape} matrices {spec.rows}x{spec.inner}x{spec.columns}")
    priced = list(_priced(layout))
    static = min(priced, key=lambda item: item[0])
    yield static[1]
    yield from spread(static, priced)


def _priced(layout: Layout) -> Iterator[Priced]:
    """Every plan; each part of the rows packs all of B again."""
    spec = layout.spec
    b_numbers, a_numbers = (layout.batches * spec.inner * n for n in (layout.columns, layout.rows))
    traffic = Traffic(b_numbers * FLOAT_BYTES, a_numbers * FLOAT_BYTES, layout.elements[2] * FLOAT_BYTES)
    packing = 0 if layout.dots else layout.batches * spec.inner * layout.panels * layout.width * PACKING_OPERATIONS
    for tasks in all_tasks(layout.batches * layout.panels, layout.cut.bands):
        if tasks.ordered:
            cost = tasks_cost(tasks, spec.flops + packing * tasks.parts, traffic, layout.target)
            yield cost, _plan(layout, tasks, traffic)


def _plan(layout: Layout, tasks: Tasks, traffic: Traffic) -> KernelPlan:
    knobs: dict[str, int | str] = {
        "panels": tasks.groups_per_task,
        "bands": tasks.bands_per_task,
        "pixels_first": int(tasks.pixels_first),
    }
    kind = "dots" if layout.dots else "matmul"
    text = f"{kind} {layout.cut.row_pixels}x{layout.tile_vectors} {tasks.groups_per_task}x{tasks.bands_per_task}"
    moved = int((traffic.weights + traffic.input) * tasks.largest_share)
    return make_plan(layout.spec, knobs, tasks.count, text, moved, layout.cut.row_pixels * layout.tile_vectors)


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: a, b, y."""
    spec = plan.spec
    assert isinstance(spec, MatMulSpec)
    layout = Layout(spec, target)
    planes = layout.batches * layout.panels
    tasks = Tasks(planes, layout.cut.bands, knob(plan, "panels"), knob(plan, "bands"), bool(knob(plan, "pixels_first")))
    full, rest = divmod(layout.columns, layout.width)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        first, second, y = buffers
        operands = (second, first, y) if layout.swapped else buffers

        def panel(plane: Expr, first_band: Expr) -> None:
            batch, index = quotient(plane, layout.panels), remainder(plane, layout.panels)
            origins = [bind(matrix.origin(batch, spec.batch_shape)) for matrix in layout.matrices]

            def write(columns: int) -> None:
                first = index * layout.width
                if layout.dots:
                    Dots(spec, target, layout.matrices, operands, origins, layout.rows).write(first, columns)
                    return
                writer = Panel(spec, target, layout.matrices, operands, origins, first, columns)
                writer.write(layout.cut, layout.tile_vectors, first_band, tasks.bands_per_task)

            if not full:
                write(rest)
            else:
                either(index < full if rest else True, lambda: write(layout.width), lambda: write(rest))

        tasks.each_group(number, panel)

    return kernel(symbol, [Argument(*pair) for pair in zip("aby", layout.elements, strict=True)], task)
