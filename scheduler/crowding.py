"""Who is refused when so many queries wait that newcomers would find no request slot. Pure.

In an overload the queue fills with queries that cannot be in time any more. Without this they would keep out new ones
that can, and the server would be busy with answers that come too late.
"""

from collections.abc import Mapping, Sequence

from gangway.scheduler.lateness import certain_to_be_late
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policy import Query


def crowded_out(
    waiting: Sequence[Query], models: Mapping[int, ModelProfile], now_us: float, core_count: int, count: int
) -> list[int]:
    """Return the numbers of up to `count` waiting queries, given in order of arrival, that make room for others.

    First those that are certain to be late, the oldest first; then those without a deadline, the newest first, so that
    the old ones are answered at last. In each group lower classes come first. None that has begun, none with hope.
    """
    late, best_effort = [], []
    for query in waiting:
        model = models.get(query.model_id)
        if query.started or model is None:
            continue
        if query.deadline_us is None:
            best_effort.append(query)
        elif certain_to_be_late(query, model, now_us, core_count):
            late.append(query)
    late.sort(key=lambda query: -query.priority)
    best_effort.sort(key=lambda query: (-query.priority, -query.arrival_us))
    return [query.query_id for query in (*late, *best_effort)[:count]]
