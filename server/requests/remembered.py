"""What front ends remember of requests, so that equal ones are understood once; bounded by number and by size."""

from typing import Final, Generic, TypeVar

MAX_ENTRIES: Final = 1024
MAX_ENTRY_BYTES: Final = 128 << 10  # of a header: one of 1024 inputs and 1024 outputs with names of usual length
MAX_BYTES: Final = 4 << 20  # of all headers

Key = TypeVar("Key")
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """Values by key. When there are more than `most`, or they are too large, all are forgotten. For any threads.

    `known`: what is remembered, for a look that costs no call.
    """

    def __init__(self, most: int = MAX_ENTRIES) -> None:
        self.known: dict[Key, Value] = {}
        self._most = most
        self._size_bytes = 0

    def add(self, key: Key, value: Value, size_bytes: int = 0) -> None:
        """Remember a value, unless it is too large. `size_bytes`: about what it takes beside what all values take."""
        if size_bytes > MAX_ENTRY_BYTES:
            return
        if len(self.known) >= self._most or self._size_bytes + size_bytes > MAX_BYTES:
            self.known.clear()
            self._size_bytes = 0
        if self.known.setdefault(key, value) is value:
            self._size_bytes += size_bytes
