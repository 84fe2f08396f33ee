"""How fast the machine is at this moment, for bounds in seconds: a process that starts is mostly its imports."""

import subprocess
import sys
import time

STARTS = 2.5  # a successor is there, and known to all, within so many imports
IMPORT = "from gangway.base.process import raise_priority; raise_priority(); import {}"


def back_within_s(module: str, usual_s: float) -> float:
    """Return how long a successor of a process of ours, which runs `module`, may take: `usual_s`, or what it needs.

    More only on a machine that is slow, or has much else to do.
    """
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORT.format(module)], check=True, timeout=60)
    return max(usual_s, STARTS * (time.monotonic() - begin))
