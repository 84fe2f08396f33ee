"""A batch as its gangs execute it: each takes a stretch of the batch's rows, at once or in its turn. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from gangway.scheduler.batching.waves import Part
from gangway.scheduler.policy import Query


class FormedPiece(NamedTuple):
    """Rows [first_row, first_row + rows) of a request."""

    query_id: int  # the request's
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True)
class FormedUnit:
    """What one gang executes: pieces of one or several requests, in order. Units of one batch have its number.

    `rest`: makes the units of the batch's later waves. They are made when it begins: most proposals never do.
    """

    query: Query  # as the policy sees it; `cores`: of the planned gang, 0 if the batch is not split
    pieces: tuple[FormedPiece, ...]
    batch_rows: int
    batch: int
    rest: "Callable[[], Sequence[FormedUnit]]" = tuple


def units_of(
    members: Sequence[Query],
    parts: Sequence[Part],
    deadline_us: float | None,
    batch: int,
    next_id: Callable[[], int],
) -> list[FormedUnit]:
    """Lay the members' rows end to end and cut them into the parts; return the units of the first wave.

    The first unit has the number of the first member, others new ones.
    """
    first = sum(not part.wave for part in parts)
    batch_rows = sum(part.rows for part in parts)
    leader = members[0]
    arrival_us = min(query.arrival_us for query in members)

    def unit(query_id: int, part: Part, pieces: tuple[FormedPiece, ...]) -> FormedUnit:
        query = Query(
            query_id,
            leader.model_id,
            part.rows,
            arrival_us,
            _due_us(members, part, pieces, deadline_us),
            leader.priority,
            rejects_late=leader.rejects_late,
            join_key=leader.join_key,
            cores=part.cores,
            formed=True,
            batch=batch,
            wave=part.wave,
        )
        return FormedUnit(query, pieces, batch_rows, batch, rest)

    def rest() -> list[FormedUnit]:
        cut = islice(zip(parts, _cut(members, parts), strict=True), first, None)
        return [unit(next_id(), part, pieces) for part, pieces in cut]

    begin = enumerate(zip(parts[:first], _cut(members, parts), strict=False))
    return [unit(next_id() if index else leader.query_id, part, pieces) for index, (part, pieces) in begin]


def whole_batch(units: Iterable[FormedUnit], batch: int) -> list[FormedUnit]:
    """Return all units of this batch, of which those of the first wave are among the given ones."""
    first = [unit for unit in units if unit.batch == batch]
    return [*first, *first[0].rest()]


def whose_turn_it_is(queries: list[Query]) -> list[Query]:
    """Return all but the parts of batches before which others have to start."""
    waves: dict[int, int] = {}
    for query in queries:
        if query.batch and not query.started:
            waves[query.batch] = min(query.wave, waves.get(query.batch, query.wave))
    if not waves:
        return queries
    return [query for query in queries if query.started or query.wave == waves.get(query.batch, query.wave)]


def _cut(members: Sequence[Query], parts: Sequence[Part]) -> Iterator[tuple[FormedPiece, ...]]:
    """Yield the pieces of each part."""
    index = first_row = 0
    for part in parts:
        pieces = []
        left = part.rows
        while left:
            query = members[index]
            taken = min(left, query.rows - first_row)
            pieces.append(FormedPiece(query.query_id, first_row, taken))
            left -= taken
            first_row += taken
            if first_row == query.rows:
                index, first_row = index + 1, 0
        yield tuple(pieces)


def _due_us(
    members: Sequence[Query], part: Part, pieces: Sequence[FormedPiece], deadline_us: float | None
) -> float | None:
    """Return when a part must be done: with the batch, or so much sooner as the waves after it take.

    Of several requests each is answered with its last part: so in waves a part has the deadlines of its own requests,
    but those before the batch's, which are missed anyway.
    """
    if deadline_us is None or not (part.wave or part.later_us):
        return deadline_us
    if len(members) == 1:
        return deadline_us - part.later_us
    own = {piece.query_id for piece in pieces}
    asked_us = [query.deadline_us for query in members if query.query_id in own and query.deadline_us is not None]
    return min([at_us for at_us in asked_us if at_us >= deadline_us], default=None)
