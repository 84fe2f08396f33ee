"""The simulated machine: its cores, the blocks that run on them, and how much they disturb each other.

Every running block has one event: when it reaches its target under present conditions. When a block starts, ends or
changes, the interference of the others changes. Those for which it changes by a step are timed anew: a few operations
for each running block.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import overload

from gangway.scheduler.policy import Decision, PlannedBlock, Query, Replan, Resize, RunningBlock, Start, Stop
from gangway.scheduler.prediction import layer_times_us
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.timeline import BatchPart
from gangway.simulator.block import BlockControl, SimulatedBlock
from gangway.simulator.results import SimulationCounters

NEVER = float("inf")
MAX_TABLES = 20_000  # of some hundred numbers each


@dataclass(frozen=True)
class Overheads:
    """What a query costs beside its layers, us. `docs/explanation/simulator.md` says how each was measured.

    `submit_us`, `answer_us`: from arrival until the scheduler has the request, and from the last layer's end until the
    client has the answer. `dispatch_us`: from a decision to the first task. `leave_us`: from a block's end until the
    scheduler may use its cores again. `grow_us`: from a decision until a joining rank works. `stop_us`: how long a Stop
    `at_once` lets the tasks in hand go on. `stolen_us`: CPU that front end and scheduler take from the workers for one
    query, where all share the cores; while a gang uses the first core they get half of it, so they take so much longer.
    `submit_us_per_mb`, `stolen_us_per_mb`: so much more for each million bytes of a request, which are copied.
    """

    submit_us: float = 0.0
    answer_us: float = 0.0
    dispatch_us: float = 0.0
    leave_us: float = 0.0
    grow_us: float = 0.0
    stop_us: float = 0.0
    stolen_us: float = 0.0
    submit_us_per_mb: float = 0.0
    stolen_us_per_mb: float = 0.0


NO_OVERHEADS = Overheads()


@dataclass(frozen=True)
class Machine:
    """Cores that share caches and memory.

    Contention: a running block's demand is the share of one core's memory bandwidth that its compulsory traffic takes;
    with `cores_contend` it is the number of its cores. The interference level that a block sees is `level_per_demand`
    times the demand of all OTHER running blocks; levels are rounded to multiples of `level_step`, so that a block is
    timed anew only when it matters.
    `nodes`: of NUMA, of as many cores each; no gang crosses them. Bandwidth is common to all.
    `leases`: how many queries can be on the way at once; 0: as many as in the live server.
    `charges_decisions`: whether the scheduler's CPU time passes on the virtual clock (`decision_cost.py`).
    `charges_turns`: whether the rest of its turns does, too (`turn_cost.py`).
    `schedulers`: each has as many of the cores for itself, with their share of caches and bandwidth.
    """

    cores: int
    overheads: Overheads = NO_OVERHEADS
    level_per_demand: float = 0.0
    level_step: float = 0.02
    leases: int = 0
    charges_decisions: bool = False
    charges_turns: bool = False
    cores_contend: bool = False
    nodes: int = 1
    schedulers: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for a machine that cannot be."""
        if self.cores < 1:
            raise ValueError(f"a machine has at least one core, not {self.cores}")
        if self.level_per_demand < 0 or self.level_step <= 0 or self.leases < 0:
            raise ValueError("level_per_demand and leases are not negative, level_step is positive")
        if self.nodes < 1 or self.cores % self.nodes:
            raise ValueError(f"{self.cores} cores cannot be split evenly over {self.nodes} nodes")
        if self.schedulers < 1 or self.cores % self.schedulers:
            raise ValueError(f"{self.cores} cores cannot be split evenly over {self.schedulers} schedulers")
        if max(self.nodes, self.schedulers) % min(self.nodes, self.schedulers):
            raise ValueError(f"{self.nodes} nodes cannot be split evenly over {self.schedulers} schedulers")

    @property
    def widest(self) -> int:
        """How many cores a gang can have."""
        return self.cores // max(self.nodes, self.schedulers)

    @property
    def node_cores(self) -> tuple[tuple[int, ...], ...]:
        """The cores of each node."""
        each = self.cores // self.nodes
        return tuple(tuple(range(first, first + each)) for first in range(0, self.cores, each))

    @property
    def scheduler_nodes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The cores of each scheduler, by node."""
        cores, each = self.cores // self.schedulers, self.widest
        return tuple(
            tuple(tuple(range(node, node + each)) for node in range(first, first + cores, each))
            for first in range(0, self.cores, cores)
        )

    def of_scheduler(self) -> "Machine":
        """Return the part that one scheduler has. Its blocks disturb each other as those of all cores would."""
        cores = self.cores // self.schedulers
        others = max(1, self.cores - 1) / max(1, cores - 1)
        return replace(
            self,
            cores=cores,
            level_per_demand=self.level_per_demand * others,
            nodes=max(1, self.nodes // self.schedulers),
            schedulers=1,
        )


class Observer:
    """Is told what happens; this one does not listen. For timelines and traces of decisions."""

    def ran(self, block: SimulatedBlock, begin_layer: int, end_layer: int, begin_us: float, end_us: float) -> None:
        """A block had the cores it has for this time, in which it was in layers [begin_layer, end_layer)."""

    def decided(self, now_us: float, decision: Decision) -> None:
        """The policy decided."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A block that has left its cores; its query goes on with `layer`, of which a fraction is done."""

    block: SimulatedBlock
    layer: int
    fraction: float


