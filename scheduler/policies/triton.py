"""triton[:instances=I,threads=T]: Triton Inference Server's own scheduling, with an engine of T threads an instance.

Each model has a queue of its own, first in, first out, and I instances, each of which runs one whole query at a time on
T threads (default: 1 instance, as many threads as there are cores). Nothing coordinates the models: when more threads
are runnable than there are cores, the operating system slices time.

That is emulated: a query that has been on cores for 3 ms, the slice of Linux's scheduler for two busy threads a core,
is stopped between two tasks (`at_once`) if another instance is runnable, and goes to the back of the line. Kinder than
the real thing: here a gang is switched as a whole, there a barrier waits for whichever thread is off its core.
Triton's own dynamic batching is off by default, and so it is here; priorities act only within a model's queue.
"""

from dataclasses import dataclass

from gangway.scheduler.policy import Decision, Policy, Query, RunningBlock, Snapshot, Start, Stop, Wake

SLICE_US = 3000.0


@dataclass(frozen=True, slots=True)
class Instances:
    """An instance group. `threads` 0: as many as there are cores."""

    instances: int = 1
    threads: int = 0


class Triton(Policy):
    """Instances per model that know nothing of each other, on time-sliced cores."""

    name = "triton"

    def __init__(self, group: Instances = Instances()) -> None:
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
                layers = snapshot.models[query.model_id].layers
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
        return min(threads, snapshot.core_count, snapshot.models[query.model_id].max_ranks)

    def _end_slices(self, wanted: int, snapshot: Snapshot) -> list[Decision]:
        """Stop the longest slices until so many cores come free; if none is over, come back when one is."""
        decisions: list[Decision] = []
        stoppable: list[RunningBlock] = []
        for block in snapshot.running:
            if block.stopping:
                wanted -= len(block.cores)
            elif not snapshot.models[block.query.model_id].indivisible:
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
    return Triton(Instances(**values))
