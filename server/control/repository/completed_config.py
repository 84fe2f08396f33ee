"""The configuration of a model, completed from its signature and checked against it, and what follows for its rows.

The signature comes from the manifest of the compiled artifact, not from the ONNX file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from gangway.artifact.format import Engine, Manifest, TensorSpec, open_symbols
from gangway.base.numbers import INT32_MAX
from gangway.protos.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from gangway.server.control.repository.loaded import NOT_WANTED, InBf16, IsolatedLatency, TrialResult, config_of
from gangway.server.errors import ConfigError, shortened
from gangway.server.messages import ModelReady
from gangway.server.models.config import (
    BACKEND,
    BOTH_PRECISIONS,
    BUCKETS_PARAMETER,
    CHOSEN_PRECISION_PARAMETER,
    COMPILED_DIMENSIONS_PARAMETER,
    DEFAULT_MODEL_FILENAME,
    DIFFERENCE_PARAMETER,
    DIMENSIONS_PARAMETER,
    ENGINE_PARAMETER,
    FALLBACK_PARAMETER,
    FIRST_ANSWER,
    INTEGERS_PARAMETER,
    LEAST_TARGET_PARAMETER,
    MAX_CONFIG_BYTES,
    PLATFORM,
    PRECISION_NOTE_PARAMETER,
    TARGET_SINCE_PARAMETER,
    QosConfig,
    bucket_sizes,
    buckets_of,
    check_supported,
)
from gangway.server.models.config_table import BATCHING_OFF, BATCHING_PARAMETER
from gangway.server.models.sequences import check_hidden, complete_sequences, hidden_inputs, hidden_outputs
from gangway.server.models.settings import response_bounds_ns, tell_batching
from gangway.server.models.tensors import datatype_name, datatype_value
from gangway.server.options.backend_settings import DEFAULT_MAX_BATCH_SIZE
from gangway.server.options.server import ModelOptions

MOST_ROWS: Final = INT32_MAX
MOST_NAMES_CHARACTERS: Final = 16 * 1024  # of dimensions; a config travels in one message

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
    complete_sequences(complete)
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


def completed_by(manifest: Manifest, config: ModelConfig, name: str, options: ModelOptions) -> ModelConfig:
    """Return what `complete_config` does of a compiled model. A first dimension that may be a size is no batch."""
    is_known = manifest.is_compilable or manifest.apart_rows
    may_differ = not is_known and not is_one_batch(manifest.inputs)
    is_size = may_differ or names_first_dimension(config, manifest.inputs)
    default = 0 if is_size else options.default_max_batch_size
    completed = complete_config(config, name, manifest.inputs, manifest.outputs, manifest.batched, default)
    tell_batching(completed, options.batching)
    return completed


def optional_inputs(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the inputs that requests may leave out."""
    return tuple(sorted(tensor.name for tensor in config.input if tensor.optional))


def tell_engine(config: ModelConfig, manifest: Manifest, in_bf16: InBf16 = NOT_WANTED) -> None:
    """Say in the config's parameters what executes the model, why, if that is onnxruntime, and in which precisions.

    `in_bf16`: what is loaded beside the model.
    """
    config.parameters[ENGINE_PARAMETER].string_value = manifest.engine.value
    names = {spec.name: spec.symbols for spec in manifest.inputs if any(spec.symbols[1:])}
    if names and len(text := json.dumps(names)) <= MOST_NAMES_CHARACTERS:
        config.parameters[DIMENSIONS_PARAMETER].string_value = text
    if manifest.fallback_reason:
        config.parameters[FALLBACK_PARAMETER].string_value = manifest.fallback_reason
    if manifest.engine is Engine.NATIVE:
        chosen = BOTH_PRECISIONS if in_bf16.manifest is not None else manifest.precision
        config.parameters[CHOSEN_PRECISION_PARAMETER].string_value = chosen
    if manifest.difference:
        config.parameters[DIFFERENCE_PARAMETER].string_value = manifest.difference
    if manifest.integers:
        config.parameters[INTEGERS_PARAMETER].string_value = manifest.integers
    if note := manifest.precision_note or in_bf16.note:
        config.parameters[PRECISION_NOTE_PARAMETER].string_value = note


def with_compiled_dimensions(ready: ModelReady) -> ModelReady:
    """Return a model whose configuration names the dimensions whose sizes are compiled when requests have them."""
    config = config_of(ready)
    if len(text := json.dumps(ready.symbols)) > MOST_NAMES_CHARACTERS:
        return ready
    config.parameters[COMPILED_DIMENSIONS_PARAMETER].string_value = text
    return replace(ready, config=config.SerializeToString())


def tell_target(config: ModelConfig, qos: QosConfig, isolated: IsolatedLatency | None) -> None:
    """Say in the config's parameters since when a target counts that is a multiple of the model's time alone."""
    if qos.multiple is not None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        config.parameters[TARGET_SINCE_PARAMETER].string_value = now if isolated else FIRST_ANSWER


def tell_trials(config: ModelConfig, qos: QosConfig, tried: TrialResult) -> None:
    """Say in the config's parameters whether requests share batches, and what targets that are multiples become."""
    if tried.mixed_rows:
        config.parameters[BATCHING_PARAMETER].string_value = BATCHING_OFF
    config.parameters[LEAST_TARGET_PARAMETER].string_value = f"{tried.busy_cost_us / 1e3:.3f}"
    tell_target(config, qos, tried.isolated)


