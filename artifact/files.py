"""Small files of the cache, written whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path`, over what is there, so that readers see the old or the new. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)  # mkstemp makes it private; other users may share the cache
        Path(unfinished).rename(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
