"""VELTAIR (ASPLOS 2022), Algorithm 3: adaptive scheduling and adaptive compilation together (its Veltair-FULL).

Whenever a unit ends: read the level of interference, without units that are about to end; take each layer's version for
it; compute the threshold; cut the next block; run it. Levels are measured as one number for the machine. Units about to
end are taken out in proportion to the cores they hold, since the paper does not say how its counters would tell them
apart.

The paper's workers fetch a task and keep it to its end. Here units are ordered by their queries' arrival, so one that
has begun goes on before younger ones begin.
"""

from gangway.scheduler.policies.veltair_as import VeltairAs


class Veltair(VeltairAs):
    """Layer blocks and versions that follow load and interference."""

    name = "veltair"
    adapts_versions = True
