"""Compound tasks in a live scheduler: by schedule, or as ordinary requests when a member or a process is lost."""

import time

import pytest

from gangway.artifact.profile import whole_machine_id
from gangway.executor.control import COMPOUND_RESULTS
from gangway.executor.slots import SlotStatus, compound_number
from gangway.scheduler import messages
from gangway.scheduler.stages.ir import StreamSegment
from gangway.scheduler.stages.schedule_file import StoredSchedule, write_schedule
from gangway.server.requests.data_plane import Scheduling
from testing.waiting import until
from tests.helpers.own_time import within
from tests.helpers.sampled import sampled
from tests.helpers.tiny_model import TASKS
from tests.scheduler.conftest import LAYERS, Server

SCHEDULE = 5
STAGES = (
    (StreamSegment(0, 0, 4, 1), StreamSegment(1, 0, 2, 1)),
    (StreamSegment(1, 2, 3, 2),),
    (StreamSegment(0, 4, LAYERS, 1), StreamSegment(1, 3, LAYERS, 1)),
)
TASK_US = 100  # a layer takes 2.4 ms on a core


@pytest.fixture
def composed(server, tiny_model, tmp_path):
    """A server that has a schedule for two requests to its model."""
    _, key = tiny_model
    names = ("tiny", "tiny")
    pointers = ((4, 4), (2, 3))
    found = StoredSchedule(
        (key, key), names, (LAYERS,) * 2, whole_machine_id("baseline"), 2, "random", pointers, STAGES, 3e4, 1, 1, 1, 1.0
    )
    server.use = messages.UseSchedule(SCHEDULE, (7, 7), str(write_schedule(tmp_path, found)))
    server.tell(server.use)
    server.await_heard()
    server.await_quiet()
    return server


class Task:
    """The members of a compound task, submitted as a front end does it."""

    counts = iter(range(1, 1 << 30))

    def __init__(self, server: Server, members: int = 2, task_us: float = TASK_US, hang: int = 0) -> None:
        number = compound_number(SCHEDULE, next(self.counts))
        self.server = server
        self.members = [server.open() for _ in range(members)]
        for index, request in enumerate(self.members):
            server.order(request, 0, task_us, hang=hang if index == 0 else 0)
            request.submit(Scheduling(compound=number), last=index == members - 1)

    def assert_right(self, *attempts: int) -> None:
        for request, expected in zip(self.members, attempts, strict=True):
            outcome = self.server.outcome(request)
            assert (outcome.status, outcome.attempts) == (SlotStatus.OK, expected)
            if expected == 1:
                assert self.server.counters(request) == {1}


def results(server: Server, **expected: int) -> None:
    """Wait until the scheduler has counted this and nothing else."""
    assert counted(server, sum(expected.values())) == expected


def counted(server: Server, tasks: int) -> dict[str, int]:
    """Wait until the scheduler has counted so many tasks; return the results that there are."""

    def found() -> dict[str, int]:
        counts = server.memory.control.scheduler_block.read([]).compounds
        return {name: count for name, count in zip(COMPOUND_RESULTS, counts, strict=True) if count}

    until(lambda: sum(found().values()) == tasks, lambda: str(found()))
    return found()


def test_stages_run_one_after_the_other_on_their_cores(composed):
    tasks = [Task(composed) for _ in range(4)]
    for task in tasks:
        task.assert_right(1, 1)
    outcomes = [tuple(map(composed.outcome, task.members)) for task in tasks]
    one_core = [first.ranks == 1 for first, _ in outcomes]  # the first one never has two
    blocks = [(first.counts.blocks, second.counts.blocks) for first, second in outcomes]
    found = counted(composed, 4)
    assert found.keys() <= {"by_schedule", "cores_busy"}, "a core that comes late makes a task ordinary requests"
    assert list(zip(one_core, blocks, strict=True)).count((True, (2, 3))) >= found["by_schedule"] > 0


def test_a_missing_member_is_waited_for_briefly(composed):
    with within(0.2):
        Task(composed, members=1, task_us=0).assert_right(1)
    results(composed, member_missing=1)
    composed.await_quiet()
    Task(composed).assert_right(1, 1)
    results(composed, member_missing=1, by_schedule=1)


def test_a_schedule_that_is_gone_leaves_ordinary_requests(composed, tmp_path):
    composed.tell(messages.UseSchedule(SCHEDULE))
    Task(composed).assert_right(1, 1)
    composed.tell(messages.UseSchedule(SCHEDULE, (7, 7), str(tmp_path / "absent.json")))
    Task(composed).assert_right(1, 1)
    results(composed)


def test_a_member_that_is_cancelled_leaves_the_other_one(composed):
    task = Task(composed, hang=1)
    composed.await_running(task.members[1])
    task.members[0].cancel()
    composed.await_heard()
    composed.hurry(task.members[0])
    assert composed.outcome(task.members[0]).status is SlotStatus.CANCELLED
    assert composed.outcome(task.members[1]).status is SlotStatus.OK
    assert composed.counters(task.members[1]) == {1}
    results(composed, member_lost=1)


@pytest.mark.parametrize("victim", sampled([0, 1], [1]))
def test_a_killed_worker_costs_one_member_an_attempt(composed, victim):
    task = Task(composed, hang=1)
    composed.await_running(task.members[1])
    composed.kill_worker(victim)
    composed.hurry(task.members[0])
    outcomes = [composed.outcome(request) for request in task.members]
    assert [outcome.status for outcome in outcomes] == [SlotStatus.OK] * 2
    assert sorted(outcome.attempts for outcome in outcomes) in ([1, 2], [1, 1]), "the other one goes on where it was"


def test_a_killed_scheduler_learns_the_schedule_again(composed):
    task = Task(composed, hang=1)
    composed.await_running(task.members[1])
    composed.kill_scheduler(lambda: composed.hurry(task.members[0]))
    composed.tell(composed.use)
    task.assert_right(2, 2)
    composed.await_quiet()
    Task(composed).assert_right(1, 1)
    results(composed, by_schedule=1)


def test_a_compound_task_begins_beside_a_stream_of_others(composed):
    """Others wait for few compound tasks, and compound tasks for few others."""
    pending = [composed.request(task_us=TASK_US) for _ in range(6)]
    tasks = [Task(composed) for _ in range(6)]
    pending += [composed.request(task_us=TASK_US) for _ in range(6)]
    for request in pending:
        assert composed.outcome(request).status is SlotStatus.OK
        assert composed.counters(request) == {1}
    for task in tasks:
        task.assert_right(1, 1)


@pytest.mark.parametrize("server", ["gangway"], indirect=True)
def test_an_urgent_request_is_served_first(composed):
    task = Task(composed, task_us=2000)  # 300 ms
    composed.await_running(task.members[1])
    urgent = composed.request(task_us=TASKS / 10, priority=-1)
    assert composed.outcome(urgent).status is SlotStatus.OK
    assert not task.members[1].wait(time.monotonic_ns()), "the compound task has yet to end"
    task.assert_right(1, 1)
    results(composed, target_at_risk=1)
