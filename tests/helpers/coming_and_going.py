"""What others do to files while a server looks at them: make and remove one, again and again."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCRIPT = """
import os, sys
print(flush=True)
while True:
    with open(sys.argv[1], "a"):
        pass
    try:
        os.unlink(sys.argv[1])
    except FileNotFoundError:
        pass
"""


@contextmanager
def coming_and_going(path: Path) -> Iterator[None]:
    """Make and remove a file until the block ends."""
    command = [sys.executable, "-c", _SCRIPT, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()
