"""Models, queues and a former for tests of batches. Times are microseconds."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from msgspec import structs

from gangway.scheduler.batching.former import BatchFormer, Formed
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policy import Query, RunningBlock
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.waiting import WaitingQueries

CORES = 2
FLAT, LINEAR, WHOLE, CLOSE, STEEP, STRANGE = 1, 2, 3, 4, 5, 9
MAX_ROWS = 8


def profile(model_id: int, eight_rows: float, together: float, measured: bool = True) -> ModelProfile:
    """10 ms for one row on one or two cores; eight take so many times as long, and beside others of their kind."""
    return ModelProfile(
        model_id=model_id,
        name=f"model {model_id}",
        layers=1,
        max_ranks=CORES,
        latency_us=(((10_000.0, 10_000.0),),),
        rows_factor=((1.0, eight_rows),) * CORES if measured else (),
        together_factor=((together, together * eight_rows), (1.0, eight_rows)) if measured else (),
        batches=(1, 8) if measured else (1,),
        measured=measured,
    )


# FLAT: eight rows in 11 ms on two cores. LINEAR: in 80 ms, or 40 on each core: two gangs do it in half the time.
# CLOSE: two rows in 10.1 ms, or one on each core in 11 ms. STRANGE: the former is never told of it.
# STEEP: two or four rows take as many times as long as one, eight sixteen times; gangs disturb each other.
MODELS = {
    FLAT: replace(profile(FLAT, 1.1, 2.5), latency_us=(((12_000.0, 10_000.0),),)),  # a query takes both cores
    LINEAR: profile(LINEAR, 8.0, 1.0),
    WHOLE: profile(WHOLE, 8.0, 1.0, measured=False),
    CLOSE: profile(CLOSE, 1.1, 1.1),
    STEEP: replace(
        profile(STEEP, 1.0, 1.0),
        latency_us=(((20_000.0, 10_000.0),),),
        batches=(1, 2, 4, 8),
        rows_factor=((1.0, 2.0, 4.0, 16.0),) * CORES,
        together_factor=((3.0, 6.0, 12.0, 48.0), (1.0, 2.0, 4.0, 16.0)),
    ),
    STRANGE: profile(STRANGE, 8.0, 1.0),
}


def spec(model_id: int, **changes: object) -> LoadModel:
    known = LoadModel(model_id, f"model {model_id}", "key", 1, CORES, 64, MAX_ROWS, joins=True)
    return structs.replace(known, indivisible=model_id == WHOLE, **changes)


def query(query_id: int, model_id: int = FLAT, rows: int = 1, **changes: object) -> Query:
    """Arrives at 100 times its number, best effort."""
    return replace(Query(query_id, model_id, rows, 100.0 * query_id, None), **changes)  # type: ignore[arg-type]


def queue(queries: Sequence[Query]) -> WaitingQueries:
    waiting = WaitingQueries()
    for each in queries:
        waiting.add(each)
    return waiting


class Former:
    """A former with models; all cores are free unless something is said of them."""

    def __init__(self, *specs: LoadModel, dispatch_us: float = 0.0) -> None:
        ids = count(1000)
        self.former = BatchFormer(lambda: next(ids), dispatch_us=dispatch_us)
        for each in specs:
            self.former.add(each)

    def form(
        self, waiting: Sequence[Query], now_us: float = 1000.0, free: int = CORES, running: Sequence[RunningBlock] = ()
    ) -> Formed:
        formed = self.former.form(queue(waiting), now_us, MODELS, CORES, free, running)
        assert list(formed.queries) == sorted(formed.queries, key=lambda shown: shown.arrival_us)
        return formed


def batches(formed: Formed) -> list[list[int]]:
    """The requests of each unit, or the one request that is shown as it is."""
    found = []
    for shown in formed.queries:
        unit = formed.units.get(shown.query_id)
        found.append([piece.request_id for piece in unit.pieces] if unit else [shown.query_id])
    return found
