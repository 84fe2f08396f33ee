"""The order in which a template's points are worth measuring, when only the first so many will be."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from gangway.compiler.specs import KernelPlan
from gangway.compiler.templates.tiling import Cut

Priced = tuple[float, KernelPlan]
"""A plan and its expected time, in any unit."""

MOST_PRICE = 3.0  # times the static choice's: what takes longer would not meet a layer's QoS
SMALL_TILE = 0.05  # a tile of half the pixels loads weights twice as often: so much more of a layer's time


def tile_cuts(widest: int, cut: Callable[[int], Cut]) -> dict[Cut, int]:
    """Cuts worth trying, each with the size of its register tiles, in pixels: all that fits, 3/4, 1/2 and 1/4 of it."""
    sizes = [max(1, widest * quarters // 4) for quarters in (1, 2, 3, 4)]
    return {cut(size): size for size in sizes}  # of sizes that come to the same, the largest


def tile_price(widest: int, tile_pixels: int) -> float:
    """Expected time with tiles of `tile_pixels`, relative to that with the widest."""
    return 1 + SMALL_TILE * (widest / tile_pixels - 1)


def spread(static: Priced, others: Iterable[Priced]) -> Iterator[KernelPlan]:
    """Yield the plans of `others`, but for the static choice and those that are not expected to be of any use.

    In turns, the cheapest that is left and the one that is farthest from the static one and all before it in the plane
    of VELTAIR's trade-off, (log blocking bytes, log parallelism). So every beginning of the sequence has both what the
    cost model believes in and all of the trade-off.
    """
    least, first = static
    ranked = sorted(others, key=lambda item: item[0])
    left = [plan for price, plan in ranked if plan != first and price <= MOST_PRICE * least]
    distances = [_distance(first, plan) for plan in left]
    cheapest = True
    while left:
        index = 0 if cheapest else _largest(distances)
        cheapest = not cheapest
        plan = left.pop(index)
        distances.pop(index)
        yield plan
        distances = [min(known, _distance(plan, other)) for known, other in zip(distances, left, strict=True)]


def _largest(distances: Sequence[float]) -> int:
    return max(range(len(distances)), key=distances.__getitem__)  # of equals the first, which is the cheapest


def _distance(a: KernelPlan, b: KernelPlan) -> float:
    return math.hypot(
        math.log2(max(1, a.blocking_bytes) / max(1, b.blocking_bytes)), math.log2(a.parallelism / b.parallelism)
    )
