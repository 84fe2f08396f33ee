"""A model's config, completed from and checked against what the model itself says (the signature in its artifact).

The signature comes from the compiled artifact's manifest, not from the ONNX file: no serving process reads ONNX, and a
start from a warm cache touches no model file at all.
"""

import math
from collections.abc import Sequence
from typing import Final

from gangway.artifact.format import MAX_TASKS, Engine, Manifest, TensorSpec, staging_bytes
from gangway.protos.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from gangway.server.errors import ConfigError, shortened
from gangway.server.models.config import (
    BACKEND,
    DEFAULT_MODEL_FILENAME,
    ENGINE_PARAMETER,
    FALLBACK_PARAMETER,
    LEAST_TARGET_PARAMETER,
    MAX_CONFIG_BYTES,
    PLATFORM,
    check_supported,
)
from gangway.server.models.sequences import DEFAULT_IDLE_US, check_hidden, hidden_inputs, hidden_outputs
from gangway.server.models.settings import response_bounds_ns
from gangway.server.models.tensors import datatype_name, datatype_value
from gangway.server.options.server import DEFAULT_MAX_BATCH_SIZE

MOST_ROWS: Final = (1 << 31) - 1

Tensor = ModelInput | ModelOutput


def complete_config(
    config: ModelConfig,
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    batched: bool,
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
) -> ModelConfig:
    """Return a copy of `config` with everything filled in that the model `name` determines.

    A config that lists no tensors gets the default max_batch_size if the first dimension may be a batch (`batched`), as
    in Triton; one that lists tensors means what it says. Raises ConfigError where config and model differ.
    """
    check_supported(config, name)
    response_bounds_ns(config)  # raises what is wrong with them
    complete = ModelConfig()
    complete.CopyFrom(config)
    complete.name = name
    complete.platform, complete.backend = PLATFORM, BACKEND
    complete.default_model_filename = config.default_model_filename or DEFAULT_MODEL_FILENAME
    if not config.HasField("version_policy"):
        complete.version_policy.latest.num_versions = 1
    if not (config.max_batch_size or config.input or config.output) and batched:
        complete.max_batch_size = default_max_batch_size
    if complete.max_batch_size and not batched:
        obstacle = _batch_obstacle(inputs, outputs)
        remedy = "set max_batch_size: 0 and write the batch in dims"
        raise ConfigError(f"max_batch_size is {complete.max_batch_size}, but {obstacle} {remedy}")
    _complete_sequences(complete)
    hidden = hidden_inputs(complete)
    for spec in inputs if not config.input else ():
        if spec.name not in hidden:
            complete.input.add(name=spec.name)
    states = hidden_outputs(complete)
    for spec in outputs if not config.output else ():
        if spec.name not in states:
            complete.output.add(name=spec.name)
    check_hidden(complete, inputs, outputs)
    _fit_tensors(complete.input, inputs, "input", complete.max_batch_size > 0)
    _fit_tensors(complete.output, outputs, "output", complete.max_batch_size > 0)
    for tensor in complete.input:
        tensor.optional = next(spec.optional for spec in inputs if spec.name == tensor.name)
    known = hidden.union(tensor.name for tensor in complete.input)
    missing = [spec.name for spec in inputs if spec.name not in known]
    if missing:
        raise ConfigError(f"the config leaves out input {_quoted(missing)} of the ONNX model")
    if complete.ByteSize() > MAX_CONFIG_BYTES:
        size_bytes = complete.ByteSize()
        raise ConfigError(f"the completed configuration has {size_bytes} bytes, {MAX_CONFIG_BYTES} are possible")
    return complete


def _complete_sequences(config: ModelConfig) -> None:
    """Fill in what Triton does of `sequence_batching`."""
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US
    if batching.HasField("oldest") and not batching.oldest.preferred_batch_size and config.max_batch_size:
        batching.oldest.preferred_batch_size.append(config.max_batch_size)


