"""Call compiled kernels in this process, on buffers of one's own: for tests, benchmarks and measurements, not for
serving.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gangway.artifact.format import ALIGNMENT_BYTES

Array = npt.NDArray[Any]


def aligned(array: Array, offset_bytes: int = 0) -> Array:
    """A copy that begins `offset_bytes` after a cache line's boundary."""
    memory = np.empty(array.nbytes + 2 * ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES + offset_bytes
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Library:
    """The kernels of a shared library."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))

    def call(self, symbol: str, arguments: Sequence[Array], begin: int, end: int) -> None:
        """Compute the tasks [begin, end)."""
        self.bind(symbol, arguments)(begin, end)

    def bind(self, symbol: str, arguments: Sequence[Array]) -> Any:
        """A function of (begin, end) that calls the kernel on these arrays; the caller keeps them alive."""
        kernel = getattr(self._library, symbol)
        kernel.restype = None
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in arguments]
        return lambda begin, end: kernel(*pointers, ctypes.c_int32(begin), ctypes.c_int32(end))
