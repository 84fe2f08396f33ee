"""Search for the pointers of a compound task: random search and coordinate descent over what is measured. Pure.

Both are Algorithm 1 and its baseline of "Automated Runtime-Aware Scheduling for Multi-Tenant DNN Inference on GPU" (Yu
et al., ICCAD 2021). They yield a record for each schedule as it is measured: the caller shows progress, and stops by
taking no more. With the same seed, and what is known from before, a search goes on where it was stopped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.stages.ir import Pointers, Schedule, parallel, schedule, schedule_us, sequential

Measure = Callable[[Schedule], float]  # microseconds from the first stage's begin to the last one's end
Row = tuple[int, ...]  # one model's pointers

NOTHING_KNOWN: Mapping[Pointers, float] = MappingProxyType({})
DRAWS = 4  # rows drawn for each that is measured: those that are shortest by the profiles


@dataclass(frozen=True)
class PointerSpace:
    """All pointers of these models with so many barriers, on a machine of so many cores.

    Raises ValueError without models, or for fewer barriers than the sequential schedule has: one less than models.
    """

    streams: tuple[ModelProfile, ...]
    cores: int
    barriers: int

    def __post_init__(self) -> None:
        """Check the number of barriers."""
        if not self.streams or self.cores < 1:
            raise ValueError("a compound task has at least one model, on at least one core")
        if self.barriers < len(self.streams) - 1:
            raise ValueError(f"{len(self.streams)} models need {len(self.streams) - 1} barriers, not {self.barriers}")

    def schedule(self, pointers: Pointers) -> Schedule:
        """Return the schedule that these pointers make. Raises ValueError for pointers of other models."""
        return schedule(self.streams, pointers, self.cores)

    def modelled_us(self, pointers: Pointers) -> float:
        """Return how long that schedule takes by the profiles, in microseconds."""
        return schedule_us(self.streams, self.schedule(pointers))

    def starts(self) -> tuple[Pointers, Pointers]:
        """Return the sequential and the parallel schedule's pointers: nothing found is worse than either."""
        unused = self.barriers - len(self.streams) + 1
        rows = zip(sequential(self.streams), self.streams, strict=True)
        return tuple(row + (stream.layers,) * unused for row, stream in rows), parallel(self.streams, self.barriers)

    def draw(self, random: Random, stream: int, near: Row = ()) -> Row:
        """Return a random row of pointers for one model; `near` one: with one pointer of it drawn anew."""
        layers = self.streams[stream].layers
        if near:
            moved = random.randrange(self.barriers)
            return tuple(sorted((*near[:moved], random.randint(0, layers), *near[moved + 1 :])))
        return tuple(sorted(random.randint(0, layers) for _ in range(self.barriers)))


@dataclass(frozen=True, slots=True)
class Record:
    """A schedule and the time that was measured for it, in microseconds."""

    pointers: Pointers
    stages: Schedule
    time_us: float


def best(records: Iterable[Record]) -> Record:
    """Return the record with the least time, the first of several. Raises ValueError if there is none."""
    return min(records, key=lambda record: record.time_us)


def random_search(
    measure: Measure, space: PointerSpace, samples: int, seed: int, known: Mapping[Pointers, float] = NOTHING_KNOWN
) -> Iterator[Record]:
    """Measure the sequential schedule, the parallel one, and so many others, drawn at random.

    What is shortest by the profiles comes first. `known`: times from before, which are not measured again.
    """
    measured = _Measured(measure, space, known)
    yield from map(measured.record, space.starts())
    random, streams = Random(seed), range(len(space.streams))
    drawn = {tuple(space.draw(random, stream) for stream in streams) for _ in range(samples)}
    yield from map(measured.record, sorted(drawn, key=lambda pointers: (space.modelled_us(pointers), pointers)))


def coordinate_descent(
    measure: Measure,
    space: PointerSpace,
    rounds: int,
    candidates: int,
    seed: int,
    known: Mapping[Pointers, float] = NOTHING_KNOWN,
) -> Iterator[Record]:
    """Measure the sequential and the parallel schedule, then change one model's row of the better at a time.

    In each round each model's row becomes the best of `candidates` drawn ones and itself (Algorithm 1). Four times as
    many are drawn, every other one with a single pointer that differs from the present row's, and those measured that
    are shortest by the profiles. `known`: times from before, which are not measured again.
    """
    measured = _Measured(measure, space, known)
    starts = []
    for pointers in space.starts():
        starts.append(measured.record(pointers))
        yield starts[-1]
    current = best(starts)
    random = Random(seed)
    for _ in range(rounds):
        for stream in range(len(space.streams)):
            present = current.pointers[stream]
            rows = {space.draw(random, stream, present if draw % 2 else ()) for draw in range(candidates * DRAWS)}
            drawn = {_with_row(current.pointers, stream, row) for row in rows}
            promising = sorted(drawn, key=lambda pointers: (space.modelled_us(pointers), pointers))[:candidates]
            for pointers in promising:
                record = measured.record(pointers)
                yield record
                current = best((current, record))


class _Measured:
    """Measures each schedule once: different pointers may make the same."""

    def __init__(self, measure: Measure, space: PointerSpace, known: Mapping[Pointers, float]) -> None:
        self._measure = measure
        self._space = space
        self._time_us = {space.schedule(pointers): time_us for pointers, time_us in known.items()}

    def record(self, pointers: Pointers) -> Record:
        stages = self._space.schedule(pointers)
        if stages not in self._time_us:
            self._time_us[stages] = self._measure(stages)
        return Record(pointers, stages, self._time_us[stages])


def _with_row(pointers: Pointers, stream: int, row: Row) -> Pointers:
    return (*pointers[:stream], row, *pointers[stream + 1 :])
