"""What gangs execute: units, which are made of pieces of requests. The live scheduler and the simulator have the same.

A request that comes is a unit of its own. A batch is one or more whole requests, laid end to end, and cut into units,
one for each part of its plan. So requests may share a unit, and a request may lie in several.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from gangway.artifact.precision import BF16, DEADLINE
from gangway.scheduler.batching.planner import Part
from gangway.scheduler.policy import Query
from gangway.scheduler.timeline import BatchPart
from gangway.scheduler.waiting import WaitingQueries


class Piece(NamedTuple):
    """Rows [first_row, first_row + rows) of a request. `number`: of the piece among those of its request."""

    request_id: int  # number of the request's query
    first_row: int
    rows: int
    number: int = 0


class Unit:
    """What one gang executes: pieces, in the order of its rows. Policies see its query.

    `index`: of the unit in its batch. A whole request alone has no batch.
    """

    __slots__ = ("batch", "index", "pieces", "query")

    def __init__(self, query: Query, pieces: tuple[Piece, ...], batch: "Batch | None" = None, index: int = 0) -> None:
        self.query = query
        self.pieces = pieces
        self.batch = batch
        self.index = index

    @property
    def batch_part(self) -> BatchPart:
        """The unit as timelines and traces show it."""
        rows, requests = self.query.rows, len(self.pieces)
        if self.batch is None:
            return BatchPart(rows, requests)
        return BatchPart(rows, requests, self.batch.number, self.index + 1, self.batch.size)


def whole_request(query: Query) -> Unit:
    """Return the one unit of a request that is alone."""
    return Unit(query, (Piece(query.query_id, 0, query.rows),))


class Batch:
    """Whole requests, laid end to end and cut into units, one for each part of a plan.

    The units of round 0 exist from the beginning, the others from `begin` on: most batches are shown to a policy and
    never begin. The first unit has the number of the first request, other units have new ones. `deadline_us`: of the
    batch. `leader_id`: the request that stands for the batch in statistics, once one does.
    """

    __slots__ = ("_deadline_us", "_next_id", "_parts", "leader_id", "number", "requests", "rows", "units")

    def __init__(
        self,
        number: int,
        requests: Sequence[Query],
        parts: Sequence[Part],
        deadline_us: float | None,
        next_id: Callable[[], int],
    ) -> None:
        self.number = number
        self.requests = requests
        self.rows = sum([part.rows for part in parts])
        self.leader_id: int | None = None
        self.units: list[Unit] = []
        self._parts = parts
        self._deadline_us = deadline_us
        self._next_id = next_id
        self._make_units(sum([not part.round for part in parts]))

    @property
    def size(self) -> int:
        """The number of its units, made or not."""
        return len(self._parts)

    def begin(self) -> Sequence[Unit]:
        """Make the units of later rounds, too; return all units."""
        if len(self.units) < len(self._parts):
            self._make_units(len(self._parts))
        return self.units

    def _make_units(self, end: int) -> None:
        first, leader = len(self.units), self.requests[0]
        arrival_us = min([query.arrival_us for query in self.requests])
        largest_rows = max([query.rows for query in self.requests])
        precision = leader.precision
        if precision == DEADLINE and any(part.round for part in self._parts):
            precision = BF16  # how many rounds follow, policies do not see
        for index, pieces in enumerate(islice(_cut(self.requests, self._parts), first, end), first):
            part = self._parts[index]
            query = Query(
                self._next_id() if index else leader.query_id,
                leader.model_id,
                part.rows,
                arrival_us,
                self._unit_deadline_us(part, pieces),
                leader.priority,
                rejects_late=leader.rejects_late,
                join_key=leader.join_key,
                cores=part.cores,
                formed=True,
                batch=self.number,
                round=part.round,
                request_rows=min(part.rows, largest_rows),
                precision=precision,
            )
            self.units.append(Unit(query, pieces, self, index))

    def _unit_deadline_us(self, part: Part, pieces: Sequence[Piece]) -> float | None:
        """Return when a part must be done: with the batch, or earlier by what the rounds after it take.

        Each of several requests is answered with its last part. So in rounds a part has the earliest deadline of its
        own requests; deadlines before that of the batch are missed anyway and do not count.
        """
        if self._deadline_us is None or not (part.round or part.later_us):
            return self._deadline_us
        if len(self.requests) == 1:
            return self._deadline_us - part.later_us
        own = {piece.request_id for piece in pieces}
        deadlines_us = [
            query.deadline_us for query in self.requests if query.query_id in own and query.deadline_us is not None
        ]
        return min([at_us for at_us in deadlines_us if at_us >= self._deadline_us], default=None)


def _cut(requests: Sequence[Query], parts: Sequence[Part]) -> Iterator[tuple[Piece, ...]]:
    """Yield the pieces of each part."""
    index = first_row = number = 0
    for part in parts:
        pieces = []
        left = part.rows
        while left:
            query = requests[index]
            taken = min(left, query.rows - first_row)
            pieces.append(Piece(query.query_id, first_row, taken, number))
            left -= taken
            first_row += taken
            number += 1
            if first_row == query.rows:
                index, first_row, number = index + 1, 0, 0
        yield tuple(pieces)


class UnitQueue:
    """The units that wait for a gang, in order of arrival. A unit that was stopped waits in its old place."""

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}  # by the number of the query
        self.queries = WaitingQueries()

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units.values())

    def __contains__(self, unit: Unit) -> bool:
        return self._units.get(unit.query.query_id) is unit

    def __getitem__(self, query_id: int) -> Unit:
        return self._units[query_id]

    def get(self, query_id: int) -> Unit | None:
        """Return the unit that waits under this number, None if none does."""
        return self._units.get(query_id)

    def add(self, unit: Unit) -> None:
        """Queue a unit."""
        self._units[unit.query.query_id] = unit
        self.queries.add(unit.query)

    def remove(self, unit: Unit) -> None:
        """Take a unit out."""
        del self._units[unit.query.query_id]
        self.queries.take(unit.query.query_id)

    def update(self, unit: Unit, query: Query) -> None:
        """Give a waiting unit another query with the same number and arrival."""
        unit.query = query
        self.queries.take(query.query_id)
        self.queries.add(query)
