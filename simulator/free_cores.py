"""The cores that nobody has."""

from bisect import bisect_left, insort


class FreeCores:
    """Free cores in ascending order."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._known: tuple[int, ...] | None = None

    def all(self) -> tuple[int, ...]:
        """Return the free cores."""
        if self._known is None:
            self._known = tuple(self._free)
        return self._known

    def take(self, cores: tuple[int, ...]) -> None:
        """Take cores that must be free. Raises ValueError if one is not, or is named twice."""
        free = self._free
        for core in cores:
            index = bisect_left(free, core)
            if index == len(free) or free[index] != core:
                raise ValueError(f"core {core} is not free")
            del free[index]
        self._known = None

    def give(self, cores: tuple[int, ...]) -> None:
        """Give cores back."""
        for core in cores:
            insort(self._free, core)
        self._known = None
