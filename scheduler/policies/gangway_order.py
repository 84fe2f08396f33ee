"""Who goes first: the order in which the `gangway` policy hands out cores.

Priority classes go strictly first. Within a class a query is of one of these tiers:

- `BRIEF`: it computes no longer than a switch takes, late or not, within a bounded share of the machine;
- `AGED`: one query that has been `BEST_EFFORT` for long, within a bounded share of the machine;
- `BACKFILL`: `AT_RISK` or just late, but shorter than all `ON_TIME` ones, none of which is late if it goes first;
- `ON_TIME`: it is in time if all of this tier run in order of their deadlines;
- `AT_RISK`: it is given up so that the others are in time;
- `BEST_EFFORT`: it has no deadline, or is certain to be late. It has a virtual deadline.
"""

import heapq
from collections.abc import Mapping, Sequence
from itertools import islice

from gangway.scheduler.policy import Query
from gangway.scheduler.policy_config import DEFAULT, Planning, PolicyConfig, VirtualDeadlines
from gangway.scheduler.prediction import Work
from gangway.scheduler.profiles import ModelProfile

BRIEF, AGED, BACKFILL, ON_TIME, AT_RISK, BEST_EFFORT = range(6)


def classify(works: Sequence[Work], config: VirtualDeadlines = DEFAULT.virtual_deadlines) -> None:
    """Set tier and due time of each: `BEST_EFFORT`, or (so far) `ON_TIME`."""
    for work in works:
        query = work.query
        if query.deadline_us is None or work.is_lost:
            work.tier, work.due_us = BEST_EFFORT, virtual_due_us(query, work.isolated_us, config)
        else:
            work.tier, work.due_us = ON_TIME, query.deadline_us


def virtual_due_us(query: Query, isolated_us: float, config: VirtualDeadlines) -> float:
    """Return when a query that has no deadline, or cannot meet it, should be answered all the same."""
    if query.deadline_us is None:
        return query.arrival_us + max(config.best_effort_min_us, config.best_effort_factor * isolated_us)
    return query.arrival_us + config.late_factor * max(query.deadline_us - query.arrival_us, isolated_us)


def rank(work: Work) -> tuple[int, int, bool, float, int]:
    """Return the key by which queries are served. Of best effort, those that have begun go first: they hold memory."""
    query = work.query
    is_new = work.tier == BEST_EFFORT and work.block is None and not query.started
    return (query.priority, work.tier, is_new, work.due_us, query.query_id)


def candidates(
    waiting: Sequence[Query],
    now_us: float,
    core_count: int,
    models: Mapping[int, ModelProfile],
    config: Planning = DEFAULT.planning,
) -> Sequence[Query]:
    """Return the waiting queries to be planned: all, or of very many those that may be served next.

    These are the ones that have begun, those whose deadlines come first, the oldest that are late, brief and others,
    and the oldest without a deadline. A higher class comes before a lower one. One pass over the queries, with little
    work for each.
    """
    most = max(config.min_queries, core_count)
    if len(waiting) <= 2 * most or not config.enabled:
        return waiting
    brief = {number for number, model in models.items() if model.is_brief}
    found = [query for query in waiting if query.started]
    for priority in sorted({query.priority for query in waiting}):
        fresh = [query for query in waiting if query.priority == priority and not query.started]
        hopeful = [query for query in fresh if query.deadline_us is not None and query.deadline_us > now_us]
        found += heapq.nsmallest(most, hopeful, key=_deadline_us)
        late = [query for query in fresh if query.deadline_us is not None and query.deadline_us <= now_us]
        found += islice((query for query in late if query.model_id not in brief), core_count)
        if brief:
            found += islice((query for query in late if query.model_id in brief), core_count)
        found += islice((query for query in fresh if query.deadline_us is None), core_count)
        if len(found) >= most:
            break
    return found


def _deadline_us(query: Query) -> float:
    return query.deadline_us or 0.0


def in_order(works: Sequence[Work], core_count: int, config: PolicyConfig = DEFAULT) -> list[Work]:
    """Return the queries most urgent first, after giving up those that cannot be saved together with the others."""
    ordered = sorted(works, key=rank)
    given_up = config.triage.enabled and _give_up(ordered, core_count)
    if (config.backfill.enabled and _backfill(ordered, core_count)) or given_up:
        ordered.sort(key=rank)
    return ordered


def _give_up(ordered: Sequence[Work], core_count: int) -> bool:
    """Move queries to `AT_RISK`, until the others are in time; return whether there were any.

    Moore and Hodgson's algorithm (1968) over cores x time: whenever the next one in order of deadlines would be late,
    the one with the largest time / weight so far is given up. They are as few as possible if all weigh the same.
    """
    planned_us = 0.0  # of the whole machine
    kept: list[tuple[float, int, float, Work]] = []  # heap, the largest time / weight on top
    found = False
    for index, work in enumerate(ordered):
        if work.tier != ON_TIME:
            continue
        area_us = machine_us(work, core_count)
        if area_us > work.slack_us:
            work.tier = AT_RISK
            found = True
            continue
        planned_us += area_us
        heapq.heappush(kept, (-area_us / work.weight, index, area_us, work))
        if planned_us > work.slack_us:
            _, _, given_up_us, given_up = heapq.heappop(kept)
            planned_us -= given_up_us
            given_up.tier = AT_RISK
            found = True
    return found


def _backfill(ordered: Sequence[Work], core_count: int) -> bool:
    """Let late queries go before longer ones that can spare the time; return whether there were any.

    A lost deadline is no reason to wait for everybody else: mean latency counts, and how late it gets. Lengths are
    rest x isolated latency, since a wait counts by the share of the isolated latency that it is. Queries behind their
    virtual deadline are left out: of the hundreds that an overload leaves, one would always fit.
    """
    late = [
        work
        for work in ordered
        if work.tier in (AT_RISK, BEST_EFFORT) and work.query.deadline_us is not None and work.due_us > work.now_us
    ]
    if not late:
        return False
    if all(work.tier != ON_TIME for work in ordered):  # nobody can become late by it
        for work in late:
            work.tier = BACKFILL
        return True
    planned_us, spare_us, shortest = 0.0, float("inf"), float("inf")
    for work in ordered:
        if work.tier <= ON_TIME:
            planned_us += machine_us(work, core_count)
        if work.tier == ON_TIME:
            done_within_us = work.due_us - work.now_us - work.way_back_us  # less than its slack for a narrow gang
            spare_us = min(spare_us, done_within_us - planned_us)
            shortest = min(shortest, _length(work))
    found = False
    for work in sorted(late, key=_length):
        area_us = machine_us(work, core_count)
        if area_us <= spare_us and _length(work) < shortest:
            spare_us -= area_us
            work.tier = BACKFILL
            found = True
    return found


def _length(work: Work) -> float:
    return work.least_us * work.isolated_us


def machine_us(work: Work, core_count: int) -> float:
    """Return how long the whole machine has to do with a query."""
    return work.remaining_us(work.gang) * work.margin * work.gang / core_count
