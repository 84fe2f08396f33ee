"""The key of a model in the cache. Every start of a server computes it, so it needs no TVM and rarely onnx."""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from gangway.artifact.cache import cache_key
from gangway.artifact.files import file_beside, file_stamp, require_regular
from gangway.artifact.format import TargetSpec
from gangway.artifact.host_limits import memory_limit_bytes
from gangway.compiler.arguments import NO_DIMENSIONS
from gangway.compiler.errors import ModelError, UnreadableModelError, UnsupportedModelError
from gangway.compiler.frontend.onnx_file import may_have_external_data

WHOLE: Mapping[str, int] = MappingProxyType({"whole ": 1})  # tells the key of a model that is not to be compiled
UNCOMPILED: Mapping[str, int] = MappingProxyType({"uncompiled ": 1})  # of a model that is to be compiled later
SIZED: Mapping[str, int] = MappingProxyType({"sized ": 1})  # of what all sizes of a model share
_OPTIONAL = "optional "


def model_key(path: Path, target: TargetSpec, dimensions: Mapping[str, int] = NO_DIMENSIONS) -> str:
    """Return the key of the ONNX file `path` for `target`, with these values of symbolic dimensions.

    Raises OSError, and ModelError for a broken file, one that is larger than memory, and weights in what is no regular
    file of the model's folder.
    """
    try:
        require_regular(path)
    except ValueError as error:
        raise UnreadableModelError(str(error)) from error
    refuse_too_large([path])
    files = [path, *_external_files(path)]
    refuse_too_large(files)
    return cache_key(files, compiler_version(), target, dimensions)


def with_optional(names: Iterable[str]) -> dict[str, int]:
    """Return what tells the key of a model with optional inputs from that of the same file without."""
    return {f"{_OPTIONAL}{name}": 1 for name in names}


@cache
def compiler_version() -> str:
    """Return the versions of package, TVM and onnxruntime, and a hash of the source, which decide what is made."""
    folder = Path(__file__).parent
    source = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        source.update(path.read_bytes())
    others = f"tvm{version('apache-tvm')}+onnxruntime{version('onnxruntime')}"
    return f"{version('gangway-serve')}+{others}+{source.hexdigest()[:12]}"


def _external_files(path: Path) -> list[Path]:
    """Return the files that hold weights outside of the model file, each once, sorted."""
    return _external_files_of(path, file_stamp(path))


@lru_cache(maxsize=256)
def _external_files_of(path: Path, stamp: tuple[int, ...]) -> list[Path]:
    """The same of a file's content, for a process that compiles many sizes of a model."""
    if not may_have_external_data(path):
        return []
    from gangway.compiler.frontend.importer import external_locations  # noqa: PLC0415 - imports onnx

    try:
        return sorted(file_beside(path.parent, location) for location in external_locations(path))
    except ValueError as error:
        raise ModelError(f"external data: {error}") from error


def refuse_too_large(files: Iterable[Path]) -> None:
    """Raise UnsupportedModelError if the files have more bytes than this machine, or container, has memory."""
    size_bytes, limit_bytes = sum(path.stat().st_size for path in files), memory_limit_bytes()
    if size_bytes > limit_bytes:
        raise UnsupportedModelError(f"the model has {size_bytes >> 20} MiB, the machine {limit_bytes >> 20} of memory")