class SimulatedCores:
    """Cores, and the blocks that run on them by query. Times are microseconds; `now_us` never falls."""

    def __init__(
        self, machine: Machine, counters: SimulationCounters, observer: Observer | None, first_core: int = 0
    ) -> None:
        self.running: dict[int, SimulatedBlock] = {}
        self.view = RunningView(self.running)
        self.free = FreeCores(machine.cores, first_core)
        self._machine = machine
        self._first_core = first_core
        self._overheads = machine.overheads
        self._counters = counters
        self._observer = observer
        self._tables = TimeTables(machine.level_step)
        self._events: list[tuple[float, int, int, SimulatedBlock]] = []  # due, order, token, block
        self._order = 0
        self._demand = 0.0
        self._disturbed = False  # demand has changed since interference was shared out

    @property
    def next_us(self) -> float:
        """When something may happen, at the earliest."""
        return self._events[0][0] if self._events else NEVER

    @property
    def level(self) -> float:
        """The interference level that one more block would see."""
        return self._demand * self._machine.level_per_demand

    def advance(self, now_us: float) -> list[Ended] | None:
        """Let everything happen that is due; return the blocks that have left, None if nothing happened at all."""
        ended: list[Ended] | None = None
        events = self._events
        while events and events[0][0] <= now_us:
            _, _, token, block = heapq.heappop(events)
            if token != block.token:
                continue
            if ended is None:
                ended = []
            match block.control:
                case BlockControl.SHRINK:
                    self._shrink(block, now_us)
                case BlockControl.STOP_NOW:
                    position_us = block.position_us(now_us)
                    layer = block.layer(position_us)
                    ended.append(self._leave(block, now_us, layer, block.fraction(layer, position_us)))
                case BlockControl.RUN if block.keep:
                    self._counters.blocks += 1
                    self._shrink(block, now_us)
                case _:
                    ended.append(self._leave(block, now_us, block.target, 0.0))
        return ended

    def start(
        self, now_us: float, query: Query, part: BatchPart, model: ModelProfile, start: Start, fraction: float
    ) -> None:
        """Run a block on cores that are free; a fraction of its first layer is done. Raises ValueError."""
        if not start.cores:
            raise ValueError("no core")
        if not query.next_layer < start.end_layer <= model.layers:
            raise ValueError(f"layers end at {model.layers}, the query is at {query.next_layer}")
        self.free.take(start.cores)
        versions = (
            start.versions if any(start.versions) else ()
        )  # one table for all that say "default" in so many words
        block = SimulatedBlock(query, model, start.end_layer, start.cores, versions, start.blocks)
        block.batch_part = part
        block.scale = model.rows_scale(len(start.cores), query.rows)
        block.table = self._tables.times(model, len(start.cores), 0, block.begin, versions)
        block.enter(fraction, now_us, self._overheads.dispatch_us)
        self.running[query.query_id] = block
        counters = self._counters
        counters.blocks += 1
        counters.conflicts += start.wanted > len(start.cores)
        if versions:
            counters.versions += sum(map(bool, versions))
        self._set_demand(block)
        self._schedule(block, now_us)

    def stop(self, now_us: float, stop: Stop) -> None:
        """Tell a block to leave. Raises KeyError for a query that does not run."""
        block = self.running[stop.query_id]
        if block.model.indivisible or block.control is BlockControl.STOP_NOW:
            return
        if block.control is not BlockControl.STOP:
            block.control, block.keep = BlockControl.STOP, 0
            block.target = block.layer(block.position_us(now_us)) + 1
        if stop.at_once:
            due_us = now_us + self._overheads.stop_us
            if due_us < block.reach_us(block.target):
                block.control, block.due_us = BlockControl.STOP_NOW, due_us
        self._schedule(block, now_us)

    def resize(self, now_us: float, resize: Resize) -> None:
        """Let a block grow now or shrink at the next boundary. Raises KeyError, ValueError."""
        block = self.running[resize.query_id]
        if block.control in (BlockControl.STOP, BlockControl.STOP_NOW) or block.model.indivisible:
            return
        cores, before = resize.cores, block.cores
        if resize.versions is not None:
            self._plan(block, resize.versions, resize.blocks)
        if cores[: len(before)] == before and len(cores) > len(before):
            self._grow(block, now_us, cores)
        elif cores and cores == before[: len(cores)] and len(cores) < len(before):
            boundary = block.layer(block.position_us(now_us)) + 1
            if boundary < block.end_layer:
                block.control, block.target, block.keep = BlockControl.SHRINK, boundary, len(cores)
                self._schedule(block, now_us)
        else:
            raise ValueError(f"its cores are {before}")

    def replan(self, now_us: float, replan: Replan) -> None:
        """Change versions and blocks that lie before a block. Raises KeyError for a query that does not run."""
        block = self.running[replan.query_id]
        if block.control in (BlockControl.STOP, BlockControl.STOP_NOW) or block.model.indivisible:
            return
        self._plan(block, replan.versions, replan.blocks)
        if block.control is BlockControl.RUN:
            block.aim(block.layer(block.position_us(now_us)) + 1)
        self._retime(block, now_us)

    def _plan(self, block: SimulatedBlock, versions: tuple[int, ...], blocks: tuple[PlannedBlock, ...]) -> None:
        versions = versions if any(versions) else ()
        self._counters.versions += sum(map(bool, versions)) if versions != block.versions else 0
        block.versions, block.plan = versions, blocks

    def steal(self, now_us: float, time_us: float) -> bool:
        """Take the first core from its gang for some time; return whether there is one.

        That falls behind by its share of it.
        """
        for block in self.running.values():
            if self._first_core in block.cores:
                block.pause(now_us, time_us / len(block.cores))
                self._schedule(block, now_us)
                return True
        return False

    def share_interference(self, now_us: float) -> None:
        """Time those blocks anew for which the others' demand has changed by a step."""
        if not self._disturbed:
            return
        self._disturbed = False
        per_demand = self._machine.level_per_demand / self._machine.level_step
        total = self._demand
        for block in self.running.values():
            steps = int((total - block.demand) * per_demand + 0.5)
            if steps != block.steps:
                block.steps = steps
                table = self._tables.times(block.model, len(block.cores), steps, block.begin, block.versions)
                block.use_table(table, now_us, block.scale)
                self._schedule(block, now_us)

    def _leave(self, block: SimulatedBlock, now_us: float, layer: int, fraction: float) -> Ended:
        self._ran(block, now_us, layer + (fraction > 0))
        del self.running[block.query.query_id]
        block.token += 1
        self.free.give(block.cores)
        if block.demand:
            self._demand = self._demand - block.demand if self.running else 0.0  # no rounding stays
            self._disturbed = True
        self._counters.preemptions += layer < block.end_layer
        return Ended(block, layer, fraction)

    def _shrink(self, block: SimulatedBlock, now_us: float) -> None:
        self._ran(block, now_us, block.target)
        block.arrive(now_us)
        leaving = block.cores[block.keep :]
        block.cores = block.cores[: block.keep]
        self._counters.shrunk += 1
        self.free.give(leaving)
        block.aim(block.target)
        self._retime(block, now_us)

    def _grow(self, block: SimulatedBlock, now_us: float, cores: tuple[int, ...]) -> None:
        """New ranks join in the middle of a layer; until they work the block proceeds as before."""
        self.free.take(cores[len(block.cores) :])
        self._ran(block, now_us, block.layer(block.position_us(now_us)) + 1)
        before_us = block.reach_us(block.end_layer)
        block.cores = cores
        block.aim(block.layer(block.position_us(now_us)) + 1)
        self._counters.grown += 1
        self._retime(block, now_us)
        saved_us = before_us - block.reach_us(block.end_layer)
        if self._overheads.grow_us and saved_us > 0:
            share = saved_us / (before_us - now_us)  # of the joining time, what is lost to the full gang
            block.pause(now_us, min(saved_us, self._overheads.grow_us * share))
            self._schedule(block, now_us)

    def _ran(self, block: SimulatedBlock, now_us: float, layer: int) -> None:
        """Note that a block held its cores until now."""
        self._counters.core_busy_us += (now_us - block.held_us) * len(block.cores)
        if self._observer is not None:
            self._observer.ran(block, block.held_layer, layer, block.held_us, now_us)
        block.held_us, block.held_layer = now_us, layer

    def _retime(self, block: SimulatedBlock, now_us: float) -> None:
        """Its number of cores has changed."""
        count = len(block.cores)
        table = self._tables.times(block.model, count, block.steps, block.begin, block.versions)
        block.use_table(table, now_us, block.model.rows_scale(count, block.query.rows))
        self._set_demand(block)
        self._schedule(block, now_us)

    def _set_demand(self, block: SimulatedBlock) -> None:
        if not self._machine.level_per_demand:
            return
        demand = float(len(block.cores))
        if not self._machine.cores_contend:
            alone = self._tables.times(block.model, len(block.cores), 0, block.begin, block.versions)
            demand = self._tables.demand(block.model, block.begin, block.end_layer, alone)
        self._demand += demand - block.demand
        block.demand = demand
        self._disturbed = True

    def _schedule(self, block: SimulatedBlock, now_us: float) -> None:
        """Enter when it will reach its target, in place of what was entered before."""
        if block.control is not BlockControl.STOP_NOW:
            due_us = block.reach_us(block.target)
            if block.control is not BlockControl.SHRINK and not block.keep:
                due_us += self._overheads.leave_us
            block.due_us = due_us if due_us > now_us else now_us
        block.token += 1
        block.view_until_us = 0.0
        self._order += 1
        heapq.heappush(self._events, (block.due_us, self._order, block.token, block))


