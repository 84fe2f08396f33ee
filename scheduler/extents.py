"""First-fit allocation of stretches in a range of bytes. Pure arithmetic; alignment is the caller's."""


class Extents:
    """The free stretches of `[0, capacity)`, sorted, never adjacent."""

    def __init__(self, capacity: int) -> None:
        self._free = [(0, capacity)] if capacity else []

    @property
    def free_bytes(self) -> int:
        """Sum of the free stretches."""
        return sum(size for _, size in self._free)

    def take(self, size: int) -> int | None:
        """Return the offset of a stretch of `size` bytes, None when no free one is long enough."""
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Return a stretch that `take` handed out; neighbours grow together."""
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self._free, (offset, size)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._free = merged
