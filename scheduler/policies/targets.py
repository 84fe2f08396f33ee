"""Latency targets that are multiples of a model's time alone: one rule for servers and for what predicts them.

A model's time alone is what its profile says of one row on all cores, and what a request of any model takes beside it.
The profile is in the cache, so the target is the same at each start, and in `gangway capacity`.
"""

from typing import Final

# gRPC, front end and scheduler on an idle server. Its smallest call takes 0.09 to 0.14 ms (2 cores, 2026-11-29).
REQUEST_US: Final = 100.0
# From the last layer's end until the client has the answer. On a busy core front end and client wait for their turns.
SHARED_WAY_BACK_US: Final = 3000
SPARE_WAY_BACK_US: Final = 150


def alone_us(compute_us: float) -> float:
    """Return what a client on this machine waits for, of a model that computes for so long on all cores."""
    return compute_us + REQUEST_US


def least_target_us(is_shared: bool) -> float:
    """Return what any request may take on a busy machine: no multiple is less.

    `is_shared`: front end and scheduler have no cores beside those of the workers.
    """
    return REQUEST_US + (SHARED_WAY_BACK_US if is_shared else SPARE_WAY_BACK_US)


def target_us(multiple: float, time_alone_us: float, least_us: float) -> float:
    """Return the target that is so many times a model's time alone."""
    return max(multiple * time_alone_us, least_us)
