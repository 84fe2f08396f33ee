"""The size of the cache: what has not been used for the longest time is removed, but nothing that a server uses.

Each server writes the keys of its artifacts into a file of its own, which it keeps locked as long as it runs.
"""

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gangway.artifact.format import MANIFEST_FILE
from gangway.artifact.weights import WEIGHTS_FOLDER
from gangway.base.files import append_whole

USES_FOLDER = "uses"
KERNELS_FOLDER = "kernels"
GRACE_SECONDS = 600.0  # after its last use nothing is removed: a server may be about to load it
KEY_DIGITS = 64
_log = logging.getLogger(__name__)


class UsedKeys:
    """The keys of the artifacts that this process uses, told to others that share the cache folder `root`.

    Raises OSError.
    """

    def __init__(self, root: Path) -> None:
        folder = root / USES_FOLDER
        folder.mkdir(mode=0o755, exist_ok=True)
        self._file = (folder / f"{os.getpid()}-{time.time_ns()}").open("wb", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._keys: set[str] = set()
        self._told = b""

    def tell(self, keys: Collection[str]) -> None:
        """Replace what is told. Raises OSError, and what has been told before stays."""
        if self._keys != set(keys):
            told = json.dumps(sorted(keys)).encode().ljust(len(self._told))  # JSON may end with blanks
            append_whole(self._file.fileno(), told, self._told)
            self._keys, self._told = set(keys), told

    def close(self) -> None:
        """Use nothing any more."""
        self._file.close()


@dataclass(frozen=True)
class _Entry:
    """A folder or file of the cache that can be removed alone; `size_bytes`: what that frees."""

    path: Path
    used_seconds: float
    size_bytes: int


def trim(root: Path, limit_bytes: int) -> int:
    """Remove from the cache folder what was used least recently, until no more than the limit is left.

    Returns the bytes that are left, which are more than the limit if too much is in use. Never raises.
    """
    used = _used_keys(root)
    total = sum({status.st_ino: status.st_size for status in _statuses(root)}.values())
    for entries in (_artifacts(root, used), _kernels(root), _weights(root)):  # the latter are free when the first are
        for entry in sorted(entries, key=lambda entry: entry.used_seconds):
            if total <= limit_bytes:
                return total
            if entry.used_seconds < time.time() - GRACE_SECONDS:
                _remove(entry.path)
                total -= entry.size_bytes
                _log.info("removed from the cache, whose limit is %d MiB: %s", limit_bytes >> 20, entry.path)
    return total


def discard(root: Path, key: str) -> None:
    """Remove an artifact that nobody will look for, unless a running server has told that it uses it. Never raises."""
    if key not in _used_keys(root):
        _remove(root / key)


def _used_keys(root: Path) -> set[str]:
    """The keys that running servers have told; files of those that have ended are removed."""
    keys: set[str] = set()
    for path in _listed(root / USES_FOLDER):
        with suppress(OSError, ValueError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                keys.update(json.load(file))
            else:
                path.unlink(missing_ok=True)
    return keys


def _artifacts(root: Path, used: Collection[str]) -> Iterator[_Entry]:
    for path in _listed(root):
        if len(path.name) == KEY_DIGITS and path.name not in used:
            with suppress(OSError):
                yield _Entry(path, (path / MANIFEST_FILE).stat().st_mtime, _freed_bytes(path))


def _kernels(root: Path) -> Iterator[_Entry]:
    for path in _files(root / KERNELS_FOLDER):
        with suppress(OSError):
            yield _Entry(path, path.stat().st_mtime, _freed_bytes(path))


def _weights(root: Path) -> Iterator[_Entry]:
    """Files of weights that no artifact holds any more."""
    for path in _listed(root / WEIGHTS_FOLDER):
        with suppress(OSError):
            status = path.stat()
            if path.suffix == ".bin" and status.st_nlink == 1:
                yield _Entry(path, status.st_mtime, status.st_size)


def _freed_bytes(path: Path) -> int:
    """What is left of nobody when a file, or the files of a folder, are removed."""
    files = _files(path) if path.is_dir() else (path,)
    return sum(status.st_size for status in (file.stat() for file in files) if status.st_nlink == 1)


def _remove(path: Path) -> None:
    """An artifact goes by one rename, so that nobody sees it half removed."""
    with suppress(OSError):
        if path.is_dir():
            trash = path.with_name(f".removed.{path.name}.{os.getpid()}")
            path.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
        else:
            path.unlink()


def _listed(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def _files(folder: Path) -> Iterator[Path]:
    return (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)


def _statuses(root: Path) -> Iterator[os.stat_result]:
    for path in _files(root):
        with suppress(OSError):
            yield path.lstat()
