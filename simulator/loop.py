"""The schedulers' loops on a virtual clock: a discrete-event simulation of the live policies.

`docs/explanation/simulator.md` explains it. Events are arrivals, what happens to running blocks (`machine.py`), and
times that a policy, the former of batches or a queue policy asked for (`scheduler.py`). Between events everything
proceeds as time tables say, so a block of a hundred layers is one event. A *request* arrives and is answered. What
waits and runs is a *query*: a request or a unit of a batch.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policy import Query
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.batching import Batching
from gangway.simulator.machine import NEVER, Machine, Observer
from gangway.simulator.node_choice import choose_node
from gangway.simulator.results import Result, ResultRecorder, SimulationCounters, SimulationLimits
from gangway.simulator.scheduler import ContractError, SharedParts, SimulatedScheduler
from gangway.workload.arrivals import Arrivals

__all__ = ["ContractError", "simulate"]
ARRIVALS_AT_ONCE = 4096  # are made Python numbers


@dataclass(frozen=True)
class LoadDetails:
    """What else is known of requests and models. Models are given by their numbers.

    `compounds`: by number of a request, the compound task that it is a member of (`Query.compound`). `row_bytes`: of a
    row's inputs and outputs.
    """

    compounds: Mapping[int, int] = field(default_factory=dict)
    row_bytes: Mapping[int, int] = field(default_factory=dict)


NO_DETAILS: Final = LoadDetails()


def simulate(
    policy: Policy | Sequence[Policy],
    models: Mapping[int, ModelProfile],
    arrivals: Arrivals,
    machine: Machine,
    observer: Observer | None = None,
    limits: SimulationLimits | None = None,
    batching: Batching | None = None,
    details: LoadDetails = NO_DETAILS,
) -> Result:
    """Let the policy serve the arrivals, to the last request, and return what became of each.

    `policy`: of each scheduler, if there are several (`Machine.schedulers`).
    `models`: by the numbers 0, 1, ... in `arrivals.models`, with times for every number of cores of a node. With
    `batching` a policy that is shown batches is shown them. Same input, same result. Beyond `limits` it gives up.
    Raises ContractError when the policy breaks its contract, or leaves queries waiting on idle cores for ever;
    ValueError for models or requests that do not fit.
    """
    policies = [policy] if isinstance(policy, Policy) else policy
    return Simulation(policies, models, arrivals, machine, observer, limits, batching, details).run()


class Simulation:
    """One run: arrivals, the schedulers that get them, and what became of them."""

    def __init__(
        self,
        policies: Sequence[Policy],
        models: Mapping[int, ModelProfile],
        arrivals: Arrivals,
        machine: Machine,
        observer: Observer | None,
        limits: SimulationLimits | None,
        batching: Batching | None,
        details: LoadDetails,
    ) -> None:
        if sorted(models) != list(range(len(models))):
            raise ValueError(f"models are numbered from 0 on, not {sorted(models)}")
        if len(policies) != machine.schedulers:
            raise ValueError(f"{machine.schedulers} schedulers need as many policies, not {len(policies)}")
        widest = machine.widest
        for number, model in models.items():
            if model.model_id != number or not model.latency_us or model.cores < widest:
                raise ValueError(f"the profile of {model.name!r} is not number {number} with {widest} cores")
        most = 1 if arrivals.rows is None else int(arrivals.rows.max())
        if batching is not None and policies[0].batches and most > batching.max_rows:
            raise ValueError(f"a request of {most} rows, where batches have {batching.max_rows} at most")
        self._results = ResultRecorder(models, arrivals, limits)
        self._models = models
        self._arrivals = arrivals
        self._counters = SimulationCounters()
        row_mb = {number: details.row_bytes.get(number, 0) / 1e6 for number in models}
        part = machine.of_scheduler()
        shared = SharedParts(
            models, part, self._results, self._counters, self._ended, len(arrivals), observer, batching,
            details.compounds, row_mb,
        )  # fmt: skip
        self._schedulers = [
            SimulatedScheduler(each, shared, number * part.cores) for number, each in enumerate(policies)
        ]
        self._cores = [part.cores] * len(policies)
        self._work_us = [0.0] * len(policies)  # of each scheduler's requests that clients have no answer to
        self._places: dict[int, int] = {}  # the scheduler of each of these
        self._answers: list[tuple[float, int, int, float]] = []  # heap: when clients get them
        self._sent: list[tuple[float, int, int, int]] = []  # heap: arrivals of a closed loop, as of the stream
        self._next = min(arrivals.clients or len(arrivals), len(arrivals))  # number that follows the stream's last one
        self._now_us = 0.0

    def run(self) -> Result:
        """Return what became of each request."""
        stream, schedulers, results, sent = self._stream(), self._schedulers, self._results, self._sent
        due = [NEVER] * len(schedulers)  # when something is to happen at each
        arrival = next(stream, None)
        while not results.gave_up:
            if arrival is None and not sent and not any(each.is_busy for each in schedulers):
                break
            arrival_us = arrival[0] if arrival is not None else NEVER
            if sent:
                arrival_us = min(arrival_us, sent[0][0])
            now_us = min(arrival_us, *due)
            if now_us == NEVER:
                raise next(each for each in schedulers if each.is_busy).stuck()
            self._now_us = now_us
            acting = {place for place, due_us in enumerate(due) if due_us <= now_us}
            for place in acting:
                schedulers[place].proceed(now_us)
            while arrival is not None and arrival[0] <= now_us:
                acting.add(self._receive(now_us, acting, *arrival))
                arrival = next(stream, None)
            while sent and sent[0][0] <= now_us:
                acting.add(self._receive(now_us, acting, *heapq.heappop(sent)))
            for place in acting:
                schedulers[place].act(now_us)
                due[place] = schedulers[place].next_us
        return results.result(self._counters, self._now_us)

    def _stream(self) -> Iterator[tuple[float, int, int, int]]:
        """Yield (arrival, number, model, rows) as Python numbers, a few thousand at a time."""
        arrivals, end = self._arrivals, self._next
        for first in range(0, end, ARRIVALS_AT_ONCE):
            some = slice(first, min(end, first + ARRIVALS_AT_ONCE))
            rows = repeat(1) if arrivals.rows is None else arrivals.rows[some].tolist()
            times_us, models = arrivals.times_us[some].tolist(), arrivals.models[some].tolist()
            for number, (time_us, model, count) in enumerate(zip(times_us, models, rows, strict=False), first):
                yield time_us, number, model, count

    def _receive(
        self, now_us: float, acting: set[int], arrival_us: float, number: int, model_id: int, rows: int
    ) -> int:
        """Choose a scheduler for a request that arrives, as a front end does, and return it."""
        place = self._choose(now_us, number, model_id, rows) if len(self._schedulers) > 1 else 0
        if place not in acting:
            self._schedulers[place].proceed(now_us)
        self._schedulers[place].receive(arrival_us, number, model_id, rows)
        return place

    def _choose(self, now_us: float, number: int, model_id: int, rows: int) -> int:
        answers, work_us = self._answers, self._work_us
        while answers and answers[0][0] <= now_us:
            _, _, place, ended_us = heapq.heappop(answers)
            work_us[place] -= ended_us
        place = choose_node(work_us, self._cores, number)
        work_us[place] += self._models[model_id].remaining_us(0, 1, rows)
        self._places[number] = place
        return place

    def _ended(self, request: Query, answered_us: float, now_us: float) -> None:
        """A client has its answer soon. In a closed loop it sends its next request then."""
        number, arrivals = request.query_id, self._arrivals
        if (place := self._places.pop(number, None)) is not None:
            asked_id = int(arrivals.models[number])
            ended_us = self._models[asked_id].remaining_us(0, 1, request.rows)
            heapq.heappush(self._answers, (answered_us, number, place, ended_us))
        if arrivals.clients and self._next < len(arrivals):
            number, self._next = self._next, self._next + 1
            rows = 1 if arrivals.rows is None else int(arrivals.rows[number])
            at_us = max(answered_us, now_us)
            heapq.heappush(self._sent, (at_us, number, int(arrivals.models[number]), rows))
