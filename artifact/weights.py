"""Packed weights that several artifacts of one model share: one file, which each of them holds by a hard link.

The file only grows. An artifact's manifest covers the bytes that were there when it was written, so its checksum stays
valid. Beside the file lies an index: how many of its bytes are whole, their checksum, and where each array lies, by a
SHA-256 of its bytes. A file that does not match its index is replaced by a new one; artifacts keep the one they have.
"""

import fcntl
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from gangway.artifact.files import Checksum

WEIGHTS_FOLDER = "weights"  # of the cache
_READ_BYTES = 1 << 20


class Weights:
    """A file of weights that is being written. `offsets`: where arrays begin, in bytes, by SHA-256. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.offsets: dict[str, int] = {}
        self.size_bytes = 0
        self.path = path
        self._checksum = Checksum()
        self._file = self._open()

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
        return self.path.open("wb")


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
        index = {"size_bytes": self.size_bytes, "checksum": checksum, "offsets": self.offsets}
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
                self.offsets = {str(digest): int(offset) for digest, offset in index["offsets"].items()}
                self.size_bytes = int(index["size_bytes"])
                return file
            file.close()
        self._checksum = Checksum()
        for path in (self._index, self.path):
            path.unlink(missing_ok=True)
        return self.path.open("x+b")
