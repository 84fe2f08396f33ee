"""How models and ensembles of the zoo are written into a model repository.

An ensemble is nothing but a configuration and an empty version folder.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from onnx import TensorProto

from gangway.zoo.catalog import ENSEMBLES, MODELS, ZooStep, ZooTensor, build
from gangway.zoo.digits import sample_pictures
from gangway.zoo.graph import ModelGraph


@dataclass(frozen=True)
class SequenceConfig:
    """`sequence_batching` of a model: inputs and outputs that clients do not see, and its fields as text."""

    hidden: tuple[str, ...]
    text: str


def _control(name: str, kind: str, values: str = "int32_false_true: [ 0, 1 ]") -> str:
    return f'  control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}\n'


_START, _END, _READY = (_control(name, name) for name in ("START", "END", "READY"))
_IDLE = "  max_sequence_idle_microseconds: 10000000\n"
_DIRECT = f"  direct {{ }}\n{_IDLE}"
_OLDEST = f"  oldest {{ max_candidate_sequences: 1024 }}\n{_IDLE}"
_SUM = (
    '  state {\n    input_name: "SUM_IN"\n    output_name: "SUM_OUT"\n    data_type: TYPE_INT32\n    dims: [ 1 ]\n  }\n'
)

SEQUENCE_CONFIGS = {
    "simple_sequence": SequenceConfig(("START", "READY"), f"{_DIRECT}{_START}{_READY}"),
    "simple_dyna_sequence": SequenceConfig(
        ("START", "END", "READY", "CORRID"),
        f"{_OLDEST}{_START}{_END}{_READY}{_control('CORRID', 'CORRID', 'data_type: TYPE_UINT64')}",
    ),
    "simple_string_dyna_sequence": SequenceConfig(
        ("END", "CORRID", "SUM_IN", "SUM_OUT"),
        f"{_OLDEST}{_END}{_control('CORRID', 'CORRID', 'data_type: TYPE_STRING')}{_SUM}",
    ),
    "accumulator": SequenceConfig(("SUM_IN", "SUM_OUT"), f"{_DIRECT}{_SUM}"),
}


CONFIG_TYPES = {  # ONNX's data types in the names of config.pbtxt
    TensorProto.FLOAT: "TYPE_FP32",
    TensorProto.INT32: "TYPE_INT32",
    TensorProto.INT64: "TYPE_INT64",
    TensorProto.INT8: "TYPE_INT8",
    TensorProto.STRING: "TYPE_STRING",
    TensorProto.UINT8: "TYPE_UINT8",
}
LABELS = "labels.txt"


def write_model(directory: Path, name: str, *, paper_qos: bool = False, sequence: int | None = None) -> Path:
    """Write DIRECTORY/NAME/1/model.onnx and DIRECTORY/NAME/config.pbtxt, replacing old ones; return DIRECTORY/NAME.

    The same arguments always give the same bytes. Raises ValueError as `build` does, OSError when writing fails.
    """
    return write_graph(directory, build(name, sequence), paper_qos=paper_qos)


def write_graph(directory: Path, graph: ModelGraph, *, paper_qos: bool = False) -> Path:
    """Write a model that is built already, as `write_model` does."""
    folder = directory / graph.name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    _replace(folder / "1" / "model.onnx", graph.write)
    config = config_text(graph, paper_qos=paper_qos).encode()
    if labels := MODELS[graph.name].labels:
        text = "".join(f"{label}\n" for label in labels).encode()
        _replace(folder / LABELS, lambda file: file.write(text))
    _replace(folder / "config.pbtxt", lambda file: file.write(config))
    return folder


def config_text(graph: ModelGraph, *, paper_qos: bool = False) -> str:
    """Return the model's config.pbtxt."""
    entry = MODELS[graph.name]
    sequences = SEQUENCE_CONFIGS.get(graph.name, SequenceConfig((), ""))
    inputs = [info for info in graph.inputs if info.name not in sequences.hidden]
    outputs = [info for info in graph.outputs if info.name not in sequences.hidden]
    batching = f"sequence_batching {{\n{sequences.text}}}\n" if sequences.text else ""
    qos = entry.paper_qos_ms if paper_qos and entry.paper_qos_ms else "3x"
    layout = f"    format: {entry.input_format}\n" if entry.input_format else ""
    labels = f'    label_filename: "{LABELS}"\n' if entry.labels else ""
    return (
        f"# {entry.summary}\n"
        f'name: "{graph.name}"\nplatform: "onnxruntime_onnx"\nmax_batch_size: {entry.max_batch_size}\n'
        f"input [\n{_tensors(inputs, layout)}\n]\noutput [\n{_tensors(outputs, labels)}\n]\n{batching}"
        "# Latency target in milliseconds, or 3x = three times the model's isolated latency on the server's cores.\n"
        f'parameters {{\n  key: "qos_ms"\n  value: {{ string_value: "{qos}" }}\n}}\n'
    )


def write_ensemble(directory: Path, name: str) -> Path:
    """Write DIRECTORY/NAME/config.pbtxt and the version folder; return DIRECTORY/NAME. Its models are not written."""
    folder = directory / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(ensemble_config_text(name))
    if ENSEMBLES[name].has_samples:
        (folder / "samples").mkdir(exist_ok=True)
        for filename, content in sample_pictures().items():
            (folder / "samples" / filename).write_bytes(content)
    return folder


def ensemble_config_text(name: str) -> str:
    """Return an ensemble's config.pbtxt."""
    ensemble = ENSEMBLES[name]
    steps = ",\n".join(map(_ensemble_step, ensemble.steps))
    return (
        f'# {ensemble.summary}\nname: "{name}"\nplatform: "ensemble"\nmax_batch_size: {ensemble.max_batch_size}\n'
        f"input [\n{_ensemble_tensors(ensemble.inputs)}\n]\noutput [\n{_ensemble_tensors(ensemble.outputs)}\n]\n"
        f"ensemble_scheduling {{\n  step [\n{steps}\n  ]\n}}\n"
        "# The latency target of the whole: 3x = three times what the steps take alone, one after the other.\n"
        'parameters {\n  key: "qos_ms"\n  value: { string_value: "3x" }\n}\n'
    )


def _tensors(infos: Any, more: str) -> str:
    """Return one side's tensors, without the batch dimension, with `more` lines each."""
    return ",\n".join(
        f'  {{\n    name: "{info.name}"\n    data_type: {CONFIG_TYPES[info.type.tensor_type.elem_type]}\n'
        f"    dims: [ {_dims(info)} ]\n{more}  }}"
        for info in infos
    )


def _dims(info: Any) -> str:
    dims = info.type.tensor_type.shape.dim[1:]
    return ", ".join(str(dim.dim_value if dim.HasField("dim_value") else -1) for dim in dims)


def _ensemble_tensors(tensors: Sequence[ZooTensor]) -> str:
    return ",\n".join(
        f'  {{\n    name: "{tensor.name}"\n    data_type: {tensor.data_type}\n'
        f"    dims: [ {', '.join(map(str, tensor.dims))} ]\n  }}"
        for tensor in tensors
    )


def _ensemble_step(step: ZooStep) -> str:
    maps = [
        f'      {side}_map {{ key: "{name}" value: "{tensor}" }}\n'
        for side, pairs in (("input", step.inputs), ("output", step.outputs))
        for name, tensor in pairs.items()
    ]
    return f'    {{\n      model_name: "{step.model}"\n      model_version: -1\n{"".join(maps)}    }}'


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write atomically: a server that watches the repository never reads half a file, and none is left behind."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            write(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
