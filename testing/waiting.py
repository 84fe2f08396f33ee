"""Waiting for what other processes do."""

import time
from collections.abc import Callable

TIMEOUT_S = 60


def until(condition: Callable[[], object], what_is_so: Callable[[], str] = str, timeout_s: float = TIMEOUT_S) -> None:
    """Return when it is so. Raises AssertionError after `timeout_s`, with what is so.

    Between looks, each of which takes up to a millisecond of a core, a twentieth of the time so far passes: at least 1
    ms, at most 20 ms.
    """
    begin_s = time.monotonic()
    while not condition():
        elapsed_s = time.monotonic() - begin_s
        if elapsed_s > timeout_s:
            raise AssertionError(what_is_so())
        time.sleep(min(0.001 + elapsed_s / 20, 0.02))
