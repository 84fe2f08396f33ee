"""What a simulation yields."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gangway.workload.outcomes import OK, Outcomes

STATUSES = (OK, "UNAVAILABLE", "UNFINISHED")
REFUSED = 1  # index of the status of rejected queries
UNFINISHED = 2  # of those that were not answered when a simulation was given up


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
    batches: int = 0  # of requests that were joined or split,
    batch_rows: int = 0  # the rows of them all,
    batch_units: int = 0  # and the gangs that they were split over
    core_busy_us: float = 0.0  # cores x time held by blocks


@dataclass(frozen=True)
class Limits:
    """When a simulation is given up, because what one wants to know is certain: more queries late, or waiting.

    `late`: over all models; `late_of[m]`: of model m.
    """

    late: int
    late_of: tuple[int, ...]
    waiting: int


@dataclass(frozen=True)
class Result:
    """`queue_us` [Q]: from the scheduled arrival to the first block's start; NaN for a refused query.

    `gave_up`: a limit was exceeded; the status of what was not answered is UNFINISHED, and its latency 0.
    """

    outcomes: Outcomes
    queue_us: NDArray[np.float64]
    counters: Counters
    end_us: float  # when the last query was answered
    gave_up: bool = False
