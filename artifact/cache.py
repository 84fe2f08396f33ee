"""The cache of compiled models: one folder per key; model bytes, compiler version and target decide the key."""

import argparse
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from gangway.artifact.format import FORMAT_VERSION, MANIFEST_FILE, Manifest, TargetSpec, open_symbols
from gangway.artifact.reader import ArtifactError, others_may_write, verify
from gangway.artifact.writer import temporary_prefix
from gangway.base.files import file_digest, file_stamp

KEY_DIGITS = 64
_log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/gangway, or ~/.cache/gangway; relative values of the variable are ignored, as XDG demands.

    Raises RuntimeError if the user has no home directory.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "gangway"


def add_cache_dir(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Define the flag --cache-dir, whose value is a folder that can be used."""

    def folder(text: str) -> Path:
        try:
            return usable_cache_dir(text)
        except OSError as error:
            raise argparse.ArgumentTypeError(error.strerror) from None

    parser.add_argument("--cache-dir", type=folder, default="", metavar="DIR",
        help="where compiled models are kept ($XDG_CACHE_HOME/gangway, or ~/.cache/gangway)")  # fmt: skip


def add_dimension(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Define the flag --dimension, whose value is a list of names and sizes."""

    def dimension(text: str) -> tuple[str, int]:
        name, _, size = text.rpartition("=")
        if not name or not size.isascii() or not size.removeprefix("-").isdigit():  # a value may be negative
            raise argparse.ArgumentTypeError(f"expected NAME=SIZE, as length=128, got {text!r}")
        return name, int(size)

    what = (
        "size of a symbolic dimension, called by its name or by its place (x.1), or value of an input of one integer;"
        " may be given for several ones"
    )
    parser.add_argument("--dimension", type=dimension, action="append", default=[], metavar="NAME=SIZE", help=what)


def dimension_flags(manifest: Manifest) -> str:
    """Return the flags that give a model one size, empty if its sizes are fixed."""
    return " ".join(f"--dimension {name}=SIZE" for name in sorted(open_symbols(manifest.inputs, manifest.batched)))


def usable_cache_dir(text: str) -> Path:
    """Return the folder, absolute, made if it is absent, and private to who may write it. Empty: the default.

    What libraries write goes there, too, where the system has no folder for it. Raises OSError, which names a remedy.
    """
    try:
        root = (Path(text) if text else default_cache_dir()).absolute()
    except RuntimeError:
        raise OSError(errno.ENOENT, "is needed: this user has no home directory") from None
    try:
        root.mkdir(mode=0o755, parents=True, exist_ok=True)  # not for a group, whatever the umask
        is_writable = os.access(root, os.W_OK | os.X_OK)
        if not is_writable and not any(len(item.name) == KEY_DIGITS for item in root.iterdir()):
            raise OSError(errno.EACCES, "it cannot be written, and holds no compiled model")
        problem = others_may_write(root)
        if is_writable and not problem:
            _stand_in(root)
    except OSError as error:
        raise OSError(error.errno, f"{root} cannot be used: {error.strerror}; name another folder") from None
    if problem:
        hint = f"change that, or name a folder in it, as --cache-dir={root / 'gangway'}"
        raise OSError(errno.EPERM, f"{root} {problem}, and the code in it is executed: {hint}")
    return root


def _stand_in(root: Path) -> None:
    """Let the cache stand in for a home and a folder of temporary files, for this process and those that it starts."""
    try:
        Path.home()
    except RuntimeError:
        os.environ.setdefault("XDG_CACHE_HOME", str(root))  # TVM looks for one of them when it is imported
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        folder = root / "tmp"
        folder.mkdir(mode=0o700, exist_ok=True)
        os.environ["TMPDIR"] = str(folder)


def cache_key(files: Iterable[Path], compiler_version: str, target: TargetSpec, dimensions: Mapping[str, int]) -> str:
    """Return the key of a model: `files` are the ONNX file and those with its external data, in a fixed order.

    `dimensions`: the values it is compiled for, of symbolic dimensions other than the batch.

    64 hex digits, a SHA-256. Raises OSError if a file cannot be read.
    """
    total = hashlib.sha256(repr((FORMAT_VERSION, compiler_version, target, sorted(dimensions.items()))).encode())
    for path in files:
        total.update(_digest(path, file_stamp(path)).encode())
    return total.hexdigest()


@lru_cache(maxsize=256)
def _digest(path: Path, stamp: tuple[int, ...]) -> str:
    """The digest of a file, which a process that compiles many sizes of a model needs many times."""
    return file_digest(path)


class Cache:
    """The folder `root`, shared by any number of processes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, key: str) -> Path:
        """Where the artifact of a key is, or will be."""
        return self.root / key

    def lookup(self, key: str) -> Manifest | None:
        """Return the manifest of a whole, checked artifact; None if there is none. A damaged one is removed."""
        folder = self.folder(key)
        if not folder.exists():
            return None
        try:
            manifest = verify(folder)
            if manifest.key != key:
                raise ArtifactError(f"{folder}: holds the artifact of another key, {manifest.key}")
        except ArtifactError as error:
            _log.warning("damaged artifact removed: %s", error)
            self._remove(folder)
            return None
        with suppress(OSError):
            os.utime(folder / MANIFEST_FILE)  # what has not been used for long is removed first (trim.py)
        return manifest

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock for building `key`; waits for another holder. Look the key up again once inside.

        The kernel frees the lock when its holder dies; what a dead holder left unfinished is removed here.
        """
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / key).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for leftover in self.root.glob(temporary_prefix(self.folder(key)) + "*"):
                shutil.rmtree(leftover, ignore_errors=True)
            yield

    def _remove(self, folder: Path) -> None:
        """Move the folder away by one rename first, so that no process sees it half removed."""
        trash = Path(tempfile.mkdtemp(prefix=".damaged.", dir=self.root))
        try:
            folder.rename(trash / folder.name)
        except FileNotFoundError:
            pass  # another process was quicker
        finally:
            shutil.rmtree(trash, ignore_errors=True)
