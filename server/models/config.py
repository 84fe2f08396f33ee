"""Checking whether this server can honour a model's configuration.

Every field that is set is looked up in `config_table.py`. What a table cannot say is checked here: a value that is
refused, fields that contradict each other, and an ensemble that cannot work whatever its models are. For ensembles the
texts of the messages are Triton's.
"""

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gangway.artifact.format import MAX_TENSORS
from gangway.artifact.precision import BF16, FP32
from gangway.base.suggestion import did_you_mean
from gangway.protos.model_config_pb2 import ModelConfig, ModelEnsembling, ModelInput, ModelInstanceGroup, ModelOutput
from gangway.server.errors import MAX_REASON_CHARACTERS, ConfigError, shortened
from gangway.server.models.config_table import (
    BATCHING_OFF,
    BATCHING_PARAMETER,
    FIELDS,
    PARAMETERS,
    FieldSupport,
    Support,
    parameter_of,
    support_of_parameter,
)

_log = logging.getLogger(__name__)

PYTHON_BACKEND = "python"
ENSEMBLE_PLATFORM = "ensemble"
MAX_STEPS = 64  # those of inner ensembles count, too
MAX_DEPTH = 16  # of ensembles within ensembles
LATEST = -1  # what a step says that wants the latest version; 0, also what it says by silence, is that or version 0

StepConfig = ModelEnsembling.Step

_NOT_FOR_ENSEMBLES = (
    ("instance_group", "instance group should not be specified for ensemble"),
    ("optimization", "optimization should not be specified for ensemble"),
    ("model_warmup", "model_warmup can not be specified for ensemble"),
)
_OTHER_PARAMETERS = ("max_queue_size", "gangway_buckets", "batching")  # which only the composing models can honour


def precisions_of(config: ModelConfig) -> Collection[str]:
    """Return the precisions that a completed config says the model is there in; none if onnxruntime executes it."""
    text = parameter_of(config, CHOSEN_PRECISION_PARAMETER)
    return text.split(", ") if text else ()


def is_ensemble(config: ModelConfig) -> bool:
    """Whether a configuration is one of an ensemble, be it right or wrong."""
    return config.platform == ENSEMBLE_PLATFORM or config.HasField("ensemble_scheduling")


