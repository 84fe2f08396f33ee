"""Repositories on object stores and web servers: a copy in the cache folder, which is served as any folder is.

fsspec reads them (s3fs, gcsfs, huggingface_hub and aiohttp are extras). A model's copy is replaced in one step: its new
files come into a folder of their own, files that are the same are linked, and a symbolic link leads to the newest.
"""

import base64
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from gangway.base.files import DATA_SUFFIXES
from gangway.base.suggestion import did_you_mean
from gangway.server.models.config import DEFAULT_MODEL_FILENAME
from gangway.server.options.server import RemoteSource

_log = logging.getLogger(__name__)

INSTALL: Final = "pip install 'gangway-serve[remote]'"
PROTOCOLS: Final = ("s3", "gs", "hf", "https", "http", "file")
CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "HF_TOKEN",
}
TALKATIVE: Final = ("aiobotocore", "botocore", "google", "httpx", "huggingface_hub")  # loggers of libraries
VERSIONS: Final = ".versions"
STATE_FILE: Final = ".gangway.json"
# What a store says of an object that changes with its content, by its name in fsspec.
STAMPS: Final = (
    "ETag", "etag", "md5Hash", "Content-MD5", "blob_id", "generation", "LastModified", "Last-Modified", "mtime",
)  # fmt: skip


# How Triton names a store that speaks S3: protocol, if it is said, host and port, bucket and folder.
_OWN_STORE: Final = re.compile(r"s3://(?:(https?)://)?([^/:@]+:\d+)/(.+)", re.DOTALL)


class RemoteError(OSError):
    """A repository cannot be read; the message says which, why, and what to do."""


@dataclass(frozen=True)
class _RemoteFile:
    """A file of a model: where it is, and what tells whether it has changed. `size_bytes` -1: not known."""

    path: str
    size_bytes: int
    stamp: str
    md5: str = ""
    sha256: str = ""


_Model = Mapping[str, _RemoteFile]  # by the path within the model's folder


def sync(sources: Sequence[RemoteSource], model: str = "", whole: bool = False) -> None:
    """Bring the copies up to date, of one model or of all. `whole`: also read them, and replace what is damaged.

    Blocks for as long as it takes to load what is new. A copy is as it was if the new one cannot be made. Raises
    RemoteError, also for that if one model is asked for, or `whole`.
    """
    for source in sources:
        with _explained(source):
            _Copy(source).sync(model, whole)


