"""Load that disturbs: processes pinned to other cores that stream through memory or thrash the shared cache.

`python -m gangway.measure.generators` is one of them. All obey one word of shared memory, and answer in another, so
that a measurement can go through kinds and strengths of load, and none, back and forth without starting processes.
"""

import argparse
import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from gangway.executor import _probes
from gangway.executor.process import die_with_parent, take_precedence
from gangway.executor.segment import Segment
from gangway.measure.machine import l3_bytes, touched

Load = tuple[str, int]
"""Kind, and percent of the time that a generator works."""

KINDS: Final = ("stream", "thrash")
IDLE: Final[Load] = ("", 0)
SLICE_US: Final = 500  # how often the word is looked at
IDLE_S: Final = 0.0005
START_TIMEOUT_S: Final = 20.0
_ORDER: Final = struct.Struct("<HHI")  # kind + 1 (0: idle), share, number of the order
_LINE_BYTES: Final = 64


class Generators:
    """One generator per core of `cores`, idle until told otherwise. A context manager."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._segment = Segment.create((1 + len(cores)) * _LINE_BYTES, "interference")
        self._number = 0
        self.processes = [self._start(place, core) for place, core in enumerate(cores)]

    def __enter__(self) -> Self:
        self.set(*IDLE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._segment.close()

    def set(self, kind: str, share: int) -> None:
        """Have all generators work `share` percent of the time at `kind`; return when all do. `IDLE` stops them.

        Both change memory line by line. "stream": four times what the last-level cache holds, so it takes bandwidth.
        "thrash": as much as that cache holds, so it takes the cache (in order: fast enough to drive others' lines out,
        which random order measured not to be). Raises TimeoutError.
        """
        self._number += 1
        order = _ORDER.pack(KINDS.index(kind) + 1 if kind else 0, share, self._number)
        self._segment.view[: _ORDER.size] = order
        deadline = time.monotonic() + START_TIMEOUT_S
        for place, process in enumerate(self.processes):
            while self._answer(place) != order:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise TimeoutError("a generator of interference does not obey")
                time.sleep(IDLE_S)

    def _answer(self, place: int) -> bytes:
        begin = (1 + place) * _LINE_BYTES
        return bytes(self._segment.view[begin : begin + _ORDER.size])

    def _start(self, place: int, core: int) -> "subprocess.Popen[bytes]":
        arguments = {"fd": self._segment.fd, "place": place, "core": core, "parent": os.getpid()}
        command = [sys.executable, "-m", "gangway.measure.generators"]
        command += [f"--{key}={value}" for key, value in arguments.items()]
        return subprocess.Popen(command, pass_fds=(self._segment.fd,), stdin=subprocess.DEVNULL)


def main() -> None:
    """Disturb as the word says, until the parent ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("fd", "place", "core", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    die_with_parent()
    if os.getppid() != options.parent:  # it died before the line above
        sys.exit(1)
    os.sched_setaffinity(0, {options.core})
    take_precedence()
    _obey(Segment.attach(options.fd), (1 + options.place) * _LINE_BYTES)


def _obey(segment: Segment, answer: int) -> None:
    memory = touched(4 * l3_bytes())
    parts = {"stream": memory, "thrash": memory[: l3_bytes()]}
    at = 0
    while True:
        order = bytes(segment.view[: _ORDER.size])
        kind, share, _ = _ORDER.unpack(order)
        if kind:
            at = _probes.disturb(parts[KINDS[kind - 1]], at, share, SLICE_US)
        else:
            time.sleep(IDLE_S)
        segment.view[answer : answer + _ORDER.size] = order


if __name__ == "__main__":
    main()
