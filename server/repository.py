"""A Triton model repository on disk: DIR/MODEL/config.pbtxt and DIR/MODEL/VERSION/model.onnx."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.model_config import (
    DEFAULT_MODEL_FILENAME,
    ConfigError,
    Qos,
    check_supported,
    qos_of,
    read_config,
)
from gangway.server.queue_policy import QueuePolicies


@dataclass(frozen=True)
class ModelVersion:
    """One version that is to be served. `config` is as written: complete it with the compiled model's signature."""

    name: str
    version: int
    path: Path  # the ONNX file
    config: ModelConfig
    qos: Qos


@dataclass(frozen=True)
class BrokenModel:
    """An entry that cannot be served. `version` is 0 when the reason concerns the model as a whole."""

    name: str
    version: int
    reason: str


def read_repository(directories: Sequence[Path]) -> list[ModelVersion | BrokenModel]:
    """Return what is to be served, by name and version. One broken model does not hinder the others.

    Raises OSError when a directory cannot be listed.
    """
    folders = [
        folder
        for directory in directories
        for folder in directory.iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
    ]
    times = Counter(folder.name for folder in folders)
    found: list[ModelVersion | BrokenModel] = []
    for folder in sorted(folders, key=lambda folder: folder.name):
        if times[folder.name] == 1:
            found += read_model(folder)
    found += [BrokenModel(name, 0, "more than one repository has it") for name, count in times.items() if count > 1]
    return sorted(found, key=lambda entry: (entry.name, entry.version))


def read_model(folder: Path) -> list[ModelVersion | BrokenModel]:
    """Return the versions of one model that its policy asks for (default: the latest), or why there are none."""
    name = folder.name
    try:
        config_path = folder / "config.pbtxt"
        config = read_config(config_path) if config_path.exists() else ModelConfig()
        check_supported(config, name)
        qos = qos_of(config)
        QueuePolicies.of(config)
        versions = _wanted_versions(config, _present_versions(folder))
    except (ConfigError, OSError) as error:
        return [BrokenModel(name, 0, str(error))]
    filename = config.default_model_filename or DEFAULT_MODEL_FILENAME
    return [
        ModelVersion(name, version, folder / str(version) / filename, config, qos)
        if (folder / str(version) / filename).is_file()
        else BrokenModel(name, version, f"there is no {version}/{filename}")
        for version in versions
    ]


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
