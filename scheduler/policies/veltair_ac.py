"""Veltair-AC (ASPLOS 2022, section 5.1): adaptive compilation alone.

Layers are scheduled one by one, as by the paper's baseline, Planaria; each in the version that is fastest at the
present level of interference, on the cores which that version needs at this level. The paper does not say what
granularity its AC has; section 5.2 blames its conflicts on the missing layer blocks, so it is the baseline's.
"""

from gangway.scheduler.policies.planaria import Planaria


class VeltairAc(Planaria):
    """Every layer is a unit, in the version for the level of interference."""

    name = "veltair_ac"
    adapts_versions = True
