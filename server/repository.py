"""A Triton model repository on disk: DIR/MODEL/config.pbtxt and DIR/MODEL/VERSION/model.onnx."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.config_check import BACKEND, PLATFORM, foreign_engine, without_effect
from gangway.server.config_error import ConfigError
from gangway.server.ensemble.config import is_ensemble
from gangway.server.front_end_messages import DUPLICATE, MAX_VERSION, WHOLE_MODEL
from gangway.server.model_config import DEFAULT_MODEL_FILENAME, ONNX_SUFFIX, Qos, check_supported, qos_of, read_config
from gangway.server.model_stamp import Stamp, stamp_of
from gangway.server.overrides import Override
from gangway.server.queue_policy import QueuePolicies
from gangway.server.sequence.settings import SequenceSettings

CONFIG_FILENAME = "config.pbtxt"
CODE_FILENAME = "model.py"  # of Triton's Python backend
NO_MODELS = ("lost+found",)  # folders of file systems
LAYOUT = f"NAME/1/{DEFAULT_MODEL_FILENAME}"


@dataclass(frozen=True)
class ModelVersion:
    """One version that is to be served. `config` is as written: complete it with the compiled model's signature.

    `override`: what a client has sent in place of the repository's files. `stamp` tells whether the files are the same.
    `without_effect`: what the model's owner has said in vain, for the log; only the highest version has it.
    """

    name: str
    version: int
    path: Path  # the ONNX file; an ensemble has none there
    config: ModelConfig
    qos: Qos
    stamp: Stamp = ()
    override: Override | None = None
    without_effect: tuple[str, ...] = ()

    @property
    def is_ensemble(self) -> bool:
        """Whether it is made of other models, and has no file."""
        return is_ensemble(self.config)

    @property
    def folder(self) -> Path:
        """The model's folder, which holds those of its versions."""
        return self.path.parents[1]

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


def find_models(directories: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the folders of every model, by name: more than one if more than one repository has it.

    Raises OSError when a directory cannot be listed.
    """
    found: dict[str, list[Path]] = {}
    for directory in directories:
        for folder in directory.iterdir():
            if folder.is_dir() and _is_model(folder.name):
                found.setdefault(folder.name, []).append(folder)
    return dict(sorted(found.items()))


def misplaced(directories: Sequence[Path]) -> Iterator[str]:
    """Yield a sentence for each thing that cannot be served because of where it lies, or how it is called.

    Raises OSError when a directory cannot be listed.
    """
    for directory in directories:
        items = sorted(directory.iterdir())
        for item in items:
            if item.suffix == ONNX_SUFFIX and item.is_file():
                place = directory / item.stem / "1" / DEFAULT_MODEL_FILENAME
                yield f"{item} is not served: a model lies in folders of its own, as {place}"
            elif item.is_dir() and not _is_utf8(item.name):
                yield f"{item} is not served: a folder's name is the model's, and must be UTF-8"
        if (directory / CONFIG_FILENAME).is_file() or any(_is_version(item) for item in items):
            yield f"{directory} looks like a model, not like a repository: name the folder above it"
        elif not any(item.is_dir() and _is_model(item.name) for item in items):
            yield f"{directory} holds no models: a model lies in it as {LAYOUT}"


def _is_version(folder: Path) -> bool:
    return _version_of(folder.name) is not None and os.path.isfile(folder / DEFAULT_MODEL_FILENAME)  # never raises


def _is_model(name: str) -> bool:
    return not name.startswith(".") and name not in NO_MODELS and _is_utf8(name)


def _is_utf8(name: str) -> bool:
    """Whether clients can be told of a name; what is no UTF-8 on the disk has surrogates in Python."""
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


def read_repository(directories: Sequence[Path]) -> list[Entry]:
    """Return what is to be served, by name and version. One broken model does not hinder the others.

    Raises OSError when a directory cannot be listed.
    """
    return [entry for folders in find_models(directories).values() for entry in read_only_one(folders)]


def read_only_one(folders: Sequence[Path]) -> list[Entry]:
    """Return the versions of a model that one folder alone must have."""
    if len(folders) > 1:
        return [BrokenModel(folders[0].name, WHOLE_MODEL, DUPLICATE)]
    return read_model(folders[0])


def read_model(folder: Path, name: str = "", override: Override | None = None) -> list[Entry]:
    """Return the versions of one model that its policy asks for (default: the latest), or why there are none."""
    name = name or folder.name
    try:
        config = _config_of(folder, override)
        check_supported(config, name)
        qos = qos_of(config)
        QueuePolicies.of(config)
        SequenceSettings.of(config)
        versions = _wanted_versions(config, _present_versions(folder))
        stamps = {version: stamp_of(folder, version) for version in versions}
        filename = config.default_model_filename or DEFAULT_MODEL_FILENAME
        paths = {version: folder / str(version) / filename for version in versions}
        reasons = {version: _missing(config, path) for version, path in paths.items()}
        in_vain = dict.fromkeys(versions[-1:], without_effect(config))
    except (ValueError, OSError) as error:  # ConfigError among others: hostile text may be wrong in any way
        return [BrokenModel(name, WHOLE_MODEL, str(error))]
    return [
        BrokenModel(name, version, reasons[version])
        if reasons[version]
        else ModelVersion(name, version, path, config, qos, stamps[version], override, in_vain.get(version, ()))
        for version, path in paths.items()
    ]


def _missing(config: ModelConfig, path: Path) -> str:
    """Say why a version's file cannot be served, nothing if it can. Whatever is named to execute it, ONNX is ONNX."""
    if is_ensemble(config):
        return ""
    foreign, found, place = foreign_engine(config), path.is_file(), f"{path.parent.name}/{path.name}"
    why = f"there is no {place}" if not found else f"{place} is no {ONNX_SUFFIX} file"
    if foreign and path.with_name(CODE_FILENAME).exists():
        why = f"there is {path.parent.name}/{CODE_FILENAME}"  # which would do more than execute the ONNX file
    elif found and (not foreign or path.suffix == ONNX_SUFFIX):
        return ""
    return f"{foreign} is not supported, only ONNX ('{PLATFORM}', '{BACKEND}'), and {why}" if foreign else why


def _config_of(folder: Path, override: Override | None) -> ModelConfig:
    if override is not None and override.config is not None:
        return override.config
    path = folder / CONFIG_FILENAME
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
