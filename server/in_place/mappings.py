"""A front end's part in mapping regions: it offers them to the supervisor, uses those that are mapped, withdraws them.

A region is offered when a request could first have used it in place; until the workers have mapped it, and if they do
not, requests are served with copies. Nobody waits here for the supervisor but two threads.
"""

import contextlib
import logging
import os
import queue
import threading

from gangway.executor.lost_regions import LostRegions
from gangway.executor.region_channel import RegionChannel
from gangway.executor.region_messages import OfferRegion, RegionMapped, RegionMessage, WithdrawRegion
from gangway.server.in_place.mapped import MappedRegion
from gangway.server.regions import Region

_log = logging.getLogger(__name__)


class Mappings:
    """Safe for threads. One lock for what regions say of themselves (`offered`, `mapped`, `closed`)."""

    def __init__(self, channel: RegionChannel, lost: LostRegions) -> None:
        self._channel = channel
        self._lost = lost
        self._lock = threading.Lock()
        self._tokens = 0
        self._offered: dict[int, Region] = {}  # by token; not answered yet
        self._unsent: queue.SimpleQueue[tuple[RegionMessage, int]] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin to speak with the supervisor."""
        for work in (self._speak, self._listen):
            threading.Thread(target=work, name="regions", daemon=True).start()

    def offer(self, region: Region) -> None:
        """Have workers map a region, which the caller holds, unless that has been tried already."""
        with self._lock:
            if region.offered:
                return
            region.offered = True
            self._tokens += 1
            token = self._tokens
            self._offered[token] = region
        try:
            descriptor = os.dup(region.descriptor)  # the region may be closed before it is sent
        except OSError:
            self._answered(token, 0)
            return
        registration = region.registration
        self._unsent.put((OfferRegion(token, registration.offset, registration.size_bytes), descriptor))

    def forget(self, region: Region) -> None:
        """The region is about to be closed. It is unmapped when the last request that is under way has ended."""
        with self._lock:
            region.closed = True
        self.lose(region)

    def lose(self, region: Region) -> None:
        """Do not use the region in place any more."""
        with self._lock:
            mapped, region.mapped = region.mapped, None
        if mapped is not None:
            self._withdraw(mapped)

    def is_lost(self, mapped: MappedRegion) -> bool:
        """Whether a worker has found that memory of the region is missing."""
        return self._lost.is_lost(mapped.number)

    def _withdraw(self, mapped: MappedRegion) -> None:
        mapped.uses.close(lambda: self._unsent.put((WithdrawRegion(mapped.token), -1)))

    def _speak(self) -> None:
        while True:
            message, descriptor = self._unsent.get()
            try:
                self._channel.send(message, descriptor if descriptor >= 0 else None)
            except (BrokenPipeError, ConnectionError):
                return  # the supervisor is gone, and this process is about to be
            except OSError as error:
                _log.error("cannot tell the supervisor of a client's region: %s", error)
                if isinstance(message, OfferRegion):
                    self._answered(message.token, 0)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message, _ = self._channel.receive()
                if isinstance(message, RegionMapped):
                    self._answered(message.token, message.number)

    def _answered(self, token: int, number: int) -> None:
        with self._lock:
            region = self._offered.pop(token)
            mapped = MappedRegion(token, number)
            unwanted = region.closed
            if number and not unwanted:
                region.mapped = mapped
        if number and unwanted:
            self._withdraw(mapped)
