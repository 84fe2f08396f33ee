"""How many cores each query shall have, most urgent first.

Each asks for the most cores that do their work efficiently, or as many as its deadline needs if that is more: a gang
that is too large wastes cores that others need, one that is too small wastes time. Cores that nobody asks for go to the
first ones, as long as they gain by them.
"""

from collections.abc import Sequence
from itertools import pairwise

from gangway.scheduler.policies.gangway_order import AGED, AT_RISK, BRIEF, ON_TIME
from gangway.scheduler.policy import Snapshot
from gangway.scheduler.prediction import Work
from gangway.scheduler.profiles import ModelProfile

# Who goes next while nobody is in danger: what needs memory beside what computes (Layerweaver+'s mode 1).
#
# Layerweaver+ (IEICE Transactions E105-D, 2022) keeps memory and compute of one accelerator busy by turns of layers.
# Cores compute each for itself but share the memory: so the next query is one that asks least for what those on the
# other cores ask most for. Where somebody would be late by that, the order of deadlines stays (mode 2).

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
        if work.tier != ON_TIME:
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


EFFICIENCY = 0.8  # of each core of a gang, against one alone, while others want cores
EFFICIENCY_STEP = 0.02  # what follows from an efficiency is remembered
IDLE_EFFICIENCY = 0.3  # while nobody does
SQUEEZED = 4  # so many queries without cores are looked at
RESERVED_LEASES = 2  # for queries that can be in time


def ask(work: Work, snapshot: Snapshot) -> None:
    """Set for how many cores a query asks; and, since it has only those, until when it must have begun.

    `due_us` becomes the time by which its cores x time would have to be done by the whole machine: the deadline, if it
    asks for all cores; nearly its latest start, if it asks for few of many. A part of a batch asks for what was planned
    for it: more would be taken from the other parts, and the batch is done when all are.
    """
    if work.fixed:
        work.gang = work.cores
        return
    gang = work.query.cores
    if not gang:
        gang = work.outlook.efficient_cores(efficiency_to_ask_for(snapshot.wide_stretch))
        if work.tier == ON_TIME and gang < work.most and work.remaining_us(gang) * work.margin > work.slack_us:
            gang = max(gang, work.fewest_cores(work.slack_us / work.margin))
    work.gang = gang = gang if gang < work.most else work.most
    if work.tier == ON_TIME:
        work.due_us -= work.remaining_us(gang) * work.margin * (1 - gang / snapshot.core_count)


def efficiency_to_ask_for(wide_stretch: float) -> float:
    """Return what each core of a gang must do by the profile, if gangs of several cores exceed it by so much more."""
    return min(1.0, round(EFFICIENCY * wide_stretch / EFFICIENCY_STEP) * EFFICIENCY_STEP)


def share_out(ordered: Sequence[Work], core_count: int, leases: int) -> None:
    """Grant cores in this order, first as many as are asked for, then what is left.

    A query that has not started yet and finds no lease gets none. The last leases are for those that can be in time:
    stopped queries hold theirs, and if all did, an urgent one could not begin.
    """
    left = core_count
    for work in ordered:
        if work.fixed:
            left -= work.cores
    able = _able(ordered, leases)
    for index, work in enumerate(able):
        work.grant = grant = work.gang if work.gang < left else left
        left -= grant
        if left <= 0:
            _squeeze(able[: index + 2 + SQUEEZED])
            return
    for work in able:
        if left <= 0:
            return
        if work.query.cores and work.block is None:
            continue  # beside the other parts of its batch it has what it needs; later it may grow
        more = min(left, work.outlook.efficient_cores(IDLE_EFFICIENCY) - work.grant)
        if more > 0:
            work.grant += more
            left -= more


def _squeeze(able: Sequence[Work]) -> None:
    """Give those that would be late with what was left the cores that others, more urgent ones, can do without."""
    release_us = None
    for work in able:
        if work.tier not in (ON_TIME, AT_RISK) or work.gang <= work.grant:
            continue
        if release_us is None:
            release_us = min((work.remaining_us(work.grant) for work in able if work.grant), default=0.0)
        if work.slack_us - work.least_us * work.margin > release_us:
            continue
        missing = work.fewest_cores(work.slack_us / work.margin) - work.grant
        donors = [(donor, donor.grant - _needs(donor, work)) for donor in reversed(able) if donor is not work]
        if missing <= 0 or sum(spare for _, spare in donors) < missing:
            continue
        for donor, spare in donors:
            taken = min(missing, spare)
            donor.grant -= taken
            work.grant += taken
            missing -= taken


def _needs(donor: Work, work: Work) -> int:
    """Return how many cores a query must keep for itself, whoever else is in need."""
    if donor.query.priority < work.query.priority or donor.tier in (BRIEF, AGED) or donor.fixed:
        return donor.grant
    if donor.query.priority > work.query.priority or donor.tier != ON_TIME:
        return 0
    return min(donor.grant, donor.fewest_cores(donor.slack_us / donor.margin))


def _able(ordered: Sequence[Work], leases: int) -> list[Work]:
    """Set the grants of what nothing changes, and return the others that can run, in order."""
    able = []
    for work in ordered:
        if work.fixed:
            work.grant = work.cores
        elif work.block is not None or work.query.started:
            able.append(work)
        elif leases > (0 if work.tier <= ON_TIME else RESERVED_LEASES):
            leases -= 1
            able.append(work)
    if not able and leases:
        return [work for work in ordered if not work.fixed][:1]
    return able
