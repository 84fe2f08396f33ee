"""Who is let in while more calls come than can be answered."""

import random

import pytest

from gangway.server.requests.admission import MIXED_PRIORITIES_S, OVERLOAD_S, AdmissionController

ROOM = 64
FULL = 56


class Clocks:
    """Of which the test says how far they have gone. A front end that reads all day."""

    now_s = 100.0
    cpu_s = 100.0

    def admission(self, room: int = ROOM) -> AdmissionController:
        return AdmissionController(room, lambda: self.now_s, lambda: self.cpu_s)


def crowded(room: int = ROOM) -> AdmissionController:
    admission = Clocks().admission(room)
    for _ in range(room * 7 // 8):
        come(admission)
    assert admission.is_overloaded
    return admission


def come(admission: AdmissionController) -> bool:
    admitted = admission.admits()
    if admitted:
        admission.enter()
    return admitted


def test_who_comes_to_a_full_server_is_refused() -> None:
    admission = crowded()
    assert not admission.admits() and not admission.admits()
    assert admission.refused == 2


def test_fewer_are_let_in_than_are_answered() -> None:
    admission, answers, admitted = crowded(), 0, 0
    while admission.is_overloaded:
        admission.leave(answered=True)
        answers += 1
        admitted += come(admission)
    assert 0.8 < admitted / answers < 0.95


def test_answers_in_time_let_in_more_than_late_ones() -> None:
    def admitted(share_in_time: float) -> int:
        admission, admitted = crowded(1024), 0
        for turn in range(100):
            if turn < 100 * share_in_time:
                admission.met_target()
            admission.leave(answered=True)
            admitted += come(admission) + come(admission) + come(admission) + come(admission)
        return admitted

    assert admitted(0.0) == pytest.approx(90, abs=2)
    assert admitted(0.5) == pytest.approx(90 + 150, abs=5)


def test_whoever_leaves_without_an_answer_lets_nobody_in() -> None:
    admission = crowded()
    admission.leave(answered=False)
    assert not admission.admits()


def test_many_answers_at_once_do_not_let_a_crowd_in() -> None:
    admission = crowded(1024)
    for _ in range(100):
        admission.leave(answered=True)
    assert sum(come(admission) for _ in range(100)) == 8


def test_all_are_let_in_again_when_there_is_room() -> None:
    admission = crowded()
    for _ in range(8):
        admission.leave(answered=False)
    assert not admission.is_overloaded
    assert all(come(admission) for _ in range(8))
    assert not come(admission)


def test_the_door_closes_when_the_scheduler_turns_one_away_and_opens_a_second_after_the_last() -> None:
    clocks = Clocks()
    admission = clocks.admission()
    clocks.cpu_s += 1.0  # there is no more to spend
    admission.scheduler_refused()
    clocks.now_s += OVERLOAD_S / 2
    clocks.cpu_s += 1.0
    admission.scheduler_refused()
    for _ in range(2):
        assert not admission.admits()
        clocks.now_s += OVERLOAD_S * 0.4
        clocks.cpu_s += 1.0
    admission.leave(answered=False)
    assert admission.is_overloaded
    clocks.now_s += OVERLOAD_S * 0.4
    assert admission.admits() and not admission.is_overloaded


def test_whoever_sends_no_message_takes_nobodys_place() -> None:
    admission = Clocks().admission()
    assert all(admission.admits() for _ in range(10 * ROOM))
    assert not admission.is_overloaded


@pytest.mark.parametrize(("seconds", "let_in"), [(MIXED_PRIORITIES_S - 1, True), (MIXED_PRIORITIES_S + 1, False)])
def test_nobody_is_refused_unseen_while_there_are_several_priorities(seconds: float, let_in: bool) -> None:
    clocks = Clocks()
    admission = clocks.admission()
    admission.note_priority(1)
    assert all(come(admission) for _ in range(FULL))
    clocks.now_s += seconds
    clocks.cpu_s += seconds
    assert come(admission) is let_in


@pytest.mark.parametrize(("cpu_s", "let_in"), [(0.15, 60), (0.5, 0)])
def test_as_many_are_let_in_as_can_be_read_in_a_fifth_of_a_core(cpu_s: float, let_in: int) -> None:
    clocks = Clocks()
    admission = clocks.admission(1024)
    while not admission.is_overloaded:
        come(admission)
    clocks.cpu_s += 0.1  # what was saved is spent
    admission.admits()
    admitted = 0
    for _ in range(100):
        clocks.now_s += 0.01
        clocks.cpu_s += cpu_s * 0.01
        admitted += admission.admits()
    assert admitted == pytest.approx(let_in, abs=2)


def test_under_three_times_the_load_the_queue_stays_full_and_two_of_three_are_refused() -> None:
    rng = random.Random(1)
    admission, inside, fullest = Clocks().admission(), 0, 0
    for _ in range(10_000):
        inside += come(admission)
        if rng.random() < 1 / 3 and inside:
            admission.leave(answered=True)
            inside -= 1
        fullest = max(fullest, inside)
    assert FULL <= fullest <= FULL + 8
    assert admission.refused == pytest.approx(10_000 * 2 / 3, rel=0.05)
