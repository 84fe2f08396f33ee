"""Products of very few rows with columns that are contiguous: sums along vectors, nothing is packed."""

from collections.abc import Sequence
from functools import partial

from gangway.artifact.format import TargetSpec
from gangway.compiler.specs import MatMulSpec
from gangway.compiler.templates.base import registers
from gangway.compiler.templates.builder import Buffer, Expr, Register, constant, lane_sum, lanes_at, repeat, store
from gangway.compiler.templates.matmul_panel import Matrix
from gangway.compiler.templates.product import unrolled
from gangway.compiler.templates.tiling import each_tile, segments


class Dots:
    """Writes the code for `columns` columns of a product from column `first`, and all of its rows."""

    def __init__(
        self,
        spec: MatMulSpec,
        target: TargetSpec,
        matrices: tuple[Matrix, Matrix, Matrix],
        buffers: tuple[Buffer, ...],
        origins: Sequence[Expr],
        rows: int,
    ):
        self._spec, self._lanes, self._rows = spec, target.lanes, rows
        self._a_matrix, self._b_matrix, self._y_matrix = matrices
        self._a, self._b, self._y = buffers
        self._a_origin, self._b_origin, self._y_origin = origins
        self._together = registers(target) // 4  # columns: with three rows their sums fill most registers

    def write(self, first: Expr, columns: int) -> None:
        """All tiles."""
        each_tile(segments(columns, self._together), partial(self._tile, first))

    def _tile(self, first: Expr, start: Expr, count: int) -> None:
        lanes, (whole, rest) = self._lanes, divmod(self._spec.inner, self._lanes)
        a_places = [self._a_origin + i * self._a_matrix.row for i in range(self._rows)]
        b_places = [self._b_origin + (first + start + j) * self._b_matrix.column for j in range(count)]
        wide = [[Register(lanes, constant(0.0, lanes)) for _ in b_places] for _ in a_places]
        single = [[Register(1, constant(0.0, 1)) for _ in b_places] for _ in a_places]

        def add(sums: list[list[Register]], k: Expr, width: int) -> None:
            columns = [self._b[lanes_at(place + k, width)] for place in b_places]
            for place, totals in zip(a_places, sums, strict=True):
                row = self._a[lanes_at(place + k, width)]
                for total, column in zip(totals, columns, strict=True):
                    total.add(row * column)

        unrolled(whole, lambda k: add(wide, k * lanes, lanes))
        if rest:
            repeat(rest, lambda k: add(single, whole * lanes + k, 1))
        for i, (totals, tails) in enumerate(zip(wide, single, strict=True)):
            for j, (total, tail) in enumerate(zip(totals, tails, strict=True)):
                place = self._y_origin + i * self._y_matrix.row + (first + start + j) * self._y_matrix.column
                value = lane_sum(total, lanes) + tail.value
                store(self._y, place, value * constant(self._spec.scale, 1), 1)
