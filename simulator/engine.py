"""The discrete-event driver: the policies of the live scheduler on a virtual clock. `docs/simulator.md` explains it.

Events are arrivals, what happens to running blocks (`floor.py`), and times that the policy or a queue policy asked for.
Between events everything proceeds as time tables say, so a block of a hundred layers is one event.
"""

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from gangway.scheduler.lateness import certain_from_us
from gangway.scheduler.lease_count import lease_count
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policy import Decision, Policy, Query, Reject, Resize, Snapshot, Start, Stop, Wake
from gangway.scheduler.timers import Timers
from gangway.simulator.floor import NEVER, Ended, Floor, Observer
from gangway.simulator.machine import Machine
from gangway.simulator.results import REFUSED, STATUSES, UNFINISHED, Counters, Limits, Result
from gangway.simulator.waiting import WaitingQueue
from gangway.workload.arrivals import Arrivals
from gangway.workload.outcomes import Outcomes

ARRIVALS_AT_ONCE = 4096  # are made Python numbers


class ContractError(ValueError):
    """A policy decided what its contract forbids."""


def simulate(
    policy: Policy,
    models: Mapping[int, ModelProfile],
    arrivals: Arrivals,
    machine: Machine,
    observer: Observer | None = None,
    limits: Limits | None = None,
) -> Result:
    """Let the policy serve the arrivals, to the last query, and return what became of each.

    `models`: by the numbers 0, 1, ... in `arrivals.models`, with times for every number of cores of the machine. Same
    input, same result. Beyond `limits` it gives up. Raises ContractError when the policy breaks its contract, or leaves
    queries waiting on idle cores for ever; ValueError for models that do not fit.
    """
    return Simulation(policy, models, arrivals, machine, observer, limits).run()


