"""The response cache: answers of models whose configuration allows it, for requests that are equal byte by byte.

The least recently used answers go when there is no room. A model that is loaded again has another `load` number, so
what was answered before is never found again, and `keep` gives its memory back.
"""

import hashlib
import threading
from collections.abc import Container, Sequence
from typing import NamedTuple

from cachetools import LRUCache

ENTRY_BYTES = 400  # what an answer costs besides its own bytes: key, digest, dictionaries
DIGEST_BYTES = 32
_LENGTH_BYTES = 8


class Key(NamedTuple):
    """Which model, as loaded when, and what was asked."""

    load: int
    digest: bytes


def key_of(load: int, header: bytes, raws: Sequence[bytes | memoryview]) -> Key:
    """Return the key of a request: its header, without the id, and its tensors."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (header, *raws):
        digest.update(len(part).to_bytes(_LENGTH_BYTES, "little"))
        digest.update(part)
    return Key(load, digest.digest())


class ResponseCache:
    """At most `size_bytes` of answers. Safe for threads."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._answers: LRUCache[Key, bytes] = LRUCache(size_bytes, _cost)

    def get(self, key: Key) -> bytes | None:
        """Return the answer that was given before, without an id."""
        with self._lock:
            return self._answers.get(key)

    def put(self, key: Key, answer: bytes) -> None:
        """Keep an answer, unless it is larger than the cache."""
        if _cost(answer) <= self._size_bytes:
            with self._lock:
                self._answers[key] = answer

    def keep(self, loads: Container[int]) -> None:
        """Forget the answers of all other models."""
        with self._lock:
            for key in [key for key in self._answers if key.load not in loads]:
                del self._answers[key]

    @property
    def used_bytes(self) -> int:
        """How much is taken."""
        with self._lock:
            return int(self._answers.currsize)


def _cost(answer: bytes) -> int:
    return len(answer) + ENTRY_BYTES
