"""A scheduler on real workers whose batches a script makes: joined and cut as a test says, or at random."""

import random
from dataclasses import replace

from gangway.executor.slots import NEVER_JOINED, SlotStatus
from gangway.scheduler.batching.former import Formed, FormedPiece, FormedUnit
from tests.scheduler.conftest import Script, ScriptedServer


class ScriptedFormer:
    """Joins all fresh requests of at most `rows` rows when there are `count` of them, and cuts the batch as `cut` says.

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

    def form(self, waiting, now_us, models, core_count, free_cores, running, stretches):
        waiting = waiting.in_order
        fresh = [query for query in waiting if not query.started and not query.formed]
        self.seen += fresh
        alone = [query for query in fresh if query.join_key & NEVER_JOINED]
        joined = [query for query in fresh if query not in alone]
        others = [query for query in waiting if query not in fresh]
        if not self.count or len(joined) < self.count:
            return Formed([*others, *alone], {}, None)
        units = self._cut(joined)
        queries = [*others, *alone, *(unit.query for unit in units)]
        return Formed(sorted(queries, key=lambda query: query.arrival_us), {u.query.query_id: u for u in units}, None)

    def _cut(self, joined):
        line = [(query.query_id, row) for query in joined for row in range(query.rows)]
        total, self.batches = len(line), self.batches + 1
        units = []
        for rows in (*self.cut, total):
            mine, line = line[:rows], line[rows:]
            if not mine:
                continue
            pieces = [
                FormedPiece(query_id, min(row for other, row in mine if other == query_id), count)
                for query_id, count in _counts(mine)
            ]
            query_id = joined[0].query_id if not units else self.next_id()
            query = replace(joined[0], query_id=query_id, rows=len(mine), cores=1, formed=True)
            units.append(FormedUnit(query, tuple(pieces), total, self.batches))
        return units


def _counts(line):
    counts = {}
    for query_id, _ in line:
        counts[query_id] = counts.get(query_id, 0) + 1
    return counts.items()


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

    def _cut(self, joined):
        joined = joined[: self.random.randint(1, 4)]
        self.cut = tuple(self.random.randint(1, 3) for _ in range(self.random.randrange(4)))
        return super()._cut(joined)


class ChaosServer(BatchingServer):
    """Forms batches at random."""

    def make_former(self, next_id, *costs_us):
        self.former = ChaosFormer(next_id, *costs_us)
        return self.former
