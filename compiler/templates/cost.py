"""A static cost model: which cut into tasks a layer gets. No search, no measurement; figures are those of a current
server core.
"""

from dataclasses import dataclass

from gangway.artifact.format import TargetSpec
from gangway.compiler.templates.tiling import Tasks, all_tasks

REUSE_BYTES = 1 << 19  # what stays in a core's L2 cache beside everything that passes through
L3_BYTES_PER_US = 40_000  # what one core streams from the shared cache or memory
CLAIM_US = 0.1  # an executor's rank claims a task
GANGS = (1, 2, 2, 3, 4, 8, 16)  # gang sizes to be balanced for; two ranks count double
PEAK_FLOPS_PER_US = {"avx512": 110_000, "avx2": 100_000, "baseline": 25_000}


@dataclass(frozen=True)
class Traffic:
    """Bytes a layer moves at least once."""

    weights: int
    input: int
    output: int


def layer_us(flops: int, traffic: Traffic, target: TargetSpec) -> float:
    """Time of the whole layer on one core, whichever of arithmetic and memory takes longer."""
    total = traffic.weights + traffic.input + traffic.output
    return max(flops / PEAK_FLOPS_PER_US[target.name], total / L3_BYTES_PER_US)


def _reread_bytes(tasks: Tasks, traffic: Traffic) -> float:
    """Bytes that come from beyond the L2 cache more than once, because what is reused does not fit there.

    A task computes all its pixels for one group of channels, then for the next. Between two uses of the same input, or
    of the same weights, whatever is touched in between passes through the cache.
    """
    part_input = traffic.input * tasks.bands_per_task / tasks.bands
    group_weights = traffic.weights / tasks.groups
    chunk_weights = group_weights * tasks.groups_per_task
    between_chunks = chunk_weights + (part_input if tasks.pixels_first else traffic.input)
    between_parts = part_input + (traffic.weights if tasks.pixels_first else chunk_weights)
    uses = tasks.groups if part_input + group_weights > REUSE_BYTES else tasks.chunks
    input_again = traffic.input * (uses - 1) if between_chunks > REUSE_BYTES else 0
    weights_again = traffic.weights * (tasks.parts - 1) if between_parts > REUSE_BYTES else 0
    return input_again + weights_again


def tasks_cost(tasks: Tasks, flops: int, traffic: Traffic, target: TargetSpec) -> float:
    """Mean time of the layer over the gang sizes, in microseconds of one core."""
    work = layer_us(flops, traffic, target) + _reread_bytes(tasks, traffic) / L3_BYTES_PER_US
    largest_us = work * tasks.largest_share
    total = 0.0
    for ranks in GANGS:
        rounds = -(-tasks.count // ranks)
        total += max(work / ranks, rounds * largest_us) * ranks + rounds * ranks * CLAIM_US
    return total / len(GANGS)


def plane_cost(tasks: Tasks, flops: int, moved_bytes: int, target: TargetSpec) -> float:
    """`tasks_cost` of a layer whose planes have nothing in common."""
    return tasks_cost(tasks, flops, Traffic(weights=0, input=0, output=moved_bytes), target)


def plane_tasks(planes: int, bands: int, flops: int, moved_bytes: int, target: TargetSpec) -> Tasks:
    """The best tasks of a layer whose planes have nothing in common."""
    return min(all_tasks(planes, bands), key=lambda tasks: plane_cost(tasks, flops, moved_bytes, target))
