"""Which regions of clients' memory have lost a part of it: a word for each number, in the control segment.

A worker that finds memory missing (`native/region.c`) says so there before it goes on with zeros. So whoever sees an
answer also sees whether zeros may be behind it.
"""

import struct
from typing import Final

from gangway.executor import _native
from gangway.executor.segment import Segment

_WORD: Final = struct.Struct("<I")
LOST_REGIONS_BYTES: Final = -(-_native.MAX_REGIONS * _WORD.size // 64) * 64


class LostRegions:
    """The words at `offset` of a segment. Numbers begin with 1."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self._view = segment.view
        self._offset = offset

    def is_lost(self, number: int) -> bool:
        """Whether a worker has missed a part of the region since `forget`."""
        return bool(_WORD.unpack_from(self._view, self._place(number))[0])

    def lose(self, number: int) -> None:
        """Say that the region is not to be relied on."""
        _WORD.pack_into(self._view, self._place(number), 1)

    def forget(self, number: int) -> None:
        """The number is to mean another region. Only while no worker maps it and no request names it."""
        _WORD.pack_into(self._view, self._place(number), 0)

    def _place(self, number: int) -> int:
        if not 1 <= number <= _native.MAX_REGIONS:
            raise ValueError(f"no region has the number {number}")
        return self._offset + (number - 1) * _WORD.size
