"""Python models on their way from the repository to workers: configuration, description, environment."""

import hashlib
import json
import os
import shutil
import sys
import tarfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from google.protobuf import json_format

from gangway.artifact.format import FORMAT_VERSION, ITEM_BYTES, Engine, Layer, Manifest, TargetSpec, TensorSpec, Version
from gangway.artifact.reader import ArtifactError, read_manifest
from gangway.artifact.writer import DescriptionWriter
from gangway.base.host_limits import memory_limit_bytes
from gangway.protos.model_config_pb2 import ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput
from gangway.server.control.repository.repository import ModelVersion, TemporaryFolders
from gangway.server.control.supervisor.python_instances import InstancePlan
from gangway.server.errors import ConfigError, ModelLoadError, shortened
from gangway.server.models.config import MAX_CONFIG_BYTES, PYTHON_BACKEND, check_supported
from gangway.server.models.config_table import IDLE_PARAMETER
from gangway.server.models.message_json import to_json
from gangway.server.models.python_settings import CODE_FILENAME, PythonSettings
from gangway.server.models.sequences import SequenceSettings, complete_sequences, hidden_inputs
from gangway.server.models.settings import ModelBatching, idle_unload_s_of, response_bounds_ns
from gangway.server.models.tensors import datatype_name, spec_of
from gangway.server.options.server import ModelOptions

DATATYPES: Final = frozenset(ITEM_BYTES)
COMPLETED_FIELDS: Final = ("max_batch_size", "input", "output", "model_transaction_policy")
# Of the memory limit, the data of an instance: many hold their weights twice while they load.
INSTANCE_MEMORY_SHARE: Final = 2 / 3
INTERPRETERS: Final = ("bin/python3", "bin/python")


@dataclass(frozen=True)
class Environment:
    """A Python with its packages: the interpreter, and variables for the process."""

    python: str = sys.executable
    variables: tuple[tuple[str, str], ...] = ()


class Environments:
    """Finds the environments of models; archives are unpacked once, and stay until `close`.

    `default`: of models that name none; empty: the server's own.
    """

    def __init__(self, default: str = "") -> None:
        self._default = default
        self._folders = TemporaryFolders()
        self._lock = threading.Lock()
        self._unpacked: dict[tuple[Path, int, int], Future[Path]] = {}

    def of(self, settings: PythonSettings, folder: Path) -> Environment:
        """Return the environment of the model in `folder`. Blocks: archives are unpacked. Raises ModelLoadError."""
        settings = replace(settings, environment=settings.environment or self._default)
        if not settings.environment:
            return Environment()
        path = settings.environment_path(folder)
        try:
            if path.is_file() and not os.access(path, os.X_OK):
                path = self._archive(path)
            if path.is_file():
                return Environment(str(path))
            python = next((path / name for name in INTERPRETERS if (path / name).is_file()), None)
        except (OSError, tarfile.TarError, EOFError) as error:
            raise ModelLoadError(f"EXECUTION_ENV_PATH '{path}' cannot be used: {error}") from error
        if python is None:
            raise ModelLoadError(
                f"EXECUTION_ENV_PATH '{path}' is no environment: expected an archive of conda-pack, a folder with"
                f" {INTERPRETERS[0]}, or an interpreter"
            )
        search = os.pathsep.join((str(python.parent), os.environ.get("PATH", os.defpath)))
        return Environment(str(python), (("PATH", search), ("VIRTUAL_ENV", str(path))))

    def close(self) -> None:
        """Remove what was unpacked."""
        self._folders.close()

    def _archive(self, path: Path) -> Path:
        status = path.stat()
        key = path, status.st_size, status.st_mtime_ns
        with self._lock:  # models load beside each other, in threads
            is_first = key not in self._unpacked
            unpacked = self._unpacked.setdefault(key, Future())
        if is_first:
            try:
                folder = self._folders.make()
                with tarfile.open(path) as archive:
                    archive.extractall(folder, filter="tar")
                unpacked.set_result(folder)
            except BaseException as error:
                self._unpacked.pop(key)  # the next load tries again
                unpacked.set_exception(error)
        return unpacked.result()