def composing_models(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the models of all steps, each once."""
    return tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def check_ensemble(config: ModelConfig, name: str) -> None:
    """Raise ConfigError if the ensemble `name` cannot work, whatever its models are."""
    quoted = f"'{shortened(name)}'"
    if config.platform != ENSEMBLE_PLATFORM:
        raise ConfigError(
            f"ensemble scheduling cannot be set for model {quoted} whose platform is not {ENSEMBLE_PLATFORM}"
        )
    if not config.HasField("ensemble_scheduling"):
        raise ConfigError(f"ensemble scheduling must be set for ensemble {quoted}")
    for field, message in _NOT_FOR_ENSEMBLES:
        if getattr(config, field) if field != "optimization" else config.HasField(field):
            raise ConfigError(f"{message} {quoted}")
    if config.backend or config.runtime:
        raise ConfigError(f"backend or runtime can not be specified for ensemble {quoted}: its models have theirs")
    for parameter in _OTHER_PARAMETERS:
        if parameter in config.parameters:
            raise ConfigError(f"parameter {parameter} can not be specified for ensemble {quoted}, only for its models")
    _check_tensors(config.input, "input", quoted)
    _check_tensors(config.output, "output", quoted)
    _check_steps(config.ensemble_scheduling.step, quoted)
    _check_flow(config, quoted)


def _check_tensors(tensors: Sequence[ModelInput | ModelOutput], group: str, ensemble: str) -> None:
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise ConfigError(f"ensemble {ensemble} has {len(tensors)} {group}s, expected 1 to {MAX_TENSORS}")
    for tensor in tensors:
        where = f"{group} '{shortened(tensor.name)}' of ensemble {ensemble}"
        if not tensor.name:
            raise ConfigError(f"an {group} of ensemble {ensemble} has no name")
        if not tensor.data_type:
            raise ConfigError(f"must specify 'data_type' of {where}")
        if not tensor.dims:
            raise ConfigError(f"must specify 'dims' of {where}")
        if any(size < 1 and size != -1 for size in tensor.dims):
            raise ConfigError(f"{where}: dims are {list(tensor.dims)}, expected 1 or more, or -1 for any size")
        if tensor.HasField("reshape"):
            raise ConfigError(f"{where}: reshape is not supported for ensembles, let the composing models reshape")


def _check_steps(steps: Sequence[StepConfig], ensemble: str) -> None:
    if not steps:
        raise ConfigError(f"must specify 'step' for ensemble {ensemble}")
    if len(steps) > MAX_STEPS:
        raise ConfigError(f"ensemble {ensemble} has {len(steps)} steps, at most {MAX_STEPS} are possible")
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                raise ConfigError(f"must specify '{field}' in step {index} of ensemble {ensemble}")
        if step.model_version < -1:
            raise ConfigError(f"model_version of step {index} of ensemble {ensemble} is {step.model_version}")


def _check_flow(config: ModelConfig, ensemble: str) -> None:
    """Check that every tensor has one source and a reader, and that every step gets its tensors."""
    steps = config.ensemble_scheduling.step
    inputs = [tensor.name for tensor in config.input]
    outputs = {tensor.name for tensor in config.output}
    written = set(inputs)
    for index, step in enumerate(steps):
        for tensor in step.output_map.values():
            if tensor in written:
                raise ConfigError(
                    f"ensemble tensor '{shortened(tensor)}' can appear in an output map only once for ensemble"
                    f" {ensemble} step {index}: it is {'an input' if tensor in inputs else 'written already'}"
                )
            written.add(tensor)
    read = {tensor for step in steps for tensor in step.input_map.values()}
    for tensor in inputs:
        if tensor not in read:
            raise ConfigError(f"ensemble input '{shortened(tensor)}' for ensemble {ensemble} is not used")
    for tensor in outputs - written:
        raise ConfigError(f"output '{shortened(tensor)}' for ensemble {ensemble} is not written")
    for tensor in outputs & set(inputs):
        raise ConfigError(f"output '{shortened(tensor)}' for ensemble {ensemble} is an input, too")
    for index, tensor in _never_ready(steps, inputs):
        why = "it waits for itself" if tensor in written else "nothing writes it"
        raise ConfigError(
            f"in ensemble {ensemble}, step {index} never gets the ensemble tensor '{shortened(tensor)}': {why}"
        )
    for tensor in sorted(written - read - outputs):
        raise ConfigError(f"ensemble tensor '{shortened(tensor)}' is unused in ensemble {ensemble}")


def _never_ready(steps: Sequence[StepConfig], inputs: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield steps that can never begin, each with a tensor that it misses."""
    ready, waiting = set(inputs), dict(enumerate(steps))
    while runnable := [index for index, step in waiting.items() if ready.issuperset(step.input_map.values())]:
        for index in runnable:
            ready.update(waiting.pop(index).output_map.values())
    for index, step in waiting.items():
        yield index, next(tensor for tensor in step.input_map.values() if tensor not in ready)


PACKAGE = "inference."
PLATFORM = "onnxruntime_onnx"  # what Triton calls models that come as ONNX files; clients and configs rely on the names
BACKEND = "onnxruntime"
RUNTIMES = (BACKEND, "libtriton_onnxruntime.so")
GPU_FIELD = "ModelInstanceGroup.kind"
IMAGE_RANK = 3
MAX_INSTANCES = 2**31 - 1


def check_fields(config: ModelConfig) -> tuple[str, ...]:
    """Return the fields that are set and have no effect here, each with the reason. Raises ConfigError."""
    accepted = dict.fromkeys(_walk(config, ""))
    for check in _CHECKS:
        check(config)
    return tuple(accepted)


def without_effect(config: ModelConfig, is_python: bool = False) -> tuple[str, ...]:
    """Return all parts of a configuration without effect, each with the reason. Raises ConfigError.

    `is_python`: Python code computes the model, and may read any parameter.
    """
    if is_python:
        return check_fields(config)
    engine = foreign_engine(config)
    return (
        *((f"{engine} (the ONNX file is compiled, or executed by onnxruntime)",) if engine else ()),
        *check_fields(config),
        *(f"parameter '{shortened(key)}' ({why})" for key in config.parameters if (why := _parameter_in_vain(key))),
    )


def foreign_engine(config: ModelConfig) -> str:
    """Return what the config names to execute the model, such as "backend 'openvino'"; nothing if that is ours."""
    for field, ours in (("backend", (BACKEND,)), ("platform", (PLATFORM,)), ("runtime", RUNTIMES)):
        name = getattr(config, field)
        if not is_ensemble(config) and name not in ("", *ours):
            return f"{field} '{shortened(name)}'"
    return ""


def log_without_effect(name: str, in_vain: Sequence[str]) -> None:
    """Say in the log what has no effect of a model's configuration."""
    if in_vain:
        _log.warning(
            "model %s: parts of config.pbtxt have no effect: %s",
            name,
            shortened("; ".join(in_vain), MAX_REASON_CHARACTERS),
        )


def _parameter_in_vain(parameter: str) -> str:
    """Return why a parameter has no effect; "" if it has one."""
    known = support_of_parameter(parameter)
    if known is not None:
        return known.note if known.support is Support.ACCEPTED else ""
    return f"unknown{did_you_mean(parameter, PARAMETERS).replace(';', ',')}"


def field_name(field: FieldDescriptor) -> str:
    """Return what the table calls a field."""
    message = field.containing_type
    assert message is not None, "no extensions"
    return f"{message.full_name.removeprefix(PACKAGE)}.{field.name}"


def value_type(field: FieldDescriptor) -> Any:
    """Return the descriptor of the messages that a field holds, as values if it is a map; None if it holds none."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return kind.fields_by_name["value"].message_type
    return kind


def _walk(message: Message, path: str) -> Iterator[str]:
    """Yield the accepted fields of a message that are set. Raises ConfigError."""
    for field, value in message.ListFields():
        entry = FIELDS[field_name(field)]
        place = f"{path}{field.name}"
        if entry.support is Support.ACCEPTED:
            yield f"{place} ({entry.note})"
        elif entry.support is Support.REFUSED:
            if field.is_repeated or field.message_type is None or value.ByteSize():  # else nothing is asked for
                raise _refusal(place, entry)
        elif value_type(field) is not None:
            for where, item in _items(field, value, path):
                yield from _walk(item, where)
        elif field.enum_type is not None:
            _check_number(field, value, place)
            if field_name(field) == GPU_FIELD and value == ModelInstanceGroup.KIND_GPU:
                yield f"{place} KIND_GPU (there is no GPU)"


def _refusal(place: str, entry: FieldSupport) -> ConfigError:
    return ConfigError(f"{place} is not supported: {entry.note}")


def _items(field: FieldDescriptor, value: Any, path: str) -> Iterator[tuple[str, Message]]:
    """Yield each message that the field holds, with what is said before the name of a field of it."""
    place = f"{path}{field.name}"
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key in value:
            yield f"{place}[{shortened(str(key))}].", value[key]
    elif field.is_repeated:
        for index, item in enumerate(value):
            name = getattr(item, "name", "")
            yield f"{place} '{shortened(name)}': " if name else f"{place}[{index}].", item
    else:
        yield f"{place}.", value


def _check_number(field: FieldDescriptor, value: Any, place: str) -> None:
    assert field.enum_type is not None, "asked for enums only"
    for number in value if field.is_repeated else (value,):
        if number not in field.enum_type.values_by_number:
            raise ConfigError(f"{place}: {number} is no {field.enum_type.name}")


def _check_instances(config: ModelConfig) -> None:
    for index, group in enumerate(config.instance_group):
        place = f"instance_group '{shortened(group.name)}'" if group.name else f"instance_group[{index}]"
        if group.count < 0:
            raise ConfigError(f"{place}: count is {group.count}, expected 0 or more")
        for resource in group.rate_limiter.resources:
            if not resource.name:
                raise ConfigError(f"{place}: a resource of the rate limiter has no name")
    if sum(group.count for group in config.instance_group) > MAX_INSTANCES:
        raise ConfigError(f"instance_group: the counts add up to more than {MAX_INSTANCES}")


def _check_formats(config: ModelConfig) -> None:
    for tensor in config.input:
        rank = len(tensor.dims)
        if tensor.format != ModelInput.FORMAT_NONE and rank not in (0, IMAGE_RANK):
            name = ModelInput.Format.Name(tensor.format)
            raise ConfigError(f"input '{shortened(tensor.name)}': {name} needs {IMAGE_RANK} dims, got {rank}")


def _check_batching(config: ModelConfig) -> None:
    for size in config.dynamic_batching.preferred_batch_size:
        if size <= 0 or (config.max_batch_size and size > config.max_batch_size):
            raise ConfigError(f"dynamic_batching.preferred_batch_size: expected 1 to max_batch_size, got {size}")


_CHECKS: tuple[Callable[[ModelConfig], None], ...] = (_check_instances, _check_formats, _check_batching)


def check_onnx(config: ModelConfig) -> None:
    """Raise ConfigError for what an ONNX model cannot do, and a Python model can.

    A configuration may name no engine, and then the files say which it is.
    """
    if config.model_transaction_policy.decoupled:
        raise ConfigError("model_transaction_policy.decoupled is not supported: an ONNX model gives exactly one answer")
    inputs = [tensor.name for tensor in config.input if tensor.allow_ragged_batch]
    ragged = [f"input '{shortened(name)}': allow_ragged_batch" for name in inputs]
    ragged += [name for name in ("batch_input", "batch_output") if getattr(config, name)]
    if ragged:
        raise ConfigError(f"{ragged[0]} is not supported: a batch of an ONNX model has one shape")


ONNX_SUFFIX = ".onnx"
DEFAULT_MODEL_FILENAME = "model.onnx"
QOS_PARAMETER = "qos_ms"
MAX_QOS = 1e12  # milliseconds or multiples; what follows from it is finite in microseconds
BUCKETS_PARAMETER = "gangway_buckets"  # sizes of symbolic dimensions that are compiled before the model is ready
ENGINE_PARAMETER = "gangway_engine"  # what executes the model; set by the server
DIMENSIONS_PARAMETER = "gangway_dimensions"  # names of open dimensions, by input, as JSON; set by the server
LEAST_TARGET_PARAMETER = "gangway_least_target_ms"  # of targets that are multiples; set by the server
TARGET_SINCE_PARAMETER = "gangway_target_since"  # when a target that is a multiple began to count; set by the server
FIRST_ANSWER = "the first answer"  # in place of that moment while it has not come
COMPILED_DIMENSIONS_PARAMETER = "gangway_compiled_dimensions"  # whose sizes are compiled, as JSON; set by the server
CHOSEN_PRECISION_PARAMETER = "gangway_precision"  # of products in kernels; set by the server
BOTH_PRECISIONS = f"{FP32}, {BF16}"  # its value where the scheduler chooses for each request
PRECISION_NOTE_PARAMETER = "gangway_precision_note"  # how well it agrees with fp32, or why it is not used; likewise
INTEGERS_PARAMETER = "gangway_integers"  # what multiplies 8-bit numbers; set by the server
DIFFERENCE_PARAMETER = "gangway_difference"  # of its answers from onnxruntime's; set by the server
FALLBACK_PARAMETER = "gangway_fallback_reason"  # why it was not compiled; set by the server
NO_SIZES: Final[Mapping[str, int]] = MappingProxyType({})
MAX_SIZE = 2**31 - 1  # of a dimension
MAX_SIZE_DIGITS = 20  # leading zeros included
_BUCKETS: Final = f"parameter {BUCKETS_PARAMETER}"
MAX_FILENAME_BYTES = 255
MAX_CONFIG_BYTES = 256_000  # serialised; it travels to the front end in one message


class QosConfig(msgspec.Struct, frozen=True):
    """A latency target: absolute, as a multiple of the model's isolated latency, or (neither) none."""

    milliseconds: float | None = None
    multiple: float | None = None


def parse_qos(text: str) -> QosConfig:
    """Read the parameter `qos_ms`: "15" (milliseconds), "3x" (times the isolated latency). Raises ConfigError."""
    number = text.strip()
    is_multiple = number.endswith("x")
    try:
        value = float(number.removesuffix("x"))
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_QOS:
        raise ConfigError(f'parameter {QOS_PARAMETER}: expected milliseconds ("15") or a multiple ("3x"), got "{text}"')
    return QosConfig(multiple=value) if is_multiple else QosConfig(milliseconds=value)


def qos_of(config: ModelConfig) -> QosConfig:
    """Return the model's latency target. Raises ConfigError."""
    if QOS_PARAMETER not in config.parameters:
        return QosConfig()
    return parse_qos(config.parameters[QOS_PARAMETER].string_value)


def is_batching_off(config: ModelConfig) -> bool:
    """Whether the parameter `batching` says that requests are neither joined nor split."""
    return parameter_of(config, BATCHING_PARAMETER) == BATCHING_OFF


def bucket_sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Read the parameter `gangway_buckets`: "S=32,64" or "S=32,64; T=1,2".

    Returns the sizes of each dimension that it names, each once. Raises ConfigError.
    """
    text = parameter_of(config, BUCKETS_PARAMETER)
    sizes: dict[str, tuple[int, ...]] = {}
    for part in text.split(";") if text.strip() else ():
        name, _, numbers = (piece.strip() for piece in part.rpartition("="))
        values = [number.strip() for number in numbers.split(",")]
        if not name or not all(value.isascii() and value.isdigit() for value in values):
            raise ConfigError(f'{_BUCKETS}: expected "NAME=SIZE,SIZE; NAME=SIZE", got "{shortened(part)}"')
        if name in sizes:
            raise ConfigError(f"{_BUCKETS}: '{shortened(name)}' is given twice, write all its sizes behind one name")
        if any(not 1 <= int(value[:MAX_SIZE_DIGITS]) <= MAX_SIZE or len(value) > MAX_SIZE_DIGITS for value in values):
            raise ConfigError(
                f"{_BUCKETS}: '{shortened(name)}' can have sizes of 1 to {MAX_SIZE}: \"{shortened(part)}\""
            )
        sizes[name] = tuple(dict.fromkeys(map(int, values)))
    return sizes


def buckets_of(
    config: ModelConfig,
    symbols: Sequence[str],
    most: int,
    known: Mapping[str, int] = NO_SIZES,
    others: Collection[str] = (),
) -> list[tuple[int, ...]]:
    """Return the sizes that `gangway_buckets` declares, every combination once, in the order of `symbols`.

    `most`: combinations that may be. `known`: sizes of symbols that need no bucket. `others`: names that may have
    buckets and need none compiled. Raises ConfigError.
    """
    sizes = bucket_sizes(config)
    for name, values in sizes.items():
        if name not in symbols and name not in others:
            there_are = ", ".join(dict.fromkeys((*symbols, *others))) or "none"
            raise ConfigError(
                f"{_BUCKETS}: the ONNX model has no open dimension '{shortened(name)}'; there are: {there_are}"
            )
        if name in known and values != (known[name],):
            raise ConfigError(f"{_BUCKETS}: '{shortened(name)}' has other sizes, but dims fix it to {known[name]}")
    if not (sizes and symbols):
        return []
    if missing := [symbol for symbol in symbols if symbol not in sizes and symbol not in known]:
        raise ConfigError(f"{_BUCKETS}: no sizes of '{missing[0]}': give them, or fix this dimension in dims")
    if (count := math.prod(len(sizes[symbol]) for symbol in symbols if symbol in sizes)) > most:
        raise ConfigError(f"{count} buckets are declared, at most {most} shapes are compiled")  # and nothing is made
    return list(itertools.product(*(sizes[symbol] if symbol in sizes else (known[symbol],) for symbol in symbols)))


def check_supported(config: ModelConfig, name: str) -> None:
    """Raise ConfigError if the config of model `name` contradicts itself or asks for what this server cannot do."""
    if config.ByteSize() > MAX_CONFIG_BYTES:
        raise ConfigError(f"the configuration has {config.ByteSize()} bytes, at most {MAX_CONFIG_BYTES} are possible")
    if config.name not in ("", name):
        raise ConfigError(f"name '{shortened(config.name)}' differs from the folder's name '{name}'")
    if config.max_batch_size < 0:
        raise ConfigError(f"max_batch_size is {config.max_batch_size}, expected 0 or more")
    _check_filename(config.default_model_filename)
    check_fields(config)
    _check_names([tensor.name for tensor in config.input], "input")
    _check_names([tensor.name for tensor in config.output], "output")
    if is_ensemble(config):
        check_ensemble(config, name)


def _check_filename(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"default_model_filename '{shortened(name)}' leaves the version folder")
    is_path = not name or (path.parts and name == str(path))  # neither "." nor "a//b"
    if not is_path or "\0" in name or any(len(part.encode()) > MAX_FILENAME_BYTES for part in path.parts):
        raise ConfigError(f"default_model_filename '{shortened(name)}' is no name of a file")


def _check_names(names: list[str], group: str) -> None:
    if "" in names:
        raise ConfigError(f"an {group} has no name")
    if any("\0" in name for name in names):
        raise ConfigError(f"the name of an {group} has a zero byte")
    if len(set(names)) < len(names):
        raise ConfigError(f"the config names an {group} twice: {shortened(', '.join(names))}")


def require_complete(config: ModelConfig) -> None:
    """Raise ConfigError if the config leaves out anything that would have to be taken from the model."""
    missing = [] if config.platform or config.backend else ["platform or backend"]
    for group, tensors in (("input", config.input), ("output", config.output)):
        missing += [] if tensors else [group]
        for tensor in tensors:
            missing += [] if tensor.data_type else [f"data_type of {group} '{tensor.name}'"]
            missing += [] if tensor.dims else [f"dims of {group} '{tensor.name}'"]
    if missing:
        raise ConfigError(f"the config does not say {', '.join(missing)}, and it is not completed from the model")


def longest_after(times_us: Sequence[float], followers: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Return for each step the time of the longest chain after it: its own time is not part of it.

    `followers`: for each step those that cannot begin before it has ended; they are in no circle.
    """
    found: dict[int, float] = {}
    waiting = list(range(len(times_us)))
    while waiting:
        step = waiting[-1]
        missing = [after for after in followers[step] if after not in found]
        if missing:
            waiting += missing
            continue
        found[step] = max((times_us[after] + found[after] for after in followers[step]), default=0.0)
        waiting.pop()
    return tuple(found[step] for step in range(len(times_us)))
