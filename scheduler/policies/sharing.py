"""From an order of queries to cores: the first has all that it can use, what is left goes to the next."""

from collections.abc import Iterable

from gangway.scheduler.policy import Decision, Query, Resize, RunningBlock, Snapshot, Start, Stop

Work = Query | RunningBlock


def work(snapshot: Snapshot, waiting: Iterable[Query]) -> list[Work]:
    """Return all that can be ordered: these waiting queries, and the running blocks that can still be told something.

    Not those that are stopping already, nor those that nothing stops.
    """
    return [
        *waiting,
        *(
            block
            for block in snapshot.running
            if not block.stopping and not snapshot.models[block.query.model_id].indivisible
        ),
    ]


def query_of(item: Work) -> Query:
    """Return the query itself."""
    return item if isinstance(item, Query) else item.query


def share_out(
    snapshot: Snapshot, ranking: Iterable[Work], at_most: int = 1_000_000, reason: str = ""
) -> list[Decision]:
    """Give the machine to the first `at_most` of `ranking`, each as many cores as it can use of those left.

    `ranking` is `work(...)`, most urgent first; it is read no further than there are cores. A query begins on the
    cores that are free and grows as others come free. Running blocks beyond those are stopped at the next layer
    boundary, or shrunk.
    """
    decisions: list[Decision] = []
    left = snapshot.core_count - sum(
        len(block.cores) for block in snapshot.running if snapshot.models[block.query.model_id].indivisible
    )
    free = snapshot.free_cores
    leases = snapshot.free_leases
    served: set[int] = set()
    for item in ranking:
        if left <= 0 or len(served) == at_most:
            break
        query = query_of(item)
        target = min(left, snapshot.models[query.model_id].max_ranks)
        if isinstance(item, Query):
            if not query.started:
                if leases == 0:
                    continue
                leases -= 1
            if free:
                decisions.append(_start(query, free[:target], target, snapshot, reason))
                free = free[target:]
        else:
            size = len(item.cores)
            joining = free[: max(0, target - size)]
            free = free[len(joining) :]
            if joining or target < size:
                decisions.append(Resize(query.query_id, (item.cores + joining)[:target], reason))
        left -= target
        served.add(query.query_id)
    decisions += [
        Stop(item.query.query_id, reason="others go first")
        for item in work(snapshot, ())
        if isinstance(item, RunningBlock) and item.query.query_id not in served
    ]
    return decisions


def _start(query: Query, cores: tuple[int, ...], wanted: int, snapshot: Snapshot, reason: str) -> Start:
    return Start(query.query_id, snapshot.models[query.model_id].layers, cores, wanted=wanted, reason=reason)
