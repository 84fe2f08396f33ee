"""Policies of other systems and papers, to compare with: `edf`, `prema`, `parties` and `triton`.

Each section names its source, and says where the source leaves something open or does not fit a machine of cores.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop

from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policy import Decision, Query, Resize, RunningBlock, Snapshot, Start, Stop, Wake

# From an order of queries to cores: the first has all that it can use, what is left goes to the next.

Item = Query | RunningBlock


def work(snapshot: Snapshot, waiting: Iterable[Query]) -> list[Item]:
    """Return all that can be ordered: these waiting queries, and the running blocks that can still be told something.

    Not those that are stopping already, nor those that nothing stops.
    """
    return [
        *waiting,
        *(
            block
            for block in snapshot.running
            if not block.stopping and not block.query.profile(snapshot.models).indivisible
        ),
    ]


def query_of(item: Item) -> Query:
    """Return the query itself."""
    return item if isinstance(item, Query) else item.query


def share_out(
    snapshot: Snapshot, ranking: Iterable[Item], at_most: int = 1_000_000, reason: str = ""
) -> list[Decision]:
    """Give the machine to the first `at_most` of `ranking`, each as many cores as it can use of those left.

    `ranking` is `work(...)`, most urgent first; it is read no further than there are cores. A query begins on the
    cores that are free and grows as others come free. Running blocks beyond those are stopped at the next layer
    boundary, or shrunk.
    """
    decisions: list[Decision] = []
    left = snapshot.core_count - sum(
        len(block.cores) for block in snapshot.running if block.query.profile(snapshot.models).indivisible
    )
    free = snapshot.free_cores
    leases = snapshot.free_leases
    served: set[int] = set()
    for item in ranking:
        if left <= 0 or len(served) == at_most:
            break
        query = query_of(item)
        target = min(left, query.profile(snapshot.models).max_ranks)
        if isinstance(item, Query):
            if not query.started:
                if leases == 0:
                    continue
                leases -= 1
            if free:
                decisions.append(_start(query, free[:target], target, snapshot, reason))
                free = free[target:]
        else:
            size = len(item.cores)
            joining = free[: max(0, target - size)]
            free = free[len(joining) :]
            if joining or target < size:
                decisions.append(Resize(query.query_id, (item.cores + joining)[:target], reason))
        left -= target
        served.add(query.query_id)
    decisions += [
        Stop(item.query.query_id, reason="others go first")
        for item in work(snapshot, ())
        if isinstance(item, RunningBlock) and item.query.query_id not in served
    ]
    return decisions


def _start(query: Query, cores: tuple[int, ...], wanted: int, snapshot: Snapshot, reason: str) -> Start:
    return Start(query.query_id, query.profile(snapshot.models).layers, cores, wanted=wanted, reason=reason)


# edf: earliest deadline first, preemptive (Liu and Layland, JACM 1973, section 7), over gangs of cores.
#
# Loose ends. The algorithm is for one processor: here the machine is the processor. The query with the earliest
# deadline has all cores that it can use, what it leaves goes to the next one. Preemption is at layer boundaries. Lower
# priority numbers go first whatever the deadline.

BEST_EFFORT_DUE_US = 1_000_000.0  # after its arrival


def due_us(query: Query) -> float:
    """Return the deadline; of a query without one, one second after its arrival.

    So best effort goes after what is due soon, and before whatever becomes due a second after its arrival: it ages,
    and nothing starves.
    """
    return query.arrival_us + BEST_EFFORT_DUE_US if query.deadline_us is None else query.deadline_us


class EarliestDeadlineFirst(Policy):
    """The machine to whoever is due first."""

    name = "edf"

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Start, grow, shrink and stop so that the earliest deadlines have the cores."""
        return share_out(snapshot, _by_deadline(work(snapshot, snapshot.waiting)), reason="earliest deadline")


def _by_deadline(items: list[Item]) -> Iterator[Item]:
    """Yield lazily: a few of many queries find cores."""
    heap = []
    for index, item in enumerate(items):
        query = query_of(item)
        heap.append((query.priority, due_us(query), query.query_id, index))
    heapify(heap)
    while heap:
        yield items[heappop(heap)[3]]


