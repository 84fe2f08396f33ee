"""For how long nobody who runs would make room for a newcomer with a deadline: what `worth_it` asks of a victim."""

from collections.abc import Sequence

from gangway.scheduler.policies.gangway_moves import can_spare
from gangway.scheduler.policies.gangway_order import IN_TIME
from gangway.scheduler.prediction import INFINITE, Work


def rest_us(works: Sequence[Work]) -> float:
    """Return the time, 0 if somebody would yield at once. `works`: after `moves`.

    Best effort, and who was given up, may yield at once. Who will be in time yields only what it can spare, to a query
    as short as the shortest that is there. If it should run longer than predicted, it is given up when its slack is
    gone. Whoever is leaving anyway is not asked.
    """
    shortest_us = min(work.isolated_us for work in works)
    rest_us = INFINITE
    for work in works:
        if not work.cores or work.fixed:
            continue
        if work.tier != IN_TIME or can_spare(work, shortest_us, 0) or (work.cores > 1 and can_spare(work, 0.0, 1)):
            return 0.0
        rest_us = min(rest_us, work.slack_us - work.remaining_us(work.cores) * work.margin)
    return max(0.0, rest_us)