class RunningView(Sequence[RunningBlock]):
    """The running blocks as policies see them, made as they are looked at. Good until a decision is applied."""

    def __init__(self, running: dict[int, SimulatedBlock]) -> None:
        self._running = running
        self._blocks: list[SimulatedBlock] | None = None
        self._now_us = 0.0

    def at(self, now_us: float) -> "RunningView":
        """Show this moment."""
        self._now_us = now_us
        self._blocks = None
        return self

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningBlock]:
        now_us = self._now_us
        return iter([block.at(now_us) for block in self._running.values()])

    @overload
    def __getitem__(self, index: int) -> RunningBlock: ...

    @overload
    def __getitem__(self, index: slice) -> list[RunningBlock]: ...

    def __getitem__(self, index: int | slice) -> RunningBlock | list[RunningBlock]:
        if self._blocks is None:
            self._blocks = list(self._running.values())
        if isinstance(index, slice):
            return [block.at(self._now_us) for block in self._blocks[index]]
        return self._blocks[index].at(self._now_us)


class FreeCores:
    """Free cores in ascending order."""

    def __init__(self, count: int, first: int = 0) -> None:
        self._free = list(range(first, first + count))
        self._known: tuple[int, ...] | None = None

    def all(self) -> tuple[int, ...]:
        """Return the free cores."""
        if self._known is None:
            self._known = tuple(self._free)
        return self._known

    def take(self, cores: tuple[int, ...]) -> None:
        """Take cores that must be free. Raises ValueError if one is not, or is named twice."""
        free = self._free
        for core in cores:
            index = bisect_left(free, core)
            if index == len(free) or free[index] != core:
                raise ValueError(f"core {core} is not free")
            del free[index]
        self._known = None

    def give(self, cores: tuple[int, ...]) -> None:
        """Give cores back."""
        for core in cores:
            insort(self._free, core)
        self._known = None


