"""One scheduler on the virtual clock: its policy, what waits there, and the cores that it alone gives away.

`simulator/loop.py` tells it what arrives, and which events are due. A machine may have several.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gangway.artifact.precision import BF16, DEADLINE, FP32
from gangway.executor.leases import lease_count
from gangway.executor.slots import NEVER_JOINED
from gangway.scheduler.admission import certain_from_us
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.registry import build_policy
from gangway.scheduler.policy import Decision, Query, Reject, Replan, Resize, Snapshot, Start, StartOver, Stop, Wake
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.waiting import Timers, WaitingQueries
from gangway.simulator.batching import Batches, Batching, Singles
from gangway.simulator.decision_cost import FREE, decision_cost
from gangway.simulator.machine import NEVER, Ended, Machine, Observer, SimulatedCores
from gangway.simulator.results import ResultRecorder, SimulationCounters
from gangway.simulator.turn_cost import FREE_TURN, MEASURED_TURN


class ContractError(ValueError):
    """A policy decided what its contract forbids."""


@dataclass(frozen=True)
class SharedParts:
    """What the schedulers of one simulation share. `ended` is called when a request is over.

    `machine`: the part that is one scheduler's. `first_id`: of the units of batches. `row_mb`: megabytes of a row's
    inputs and outputs.
    """

    models: Mapping[int, ModelProfile]
    machine: Machine
    results: ResultRecorder
    counters: SimulationCounters
    ended: Callable[[Query, float, float], None]
    first_id: int
    observer: Observer | None
    batching: Batching | None
    compounds: Mapping[int, int]
    row_mb: Mapping[int, float]


class SimulatedScheduler:
    """A scheduler and its cores, `first_core` and those that follow it."""

    def __init__(self, policy: Policy, shared: SharedParts, first_core: int) -> None:
        self._policy = build_policy(policy)
        self._models = shared.models
        self._machine = machine = shared.machine
        self._results = shared.results
        self._counters = shared.counters
        self._request_ended = shared.ended
        self._observer = shared.observer
        self._compounds = shared.compounds
        self._row_mb = shared.row_mb
        self._requests: Singles = Singles()
        if shared.batching is not None and policy.batches:
            self._requests = Batches(shared.batching, shared.models, machine.cores, shared.first_id, shared.counters)
        self._cores = SimulatedCores(machine, shared.counters, shared.observer, first_core)
        self._waiting = WaitingQueries()
        self._fractions: dict[int, float] = {}  # of the layer in which a query was stopped at once
        self._leases = machine.leases or lease_count(machine.cores)
        self._received: list[tuple[float, int, float, int, int]] = []  # heap: at the scheduler, number, arrival, ...
        self._wake_us = NEVER
        self._cost = decision_cost(policy.name) if machine.charges_decisions else FREE
        self._turn = MEASURED_TURN if machine.charges_turns else FREE_TURN
        self._events = 0  # since the last decision: requests that have come or ended
        self._decide_us = NEVER  # the decision that is being made is ready
        self._scheduler_free_us = 0.0
        self._form_us = NEVER  # the former of batches wants to look again
        self._late_watch = Timers()  # requests that are refused once they are certain to be late
        self._dropped: set[int] = set()  # those of them of which rows run
        self._now_us = 0.0
        self._happened = False
        self._watched_us = NEVER

    @property
    def is_busy(self) -> bool:
        """Whether anything of a request is here."""
        return bool(self._received or self._cores.running or self._waiting)

    @property
    def next_us(self) -> float:
        """When something is to happen here, at the earliest."""
        received_us = self._received[0][0] if self._received else NEVER
        policy_us = min(self._decide_us, self._wake_us, self._form_us)
        return min(received_us, self._cores.next_us, policy_us, self._watch_us())

    def stuck(self) -> ContractError:
        """Return what is wrong if nothing is to happen here any more, though queries wait."""
        return ContractError(f"{self._policy.name} leaves {len(self._waiting)} queries waiting on idle cores")

    def proceed(self, now_us: float) -> None:
        """Let the cores proceed to this moment, before arrivals of it are received."""
        self._now_us = now_us
        self._watched_us = self._watch_us()
        self._happened = min(self._form_us, self._wake_us) <= now_us
        if self._happened:
            self._form_us = NEVER if self._form_us <= now_us else self._form_us
            self._wake_us = NEVER if self._wake_us <= now_us else self._wake_us
        ended = self._cores.advance(now_us)
        if ended is not None:
            self._happened = True
            for each in ended:
                self._ended(each)

    def act(self, now_us: float) -> None:
        """Do what is due at this moment."""
        while self._received and self._received[0][0] <= now_us:
            self._arrive(*heapq.heappop(self._received))
            self._happened = True
        if self._watched_us <= now_us:
            self._refuse_late()
        if self._happened and self._decide_us == NEVER:
            begin_us = max(now_us, self._scheduler_free_us)
            looks_us = self._cost.before_us(len(self._waiting), len(self._cores.running))
            looks_us += self._turn.us(self._events)
            self._decide_us = begin_us + looks_us
            self._counters.scheduler_us += looks_us
            self._events = 0
        if self._decide_us <= now_us:
            self._decide_us = NEVER
            decisions_us = self._cost.decision_us * self._decide()
            self._scheduler_free_us = now_us + decisions_us
            self._counters.scheduler_us += decisions_us
            self._happened = True
        if self._happened:
            self._cores.share_interference(now_us)

    # -- requests

    def receive(self, arrival_us: float, number: int, model_id: int, rows: int) -> None:
        """Front end and client work on a request. On a core that a gang uses they have half of it, as the gang has."""
        overheads, size_mb = self._machine.overheads, rows * self._row_mb[model_id]
        delay_us = overheads.submit_us + size_mb * overheads.submit_us_per_mb
        stolen_us = overheads.stolen_us + size_mb * overheads.stolen_us_per_mb
        if stolen_us and self._cores.steal(arrival_us, stolen_us):
            delay_us += stolen_us
        heapq.heappush(self._received, (arrival_us + delay_us, number, arrival_us, model_id, rows))

    def _arrive(self, _now_us: float, number: int, arrival_us: float, model_id: int, rows: int) -> None:
        """The scheduler has got a request."""
        model = self._models[model_id]
        deadline_us = None if model.qos_us is None else arrival_us + model.qos_us
        compound = self._compounds.get(number, 0)
        request = Query(
            number,
            model_id,
            rows,
            arrival_us,
            deadline_us,
            rejects_late=model.rejects_late,
            join_key=NEVER_JOINED if compound else 0,
            compound=compound,
            precision=FP32 if deadline_us is None or compound or model.in_bf16 is None else DEADLINE,
        )
        self._policy.arrived(request)
        self._requests.arrived(request)
        self._waiting.add(request)
        if model.rejects_late and not self._watch(request, ((request, None),)):
            self._discard(self._waiting.take(number))
        self._results.waiting(len(self._waiting))
        self._events += 1

    def _ended(self, ended: Ended) -> None:
        """A block has left: its query is done, or waits again."""
        query = ended.block.query
        if ended.layer == ended.block.model.layers:
            self._leases += 1
            self._finish(query, whole=True)
        elif self._nobody_waits_for(query):
            self._discard(replace(query, started=True))
        else:
            if ended.fraction > 0:
                self._fractions[query.query_id] = ended.fraction
            ran_us = query.ran_us + self._now_us - ended.block.started_us
            self._waiting.add(replace(query, next_layer=ended.layer, started=True, ran_us=ran_us))

    def _discard(self, query: Query) -> None:
        """Give up a query that neither waits nor runs."""
        if query.started:
            self._leases += 1
            self._fractions.pop(query.query_id, None)
        self._finish(query, whole=False)

    def _finish(self, query: Query, whole: bool) -> None:
        """Answer the requests whose last query this was."""
        overheads = self._machine.overheads
        for request, complete in self._requests.end(query, whole):
            self._late_watch.discard(request.query_id)
            self._dropped.discard(request.query_id)
            if complete:
                answered_us = self._now_us - overheads.leave_us + overheads.answer_us
                self._results.answered(request, answered_us)
                self._policy.finished(request, answered_us)
            else:
                answered_us = self._now_us + overheads.answer_us
                self._results.refused(request, answered_us)
            self._events += 1
            self._request_ended(request, answered_us, self._now_us)

    # -- those that are refused when they are late

    def _watch_us(self) -> float:
        """Return when a request may be certain to be late: just after it could still have been in time."""
        next_us = self._late_watch.next_us
        return NEVER if next_us is None else math.nextafter(next_us, NEVER)

    def _refuse_late(self) -> None:
        """Drop requests that are certain to be late, and the queries of which all requests were dropped.

        Waiting ones end now, running ones at the next layer boundary.
        """
        for number in self._late_watch.due(self._now_us):
            if not self._results.is_open(number) or number in self._dropped:
                continue
            places = [self._position(query_id) for query_id in self._requests.queries(number)]
            request = next(each for each in self._requests.members(places[0][0]) if each.query_id == number)
            if self._watch(request, places):
                continue
            self._dropped.add(number)
            for query, layer in places:
                if not self._nobody_waits_for(query):
                    continue
                if layer is None:
                    self._discard(self._waiting.take(query.query_id))
                else:
                    self._cores.stop(self._now_us, Stop(query.query_id))

    def _position(self, query_id: int) -> tuple[Query, int | None]:
        """Return a query and the layer it is in, None for one that waits."""
        block = self._cores.running.get(query_id)
        return (self._waiting.find(query_id), None) if block is None else (block.query, block.at(self._now_us).layer)

    def _nobody_waits_for(self, query: Query) -> bool:
        """Return whether all requests of a query were dropped."""
        return bool(self._dropped) and all(each.query_id in self._dropped for each in self._requests.members(query))

    def _watch(self, request: Query, places: Sequence[tuple[Query, int | None]]) -> bool:
        """Look at a request when any part of it may be certain to be late; False if one is."""
        if request.deadline_us is None:
            return True
        parts = [(replace(query, deadline_us=request.deadline_us), layer) for query, layer in places]
        models, cores = self._models, self._machine.cores
        times_us = [certain_from_us(part, part.profile(models), cores, layer) for part, layer in parts]
        from_us = min(time_us for time_us in times_us if time_us is not None)
        if from_us < self._now_us:
            return False
        self._late_watch.set(request.query_id, from_us)
        return True

    # -- decisions

    def _decide(self) -> int:
        """Ask the policy, do what it says, and return how many decisions that were."""
        cores = self._cores
        running, free_cores = cores.view.at(self._now_us), cores.free.all()
        waiting = self._requests.form(self._waiting, self._now_us, len(free_cores), running)
        self._form_us = NEVER if self._requests.wake_us is None else self._requests.wake_us
        if self._form_us <= self._now_us:
            raise ContractError(
                f"the former of batches wants to look again at {self._form_us:.1f} us, which has passed"
            )
        snapshot = Snapshot(
            self._now_us,
            waiting,
            running,
            free_cores,
            self._machine.cores,
            self._models,
            cores.level,
            self._leases,
            self._machine.overheads.answer_us,
            oldest_us=self._waiting.oldest_us,
            waiting_count=len(self._waiting),
        )
        self._counters.decisions += 1
        decisions = self._policy.decide(snapshot)
        for decision in decisions:
            if self._observer is not None:
                self._observer.decided(self._now_us, decision)
            try:
                self._apply(decision)
            except (KeyError, ValueError, IndexError) as error:
                message = f"{self._policy.name} at {self._now_us:.1f} us: {decision}: {error}"
                raise ContractError(message) from error
        return len(decisions)

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                self._start(decision)
            case Stop():
                self._cores.stop(self._now_us, decision)
            case Resize():
                self._cores.resize(self._now_us, decision)
            case Replan():
                self._cores.replan(self._now_us, decision)
            case Reject(query_id):
                self._requests.begin(query_id, self._waiting)
                self._discard(self._waiting.take(query_id))
            case StartOver(query_id):
                self._start_over(self._waiting.take(query_id))
            case Wake(at_us):
                if at_us <= self._now_us:
                    raise ValueError("that time has passed")
                self._wake_us = at_us

    def _start_over(self, query: Query) -> None:
        if not query.started:
            raise ValueError("it has not started")
        self._leases += 1
        self._fractions.pop(query.query_id, None)
        in_either = query.deadline_us is not None and self._models[query.model_id].in_bf16 is not None
        precision = DEADLINE if in_either and not query.formed else query.precision
        join_key = query.join_key | NEVER_JOINED
        self._waiting.add(replace(query, next_layer=0, started=False, join_key=join_key, precision=precision))

    def _start(self, start: Start) -> None:
        self._requests.begin(start.query_id, self._waiting)
        query = self._waiting.find(start.query_id)
        if not query.started and self._leases == 0:
            return
        if query.precision == DEADLINE:
            query = self._choose(query, start.precision or BF16)
        fraction = self._fractions.pop(query.query_id, 0.0) if query.started else 0.0
        part = self._requests.batch_part(query)
        self._cores.start(self._now_us, query, part, query.profile(self._models), start, fraction)
        self._waiting.take(start.query_id)
        if not query.started:
            self._leases -= 1
            for request in self._requests.members(query):
                self._results.started(request, self._now_us)

    def _choose(self, query: Query, precision: str) -> Query:
        """Let a query, and those of its batch, be in this precision; return it."""
        batch = [each for each in self._waiting.in_order if each.batch == query.batch] if query.batch else [query]
        for each in batch:
            self._waiting.remove(each)
            self._waiting.add(replace(each, precision=precision))
            self._counters.in_fp32 += precision == FP32
            self._counters.in_bf16 += precision != FP32
        return self._waiting.find(query.query_id)
