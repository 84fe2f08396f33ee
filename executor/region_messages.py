"""What is said about regions of clients' memory that workers map: 32 bytes, four words of 64 bits, little endian.

| from, to | message | with a descriptor |
|---|---|---|
| front end, supervisor | `OfferRegion`: workers may map this | of the client's file |
| supervisor, front end | `RegionMapped`: all of them have; or, number 0, they will not | |
| front end, supervisor | `WithdrawRegion`: no request of mine uses it any more | |
| supervisor, worker | `MapRegion` | of the client's file |
| supervisor, worker | `UnmapRegion` | |
| supervisor, worker | `AllMapped`: this was all that there is when the worker starts | |
| worker, supervisor | `RegionDone`: the answer to each of these three, before the next one is sent | |
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

REGION_MESSAGE_BYTES: Final = 32
_WORDS: Final = struct.Struct("<4Q")


@dataclass(frozen=True)
class OfferRegion:
    """`size_bytes` from `offset` on in the file. `token` is the front end's own name for this."""

    token: int
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class RegionMapped:
    """The answer to OfferRegion. `number`: what slots call it; 0: it is not mapped, and must not be withdrawn."""

    token: int
    number: int


@dataclass(frozen=True)
class WithdrawRegion:
    """The end of what has been mapped for a token."""

    token: int


@dataclass(frozen=True)
class MapRegion:
    """Map `size_bytes` from `offset` on in the file, under this number."""

    number: int
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class UnmapRegion:
    """Unmap it; no request uses it."""

    number: int


@dataclass(frozen=True)
class AllMapped:
    """From here on the worker may say that it is ready."""


@dataclass(frozen=True)
class RegionDone:
    """The last order is done, or could not be (`ok` 0)."""

    ok: int


RegionMessage = OfferRegion | RegionMapped | WithdrawRegion | MapRegion | UnmapRegion | AllMapped | RegionDone

_MAKERS: Final[tuple[Callable[[int, int, int], RegionMessage], ...]] = (  # the place is the first word
    OfferRegion,
    lambda token, number, _: RegionMapped(token, number),
    lambda token, a, b: WithdrawRegion(token),
    MapRegion,
    lambda number, a, b: UnmapRegion(number),
    lambda a, b, c: AllMapped(),
    lambda ok, a, b: RegionDone(ok),
)


def pack_region_message(message: RegionMessage) -> bytes:
    """Return the 32 bytes."""
    match message:
        case OfferRegion(token, offset, size_bytes):
            return _WORDS.pack(0, token, offset, size_bytes)
        case RegionMapped(token, number):
            return _WORDS.pack(1, token, number, 0)
        case WithdrawRegion(token):
            return _WORDS.pack(2, token, 0, 0)
        case MapRegion(number, offset, size_bytes):
            return _WORDS.pack(3, number, offset, size_bytes)
        case UnmapRegion(number):
            return _WORDS.pack(4, number, 0, 0)
        case AllMapped():
            return _WORDS.pack(5, 0, 0, 0)
        case RegionDone(ok):
            return _WORDS.pack(6, ok, 0, 0)


def unpack_region_message(data: bytes) -> RegionMessage:
    """Return the message in 32 bytes. Raises ValueError."""
    if len(data) != REGION_MESSAGE_BYTES:
        raise ValueError(f"a message about a region has {REGION_MESSAGE_BYTES} bytes, not {len(data)}")
    kind, *words = _WORDS.unpack(data)
    if kind >= len(_MAKERS):
        raise ValueError(f"{kind} is no kind of message about a region")
    made: RegionMessage = _MAKERS[kind](*words)
    return made
