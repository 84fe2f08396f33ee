"""What waits and what gangs execute: units, made of pieces of requests.

A request that comes is a unit of its own. Requests that are joined share units, and one that is split is in several.
Units that were made at once of the same requests are a batch. Once one of them has begun none of it is made anew.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gangway.executor.leases import Member
from gangway.executor.slots import SlotCounts, SlotStatus
from gangway.scheduler.batching.former import FormedUnit
from gangway.scheduler.policy import Query
from gangway.scheduler.timeline import Place
from gangway.scheduler.waiting import WaitingQueries

NOTHING = SlotCounts()


@dataclass(slots=True, eq=False)
class Request:
    """A request that waits or runs. Its query is that of all its rows, as it came; the query's number is its own, too.

    `units`: those of it that have not ended. `parts`: of how many pieces it consists. `begun`: its slot is RUNNING.
    `dropped`: it is to end, as `drop_status` says; what has not begun of it is gone, what has ends with its unit.
    After `limit_us` nobody waits for the answer. It is refused if `max_queue` others like it wait (0: any number may).
    """

    query: Query
    front_end: int
    slot: int
    generation: int
    limit_us: float | None = None
    max_queue: int = 0
    units: "list[Unit]" = field(default_factory=list)
    parts: int = 1
    begun: bool = False
    dropped: bool = False
    drop_status: SlotStatus = SlotStatus.CANCELLED
    counts: SlotCounts = NOTHING  # of all its units
    crashes: int = 0  # workers that ended by what they computed, of this request or of a batch with it
    batch: "Batch | None" = None


class Piece(NamedTuple):
    """Rows [first_row, first_row + rows) of a request. `part`: its number among the pieces of this request."""

    request: Request
    first_row: int
    rows: int
    part: int


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were joined, or one that was split, as `units` units. `leader` stands for it in statistics."""

    number: int
    rows: int
    units: int
    requests: tuple[Request, ...]
    leader: Request | None = None  # the first that has begun; another one, if it will not be answered with its batch


@dataclass(slots=True, eq=False)
class Unit:
    """What one gang executes: pieces, in the order of its rows. `query` is what policies see of it.

    `number`: of its batch's units. None of a batch: a whole request alone.
    """

    query: Query
    pieces: tuple[Piece, ...]
    batch: Batch | None = None
    number: int = 0

    @property
    def dropped(self) -> bool:
        """Whether nobody wants it any more."""
        return all(piece.request.dropped for piece in self.pieces)

    @property
    def place(self) -> Place:
        """Return what it is, for people."""
        rows, requests = self.query.rows, len(self.pieces)
        if self.batch is None:
            return Place(rows, requests)
        return Place(rows, requests, self.batch.number, self.number + 1, self.batch.units)

    def members(self) -> tuple[Member, ...]:
        """Return what a lease says of it."""
        return tuple(
            [
                Member(request.front_end, request.slot, request.generation, first_row, rows, part)
                for request, first_row, rows, part in self.pieces
            ]
        )

    def without(self, request: Request) -> Query:
        """Let a request's piece leave a unit of several; return the query of what is left."""
        self.pieces = tuple(piece for piece in self.pieces if piece.request is not request)
        deadlines = [piece.request.query.deadline_us for piece in self.pieces]
        return replace(
            self.query,
            rows=sum(piece.rows for piece in self.pieces),
            deadline_us=min((at_us for at_us in deadlines if at_us is not None), default=None),
        )


def whole(request: Request) -> Unit:
    """Return the one unit of a request that is alone."""
    unit = Unit(request.query, (Piece(request, 0, request.query.rows, 0),))
    request.parts = 1
    request.batch = None
    request.units = [unit]
    return unit


def separate(piece: Piece, query_id: int, unit: Unit) -> Unit:
    """Return a new unit of one piece, which was in another one that did not come to its end."""
    request, old = piece.request, unit.query
    query = replace(
        request.query,
        query_id=query_id,
        rows=piece.rows,
        cores=old.cores,
        formed=True,
        batch=old.batch,
        wave=old.wave,
    )
    request.units.append(made := Unit(query, (piece,), unit.batch, unit.number))
    return made


def make_batch(formed: Sequence[FormedUnit], requests: Mapping[int, Request]) -> Iterator[Unit]:
    """Yield the units of one batch; they become those of its requests, which are given by number."""
    batch = Batch(formed[0].batch, formed[0].batch_rows, len(formed), tuple(requests.values()))
    parts = Counter(piece.query_id for unit in formed for piece in unit.pieces)
    for number, request in requests.items():
        request.parts = parts[number]
        request.batch = batch
        request.units = []
    for place, unit in enumerate(formed):
        pieces = []
        for piece in unit.pieces:
            request = requests[piece.query_id]
            pieces.append(Piece(request, piece.first_row, piece.rows, len(request.units)))
        made = Unit(unit.query, tuple(pieces), batch, place)
        for request, *_ in pieces:
            request.units.append(made)
        yield made


# The units that wait for a gang, in order of arrival.


class UnitQueue:
    """Units by their queries' numbers. A unit that was stopped waits in its old place."""

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}
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
        """Queue it."""
        self._units[unit.query.query_id] = unit
        self.queries.add(unit.query)

    def remove(self, unit: Unit) -> None:
        """Take it out."""
        del self._units[unit.query.query_id]
        self.queries.take(unit.query.query_id)

    def update(self, unit: Unit, query: Query) -> None:
        """Show another query of a waiting unit, with the same number and arrival."""
        unit.query = query
        self.queries.take(query.query_id)
        self.queries.add(query)
