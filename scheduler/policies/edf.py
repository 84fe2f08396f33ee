"""edf: earliest deadline first, preemptive (Liu and Layland, JACM 1973, section 7), over gangs of cores.

Loose ends. The algorithm is for one processor: here the machine is the processor. The query with the earliest deadline
has all cores that it can use, what it leaves goes to the next one. Preemption is at layer boundaries. Lower priority
numbers go first whatever the deadline. Best effort is due a second after its arrival (`urgency.due_us`).
"""

from collections.abc import Iterator
from heapq import heapify, heappop

from gangway.scheduler.policies.sharing import Work, query_of, share_out, work
from gangway.scheduler.policies.urgency import due_us
from gangway.scheduler.policy import Decision, Policy, Snapshot


class EarliestDeadlineFirst(Policy):
    """The machine to whoever is due first."""

    name = "edf"

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Start, grow, shrink and stop so that the earliest deadlines have the cores."""
        return share_out(snapshot, _by_deadline(work(snapshot, snapshot.waiting)), reason="earliest deadline")


def _by_deadline(items: list[Work]) -> Iterator[Work]:
    """Yield lazily: a few of many queries find cores."""
    heap = []
    for index, item in enumerate(items):
        query = query_of(item)
        heap.append((query.priority, due_us(query), query.query_id, index))
    heapify(heap)
    while heap:
        yield items[heappop(heap)[3]]
