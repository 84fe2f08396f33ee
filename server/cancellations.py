"""Which calls are over, for Python models: words of shared memory (`python_backend/cancellations.py`).

Each front end has a part of them, which begins with how many it has ever used. The supervisor's part comes first.
"""

from typing import Final

from gangway.executor.segment import Segment
from gangway.python_backend.cancellations import WORD_BYTES, Flag

WORDS: Final = 1 << 16  # of each part


class CancellationTable:
    """The words of all front ends. Numbers of parts are those of the control segment, 0 is the supervisor."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.words = segment.view.cast("Q")

    @classmethod
    def create(cls, parts: int) -> "CancellationTable":
        """Make the segment (the supervisor, once). Raises OSError."""
        return cls(Segment.create(parts * WORDS * WORD_BYTES, "cancellations"))

    def end_all(self, part: int) -> None:
        """No client of this front end waits any more: it has ended."""
        first = part * WORDS
        for place in range(first + 1, first + 1 + self.words[first]):
            self.words[place] += 1


class Cancellations:
    """The words of one front end, which begin with that of this place. For one thread."""

    def __init__(self, words: memoryview, first: int) -> None:
        self._words, self._first = words, first
        self._free = list(range(self._first + self._words[self._first], self._first, -1))  # the lowest one is the last

    @classmethod
    def attach(cls, fd: int, part: int) -> "Cancellations":
        """Map the inherited segment, of which this part is meant; -1: take words that no other process sees."""
        if fd < 0:
            return cls(memoryview(bytearray(WORDS * WORD_BYTES)).cast("Q"), 0)
        return cls(CancellationTable(Segment.attach(fd)).words, part * WORDS)

    def begin(self) -> Flag | None:
        """Return a flag for a call; None if there are too many calls."""
        if not self._free:
            used = self._words[self._first] + 1
            if used == WORDS:
                return None
            self._words[self._first] = used
            self._free.append(self._first + used)
        place = self._free.pop()
        return Flag(place, self._words[place])

    def end(self, flag: Flag) -> None:
        """No client waits for the call any more. Once for each flag."""
        self._words[flag.place] += 1
        self._free.append(flag.place)
