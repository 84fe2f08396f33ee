"""The discrete-event driver: the policies of the live scheduler on a virtual clock. `docs/simulator.md` explains it.

Events are arrivals, and the next thing that happens to each running block: its end, or the boundary where it stops or
shrinks. Between events everything proceeds as time tables say, so a block of a hundred layers is one event. When a
block starts, ends or changes, the others' interference changes; those for which it changes by a step are timed anew:
a few operations for each running block.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import overload

import numpy as np
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policy import Decision, Policy, Query, Reject, Resize, RunningBlock, Snapshot, Start, Stop, Wake
from gangway.simulator.block import Block, Goal
from gangway.simulator.machine import Machine
from gangway.simulator.results import REFUSED, STATUSES, UNFINISHED, Counters, Limits, Result
from gangway.simulator.tables import TimeTables
from gangway.simulator.waiting import FreeCores, WaitingQueue
from gangway.workload.arrivals import Arrivals
from gangway.workload.outcomes import Outcomes

ARRIVALS_AT_ONCE = 4096  # are made Python numbers
LEASES_PER_CORE = 2
NEVER = float("inf")


class Observer:
    """Is told what happens; this one does not listen. For timelines and traces of decisions."""

    def ran(self, block: Block, begin_layer: int, end_layer: int, begin_us: float, end_us: float) -> None:
        """A block had the cores it has for this time, and was in layers [begin_layer, end_layer) meanwhile."""

    def decided(self, now_us: float, decision: Decision) -> None:
        """The policy decided."""


class RunningView(Sequence[RunningBlock]):
    """The running blocks as policies see them, made as they are looked at. Good until the decision is applied."""

    def __init__(self, running: dict[int, Block]) -> None:
        self._running = running
        self._blocks: list[Block] | None = None
        self._now_us = 0.0

    def at(self, now_us: float) -> None:
        """Show this moment."""
        self._now_us = now_us
        self._blocks = None

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningBlock]:
        now_us = self._now_us
        return iter([block.see(now_us) for block in self._running.values()])

    @overload
    def __getitem__(self, index: int) -> RunningBlock: ...

    @overload
    def __getitem__(self, index: slice) -> list[RunningBlock]: ...

    def __getitem__(self, index: int | slice) -> RunningBlock | list[RunningBlock]:
        if self._blocks is None:
            self._blocks = list(self._running.values())
        if isinstance(index, slice):
            return [block.see(self._now_us) for block in self._blocks[index]]
        return self._blocks[index].see(self._now_us)


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
    queries waiting on idle cores for ever.
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
        for number, model in enumerate(models[number] for number in range(len(models))):
            if model.model_id != number or not model.latency_us or model.cores < machine.cores:
                raise ValueError(f"the profile of {model.name!r} is not number {number} with {machine.cores} cores")
        self._policy = policy
        self._models = models
        self._arrivals = arrivals
        self._machine = machine
        self._observer = observer
        self._limits = limits
        self._late = [0] * len(models)
        self._gave_up = False
        self._tables = TimeTables(machine.level_step)
        self._waiting = WaitingQueue()
        self._free = FreeCores(machine.cores)
        self._running: dict[int, Block] = {}  # by query
        self._view = RunningView(self._running)
        self._fractions: dict[int, float] = {}  # of the layer in which a query was stopped at once
        self._leases = machine.leases or LEASES_PER_CORE * machine.cores
        self._events: list[tuple[float, int, int, Block]] = []  # due, order, token, block
        self._order = 0
        self._wake_us = NEVER
        self._demand = 0.0
        self._now_us = 0.0
        self._dirty = False  # demand has changed since interference was shared out
        count = len(arrivals.times_us)
        self._latency_us = np.full(count, np.nan)
        self._queue_us = np.full(count, np.nan)
        self._status = np.zeros(count, dtype=np.int64)
        self._counters = Counters()

    def run(self) -> Result:
        """Return what became of each query."""
        stream = self._stream()
        arrival = next(stream, None)
        while (arrival is not None or self._running or self._waiting) and not self._gave_up:
            arrival_us = arrival[1] if arrival is not None else NEVER
            event_us = self._events[0][0] if self._events else NEVER
            now_us = min(arrival_us, event_us, self._wake_us)
            if now_us == NEVER:
                raise ContractError(f"{self._policy.name} leaves {len(self._waiting)} queries waiting on idle cores")
            self._now_us = now_us
            happened = self._wake_us <= now_us
            if happened:
                self._wake_us = NEVER
            while self._events and self._events[0][0] <= now_us:
                _, _, token, block = heapq.heappop(self._events)
                if token == block.token:
                    self._due(block)
                    happened = True
            while arrival is not None and arrival[1] <= now_us:
                self._arrive(*arrival)
                happened = True
                arrival = next(stream, None)
            if happened:
                self._decide()
                if self._dirty:
                    self._share_interference()
        arrivals = self._arrivals
        if self._gave_up:
            unfinished = np.isnan(self._latency_us)
            self._latency_us[unfinished] = 0.0
            self._status[unfinished] = UNFINISHED
        names = tuple(self._models[number].name for number in range(len(self._models)))
        outcomes = Outcomes(names, arrivals.models, arrivals.times_us, self._latency_us, self._status, STATUSES)
        return Result(outcomes, self._queue_us, self._counters, self._now_us, self._gave_up)

    # -- arrivals

    def _stream(self) -> Iterator[tuple[int, float, float, int]]:
        """Yield (number, time at the scheduler, arrival, model) as Python numbers, a few thousand at a time."""
        times_us, models = self._arrivals.times_us, self._arrivals.models
        submit_us = self._machine.overheads.submit_us
        for first in range(0, len(times_us), ARRIVALS_AT_ONCE):
            some = slice(first, first + ARRIVALS_AT_ONCE)
            pairs = zip(times_us[some].tolist(), models[some].tolist(), strict=True)
            for number, (time_us, model) in enumerate(pairs, first):
                yield number, time_us + submit_us, time_us, model

    def _arrive(self, number: int, _now_us: float, arrival_us: float, model_id: int) -> None:
        qos_us = self._models[model_id].qos_us
        deadline_us = None if qos_us is None else arrival_us + qos_us
        self._waiting.add(Query(number, model_id, 1, arrival_us, deadline_us))
        if self._machine.overheads.stolen_us:
            self._steal()
        if self._limits is not None and len(self._waiting) > self._limits.waiting:
            self._gave_up = True

    def _steal(self) -> None:
        """Front end and scheduler take their time from the gang on the first core; the block proceeds so much later."""
        for block in self._running.values():
            if 0 in block.cores:
                block.since_us = self._later(block, self._machine.overheads.stolen_us / len(block.cores))
                self._schedule(block)
                return

    def _later(self, block: Block, delay_us: float) -> float:
        """Let a block stand still for some time from now on; return from when it proceeds."""
        now_us = self._now_us
        block.offset_us = block.position_us(now_us)
        block.view_until_us = 0.0
        return max(now_us, block.since_us) + delay_us

    # -- blocks

    def _due(self, block: Block) -> None:
        """A block has reached its target."""
        match block.goal:
            case Goal.SHRINK:
                self._shrink(block)
            case Goal.STOP_NOW:
                position_us = block.position_us(self._now_us)
                layer = block.layer(position_us)
                self._leave(block, layer, block.fraction(layer, position_us))
            case _:
                self._leave(block, block.target, 0.0)

    def _leave(self, block: Block, layer: int, fraction: float) -> None:
        """The block is over, with this layer to go on with, of which a fraction is done."""
        now_us, query, overheads = self._now_us, block.query, self._machine.overheads
        self._ran(block, layer + (fraction > 0))
        del self._running[query.query_id]
        block.token += 1
        self._free.give(block.cores)
        self._demand -= block.demand
        self._dirty = True
        if not self._running:
            self._demand = 0.0  # no rounding stays
        self._counters.preemptions += layer < block.end_layer
        if layer == block.model.layers:
            self._leases += 1
            answered_us = now_us - overheads.leave_us + overheads.answer_us
            self._latency_us[query.query_id] = answered_us - query.arrival_us
            if query.deadline_us is not None and answered_us > query.deadline_us:
                self._count_late(query.model_id)
            self._policy.finished(query, answered_us)
            return
        if fraction > 0:
            self._fractions[query.query_id] = fraction
        ran_us = query.ran_us + now_us - block.started_us
        self._waiting.add(replace(query, next_layer=layer, started=True, ran_us=ran_us))

    def _count_late(self, model_id: int) -> None:
        self._late[model_id] += 1
        limits = self._limits
        if limits is not None:
            self._gave_up |= self._late[model_id] > limits.late_of[model_id] or sum(self._late) > limits.late

    def _shrink(self, block: Block) -> None:
        self._ran(block, block.target)
        leaving = block.cores[block.keep :]
        block.cores = block.cores[: block.keep]
        self._counters.shrunk += 1
        self._free.give(leaving)
        block.goal, block.target = Goal.END, block.end_layer
        self._retime(block)

    def _ran(self, block: Block, layer: int) -> None:
        """Note that a block held its cores until now."""
        now_us = self._now_us
        self._counters.core_busy_us += (now_us - block.held_us) * len(block.cores)
        if self._observer is not None:
            self._observer.ran(block, block.held_layer, layer, block.held_us, now_us)
        block.held_us, block.held_layer = now_us, layer

    def _retime(self, block: Block, pause_us: float = 0.0) -> None:
        """Its number of cores has changed."""
        count = len(block.cores)
        table = self._tables.times(block.model, count, block.steps, block.begin, block.versions)
        block.use_table(table, self._now_us, block.model.rows_scale(count, block.query.rows))
        if pause_us:
            block.since_us += pause_us
        self._set_demand(block)
        self._schedule(block)

    def _set_demand(self, block: Block) -> None:
        if not self._machine.level_per_demand:
            return
        alone = self._tables.times(block.model, len(block.cores), 0, block.begin, block.versions)
        demand = self._tables.demand(block.model, block.begin, block.end_layer, alone)
        self._demand += demand - block.demand
        block.demand = demand
        self._dirty = True

    def _schedule(self, block: Block) -> None:
        """Enter when it will reach its target, in place of what was entered before."""
        if block.goal is not Goal.STOP_NOW:
            due_us = block.reach_us(block.target)
            if block.goal is not Goal.SHRINK:
                due_us += self._machine.overheads.leave_us
            block.due_us = max(self._now_us, due_us)
        block.token += 1
        block.view_until_us = 0.0
        self._order += 1
        heapq.heappush(self._events, (block.due_us, self._order, block.token, block))

    def _share_interference(self) -> None:
        """Time those blocks anew for which the others' demand has changed by a step."""
        self._dirty = False
        machine = self._machine
        if not machine.level_per_demand:
            return
        per_demand = machine.level_per_demand / machine.level_step
        total = self._demand
        for block in self._running.values():
            steps = int((total - block.demand) * per_demand + 0.5)
            if steps != block.steps:
                block.steps = steps
                table = self._tables.times(block.model, len(block.cores), steps, block.begin, block.versions)
                block.use_table(table, self._now_us, block.scale)
                self._schedule(block)

    # -- decisions

    def _decide(self) -> None:
        self._view.at(self._now_us)
        snapshot = Snapshot(
            self._now_us,
            self._waiting.queries,
            self._view,
            self._free.all(),
            self._machine.cores,
            self._models,
            self._demand * self._machine.level_per_demand,
            self._leases,
        )
        self._counters.decisions += 1
        for decision in self._policy.decide(snapshot):
            if self._observer is not None:
                self._observer.decided(self._now_us, decision)
            self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        try:
            match decision:
                case Start():
                    self._start(decision)
                case Stop():
                    self._stop(decision)
                case Resize():
                    self._resize(decision)
                case Reject(query_id):
                    self._reject(query_id)
                case Wake(at_us):
                    if at_us <= self._now_us:
                        raise ValueError("that time has passed")
                    self._wake_us = at_us
        except (KeyError, ValueError, IndexError) as error:
            raise ContractError(f"{self._policy.name} at {self._now_us:.1f} us: {decision}: {error}") from error

    def _start(self, start: Start) -> None:
        if self._leases == 0 and not self._waiting.find(start.query_id).started:
            return
        if not start.cores:
            raise ValueError("no core")
        self._free.take(start.cores)
        query = self._waiting.take(start.query_id)
        model = self._models[query.model_id]
        if not query.next_layer < start.end_layer <= model.layers:
            raise ValueError(f"layers end at {model.layers}, the query is at {query.next_layer}")
        if not query.started:
            self._leases -= 1
            self._queue_us[query.query_id] = self._now_us - query.arrival_us
        self._count(start)
        block = Block(query, model, start.end_layer, start.cores, start.versions)
        block.scale = model.rows_scale(len(start.cores), query.rows)
        block.table = self._tables.times(model, len(start.cores), 0, block.begin, start.versions)
        fraction = self._fractions.pop(query.query_id, 0.0) if query.started else 0.0
        block.enter(fraction, self._now_us, self._machine.overheads.dispatch_us)
        self._running[query.query_id] = block
        self._set_demand(block)
        self._schedule(block)

    def _count(self, start: Start) -> None:
        counters = self._counters
        counters.blocks += 1
        counters.conflicts += start.wanted > len(start.cores)
        if start.versions:
            counters.versions += sum(map(bool, start.versions))

    def _stop(self, stop: Stop) -> None:
        block = self._running[stop.query_id]
        if block.model.indivisible or block.goal is Goal.STOP_NOW:
            return
        now_us = self._now_us
        boundary = block.layer(block.position_us(now_us)) + 1
        if block.goal is not Goal.STOP:
            block.goal, block.target = Goal.STOP, boundary
        if stop.at_once:
            due_us = now_us + self._machine.overheads.stop_us
            if due_us < block.reach_us(block.target):
                block.goal, block.due_us = Goal.STOP_NOW, due_us
        self._schedule(block)

    def _resize(self, resize: Resize) -> None:
        block = self._running[resize.query_id]
        if block.goal in (Goal.STOP, Goal.STOP_NOW) or block.model.indivisible:
            return
        cores, before = resize.cores, block.cores
        if cores[: len(before)] == before and len(cores) > len(before):
            self._grow(block, cores)
        elif cores and cores == before[: len(cores)] and len(cores) < len(before):
            boundary = block.layer(block.position_us(self._now_us)) + 1
            if boundary < block.end_layer:
                block.goal, block.target, block.keep = Goal.SHRINK, boundary, len(cores)
                self._schedule(block)
        else:
            raise ValueError(f"its cores are {before}")

    def _grow(self, block: Block, cores: tuple[int, ...]) -> None:
        """New ranks join in the middle of a layer; until they work the block proceeds as before."""
        self._free.take(cores[len(block.cores) :])
        position_us = block.position_us(self._now_us)
        self._ran(block, block.layer(position_us) + 1)
        before_us = block.reach_us(block.end_layer)
        block.cores = cores
        block.goal, block.target = Goal.END, block.end_layer
        self._counters.grown += 1
        self._retime(block)
        saved_us = before_us - block.reach_us(block.end_layer)
        if self._machine.overheads.grow_us and saved_us > 0:
            share = saved_us / (before_us - self._now_us)  # of the joining time, what is lost to the full gang
            block.since_us += min(saved_us, self._machine.overheads.grow_us * share)
            self._schedule(block)

    def _reject(self, query_id: int) -> None:
        query = self._waiting.take(query_id)
        if query.started:
            self._leases += 1
            self._fractions.pop(query_id, None)
        self._latency_us[query_id] = self._now_us + self._machine.overheads.answer_us - query.arrival_us
        self._status[query_id] = REFUSED
