"""Where the counters lie. One segment, made by the supervisor, inherited by every front end.

    0       one page: u32 magic, u32 version of this layout, u32 front ends, u32 models that there can be
    4096    a section for each front end, which it alone writes and any process reads, without a lock:

      0     one page: u64 bytes of tensors of its requests in flight, u64 calls that it has refused unread
      4096  a row of 12 KiB (3 pages) for each model (`ModelReady.statistics_row`)

A row has memory while it is in use: the supervisor takes it, all zeros, when a model (or an ensemble) is announced,
and gives it back when its last request has ended (`announcements.py`). So a model that is loaded anew begins at 0. A
front end that is started in the place of a dead one goes on with its section. A row is 1536 little-endian 64-bit words:

    0      sequence: odd while its writer is at work
    1      time of the last answer, milliseconds since 1970; 0: none
    2      counters, by the names below; times in nanoseconds
    48     three histograms by TIME_BOUNDS_NS, 17 words each: request, queue, compute_infer
    99     histogram of the rows of executions by ROW_BOUNDS, 12 words
    128    histogram of the time to the first response, by the model's own bounds: up to 65 words
    256    160 batch sizes of 8 words: rows, executions, compute_input, compute_infer, compute_output, 3 of no meaning
           yet; in the order in which they came. The last one has all the sizes for which there was no other left

What is 0 now in front of 48, 128 and 256 is there to be used, by a layout of another version.
"""

import time
from functools import partial
from typing import Final

from gangway.executor import _native

# Bounds of the histograms, as Prometheus has them: up to the first, up to the second, ..., beyond the last.
#
# Counting a value costs one search and one addition, and histograms add up over servers.

_STEPS = (1, 2.5, 5)  # of each decade
TIME_BOUNDS_NS = (
    *(round(step * 10**power) for power in range(5, 10) for step in _STEPS),
    10**10,
)  # 0.1 ms to 10 s
ROW_BOUNDS = tuple(2**power for power in range(11))  # 1 to 1024


MAGIC: Final = 0x43574721
VERSION: Final = 3
PAGE_BYTES: Final = 4096
HEAP_BYTES: Final = 0  # words of a section's first page
REFUSED_UNREAD: Final = 1
WORD_BYTES: Final = 8
MODELS: Final = _native.MAX_MODELS

SEQUENCE: Final = 0
LATEST: Final = 1
# Pairs of a count and a sum of nanoseconds.
SUCCESS: Final = 2
FAIL: Final = 4
QUEUE: Final = 6
CACHE_HIT: Final = 8
CACHE_MISS: Final = 10
# Single counters.
EXECUTIONS: Final = 12
INFERENCES: Final = 13
COMPUTE: Final = 14  # input, infer, output
FAILURES: Final = 17  # by reason
OWN: Final = 21  # by OWN_KEYS
VERSIONS: Final = 27  # requests that used a version of a kernel, by its number
VERSION_COUNT: Final = 8
BATCHES: Final = 35  # sizes that there are in the table
BATCH_ROWS: Final = 36  # in all executions: `inferences`, but for requests of a batch that failed
# Histograms.
TIME_BUCKETS: Final = len(TIME_BOUNDS_NS) + 1
REQUEST_TIMES: Final = 48
QUEUE_TIMES: Final = REQUEST_TIMES + TIME_BUCKETS
COMPUTE_TIMES: Final = QUEUE_TIMES + TIME_BUCKETS
ROWS: Final = COMPUTE_TIMES + TIME_BUCKETS
ROW_BUCKETS: Final = len(ROW_BOUNDS) + 1
RESPONSE_TIMES: Final = 128
MAX_RESPONSE_BOUNDS: Final = 64

BATCH_TABLE: Final = 256
BATCH_WORDS: Final = 8
MAX_BATCHES: Final = 159  # sizes with counters of their own
OTHER_BATCHES: Final = BATCH_TABLE + MAX_BATCHES * BATCH_WORDS
ROW_WORDS: Final = OTHER_BATCHES + BATCH_WORDS
ROW_BYTES: Final = ROW_WORDS * WORD_BYTES

SECTION_BYTES: Final = PAGE_BYTES + MODELS * ROW_BYTES


def section_offset(front_end: int) -> int:
    """Return where the section of a front end begins (counted from 0)."""
    return PAGE_BYTES + front_end * SECTION_BYTES


def row_offset(front_end: int, row: int) -> int:
    """Return where a front end has a row. Raises ValueError for a number that no row has."""
    if not 0 <= row < MODELS:
        raise ValueError(f"there is no row {row}")
    return section_offset(front_end) + PAGE_BYTES + row * ROW_BYTES


def batch_offset(place: int) -> int:
    """Return the first word of a batch size, by its place in the table."""
    return BATCH_TABLE + place * BATCH_WORDS


# The counters of one model, as one front end counts.

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
