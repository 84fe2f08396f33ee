"""What the scheduler's decisions cost on the virtual clock: CPU time of `decide`, by what a policy looks at.

One thread decides. A decision that is due while another one is made waits for it, and cores stay idle meanwhile. What
happens until a decision is ready is part of it. Rings and leases are `Overheads.dispatch_us`.

The numbers are those of `python -m benchmarks.papers decision_costs`: least squares over the decisions of the four
mixes at three loads, 64 modelled cores, Zen 4, 2026-11-26.
"""

from collections.abc import Mapping
from dataclasses import dataclass

MOST_WAITING = 30  # are looked at closely: beyond that decisions take hardly longer


@dataclass(frozen=True)
class DecisionCost:
    """Microseconds of one call of `decide`, of each query that waits and each that runs, and of each decision made."""

    call_us: float
    waiting_us: float
    running_us: float
    decision_us: float

    def before_us(self, waiting: int, running: int) -> float:
        """Return how long the policy looks."""
        return self.call_us + self.waiting_us * min(waiting, MOST_WAITING) + self.running_us * running


FREE = DecisionCost(0.0, 0.0, 0.0, 0.0)
OTHERS = DecisionCost(4.0, 0.5, 1.5, 3.5)  # of a policy that is not in the table: the middle of it
MEASURED: Mapping[str, DecisionCost] = {
    "gangway": DecisionCost(8.9, 6.5, 10.0, 4.5),
    "veltair": DecisionCost(2.9, 1.0, 1.8, 7.3),
    "veltair_as": DecisionCost(1.5, 1.3, 1.7, 7.4),
    "veltair_ac": DecisionCost(2.5, 0.3, 1.4, 3.1),
    "planaria": DecisionCost(0.7, 0.6, 0.3, 2.9),
    "fixed_block": DecisionCost(0.9, 1.1, 0.1, 4.1),
    "model_fcfs": DecisionCost(1.0, 0.3, 0.0, 3.7),
    "protean": DecisionCost(0.7, 0.6, 0.2, 3.6),
    "edf": DecisionCost(4.2, 0.3, 2.6, 1.2),
    "prema": DecisionCost(6.4, 3.0, 8.1, 0.0),
    "layerweaver_plus": DecisionCost(0.0, 0.5, 4.6, 11.2),
    "triton": DecisionCost(4.1, 0.2, 1.3, 1.4),
}


FAMILIES = ("veltair",)  # whose other members cost what the one of this name costs


def decision_cost(policy: str) -> DecisionCost:
    """Return the cost of a policy by its name; what stands behind a colon does not count."""
    name = policy.partition(":")[0]
    return MEASURED.get(name) or next((MEASURED[each] for each in FAMILIES if name.startswith(each)), OTHERS)
