"""Planaria's scheduling (MICRO 2020) as VELTAIR ports it to CPUs (ASPLOS 2022, sections 3.2 and 5.1): layer by layer.

Each layer asks for the fewest cores that meet its share of the target, takes what is free and grows later. The paper
gives no pseudo-code, and "tile-wise preemption" of its section 3.2 is what growing does here: a gang's tasks are shared
out anew among more cores. Interference and versions are unknown to it.
"""

from gangway.scheduler.blocks import Block, Demands
from gangway.scheduler.policies.spatial import SpatialPolicy


class Planaria(SpatialPolicy):
    """Every layer is a unit."""

    name = "planaria"

    def unit(self, of: Demands, begin: int, core_count: int, active_cores: float) -> Block:
        """Return the next layer."""
        return Block(begin, begin + 1, of.layer_cores[begin])
