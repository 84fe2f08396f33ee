"""What becomes of a process when the one that has started it ends, however that ends: by SIGKILL, too.

As a script this file does it for any program, which then takes the script's place: it uses nothing but Python's own
library.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def signal_at_parents_end(number: int, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when the THREAD that has started it ends.

    `parent`: the process that has started it, where that may have ended meanwhile. Raises OSError, ProcessLookupError
    if it has.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if parent is not None and os.getppid() != parent:
        raise ProcessLookupError(f"process {parent}, which has started this one, has ended")


def ending_with_this_process(command: Sequence[str], number: int = signal.SIGTERM) -> list[str]:
    """Return the command that starts a program which gets a signal when this process ends; its process id is the same.

    The kernel forgets it for a program that has rights of its own (setuid, capabilities of its file).
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


if __name__ == "__main__":
    signal_at_parents_end(int(sys.argv[2]), int(sys.argv[1]))
    for _ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and then by what takes its place
        signal.signal(_ignored, signal.SIG_DFL)
    os.execv(sys.argv[3], sys.argv[3:])
