"""What a simulation yields, and the recorder that collects it request by request."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gangway.scheduler.policy import Query
from gangway.scheduler.profiles import ModelProfile
from gangway.workload.arrivals import Arrivals
from gangway.workload.outcomes import OK, Outcomes

STATUSES = (OK, "UNAVAILABLE", "UNFINISHED")
REFUSED = 1  # index of the status of rejected queries
UNFINISHED = 2  # of those that were not answered when a simulation was given up


@dataclass
class SimulationCounters:
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
    in_fp32: int = 0  # queries that could begin in either precision, by the one they got
    in_bf16: int = 0
    core_busy_us: float = 0.0  # cores x time held by blocks
    scheduler_us: float = 0.0  # processor time of all schedulers that passed on the virtual clock


@dataclass(frozen=True)
class SimulationLimits:
    """When a simulation is given up, because what one wants to know is certain: more queries late, or waiting.

    `counted`: numbers of the queries whose lateness counts. `late`: over all models; `late_of[m]`: of model m.
    """

    counted: range
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
    counters: SimulationCounters
    end_us: float  # when the last query was answered
    gave_up: bool = False


class ResultRecorder:
    """Requests by number, which is their index in the arrivals. `gave_up`: the limits are exceeded."""

    def __init__(self, models: Mapping[int, ModelProfile], arrivals: Arrivals, limits: SimulationLimits | None) -> None:
        count = len(arrivals)
        self._names = tuple(models[number].name for number in range(len(models)))
        self._models = arrivals.models
        self._times_us = arrivals.times_us.copy()  # of a closed loop as they become known
        self._limits = limits
        self._late = [0] * len(models)
        self._latency_us = np.full(count, np.nan)
        self._queue_us = np.full(count, np.nan)
        self._status = np.zeros(count, dtype=np.int64)
        self.gave_up = False

    def is_open(self, number: int) -> bool:
        """Return whether a request has no answer yet."""
        return bool(np.isnan(self._latency_us[number]))

    def waiting(self, count: int) -> None:
        """So many wait."""
        if self._limits is not None and count > self._limits.waiting:
            self.gave_up = True

    def started(self, request: Query, now_us: float) -> None:
        """The first block of a request runs."""
        if np.isnan(self._queue_us[request.query_id]):
            self._queue_us[request.query_id] = now_us - request.arrival_us

    def answered(self, request: Query, at_us: float) -> None:
        """The client has the answer."""
        self._ended(request, at_us)
        if request.deadline_us is not None and at_us > request.deadline_us:
            limits = self._limits
            if limits is not None and request.query_id in limits.counted:
                model = int(self._models[request.query_id])
                self._late[model] += 1
                of_model = self._late[model] > limits.late_of[model]
                self.gave_up |= of_model or sum(self._late) > limits.late

    def refused(self, request: Query, at_us: float) -> None:
        """The client knows that there will be no answer."""
        self._ended(request, at_us)
        self._status[request.query_id] = REFUSED

    def _ended(self, request: Query, at_us: float) -> None:
        self._times_us[request.query_id] = request.arrival_us
        self._latency_us[request.query_id] = at_us - request.arrival_us

    def result(self, counters: SimulationCounters, end_us: float) -> Result:
        """Return everything."""
        if self.gave_up:
            unfinished = np.isnan(self._latency_us)
            self._latency_us[unfinished] = 0.0
            self._status[unfinished] = UNFINISHED
        outcomes = Outcomes(self._names, self._models, self._times_us, self._latency_us, self._status, STATUSES)
        return Result(outcomes, self._queue_us, counters, end_us, self.gave_up)
