"""A batch as its gangs execute it: each takes a stretch of the batch's rows. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gangway.scheduler.policy import Query


class FormedPiece(NamedTuple):
    """Rows [first_row, first_row + rows) of a request."""

    query_id: int  # the request's
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True)
class FormedUnit:
    """What one gang executes: pieces of one or several requests, in order. Units of one batch have its number."""

    query: Query  # as the policy sees it; `cores`: of the planned gang, 0 if the batch is not split
    pieces: tuple[FormedPiece, ...]
    batch_rows: int
    batch: int


def units_of(
    members: Sequence[Query],
    gangs: Sequence[tuple[int, int]],
    deadline_us: float | None,
    batch: int,
    next_id: Callable[[], int],
) -> list[FormedUnit]:
    """Lay the members' rows end to end and cut them into the gangs' (cores, rows).

    The first unit has the number of the first member, others new ones; all have the batch's deadline.
    """
    leader = members[0]
    arrival_us = min(query.arrival_us for query in members)
    batch_rows = sum(rows for _, rows in gangs)
    units: list[FormedUnit] = []
    index = first_row = 0
    for cores, rows in gangs:
        pieces = []
        left = rows
        while left:
            query = members[index]
            taken = min(left, query.rows - first_row)
            pieces.append(FormedPiece(query.query_id, first_row, taken))
            left -= taken
            first_row += taken
            if first_row == query.rows:
                index, first_row = index + 1, 0
        unit = Query(
            leader.query_id if not units else next_id(),
            leader.model_id,
            rows,
            arrival_us,
            deadline_us,
            leader.priority,
            rejects_late=leader.rejects_late,
            join_key=leader.join_key,
            cores=cores,
            formed=True,
        )
        units.append(FormedUnit(unit, tuple(pieces), batch_rows, batch))
    return units
