"""Who is let in while more calls come than can be answered."""

import random

import pytest

from gangway.server.requests.admission import ONE_CLASS_S, TURNED_AWAY_S, AdmissionController

ROOM = 64
FULL = 56


class Clocks:
    """Of which the test says how far they have gone. A front end that reads all day."""

    now_s = 100.0
    cpu_s = 100.0

    def door(self, room: int = ROOM) -> AdmissionController:
        return AdmissionController(room, lambda: self.now_s, lambda: self.cpu_s)


def crowded(room: int = ROOM) -> AdmissionController:
    door = Clocks().door(room)
    for _ in range(room * 7 // 8):
        come(door)
    assert door.is_crowded
    return door


def come(door: AdmissionController) -> bool:
    admitted = door.admits()
    if admitted:
        door.enter()
    return admitted


def test_who_comes_to_a_full_server_is_refused() -> None:
    door = crowded()
    assert not door.admits() and not door.admits()
    assert door.refused == 2


def test_fewer_are_let_in_than_are_answered() -> None:
    door, answers, admitted = crowded(), 0, 0
    while door.is_crowded:
        door.leave(answered=True)
        answers += 1
        admitted += come(door)
    assert 0.8 < admitted / answers < 0.95


def test_answers_in_time_let_in_more_than_late_ones() -> None:
    def admitted(share_in_time: float) -> int:
        door, admitted = crowded(1024), 0
        for turn in range(100):
            if turn < 100 * share_in_time:
                door.in_time()
            door.leave(answered=True)
            admitted += come(door) + come(door) + come(door) + come(door)
        return admitted

    assert admitted(0.0) == pytest.approx(90, abs=2)
    assert admitted(0.5) == pytest.approx(90 + 150, abs=5)


def test_whoever_leaves_without_an_answer_lets_nobody_in() -> None:
    door = crowded()
    door.leave(answered=False)
    assert not door.admits()


def test_many_answers_at_once_do_not_let_a_crowd_in() -> None:
    door = crowded(1024)
    for _ in range(100):
        door.leave(answered=True)
    assert sum(come(door) for _ in range(100)) == 8


def test_all_are_let_in_again_when_there_is_room() -> None:
    door = crowded()
    for _ in range(8):
        door.leave(answered=False)
    assert not door.is_crowded
    assert all(come(door) for _ in range(8))
    assert not come(door)


def test_the_door_closes_when_the_scheduler_turns_one_away_and_opens_a_second_after_the_last() -> None:
    clocks = Clocks()
    door = clocks.door()
    clocks.cpu_s += 1.0  # there is no more to spend
    door.turned_away()
    clocks.now_s += TURNED_AWAY_S / 2
    clocks.cpu_s += 1.0
    door.turned_away()
    for _ in range(2):
        assert not door.admits()
        clocks.now_s += TURNED_AWAY_S * 0.4
        clocks.cpu_s += 1.0
    door.leave(answered=False)
    assert door.is_crowded
    clocks.now_s += TURNED_AWAY_S * 0.4
    assert door.admits() and not door.is_crowded


def test_whoever_sends_no_message_takes_nobodys_place() -> None:
    door = Clocks().door()
    assert all(door.admits() for _ in range(10 * ROOM))
    assert not door.is_crowded


@pytest.mark.parametrize(("seconds", "let_in"), [(ONE_CLASS_S - 1, True), (ONE_CLASS_S + 1, False)])
def test_nobody_is_refused_unseen_while_there_are_several_priorities(seconds: float, let_in: bool) -> None:
    clocks = Clocks()
    door = clocks.door()
    door.see(1)
    assert all(come(door) for _ in range(FULL))
    clocks.now_s += seconds
    clocks.cpu_s += seconds
    assert come(door) is let_in


@pytest.mark.parametrize(("cpu_s", "let_in"), [(0.15, 60), (0.5, 0)])
def test_as_many_are_let_in_as_can_be_read_in_a_fifth_of_a_core(cpu_s: float, let_in: int) -> None:
    clocks = Clocks()
    door = clocks.door(1024)
    while not door.is_crowded:
        come(door)
    clocks.cpu_s += 0.1  # what was saved is spent
    door.admits()
    admitted = 0
    for _ in range(100):
        clocks.now_s += 0.01
        clocks.cpu_s += cpu_s * 0.01
        admitted += door.admits()
    assert admitted == pytest.approx(let_in, abs=2)


def test_under_three_times_the_load_the_queue_stays_full_and_two_of_three_are_refused() -> None:
    rng = random.Random(1)
    door, inside, fullest = Clocks().door(), 0, 0
    for _ in range(10_000):
        inside += come(door)
        if rng.random() < 1 / 3 and inside:
            door.leave(answered=True)
            inside -= 1
        fullest = max(fullest, inside)
    assert FULL <= fullest <= FULL + 8
    assert door.refused == pytest.approx(10_000 * 2 / 3, rel=0.05)
