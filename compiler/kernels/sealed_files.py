"""Files of the cache that carry a payload and a checksum behind their own content: objects and libraries.

Linkers and loaders pass over what is behind. A damaged file counts as missing. A cache that cannot be used costs time,
no more.
"""

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path

from gangway.artifact.reader import OTHERS_WRITE

_LENGTH_BYTES = 8
_DIGEST_BYTES = 32


def seal(path: Path, payload: bytes) -> None:
    """Append a payload, its length and a checksum of everything, which linkers and loaders pass over."""
    content = path.read_bytes() + payload + len(payload).to_bytes(_LENGTH_BYTES, "little")
    path.write_bytes(content + hashlib.sha256(content).digest())
    path.chmod(path.stat().st_mode & ~OTHERS_WRITE)


def read_payload(path: Path) -> bytes | None:
    """The payload of a file; None if that is damaged, which removes it, or not there."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if len(digest) == _DIGEST_BYTES and hashlib.sha256(body).digest() == digest:
        end = len(body) - _LENGTH_BYTES
        return body[end - int.from_bytes(body[end:], "little") : end]
    with suppress(OSError):
        path.unlink()
    return None


def take(kept: Path, path: Path) -> bytes | None:
    """Put a file of the cache at `path`, where nobody removes it; return its payload, None if it is missing."""
    try:
        os.link(kept, path)
    except OSError:
        try:
            shutil.copyfile(kept, path)  # some file systems have no links
        except OSError:
            return None
    payload = read_payload(path)
    with suppress(OSError):
        if payload is None:
            kept.unlink()
        else:
            os.utime(kept)  # what has not been used for long is removed first
    return payload


def keep(path: Path, kept: Path) -> None:
    """Put a file into the cache. Not flushed: whoever reads it sees whether it is whole."""
    with suppress(OSError):
        for folder in (kept.parent.parent, kept.parent):
            folder.mkdir(mode=0o755, exist_ok=True)
        try:
            os.link(path, kept)
        except FileExistsError:
            pass  # another process has compiled the same
        except OSError:
            unfinished = kept.with_name(f".{kept.name}.{os.getpid()}")
            try:
                shutil.copyfile(path, unfinished)
                unfinished.rename(kept)
            except OSError:
                unfinished.unlink(missing_ok=True)
