"""A policy for each NUMA node: whatever the policy, no gang has cores of two nodes.

Fresh memory of a query belongs to the node whose workers touch it first, and its data is in this node's caches. So each
node has a policy of its own, which sees only this node's cores and the queries that were placed there. Until a query
starts, each decision places it where least work of its class, or of higher ones, has an earlier deadline: there it is
served first. A started query stays, unless its node has lost all workers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policy import Decision, LoneStart, Query, RunningBlock, Snapshot, Start, StartOver, Wake
from gangway.scheduler.profiles import ModelProfile

Nodes = tuple[tuple[int, ...], ...]  # the cores of each node
MAX_FORGOTTEN = 1024  # homes of queries that have left, kept until there are so many more than of others


class PerNode(Policy):
    """One policy a node. `nodes`: their cores, disjoint, all that the driver has; two or more of them.

    `make_policy` returns a fresh policy. Profiles have times for at least as many cores as the largest node has.
    """

    def __init__(self, make_policy: Callable[[], Policy], nodes: Nodes) -> None:
        self._policies = [make_policy() for _ in nodes]
        self._nodes = nodes
        self._node_of = {core: node for node, cores in enumerate(nodes) for core in cores}
        self._homes: dict[int, int] = {}  # the node of each query
        self._work_us = [0.0] * len(nodes)  # on one core: what waits and runs, as of the last decision
        self._counts = [len(cores) for cores in nodes]  # of cores in service
        self._models: dict[int, ModelProfile] = {}
        first = self._policies[0]
        self.name, self.config = first.name, first.config
        self.batches = first.batches

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        """Let each node's policy decide about its part; of their Wakes the first one counts."""
        self._models = dict(snapshot.models)
        free = [tuple([core for core in snapshot.free_cores if self._node_of[core] == node]) for node in self._all]
        running: list[list[RunningBlock]] = [[] for _ in self._all]
        for block in snapshot.running:
            node = self._homes[block.query.query_id] = self._node_of[block.cores[0]]
            running[node].append(block)
        self._counts = _in_service(self._nodes, free, running, snapshot.core_count)
        waiting = self._place(snapshot, running)
        self._forget(snapshot)
        decisions: list[Decision] = []
        wakes: list[Wake] = []
        leases = snapshot.free_leases
        for node in self._all:
            if not self._counts[node]:
                continue
            unseen = max(0, snapshot.waiting_count - len(snapshot.waiting)) // len(self._nodes)
            part = replace(
                snapshot,
                waiting=waiting[node],
                running=running[node],
                free_cores=free[node],
                core_count=self._counts[node],
                free_leases=leases,
                waiting_count=len(waiting[node]) + unseen if snapshot.waiting_count else 0,
            )
            new = {query.query_id for query in waiting[node] if not query.started}
            for decision in self._policies[node].decide(part):
                if isinstance(decision, Wake):
                    wakes.append(decision)
                    continue
                leases -= isinstance(decision, Start) and decision.query_id in new
                leases += isinstance(decision, StartOver)
                decisions.append(decision)
        if wakes:
            decisions.append(min(wakes, key=lambda wake: wake.at_us))
        return decisions

    def lone_start(self, model: ModelProfile, core_count: int, level: float) -> LoneStart | None:
        """Return it only for one core: the driver takes the first free ones, which may be of several nodes."""
        start = self._policies[0].lone_start(model, min(core_count, max(map(len, self._nodes))), level)
        return start if start is not None and start.cores == 1 else None

    def arrived(self, query: Query) -> None:
        """Place a request, and let that node's policy note it."""
        node = self._least()
        self._homes[query.query_id] = node
        self._work_us[node] += self._left_us(query, 0)
        self._policies[node].arrived(query)

    def finished(self, query: Query, now_us: float) -> None:
        """Let the policy of the query's node note it."""
        self._policies[self._homes.pop(query.query_id, 0)].finished(query, now_us)

    @property
    def _all(self) -> range:
        return range(len(self._nodes))

    def _place(self, snapshot: Snapshot, running: Sequence[Sequence[RunningBlock]]) -> list[list[Query]]:
        """Return the waiting queries of each node, in order of arrival."""
        homes, counts = self._homes, self._counts
        work_us = self._work_us = [0.0 for _ in self._all]
        entries: list[tuple[int, float, int, float, int | None]] = []  # most urgent first, once they are sorted
        for node, blocks in enumerate(running):
            for block in blocks:
                left_us = self._left_us(block.query, block.layer)
                work_us[node] += left_us
                entries.append((*_urgency(block.query), left_us, node))
        for query in snapshot.waiting:
            left_us = self._left_us(query, query.next_layer)
            home = homes.get(query.query_id) if query.started else None
            if home is not None and counts[home]:
                work_us[home] += left_us
                entries.append((*_urgency(query), left_us, home))
            else:
                entries.append((*_urgency(query), left_us, None))
        entries.sort()
        before_us = [0.0 for _ in self._all]  # the work that goes first
        in_service = [node for node in self._all if counts[node]]
        for _, _, query_id, left_us, home in entries:
            place = home
            if place is None:
                place = min(in_service, key=lambda n: (before_us[n] / counts[n], work_us[n] / counts[n]))
                homes[query_id] = place
                work_us[place] += left_us
            before_us[place] += left_us
        waiting: list[list[Query]] = [[] for _ in self._all]
        for query in snapshot.waiting:
            waiting[homes[query.query_id]].append(query)
        return waiting

    def _least(self) -> int:
        """Return the node that is done with its work first."""
        return min((node for node in self._all if self._counts[node]), key=lambda n: self._work_us[n] / self._counts[n])

    def _left_us(self, query: Query, layer: int) -> float:
        """Return how long one core would have to do with the rest of a query; 0 if that is not known."""
        known = query.model_id in self._models
        return query.profile(self._models).remaining_us(layer, 1, query.rows) if known else 0.0

    def _forget(self, snapshot: Snapshot) -> None:
        """Drop the homes of queries that have left without an end, as cancelled ones do."""
        present = len(snapshot.waiting) + len(snapshot.running)
        if len(self._homes) > 2 * max(present, snapshot.waiting_count) + MAX_FORGOTTEN:
            seen = [*snapshot.waiting, *(block.query for block in snapshot.running)]
            self._homes = {query.query_id: self._homes[query.query_id] for query in seen}


def _urgency(query: Query) -> tuple[int, float, int]:
    """Return the key by which queries are placed, unique for each: by class, then by deadline."""
    due_us = float("inf") if query.deadline_us is None else query.deadline_us
    return (query.priority, due_us, query.query_id)


def _in_service(
    nodes: Nodes, free: Sequence[tuple[int, ...]], running: Sequence[Sequence[RunningBlock]], core_count: int
) -> list[int]:
    """Return how many cores of each node are in service, given how many are in all.

    Those that are neither free nor seen in a gang are about to leave one, or have no worker: those of the node that
    has most of them are missing first.
    """
    counts = list(map(len, nodes))
    unseen = [
        count - len(cores) - sum(len(block.cores) for block in blocks)
        for count, cores, blocks in zip(counts, free, running, strict=True)
    ]
    for _ in range(sum(counts) - core_count):
        node = unseen.index(max(unseen))
        unseen[node] -= 1
        counts[node] -= 1
    return counts
