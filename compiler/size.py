"""Models that no memory can hold are refused before anybody reads them. Only the standard library."""

from collections.abc import Iterable
from pathlib import Path

from gangway.artifact.host_limits import memory_limit_bytes
from gangway.compiler.errors import UnsupportedModelError


def refuse_too_large(files: Iterable[Path]) -> None:
    """Raise UnsupportedModelError if the files have more bytes than this machine, or container, has memory."""
    size_bytes, limit_bytes = sum(path.stat().st_size for path in files), memory_limit_bytes()
    if size_bytes > limit_bytes:
        raise UnsupportedModelError(f"the model has {size_bytes >> 20} MiB, the machine {limit_bytes >> 20} of memory")
