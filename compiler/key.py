"""The key of a model in the cache. Every start of a server computes it, so it needs neither TVM nor onnx.

The key covers the version of TVM. Where TVM is not installed, it is the version of the artifact that was used last, of
those that this version of Gangway made: `known_compiler`.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from gangway.artifact.cache import cache_key
from gangway.artifact.format import MANIFEST_FILE, Precision, TargetSpec
from gangway.base.extras import COMPILER, missing_packages
from gangway.base.files import file_beside, file_stamp, require_regular
from gangway.base.host_limits import memory_limit_bytes
from gangway.compiler.arguments import NO_DIMENSIONS
from gangway.compiler.errors import CompilerMissingError, ModelError, UnreadableModelError, UnsupportedModelError
from gangway.compiler.frontend.onnx_file import DamagedError, Reference, references

WHOLE: Mapping[str, int] = MappingProxyType({"whole ": 1})  # tells the key of a model that is not to be compiled
UNCOMPILED: Mapping[str, int] = MappingProxyType({"uncompiled ": 1})  # of a model that is to be compiled later
SIZED: Mapping[str, int] = MappingProxyType({"sized ": 1})  # of what all sizes of a model share
_OPTIONAL = "optional "


def model_key(
    path: Path,
    target: TargetSpec,
    dimensions: Mapping[str, int] = NO_DIMENSIONS,
    compiler: str = "",
    precision: Precision = "fp32",
    keep_fp32: Collection[str] = (),
) -> str:
    """Return the key of the ONNX file `path` for `target`, with these values of symbolic dimensions.

    `compiler`: the version of the compiler, by default of the one that is installed. `keep_fp32`: names of layers whose
    products stay float32 whatever the precision.

    Raises OSError, and ModelError for a broken file, one that is larger than memory, and weights in what is no regular
    file of the model's folder.
    """
    try:
        require_regular(path)
    except ValueError as error:
        raise UnreadableModelError(str(error)) from error
    refuse_too_large([path])
    files = [path, *sorted(set(external_files(path).values()))]
    refuse_too_large(files)
    marks = {} if precision == "fp32" else {f"precision {precision} ": 1, **{f"fp32 {name} ": 1 for name in keep_fp32}}
    return cache_key(files, compiler or compiler_version(), target, {**dimensions, **marks})


def stand_in_key(key: str) -> str:
    """Return the key of what onnxruntime executes until the artifact of a key is compiled."""
    return hashlib.sha256(f"stand-in for {key}".encode()).hexdigest()


def with_optional(names: Iterable[str]) -> dict[str, int]:
    """Return what tells the key of a model with optional inputs from that of the same file without."""
    return {f"{_OPTIONAL}{name}": 1 for name in names}


@cache
def compiler_version() -> str:
    """Return the versions of package, TVM and onnxruntime, and a hash of the source, which decide what is made.

    Raises PackageNotFoundError without TVM or onnxruntime.
    """
    own, source = _own_version()
    return f"{own}{version('apache-tvm')}+onnxruntime{version('onnxruntime')}{source}"


@cache
def known_compiler(cache_dir: Path) -> str:
    """Return the version of the compiler whose artifacts are looked for: the installed one.

    Without TVM it is the one that made the artifact which was used last, of those that are possible with any TVM; if
    the cache has none of them, one that made nothing.
    """
    with suppress(PackageNotFoundError):
        return compiler_version()
    own, source = _own_version()
    for path in sorted(cache_dir.glob(f"*/{MANIFEST_FILE}"), key=_modified_ns, reverse=True):
        with suppress(OSError, ValueError, TypeError, KeyError):  # what is damaged, or of another format
            maker = json.loads(path.read_bytes())["compiler_version"]
            if maker.startswith(own) and maker.endswith(source):
                return str(maker)
    return f"{own}{source}"


def require_compiler(why: str = "it is not in the cache") -> None:
    """Raise CompilerMissingError, which says what to install, unless models can be compiled. `why` they are to be."""
    if missing := missing_packages(COMPILER):
        raise CompilerMissingError(f"{why}, and compiling needs {missing}")


def _modified_ns(path: Path) -> int:
    """When a file was written or last marked as used; 0 if it has just been removed."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


@cache
def _own_version() -> tuple[str, str]:
    """Return what stands before and behind the versions of TVM and onnxruntime in the compiler's version."""
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    return f"{version('gangway-serve')}+tvm", f"+{source.hexdigest()[:12]}"


def external_files(path: Path) -> Mapping[str, Path]:
    """Return the files that hold weights outside of the model file, by the names that this gives them, sorted.

    All who hand a model to onnx or onnxruntime call this before: what a file refers to is in the model's folder then.
    Raises OSError, UnreadableModelError for what is no ONNX file, and ModelError for references to anything but
    initializers in regular files of the folder. Links are followed: the folder's owner has placed them.
    """
    return _external_files_of(path, file_stamp(path))


def files_stamp(path: Path) -> tuple[tuple[int, ...], ...]:
    """Return what changes when an ONNX file does, or one with its weights. Errors as of `external_files`."""
    return tuple(map(file_stamp, (path, *external_files(path).values())))


@lru_cache(maxsize=256)
def _external_files_of(path: Path, stamp: tuple[int, ...]) -> Mapping[str, Path]:
    """The same of a file's content, for a process that compiles many sizes of a model."""
    files: dict[str, Path] = {}
    try:
        require_regular(path)
        for reference in references(path):
            files[reference.location] = beside = file_beside(path.parent, reference.location)
            _require_inside(reference, beside.stat().st_size)
    except DamagedError as error:
        why = f"{path.name} is not an ONNX file, or it is truncated ({path.stat().st_size} bytes)"
        raise UnreadableModelError(why) from error
    except ValueError as error:
        raise ModelError(f"external data: {error}") from error
    return dict(sorted(files.items()))


def _require_inside(reference: Reference, file_bytes: int) -> None:
    size_bytes = file_bytes - reference.offset if reference.size_bytes is None else reference.size_bytes
    if reference.offset < 0 or size_bytes < 0 or reference.offset + size_bytes > file_bytes:
        where = f"{size_bytes} bytes at {reference.offset}"
        raise ValueError(f"'{reference.location}' has {file_bytes} bytes, and the model wants {where}")


def refuse_too_large(files: Iterable[Path]) -> None:
    """Raise UnsupportedModelError if the files have more bytes than this machine, or container, has memory."""
    size_bytes, limit_bytes = sum(path.stat().st_size for path in files), memory_limit_bytes()
    if size_bytes > limit_bytes:
        raise UnsupportedModelError(f"the model has {size_bytes >> 20} MiB, the machine {limit_bytes >> 20} of memory")
