"""Packed weights that several artifacts of one model share: one file, which each of them holds by a hard link.

The file only grows. An artifact's manifest covers the bytes that were there when it was written, so its checksum stays
valid. Beside the file lies an index: how many of its bytes are whole, their checksum, and where each array lies, by a
SHA-256 of its bytes and by one of its first bytes. An array that begins with another one holds that, too: a table of
positions that was cut to a model's length. A file that does not match its index is replaced by a new one; artifacts
keep the one they have.
"""

import fcntl
import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from gangway.artifact.format import ALIGNMENT_BYTES
from gangway.base.files import Checksum

WEIGHTS_FOLDER = "weights"  # of the cache
_READ_BYTES = 1 << 20
_FIRST_BYTES = 4096  # arrays that are no longer share no memory with others


class Weights:
    """A file of weights that is being written. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._offsets: dict[str, int] = {}  # where arrays begin, in bytes, by SHA-256
        self._beginnings: dict[str, list[tuple[int, int]]] = {}  # (offset, size) in bytes, by that of the first bytes
        self.size_bytes = 0
        self.path = path
        self._checksum = Checksum()
        self._file = self._open()

    def put(self, content: memoryview) -> int:
        """Return the offset of an array in bytes. It is written, padded to the alignment, unless it is there."""
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._offsets:
            self._offsets[digest] = self._put_new(content.cast("B"))
        return self._offsets[digest]

    def _put_new(self, content: memoryview) -> int:
        beginnings: list[tuple[int, int]] = []
        if len(content) > _FIRST_BYTES:
            first = hashlib.sha256(content[:_FIRST_BYTES]).hexdigest()
            beginnings = self._beginnings.setdefault(first, beginnings)
        for offset, size_bytes in beginnings:
            if size_bytes >= len(content) and self._holds(content, offset):
                return offset
        offset = self.size_bytes
        self.append(content)
        self.append(bytes(-len(content) % ALIGNMENT_BYTES))
        beginnings.append((offset, len(content)))
        return offset

    def _holds(self, content: memoryview, offset: int) -> bool:
        """Whether these bytes lie at an offset."""
        self._file.flush()
        starts = range(0, len(content), _READ_BYTES)
        parts = ((content[start : start + _READ_BYTES], offset + start) for start in starts)
        return all(os.pread(self._file.fileno(), len(part), place) == part for part, place in parts)

    def append(self, part: bytes | memoryview) -> None:
        """Write at the end."""
        self._file.write(part)
        self._checksum.update(part)
        self.size_bytes += len(part)

    def flush(self) -> None:
        """Hand everything to the system."""
        self._file.flush()

    def finish(self) -> str:
        """Hand everything to the system; return the checksum."""
        self._file.flush()
        return self._checksum.copy().hexdigest()

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    def _open(self) -> BinaryIO:
        return self.path.open("w+b")


class SharedWeights(Weights):
    """The file of a model, in the cache folder `root`, locked against other writers; `path` will be a link to it."""

    def __init__(self, root: Path, key: str, path: Path) -> None:
        folder = root / WEIGHTS_FOLDER
        folder.mkdir(mode=0o755, exist_ok=True)
        self._link = path
        self._index = folder / f"{key}.json"
        self._lock = (folder / f"{key}.lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        super().__init__(folder / f"{key}.bin")

    def finish(self) -> str:
        """Flush everything and make the link; return the checksum."""
        checksum = super().finish()
        os.fsync(self._file.fileno())
        self._offer()
        index = {
            "size_bytes": self.size_bytes,
            "checksum": checksum,
            "offsets": self._offsets,
            "beginnings": self._beginnings,
        }
        unfinished = self._index.with_suffix(".new")
        unfinished.write_text(json.dumps(index))
        unfinished.rename(self._index)
        return checksum

    def flush(self) -> None:
        """Hand everything to the system, and to readers of the artifact that is being written."""
        super().flush()
        self._offer()

    def close(self) -> None:
        """Let other writers in."""
        super().close()
        self._lock.close()

    def _offer(self) -> None:
        self._link.unlink(missing_ok=True)
        try:
            os.link(self.path, self._link)
        except OSError:  # some file systems have no links
            shutil.copyfile(self.path, self._link)

    def _open(self) -> BinaryIO:
        """Open the file behind its last whole byte; a new one if it is not what its index says."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            index = json.loads(self._index.read_text())
            file = self.path.open("r+b")
            left = int(index["size_bytes"])
            while left and (part := file.read(min(_READ_BYTES, left))):
                self._checksum.update(part)
                left -= len(part)
            if not left and self._checksum.copy().hexdigest() == index["checksum"]:
                self._offsets = {str(digest): int(offset) for digest, offset in index["offsets"].items()}
                self._beginnings = {
                    str(digest): [(int(offset), int(size_bytes)) for offset, size_bytes in places]
                    for digest, places in index["beginnings"].items()
                }
                self.size_bytes = int(index["size_bytes"])
                return file
            file.close()
        self._checksum = Checksum()
        for path in (self._index, self.path):
            path.unlink(missing_ok=True)
        self._offsets, self._beginnings = {}, {}
        return self.path.open("x+b")
