"""Veltair-AS (ASPLOS 2022, section 5.1): adaptive scheduling alone.

Layer blocks by the dynamic threshold (Algorithm 2, section 4.3), every layer in its first version. Demands are those of
a quiet machine: the proxy of interference belongs to the other half.

Algorithm 3 gives all idle cores to each query (`thres = C_total - sum`); the text of 4.3 and its example share them out
in proportion to the models' averages, which is done here. "Active" are the queries that run, but for those about to
end.
"""

from gangway.scheduler.blocks import Block, Demands, threshold_share
from gangway.scheduler.policies.spatial import SpatialPolicy


class VeltairAs(SpatialPolicy):
    """Layer blocks whose size and cores follow the load."""

    name = "veltair_as"
    adapts_blocks = True

    def unit(self, of: Demands, begin: int, core_count: int, active_cores: float) -> Block:
        """Return the block up to the next pivot, by the threshold of this moment."""
        return of.next_block(begin, threshold_share(core_count, of.average_cores, active_cores))
