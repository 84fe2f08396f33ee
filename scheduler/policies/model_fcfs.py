"""Model-wise first come, first served: VELTAIR's simplest baseline (ASPLOS 2022, section 5)."""

from gangway.scheduler.policy import Policy, Query, Snapshot, Start


class ModelFcfs(Policy):
    """Each query runs as one block on as many cores as its model can use, strictly in order of arrival.

    The oldest query waits until its whole gang, `min(core_count, max_ranks)` cores, is free, and nobody overtakes it:
    a query that started on the leftovers of a short one would crawl on them to its end. Models that can use one core
    only run side by side.
    """

    name = "model_fcfs"

    def decide(self, snapshot: Snapshot) -> list[Start]:
        """Start waiting queries from the oldest on, until one does not fit."""
        free = snapshot.free_cores
        dispatches = []
        for query in snapshot.waiting:
            gang_size = self._gang_size(query, snapshot)
            if not 0 < gang_size <= len(free):
                break
            gang, free = free[:gang_size], free[gang_size:]
            dispatches.append(Start(query.query_id, snapshot.models[query.model_id].layers, gang))
        return dispatches

    def _gang_size(self, query: Query, snapshot: Snapshot) -> int:
        return min(snapshot.core_count, snapshot.models[query.model_id].max_ranks)
