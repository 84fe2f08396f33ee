"""When a query is due: what several policies agree on."""

from gangway.scheduler.policy import Query

PATIENCE_US = 1_000_000.0


def due_us(query: Query) -> float:
    """Return the deadline; of a query without one, one second after its arrival.

    So best effort goes after what is due soon, and before whatever becomes due a second after its arrival: it ages,
    and nothing starves.
    """
    return query.arrival_us + PATIENCE_US if query.deadline_us is None else query.deadline_us
