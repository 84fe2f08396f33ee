"""Whether the files of a model have changed. They are compared by name, size and time, and never read."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]  # path within the model's folder, bytes, mtime in ns, inode


def stamp_of(folder: Path, version: int) -> Stamp:
    """Return the stamp of all that this version is made of: its own folder, and what belongs to all versions.

    That is config.pbtxt, labels, samples for warming up; but not other versions, nor hidden files. Raises OSError.
    """
    return tuple(sorted([*_own(folder, folder / str(version)), *_shared(folder)]))


def _shared(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    for item in folder.iterdir():
        if item.name.startswith(".") or (item.name.isdigit() and item.is_dir()):
            continue
        if item.is_dir():
            yield from _own(folder, item)
        else:
            yield _stamp(folder, item)


def _own(folder: Path, part: Path) -> Iterator[tuple[str, int, int, int]]:
    for directory, folders, files in os.walk(part):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield _stamp(folder, Path(directory) / name)


def _stamp(folder: Path, path: Path) -> tuple[str, int, int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:  # a link that leads nowhere, or gone since: that is a state, too
        return str(path.relative_to(folder)), -1, 0, 0
    return str(path.relative_to(folder)), status.st_size, status.st_mtime_ns, status.st_ino
