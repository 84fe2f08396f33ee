"""Regions of clients' memory that workers map: what processes tell one another of them, and the worker's part.

A message has 32 bytes, four words of 64 bits, little endian:

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

import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from gangway.base.peer import Peer
from gangway.base.process import LOG_WARNING, leave_idle_priority, restored_priority, write_log_line
from gangway.executor import _native

REGION_MESSAGE_BYTES: Final = 32
MAPPING_NICE: Final = 15  # a hundredth of a core that a gang wants, too
_WORDS: Final = struct.Struct("<4Q")


class OfferRegion(msgspec.Struct, frozen=True):
    """`size_bytes` from `offset` on in the file. `token` is the front end's own name for this."""

    token: int
    offset: int
    size_bytes: int


class RegionMapped(msgspec.Struct, frozen=True):
    """The answer to OfferRegion. `number`: what slots call it; 0: it is not mapped, and must not be withdrawn."""

    token: int
    number: int


class WithdrawRegion(msgspec.Struct, frozen=True):
    """The end of what has been mapped for a token."""

    token: int


class MapRegion(msgspec.Struct, frozen=True):
    """Map `size_bytes` from `offset` on in the file, under this number."""

    number: int
    offset: int
    size_bytes: int


class UnmapRegion(msgspec.Struct, frozen=True):
    """Unmap it; no request uses it."""

    number: int


class AllMapped(msgspec.Struct, frozen=True):
    """From here on the worker may say that it is ready."""


class RegionDone(msgspec.Struct, frozen=True):
    """The last order is done, or could not be (`ok` 0)."""

    ok: int


RegionMessage = OfferRegion | RegionMapped | WithdrawRegion | MapRegion | UnmapRegion | AllMapped | RegionDone


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


def region_peer(end: socket.socket) -> Peer[RegionMessage]:
    """Return one end of a socket that carries these messages."""
    return Peer(
        end,
        pack_region_message,
        unpack_region_message,
        max_bytes=REGION_MESSAGE_BYTES + 1,  # one more shows that a packet is too long
        carries_descriptor=lambda message: isinstance(message, OfferRegion | MapRegion),
    )


class RegionJobs:
    """Maps and unmaps regions in a thread of its own, while the worker goes on running leases.

    The supervisor says which ones. A worker that starts maps those that there are before it says that it is ready:
    requests may name these regions from then on. Only the thread that runs leases takes a region away (`answer`),
    between two of them, so that none is using it; `nudge` makes it do so.
    """

    def __init__(self, worker: _native.Worker, supervisor: Peer[RegionMessage]) -> None:
        self._worker = worker
        self._supervisor = supervisor
        self._unwanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._cleared: queue.SimpleQueue[int] = queue.SimpleQueue()

    def start(self) -> None:
        """Map the regions that there are, then listen for more. Raises EOFError when the supervisor has ended."""
        while not isinstance(self._execute(*self._supervisor.wait()), AllMapped):
            pass
        threading.Thread(target=self._work, name="regions", daemon=True).start()

    def answer(self) -> None:
        """Hide the regions that are to be unmapped from all leases."""
        while not self._unwanted.empty():
            number = self._unwanted.get()
            self._worker.clear_region(number)
            self._cleared.put(number)

    def _work(self) -> None:
        try:
            while True:
                order, descriptor = self._supervisor.wait()
                with restored_priority():
                    leave_idle_priority(threading.get_native_id(), MAPPING_NICE)
                    self._execute(order, descriptor)
        except EOFError:
            pass  # the supervisor has ended, and this process is about to
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)  # as whenever a worker fails: it is replaced

    def _execute(self, order: RegionMessage, descriptor: int) -> RegionMessage:
        ok = True
        match order:
            case MapRegion():
                ok = self._map(order, descriptor)
            case UnmapRegion(number):
                self._unwanted.put(number)
                self._worker.nudge()
                self._cleared.get()
                self._worker.unmap_region(number)
            case AllMapped():
                pass
            case _:
                raise ValueError(f"unexpected {order}")
        self._supervisor.send(RegionDone(int(ok)))
        return order

    def _map(self, order: MapRegion, descriptor: int) -> bool:
        try:
            self._worker.map_region(order.number, descriptor, order.offset, order.size_bytes)
        except OSError as error:
            size = f"{order.size_bytes} bytes of a client's shared memory"
            write_log_line(f"{size} cannot be mapped, so its tensors are copied: {error.strerror}", LOG_WARNING)
            return False
        finally:
            os.close(descriptor)
        return True


_MAKERS: Final[tuple[Callable[[int, int, int], RegionMessage], ...]] = (  # the place is the first word
    OfferRegion,
    lambda token, number, _: RegionMapped(token, number),
    lambda token, a, b: WithdrawRegion(token),
    MapRegion,
    lambda number, a, b: UnmapRegion(number),
    lambda a, b, c: AllMapped(),
    lambda ok, a, b: RegionDone(ok),
)
