"""Write an artifact, or a small file of the cache, so that it appears whole or not at all.

That holds after a crash at any moment, and with several writers of the same.
"""

import gzip
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from gangway.artifact.format import (
    ALIGNMENT_BYTES,
    ISLAND_SUFFIX,
    KERNELS_FILE,
    LIBRARY_PREFIX,
    MANIFEST_FILE,
    ONNX_FILE,
    ONNX_FOLDER,
    WEIGHTS_FILE,
    FileSpec,
    Manifest,
)
from gangway.artifact.reader import OTHERS_WRITE, read_manifest
from gangway.artifact.weights import SharedWeights, Weights
from gangway.base.files import file_checksum
from gangway.base.json_codec import encode


class _Writer(ABC):
    """A context: files go to a hidden folder beside `folder`; `commit` renames it, else it is removed.

    Two writers of the same folder race safely: the first to commit wins, the other's copy is dropped (equal keys mean
    equal contents). Raises OSError when the disk is full or not writable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_flushed = True
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = Path(tempfile.mkdtemp(prefix=temporary_prefix(folder), dir=folder.parent))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(self._folder.parent)  # a write names no file: whose disk is full is to be said

    def commit(self, manifest: Manifest) -> Manifest:
        """Complete `manifest` with sizes and checksums, flush everything to disk, and let the artifact appear."""
        manifest = replace(manifest, files=self._finish())
        (self._temporary / MANIFEST_FILE).write_bytes(self._encoded(manifest))
        paths = (*self._temporary.rglob("*"), self._temporary)
        for path in paths:
            if (mode := path.stat().st_mode) & OTHERS_WRITE:
                path.chmod(mode & ~OTHERS_WRITE)  # as the umask may have it, and the reader would refuse it
        read_manifest(self._temporary)
        for path in paths if self._is_flushed else ():
            _sync(path)
        self._temporary.chmod(0o755)  # mkdtemp makes it private; other users' servers may share the cache
        try:
            self._temporary.rename(self._folder)
        except OSError:
            if not self._folder.is_dir():
                raise
        if self._is_flushed:
            _sync(self._folder.parent)
        return manifest

    def _encoded(self, manifest: Manifest) -> bytes:
        """Return the content of the manifest's file."""
        return encode(manifest, indent=1)

    @abstractmethod
    def _finish(self) -> dict[str, FileSpec]:
        """Write what is not written yet; return sizes and checksums of all files but the manifest."""


class DescriptionWriter(_Writer):
    """Writes a manifest alone: of a model that is executed elsewhere."""

    def _finish(self) -> dict[str, FileSpec]:
        return {}


class ArtifactWriter(_Writer):
    """Writes weights and kernels.

    `share_key`: artifacts of the same key share one file of weights, which others cannot write from the first
    `append_weights` on until this one is written.
    """

    def __init__(self, folder: Path, share_key: str = "") -> None:
        super().__init__(folder)
        self._share_key = share_key
        self._islands: list[str] = []

    @cached_property
    def _weights(self) -> Weights:
        path = self._temporary / WEIGHTS_FILE
        return SharedWeights(self._folder.parent, self._share_key, path) if self._share_key else Weights(path)

    @property
    def kernels_path(self) -> Path:
        """Where the compiler must put the shared object before `commit`, and beside it those that this one needs."""
        return self._temporary / KERNELS_FILE

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if "_weights" in vars(self):
            self._weights.close()
        super().__exit__(kind, error, traceback)

    def append_weights(self, content: bytes | memoryview) -> int:
        """Append C-contiguous `content` to weights.bin, padded to the alignment; return its offset in bytes."""
        offset_bytes = self._weights.size_bytes
        view = memoryview(content).cast("B")
        self._weights.append(view)
        self._weights.append(bytes(-len(view) % ALIGNMENT_BYTES))
        return offset_bytes

    def put_weights(self, content: memoryview) -> int:
        """Return the offset of C-contiguous `content` in weights.bin, to which it is appended unless it is there."""
        return self._weights.put(content)

    def flushed_weights(self) -> Path:
        """Return the file of the weights, with all that has been appended."""
        self._weights.flush()
        return self._weights.path

    def add_island(self, name: str, content: bytes) -> Path:
        """Write an ONNX file of this name; return where it is."""
        path = self._temporary / name
        path.write_bytes(content)
        self._islands.append(name)
        return path

    def _encoded(self, manifest: Manifest) -> bytes:
        """Of a model that has many artifacts it is compressed: there it would be most of what a further one takes."""
        return gzip.compress(encode(manifest), mtime=0) if self._share_key else super()._encoded(manifest)

    def _finish(self) -> dict[str, FileSpec]:
        if not self._weights.size_bytes:
            self.append_weights(bytes(ALIGNMENT_BYTES))  # an empty file could not be mapped
        checksum = self._weights.finish()
        libraries = sorted(path.name for path in self._temporary.glob(f"{LIBRARY_PREFIX}*"))
        others = {name: _measure(self._temporary / name) for name in (KERNELS_FILE, *libraries, *self._islands)}
        return {WEIGHTS_FILE: FileSpec(self._weights.size_bytes, checksum), **others}


