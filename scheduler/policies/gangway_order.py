"""Who goes next: the tiers of the `gangway` policy, the order within them, and who is given up for the others.

Priority classes go strictly first. Within a class a query is of one of these tiers:

- `BRIEF`: it computes no longer than a switch takes, late or not, within a bounded share of the machine;
- `AHEAD`: it is shorter by half than all late queries that have waited for too long;
- `PROMOTED`: it has waited for too long, within a share of the machine, or it is late, shorter than all `ON_TIME` ones,
  and none of these is late if it goes first;
- `ON_TIME`: it is in time if all of this tier run in order of their deadlines;
- `BEST_EFFORT`: it is given up so that the others are in time, or has no deadline to meet, but a virtual one.

`gangway_overload` moves queries between tiers, too: those given up for queries to come, and who waited for too long.
"""

import heapq
from collections.abc import Sequence

from gangway.scheduler.policies.gangway_jobs import BEST_EFFORT, ON_TIME, PROMOTED, Job
from gangway.scheduler.policy import Query
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig, VirtualDeadlines


def classify(jobs: Sequence[Job], config: VirtualDeadlines = DEFAULT.virtual_deadlines) -> None:
    """Set tier and due time of each: `BEST_EFFORT`, or (so far) `ON_TIME`."""
    for job in jobs:
        query = job.query
        if query.deadline_us is None or job.is_lost:
            job.tier, job.due_us = BEST_EFFORT, virtual_due_us(query, job.request_us, config)
        else:
            job.tier, job.due_us = ON_TIME, query.deadline_us


def virtual_due_us(query: Query, isolated_us: float, config: VirtualDeadlines) -> float:
    """Return when a query that has no deadline, or cannot meet it, should be answered all the same."""
    if query.deadline_us is None:
        return query.arrival_us + max(config.best_effort_min_us, config.best_effort_factor * isolated_us)
    return query.arrival_us + config.late_factor * max(query.deadline_us - query.arrival_us, isolated_us)


def rank(job: Job) -> tuple[int, int, bool, float, int]:
    """Return the key by which queries are served. Of best effort, who was given up or has begun goes first."""
    query = job.query
    is_new = job.tier == BEST_EFFORT and job.is_lost and job.block is None and not query.started
    return (query.priority, job.tier, is_new, job.due_us, query.query_id)


def in_order(jobs: Sequence[Job], config: PolicyConfig = DEFAULT) -> list[Job]:
    """Return the queries most urgent first, after giving up those that cannot be saved together with the others."""
    ordered = sorted(jobs, key=rank)
    given_up = config.triage.enabled and _give_up(ordered)
    if (config.backfill.enabled and _backfill(ordered)) or given_up:
        ordered.sort(key=rank)
    return ordered


def _give_up(ordered: Sequence[Job]) -> bool:
    """Move queries to `BEST_EFFORT`, until the others are in time; return whether there were any.

    Moore and Hodgson's algorithm (1968) over cores x time: whenever the next one in order of deadlines would be late,
    the one with the largest time / weight so far is given up. They are as few as possible if all weigh the same.
    """
    if _all_in_time(ordered):
        return False
    planned_us = 0.0  # of the whole machine
    kept: list[tuple[float, int, float, Job]] = []  # heap, the largest time / weight on top
    found = False
    for index, job in enumerate(ordered):
        if job.tier != ON_TIME:
            if job.tier < ON_TIME:
                planned_us += job.area_us
            continue
        area_us = job.area_us
        if area_us > job.slack_us:
            job.tier = BEST_EFFORT
            found = True
            continue
        planned_us += area_us
        heapq.heappush(kept, (-area_us / job.weight, index, area_us, job))
        if planned_us > job.slack_us:
            _, _, given_up_us, given_up = heapq.heappop(kept)
            planned_us -= given_up_us
            given_up.tier = BEST_EFFORT
            found = True
    return found


def _all_in_time(ordered: Sequence[Job]) -> bool:
    """Return whether all `ON_TIME` queries are in time in this order: the usual case, found without a heap."""
    planned_us = 0.0
    for job in ordered:
        if job.tier <= ON_TIME:
            planned_us += job.area_us
            if job.tier == ON_TIME and planned_us > job.slack_us:
                return False
    return True


def _backfill(ordered: Sequence[Job]) -> bool:
    """Let late queries go before longer ones that can spare the time; return whether there were any.

    A lost deadline is no reason to wait for everybody else: mean latency counts, and how late it gets. Lengths are
    rest x isolated latency, since a wait counts by the share of the isolated latency that it is. Queries behind their
    virtual deadline are left out: of the hundreds that an overload leaves, one would always fit.
    """
    context = ordered[0].context
    late = [
        job
        for job in ordered
        if job.tier == BEST_EFFORT and job.query.deadline_us is not None and job.due_us > context.now_us
    ]
    if not late:
        return False
    if all(job.tier != ON_TIME for job in ordered):  # nobody can become late by it
        for job in late:
            job.tier = PROMOTED
        return True
    planned_us, spare_us, shortest = 0.0, float("inf"), float("inf")
    for job in ordered:
        if job.tier <= ON_TIME:
            planned_us += job.area_us
        if job.tier == ON_TIME:
            done_within_us = job.due_us - context.now_us - context.way_back_us  # less than its slack for a narrow gang
            spare_us = min(spare_us, done_within_us - planned_us)
            shortest = min(shortest, _length(job))
    found = False
    for job in sorted(late, key=_length):
        area_us = job.area_us
        if area_us <= spare_us and _length(job) < shortest:
            spare_us -= area_us
            job.tier = PROMOTED
            found = True
    return found


def _length(job: Job) -> float:
    return job.least_us * job.isolated_us
