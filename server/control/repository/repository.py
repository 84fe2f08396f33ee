"""A Triton model repository on disk: DIR/MODEL/config.pbtxt and DIR/MODEL/VERSION/model.onnx.

It holds versions of models that are to be served, and those that cannot be. A load request may bring other files.
"""

import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from gangway.base.files import DATA_SUFFIXES
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import ConfigError, RequestError, invalid, unavailable
from gangway.server.messages import DUPLICATE, MAX_VERSION, WHOLE_MODEL
from gangway.server.models.config import (
    BACKEND,
    DEFAULT_MODEL_FILENAME,
    ONNX_SUFFIX,
    PLATFORM,
    PYTHON_BACKEND,
    QosConfig,
    check_onnx,
    check_supported,
    foreign_engine,
    is_ensemble,
    qos_of,
    without_effect,
)
from gangway.server.models.config_text import read_config
from gangway.server.models.python_settings import CODE_FILENAME, CODE_SUFFIX, ENVIRONMENT_PARAMETER, PythonSettings
from gangway.server.models.sequences import SequenceSettings
from gangway.server.models.settings import QueuePolicies

Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]  # path within the model's folder, bytes, mtime in ns, inode


@dataclass(frozen=True, eq=False)
class Override:
    """What a load request brought along. `config` or `folder` (of files) None: what the repository has."""

    config: ModelConfig | None
    folder: Path | None


@dataclass(frozen=True)
class ModelVersion:
    """One version that is to be served. `config` is as written: complete it with the compiled model's signature.

    `override`: what a client has sent in place of the repository's files. `stamp` tells whether the files are the same.
    `without_effect`: parts of the configuration without effect, for the log; only the highest version has it.
    `is_alone`: the file lies in no repository, and has no configuration.
    """

    name: str
    version: int
    path: Path  # the ONNX file, or model.py; an ensemble has none there
    config: ModelConfig
    qos: QosConfig
    stamp: Stamp = ()
    override: Override | None = None
    without_effect: tuple[str, ...] = ()
    is_alone: bool = False

    @property
    def title(self) -> str:
        """What people call it."""
        return f"{self.name}, version {self.version}"

    @property
    def is_ensemble(self) -> bool:
        """Whether it is made of other models, and has no file."""
        return is_ensemble(self.config)

    @property
    def is_python(self) -> bool:
        """Whether Python code computes it."""
        return not self.is_ensemble and self.path.suffix == CODE_SUFFIX

    @property
    def folder(self) -> Path:
        """The model's folder, which holds those of its versions; of a file alone the one in which it lies."""
        return self.path.parent if self.is_alone else self.path.parents[len(self.file.parts)]

    @property
    def file(self) -> Path:
        """Its file as seen from the folder of its version."""
        named = Path(self.config.default_model_filename or self.path.name)
        is_inside = not self.is_alone and self.path.parents[len(named.parts) - 1].name != str(self.version)
        return named / DEFAULT_MODEL_FILENAME if is_inside else named

    def is_same(self, other: "ModelVersion") -> bool:
        """Whether loading the other one would change nothing."""
        return self.stamp == other.stamp and self.override is other.override


@dataclass(frozen=True)
class BrokenModel:
    """An entry that cannot be served. `version` is WHOLE_MODEL when the reason concerns the model as a whole.

    `at_fault`: its requests ended worker processes.
    """

    name: str
    version: int
    reason: str
    at_fault: bool = False

    def __post_init__(self) -> None:
        # Names of files that are no UTF-8 have surrogates, which no message to a client can hold.
        object.__setattr__(self, "reason", self.reason.encode(errors="backslashreplace").decode())

    @property
    def is_whole(self) -> bool:
        """Whether the reason concerns no single version."""
        return self.version == WHOLE_MODEL


Entry = ModelVersion | BrokenModel


def stamp_of(folder: Path, version: int) -> Stamp:
    """Return the stamp of all files of this version: in its own folder, and those that belong to all versions.

    These are config.pbtxt, labels, and samples for warming up; not other versions, nor hidden files. Files are compared
    by name, size and time, and never read. Raises OSError.
    """
    return tuple(sorted([*_own(folder, folder / str(version)), *_shared(folder)]))


