"""A word of a worker to the server's log, without Python's logging: a worker stays small."""

import contextlib
import os

WARNING = "<4>"  # in front of a line, as for systemd and the kernel
_STANDARD_ERROR = 2


def complain(text: str, level: str = "") -> None:
    """Write a line to standard error, which is a pipe to the supervisor. Never waits, never fails: it may be lost.

    `level`: WARNING, or an error.
    """
    line = level + " ".join(text.splitlines())
    with contextlib.suppress(OSError):
        os.write(_STANDARD_ERROR, f"{line}\n".encode(errors="backslashreplace"))
