"""Square matrices transposed in registers."""

from tvm import tirx

from gangway.compiler.templates.builder import Expr, bind


def transposed(rows: list[Expr]) -> list[Expr]:
    """The columns of a square matrix, given as its rows: as many vectors as each has lanes, a power of two.

    In each of log2(lanes) stages pairs of vectors exchange halves, quarters, ... of each other (Eklundh 1972).
    """
    lanes, distance = len(rows), 1
    rows = [bind(row) for row in rows]
    while distance < lanes:
        for first in range(lanes):
            if not first & distance:
                second = first + distance
                rows[first], rows[second] = _exchanged(rows[first], rows[second], distance, lanes)
        distance *= 2
    return rows


def _exchanged(a: Expr, b: Expr, distance: int, lanes: int) -> tuple[Expr, Expr]:
    """Lanes with the bit `distance` of `a` against those without it of `b`."""
    upper = [lanes + lane - distance if lane & distance else lane for lane in range(lanes)]
    lower = [lanes + lane if lane & distance else lane + distance for lane in range(lanes)]
    return bind(tirx.Shuffle([a, b], upper)), bind(tirx.Shuffle([a, b], lower))
