"""A word of a worker to the server's log, without Python's logging: a worker stays small."""

import contextlib
import os

_STANDARD_ERROR = 2


def complain(text: str) -> None:
    """Write a line to standard error, which is a pipe to the supervisor. Never waits, never fails: it may be lost."""
    line = " ".join(text.splitlines())
    with contextlib.suppress(OSError):
        os.write(_STANDARD_ERROR, f"{line}\n".encode(errors="backslashreplace"))
