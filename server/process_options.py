"""How a process gets its options: one dataclass as JSON, on its standard input.

They are no argument, because every user of the machine can read those, and options may hold a secret.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gangway.base.json_codec import decode, encode

OptionsT = TypeVar("OptionsT")


@contextmanager
def as_stdin(options: Any) -> Iterator[int]:
    """Yield a descriptor for the standard input of a process that calls `from_stdin`."""
    descriptor = os.memfd_create("options")
    try:
        os.pwrite(descriptor, encode(options), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def from_stdin(kind: type[OptionsT]) -> OptionsT:
    """Return the options that the parent process passed through `as_stdin`. Raises ValueError for anything else."""
    return decode(kind, sys.stdin.buffer.read(), "options")
