"""The process of the server that tries models. It ends with `gangway check`, however that ends.

`python -m gangway.server.check.trial_process FOLDER PARENT FLAGS...`: the folder goes when PARENT cannot
remove it, and the flags are those of `gangway serve`.
"""

import os
import shutil
import signal
import sys
from collections.abc import Sequence

from gangway.base.commands import ending_signals
from gangway.base.parent import signal_at_parents_end
from gangway.server.cli import run


def main(argv: Sequence[str]) -> int:
    """Serve until a signal comes, or the parent has ended; return the exit status."""
    folder, parent, *flags = argv
    for number in ending_signals():  # until the server sees to them itself
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        signal_at_parents_end(signal.SIGTERM, int(parent))
        return run("serve", flags)
    finally:
        if os.getppid() != int(parent):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
