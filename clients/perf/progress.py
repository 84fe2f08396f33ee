"""A line on a terminal that tells how far a run is, and vanishes at its end."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from gangway.clients.open_loop import LoadProgress

EVERY_S: Final = 0.5
_CLEAR: Final = "\r\x1b[K"


@contextmanager
def progress_line(counts: Callable[[], LoadProgress]) -> Iterator[None]:
    """Show the counts of a run while the block lasts; nothing if standard error is no terminal.

    A thread of its own writes, so that no request waits for the terminal.
    """
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(counts, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _write(_CLEAR)


def _show(counts: Callable[[], LoadProgress], ended: threading.Event) -> None:
    while not ended.wait(EVERY_S):
        _write(_CLEAR + _text(counts()))


def _text(now: LoadProgress) -> str:
    errors = f", {now.errors} errors" if now.errors else ""
    return f"{now.seconds:.0f} of {now.of_seconds:.0f} s: {now.answered} answered, {now.waiting} wait{errors}"


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal has gone
        sys.stderr.write(text)
        sys.stderr.flush()
