"""The counters of one model, as one front end counts."""

import time
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

# One that was taken off its core in the middle is waited for; one that died there leaves an odd sequence until its
# successor counts, so not for long.
_QUICK_ATTEMPTS = 80
_PATIENT_ATTEMPTS = 20
_PATIENCE_S = 0.001


class Row:
    """Words at `offset` of a view; `layout.py` says which. One process writes, any number of threads of it."""

    def __init__(self, view: memoryview, offset: int) -> None:
        self._bytes = view[offset : offset + ROW_BYTES]
        self._words = self._bytes.cast("Q")
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
        words = memoryview(self._snapshot()).cast("Q")
        return words[: batch_offset(min(words[BATCHES], MAX_BATCHES))].tolist()

    def _snapshot(self) -> bytes:
        """Copy the row at one go: converting its words takes longer than a busy writer pauses."""
        copy = b""
        for attempt in range(_QUICK_ATTEMPTS + _PATIENT_ATTEMPTS):
            before = self._words[SEQUENCE]
            copy = bytes(self._bytes)
            if not before & 1 and self._words[SEQUENCE] == before:
                break
            if attempt >= _QUICK_ATTEMPTS:
                time.sleep(_PATIENCE_S)
        return copy


def batches_in(words: list[int]) -> dict[int, list[int]]:
    """Return the words of each batch size, by rows, of what `read` has returned."""
    starts = range(batch_offset(0), len(words), BATCH_WORDS)
    return {words[start]: words[start : start + BATCH_WORDS] for start in starts}
