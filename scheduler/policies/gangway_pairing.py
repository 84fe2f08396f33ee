"""Who goes next while nobody is in danger: what needs memory beside what computes (Layerweaver+'s mode 1).

Layerweaver+ (IEICE Transactions E105-D, 2022) keeps memory and compute of one accelerator busy by turns of layers.
Cores compute each for itself but share the memory: so the next query is one that asks least for what those on the other
cores ask most for. Where somebody would be late by that, the order of deadlines stays (mode 2).
"""

from itertools import pairwise

from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policies.gangway_order import IN_TIME
from gangway.scheduler.prediction import Work

NOTABLE = 0.1  # shares of memory that differ by less are alike


def memory_share(model: ModelProfile) -> float:
    """Return the part of the model's time that memory is busy for, by Layerweaver+'s m and c; 0.5 if not known."""
    known: float | None = model.derived.get(memory_share)
    if known is None:
        memory_us, compute_us = sum(model.memory_us), sum(model.compute_us)
        known = memory_us / (memory_us + compute_us) if memory_us + compute_us > 0 else 0.5
        model.derived[memory_share] = known
    return known


def pair(ordered: list[Work]) -> None:
    """Move that waiting query to the place of the first one which suits the running ones best.

    Nothing is moved unless all are in time, and stay so.
    """
    for work in ordered:
        if work.tier != IN_TIME:
            return
    waiting = [index for index, work in enumerate(ordered) if work.block is None]
    blocks = [work for work in ordered if work.block is not None]
    if len(waiting) < 2 or not blocks:
        return
    cores = sum(work.cores for work in blocks)
    beside = sum(memory_share(work.model) * work.cores for work in blocks) / cores
    first = ordered[waiting[0]]
    best, best_index = abs(1.0 - beside - memory_share(first.model)) - NOTABLE, None
    spare_us = float("inf")
    for before, index in pairwise(waiting):
        spare_us = min(spare_us, _spare_us(ordered[before]))
        work = ordered[index]
        distance = abs(1.0 - beside - memory_share(work.model))
        if work.query.priority != first.query.priority or spare_us <= 0:
            break
        if distance < best and work.remaining_us(work.gang) < spare_us:
            best, best_index = distance, index
    if best_index is not None:
        ordered.insert(waiting[0], ordered.pop(best_index))


def _spare_us(work: Work) -> float:
    return work.slack_us - work.remaining_us(work.gang) * work.margin
