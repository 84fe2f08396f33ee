"""Which versions of a layer are worth having: those whose absence would cost most (the end of VELTAIR's Algorithm 1).

Pure functions of tables of measured or modelled times. A tuning drops with them what gains too little; the simulator
takes from a model all but so many versions.
"""

from collections.abc import Iterator, Sequence

Table = Sequence[Sequence[float]]
"""Microseconds by version and situation: a level of interference, a number of cores."""


def absence_loss(version: int, kept: Sequence[int], tables: Sequence[Table]) -> float:
    """Return how much slower the best of `kept` gets without `version`, in the situation where that is most.

    Relative: 0.1 is 10 %. The tables are independent measurements of the same; the least of them counts in each
    situation, since a difference that is not in all of them is noise.
    """
    others = [other for other in kept if other != version]
    losses = [
        min(_best(others, table, place) / _best(kept, table, place) - 1 for table in tables)
        for place in range(len(tables[0][version]))
    ]
    return max(losses)


def thin_out(tables: Sequence[Table], always: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield all versions, then ever one less, that whose absence costs least, until only `always` is left.

    With each set comes what its next reduction will cost (infinity for the last one).
    """
    kept = tuple(range(len(tables[0])))
    while True:
        losses = {version: absence_loss(version, kept, tables) for version in kept if version != always}
        if not losses:
            yield kept, float("inf")
            return
        least = min(losses, key=losses.__getitem__)
        yield kept, losses[least]
        kept = tuple(version for version in kept if version != least)


def drop_versions(tables: Sequence[Table], always: int, least_loss: float, most: int) -> tuple[int, ...]:
    """Return the versions that are kept: each one's absence costs at least `least_loss`, and there are at most `most`.

    `always` is kept in any case.
    """
    return next(kept for kept, loss in thin_out(tables, always) if loss >= least_loss and len(kept) <= most)


def mean_loss(kept: Sequence[int], tables: Sequence[Table]) -> float:
    """Return how much slower the best of `kept` is than the best of all, relative, on average over the situations.

    As in `absence_loss`, the least of the tables counts in each.
    """
    everybody, places = range(len(tables[0])), range(len(tables[0][0]))
    losses = [
        min(_best(kept, table, place) / _best(everybody, table, place) - 1 for table in tables) for place in places
    ]
    return sum(losses) / len(losses)


def _best(versions: Sequence[int], table: Table, place: int) -> float:
    return max(1e-3, min(table[version][place] for version in versions))
