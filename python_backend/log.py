"""What an instance says in the server's log, whatever its model makes of `sys.stdout` and `sys.stderr`.

A model may close them, or send what is written there to `pb_utils.Logger`.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress

_descriptors = [2]  # the server reads the last one


def keep() -> None:
    """Go on writing there if the model closes, or moves, its standard error."""
    _descriptors.append(os.dup(2))


def write(text: str) -> None:
    """Write lines."""
    content = memoryview(f"{text}\n".encode(errors="backslashreplace"))
    with suppress(OSError):  # nobody reads it any more
        while content:
            content = content[os.write(_descriptors[-1], content) :]


def write_error(error: BaseException) -> None:
    """Write an exception with its traceback."""
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:  # an exception may be of any class: some have no module
        text = f"{''.join(traceback.format_tb(error.__traceback__))}{type(error).__name__}: {text_of(error)}"
    write(text.rstrip("\n"))


def flush() -> None:
    """Have what the model has printed written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a stream of the model's own, or none
            stream.flush()


def text_of(error: BaseException) -> str:
    """Return what an exception says, also if its `__str__` fails."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"
