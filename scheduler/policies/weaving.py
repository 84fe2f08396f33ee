"""Layerweaver+'s choice of the next layer (IEICE Transactions E105-D, 2022, Algorithm 1), for NPU and CPU alike.

What the engines are is the caller's: it says for each candidate how long engines would be idle if it went next, and
until when compute would be busy then.

Loose ends. Line 12 takes the request with the least slack, not with the least slack over remaining time: so do we.
Slack is compared after mode 1's choice has run (line 10 moves T_PE): the urgent one goes now if it could not wait for
that. QoS-blind Layerweaver (HPCA 2021) is mode 1 alone, ties in order of arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Candidate(NamedTuple):
    """The next layer, or piece, of a request. Times are microseconds of one clock."""

    idle_us: float  # of both engines together, if it goes next
    end_us: float  # T_PE, if it goes next
    due_us: float  # arrival + QoS
    remaining_us: float  # of the request, alone: sum of max(m, c), or better


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of the candidates, and in which mode."""

    index: int
    urgent: bool = False


def least_idle(candidates: Sequence[Candidate]) -> Choice:
    """Return mode 1 without deadlines: the least idle time, then the first one. ValueError without candidates."""
    return Choice(min(range(len(candidates)), key=lambda index: (round(candidates[index].idle_us, 3), index)))


def two_modes(candidates: Sequence[Candidate]) -> Choice:
    """Return the least idle time, ties by least slack; or the most urgent one if that would make it late.

    Raises ValueError without candidates.
    """
    indices = range(len(candidates))
    throughput = min(indices, key=lambda index: (round(candidates[index].idle_us, 3), candidates[index].due_us, index))
    urgent = min(indices, key=lambda index: (candidates[index].due_us, index))
    slack_us = candidates[urgent].due_us - candidates[throughput].end_us
    if slack_us > candidates[urgent].remaining_us:
        return Choice(throughput)
    return Choice(urgent, urgent=True)
