"""Checksums of large files, computed by all cores this process may use: models have gigabytes, a start has seconds.

A file's digest is the SHA-256 of the SHA-256s of its pieces of PIECE_BYTES, the last of which may be shorter.
"""

import hashlib
import os
from pathlib import Path

PIECE_BYTES = 32 << 20
_READ_BYTES = 1 << 20


class Digest:
    """The digest of bytes that come one after the other."""

    def __init__(self) -> None:
        self._whole, self._piece, self._piece_bytes = hashlib.sha256(), hashlib.sha256(), 0

    def update(self, content: bytes | memoryview) -> None:
        """Append C-contiguous `content`."""
        view = memoryview(content).cast("B")
        while len(view):
            part = view[: PIECE_BYTES - self._piece_bytes]
            self._piece.update(part)
            self._piece_bytes += len(part)
            view = view[len(part) :]
            if self._piece_bytes == PIECE_BYTES:
                self._end_piece()

    def hexdigest(self) -> str:
        """Return 64 hex digits. Nothing may be appended after that."""
        if self._piece_bytes:
            self._end_piece()
        return self._whole.hexdigest()

    def _end_piece(self) -> None:
        self._whole.update(self._piece.digest())
        self._piece, self._piece_bytes = hashlib.sha256(), 0


def file_digest(path: Path) -> str:
    """Return the digest of a file's content, 64 hex digits. Raises OSError."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - workers import this module, but never call it

    with path.open("rb") as file:
        begins = range(0, os.fstat(file.fileno()).st_size, PIECE_BYTES)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            pieces = list(pool.map(lambda begin: _piece_digest(file.fileno(), begin), begins))
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def _piece_digest(descriptor: int, begin: int) -> bytes:
    """Read rather than map: a file that gets shorter meanwhile must not kill the process."""
    digest, end = hashlib.sha256(), begin + PIECE_BYTES
    while begin < end and (part := os.pread(descriptor, min(_READ_BYTES, end - begin), begin)):
        digest.update(part)
        begin += len(part)
    return digest.digest()
