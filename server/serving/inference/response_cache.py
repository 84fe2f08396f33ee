"""The response cache of a front end: what it keeps, and what is counted of it."""

import hashlib
import time
from collections.abc import Container, Sequence
from typing import Final, NamedTuple

from cachetools import LRUCache

from gangway.server.statistics import CacheFigures

ENTRY_BYTES: Final = 400  # what an answer costs besides its own bytes: key, digest, dictionaries
DIGEST_BYTES: Final = 32
_LENGTH_BYTES: Final = 8
_SIZE, _USED, _ENTRIES, _HITS, _MISSES, _EVICTIONS, _LOOKUP, _INSERTION = range(len(CacheFigures._fields))


class Key(NamedTuple):
    """Which model, as loaded when, and what was asked."""

    load: int
    digest: bytes


def key_of(load: int, header: bytes, raws: Sequence[bytes | memoryview]) -> Key:
    """Return the key of a request: its header, without the id, its tensors, and what else makes answers differ."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (header, *raws):
        digest.update(len(part).to_bytes(_LENGTH_BYTES, "little"))
        digest.update(part)
    return Key(load, digest.digest())


class ResponseCache:
    """Answers of models whose configuration allows it, for requests that are equal but for the order of parameters.

    It holds at most `size_bytes`; the least recently used answers go when there is no room. A model that is loaded
    again has another `load` number, so its former answers are never found, and `keep` frees them. For one thread.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._answers: LRUCache[Key, bytes] = LRUCache(size_bytes, _cost)
        self.count_in(memoryview(bytearray(8 * len(CacheFigures._fields))).cast("Q"))

    def count_in(self, words: memoryview) -> None:
        """Write the figures there from now on, on top of what has been counted there."""
        self._words = words
        words[_SIZE] = self._size_bytes
        self._note_content()

    def get(self, key: Key) -> bytes | None:
        """Return the answer that was given before, without an id."""
        begin_ns = time.monotonic_ns()
        answer = self._answers.get(key)
        self._words[_MISSES if answer is None else _HITS] += 1
        self._words[_LOOKUP] += time.monotonic_ns() - begin_ns
        return answer

    def put(self, key: Key, answer: bytes) -> None:
        """Keep an answer, unless it is larger than the cache."""
        if _cost(answer) > self._size_bytes:
            return
        begin_ns, answers = time.monotonic_ns(), self._answers
        expected = len(answers) + (key not in answers)
        answers[key] = answer
        self._words[_EVICTIONS] += expected - len(answers)
        self._words[_INSERTION] += time.monotonic_ns() - begin_ns
        self._note_content()

    def keep(self, loads: Container[int]) -> None:
        """Forget the answers of all other models."""
        for key in [key for key in self._answers if key.load not in loads]:
            del self._answers[key]
        self._note_content()

    @property
    def used_bytes(self) -> int:
        """How much is taken."""
        return int(self._answers.currsize)

    def _note_content(self) -> None:
        self._words[_USED], self._words[_ENTRIES] = self.used_bytes, len(self._answers)


def _cost(answer: bytes) -> int:
    return len(answer) + ENTRY_BYTES
