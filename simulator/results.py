"""What a simulation yields."""

from dataclasses import dataclass

import numpy as np
from gangway.workload.outcomes import OK, Outcomes
from numpy.typing import NDArray

STATUSES = (OK, "UNAVAILABLE")
REFUSED = 1  # index of the status of rejected queries


@dataclass
class Counters:
    """What happened, over all queries."""

    decisions: int = 0  # calls of the policy
    blocks: int = 0
    conflicts: int = 0  # blocks that got fewer cores than they wanted
    preemptions: int = 0  # Stops that took effect
    grown: int = 0
    shrunk: int = 0
    versions: int = 0  # layers that ran in another than their default version
    core_busy_us: float = 0.0  # cores x time held by blocks


@dataclass(frozen=True)
class Result:
    """`queue_us` [Q]: from the scheduled arrival to the first block's start; NaN for a refused query."""

    outcomes: Outcomes
    queue_us: NDArray[np.float64]
    counters: Counters
    end_us: float  # when the last query was answered
