"""Where the processes run that do not compute: front ends and scheduler, one core each."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

SPIN_US = 250
# From the last layer's end until the client has the answer: on a busy core the front end waits for its turn, and so may
# a client. With images of 600 KB 2.5 ms in the median and 2.9 ms for 90 %, the way of the request to us included.
SHARED_WAY_BACK_US = 3000
SPARE_WAY_BACK_US = 150
# CPU of a batch's way through the scheduler: one decision, a lease, hearing of its end. With MobileNetV2 and 32 clients
# 0.45 ms a batch, whatever its size (`benchmarks.batching`, saturation).
SHARED_DISPATCH_US = 450


@dataclass(frozen=True)
class Placement:
    """A CPU number for each."""

    front_ends: tuple[int, ...]
    scheduler: int
    shared: bool  # workers have these cores, too

    def spin_us(self, front_end: int) -> int:
        """How long a front end (from 0) may spin for an answer; not at all where it is to be worked out."""
        return SPIN_US if self.front_ends[front_end] != self.scheduler else 0

    @property
    def way_back_us(self) -> int:
        """What policies shall reckon with for an answer's way to the client."""
        return SHARED_WAY_BACK_US if self.shared else SPARE_WAY_BACK_US

    @property
    def dispatch_us(self) -> int:
        """What of the workers' cores each dispatch takes."""
        return SHARED_DISPATCH_US if self.shared else 0


def place(worker_cores: Sequence[int], front_ends: int = 1) -> Placement:
    """Choose cores that no worker has, if there are any; otherwise those of the last workers, beginning with the last.

    A front end's threads share one interpreter lock. On one core handing it over is cheap; spread over two cores mlp
    was served 2300 times a second instead of 3500 (16 clients, 2 cores). So each front end has one core, and the
    scheduler the next one. If there are fewer cores than that, some are shared.
    """
    spare = sorted(os.sched_getaffinity(0) - set(worker_cores))
    cores = (spare or sorted(worker_cores))[::-1]
    chosen = [cores[number % len(cores)] for number in range(front_ends + 1)]
    return Placement(front_ends=tuple(chosen[:-1]), scheduler=chosen[-1], shared=not spare)