def check_python(config: ModelConfig) -> PythonSettings:
    """Return what a configuration says. Raises ConfigError for what Python models cannot have."""
    sequences = SequenceSettings.of(config)
    if sequences is not None and sequences.states:
        raise ConfigError("sequence_batching: a Python model keeps its state itself, and 'state' is not supported")
    if sequences is not None and config.model_transaction_policy.decoupled:
        raise ConfigError("sequence_batching is not supported for decoupled models")
    if config.model_transaction_policy.decoupled and config.response_cache.enable:
        raise ConfigError("response_cache: the responses of a decoupled model are not kept")
    if idle_unload_s_of(config, 0.0):
        raise ConfigError(f"parameter {IDLE_PARAMETER}: instances of a Python model stay, so it must be 0")
    return PythonSettings.of(config)


def plan_of(
    entry: ModelVersion, settings: PythonSettings, environment: Environment, completes: bool, options: ModelOptions
) -> InstancePlan:
    """Return how to start the instances of a model. `completes`: they may complete its configuration."""
    config = ModelConfig()
    config.CopyFrom(entry.config)
    config.name, config.backend = entry.name, PYTHON_BACKEND
    return InstancePlan(
        entry.name,
        entry.version,
        entry.folder,
        str(entry.file),
        json.dumps(to_json(config)),
        completes,
        settings.kinds,
        instance_names(entry.name, config),
        settings.memory_mib << 20 or int(memory_limit_bytes() * INSTANCE_MEMORY_SHARE),
        environment.python,
        dict(environment.variables),
        options.python_start_seconds,
        options.strict_python_outputs,
    )