class Simulation:
    """One run."""

    def __init__(
        self,
        policy: Policy,
        models: Mapping[int, ModelProfile],
        arrivals: Arrivals,
        machine: Machine,
        observer: Observer | None = None,
        limits: Limits | None = None,
    ) -> None:
        if sorted(models) != list(range(len(models))):
            raise ValueError(f"models are numbered from 0 on, not {sorted(models)}")
        for number, model in models.items():
            if model.model_id != number or not model.latency_us or model.cores < machine.cores:
                raise ValueError(f"the profile of {model.name!r} is not number {number} with {machine.cores} cores")
        count = len(arrivals.times_us)
        self._policy = policy
        self._models = models
        self._arrivals = arrivals
        self._machine = machine
        self._observer = observer
        self._limits = limits
        self._counters = Counters()
        self._floor = Floor(machine, self._counters, observer)
        self._waiting = WaitingQueue()
        self._fractions: dict[int, float] = {}  # of the layer in which a query was stopped at once
        self._leases = machine.leases or lease_count(machine.cores)
        self._received: list[tuple[float, int, float, int]] = []  # heap: at the scheduler, number, arrival, model
        self._wake_us = NEVER
        self._late_watch = Timers()  # queries that are refused once they are certain to be late
        self._dropped: set[int] = set()  # those of them that run
        self._now_us = 0.0
        self._late = [0] * len(models)
        self._gave_up = False
        self._latency_us = np.full(count, np.nan)
        self._queue_us = np.full(count, np.nan)
        self._status = np.zeros(count, dtype=np.int64)

    def run(self) -> Result:
        """Return what became of each query."""
        stream, floor, waiting = self._stream(), self._floor, self._waiting
        arrival = next(stream, None)
        while (arrival is not None or self._received or floor.running or waiting) and not self._gave_up:
            arrival_us = arrival[0] if arrival is not None else NEVER
            watch_us = self._watch_us()
            received_us = self._received[0][0] if self._received else NEVER
            now_us = min(arrival_us, received_us, floor.next_us, self._wake_us, watch_us)
            if now_us == NEVER:
                raise ContractError(f"{self._policy.name} leaves {len(waiting)} queries waiting on idle cores")
            self._now_us = now_us
            happened = self._wake_us <= now_us
            if happened:
                self._wake_us = NEVER
            ended = floor.advance(now_us)
            if ended is not None:
                happened = True
                for each in ended:
                    self._ended(each)
            while arrival is not None and arrival[0] <= now_us:
                self._receive(*arrival)
                arrival = next(stream, None)
            while self._received and self._received[0][0] <= now_us:
                self._arrive(*heapq.heappop(self._received))
                happened = True
            if watch_us <= now_us:
                self._refuse_late()
            if happened:
                self._decide()
                floor.share_interference(now_us)
        return self._result()

    def _result(self) -> Result:
        if self._gave_up:
            unfinished = np.isnan(self._latency_us)
            self._latency_us[unfinished] = 0.0
            self._status[unfinished] = UNFINISHED
        names = tuple(self._models[number].name for number in range(len(self._models)))
        arrivals = self._arrivals
        outcomes = Outcomes(names, arrivals.models, arrivals.times_us, self._latency_us, self._status, STATUSES)
        return Result(outcomes, self._queue_us, self._counters, self._now_us, self._gave_up)

    # -- queries

    def _stream(self) -> Iterator[tuple[float, int, int]]:
        """Yield (arrival, number, model) as Python numbers, a few thousand at a time."""
        times_us, models = self._arrivals.times_us, self._arrivals.models
        for first in range(0, len(times_us), ARRIVALS_AT_ONCE):
            some = slice(first, first + ARRIVALS_AT_ONCE)
            pairs = zip(times_us[some].tolist(), models[some].tolist(), strict=True)
            for number, (time_us, model) in enumerate(pairs, first):
                yield time_us, number, model

    def _receive(self, arrival_us: float, number: int, model_id: int) -> None:
        """Front end and client work on a request. On a core that a gang uses they have half of it, as the gang has."""
        overheads = self._machine.overheads
        delay_us = overheads.submit_us
        if overheads.stolen_us and self._floor.steal(arrival_us, overheads.stolen_us):
            delay_us += overheads.stolen_us
        heapq.heappush(self._received, (arrival_us + delay_us, number, arrival_us, model_id))

    def _arrive(self, _now_us: float, number: int, arrival_us: float, model_id: int) -> None:
        """The scheduler has got a request."""
        model = self._models[model_id]
        deadline_us = None if model.qos_us is None else arrival_us + model.qos_us
        query = Query(number, model_id, 1, arrival_us, deadline_us, rejects_late=model.rejects_late)
        self._waiting.add(query)
        if model.rejects_late and not self._watch(query, None):
            self._refuse(self._waiting.take(number))
        if self._limits is not None and len(self._waiting) > self._limits.waiting:
            self._gave_up = True

    def _ended(self, ended: Ended) -> None:
        """A block has left: its query is answered, or waits again."""
        query = ended.block.query
        if ended.layer == ended.block.model.layers:
            self._answer(query)
        elif query.query_id in self._dropped:
            self._refuse(replace(query, started=True))
        else:
            if ended.fraction > 0:
                self._fractions[query.query_id] = ended.fraction
            ran_us = query.ran_us + self._now_us - ended.block.started_us
            self._waiting.add(replace(query, next_layer=ended.layer, started=True, ran_us=ran_us))

    def _answer(self, query: Query) -> None:
        self._late_watch.discard(query.query_id)
        self._leases += 1
        overheads = self._machine.overheads
        answered_us = self._now_us - overheads.leave_us + overheads.answer_us
        self._latency_us[query.query_id] = answered_us - query.arrival_us
        if query.deadline_us is not None and answered_us > query.deadline_us:
            self._late[query.model_id] += 1
            limits = self._limits
            if limits is not None:
                of_model = self._late[query.model_id] > limits.late_of[query.model_id]
                self._gave_up |= of_model or sum(self._late) > limits.late
        self._policy.finished(query, answered_us)

    def _refuse(self, query: Query) -> None:
        """Answer a query that is neither waiting nor running any more."""
        if query.started:
            self._leases += 1
            self._fractions.pop(query.query_id, None)
        self._dropped.discard(query.query_id)
        self._latency_us[query.query_id] = self._now_us + self._machine.overheads.answer_us - query.arrival_us
        self._status[query.query_id] = REFUSED

    def _watch_us(self) -> float:
        """Return when a query may be certain to be late: just after it could still have been in time."""
        next_us = self._late_watch.next_us
        return NEVER if next_us is None else math.nextafter(next_us, NEVER)

    def _refuse_late(self) -> None:
        """Refuse queries that are certain to be late: waiting ones now, running ones at the next layer boundary."""
        for query_id in self._late_watch.due(self._now_us):
            if not np.isnan(self._latency_us[query_id]):
                continue
            block = self._floor.running.get(query_id)
            if block is None:
                if not self._watch(self._waiting.find(query_id), None):
                    self._refuse(self._waiting.take(query_id))
            elif not self._watch(block.query, block.see(self._now_us).layer):
                self._dropped.add(query_id)
                self._floor.stop(self._now_us, Stop(query_id))

    def _watch(self, query: Query, layer: int | None) -> bool:
        """Look at a query when it may be certain to be late; False if it is."""
        from_us = certain_from_us(query, self._models[query.model_id], self._machine.cores, layer)
        if from_us is None:
            return True
        if from_us < self._now_us:
            return False
        self._late_watch.set(query.query_id, from_us)
        return True

    # -- decisions

    def _decide(self) -> None:
        floor = self._floor
        snapshot = Snapshot(
            self._now_us,
            self._waiting.queries,
            floor.view.at(self._now_us),
            floor.free.all(),
            self._machine.cores,
            self._models,
            floor.level,
            self._leases,
            self._machine.overheads.answer_us,
        )
        self._counters.decisions += 1
        for decision in self._policy.decide(snapshot):
            if self._observer is not None:
                self._observer.decided(self._now_us, decision)
            try:
                self._apply(decision)
            except (KeyError, ValueError, IndexError) as error:
                message = f"{self._policy.name} at {self._now_us:.1f} us: {decision}: {error}"
                raise ContractError(message) from error

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                self._start(decision)
            case Stop():
                self._floor.stop(self._now_us, decision)
            case Resize():
                self._floor.resize(self._now_us, decision)
            case Reject(query_id):
                self._refuse(self._waiting.take(query_id))
            case Wake(at_us):
                if at_us <= self._now_us:
                    raise ValueError("that time has passed")
                self._wake_us = at_us

    def _start(self, start: Start) -> None:
        query = self._waiting.find(start.query_id)
        if not query.started and self._leases == 0:
            return
        fraction = self._fractions.pop(query.query_id, 0.0) if query.started else 0.0
        self._floor.start(self._now_us, query, self._models[query.model_id], start, fraction)
        self._waiting.take(start.query_id)
        if not query.started:
            self._leases -= 1
            self._queue_us[query.query_id] = self._now_us - query.arrival_us
