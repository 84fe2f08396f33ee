"""What files hold, which of them a model may name, and how they grow.

Digests of large files are computed by all cores this process may use: models have gigabytes, a start has seconds. A
file is cut into pieces of PIECE_BYTES, the last of which may be shorter. Its *digest*, which tells a model from any
other, is the SHA-256 of the pieces' SHA-256s. Its *checksum*, which notices damage and is three times as fast, is the
SHA-256 of the pieces' CRC-32s.
"""

import hashlib
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

PIECE_BYTES = 32 << 20
_READ_BYTES = 1 << 20
DATA_SUFFIXES = (".data", "_data")  # what exporters append to the name of the file with a model's external data


class Checksum:
    """The checksum of bytes that come one after the other."""

    def __init__(self) -> None:
        self._whole, self._piece, self._piece_bytes = hashlib.sha256(), 0, 0

    def update(self, content: bytes | memoryview) -> None:
        """Append C-contiguous `content`."""
        view = memoryview(content).cast("B")
        while len(view):
            part = view[: PIECE_BYTES - self._piece_bytes]
            self._piece = zlib.crc32(part, self._piece)
            self._piece_bytes += len(part)
            view = view[len(part) :]
            if self._piece_bytes == PIECE_BYTES:
                self._end_piece()

    def copy(self) -> "Checksum":
        """Return the checksum of the same bytes, to which others may be appended."""
        other = Checksum()
        other._whole, other._piece, other._piece_bytes = self._whole.copy(), self._piece, self._piece_bytes
        return other

    def hexdigest(self) -> str:
        """Return 64 hex digits. Nothing may be appended after that."""
        if self._piece_bytes:
            self._end_piece()
        return self._whole.hexdigest()

    def _end_piece(self) -> None:
        self._whole.update(self._piece.to_bytes(4, "little"))
        self._piece, self._piece_bytes = 0, 0


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when a file does. Raises OSError."""
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def model_stamp(path: Path) -> tuple[tuple[object, ...], ...]:
    """Return what changes when an ONNX file does, or a file beside it that may hold its weights. Raises OSError.

    In the folder of a version that is any other file. A file alone lies among others, and counts with those that are
    called like it. Not so when it gets another name, too, as a copy for the cache may be.
    """
    if path.parent.name.isdecimal():
        beside = [each for each in path.parent.iterdir() if each.is_file() and each.suffix != ".onnx"]
    else:
        named = [*(path.with_name(path.name + suffix) for suffix in DATA_SUFFIXES), path.with_suffix(".data")]
        beside = [each for each in named if each.is_file()]
    found = ((each.name, each.stat()) for each in (path, *sorted(beside)))
    return tuple((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found)


def file_digest(path: Path) -> str:
    """Return the digest of a file's content, 64 hex digits. Raises OSError."""
    return _by_pieces(path, _sha256)


def file_checksum(path: Path, size_bytes: int | None = None) -> str:
    """Return the checksum of a file's content, or of its first bytes, 64 hex digits. Raises OSError."""
    return _by_pieces(path, _crc32, size_bytes)


def file_beside(folder: Path, name: str) -> Path:
    """Return the file that a relative `name` means in a folder. A link is followed: the folder's owner has placed it.

    Names stand in files that clients may send. Raises ValueError for a name that leaves the folder, and for what is
    no regular file (opening a pipe blocks), OSError if nothing is there.
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


def _by_pieces(path: Path, of_piece: Callable[[Iterator[memoryview]], bytes], size_bytes: int | None = None) -> str:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - workers import this module, but never call it

    with path.open("rb") as file:
        descriptor = file.fileno()
        end = os.fstat(descriptor).st_size if size_bytes is None else size_bytes
        begins = range(0, end, PIECE_BYTES)
        try:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                pieces = list(pool.map(lambda begin: of_piece(_read(descriptor, begin, end)), begins))
        except RuntimeError:  # no thread can be started
            pieces = [of_piece(_read(descriptor, begin, end)) for begin in begins]
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def _read(descriptor: int, begin: int, file_end: int) -> Iterator[memoryview]:
    """The content of a piece. Read rather than mapped: a file that gets shorter must not kill the process."""
    buffer, end = memoryview(bytearray(_READ_BYTES)), min(begin + PIECE_BYTES, file_end)
    while begin < end and (size := os.preadv(descriptor, [buffer[: end - begin]], begin)):
        yield buffer[:size]
        begin += size


def _sha256(parts: Iterator[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _crc32(parts: Iterator[memoryview]) -> bytes:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value.to_bytes(4, "little")


def words_of(error: Exception) -> str:
    """Return what an error says; of the system's errors its words and the file, without their number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: '{error.filename}'"


def append_whole(descriptor: int, content: bytes, tail: bytes = b"") -> None:
    """Write `content` at the end of a file, over its last bytes, which are `tail`: whole, or not at all.

    If it does not fit (no space, a limit of the file's size), the file is as it was. What is no file of a disk, such as
    a pipe, gets the content alone. Raises OSError.
    """
    status = os.fstat(descriptor)
    left = memoryview(content)
    if not stat.S_ISREG(status.st_mode):
        while left:
            left = left[os.write(descriptor, left) :]
        return
    place = begin = status.st_size - len(tail)
    try:
        while left:
            written = os.pwrite(descriptor, left, place)
            place, left = place + written, left[written:]
    except OSError:
        os.ftruncate(descriptor, status.st_size)
        os.pwrite(descriptor, tail, begin)  # over what is there, which takes no space
        raise


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
