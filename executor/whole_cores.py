"""Whether the cores are there whole: a host with others to serve may give less of them for seconds or minutes.

Then a gang seems to gain nothing from its second core, while one core alone is as fast as ever.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gangway.executor import _probes

_LANES: Final = 4  # every machine has such vectors, and none lowers its clock for them
_ROUNDS: Final = 50_000_000  # of multiply-adds: about 0.1 s, since hosts share out cores in parts of that


def share_of_cores(cores: Sequence[int]) -> float:
    """Return how fast the slowest of these cores is while all of them work, as a share of one alone; 1.0 of one core.

    Takes 0.2 s, or longer where the share is small.
    """
    if len(cores) == 1:
        return 1.0
    [alone] = speeds_at_once(cores[:1], _LANES, _ROUNDS)
    together = speeds_at_once(cores, _LANES, _ROUNDS)
    return min(together) / max(alone, *together)


def speeds_at_once(cores: Sequence[int], lanes: int, rounds: int) -> list[float]:
    """Return the floating-point operations per microsecond of each core while all of these work.

    Each does `rounds` multiply-adds of vectors of `lanes` floats.
    """

    def speed_of(core: int) -> float:
        os.sched_setaffinity(0, {core})  # of this thread
        flops, taken_ns = _probes.multiply_add(lanes, rounds)
        return 1e3 * flops / taken_ns

    with ThreadPoolExecutor(len(cores)) as threads:  # the probe lets go of the interpreter
        return list(threads.map(speed_of, cores))
