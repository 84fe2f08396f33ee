"""Whether a configuration can be honoured: every field that is set is looked up in `config_table.py`.

What a table cannot say (a value that is refused, two fields that contradict each other) is checked here, too.
"""

import difflib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gangway.protos.model_config_pb2 import ModelConfig, ModelInput, ModelInstanceGroup
from gangway.server.config_error import MAX_REASON_CHARACTERS, ConfigError, shortened
from gangway.server.config_table import FIELDS, PARAMETERS, Entry, Fate
from gangway.server.ensemble.config import is_ensemble

PACKAGE = "inference."
PLATFORM = "onnxruntime_onnx"  # what Triton calls models that come as ONNX files; clients and configs rely on the names
BACKEND = "onnxruntime"
RUNTIMES = (BACKEND, "libtriton_onnxruntime.so")
GPU_FIELD = "ModelInstanceGroup.kind"
NEAR = 0.75  # how alike two names are of which one may be meant for the other, 0 to 1
IMAGE_RANK = 3
MAX_INSTANCES = 2**31 - 1

_log = logging.getLogger(__name__)


def check_fields(config: ModelConfig) -> tuple[str, ...]:
    """Return the fields that are set and have no effect here, each with the reason. Raises ConfigError."""
    accepted = dict.fromkeys(_walk(config, ""))
    for check in _CHECKS:
        check(config)
    return tuple(accepted)


def without_effect(config: ModelConfig) -> tuple[str, ...]:
    """Return everything that the model's owner has said in vain, each with the reason. Raises ConfigError."""
    engine = foreign_engine(config)
    return (
        *((f"{engine} (the ONNX file is compiled, or executed by onnxruntime)",) if engine else ()),
        *check_fields(config),
        *(f"parameter '{shortened(key)}' ({_unknown(key)})" for key in config.parameters if key not in PARAMETERS),
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
        _log.warning("model %s: without effect here: %s", name, shortened("; ".join(in_vain), MAX_REASON_CHARACTERS))


def _unknown(parameter: str) -> str:
    near = difflib.get_close_matches(parameter.lower().replace("-", "_"), PARAMETERS, 1, NEAR)
    return f"unknown, did you mean '{near[0]}'?" if near else "unknown"


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
        if entry.fate is Fate.ACCEPTED:
            yield f"{place} ({entry.note})"
        elif entry.fate is Fate.REFUSED:
            raise _refusal(place, entry)
        elif value_type(field) is not None:
            for where, item in _items(field, value, path):
                yield from _walk(item, where)
        elif field.enum_type is not None:
            _check_number(field, value, place)
            if field_name(field) == GPU_FIELD and value == ModelInstanceGroup.KIND_GPU:
                yield f"{place} KIND_GPU (there is no GPU)"


def _refusal(place: str, entry: Entry) -> ConfigError:
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


_CHECKS: tuple[Callable[[ModelConfig], None], ...] = (
    _check_instances,
    _check_formats,
    _check_batching,
)
