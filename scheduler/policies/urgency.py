"""When a query is due, and which ones cannot be in time any more: what several policies agree on."""

from gangway.scheduler.policy import Query, Reject, Snapshot

PATIENCE_US = 1_000_000.0


def due_us(query: Query) -> float:
    """Return the deadline; of a query without one, one second after its arrival.

    So best effort goes after what is due soon, and before whatever becomes due a second after its arrival: it ages,
    and nothing starves.
    """
    return query.arrival_us + PATIENCE_US if query.deadline_us is None else query.deadline_us


def certainly_late(query: Query, snapshot: Snapshot) -> bool:
    """Say whether a query misses its deadline even if it has the machine for itself from now on."""
    if query.deadline_us is None:
        return False
    model = snapshot.models[query.model_id]
    cores = min(snapshot.core_count, model.max_ranks)
    return snapshot.now_us + model.remaining_us(query.next_layer, cores, query.rows) > query.deadline_us


def sort_out_late(snapshot: Snapshot) -> tuple[list[Query], list[Reject]]:
    """Return the waiting queries that are worth running, in order of arrival, and the refusals of the others.

    Only models that reject late queries lose any.
    """
    worth: list[Query] = []
    refused: list[Reject] = []
    for query in snapshot.waiting:
        if snapshot.models[query.model_id].rejects_late and certainly_late(query, snapshot):
            refused.append(Reject(query.query_id, "late even if it ran alone from now on"))
        else:
            worth.append(query)
    return worth, refused
