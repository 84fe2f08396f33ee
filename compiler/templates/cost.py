"""A static cost model: which cut into tasks a layer gets. No search, no measurement; figures are those of a current
server core.
"""

from dataclasses import dataclass

from gangway.artifact.format import TargetSpec

from .tiling import Tasks, all_tasks

L2_BYTES = 1 << 20
L3_BYTES_PER_US = 20_000  # what one core streams from the shared cache or memory
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
    """Bytes that come from beyond the L2 cache more than once, because what is reused does not fit there."""
    if tasks.pixels_first:
        part_input = traffic.input * tasks.bands_per_task / tasks.bands
        reread = traffic.weights * (tasks.parts - 1) if traffic.weights + part_input > L2_BYTES / 2 else 0
    else:
        chunk_weights = traffic.weights * tasks.groups_per_task / tasks.groups
        reread = traffic.input * (tasks.chunks - 1) if traffic.input + chunk_weights > L2_BYTES / 2 else 0
    return reread


def tasks_cost(tasks: Tasks, flops: int, traffic: Traffic, target: TargetSpec) -> float:
    """Mean time of the layer over the gang sizes, in microseconds of one core."""
    work = layer_us(flops, traffic, target) + _reread_bytes(tasks, traffic) / L3_BYTES_PER_US
    largest_us = work * tasks.largest_share
    total = 0.0
    for ranks in GANGS:
        rounds = -(-tasks.count // ranks)
        total += max(work / ranks, rounds * largest_us) * ranks + rounds * ranks * CLAIM_US
    return total / len(GANGS)


def plane_tasks(planes: int, bands: int, flops: int, moved_bytes: int, target: TargetSpec) -> Tasks:
    """The best tasks of a layer whose planes have nothing in common."""
    traffic = Traffic(weights=0, input=0, output=moved_bytes)
    return min(all_tasks(planes, bands), key=lambda tasks: tasks_cost(tasks, flops, traffic, target))
