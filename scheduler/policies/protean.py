"""Protean's place in VELTAIR's Table 1 (ASPLOS 2022): spatial, static granularity, adaptive compilation.

Protean (MICRO 2014) rewrites batch programs online so that they pollute a shared cache less; it knows no layers, and
VELTAIR gives no figures of it. What its row of the table describes is done here: the whole model is the unit, as with
first come, first served, and each of its layers takes the version for the level of interference when it starts. The
fixed number of cores is that which those versions need at this level.
"""

from gangway.scheduler.blocks import Demands, demands
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policies.model_fcfs import ModelFcfs
from gangway.scheduler.policies.spatial import TARGET_SHARE, UNIT_US
from gangway.scheduler.policy import Query


class Protean(ModelFcfs):
    """Whole models in versions that follow the level of interference."""

    name = "protean"

    def demands_of(self, profile: ModelProfile, query: Query, level: float) -> Demands:
        """Return what the query asks for at the level; without a target it is 3 times the isolated latency."""
        return demands(profile, level, query.rows, adaptive=True, share=TARGET_SHARE, unit_us=UNIT_US)
