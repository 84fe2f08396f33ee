import random

from gangway.scheduler.resources import Extents


def test_first_fit_and_exhaustion() -> None:
    extents = Extents(100)
    assert [extents.take(40), extents.take(40), extents.take(40), extents.take(20)] == [0, 40, None, 80]
    assert extents.free_bytes == 0
    extents.give_back(40, 40)
    assert extents.take(10) == 40


def test_random_use_never_overlaps_and_ends_whole() -> None:
    generator = random.Random(3)
    extents = Extents(1000)
    taken: dict[int, int] = {}
    for _ in range(2000):
        size = generator.randrange(1, 120)
        offset = extents.take(size)
        if offset is not None:
            assert 0 <= offset <= 1000 - size
            assert all(offset + size <= other or other + length <= offset for other, length in taken.items())
            taken[offset] = size
        elif taken:
            victim = generator.choice(sorted(taken))
            extents.give_back(victim, taken.pop(victim))
        assert extents.free_bytes == 1000 - sum(taken.values())
    for offset, size in taken.items():
        extents.give_back(offset, size)
    assert extents.take(1000) == 0
