"""What a simulation counts, and the answers it collects."""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Answer(IntEnum):
    """What became of a query."""

    NONE = 0  # not answered
    OK = 1
    REJECTED = 2


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
class Outcomes:
    """One entry per query, in order of arrival. Times are microseconds.

    `latency_us`: from the scheduled arrival to the answer; NaN if it was never answered. `queue_us`: from arrival to
    the first block's start. `status`: `Answer`.
    """

    model: NDArray[np.int64]
    arrival_us: NDArray[np.float64]
    latency_us: NDArray[np.float64]
    queue_us: NDArray[np.float64]
    status: NDArray[np.int8]
    counters: Counters = field(default_factory=Counters)
    end_us: float = 0.0  # when the last query was answered