class VariantWriter(_Writer):
    """Writes other kernels for the weights and islands of an artifact that exists; both share one copy on the disk.

    Raises OSError also when that artifact has gone.
    """

    def __init__(self, folder: Path, original: Path) -> None:
        super().__init__(folder)
        self._shared = (WEIGHTS_FILE, *(path.name for path in sorted(original.glob(f"*{ISLAND_SUFFIX}"))))
        for name in self._shared:
            try:
                os.link(original / name, self._temporary / name)
            except OSError:  # some file systems have no links
                shutil.copyfile(original / name, self._temporary / name)

    @property
    def kernels_path(self) -> Path:
        """Where the compiler must put the shared object before `commit`."""
        return self._temporary / KERNELS_FILE

    def _finish(self) -> dict[str, FileSpec]:
        return {name: _measure(self._temporary / name) for name in (*self._shared, KERNELS_FILE)}


class OnnxArtifactWriter(_Writer):
    """Writes a model for onnxruntime: copies of the ONNX file and of the files with its external data.

    `is_brief`: it is of use for minutes, so nothing is flushed. What a crash of the machine damages, checksums tell.
    """

    def __init__(self, folder: Path, is_brief: bool = False) -> None:
        super().__init__(folder)
        self._is_flushed = not is_brief

    @property
    def model_path(self) -> Path:
        """Where the copy of the ONNX file is."""
        return self._temporary / ONNX_FILE

    def copy(self, model: Path, external: list[str]) -> None:
        """Copy `model`, and the files of these names beside it. Raises ValueError for a name that leads elsewhere."""
        root = self.model_path.parent
        root.mkdir()
        shutil.copyfile(model, self.model_path)
        for name in external:
            target = root / name
            if not target.resolve().is_relative_to(root.resolve()) or target.resolve() == self.model_path.resolve():
                raise ValueError(f"external data in '{name}', which is not below the model's folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model.parent / name, target)

    @property
    def data_path(self) -> Path:
        """Where weights may be that the ONNX file refers to, beside it."""
        return self.model_path.with_name(f"{self.model_path.name}.data")

    def replace_model(self, parts: Iterable[bytes]) -> None:
        """Write another ONNX file in place of the copy, which may be read meanwhile."""
        path = self.model_path.with_name(f"new {ONNX_FILE.rpartition('/')[2]}")
        with path.open("wb") as file:
            file.writelines(parts)
        path.replace(self.model_path)

    def room_for_saved(self, name: str) -> Path:
        """Return where the model may be saved anew, under the file name of a path in the artifact."""
        folder = self._temporary / "saved"
        folder.mkdir()
        return folder / Path(name).name

    def choose(self, saved: bool) -> None:
        """Keep either the model saved anew, or the copy."""
        folder, copy = self._temporary / "saved", self._temporary / ONNX_FOLDER
        shutil.rmtree(copy if saved else folder)
        if saved:
            folder.rename(copy)

    def _finish(self) -> dict[str, FileSpec]:
        files = [path for path in (self._temporary / ONNX_FOLDER).rglob("*") if path.is_file()]
        return {path.relative_to(self._temporary).as_posix(): _measure(path) for path in sorted(files)}


def temporary_prefix(folder: Path) -> str:
    """Names of unfinished copies of `folder` begin so."""
    return f".{folder.name}."


def _measure(path: Path) -> FileSpec:
    return FileSpec(path.stat().st_size, file_checksum(path))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