def _shared(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    for item in folder.iterdir():
        if item.name.startswith(".") or (item.name.isdigit() and item.is_dir()):
            continue
        if item.is_dir():
            yield from _own(folder, item)
        else:
            yield _stamp(folder, item)


def _own(folder: Path, part: Path) -> Iterator[tuple[str, int, int, int]]:
    for directory, folders, files in os.walk(part):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield _stamp(folder, Path(directory) / name)


def _stamp(folder: Path, path: Path) -> tuple[str, int, int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:  # a link that leads nowhere, or deleted since: that is a state, too
        return str(path.relative_to(folder)), -1, 0, 0
    return str(path.relative_to(folder)), status.st_size, status.st_mtime_ns, status.st_ino


CONFIG_PARAMETER = "config"
NOT_FOUND = "failed to load '{}', failed to poll from model repository"
NO_FOLDER = f"{NOT_FOUND}: no repository has a folder of this name"
WAIT_PARAMETER = "gangway_wait"  # false: the answer comes before the model is loaded
FILE_PREFIX = "file:"
MAX_FILES = 1024
MAX_CONFIG_CHARACTERS = 1 << 20
PREFIX = "gangway-override-"

Parameters = Mapping[str, pb.ModelRepositoryParameter]


class OverrideStore:
    """Keeps what load requests bring: a configuration in place of config.pbtxt, and the model's files.

    Files are kept in a temporary folder as long as the model is loaded. Any thread may call `take`.
    """

    def __init__(self) -> None:
        self._folders = TemporaryFolders()

    def take(self, path: str) -> tuple[Override | None, bool]:
        """Return what the request in this file brings along, None for nothing, and whether it waits for the load.

        Raises RequestError, FileNotFoundError when the front end that has the file has ended.
        """
        try:
            request = pb.RepositoryModelLoadRequest.FromString(Path(path).read_bytes() if path else b"")
        except DecodeError:
            invalid("not a RepositoryModelLoadRequest")
        name, parameters = request.model_name, request.parameters
        for key in parameters:
            if key not in (CONFIG_PARAMETER, WAIT_PARAMETER) and not key.startswith(FILE_PREFIX):
                invalid(f"unrecognized load parameter '{key}'")
        waits = _waits(parameters)
        config = _config(name, parameters)
        files = [key for key in parameters if key.startswith(FILE_PREFIX)]
        if not files:
            return (None if config is None else Override(config, None)), waits
        if config is None:
            _not_polled(name, "Load parameter 'config' must be specified for model file override")
        if len(files) > MAX_FILES:
            _not_polled(name, f"{len(files)} files are given, at most {MAX_FILES} are possible")
        return Override(config, self._write(name, parameters, files)), waits

    def remove(self, override: Override) -> None:
        """Remove the files of an override, if it has any."""
        if override.folder is not None:
            shutil.rmtree(override.folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all there is."""
        self._folders.close()

    def _write(self, name: str, parameters: Parameters, files: list[str]) -> Path:
        try:
            folder = self._folders.make()
        except OSError as error:
            unavailable(f"no place for the model's files: {error}")
        try:
            for key in files:
                _write_file(name, folder, key, parameters[key])
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder


class TemporaryFolders:
    """Folders that last as long as the server, in one that is made when the first is wanted. For any thread.

    A server that is killed leaves it behind; the next one removes it (`sweep_overrides`). A lock on it, which the
    kernel frees, tells whether its server still lives.
    """

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._root: Path | None = None
        self._lock_fd = -1

    def make(self) -> Path:
        """Return a new one. Raises OSError."""
        with self._making:
            if self._root is None:
                hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))  # from others, until it is locked
                self._lock_fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
                self._root = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        return Path(tempfile.mkdtemp(dir=self._root))

    def close(self) -> None:
        """Remove all of them."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock_fd)
            self._root = None


def sweep_overrides() -> list[Path]:
    """Remove the folders of servers that were killed; return their paths."""
    swept: list[Path] = []
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError:  # nothing can be written here, so nothing was
        return swept
    for folder in temporary.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another server is quicker, lives, or belongs to another user
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                    swept.append(folder)
            finally:
                os.close(descriptor)
    return swept


def _waits(parameters: Parameters) -> bool:
    if WAIT_PARAMETER not in parameters:
        return True
    if parameters[WAIT_PARAMETER].WhichOneof("parameter_choice") != "bool_param":
        invalid(f"Load parameter '{WAIT_PARAMETER}' must have bool type for its value")
    return parameters[WAIT_PARAMETER].bool_param


def _config(name: str, parameters: Parameters) -> ModelConfig | None:
    if CONFIG_PARAMETER not in parameters:
        return None
    parameter = parameters[CONFIG_PARAMETER]
    if parameter.WhichOneof("parameter_choice") != "string_param":
        invalid("Config parameter 'config' must have string type for its value")
    if len(parameter.string_param) > MAX_CONFIG_CHARACTERS:
        invalid(f"Config parameter 'config' has more than {MAX_CONFIG_CHARACTERS} characters")
    try:
        return json_format.Parse(parameter.string_param, ModelConfig())
    except (json_format.ParseError, RecursionError) as error:
        _not_polled(name, f"Config parameter 'config' is no model configuration in JSON: {error}")


def _write_file(name: str, folder: Path, key: str, parameter: pb.ModelRepositoryParameter) -> None:
    if parameter.WhichOneof("parameter_choice") != "bytes_param":
        _not_polled(name, f"File parameter '{key}' must have bytes type for its value")
    relative = key.removeprefix(FILE_PREFIX)
    target = Path(os.path.normpath(folder / relative.lstrip("/")))
    if "\0" in relative or not target.is_relative_to(folder) or target == folder:
        _not_polled(name, f"Invalid file parameter '{key}': it must stay within model directory.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(parameter.bytes_param)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            unavailable(f"no place for the model's files: {error.strerror}")
        # Triton's public clients know this status for a name that no file can have.
        _not_polled(name, f"Invalid file parameter '{key}': {error.strerror}", StatusCode.INTERNAL)


def _not_polled(name: str, reason: str, code: StatusCode = StatusCode.INVALID_ARGUMENT) -> NoReturn:
    raise RequestError(code, f"{NOT_FOUND.format(name)}: {reason}")


CONFIG_FILENAME = "config.pbtxt"
CONFIGS = "configs"  # a folder of a model with further configurations, by name
NO_MODELS = ("lost+found",)  # folders of file systems
MOST_INSTEAD = 3  # files that lie where a model's file is missing, in a message
LAYOUT = f"NAME/1/{DEFAULT_MODEL_FILENAME}"


def find_models(directories: Sequence[Path], files: Iterable[tuple[str, Path]] = ()) -> dict[str, list[Path]]:
    """Return the folders of every model, by name, or its file: more than one if more than one repository has it.

    Raises OSError when a directory cannot be listed.
    """
    found = {name: [path] for name, path in files}
    for directory in directories:
        for folder in directory.iterdir():
            if folder.is_dir() and _is_model(folder.name):
                found.setdefault(folder.name, []).append(folder)
    return dict(sorted(found.items()))


def misplaced_models(directories: Sequence[Path], served: Collection[Path] = ()) -> Iterator[str]:
    """Yield a sentence for each thing that cannot be served because of where it lies, or how it is called.

    `served`: files that are models without a folder.

    Raises OSError when a directory cannot be listed.
    """
    for directory in directories:
        items = sorted(directory.iterdir())
        for item in items:
            if item.suffix == ONNX_SUFFIX and item.is_file() and item not in served:
                place = directory / item.stem / "1" / DEFAULT_MODEL_FILENAME
                yield f"{item} is not served: a model lies in folders of its own, as {place}"
            elif item.is_dir() and not _is_utf8(item.name):
                yield f"{item} is not served: a folder's name is the model's, and must be UTF-8"
        if (directory / CONFIG_FILENAME).is_file() or any(_is_version(item) for item in items):
            yield f"{directory} looks like a model, not like a repository: name the folder above it"
        elif not any(item in served or (item.is_dir() and _is_model(item.name)) for item in items):
            yield f"{directory} holds no models: a model lies in it as {LAYOUT}"


def _is_version(folder: Path) -> bool:
    return _version_of(folder.name) is not None and os.path.isfile(folder / DEFAULT_MODEL_FILENAME)  # never raises


def _is_model(name: str) -> bool:
    return not name.startswith(".") and name not in NO_MODELS and _is_utf8(name)


def _is_utf8(name: str) -> bool:
    """Whether clients can be told of a name; what is no UTF-8 on the disk has surrogates in Python."""
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


def read_only_one(
    name: str, folders: Sequence[Path], override: Override | None = None, config_name: str = ""
) -> list[Entry]:
    """Return the versions of a model that one folder alone must have, or one file."""
    if len(folders) > 1:
        return [BrokenModel(name, WHOLE_MODEL, DUPLICATE)]
    path = folders[0]
    is_file = path.suffix == ONNX_SUFFIX and not path.is_dir()
    return [_read_file(name, path, override)] if is_file else read_model(path, name, override, config_name)


def _read_file(name: str, path: Path, override: Override | None) -> Entry:
    """Return the one version of a model that is a file alone."""
    config = ModelConfig() if override is None or override.config is None else override.config
    try:
        qos = _checked(config, name)
        check_onnx(config)
        in_vain = without_effect(config)
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        beside = [path, *(path.with_name(path.name + suffix) for suffix in DATA_SUFFIXES), path.with_suffix(".data")]
        stamp = tuple(_stamp(path.parent, file) for file in beside)
    except (ValueError, OSError) as error:
        return BrokenModel(name, WHOLE_MODEL, str(error))
    return ModelVersion(name, 1, path, config, qos, stamp, override, in_vain, is_alone=True)


def read_model(folder: Path, name: str = "", override: Override | None = None, config_name: str = "") -> list[Entry]:
    """Return the versions of one model that its policy asks for (default: the latest), or why there are none.

    `config_name`: of the configuration among `CONFIGS` that counts in the place of config.pbtxt, where it is there.
    """
    name = name or folder.name
    try:
        config = _config_of(folder, override, config_name)
        qos = _checked(config, name)
        versions = _wanted_versions(config, _present_versions(folder))
        stamps = {version: stamp_of(folder, version) for version in versions}
        paths = {version: file_of(config, folder / str(version)) for version in versions}
        reasons = {version: _missing(config, path, folder) for version, path in paths.items()}
        in_vain = {version: without_effect(config, paths[version].suffix == CODE_SUFFIX) for version in versions[-1:]}
        if any(path.suffix == CODE_SUFFIX for path in paths.values()):
            PythonSettings.of(config)
            _require_own_code(override)
        elif not is_ensemble(config):
            check_onnx(config)
    except (ValueError, OSError) as error:  # ConfigError among others: hostile text may be wrong in any way
        return [BrokenModel(name, WHOLE_MODEL, str(error))]
    return [
        BrokenModel(name, version, reasons[version])
        if reasons[version]
        else ModelVersion(name, version, path, config, qos, stamps[version], override, in_vain.get(version, ()))
        for version, path in paths.items()
    ]


def _checked(config: ModelConfig, name: str) -> QosConfig:
    """Return the latency target of a model's configuration. Raises ConfigError for what is wrong with that."""
    check_supported(config, name)
    qos = qos_of(config)
    QueuePolicies.of(config)
    SequenceSettings.of(config)
    return qos


def _require_own_code(override: Override | None) -> None:
    """Raise ConfigError if a client's load request would have the server run code that its owner has not put there."""
    if override is not None and override.folder is not None:
        raise ConfigError("code in Python cannot come with a load request, only from the repository")
    if override is not None and override.config is not None and ENVIRONMENT_PARAMETER in override.config.parameters:
        raise ConfigError(
            f"parameter {ENVIRONMENT_PARAMETER} cannot come with a load request, only from the repository"
        )


def file_of(config: ModelConfig, folder: Path) -> Path:
    """Return the file of a version. It is model.py if the configuration says so, or nothing and there is no other."""
    code, usual = folder / CODE_FILENAME, folder / DEFAULT_MODEL_FILENAME
    says_nothing = not (foreign_engine(config) or config.backend or config.platform)
    if config.default_model_filename:
        return file_at(folder / config.default_model_filename)
    if code.is_file() and (config.backend == PYTHON_BACKEND or (says_nothing and not usual.exists())):
        return code
    return file_at(usual)


def file_at(path: Path) -> Path:
    """Return an ONNX file. A folder in its place has it under the usual name, beside its external data."""
    inside = path / DEFAULT_MODEL_FILENAME
    return inside if inside.is_file() else path


def _missing(config: ModelConfig, path: Path, folder: Path) -> str:
    """Say why a version's file cannot be served, nothing if it can. Whatever is named to execute it, ONNX is ONNX.

    `folder`: of the model.
    """
    if is_ensemble(config):
        return ""
    if path.suffix == CODE_SUFFIX and config.backend in ("", PYTHON_BACKEND):
        return "" if path.is_file() else f"there is no {path.relative_to(folder)}"
    foreign, found, place = foreign_engine(config), path.is_file(), path.relative_to(folder)
    code = place.with_name(CODE_FILENAME)
    why = f"there is no {place}{_instead(path.parent)}" if not found else f"{place} is no {ONNX_SUFFIX} file"
    if path.is_dir():
        why = f"{place} is a folder without {DEFAULT_MODEL_FILENAME}"
    if foreign and path.with_name(CODE_FILENAME).exists():
        why = f"there is {code}"  # which would do more than execute the ONNX file
    elif found and (not foreign or path.suffix == ONNX_SUFFIX):
        return ""
    if config.backend == PYTHON_BACKEND and not found:
        return f"there is neither {code} nor {place}"
    ours = f"only ONNX ('{PLATFORM}', '{BACKEND}') and Python ('{PYTHON_BACKEND}')"
    return f"{foreign} is not supported, {ours}, and {why}" if foreign else why


def _instead(folder: Path) -> str:
    """Return what lies in a folder that lacks a model's file, for a message: its first files."""
    names = sorted(item.name for item in folder.iterdir() if item.is_file()) if folder.is_dir() else []
    more = ", ..." * (len(names) > MOST_INSTEAD)
    return f", only {', '.join(names[:MOST_INSTEAD])}{more}" if names else ""


def _config_of(folder: Path, override: Override | None, name: str) -> ModelConfig:
    if override is not None and override.config is not None:
        return override.config
    named, path = folder / CONFIGS / f"{name}.pbtxt", folder / CONFIG_FILENAME
    if name and named.exists():
        return read_config(named)
    return read_config(path) if path.exists() else ModelConfig()


def _present_versions(folder: Path) -> list[int]:
    """Numbered folders, ascending; other names are no versions, nor are, as in Triton, numbers with leading zeros."""
    names = [item.name for item in folder.iterdir() if item.is_dir()]
    versions = sorted(version for name in names if (version := _version_of(name)) is not None)
    if not versions:
        numbers = [name for name in names if name.isdecimal()]
        loose = [item.name for item in folder.iterdir() if item.suffix == ONNX_SUFFIX]
        hint = f": {min(numbers)} has leading zeros, or is above {MAX_VERSION}" if numbers else ""
        hint = hint or (f": {min(loose)} must lie in one" if loose else "")
        raise ConfigError(f"there is no version folder (such as '1'){hint}")
    return versions


def _version_of(name: str) -> int | None:
    """Return the version that a folder of this name holds; None for any other name."""
    if not (name.isascii() and name.isdigit()) or (name.startswith("0") and name != "0"):
        return None
    return number if (number := int(name)) <= MAX_VERSION else None


def _wanted_versions(config: ModelConfig, present: list[int]) -> list[int]:
    policy = config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return present
    if choice == "specific":
        missing = [version for version in policy.specific.versions if version not in present]
        if missing or not policy.specific.versions:
            raise ConfigError(f"version_policy asks for {list(policy.specific.versions)}, but there are {present}")
        return sorted(set(policy.specific.versions))
    return present[-max(policy.latest.num_versions, 1) :]
