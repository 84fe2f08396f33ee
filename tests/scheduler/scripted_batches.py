"""A scheduler on real workers whose batches a script makes: joined and cut as a test says, or at random."""

import random

from gangway.executor.slots import NEVER_JOINED, SlotStatus
from gangway.scheduler.batching.former import Formed
from gangway.scheduler.batching.planner import Part
from gangway.scheduler.units import Batch
from tests.scheduler.conftest import Script, ScriptedServer


class ScriptedFormer:
    """Joins all new requests of at most `rows` rows when there are `count` of them, and cuts the batch as `cut` says.

    `cut`: rows of each unit but the last, which takes what is left.
    """

    def __init__(self, next_id, *costs_us):
        self.next_id = next_id
        self.count, self.cut, self.batches = 1, (), 0
        self.seen = []

    def add(self, spec):
        pass

    def remove(self, model_id):
        pass

    def arrived(self, query):
        pass

    def form(self, waiting, now_us, models, core_count, free_cores, running, prediction_errors):
        waiting = waiting.in_order
        new = [query for query in waiting if not query.started and not query.formed]
        self.seen += new
        alone = [query for query in new if query.join_key & NEVER_JOINED]
        joined = [query for query in new if query not in alone]
        others = [query for query in waiting if query not in new]
        if not self.count or len(joined) < self.count:
            return Formed([*others, *alone], {}, None)
        units = self._batch(joined).units
        queries = [*others, *alone, *(unit.query for unit in units)]
        return Formed(sorted(queries, key=lambda query: query.arrival_us), {u.query.query_id: u for u in units}, None)

    def _batch(self, joined):
        left, self.batches = sum(query.rows for query in joined), self.batches + 1
        parts = []
        for rows in (*self.cut, left):
            parts.append(Part(1, min(rows, left)))
            left -= parts[-1].rows
        parts = [part for part in parts if part.rows]
        return Batch(self.batches, joined, parts, joined[0].deadline_us, self.next_id)


class Batching(Script):
    batches = True


class BatchingServer(ScriptedServer):
    """A scripted server whose policy is shown what a scripted former makes."""

    policy = Batching

    def __init__(self, cache_dir, key):
        super().__init__(cache_dir, key, max_rows=16)

    def make_former(self, next_id, *costs_us):
        self.former = ScriptedFormer(next_id, *costs_us)
        return self.former

    def submit(self, *rows, cut=(), **fields):
        """Requests of so many rows each, which are joined as soon as all are there."""
        self.former.count, self.former.cut = len(rows), cut
        return [self.request(rows=count, **fields) for count in rows]

    def is_complete(self, request):
        return self.outcome(request).status is SlotStatus.OK and self.counters(request) == {1}


class ChaosFormer(ScriptedFormer):
    """Joins some of what waits and cuts it anywhere."""

    def __init__(self, next_id, *costs_us):
        super().__init__(next_id, *costs_us)
        self.random = random.Random(7)

    def _batch(self, joined):
        joined = joined[: self.random.randint(1, 4)]
        self.cut = tuple(self.random.randint(1, 3) for _ in range(self.random.randrange(4)))
        return super()._batch(joined)


class ChaosServer(BatchingServer):
    """Forms batches at random."""

    def make_former(self, next_id, *costs_us):
        self.former = ChaosFormer(next_id, *costs_us)
        return self.former
