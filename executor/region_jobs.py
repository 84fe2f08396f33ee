"""Regions of clients' memory are mapped and unmapped by a thread of their own, while the worker goes on running leases.

The supervisor says which ones (`region_messages.py`). A worker that starts maps what there is before it says that it is
ready: requests may name these regions from then on. Only the thread that runs leases takes a region away, between two
of them, so that none is using it; it is nudged for that.
"""

import os
import queue
import sys
import threading
from typing import Final

from gangway.executor import _native
from gangway.executor.complain import complain
from gangway.executor.process import as_before, give_way_less
from gangway.executor.region_channel import RegionChannel
from gangway.executor.region_messages import AllMapped, MapRegion, RegionDone, RegionMessage, UnmapRegion

NICE: Final = 15  # a hundredth of a core that a gang wants, too


class RegionJobs:
    """`answer` is for the thread that calls `worker.loop`."""

    def __init__(self, worker: _native.Worker, channel: RegionChannel) -> None:
        self._worker = worker
        self._channel = channel
        self._unwanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._cleared: queue.SimpleQueue[int] = queue.SimpleQueue()

    def start(self) -> None:
        """Map what there is, then begin to listen for more. Raises EOFError when the supervisor is gone."""
        while not isinstance(self._obey(*self._channel.receive()), AllMapped):
            pass
        threading.Thread(target=self._work, name="regions", daemon=True).start()

    def answer(self) -> None:
        """Let no lease find the regions that are to be unmapped."""
        while not self._unwanted.empty():
            number = self._unwanted.get()
            self._worker.clear_region(number)
            self._cleared.put(number)

    def _work(self) -> None:
        try:
            while True:
                order, descriptor = self._channel.receive()
                with as_before():
                    give_way_less(threading.get_native_id(), NICE)
                    self._obey(order, descriptor)
        except EOFError:
            pass  # the supervisor is gone, and this process is about to be
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # as whenever a worker fails: it is replaced

    def _obey(self, order: RegionMessage, descriptor: int) -> RegionMessage:
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
        self._channel.send(RegionDone(int(ok)))
        return order

    def _map(self, order: MapRegion, descriptor: int) -> bool:
        try:
            self._worker.map_region(order.number, descriptor, order.offset, order.size_bytes)
        except OSError as error:
            complain(f"cannot map {order.size_bytes} bytes of a client's memory: {error.strerror}")
            return False
        finally:
            os.close(descriptor)
        return True
