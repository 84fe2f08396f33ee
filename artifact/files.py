"""Small files of the cache, written whole or not at all, and files beside a model that clients may name."""

import os
import stat
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


def file_beside(folder: Path, name: str) -> Path:
    """Return the file that a relative `name` means in a folder. A link is followed: the folder's owner has placed it.

    Names stand in files that clients may send. Raises ValueError for a name that leaves the folder, and for what is
    no regular file (whoever opens a pipe hangs), OSError if nothing is there.
    """
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise ValueError(f"'{name}' leaves the model's folder")
    path = folder / relative
    require_regular(path)
    return path


def require_regular(path: Path) -> None:
    """Raise ValueError for a folder, pipe, device or socket, OSError if nothing is there."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"'{path.name}' is no regular file")
