"""The choice between fp32 and bf16 against cases worked out by hand: 10 ms in fp32, 6 ms in bf16, on one core."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gangway.artifact.precision import BF16, DEADLINE, FP32
from gangway.scheduler.batching.planner import Part
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policies.precision_choice import IN_TIME, LATE, OTHERS_LATE, PrecisionChooser
from gangway.scheduler.policies.registry import make_policy
from gangway.scheduler.policy import Decision, PlannedBlock, Query, RunningBlock, Snapshot, Start, Wake
from gangway.scheduler.policy_config import DEFAULT
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.units import Batch

EXACT, FAST, OTHER = 0, 1, 2
MARGIN = DEFAULT.prediction.min_margin_factor
WAY_BACK_US = 150.0


def profile(number: int, layers_us: Sequence[float], **fields: int) -> ModelProfile:
    """Layers that two cores do in half the time."""
    times = tuple(((us, us / 2),) for us in layers_us)
    return ModelProfile(number, f"model {number}", len(times), 2, times, measured=True, **fields)


IN_BF16 = profile(FAST, (4e3, 2e3))
MODELS = {
    EXACT: replace(profile(EXACT, (4e3, 3e3, 3e3)), in_bf16=IN_BF16),
    OTHER: profile(OTHER, (8e3,)),
}


class Scripted(Policy):
    """Starts what it is told to, and nothing else."""

    name = "scripted"

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = decisions
        self.seen: list[Query] = []

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        return self.decisions

    def arrived(self, query: Query) -> None:
        self.seen.append(query)

    def finished(self, query: Query, now_us: float) -> None:
        self.seen.append(query)


def either(query_id: int, deadline_us: float | None, **fields: int) -> Query:
    return replace(Query(query_id, EXACT, 1, 0.0, deadline_us, precision=DEADLINE), **fields)


def start(query_id: int, *cores: int) -> Start:
    return Start(query_id, 2, cores or (0,), reason="it is next")


def snapshot(waiting: Sequence[Query], running: Sequence[RunningBlock] = (), **fields: object) -> Snapshot:
    state = Snapshot(0.0, waiting, running, (0, 1), 2, MODELS, way_back_us=WAY_BACK_US)
    return replace(state, **fields)  # type: ignore[arg-type]


def chosen(waiting: Sequence[Query], *starts: Start, state: Snapshot | None = None) -> list[Start]:
    chooser = PrecisionChooser(Scripted(*starts))
    for query in waiting[:1]:
        chooser.arrived(query)
    decisions = chooser.decide(snapshot(waiting) if state is None else state)
    return [decision for decision in decisions if isinstance(decision, Start)]


def why(begun: Start) -> tuple[str, str]:
    return begun.precision, begun.reason.removeprefix("it is next; ")


def test_fp32_has_its_own_layers() -> None:
    planned = replace(start(1), versions=(0, 1), blocks=(PlannedBlock(1, 1),))
    (begun,) = chosen([either(1, 1e5)], planned)
    assert why(begun) == (FP32, IN_TIME)
    assert (begun.end_layer, begun.versions, begun.blocks, begun.cores) == (3, (), (), (0,))


def test_bf16_runs_as_the_policy_planned_it() -> None:
    planned = replace(start(1), versions=(0, 1), blocks=(PlannedBlock(1, 1),))
    (begun,) = chosen([either(1, 7e3)], planned)
    assert why(begun) == (BF16, LATE)
    assert replace(begun, precision="", reason=planned.reason) == planned


@pytest.mark.parametrize(("cores", "time_us"), [((0,), 10e3), ((0, 1), 5e3)])
def test_fp32_must_end_before_the_deadline(cores: tuple[int, ...], time_us: float) -> None:
    least_us = MARGIN * time_us + WAY_BACK_US
    for deadline_us, precision in ((least_us + 1, FP32), (least_us - 1, BF16)):
        (begun,) = chosen([either(1, deadline_us)], start(1, *cores))
        assert begun.precision == precision


def test_times_are_stretched_by_the_error_of_fp32() -> None:
    waiting = [either(1, 15e3)]
    for errors, precision in (({}, FP32), ({FAST: 2.0}, FP32), ({EXACT: 2.0}, BF16)):
        (begun,) = chosen(waiting, start(1), state=snapshot(waiting, prediction_errors=errors))
        assert begun.precision == precision


FIRST = RunningBlock(Query(3, OTHER, 1, 0.0, 9e3), 1, (1,), 0.0)  # 4 ms of both cores, and so has the one that waits


@pytest.mark.parametrize(("running", "least_us"), [((), 6e3 + WAY_BACK_US), ((FIRST,), 10e3 + WAY_BACK_US)])
def test_one_that_waits_on_must_not_be_late_by_it(running: tuple[RunningBlock, ...], least_us: float) -> None:
    """In fp32 the first one takes 2 ms of both cores more."""
    for deadline_us, expected in ((least_us + 1, (FP32, IN_TIME)), (least_us - 1, (BF16, OTHERS_LATE))):
        waiting = [either(1, 200e3), Query(2, OTHER, 1, 1.0, deadline_us)]
        (begun,) = chosen(waiting, start(1), state=snapshot(waiting, running))
        assert why(begun) == expected


@pytest.mark.parametrize("deadline_us", [1e3, -1e3])
def test_one_that_is_late_in_any_case_is_not_made_later(deadline_us: float) -> None:
    waiting = [either(1, 200e3), Query(2, OTHER, 1, 1.0, deadline_us)]
    assert why(*chosen(waiting, start(1), state=snapshot(waiting))) == (BF16, OTHERS_LATE)


def test_one_without_a_deadline_waits_on() -> None:
    waiting = [either(1, 200e3), Query(2, OTHER, 1, 1.0, None)]
    assert why(*chosen(waiting, start(1), state=snapshot(waiting))) == (FP32, IN_TIME)


def test_those_that_begin_share_what_others_can_spare() -> None:
    """There are 3 ms to spare, and each takes 2 ms more: the earlier deadline has them."""
    waiting = [either(1, 300e3), either(2, 200e3), Query(3, OTHER, 1, 1.0, 7e3 + WAY_BACK_US)]
    first, second = chosen(waiting, start(1, 0), start(2, 1), state=snapshot(waiting))
    assert (why(first), why(second)) == ((BF16, OTHERS_LATE), (FP32, IN_TIME))


def batch(deadline_us: float, rounds: int = 1) -> list[Query]:
    """Two gangs of two rows each, in so many rounds."""
    requests = [either(1, deadline_us, rows=2 * rounds), either(2, deadline_us, rows=2 * rounds)]
    parts = [Part(1, 2, number) for number in range(rounds) for _ in range(2)]
    return [unit.query for unit in Batch(7, requests, parts, deadline_us, iter(range(10, 20)).__next__).begin()]


@pytest.mark.parametrize(("deadline_us", "cores", "expected"), [
    (22e3, ((0,), (1,)), {FP32}),  # rows take 10 ms each
    (18e3, ((0,), (1,)), {BF16}),
    (18e3, ((0, 2), (1,)), {BF16}),  # the one that has two cores had the time
])  # fmt: skip
def test_the_parts_of_a_batch_have_one_precision(
    deadline_us: float, cores: tuple[tuple[int, ...], ...], expected: set[str]
) -> None:
    waiting = batch(deadline_us)
    starts = [start(query.query_id, *own) for query, own in zip(waiting, cores, strict=True)]
    state = snapshot(waiting, free_cores=(0, 1, 2), core_count=3)
    assert {begun.precision for begun in chosen([either(1, 22e3)], *starts, state=state)} == expected


def test_a_batch_in_rounds_stays_in_bf16() -> None:
    """How many rounds follow, nobody sees."""
    waiting = batch(1e6, rounds=2)
    assert [query.precision for query in waiting] == [BF16] * 4


def test_others_are_left_alone() -> None:
    decisions = (Start(1, 1, (0,)), Start(2, 3, (1,)), Wake(5.0))
    waiting = [Query(1, OTHER, 1, 0.0, 1e5), Query(2, EXACT, 1, 0.0, None), either(3, 1e5)]
    chooser = PrecisionChooser(Scripted(*decisions))
    chooser.arrived(waiting[2])
    assert tuple(chooser.decide(snapshot(waiting))) == decisions


def test_the_part_can_be_left_out() -> None:
    policy = Scripted(start(1))
    policy.config = DEFAULT.without("precision_choice")
    chooser = PrecisionChooser(policy)
    chooser.arrived(either(1, 1e6))
    (begun,) = chooser.decide(snapshot([either(1, 1e6)]))
    assert begun == replace(start(1), precision=BF16, reason=f"it is next; {LATE}")


def test_under_load_more_time_must_be_left() -> None:
    """A query that has 2.5 times what fp32 takes begins so, unless those that come take half of the machine."""
    precisions = {}
    for gap_us in (40e3, 8e3):  # a row is 8 ms of one core on average: a tenth of both, and half
        chooser = PrecisionChooser(Scripted(start(1000)))
        for number in range(200):
            chooser.arrived(replace(either(number, 0.0), arrival_us=number * gap_us, deadline_us=(number + 1) * gap_us))
        now_us = 200 * gap_us
        query = either(1000, now_us + WAY_BACK_US + 20e3)
        state = snapshot([query], now_us=now_us)
        chooser.decide(state)  # it learns the models
        (begun,) = chooser.decide(state)
        assert isinstance(begun, Start)
        precisions[gap_us] = begun.precision
    assert precisions == {40e3: FP32, 8e3: BF16}


def test_a_lone_query_needs_the_same_slack() -> None:
    chooser = PrecisionChooser(Gangway())
    plain = Gangway().lone_start(IN_BF16, 2, 0.0)
    assert chooser.lone_start(IN_BF16, 2, 0.0) == plain
    begun, bare = chooser.lone_start(MODELS[EXACT], 2, 0.0), Gangway().lone_start(MODELS[EXACT], 2, 0.0)
    assert begun is not None and bare is not None
    assert replace(begun, min_slack_us=bare.min_slack_us) == bare
    assert begun.min_slack_us == pytest.approx(MARGIN * 10e3 / begun.cores)


@pytest.mark.parametrize(("precision", "profile"), [(DEADLINE, IN_BF16), (BF16, IN_BF16), (FP32, MODELS[EXACT])])
def test_a_query_has_the_times_of_its_precision(precision: str, profile: ModelProfile) -> None:
    """While it is to be chosen those in bf16; in whatever precision, those of the only one that there is."""
    query = replace(either(1, 1e5), precision=precision)
    assert query.profile(MODELS) is profile
    assert replace(query, model_id=OTHER).profile(MODELS) is MODELS[OTHER]


@pytest.mark.parametrize("name", ["gangway", "model_fcfs", "edf", "veltair", "layerweaver"])
def test_equal_snapshots_have_equal_choices(name: str) -> None:
    waiting = [either(number, 12e3 + 4e3 * number) for number in range(6)]
    answers = []
    for _ in range(2):
        chooser = PrecisionChooser(make_policy(name))
        for query in waiting:
            chooser.arrived(query)
        answers.append([str(decision) for decision in chooser.decide(snapshot(waiting))])
    assert answers[0] == answers[1]
    assert any("precision='bf16'" in text or "precision='fp32'" in text for text in answers[0])