def counts_rows(config: ModelConfig, manifest: Manifest) -> bool:
    """Whether the first dimension of every tensor counts rows that can be computed apart, or the config says so.

    Without max_batch_size it does where the compiler knows that; what onnxruntime executes must have one name for it.
    A model that can be compiled for each number of rows only is, unless it has sequences. So is what onnxruntime
    executes, if buckets name its first dimension.
    """
    is_open = not manifest.is_compilable and not config.HasField("sequence_batching")
    if is_open and (manifest.fixed_rows or names_first_dimension(config, manifest.inputs)):
        return False
    if config.max_batch_size or manifest.is_compilable:
        return manifest.batched
    return manifest.batched and not manifest.mixes_rows and is_one_batch(manifest.inputs)


def names_first_dimension(config: ModelConfig, inputs: Sequence[TensorSpec]) -> bool:
    """Whether buckets name the first dimension of an input, which then is a size like others. Raises ConfigError."""
    return not _first_symbols(inputs).isdisjoint(bucket_sizes(config))


def _first_symbols(inputs: Sequence[TensorSpec]) -> set[str]:
    return {spec.symbols[0] for spec in inputs if spec.symbols and spec.symbols[0]}


def declared_sizes(
    config: ModelConfig, manifest: Manifest, symbols: Sequence[str], fixed: Mapping[str, int], most: int
) -> list[tuple[int, ...]]:
    """Return the sizes of all symbols that a completed config has compiled before the model is ready, at most `most`.

    They come from dims (`fixed`) and buckets. Rows that influence each other are one, unless buckets say how many.
    Raises ConfigError.
    """
    first = _first_symbols(manifest.inputs)
    for name, sizes in bucket_sizes(config).items():
        if name in first and config.max_batch_size and max(sizes) > config.max_batch_size:
            raise ConfigError(
                f"parameter {BUCKETS_PARAMETER}: '{name}' is the batch, of which max_batch_size allows"
                f" {config.max_batch_size}, not {max(sizes)}"
            )
    rows = {name for name in symbols if name in first} if manifest.fixed_rows and config.max_batch_size else set()
    known = dict(fixed) | {name: 1 for name in rows if name not in bucket_sizes(config)}
    buckets = buckets_of(config, symbols, most, known, () if first.intersection(symbols) else first)
    if not buckets and fixed and all(name in known for name in symbols):
        return [tuple(known[name] for name in symbols)]
    return buckets


@dataclass(frozen=True)
class CompletedModel:
    """A configuration with everything that the compiled model determines.

    `batched`: whether the first dimension counts rows. `only`: the sizes of symbolic dimensions, if dims allow no
    others. `declared`: those of `symbols`, in their order, that are compiled before the model is ready.
    """

    config: ModelConfig
    manifest: Manifest
    batched: bool
    symbols: tuple[str, ...]
    only: Mapping[str, int]
    declared: Sequence[tuple[int, ...]]

    @classmethod
    def of(cls, config: ModelConfig, manifest: Manifest, most: int) -> "CompletedModel":
        """Return what follows from a completed config, which may declare `most` sizes. Raises ConfigError."""
        batched = counts_rows(config, manifest)
        symbols = open_symbols(manifest.inputs, batched)
        fixed = fixed_sizes(config, manifest.inputs, symbols)
        declared = declared_sizes(config, manifest, symbols, fixed, most)
        if bucket_sizes(config) and config.HasField("sequence_batching"):
            what = "a model with sequences is compiled for one shape or none"
            raise ConfigError(f"parameter {BUCKETS_PARAMETER}: {what}")
        return cls(config, manifest, batched, symbols, fixed if len(fixed) == len(symbols) else {}, declared)

    @property
    def known(self) -> list[Mapping[str, int]]:
        """All sizes for which the model is compiled before it is ready."""
        return [self.only] if self.only else [dict(zip(self.symbols, each, strict=True)) for each in self.declared]


def row_limit(config: ModelConfig, manifest: Manifest, most_rows: int) -> tuple[bool, int]:
    """Return whether a completed config's first dimension counts rows, and how many a request may have."""
    batched = counts_rows(config, manifest)
    return batched, max_rows(config, batched, most_rows)


def max_rows(config: ModelConfig, batched: bool, most_rows: int = MOST_ROWS) -> int:
    """Return how many rows one request to a completed config's model may have; `most_rows` if that says nothing."""
    if config.max_batch_size:
        return config.max_batch_size
    if not batched:
        return 1
    return min((tensor.dims[0] for tensor in config.input if tensor.dims[0] > 0), default=most_rows)


def fixed_sizes(config: ModelConfig, inputs: Sequence[TensorSpec], symbols: Sequence[str]) -> dict[str, int]:
    """Return the sizes that a completed config's dims give to symbols of a model. Raises ConfigError for two of one."""
    specs = {spec.name: spec for spec in inputs}
    found: dict[str, int] = {}
    for tensor in config.input if any(symbols) else ():
        names = specs[tensor.name].symbols[config.max_batch_size > 0 :]
        for name, size in zip(names, tensor.dims, strict=False) if not tensor.HasField("reshape") else ():
            if name in symbols and size > 0 and found.setdefault(name, size) != size:
                raise ConfigError(
                    f"input '{shortened(tensor.name)}': dims give '{name}' the size {size}, those of another input"
                    f" {found[name]}; dimensions of one name are equal in the ONNX model"
                )
    return {name: found[name] for name in symbols if name in found}


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
        _check_dims(tensor, shape, group, is_scalar=not spec.shape)


def _check_dims(tensor: Tensor, shape: list[int], group: str, is_scalar: bool) -> None:
    """Raise ConfigError unless they fit; those of a scalar are all 1, as in Triton, or there are none."""
    dims = list(tensor.reshape.shape) if tensor.HasField("reshape") else list(tensor.dims)
    fits = len(dims) == len(shape) and all(
        dim == size or (size == -1 and dim > 0) for dim, size in zip(dims, shape, strict=True)
    )
    if not (fits or (is_scalar and set(dims) == {1})):
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
