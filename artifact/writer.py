"""Write an artifact so that it appears whole or not at all, whatever happens and whoever else writes the same."""

import hashlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from gangway.artifact.codec import encode
from gangway.artifact.format import (
    ALIGNMENT_BYTES,
    KERNELS_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    FileSpec,
    Manifest,
)
from gangway.artifact.reader import read_manifest


class ArtifactWriter:
    """A context: weights and kernels go to a hidden folder beside `folder`; `commit` renames it, else it is removed.

    Two writers of the same folder race safely: the first to commit wins, the other's copy is dropped (equal keys mean
    equal contents). Raises OSError when the disk is full or not writable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = Path(tempfile.mkdtemp(prefix=temporary_prefix(folder), dir=folder.parent))
        self._weights = (self._temporary / WEIGHTS_FILE).open("wb")
        self._weights_bytes = 0
        self._weights_hash = hashlib.sha256()

    @property
    def kernels_path(self) -> Path:
        """Where the compiler must put the shared object before `commit`."""
        return self._temporary / KERNELS_FILE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._weights.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def append_weights(self, content: bytes | memoryview) -> int:
        """Append C-contiguous `content` to weights.bin, padded to the alignment; return its offset in bytes."""
        offset_bytes = self._weights_bytes
        view = memoryview(content).cast("B")
        padding = bytes(-len(view) % ALIGNMENT_BYTES)
        for part in (view, padding):
            self._weights.write(part)
            self._weights_hash.update(part)
        self._weights_bytes += len(view) + len(padding)
        return offset_bytes

    def commit(self, manifest: Manifest) -> Manifest:
        """Complete `manifest` with sizes and checksums, flush everything to disk, and let the artifact appear."""
        if not self._weights_bytes:
            self.append_weights(bytes(ALIGNMENT_BYTES))  # an empty file could not be mapped
        self._weights.flush()
        os.fsync(self._weights.fileno())
        kernels = self.kernels_path.read_bytes()
        files = {
            WEIGHTS_FILE: FileSpec(self._weights_bytes, self._weights_hash.hexdigest()),
            KERNELS_FILE: FileSpec(len(kernels), hashlib.sha256(kernels).hexdigest()),
        }
        manifest = replace(manifest, files=files)
        (self._temporary / MANIFEST_FILE).write_bytes(encode(manifest))
        read_manifest(self._temporary)
        for path in (self.kernels_path, self._temporary / MANIFEST_FILE, self._temporary):
            _sync(path)
        self._temporary.chmod(0o755)  # mkdtemp makes it private; other users' servers may share the cache
        try:
            self._temporary.rename(self._folder)
        except OSError:
            if not self._folder.is_dir():
                raise
        _sync(self._folder.parent)
        return manifest


def temporary_prefix(folder: Path) -> str:
    """Names of unfinished copies of `folder` begin so."""
    return f".{folder.name}."


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
