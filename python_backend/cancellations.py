"""Whether clients still wait for requests: words of shared memory, which front ends write and instances look at.

Each call that Python models compute for has a word (`server/cancellations.py` gives them out). A model asks by
`request.is_cancelled()` as often as it likes: that costs a look at the word, and no message. Words are used again, so a
call's flag is the word's place and what stands there while the call goes on.
"""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

WORD_BYTES = 8


class Flag(NamedTuple):
    """A call's word, which is another number once no client waits for the call."""

    place: int
    number: int


NEVER_CANCELLED = Flag(0, 0)  # a word that nobody has

_words: Any = memoryview(bytes(WORD_BYTES)).cast("Q")


def attach(descriptor: int) -> None:
    """Map the words, for reading. Raises OSError."""
    global _words  # noqa: PLW0603 - the process has one
    _words = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)).cast("Q")


def is_cancelled(flag: Flag) -> bool:
    """Whether no client waits for the requests that have this flag."""
    return bool(_words[flag.place] != flag.number)
