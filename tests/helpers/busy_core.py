"""Processes on a core that others want, too. They end with the test, however that ends."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPIN = "while True: pass"

_BEGIN = """
import os
from gangway.base.process import die_with_parent
os.sched_setaffinity(0, {{{core}}})
die_with_parent()
for _ in range({others}):
    if not os.fork():
        die_with_parent()
        break
print(flush=True)
"""


@contextmanager
def busy_core(core: int, script: str = SPIN, count: int = 1) -> Iterator[int]:
    """So many processes on one core that run a script, which all have begun; yield the number of the first."""
    command = [sys.executable, "-c", _BEGIN.format(core=core, others=count - 1) + script]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        try:
            for _ in range(count):
                assert first.stdout.readline() == b"\n"
            yield first.pid
        finally:
            first.kill()