def optional_inputs(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the inputs that requests may leave out."""
    return tuple(sorted(tensor.name for tensor in config.input if tensor.optional))


def tell_engine(config: ModelConfig, engine: Engine, fallback_reason: str) -> None:
    """Say in the config's parameters what executes the model, and why, if that is onnxruntime."""
    config.parameters[ENGINE_PARAMETER].string_value = engine.value
    if fallback_reason:
        config.parameters[FALLBACK_PARAMETER].string_value = fallback_reason


def tell_least_target(config: ModelConfig, least_us: float) -> None:
    """Say in the config's parameters what no target that is a multiple is less than."""
    config.parameters[LEAST_TARGET_PARAMETER].string_value = f"{least_us / 1e3:.3f}"


def counts_rows(config: ModelConfig, manifest: Manifest) -> bool:
    """Whether the first dimension of every tensor counts rows that can be computed apart, or the config says so.

    Without max_batch_size it does where the compiler knows that; what onnxruntime executes must have one name for it.
    """
    if config.max_batch_size or manifest.engine is Engine.NATIVE:
        return manifest.batched
    return manifest.batched and not manifest.mixes_rows and is_one_batch(manifest.inputs)


def max_rows(config: ModelConfig, batched: bool, most_rows: int = MOST_ROWS) -> int:
    """Return how many rows one request to a completed config's model may have; `most_rows` if that says nothing."""
    if config.max_batch_size:
        return config.max_batch_size
    if not batched:
        return 1
    return min((tensor.dims[0] for tensor in config.input if tensor.dims[0] > 0), default=most_rows)


def computable_rows(manifest: Manifest, arena_bytes: float) -> int:
    """Return how many rows of a model can be computed at a time in an arena of so many bytes."""
    if manifest.engine is Engine.ONNXRUNTIME:
        return MOST_ROWS
    versions = [version for layer in manifest.layers for version in layer.versions]
    tasks = max(kernel.tasks for version in versions for kernel in (version, version.batch) if kernel)
    row_bytes = manifest.arena_bytes + staging_bytes(manifest)
    return max(1, min(MAX_TASKS // tasks, int(arena_bytes / row_bytes) if row_bytes else MAX_TASKS))


def fixed_sizes(config: ModelConfig, inputs: Sequence[TensorSpec], symbols: Sequence[str]) -> dict[str, int]:
    """Return the sizes that a completed config gives to all symbols of a model; none unless it does to all."""
    specs = {spec.name: spec for spec in inputs}
    found: dict[str, int] = {}
    for tensor in config.input:
        names = specs[tensor.name].symbols[config.max_batch_size > 0 :]
        if not tensor.HasField("reshape"):
            found |= {name: size for name, size in zip(names, tensor.dims, strict=False) if name and size > 0}
    return {name: found[name] for name in symbols} if all(name in found for name in symbols) else {}


def is_one_batch(inputs: Sequence[TensorSpec]) -> bool:
    """Whether the first dimensions of all inputs have one name, as far as they have names."""
    named = {spec.symbols[0] for spec in inputs if spec.symbols and spec.symbols[0] != f"{spec.name}.0"}
    return len(named) <= 1


def _batch_obstacle(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Return why the first dimension cannot be a batch."""
    for group, specs in (("input", inputs), ("output", outputs)):
        for spec in specs:
            if spec.shape[:1] != (-1,):
                return (
                    f"{group} '{shortened(spec.name)}' of the ONNX model has no symbolic first dimension, its shape is"
                    f" {list(spec.shape)}: export it with a symbolic first dimension, or"
                )
    first = {spec.symbols[0] for spec in inputs if spec.symbols}
    others = [name for spec in inputs for name in spec.symbols[1:] if name in first]
    if others:
        return f"'{others[0]}', the first dimension of the ONNX model, is another one, too:"
    return "a run with zeros shows that outputs of the ONNX model do not have a row for each row of its inputs:"


def _fit_tensors(tensors: Sequence[Tensor], specs: Sequence[TensorSpec], group: str, strip_batch: bool) -> None:
    """Fill in type and dims where the config leaves them out, and compare where it does not."""
    known = {spec.name: spec for spec in specs}
    for tensor in tensors:
        spec = known.get(tensor.name)
        if spec is None:
            raise ConfigError(
                f"{group} '{shortened(tensor.name)}' is not in the ONNX model, which has {_quoted(list(known))}"
            )
        expected = datatype_value(spec.datatype)
        if tensor.data_type not in (0, expected):
            raise ConfigError(
                f"{group} '{shortened(tensor.name)}': data_type is TYPE_{datatype_name(tensor.data_type)}, "
                f"but the ONNX model has TYPE_{spec.datatype}"
            )
        tensor.data_type = expected
        shape = list(spec.shape[1:] if strip_batch else spec.shape)
        if not tensor.dims and not tensor.HasField("reshape"):
            tensor.dims.extend(shape)
        _check_dims(tensor, shape, group)


def _check_dims(tensor: Tensor, shape: list[int], group: str) -> None:
    dims = list(tensor.reshape.shape) if tensor.HasField("reshape") else list(tensor.dims)
    fits = len(dims) == len(shape) and all(
        dim == size or (size == -1 and dim > 0) for dim, size in zip(dims, shape, strict=True)
    )
    if not fits:
        raise ConfigError(
            f"{group} '{shortened(tensor.name)}': dims are {dims}, but the ONNX model has {shape}"
            " (with max_batch_size > 0 the batch dimension is left out of both)"
        )
    if tensor.HasField("reshape") and -1 in tensor.dims:
        raise ConfigError(f"{group} '{shortened(tensor.name)}': reshape needs fixed dims, got {list(tensor.dims)}")
    if tensor.HasField("reshape") and -1 in shape:
        raise ConfigError(f"{group} '{shortened(tensor.name)}': reshape needs max_batch_size > 0")
    if tensor.HasField("reshape") and math.prod(dims) != math.prod(tensor.dims):
        raise ConfigError(
            f"{group} '{shortened(tensor.name)}': dims {list(tensor.dims)} and reshape {dims} differ in size"
        )


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{shortened(name)}'" for name in names)