def instance_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return how the instances of model `name` are called, as in Triton: by their group, and a number within it."""
    groups = [(group.name or f"{name}_{index}", group.count) for index, group in enumerate(config.instance_group)]
    return tuple(f"{group}_{number}" for group, count in groups or [(name, 1)] for number in range(max(1, count)))


def completed_config(text: str, config: ModelConfig, name: str) -> ModelConfig:
    """Return the configuration of model `name` as model.py has completed it (`text`, JSON). Raises ConfigError."""
    try:
        given = json_format.Parse(text, ModelConfig())
    except (json_format.ParseError, RecursionError) as error:
        raise ConfigError(f"auto_complete_config returns no model configuration: {error}") from error
    completed = _merged(config, given)
    check_supported(completed, name)
    response_bounds_ns(completed)
    completed.name, completed.backend, completed.platform = name, PYTHON_BACKEND, config.platform
    completed.default_model_filename = config.default_model_filename or CODE_FILENAME
    if not completed.HasField("version_policy"):
        completed.version_policy.latest.num_versions = 1
    if not completed.instance_group:
        completed.instance_group.add(name=name, count=1, kind=ModelInstanceGroup.KIND_CPU)
    for index, group in enumerate(completed.instance_group):
        group.name = group.name or f"{name}_{index}"
        group.count = max(1, group.count)
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            group.kind = ModelInstanceGroup.KIND_CPU
    for tensor in completed.input:
        _check_tensor(tensor, "input")
    for output in completed.output:
        _check_tensor(output, "output")
    for kind, tensors in (("input", completed.input), ("output", completed.output)):
        if not tensors:
            raise ConfigError(f"must specify '{kind}' in config.pbtxt, or in auto_complete_config of {CODE_FILENAME}")
    complete_sequences(completed)
    for hidden in hidden_inputs(completed).intersection(tensor.name for tensor in completed.input):
        raise ConfigError(f"input '{shortened(hidden)}' is one of sequence_batching, too: clients cannot send it")
    if completed.ByteSize() > MAX_CONFIG_BYTES:
        raise ConfigError(f"the completed configuration has {completed.ByteSize()} bytes, {MAX_CONFIG_BYTES} can be")
    return completed


def _merged(config: ModelConfig, given: ModelConfig) -> ModelConfig:
    """Return a configuration with what a model can complete of it, as in Triton: what `ModelConfig` has methods for."""
    merged = ModelConfig()
    merged.CopyFrom(config)
    for field in COMPLETED_FIELDS:
        merged.ClearField(field)
    if merged.WhichOneof("scheduling_choice") is None and given.HasField("dynamic_batching"):
        merged.dynamic_batching.CopyFrom(given.dynamic_batching)
    if given.HasField("model_transaction_policy"):
        merged.model_transaction_policy.CopyFrom(given.model_transaction_policy)
    merged.max_batch_size = given.max_batch_size
    merged.input.extend(given.input)
    merged.output.extend(given.output)
    return merged


def _check_tensor(tensor: ModelInput | ModelOutput, kind: str) -> None:
    where = f"{kind} '{shortened(tensor.name)}'"
    if datatype_name(tensor.data_type) not in DATATYPES:
        raise ConfigError(
            f"{where} has the data_type {datatype_name(tensor.data_type)}, which a Python model cannot have"
        )
    if not tensor.dims and not tensor.HasField("reshape"):
        raise ConfigError(f"must specify 'dims' of {where}")
    if any(size < 1 and size != -1 for size in tensor.dims):
        raise ConfigError(f"{where}: dims are {list(tensor.dims)}, expected 1 or more, or -1 for any size")
    if tensor.HasField("reshape"):
        dims, reshape = list(tensor.dims), list(tensor.reshape.shape)
        if any(size < 1 and size != -1 for size in reshape):
            raise ConfigError(f"{where}: reshape is {reshape}, expected 1 or more, or -1 for any size")
        if _sizes_between(dims) != _sizes_between(reshape):
            raise ConfigError(f"{where}: dims {dims} and reshape {reshape} differ in size")


def _sizes_between(dims: Sequence[int]) -> list[int]:
    """Return the elements before, between and after the dimensions of any size."""
    elements = [1]
    for size in dims:
        if size == -1:
            elements.append(1)
        else:
            elements[-1] *= size
    return elements


def python_batching(config: ModelConfig) -> ModelBatching:
    """Return how requests are joined: as in Triton, with dynamic_batching only. Its times are not known beforehand."""
    batching = ModelBatching.of(config)
    if not config.HasField("dynamic_batching"):
        return replace(batching, joins=False)
    return replace(batching, max_delay_us=batching.max_delay_us or 0.0)


def describe(config: ModelConfig, name: str) -> Manifest:
    """Return the description of a model with a completed configuration, for workers."""
    sequences, shape = SequenceSettings.of(config), (-1, 1) if config.max_batch_size > 0 else (1,)
    controls = [TensorSpec(each.name, each.datatype, shape, 0) for each in (sequences.controls if sequences else ())]
    inputs = (*(spec_of(tensor, config) for tensor in config.input), *controls)
    outputs = tuple(spec_of(tensor, config) for tensor in config.output)
    content: Mapping[str, object] = {
        "name": name,
        "batched": config.max_batch_size > 0,
        "tensors": [asdict(tensor) for tensor in (*inputs, *outputs)],
        "inputs": len(inputs),
        "format": FORMAT_VERSION,
    }
    return Manifest(
        key=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        model_name=name,
        batched=config.max_batch_size > 0,
        inputs=inputs,
        outputs=outputs,
        layers=(Layer("python", "whole model", "", (), (Version("whole", 1, "model.py"),), 0, 0, 1),),
        arena_bytes=0,
        target=TargetSpec("any", "", 0, ()),
        files={},
        engine=Engine.PYTHON,
    )


def write_description(cache_dir: Path, manifest: Manifest) -> None:
    """Put a description into the cache, unless it is there. Raises OSError."""
    folder = cache_dir / manifest.key
    try:
        read_manifest(folder)
    except ArtifactError:
        shutil.rmtree(folder, ignore_errors=True)
        with DescriptionWriter(folder) as writer:
            writer.commit(manifest)