# prema: token-based temporal multitasking with preemption (PREMA, HPCA 2020, section V, Algorithms 2 and 3).
#
# One query has the machine at a time. A query earns tokens with its priority and its slowdown so far; those whose
# tokens reach a threshold are candidates; the candidate with the shortest estimated time goes next.
#
# Loose ends. The paper adds `priority x slowdown` at each call of its scheduler; we read it as the total that does not
# depend on how often it is called: `tokens = priority x (1 + time waited / isolated time)`, where waiting is all time
# off the cores. Priorities are the paper's 9, 3 and 1 for numbers below, at and above 0. The threshold is the largest
# number of tokens, rounded down to one of 9, 3, 1. Its CHECKPOINT costs time, ours is a stop at a layer boundary; its
# KILL, which throws work away, is left out. DRAIN or CHECKPOINT is decided as in Algorithm 3: whoever would lose more,
# relative to its isolated time, by waiting for the other. Tokens grow while nothing happens, so the policy looks again
# every 2.5 ms, ten times the paper's quota, because layers take that much longer here.

TOKENS = (9.0, 3.0, 1.0)  # tokens of high, medium and low priority
QUOTA_US = 2500.0


class Prema(Policy):
    """Tokens decide who may, the shortest of those does."""

    name = "prema"

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Give the machine to the shortest candidate, unless the one that runs had better end first."""
        ranking = self._ranking(work(snapshot, snapshot.waiting), snapshot)
        decisions = share_out(snapshot, ranking, at_most=1, reason="shortest of those with tokens")
        if snapshot.waiting:
            decisions.append(Wake(snapshot.now_us + QUOTA_US))
        return decisions

    def _ranking(self, items: list[Item], snapshot: Snapshot) -> list[Item]:
        tokens = {query_of(item).query_id: _tokens(item, snapshot) for item in items}
        threshold = next((level for level in TOKENS if level <= max(tokens.values(), default=0)), 0.0)

        def order(item: Item) -> tuple[bool, float, int]:
            query = query_of(item)
            return tokens[query.query_id] < threshold, _remaining_us(item, snapshot), query.query_id

        ranking = sorted(items, key=order)
        running = next((item for item in ranking if isinstance(item, RunningBlock)), None)
        if running is not None and _drains(running, ranking[0], snapshot):
            ranking.remove(running)
            ranking.insert(0, running)
        return ranking


def _tokens(item: Item, snapshot: Snapshot) -> float:
    query = query_of(item)
    on_cores_us = query.ran_us + (snapshot.now_us - item.started_us if isinstance(item, RunningBlock) else 0.0)
    waited_us = max(0.0, snapshot.now_us - query.arrival_us - on_cores_us)
    level = TOKENS[(query.priority > 0) - (query.priority < 0) + 1]
    return level * (1 + waited_us / _isolated_us(query, snapshot))


def _drains(running: RunningBlock, candidate: Item, snapshot: Snapshot) -> bool:
    """Say whether the candidate loses less by waiting than the running query would."""
    running_loses = _remaining_us(candidate, snapshot) / _isolated_us(running.query, snapshot)
    candidate_loses = _remaining_us(running, snapshot) / _isolated_us(query_of(candidate), snapshot)
    return running_loses > candidate_loses


def _remaining_us(item: Item, snapshot: Snapshot) -> float:
    query = query_of(item)
    layer = item.layer if isinstance(item, RunningBlock) else query.next_layer
    model = query.profile(snapshot.models)
    return model.remaining_us(layer, _gang(query, snapshot), query.rows)


def _isolated_us(query: Query, snapshot: Snapshot) -> float:
    model = query.profile(snapshot.models)
    return max(model.remaining_us(0, _gang(query, snapshot), query.rows), 1e-3)


def _gang(query: Query, snapshot: Snapshot) -> int:
    return min(snapshot.core_count, query.profile(snapshot.models).max_ranks)


# parties: cores are divided among models, and the division follows feedback (PARTIES, ASPLOS 2019, section 4).
#
# Twice a second the slack of each model is looked at: how much of its target the slowest of its queries left. Below 5
# % for some model, the one with the least slack is upsized by one core: an unused one, else one of the model with most
# slack. Above 20 % for all, the one with most slack is downsized by one core, which stays unused, or helps best
# effort. One step at a time, then half a second to see what it did.
#
# Loose ends. The paper adjusts five resources; cores are the one that there is here, so its choice of which to try
# next falls away, and so does its reverting of steps that hurt: the next half second upsizes again. Tail is the 99th
# percentile, queries that still wait count with what they waited so far. The paper has fewer services than cores: with
# more models than cores each model may use one core at a time, first come, first served. A model's queries are served
# in order of arrival, each with all of the model's cores. Models without deadlines are its best-effort jobs.

INTERVAL_US = 500_000.0
UPSIZE_BELOW_SLACK = 0.05  # share of the target
DOWNSIZE_ABOVE_SLACK = 0.2


class Parties(Policy):
    """Each model has its share of the cores; tail slack moves one core at a time."""

    name = "parties"

    def __init__(self) -> None:
        self._shares: dict[int, int] = {}
        self._cores = 0
        self._slacks: defaultdict[int, list[float]] = defaultdict(list)
        self._adjusted_us = 0.0

    def decide(self, snapshot: Snapshot) -> list[Start]:
        """Adjust the shares if it is time, then start what fits into them."""
        if self._shares.keys() != snapshot.models.keys() or self._cores != snapshot.core_count:
            self._divide(snapshot)
        elif snapshot.now_us - self._adjusted_us >= INTERVAL_US:
            self._adjust(snapshot)
        return self._starts(snapshot)

    def finished(self, query: Query, now_us: float) -> None:
        """Note which part of its time the query left."""
        if query.deadline_us is not None:
            self._slacks[query.model_id].append(_slack(query, query.deadline_us, now_us))

    def _divide(self, snapshot: Snapshot) -> None:
        each, more = divmod(snapshot.core_count, len(snapshot.models)) if snapshot.models else (0, 0)
        self._shares = {
            model_id: max(1, each + (index < more)) for index, model_id in enumerate(sorted(snapshot.models))
        }
        self._cores = snapshot.core_count
        self._adjusted_us = snapshot.now_us
        self._slacks.clear()

    def _unused(self) -> int:
        return max(0, self._cores - sum(self._shares.values()))

    def _adjust(self, snapshot: Snapshot) -> None:
        for query in snapshot.waiting:
            self.finished(query, snapshot.now_us)
        targeted = [model_id for model_id in sorted(self._shares) if snapshot.models[model_id].qos_us is not None]
        slack = {model_id: _tail(self._slacks[model_id]) for model_id in {*targeted, *self._slacks} & {*self._shares}}
        if slack:
            neediest = min(sorted(slack), key=slack.__getitem__)
            if slack[neediest] < UPSIZE_BELOW_SLACK:
                self._upsize(neediest, slack)
            elif slack[neediest] > DOWNSIZE_ABOVE_SLACK:
                self._take_one(slack)
        self._slacks.clear()
        self._adjusted_us = snapshot.now_us

    def _upsize(self, model_id: int, slack: dict[int, float]) -> None:
        others = {other: slack.get(other, float("inf")) for other in self._shares if other != model_id}
        if self._unused() or self._take_one(others):
            self._shares[model_id] += 1

    def _take_one(self, slack: dict[int, float]) -> bool:
        """Take a core from the model with most slack that has two; say whether there was one."""
        donors = [model_id for model_id in sorted(slack) if self._shares[model_id] > 1]
        if not donors:
            return False
        self._shares[max(donors, key=slack.__getitem__)] -= 1
        return True

    def _starts(self, snapshot: Snapshot) -> list[Start]:
        free = snapshot.free_cores
        leases = snapshot.free_leases
        left = {model_id: share + self._bonus(model_id, snapshot) for model_id, share in self._shares.items()}
        whole = dict(left)
        for block in snapshot.running:
            left[block.query.model_id] -= len(block.cores)
        starts = []
        for query in snapshot.waiting:
            gang_size = min(query.profile(snapshot.models).max_ranks, whole[query.model_id])
            if not free or left[query.model_id] < gang_size or (not query.started and leases == 0):
                left[query.model_id] = 0  # the next ones of this model wait for this one
                continue
            leases -= not query.started
            gang, free = free[:gang_size], free[gang_size:]
            left[query.model_id] -= len(gang)
            reason = f"share of {whole[query.model_id]} cores"
            layers = query.profile(snapshot.models).layers
            starts.append(Start(query.query_id, layers, gang, wanted=gang_size, reason=reason))
        return starts

    def _bonus(self, model_id: int, snapshot: Snapshot) -> int:
        return self._unused() if snapshot.models[model_id].qos_us is None else 0


def _slack(query: Query, deadline_us: float, now_us: float) -> float:
    return (deadline_us - now_us) / max(deadline_us - query.arrival_us, 1.0)


def _tail(slacks: list[float]) -> float:
    """Return the slack that 99 % of the queries had; all of it where there were none."""
    return sorted(slacks)[len(slacks) // 100] if slacks else 1.0


# triton[:instances=I,threads=T]: Triton Inference Server's own scheduling, with an engine of T threads an instance.
#
# Each model has a queue of its own, first in, first out, and I instances, each of which runs one whole query at a time
# on T threads (default: 1 instance, as many threads as there are cores). Nothing coordinates the models: when more
# threads are runnable than there are cores, the operating system slices time.
#
# That is emulated: a query that has been on cores for 3 ms, the slice of Linux's scheduler for two busy threads a
# core, is stopped between two tasks (`at_once`) if another instance is runnable, and goes to the back of the line.
# Kinder than the real thing: here a gang is switched as a whole, there a barrier waits for whichever thread is off its
# core. Triton's own dynamic batching is off by default, and so it is here; priorities act only within a model's queue.

SLICE_US = 3000.0


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """An instance group. `threads` 0: as many as there are cores."""

    instances: int = 1
    threads: int = 0


class Triton(Policy):
    """Instances per model that know nothing of each other, on time-sliced cores."""

    name = "triton"

    def __init__(self, group: InstanceGroup = InstanceGroup()) -> None:
        self._group = group
        self._turns: dict[int, int] = {}  # of queries in the line for cores
        self._next_turn = 0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Give free cores to whoever is first in line; end slices that are over while somebody waits."""
        line = self._line(snapshot)
        decisions: list[Decision] = []
        free = snapshot.free_cores
        wanted = 0
        for query in line:
            threads = self._threads(query, snapshot)
            gang, free = free[:threads], free[threads:]
            if gang:
                layers = query.profile(snapshot.models).layers
                decisions.append(Start(query.query_id, layers, gang, wanted=threads, reason="first in line"))
            else:
                wanted += threads
        return decisions + self._end_slices(wanted, snapshot)

    def _line(self, snapshot: Snapshot) -> list[Query]:
        """Return the queries that instances hold and that are off the cores, those first that are longest."""
        busy: dict[int, int] = {}
        waiting = snapshot.waiting
        for query in [*(block.query for block in snapshot.running), *(query for query in waiting if query.started)]:
            busy[query.model_id] = busy.get(query.model_id, 0) + 1
        line = []
        leases = snapshot.free_leases
        for query in sorted(waiting, key=lambda query: (query.priority, query.query_id)):
            if not query.started:
                if busy.get(query.model_id, 0) >= self._group.instances or leases == 0:
                    continue
                busy[query.model_id] = busy.get(query.model_id, 0) + 1
                leases -= 1
            line.append(query)
        self._turns = {query.query_id: self._turn(query) for query in line}
        return sorted(line, key=lambda query: self._turns[query.query_id])

    def _turn(self, query: Query) -> int:
        if query.query_id not in self._turns:
            self._next_turn += 1
            return self._next_turn
        return self._turns[query.query_id]

    def _threads(self, query: Query, snapshot: Snapshot) -> int:
        threads = self._group.threads or snapshot.core_count
        return min(threads, snapshot.core_count, query.profile(snapshot.models).max_ranks)

    def _end_slices(self, wanted: int, snapshot: Snapshot) -> list[Decision]:
        """Stop the longest slices until so many cores come free; if none is over, come back when one is."""
        decisions: list[Decision] = []
        stoppable: list[RunningBlock] = []
        for block in snapshot.running:
            if block.stopping:
                wanted -= len(block.cores)
            elif not block.query.profile(snapshot.models).indivisible:
                stoppable.append(block)
        for block in sorted(stoppable, key=lambda block: (block.started_us, block.query.query_id)):
            if wanted <= 0:
                break
            over_us = block.started_us + SLICE_US
            if over_us > snapshot.now_us:
                decisions.append(Wake(over_us))
                break
            decisions.append(Stop(block.query.query_id, at_once=True, reason="end of its slice"))
            wanted -= len(block.cores)
        return decisions


def make_triton(argument: str) -> Triton:
    """Return the policy for "", "instances=I", "threads=T" or both with a comma; ValueError says what is wrong."""
    values = {"instances": 1, "threads": 0}
    for part in filter(None, argument.split(",")):
        key, _, value = part.partition("=")
        if key not in values or not value.isdecimal() or int(value) == 0:
            raise ValueError(f"scheduler 'triton' takes instances=I,threads=T (1 and more), got {part!r}")
        values[key] = int(value)
    return Triton(InstanceGroup(**values))
