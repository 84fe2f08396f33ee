"""The register tile of a matrix product: some numbers x some vectors, whose sums stay in registers."""

from collections.abc import Callable, Sequence

from gangway.artifact.format import TargetSpec
from gangway.compiler.templates.base import registers
from gangway.compiler.templates.builder import Expr, Register, bind, constant, repeat, splat

UNROLLED = 4

Sums = list[list[Register]]


def most_numbers(target: TargetSpec, vectors: int) -> int:
    """Numbers of the largest tile with so many vectors; some registers hold operands, without FMA products, too."""
    spare = vectors + 1 + (target.name == "baseline")
    return (registers(target) - spare) // vectors


def zero_sums(numbers: int, vectors: int, lanes: int) -> Sums:
    """A tile of zeros."""
    return [[Register(lanes, constant(0.0, lanes)) for _ in range(vectors)] for _ in range(numbers)]


def multiply_add(sums: Sums, numbers: Sequence[Expr], vectors: Sequence[Expr], lanes: int) -> None:
    """Add every number times every vector."""
    vectors = [bind(vector) for vector in vectors]
    for row, number in zip(sums, numbers, strict=True):
        spread = splat(number, lanes)
        for total, vector in zip(row, vectors, strict=True):
            total.add(spread * vector)


def unrolled(count: int, body: Callable[[Expr], None]) -> None:
    """`body(i)` for i in [0, count), several in an iteration."""
    whole, rest = divmod(count, UNROLLED)

    def some(index: Expr) -> None:
        for u in range(UNROLLED):
            body(index * UNROLLED + u)

    if whole:
        repeat(whole, some)
    for i in range(count - rest, count):
        body(i)
