"""Whether this process may use the tiles of AMX, and whether they multiply as they should.

Linux gives a process the large state of tiles only if it asks (`arch_prctl`, since 5.16). A virtual machine may name
instructions that it does not run well, so a product is compared with numbers before any kernel relies on tiles.
"""

import ctypes
import mmap
import platform
import struct
from functools import cache
from typing import Final

_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XFEATURE_XTILEDATA: Final = 18
_ROWS, _WORDS = 16, 16
# void product(config, a, b, step, sums): ldtilecfg (rdi); tilezero tmm0; tileloadd (rsi,rcx), tmm1;
# tileloadd (rdx,rcx), tmm2; tdpbf16ps tmm2, tmm1, tmm0; tilestored tmm0, (r8,rcx); tilerelease; ret
_PRODUCT: Final = bytes.fromhex(
    "c4e2784907 c4e27b49c0 c4e27b4b0c0e c4e27b4b140a c4e26a5cc1 c4c27a4b0408 c4e27849c0 c3".replace(" ", "")
)


def request_tiles() -> bool:
    """Ask for the permission to use tiles, which is this process's from then on; return whether it has it."""
    if platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


@cache
def tiles_work() -> bool:
    """Whether tiles may be used here and a product of bfloat16 is right. The processor must have the instructions."""
    if not request_tiles():
        return False
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a machine that allows no code but that of files
        return False
    code.write(_PRODUCT)
    numbers = [float(1 + index % 7) for index in range(2 * _ROWS * _WORDS)]
    words = b"".join(struct.pack("<f", number)[2:] for number in numbers)  # exact: so small numbers have few bits
    config = struct.pack("<BB14x8H16x8B8x", 1, 0, *[4 * _WORDS] * 8, *[_ROWS] * 8)
    a, b = ctypes.create_string_buffer(words, len(words)), ctypes.create_string_buffer(words, len(words))
    settings = ctypes.create_string_buffer(config, len(config))
    sums = (ctypes.c_float * (_ROWS * _WORDS))()
    page = ctypes.c_char.from_buffer(code)
    pointers = [ctypes.c_void_p] * 3
    product = ctypes.CFUNCTYPE(None, *pointers, ctypes.c_long, ctypes.c_void_p)(ctypes.addressof(page))
    product(ctypes.addressof(settings), ctypes.addressof(a), ctypes.addressof(b), 4 * _WORDS, ctypes.addressof(sums))
    return list(sums) == _products(numbers)


def _products(numbers: list[float]) -> list[float]:
    """What a tile of numbers times itself is: rows of a have words, rows of b are words."""
    width = 2 * _WORDS
    return [
        sum(
            numbers[row * width + 2 * word + half] * numbers[word * width + 2 * column + half]
            for word in range(_WORDS)
            for half in range(2)
        )
        for row in range(_ROWS)
        for column in range(_WORDS)
    ]
