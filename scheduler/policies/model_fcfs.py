"""Model-wise first come, first served: VELTAIR's simplest baseline (ASPLOS 2022, section 3.2).

"The tasks will be served immediately if there are available resources while waiting otherwise", and model-wise
scheduling "evenly assigns a fixed number of cores to all layers": the fewest that meet the model's target (the black
line of Fig. 4b). The paper does not say whether a later query may overtake one that waits; first come, first served
says that none does.
"""

from gangway.scheduler.blocks import Demands, demands
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policies.spatial import TARGET_SHARE, UNIT_US
from gangway.scheduler.policy import Policy, Query, Snapshot, Start


class ModelFcfs(Policy):
    """Each query runs as one block on its model's fixed number of cores, strictly in order of arrival.

    The oldest query waits until its whole gang is free, and nobody overtakes it: one that started on the leftovers of
    another would crawl on them to its end. A model without a target has no demand of its own: it takes all cores that
    it can use, `min(core_count, max_ranks)`.
    """

    name = "model_fcfs"

    def decide(self, snapshot: Snapshot) -> list[Start]:
        """Start waiting queries from the oldest on, until one does not fit."""
        free, leases = snapshot.free_cores, snapshot.free_leases
        starts: list[Start] = []
        for query in snapshot.waiting:
            if not free or (not query.started and leases <= 0):
                break
            profile = snapshot.models[query.model_id]
            of = self.demands_of(profile, query, snapshot.level)
            wanted = min(_gang_size(profile, of, query), snapshot.core_count)
            if not 0 < wanted <= len(free):
                break
            gang, free = free[:wanted], free[wanted:]
            leases -= not query.started
            chosen = of.versions[query.next_layer :] if of else ()
            versions = chosen if any(chosen) else ()
            starts.append(
                Start(query.query_id, profile.layers, gang, versions, wanted, f"the whole gang of {wanted} is free")
            )
        return starts

    def demands_of(self, profile: ModelProfile, query: Query, level: float) -> Demands | None:
        """Return what the query asks for; None if it has no target."""
        return (
            demands(profile, 0.0, query.rows, share=TARGET_SHARE, unit_us=UNIT_US)
            if profile.qos_us is not None
            else None
        )


def _gang_size(profile: ModelProfile, of: Demands | None, query: Query) -> int:
    return of.block_cores(query.next_layer, profile.layers) if of else profile.max_ranks
