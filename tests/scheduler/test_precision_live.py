"""A model in two precisions in a live scheduler: which one computes a request, whatever dies meanwhile.

In place of precisions there are two tiny models, of six layers and of four: what was computed says which one it was.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from gangway.executor.slots import SlotStatus
from gangway.scheduler import messages
from gangway.server.requests.data_plane import Submission
from tests.helpers.tiny_model import TASKS, make_artifact
from tests.scheduler.conftest import LAYERS, Server, arena_bytes

EXACT, FAST = 7, 8
FAST_LAYERS = 4
TASK_US = 100.0
EXACT_US, FAST_US = LAYERS * TASKS * TASK_US / 2, FAST_LAYERS * TASKS * TASK_US / 2  # on two cores: 7.2 and 4.8 ms


class BothPrecisions(Server):
    """Models 7 and 8 are one."""

    def add_fast(self) -> None:
        """Load the model that stands for bf16, and say how fast both are."""
        _, key = self.fast
        own = {"key": key, "layers": FAST_LAYERS, "arena_bytes": arena_bytes(self._plans[0].cache_dir / key)}
        fast = structs.replace(self.specs[0], model_id=FAST, name="tiny in bf16", fp32_id=EXACT, **own)
        self.specs = [self.specs[0], fast]
        self.tell(fast)
        assert self.expect(messages.ModelLoaded).model_id == FAST
        self.tell_times()

    def tell_times(self) -> None:
        """What a supervisor says of models, to every scheduler anew."""
        self.tell(messages.SetProfile(FAST, FAST_US))
        self.tell(messages.SetProfile(EXACT, EXACT_US))

    fast: tuple[Path, str]

    def timed(self, within_us: float, **fields: int) -> Submission:
        """Submit a request with a deadline."""
        now_ns = time.monotonic_ns()
        return self.request(task_us=TASK_US, arrival_ns=now_ns, deadline_ns=now_ns + int(within_us * 1000), **fields)

    def layers(self, request: Submission) -> int:
        """How many layers an answered request of one attempt had; each task was computed once."""
        counters = list(request.outputs[0].cast("i"))
        done = counters.index(0) if 0 in counters else len(counters)
        assert counters == [1] * done + [0] * (len(counters) - done)
        return done // TASKS

    def precision(self, request: Submission) -> str:
        """In which precision a request was computed: what its slot says is what happened."""
        outcome = self.outcome(request)
        assert outcome.status is SlotStatus.OK
        if outcome.attempts == 1:
            assert self.layers(request) == (FAST_LAYERS if outcome.counts.bf16 else LAYERS)
        return "bf16" if outcome.counts.bf16 else "fp32"


@pytest.fixture
def both(tiny_model: tuple[Path, str]) -> Iterator[BothPrecisions]:
    cache_dir, key = tiny_model
    server = BothPrecisions(cache_dir, key, "gangway")
    server.fast = cache_dir, make_artifact(cache_dir, FAST_LAYERS).key
    for _ in range(3):  # as trial requests are, which begin without a decision before the other model is there
        assert server.precision(server.request(task_us=TASK_US)) == "fp32"
    server.add_fast()
    yield server
    server.kill_all()


def test_with_time_it_is_fp32_also_without_a_decision(both: BothPrecisions) -> None:
    assert {both.precision(both.timed(1e6)) for _ in range(20)} == {"fp32"}


def test_with_less_time_it_is_bf16(both: BothPrecisions) -> None:
    """The first one opens the way without a decision, which the others must not take."""
    both.precision(both.timed(1e6))
    assert {both.precision(both.timed(0.9 * EXACT_US)) for _ in range(20)} == {"bf16"}


def test_without_a_deadline_it_is_fp32(both: BothPrecisions) -> None:
    requests = [both.request(task_us=TASK_US) for _ in range(10)]
    assert {both.precision(request) for request in requests} == {"fp32"}


def test_a_queue_that_fp32_would_make_late_is_computed_in_bf16(both: BothPrecisions) -> None:
    requests = [both.timed(30 * FAST_US) for _ in range(30)]
    precisions = [both.precision(request) for request in requests]
    assert precisions.count("bf16") >= 20, "in fp32 some ten of them would be late"
    assert both.precision(both.timed(1e6)) == "fp32"


@pytest.mark.long
def test_requests_in_both_precisions_survive_deaths(both: BothPrecisions) -> None:
    """Until bf16 is there again, what has a deadline begins in fp32."""
    requests = []
    for death in (both.kill_scheduler, lambda: both.kill_worker(0), lambda: both.kill_worker(1), both.kill_scheduler):
        requests += [both.timed(within_us) for within_us in (1e6, 6e3, 30e3, 1e6)]
        requests.append(both.request(task_us=TASK_US))
        both.await_running(requests[-5])
        death()
        both.tell_times()
    precisions = [both.precision(request) for request in requests]
    assert set(precisions[4::5]) == {"fp32"}, "those without a deadline"
    assert [both.expect(messages.ModelLoaded).model_id for _ in both.specs] == [EXACT, FAST]
    both.tell_times()
    assert [both.precision(both.timed(within_us)) for within_us in (1e6, 0.9 * EXACT_US)] == ["fp32", "bf16"]


def test_without_bf16_what_waits_goes_on_in_fp32(both: BothPrecisions) -> None:
    running = both.request(hang=1, priority=-1)  # nobody takes its cores
    both.await_gang(2)
    waiting = [both.timed(within_us) for within_us in (1e6, 6e3)]
    both.tell(messages.UnloadModel(FAST))
    assert both.outcome(both.request(model_id=FAST)).status is SlotStatus.UNAVAILABLE
    both.hurry(running)
    assert both.expect(messages.ModelUnloaded).model_id == FAST
    assert {both.precision(request) for request in waiting} == {"fp32"}
    assert both.precision(both.timed(6e3)) == "fp32"


@pytest.mark.long
def test_unloading_both_gives_all_memory_back(both: BothPrecisions) -> None:
    assert {both.precision(both.timed(within_us)) for within_us in (1e6, 6e3)} == {"fp32", "bf16"}
    for model_id in (FAST, EXACT):
        both.tell(messages.UnloadModel(model_id))
        assert both.expect(messages.ModelUnloaded).model_id == model_id
    assert os.fstat(both.memory.arenas.fd).st_blocks == 0
    assert both.outcome(both.timed(1e6)).status is SlotStatus.UNAVAILABLE


@pytest.mark.long
def test_one_queue_is_full_whatever_its_requests_could_be(both: BothPrecisions) -> None:
    running = both.request(hang=1, priority=-1)  # nobody takes its cores
    both.await_gang(2)
    submit: list[Callable[[], Submission]] = [
        lambda: both.timed(1e6, max_queue=2),
        lambda: both.request(max_queue=2),
        lambda: both.timed(1e6, max_queue=2),
    ]
    requests = [each() for each in submit]
    assert both.outcome(requests[2]).status is SlotStatus.QUEUE_FULL
    both.hurry(running)
    assert [both.outcome(request).status for request in requests[:2]] == [SlotStatus.OK] * 2


def test_rows_of_a_batch_have_one_precision(both: BothPrecisions) -> None:
    """Requests of several rows may be cut over gangs."""
    for within_us in (1e6, 20e3):
        requests = [both.timed(within_us, rows=4) for _ in range(4)]
        for request in requests:
            outcome = both.outcome(request)
            layers = FAST_LAYERS if outcome.counts.bf16 else LAYERS
            for row in range(4):
                counters = list(request.outputs[0].cast("i"))[row * layers * TASKS : (row + 1) * layers * TASKS]
                assert counters == [1] * (layers * TASKS)
