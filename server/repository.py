"""A Triton model repository on disk: DIR/MODEL/config.pbtxt and DIR/MODEL/VERSION/model.onnx."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.ensemble.config import is_ensemble
from gangway.server.front_end_messages import DUPLICATE
from gangway.server.model_config import (
    DEFAULT_MODEL_FILENAME,
    ConfigError,
    Qos,
    check_supported,
    qos_of,
    read_config,
)
from gangway.server.model_stamp import Stamp, stamp_of
from gangway.server.overrides import Override
from gangway.server.queue_policy import QueuePolicies
from gangway.server.sequence.settings import SequenceSettings

CONFIG_FILENAME = "config.pbtxt"


@dataclass(frozen=True)
class ModelVersion:
    """One version that is to be served. `config` is as written: complete it with the compiled model's signature.

    `override`: what a client has sent in place of the repository's files. `stamp` tells whether the files are the same.
    """

    name: str
    version: int
    path: Path  # the ONNX file; an ensemble has none there
    config: ModelConfig
    qos: Qos
    stamp: Stamp = ()
    override: Override | None = None

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
    """An entry that cannot be served. `version` is 0 when the reason concerns the model as a whole."""

    name: str
    version: int
    reason: str


Entry = ModelVersion | BrokenModel


def find_models(directories: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the folders of every model, by name: more than one if more than one repository has it.

    Raises OSError when a directory cannot be listed.
    """
    found: dict[str, list[Path]] = {}
    for directory in directories:
        for folder in directory.iterdir():
            if folder.is_dir() and not folder.name.startswith("."):
                found.setdefault(folder.name, []).append(folder)
    return dict(sorted(found.items()))


def read_repository(directories: Sequence[Path]) -> list[Entry]:
    """Return what is to be served, by name and version. One broken model does not hinder the others.

    Raises OSError when a directory cannot be listed.
    """
    return [entry for folders in find_models(directories).values() for entry in read_only_one(folders)]


def read_only_one(folders: Sequence[Path]) -> list[Entry]:
    """Return the versions of a model that one folder alone must have."""
    if len(folders) > 1:
        return [BrokenModel(folders[0].name, 0, DUPLICATE)]
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
    except (ValueError, OSError) as error:  # ConfigError among others: hostile text may be wrong in any way
        return [BrokenModel(name, 0, str(error))]
    filename = config.default_model_filename or DEFAULT_MODEL_FILENAME
    return [
        ModelVersion(name, version, folder / str(version) / filename, config, qos, stamps[version], override)
        if is_ensemble(config) or (folder / str(version) / filename).is_file()
        else BrokenModel(name, version, f"there is no {version}/{filename}")
        for version in versions
    ]


def _config_of(folder: Path, override: Override | None) -> ModelConfig:
    if override is not None and override.config is not None:
        return override.config
    path = folder / CONFIG_FILENAME
    return read_config(path) if path.exists() else ModelConfig()


def _present_versions(folder: Path) -> list[int]:
    """Numbered folders, ascending; like Triton, other names, 0 and leading zeros are no versions."""
    names = [item.name for item in folder.iterdir() if item.is_dir()]
    versions = sorted(int(name) for name in names if name.isascii() and name.isdigit() and not name.startswith("0"))
    if not versions:
        raise ConfigError("there is no version folder (such as '1')")
    return versions


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
