"""parties: cores are divided among models, and the division follows feedback (PARTIES, ASPLOS 2019, section 4).

Twice a second the slack of each model is looked at: how much of its target the slowest of its queries left. Below 5 %
for some model, the one with the least slack is upsized by one core: an unused one, else one of the model with most
slack. Above 20 % for all, the one with most slack is downsized by one core, which stays unused, or helps best effort.
One step at a time, then half a second to see what it did.

Loose ends. The paper adjusts five resources; cores are the one that there is here, so its choice of which to try next
falls away, and so does its reverting of steps that hurt: the next half second upsizes again. Tail is the 99th
percentile, queries that still wait count with what they waited so far. The paper has fewer services than cores: with
more models than cores each model may use one core at a time, first come, first served. A model's queries are served in
order of arrival, each with all of the model's cores. Models without deadlines are its best-effort jobs.
"""

from collections import defaultdict

from gangway.scheduler.policy import Policy, Query, Snapshot, Start

INTERVAL_US = 500_000.0
UPSIZE_BELOW = 0.05
DOWNSIZE_ABOVE = 0.2


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
            if slack[neediest] < UPSIZE_BELOW:
                self._upsize(neediest, slack)
            elif slack[neediest] > DOWNSIZE_ABOVE:
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
            gang_size = min(snapshot.models[query.model_id].max_ranks, whole[query.model_id])
            if not free or left[query.model_id] < gang_size or (not query.started and leases == 0):
                left[query.model_id] = 0  # the next ones of this model wait for this one
                continue
            leases -= not query.started
            gang, free = free[:gang_size], free[gang_size:]
            left[query.model_id] -= len(gang)
            reason = f"share of {whole[query.model_id]} cores"
            layers = snapshot.models[query.model_id].layers
            starts.append(Start(query.query_id, layers, gang, wanted=gang_size, reason=reason))
        return starts

    def _bonus(self, model_id: int, snapshot: Snapshot) -> int:
        return self._unused() if snapshot.models[model_id].qos_us is None else 0


def _slack(query: Query, deadline_us: float, now_us: float) -> float:
    return (deadline_us - now_us) / max(deadline_us - query.arrival_us, 1.0)


def _tail(slacks: list[float]) -> float:
    """Return the slack that 99 % of the queries had; all of it where there were none."""
    return sorted(slacks)[len(slacks) // 100] if slacks else 1.0
