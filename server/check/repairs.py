"""What is changed in a model's configuration so that it can be served here. Pure: a server tries the result.

A rule changes a copy of the configuration, and says what it has changed and why.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import Message

from gangway.base.suggestion import nearest
from gangway.protos.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput
from gangway.server.models.config import DEFAULT_MODEL_FILENAME, field_name, is_ensemble
from gangway.server.models.config_table import FIELDS, PARAMETERS, Support, support_of_parameter


@dataclass(frozen=True)
class Change:
    """One thing that keeps a model from being served as it is: the field, why, and what is done about it."""

    field: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class RepairedModel:
    """What rules know of a model beside its configuration.

    `onnx_files`: names of the ONNX files in its latest version folder. `signature`: the configuration that the server
    derives from the ONNX file alone; None if the file cannot be served. `is_python`: model.py computes it.
    """

    name: str
    onnx_files: Sequence[str] = ()
    signature: ModelConfig | None = None
    is_python: bool = False


@dataclass(frozen=True)
class Repair:
    """A configuration that may be served, and the changes that led to it."""

    config: ModelConfig
    changes: tuple[Change, ...] = field(default=())


Rule = Callable[[ModelConfig, RepairedModel], Iterator[Change]]

REMOVABLE: Final[Mapping[str, str]] = {
    "ModelInput.is_shape_tensor": "an ONNX model needs none",
    "ModelInput.is_non_linear_format_io": "an ONNX model has plain tensors",
    "ModelOutput.is_shape_tensor": "an ONNX model needs none",
    "ModelOutput.is_non_linear_format_io": "an ONNX model has plain tensors",
    "ModelSequenceBatching.State.use_growable_memory": "the state is kept in memory of its own",
    "ModelEnsembling.Step.model_namespace": "a model's name is unique among all repositories",
    "ModelInstanceGroup.passive": "the group computes like others",
    "ModelConfig.model_operations": "operators of onnxruntime itself are there",
    "ModelConfig.model_repository_agents": "check the files before they get into the repository",
}
"""Refused fields without which the model gives the same answers, each with what follows."""


def repair(config: ModelConfig, model: RepairedModel) -> Repair:
    """Return the configuration with everything changed that is known to help; the argument stays as it is."""
    copy = ModelConfig()
    copy.CopyFrom(config)
    return Repair(copy, tuple(change for rule in _RULES for change in rule(copy, model)))


def _name(config: ModelConfig, model: RepairedModel) -> Iterator[Change]:
    if config.name not in ("", model.name):
        yield Change("name", f"'{config.name}' differs from the folder's name", f"name: '{model.name}'")
        config.name = model.name


def _filename(config: ModelConfig, model: RepairedModel) -> Iterator[Change]:
    wanted = config.default_model_filename or DEFAULT_MODEL_FILENAME
    if not is_ensemble(config) and len(model.onnx_files) == 1 and wanted not in model.onnx_files:
        found = model.onnx_files[0]
        yield Change(
            "default_model_filename", f"there is no {wanted}, but {found}", f"default_model_filename: '{found}'"
        )
        config.default_model_filename = found


def _parameters(config: ModelConfig, model: RepairedModel) -> Iterator[Change]:
    if model.is_python:
        return  # its code may read any parameter
    honoured = [name for name, entry in PARAMETERS.items() if entry.support is Support.HONOURED]
    for key in [key for key in config.parameters if support_of_parameter(key) is None]:
        near = nearest(key, honoured)
        if near and near not in config.parameters:
            yield Change(f"parameters['{key}']", "unknown, without effect", f"parameters['{near}']")
            config.parameters[near].CopyFrom(config.parameters[key])
            del config.parameters[key]


def _removable(config: ModelConfig, model: RepairedModel) -> Iterator[Change]:
    yield from _without_removable(config, "")


def _without_removable(message: Message, path: str) -> Iterator[Change]:
    for each, value in message.ListFields():
        name, place = field_name(each), f"{path}{each.name}"
        if name in REMOVABLE:
            message.ClearField(each.name)
            yield Change(place, FIELDS[name].note, f"removed: {REMOVABLE[name]}")
        elif each.message_type is not None and not each.message_type.GetOptions().map_entry:
            for index, item in enumerate(value if each.is_repeated else (value,)):
                yield from _without_removable(item, f"{place}[{index}]." if each.is_repeated else f"{place}.")


def _decoupled(config: ModelConfig, model: RepairedModel) -> Iterator[Change]:
    is_onnx = not (model.is_python or is_ensemble(config))
    if config.model_transaction_policy.decoupled and is_onnx:
        remedy = "removed: each request gets one answer, over a stream, too"
        yield Change("model_transaction_policy.decoupled", "an ONNX model gives exactly one answer", remedy)
        config.ClearField("model_transaction_policy")


def _batch(config: ModelConfig, model: RepairedModel) -> Iterator[Change]:
    """The ONNX file has no batch: shapes are whole."""
    signature = model.signature
    if signature is None or signature.max_batch_size or config.max_batch_size <= 0:
        return
    yield Change(
        "max_batch_size",
        f"{config.max_batch_size}, but the ONNX model has no symbolic first dimension that is a batch",
        "max_batch_size: 0, and dims with all dimensions; for batches export the model with a symbolic first dimension",
    )
    config.max_batch_size = 0
    config.ClearField("dynamic_batching")
    for tensors, known in ((config.input, signature.input), (config.output, signature.output)):
        shapes = {tensor.name: tensor.dims for tensor in known}
        for tensor in tensors:
            if tensor.name in shapes:
                tensor.dims[:] = shapes[tensor.name]
                tensor.ClearField("reshape")


def _tensors(config: ModelConfig, model: RepairedModel) -> Iterator[Change]:
    """Types and dims that the ONNX file has otherwise."""
    signature = model.signature
    if signature is None or is_ensemble(config):
        return
    groups = (("input", config.input, signature.input), ("output", config.output, signature.output))
    for group, tensors, known in groups:
        own = {tensor.name: tensor for tensor in known}
        for tensor in tensors:
            if tensor.name in own:
                place = f"{group} '{tensor.name}'"
                yield from _type(place, tensor, own[tensor.name].data_type)
                rows = [-1] if signature.max_batch_size and not config.max_batch_size else []
                expected = [*rows, *own[tensor.name].dims]
                yield from _dims(place, tensor, expected, is_scalar=not (expected or signature.max_batch_size))


def _type(place: str, tensor: ModelInput | ModelOutput, expected: DataType) -> Iterator[Change]:
    if tensor.data_type not in (0, expected):
        was, name = DataType.Name(tensor.data_type), DataType.Name(expected)
        yield Change(f"{place}: data_type", f"{was}, but the ONNX model has {name}", f"data_type: {name}")
        tensor.data_type = expected


def _dims(place: str, tensor: ModelInput | ModelOutput, expected: list[int], is_scalar: bool) -> Iterator[Change]:
    dims = list(tensor.dims)
    if is_scalar and set(dims) == {1}:
        return
    fits = len(dims) == len(expected) and all(
        size == own or (own == -1 and size > 0) for size, own in zip(dims, expected, strict=True)
    )
    if dims and not fits and not tensor.HasField("reshape"):
        yield Change(f"{place}: dims", f"{dims}, but the ONNX model has {expected}", f"dims: {expected}")
        tensor.dims[:] = expected


def _preferred_sizes(config: ModelConfig, model: RepairedModel) -> Iterator[Change]:
    sizes, limit = config.dynamic_batching.preferred_batch_size, config.max_batch_size
    kept = [size for size in sizes if 0 < size <= limit]
    if config.HasField("dynamic_batching") and len(kept) < len(sizes):
        reason = f"{list(sizes)}, but max_batch_size is {limit}"
        yield Change("dynamic_batching.preferred_batch_size", reason, f"preferred_batch_size: {kept}")
        config.dynamic_batching.preferred_batch_size[:] = kept


_RULES: Final[tuple[Rule, ...]] = (
    _name,
    _filename,
    _parameters,
    _removable,
    _decoupled,
    _batch,
    _tensors,
    _preferred_sizes,
)

_EXPORTS: Final[Mapping[str, str]] = {
    "tensorrt": "put the ONNX file in the version folder that the .plan file was built from",
    "tensorflow": "export it to ONNX: python -m tf2onnx.convert --saved-model DIR --output model.onnx",
    "pytorch": "export it to ONNX: torch.onnx.export(model, example, 'model.onnx')",
    "openvino": "put the ONNX file in the version folder that the .xml file was made from",
    "fil": "export it to ONNX: onnxmltools.convert_xgboost, or convert_lightgbm",
    "dali": "decode and resize in a Python model, or keep this model on Triton",
    "vllm": "keep it on Triton: text generation with a cache of keys and values is not served",
}


def remedy_for(config: ModelConfig, is_python: bool) -> str:
    """Return what to do about a model that no change of its configuration makes ready; empty if nothing is known."""
    is_ragged = config.batch_input or config.batch_output or any(tensor.allow_ragged_batch for tensor in config.input)
    if is_ragged and not is_python:
        return "send inputs of one shape, padded, and remove allow_ragged_batch, batch_input and batch_output"
    engine = f"{config.backend or config.platform}".lower()
    return next((remedy for name, remedy in _EXPORTS.items() if engine.startswith(name)), "")
