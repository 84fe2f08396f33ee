"""The words of shared memory that say which calls are over, as front ends write and instances read them."""

import pytest

from gangway.python_backend import cancellations as instance
from gangway.python_backend.cancellations import NEVER_CANCELLED
from gangway.server.cancellations import WORDS, Cancellations, CancellationTable


@pytest.fixture
def table() -> CancellationTable:
    """The table of a supervisor and two front ends, at which an instance looks."""
    made = CancellationTable.create(3)
    instance.attach(made.segment.fd)
    return made


def test_a_word_serves_one_call_after_the_other(table: CancellationTable) -> None:
    flags = Cancellations.attach(table.segment.fd, 1)
    first = flags.begin()
    assert first is not None
    assert not instance.is_cancelled(first)
    flags.end(first)
    second = flags.begin()
    assert second is not None
    assert second.place == first.place
    assert (instance.is_cancelled(first), instance.is_cancelled(second)) == (True, False)


def test_a_front_end_that_ends_takes_its_clients_along(table: CancellationTable) -> None:
    ended, other = (Cancellations.attach(table.segment.fd, part) for part in (1, 2))
    gone, kept = [ended.begin() for _ in range(3)], other.begin()
    table.end_all(1)
    assert all(each is not None and instance.is_cancelled(each) for each in gone)
    assert kept is not None
    assert not instance.is_cancelled(kept)
    successor = Cancellations.attach(table.segment.fd, 1)
    begun = [successor.begin() for _ in range(4)]
    assert len({each.place for each in begun if each is not None}) == 4
    assert not any(each is None or instance.is_cancelled(each) for each in begun)
    assert all(each is not None and instance.is_cancelled(each) for each in gone)


def test_there_is_an_end_to_the_words(table: CancellationTable) -> None:
    flags = Cancellations.attach(table.segment.fd, 2)
    taken = [flag for flag in iter(flags.begin, None) if flag is not None]
    assert len(taken) == WORDS - 1
    flags.end(taken[7])
    assert flags.begin() is not None
    assert flags.begin() is None


def test_what_no_client_asks_for_is_never_cancelled(table: CancellationTable) -> None:
    Cancellations.attach(-1, 0).begin()
    for part in range(3):
        table.end_all(part)
    assert not instance.is_cancelled(NEVER_CANCELLED)
