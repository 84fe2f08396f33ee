"""What front ends remember is bounded."""

from gangway.server.requests.remembered import MAX_BYTES, MAX_ENTRIES, MAX_ENTRY_BYTES, Remembered


def test_values_are_remembered() -> None:
    some: Remembered[str, int] = Remembered()
    some.add("a", 1, 10)
    some.add("a", 2, 10)
    assert some.known == {"a": 1}


def test_too_many_are_forgotten() -> None:
    some: Remembered[int, int] = Remembered()
    for number in range(MAX_ENTRIES + 1):
        some.add(number, number, 1)
    assert some.known == {MAX_ENTRIES: MAX_ENTRIES}


def test_too_large_ones_are_forgotten() -> None:
    some: Remembered[int, int] = Remembered()
    some.add(0, 0, MAX_ENTRY_BYTES + 1)
    assert not some.known
    most = MAX_BYTES // MAX_ENTRY_BYTES
    for number in range(3 * most + 1):
        some.add(number, number, MAX_ENTRY_BYTES)
        assert len(some.known) <= most
    assert some.known == {3 * most: 3 * most}