class TimeTables:
    """`times(...)[l]`: microseconds from the query's first layer to the beginning of layer l, for one row.

    One table for each (model, versions, number of cores, interference level), made when it is asked for first.
    Models stay while it is used.
    """

    def __init__(self, level_step: float) -> None:
        self._level_step = level_step
        self._times: dict[tuple[int, tuple[int, ...], int, int, int], list[float]] = {}
        self._memory: dict[int, list[float]] = {}

    def times(
        self, model: ModelProfile, cores: int, steps: int, begin: int = 0, versions: tuple[int, ...] = ()
    ) -> list[float]:
        """Return the table at interference level `steps` x level_step; `versions` are those from layer `begin` on."""
        key = (id(model), versions, begin if versions else 0, cores, steps)
        table = self._times.get(key)
        if table is None:
            if len(self._times) >= MAX_TABLES:
                self._times.clear()
            table = self._times[key] = self._make(model, cores, steps * self._level_step, begin, versions)
        return table

    def demand(self, model: ModelProfile, begin: int, end: int, times: Sequence[float]) -> float:
        """Return the mean demand for memory of layers [begin, end), in one core's bandwidth; 0 if it is not known."""
        if not model.memory_us:
            return 0.0
        memory = self._memory.get(id(model))
        if memory is None:
            memory = self._memory[id(model)] = list(accumulate(model.memory_us, initial=0.0))
        time_us = times[end] - times[begin]
        return (memory[end] - memory[begin]) / time_us if time_us > 0 else 0.0

    def _make(
        self, model: ModelProfile, cores: int, level: float, begin: int, versions: tuple[int, ...]
    ) -> list[float]:
        chosen = [0] * model.layers
        chosen[begin : begin + len(versions)] = versions
        return list(accumulate(layer_times_us(model, cores, chosen, level), initial=0.0))
