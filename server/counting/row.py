"""The counters of one model, as one front end counts."""

from functools import partial

from gangway.executor import _native
from gangway.server.counting.layout import (
    BATCH_WORDS,
    BATCHES,
    MAX_BATCHES,
    ROW_BYTES,
    ROW_WORDS,
    SEQUENCE,
    batch_offset,
)

_READ_ATTEMPTS = 100  # a writer that has died in the middle leaves an odd sequence until its successor counts


class Row:
    """Words at `offset` of a view; `layout.py` says which. One process writes, any number of threads of it."""

    def __init__(self, view: memoryview, offset: int) -> None:
        self._words = view[offset : offset + ROW_BYTES].cast("Q")
        # add(latest, word, amount, word, amount, ...): one call, during which no other thread runs
        self.add = partial(_native.counters_add, view, offset, ROW_WORDS)

    @classmethod
    def private(cls) -> "Row":
        """Return a row that no other process sees."""
        return cls(memoryview(bytearray(ROW_BYTES)), 0)

    def word(self, number: int) -> int:
        """Return one word as it is now."""
        return self._words[number]

    def read(self) -> list[int]:
        """Return the words as they were at one moment: without the batch sizes that have not come yet."""
        words: list[int] = []
        for _ in range(_READ_ATTEMPTS):
            before = self._words[SEQUENCE]
            words = self._words[: batch_offset(min(self._words[BATCHES], MAX_BATCHES))].tolist()
            if not before & 1 and self._words[SEQUENCE] == before:
                break
        return words


def batches_in(words: list[int]) -> dict[int, list[int]]:
    """Return the words of each batch size, by rows, of what `read` has returned."""
    starts = range(batch_offset(0), len(words), BATCH_WORDS)
    return {words[start]: words[start : start + BATCH_WORDS] for start in starts}
