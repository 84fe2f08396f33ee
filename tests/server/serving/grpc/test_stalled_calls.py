"""Calls that wait for their client: the oldest are ended when there are too many, or they hold too much."""

from gangway.server.serving.limits import StalledCalls


class Call:
    """Remembers that it was ended."""

    def __init__(self) -> None:
        self.ended = False

    def cancel(self) -> None:
        self.ended = True


def entered(stalled: StalledCalls, count: int, held_bytes: int = 0) -> list[Call]:
    calls = [Call() for _ in range(count)]
    for call in calls:
        stalled.enter(call, held_bytes)
    return calls


def test_the_oldest_of_too_many_are_ended() -> None:
    stalled = StalledCalls(max_calls=3, max_bytes=0, grace_s=0.0)
    calls = entered(stalled, 5)
    assert stalled.poll() == 2
    assert [call.ended for call in calls] == [True, True, False, False, False]
    assert stalled.poll() == 0


def test_the_oldest_of_those_that_hold_too_much_are_ended() -> None:
    stalled = StalledCalls(max_calls=100, max_bytes=1000, grace_s=0.0)
    calls = entered(stalled, 4, held_bytes=400)
    assert stalled.poll() == 2
    assert [call.ended for call in calls] == [True, True, False, False]


def test_nobody_is_ended_too_early() -> None:
    stalled = StalledCalls(max_calls=1, max_bytes=0, grace_s=60.0)
    calls = entered(stalled, 50)
    assert stalled.poll() == 0
    assert not any(call.ended for call in calls)


def test_who_does_not_wait_any_more_does_not_count() -> None:
    stalled = StalledCalls(max_calls=1, max_bytes=0, grace_s=0.0)
    first, second, third = entered(stalled, 3)
    stalled.leave(first)
    stalled.leave(second)
    stalled.leave(second)
    assert stalled.poll() == 0
    assert not third.ended