def store_of(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL as fsspec has it, and its options: the server, where a URL of S3 names one, HTTP unless it says."""
    named = _OWN_STORE.fullmatch(url)
    if named is None:
        return url, {}
    return f"s3://{named[3]}", {"endpoint_url": f"{named[1] or 'http'}://{named[2]}"}


class _Copy:
    """The copy of one source, which one process at a time changes."""

    def __init__(self, source: RemoteSource) -> None:
        import fsspec  # noqa: PLC0415 - an extra

        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._source = source
        self._folder = source.folder
        url, options = store_of(source.url)
        self._fs, self._root = fsspec.core.url_to_fs(url, **options)

    def sync(self, only: str, whole: bool) -> None:
        if self._source.name and only not in ("", self._source.name):
            return
        try:
            (self._folder / VERSIONS).mkdir(parents=True, exist_ok=True)
            opened = (self._folder / ".lock").open("w")
        except OSError as error:
            raise RemoteError(f"no copy can be written to {self._folder}: {error.strerror}") from None
        with opened as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not only:
                self._sweep()
            self._fs.invalidate_cache()
            try:
                models = self._one_file() if self._source.name else self._models(only)
            except FileNotFoundError:
                if not only:
                    raise
                models = {}
            if not models and not only:
                raise FileNotFoundError(self._root)
            failures: list[Exception] = []
            for name, objects in models.items():
                try:
                    self._update(name, objects, whole)
                except Exception as error:  # of any library; other models are copied
                    failures.append(error)
                    why = _why(self._source.protocol, error)
                    _log.error("model %s: its copy of %s stays as it is: %s", name, self._source.url, why)
            for link in self._links():
                if link.name not in models and only in ("", link.name):
                    link.unlink()
            if failures and (only or whole):
                raise failures[0]

    def _links(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.is_symlink()]

    def _sweep(self) -> None:
        """Remove what no link leads to: what has been replaced before the last time, or was left unfinished."""
        used = {os.readlink(link) for link in self._links()}
        for path in (self._folder / VERSIONS).iterdir():
            if f"{VERSIONS}/{path.name}" not in used:
                shutil.rmtree(path, ignore_errors=True)

    # -- what there is

    def _one_file(self) -> dict[str, _Model]:
        file = f"{self._root}"
        objects = {f"1/{DEFAULT_MODEL_FILENAME}": self._remote_file(file, self._fs.info(file))}
        for suffix in DATA_SUFFIXES:
            if self._fs.exists(file + suffix):
                name = file.rpartition("/")[2] + suffix
                objects[f"1/{name}"] = self._remote_file(file + suffix, self._fs.info(file + suffix))
        return {self._source.name: objects}

    def _models(self, only: str) -> dict[str, _Model]:
        root = self._root.rstrip("/")
        found: dict[str, dict[str, _RemoteFile]] = {}
        if "/" in only or only.startswith("."):  # the name is a client's
            return {}
        below = f"{root}/{quote(only) if self._is_web else only}" if only else root
        for path, info in (self._web_files(below) if self._is_web else self._fs.find(below, detail=True)).items():
            relative = unquote(path) if self._is_web else path
            if not relative.startswith(f"{root}/") or info.get("type") == "directory" or path.endswith("/"):
                continue
            name, *parts = relative.removeprefix(f"{root}/").split("/")
            if not parts or any(part in ("", "..") or part.startswith(".") or "\0" in part for part in (name, *parts)):
                continue  # no part of a model
            details = self._fs.info(path) if self._is_web else info
            found.setdefault(name, {})["/".join(parts)] = self._remote_file(path, details)
        return dict(found)

    def _web_files(self, root: str) -> dict[str, Mapping[str, Any]]:
        """Return what fsspec's `find` does, which takes a folder that cannot be listed for an empty one."""
        found: dict[str, Mapping[str, Any]] = {}
        folders, seen = [root], {root.rstrip("/")}
        while folders:
            folder = folders.pop()
            try:
                listed = self._fs.ls(folder, detail=True)
            except FileNotFoundError:  # a link that leads nowhere
                if folder == root:
                    raise
                continue
            for info in listed:
                if info["type"] != "directory":
                    found[info["name"]] = info
                elif (name := info["name"].rstrip("/")) not in seen:  # pages may link to each other
                    seen.add(name)
                    folders.append(info["name"])
        return found

    @property
    def _is_web(self) -> bool:
        return self._source.protocol in ("http", "https")

    def _remote_file(self, path: str, info: Mapping[str, Any]) -> _RemoteFile:
        size = info.get("size")
        stamp = {key: str(info[key]) for key in STAMPS if info.get(key) is not None}
        lfs = info.get("lfs") or {}
        return _RemoteFile(
            path,
            -1 if size is None else int(size),
            json.dumps([size, stamp]),
            base64.b64decode(info.get("md5Hash") or "").hex(),
            str(lfs.get("sha256") or ""),
        )

    # -- copying

    def _update(self, name: str, objects: _Model, whole: bool) -> None:
        link = self._folder / name
        before = _state(link)
        same = {relative for relative, item in objects.items() if _is_same(link, relative, item, before, whole)}
        if same == objects.keys() == before.keys():
            return
        content = json.dumps(sorted((relative, item.stamp) for relative, item in objects.items()))
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        target = self._folder / VERSIONS / f"{name}.{digest}.{os.getpid()}"
        number = 0
        while target.exists():
            number += 1
            target = target.with_name(f"{name}.{digest}.{os.getpid()}.{number}")
        target.mkdir()
        state = {}
        try:
            for relative, item in objects.items():
                place = target / relative
                place.parent.mkdir(parents=True, exist_ok=True)
                if relative in same:
                    os.link(link / relative, place)
                    state[relative] = before[relative]
                else:
                    state[relative] = {"stamp": item.stamp, "sha256": self._load(item, place)}
            (target / STATE_FILE).write_text(json.dumps(state))
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        _lead(link, f"{VERSIONS}/{target.name}")
        _log.info(
            "model %s: %d of %d files copied from %s", name, len(objects) - len(same), len(objects), self._source.url
        )

    def _load(self, item: _RemoteFile, place: Path) -> str:
        """Copy a file; return its sha256. Raises RemoteError if it is not what the store has announced."""
        self._fs.get_file(item.path, str(place))
        if item.size_bytes not in (-1, place.stat().st_size):
            raise RemoteError(f"{item.path}: {place.stat().st_size} bytes came of {item.size_bytes}")
        sha256 = _digest(place, "sha256")
        if item.sha256 not in ("", sha256) or (item.md5 and item.md5 != _digest(place, "md5")):
            raise RemoteError(f"{item.path}: what came has another checksum than the store says")
        return sha256


def _state(link: Path) -> dict[str, dict[str, str]]:
    try:
        state: dict[str, dict[str, str]] = json.loads((link / STATE_FILE).read_bytes())
        return state
    except (OSError, ValueError):
        return {}


def _is_same(
    link: Path, relative: str, item: _RemoteFile, before: Mapping[str, Mapping[str, str]], whole: bool
) -> bool:
    """Whether the copy of a file is what the store has. `whole`: read it."""
    known = before.get(relative)
    if known is None or known.get("stamp") != item.stamp:
        return False
    try:
        if item.size_bytes not in (-1, (link / relative).stat().st_size):
            return False
        return not whole or known.get("sha256") == _digest(link / relative, "sha256")
    except OSError:
        return False


def _lead(link: Path, target: str) -> None:
    """Make a link lead elsewhere, in one step."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(link)


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


@contextmanager
def _explained(source: RemoteSource) -> Iterator[None]:
    """Turn what the many libraries raise into RemoteError."""
    try:
        yield
    except ImportError as error:
        raise RemoteError(f"{source.url}: a package is missing ({_line(error)}): {INSTALL}") from None
    except FileNotFoundError as error:
        cause = f" ({_line(error.__cause__)})" if error.__cause__ is not None else ""
        raise RemoteError(f"{source.url}: there is no such bucket, folder or file, or it is empty{cause}") from error
    except Exception as error:  # each library has its own
        raise RemoteError(f"{source.url}: {_why(source.protocol, error)}") from error


def _why(protocol: str, error: Exception) -> str:
    if isinstance(error, RemoteError):
        return str(error)
    hint = f"; credentials are taken from {CREDENTIALS[protocol]}" if protocol in CREDENTIALS else ""
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        return f"the protocol is none of {', '.join(PROTOCOLS)}{did_you_mean(protocol, PROTOCOLS)}"
    if "Credentials" in type(error).__name__:
        return f"there are no credentials ({_line(error)}){hint}"
    if isinstance(error, PermissionError):
        return f"access is refused ({_line(error)}){hint}"
    return f"it cannot be read ({type(error).__name__}: {_line(error)})"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
