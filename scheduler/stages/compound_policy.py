"""Runs compound tasks by the schedules that were found for them, around a policy that decides about all others. Pure.

A compound task is a group of queries, one of each model, that come together (`Query.compound`). While it has its cores
its stages run one after the other, as "Automated Runtime-Aware Scheduling for Multi-Tenant DNN Inference on GPU" (Yu et
al., ICCAD 2021) has it, and the policy is not asked. The rules:

- It begins when all members wait, all cores that the schedule was measured on are free, and nobody goes before it: the
  order is that of classes, then of deadlines, those of best effort having one `BEST_EFFORT_US` after their arrival.
  So one compound task runs at a time, and a best-effort query waits for few of them.
- It waits for a missing member for `MISSING_US` at most, and for others that go first for a share of its own time.
- It is broken up when somebody waits whom it would make late or who is of a higher class, or when it has lost a core
  or a member. Its members are then ordinary queries, from the layer on where they are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from gangway.executor.fast_path import Completed
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policy import Decision, LoneStart, Query, RunningBlock, Snapshot, Start, Wake
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.stages.ir import Schedule, Stage, stage_us

SCHEDULE_BITS = 48  # of a query's `compound`, below the number of its schedule
MISSING_US = 1000.0
HOLD_SHARE = 1 / 8  # of the time that a schedule takes
BEST_EFFORT_US = 100e3
MARGIN = 1.3  # times what a task has left must be there for those who wait: more of them may come


class Fallback(Enum):
    """Why a compound task does not run, or not go on, by its schedule. The order is that of the counts in metrics."""

    MISSING = "a member is missing"
    BUSY = "others have its cores"
    TARGET = "others would be late"
    CORE = "a core is missing"
    LOST = "a member was lost"


@dataclass(frozen=True)
class StagePlan:
    """The schedule of models, by stream, as measured on `cores` cores; one run takes `time_us`."""

    model_ids: tuple[int, ...]
    stages: Schedule
    cores: int
    time_us: float

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """How many layers each stream has."""
        ends = Counter[int]()
        for stage in self.stages:
            ends.update({segment.stream: segment.end - segment.begin for segment in stage})
        return tuple(ends[stream] for stream in range(len(self.model_ids)))

    def streams_of(self, members: Sequence[Query]) -> tuple[Query, ...] | None:
        """Return the members by stream; None unless there is exactly one for each."""
        left = list(members)
        found = []
        for model_id in self.model_ids:
            query = next((query for query in left if query.model_id == model_id), None)
            if query is None:
                return None
            left.remove(query)
            found.append(query)
        return None if left else tuple(found)


@dataclass
class Task:
    """A compound task that waits or runs. `first_us`: when it was first seen; `due_us`: until when it waits on."""

    number: int
    plan: StagePlan
    first_us: float
    due_us: float | None = None
    members: tuple[Query, ...] = ()  # by stream, once it runs
    stage: int = -1  # that runs; -1: none
    begun_us: float = 0.0
    answered: int = 0  # members
    waiting: dict[int, Query] = field(default_factory=dict)
    running: dict[int, RunningBlock] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, float, float]:
        """Its place among those that wait."""
        return min(_key(query) for query in (*self.waiting.values(), *self.members))

    def reached(self) -> list[int]:
        """Return where each stream is when the present stage has ended."""
        ends = [0] * len(self.plan.model_ids)
        for stage in self.plan.stages[: self.stage + 1]:
            for segment in stage:
                ends[segment.stream] = segment.end
        return ends

    def left_us(self, now_us: float, models: Mapping[int, ModelProfile]) -> float:
        """Return how long it takes from now on: what is left of its time, and at least the stages that follow."""
        if self.stage < 0:
            return self.plan.time_us
        streams = [models[model_id] for model_id in self.plan.model_ids if model_id in models]
        following_us = 0.0
        if len(streams) == len(self.members):  # none is being unloaded
            following_us = sum(stage_us(streams, stage) for stage in self.plan.stages[self.stage + 1 :])
        return max(following_us, self.plan.time_us - (now_us - self.begun_us))


class CompoundPolicy(Policy):
    """Any policy, and compound tasks by schedule. `planned`, `fallen`: how many ran to their end so, and did not."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.name, self.config = inner.name, inner.config
        self.batches = inner.batches
        self._plans: dict[int, StagePlan] = {}
        self._tasks: dict[int, Task] = {}  # that may yet run by schedule, or do, by number
        self._broken: dict[int, Fallback] = {}
        self._active: Task | None = None
        self.planned = 0
        self.fallen: Counter[Fallback] = Counter()

    def use(self, schedule: int, plan: StagePlan | None) -> None:
        """Run compound tasks of this number by a plan from now on; None: by none."""
        if plan is None:
            self._plans.pop(schedule, None)
        else:
            self._plans[schedule] = plan

    def results(self) -> tuple[int, ...]:
        """Return how many ended by schedule, then how many were broken up for each reason."""
        return (self.planned, *(self.fallen[why] for why in Fallback))

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Let one compound task run by plan, or ask the policy."""
        if not self._plans and not self._tasks:
            return self._inner.decide(snapshot)
        others = self._sort_by_task(snapshot)
        active = self._active
        if active is not None:
            begun = self._go_on(active, snapshot, others)
            if begun is not None:
                return begun
        if not self._tasks:
            return self._ask(snapshot, ())
        begun, wakes = self._choose(snapshot, others)
        return begun or self._ask(snapshot, wakes)

    def lone_start(self, model: ModelProfile, core_count: int, level: float) -> LoneStart | None:
        """Return what the policy says."""
        return self._inner.lone_start(model, core_count, level)

    def arrived(self, query: Query) -> None:
        """Let the policy note a request."""
        self._inner.arrived(query)

    def finished(self, query: Query, now_us: float) -> None:
        """Let the policy note an answer. The last one of a compound task is its end."""
        self._inner.finished(query, now_us)
        task = self._active
        if task is not None and query.compound == task.number:
            task.answered += 1
            if task.answered == len(task.members):
                self._end(task)

    def answered(self, model_id: int, requests: Sequence[Completed], first_id: int) -> None:
        """Let the policy note requests that it has not seen. They are of no compound task."""
        self._inner.answered(model_id, requests, first_id)

    # -- what there is

    def _sort_by_task(self, snapshot: Snapshot) -> list[Query]:
        """Sort what waits and runs by compound task; return what waits otherwise."""
        now_us, others, seen = snapshot.now_us, [], set()
        for known in self._tasks.values():
            known.waiting, known.running = {}, {}
        for query in snapshot.waiting:
            seen.add(query.compound)
            task = self._task_of(query, now_us)
            if task is None:
                others.append(query)
            else:
                task.waiting[query.query_id] = query
        for block in snapshot.running:
            seen.add(block.query.compound)
            task = self._task_of(block.query, now_us)
            if task is not None:
                task.running[block.query.query_id] = block
        self._broken = {number: why for number, why in self._broken.items() if number in seen}
        for number in [number for number, task in self._tasks.items() if number not in seen]:
            if self._tasks[number] is not self._active:
                del self._tasks[number]  # its client is gone
        return others

    def _task_of(self, query: Query, now_us: float) -> Task | None:
        number = query.compound
        if not number or number in self._broken:
            return None
        if number not in self._tasks:
            plan = self._plans.get(number >> SCHEDULE_BITS)
            if plan is None:
                return None
            self._tasks[number] = Task(number, plan, now_us)
        return self._tasks[number]

    def _break(self, task: Task, why: Fallback) -> None:
        del self._tasks[task.number]
        self._broken[task.number] = why
        self.fallen[why] += 1
        if task is self._active:
            self._active = None

    def _end(self, task: Task) -> None:
        del self._tasks[task.number]
        self.planned += 1
        self._active = None

    # -- one that runs

    def _go_on(self, task: Task, snapshot: Snapshot, others: list[Query]) -> list[Decision] | None:
        """Return what it does next; None if it has ended, or is broken up by now."""
        why = self._trouble(task, snapshot, others)
        if why is not None:
            self._break(task, why)
            others += task.waiting.values()
            return None
        if task.running:
            return self._wait(task, snapshot, others)
        if task.stage + 1 == len(task.plan.stages):
            self._end(task)
            return None
        if len(snapshot.free_cores) < sum(segment.cores for segment in task.plan.stages[task.stage + 1]):
            return [Wake(snapshot.now_us + MISSING_US)]  # some ranks have yet to leave
        return self._next_stage(task, snapshot)

    def _trouble(self, task: Task, snapshot: Snapshot, others: Sequence[Query]) -> Fallback | None:
        for query, reached, layers in zip(task.members, task.reached(), task.plan.layers, strict=True):
            if query.query_id in task.running:
                continue
            waiting = task.waiting.get(query.query_id)
            if (reached < layers) if waiting is None else (waiting.next_layer != reached):
                return Fallback.LOST
        if snapshot.core_count != task.plan.cores:
            return Fallback.CORE
        if any(block.query.compound != task.number for block in snapshot.running):
            return Fallback.BUSY
        return Fallback.TARGET if self._suffers(task, snapshot, others) else None

    def _suffers(self, task: Task, snapshot: Snapshot, others: Sequence[Query]) -> bool:
        """Whether a compound task would make somebody late who is in time without it, or keeps a higher class.

        Others like it count only if they go before it.
        """
        key = task.key
        claims = [(query.priority, query.deadline_us, _own_us(query, snapshot)) for query in others]
        for other in self._tasks.values():
            if other is not task and other.waiting and other.key < key:
                claims += [(query.priority, query.deadline_us, other.plan.time_us) for query in other.waiting.values()]
        soon_us, left_us = snapshot.now_us + snapshot.way_back_us, -1.0
        for priority, deadline_us, own_us in claims:
            if priority < key[0]:
                return True
            if priority > key[0] or deadline_us is None or (spare_us := deadline_us - soon_us - own_us) < 0:
                continue
            left_us = MARGIN * task.left_us(snapshot.now_us, snapshot.models) if left_us < 0 else left_us
            if spare_us < left_us:
                return True
        return False

    def _wait(self, task: Task, snapshot: Snapshot, others: Sequence[Query]) -> list[Decision]:
        """Look again when somebody who has time now would have none any more, if it takes longer than it should."""
        last_us = [
            query.deadline_us - _own_us(query, snapshot)
            for query in others
            if query.deadline_us is not None and query.priority <= task.key[0]
        ]
        next_us = min((at_us for at_us in last_us if at_us > snapshot.now_us), default=None)
        return [] if next_us is None else [Wake(next_us)]

    def _next_stage(self, task: Task, snapshot: Snapshot) -> list[Decision]:
        task.stage += 1
        stages = task.plan.stages
        reason = f"stage {task.stage + 1} of {len(stages)} of a compound task, by its schedule"
        return _starts(stages[task.stage], task.members, sorted(snapshot.free_cores), reason)

    # -- those that wait

    def _choose(self, snapshot: Snapshot, others: list[Query]) -> tuple[list[Decision], list[Wake]]:
        """Begin the first compound task that can be; break up those that cannot soon. The others wait on."""
        now_us = snapshot.now_us
        wakes = []
        for task in sorted(self._tasks.values(), key=lambda task: task.key if task.waiting else (0, 0.0, 0.0)):
            members = task.plan.streams_of(list(task.waiting.values()))
            why, until_us = self._obstacle(task, members, snapshot, others)
            if why is None and members is not None:
                task.members, task.begun_us = members, now_us
                self._active = task
                for each in self._tasks.values():
                    each.due_us = None  # those that wait for it do not wait for others
                return self._next_stage(task, snapshot), []
            if until_us <= now_us:
                self._break(task, why or Fallback.MISSING)
                others += task.waiting.values()
            else:
                wakes.append(Wake(until_us))
        return [], wakes

    def _obstacle(
        self, task: Task, members: tuple[Query, ...] | None, snapshot: Snapshot, others: Sequence[Query]
    ) -> tuple[Fallback | None, float]:
        """Return why it cannot begin now, None if it can, and until when it waits on for that."""
        now_us, plan = snapshot.now_us, task.plan
        if task.running or any(query.next_layer for query in task.waiting.values()):
            return Fallback.LOST, now_us
        if snapshot.core_count != plan.cores:
            return Fallback.CORE, now_us
        if members is None:
            return Fallback.MISSING, task.first_us + MISSING_US
        if self._suffers(task, snapshot, others):
            return Fallback.TARGET, now_us
        if task.due_us is None:
            task.due_us = now_us + max(MISSING_US, HOLD_SHARE * plan.time_us)
        key = task.key
        before = [query for query in others if _key(query) < key]
        busy_us = sum(_own_us(query, snapshot) for query in before)
        busy_us += max((_left_us(block, snapshot) for block in snapshot.running), default=0.0)
        if now_us + busy_us > task.due_us or snapshot.free_leases < len(members):
            return Fallback.BUSY, now_us
        if before or snapshot.running or len(snapshot.free_cores) < plan.cores:
            return Fallback.BUSY, task.due_us
        return None, now_us

    # -- the policy

    def _ask(self, snapshot: Snapshot, wakes: Sequence[Wake]) -> Sequence[Decision]:
        """Ask the policy, which does not see compound tasks that wait to run by schedule."""
        hidden = {query_id for task in self._tasks.values() for query_id in task.waiting}
        if hidden:
            waiting = [query for query in snapshot.waiting if query.query_id not in hidden]
            count = snapshot.waiting_count and max(0, snapshot.waiting_count - len(hidden))
            snapshot = replace(snapshot, waiting=waiting, waiting_count=count)
        decisions: list[Decision] = []
        wanted = list(wakes)
        reasons = {query.query_id: self._broken[query.compound].value for query in snapshot.waiting
                   if query.compound in self._broken}  # fmt: skip
        for decision in self._inner.decide(snapshot):
            if isinstance(decision, Wake):
                wanted.append(decision)
            elif isinstance(decision, Start) and decision.query_id in reasons:
                why = f"its compound task is not run by schedule, since {reasons[decision.query_id]}"
                decisions.append(replace(decision, reason=f"{decision.reason}; {why}"))
            else:
                decisions.append(decision)
        if wanted:
            decisions.append(min(wanted, key=lambda wake: wake.at_us))
        return decisions


def _starts(stage: Stage, members: Sequence[Query], cores: Sequence[int], reason: str) -> list[Decision]:
    """Start a stage's segments on the first cores, in their order."""
    starts: list[Decision] = []
    first = 0
    for segment in stage:
        own = tuple(cores[first : first + segment.cores])
        first += segment.cores
        starts.append(
            Start(members[segment.stream].query_id, segment.end, own, segment.versions, reason=reason, together=True)
        )
    return starts


def _key(query: Query) -> tuple[int, float, float]:
    due_us = query.arrival_us + BEST_EFFORT_US if query.deadline_us is None else query.deadline_us
    return query.priority, due_us, query.arrival_us


def _own_us(query: Query, snapshot: Snapshot) -> float:
    """Return how long a waiting query takes on all cores; 0 if that is not known."""
    model = snapshot.models.get(query.model_id)
    return 0.0 if model is None else model.remaining_us(query.next_layer, snapshot.core_count, query.rows)


def _left_us(block: RunningBlock, snapshot: Snapshot) -> float:
    """Return how long a running query takes to its end on the cores that it has; 0 if that is not known."""
    model, query = snapshot.models.get(block.query.model_id), block.query
    return 0.0 if model is None else model.remaining_us(block.layer, len(block.cores), query.rows)
