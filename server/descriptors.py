"""File descriptors of a process: how many it may open, which part each kind gets, what happens when none is left."""

import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 16384
MAX_REGIONS: Final = 256
REGIONS_SHARE: Final = 8  # clients' regions get this part of the descriptors: one in eight
LEAST_DESCRIPTORS: Final = 256
OTHER_DESCRIPTORS: Final = 160  # connections reserved for health, metrics, what the server has open


class TooFewDescriptorsError(RuntimeError):
    """The server cannot work with so few open files; the message says how many it needs."""


def allow_many_descriptors() -> None:
    """Let the process open as many files as its hard limit says: the usual soft one ends at 1024 connections.

    Raises TooFewDescriptorsError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems name a hard limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft < LEAST_DESCRIPTORS:
        raise TooFewDescriptorsError(
            f"a process may open only {soft} files here (ulimit -n), and the server needs {LEAST_DESCRIPTORS}"
        )


def max_descriptors() -> int:
    """Return how many files this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def max_regions() -> int:
    """Return how many regions of shared memory clients may register: each one holds a descriptor."""
    return max(1, min(MAX_REGIONS, max_descriptors() // REGIONS_SHARE))


def max_connections() -> int:
    """Return how many connections gRPC and HTTP may have, each: half of what nothing else needs."""
    return max(1, min(MAX_CONNECTIONS, (max_descriptors() - OTHER_DESCRIPTORS - max_regions()) // 2))


def open_descriptors() -> Sequence[int]:
    """Return the descriptors of this process. When none is left for a look, they are all that there may be."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return range(max_descriptors())


@contextmanager
def borrowed_socket(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket whose descriptor belongs to somebody else, who closes it. Raises OSError if it is no socket."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


RESERVED: Final = 16  # kept for questions about health until no other descriptor is left
LEAST_FREE: Final = 16
PERIOD_S: Final = 0.25
PAUSES: Final = 20  # times as long as a look takes, a tenth of a second for ten thousand descriptors
REPLACE_AFTER_S: Final = 10.0


class DescriptorWatch:
    """Sees to it that health can be asked over new connections, whatever takes a front end's descriptors.

    When hardly any descriptor is free, it says so once, closes silent connections, and gives up its reserve.
    `end_silent` gets all descriptors and how many are wanted, closes that many that have been silent for long, and says
    how many it has. `is_short` tells HTTP to take nothing but questions about health. A process that has none for long
    is of no use: `end` is called, and it is replaced.
    """

    def __init__(
        self,
        end_silent: Callable[[Sequence[int], int], int],
        end: Callable[[], object],
        replace_after_s: float = REPLACE_AFTER_S,
    ) -> None:
        """Take the reserve. Raises OSError."""
        self.is_short = False
        self._end_silent = end_silent
        self._end = end
        self._replace_after_s = replace_after_s
        self._reserve: list[int] = []
        self._some_free_s = time.monotonic()
        self._take_reserve()

    def turn(self) -> float:
        """Look once; return after how many seconds the next turn is."""
        begin_s = time.monotonic()
        with suppress(OSError):  # the last descriptor has gone meanwhile: the next look sees that
            self.poll()
        return max(PERIOD_S, PAUSES * (time.monotonic() - begin_s))

    def poll(self) -> None:
        """Count once, and do what is due."""
        now_s, descriptors, most = time.monotonic(), open_descriptors(), max_descriptors()
        free = most - len(descriptors)
        free += self._end_silent(descriptors, LEAST_FREE - free)
        if free > 0:
            self._some_free_s = now_s
        if self.is_short:
            if free >= 2 * LEAST_FREE + RESERVED:
                self._take_reserve()
                self.is_short = False
                _log.info("%d of %d descriptors are free again, so everything is served", free, most)
            elif now_s - self._some_free_s > self._replace_after_s:
                _log.error("no descriptor has been free for %.0f s, so this process is replaced", self._replace_after_s)
                self._end()
        elif free < LEAST_FREE:
            self.is_short = True
            _log.error(
                "only %d of %d descriptors are free, so new HTTP connections can ask for health only: raise ulimit -n",
                max(free, 0),
                most,
            )
            self.close()

    def close(self) -> None:
        """Give the reserve up."""
        while self._reserve:
            os.close(self._reserve.pop())

    def _take_reserve(self) -> None:
        while len(self._reserve) < RESERVED:
            self._reserve.append(os.open(os.devnull, os.O_RDONLY))
