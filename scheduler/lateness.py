"""When a query is certain to miss its deadline: even if it had every core to itself from now on. Pure.

The live scheduler and the simulator refuse a query that `rejects_late` then, waiting or running, and not before.
Policies may refuse a waiting one earlier, by a prediction.
"""

from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policy import Query


def certain_from_us(query: Query, model: ModelProfile, core_count: int, layer: int | None = None) -> float | None:
    """Return from when on the query is certain to be late, if it gets no further until then; None without a deadline.

    `layer`: the one being executed, which may end at any moment; None: none is. What counts is the isolated time of the
    rest with the best version and number of cores of each layer; a model whose times are not known is late at its
    deadline.
    """
    if query.deadline_us is None:
        return None
    next_layer = query.next_layer if layer is None else min(layer + 1, model.layers)  # a gang at its end has no layer
    return query.deadline_us - model.fastest_us(next_layer, core_count, query.rows)


def certain_to_be_late(
    query: Query, model: ModelProfile, now_us: float, core_count: int, layer: int | None = None
) -> bool:
    """Return whether the query is certain to miss its deadline."""
    from_us = certain_from_us(query, model, core_count, layer)
    return from_us is not None and now_us > from_us
