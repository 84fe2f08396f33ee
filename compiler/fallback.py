"""What cannot be compiled is left to onnxruntime: the artifact holds the ONNX file itself, as one layer.

Accepted are models that onnxruntime opens and can run with zeros, with numbers for inputs and outputs, and shapes that
are fixed but for a batch in front of every one of them.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gangway.artifact.datatypes import DTYPES
from gangway.artifact.format import MAX_TENSORS, Engine, Layer, Manifest, TargetSpec, TensorSpec, Version
from gangway.artifact.onnx_session import open_session
from gangway.artifact.writer import OnnxArtifactWriter
from gangway.compiler.errors import ModelError, UnsupportedModelError
from gangway.compiler.importer import count_parameters, external_locations
from gangway.compiler.key import compiler_version, model_key

LONGEST_REASON = 2000  # it may list nodes, whose names can have any length
MAX_TENSOR_BYTES = 1 << 30  # of one row; as for compiled models
_TYPES = {"float": "FP32", "double": "FP64", "float16": "FP16", "bool": "BOOL"}  # others: in capitals


@dataclass(frozen=True)
class Signature:
    """A model's inputs and outputs."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool


def leave_to_onnxruntime(
    path: Path, model_name: str, key: str, target: TargetSpec, phase_us: dict[str, int], folder: Path, reason: str
) -> Manifest:
    """Make the artifact `folder` of the ONNX file `path`, which cannot be compiled for this `reason`.

    Raises UnsupportedModelError, with both reasons, if it cannot be served in this way either; OSError.
    """
    start_ns = time.monotonic_ns()
    with OnnxArtifactWriter(folder) as writer:
        try:
            writer.copy(path, sorted(external_locations(path)))
            if model_key(writer.model_path, target) != key:
                raise ModelError(f"{path.name} changed while it was read")
            session = open_session(writer.model_path)
            signature = read_signature(session)
            try_out(session, signature)
        except OSError:
            raise
        except ModelError as error:
            raise UnsupportedModelError(f"{reason}; and not for onnxruntime: {error}") from error
        except Exception as error:  # onnxruntime's own exceptions have no common base
            message = " ".join(str(error).split())[:300]
            raise UnsupportedModelError(f"{reason}; and onnxruntime refuses it: {message}") from error
        phase_us["onnxruntime"] = (time.monotonic_ns() - start_ns) // 1000
        manifest = Manifest(
            key=key,
            model_name=model_name,
            batched=signature.batched,
            inputs=signature.inputs,
            outputs=signature.outputs,
            layers=(_whole_layer(),),
            arena_bytes=0,
            target=target,
            files={},  # the writer knows them
            engine=Engine.ONNXRUNTIME,
            fallback_reason=reason[:LONGEST_REASON],
            phase_us=phase_us,
            parameters=count_parameters(path),
            compiler_version=compiler_version(),
        )
        return writer.commit(manifest)


def read_signature(session: Any) -> Signature:
    """Return inputs and outputs of an open model. Raises UnsupportedModelError for what a request cannot hold."""
    sides = (("input", session.get_inputs()), ("output", session.get_outputs()))
    for kind, tensors in sides:
        if not 1 <= len(tensors) <= MAX_TENSORS:
            raise UnsupportedModelError(f"the model has {len(tensors)} {kind}s; 1 to {MAX_TENSORS} are possible")
    batched = {_is_batched(kind, tensor) for kind, tensors in sides for tensor in tensors}
    if len(batched) > 1:
        raise UnsupportedModelError("some inputs or outputs have a dynamic first dimension, others have none")
    inputs, outputs = (tuple(_spec(kind, tensor) for tensor in tensors) for kind, tensors in sides)
    return Signature(inputs, outputs, batched == {True})


def try_out(session: Any, signature: Signature) -> None:
    """Run the model with zeros: only that shows whether it takes any number of rows.

    Raises UnsupportedModelError if shapes are not as declared, and what onnxruntime raises.
    """
    for rows in (1, 2) if signature.batched else (1,):
        feeds = {tensor.name: np.zeros(_shape(tensor, rows), DTYPES[tensor.datatype]) for tensor in signature.inputs}
        for tensor, answer in zip(signature.outputs, session.run(None, feeds), strict=True):
            if list(answer.shape) != _shape(tensor, rows):
                raise UnsupportedModelError(
                    f"output '{tensor.name}' of {rows} rows has the shape {list(answer.shape)}"
                    f" instead of {_shape(tensor, rows)}"
                )


def _is_batched(kind: str, tensor: Any) -> bool:
    """Whether the first dimension is symbolic. Raises UnsupportedModelError if another one is."""
    if not tensor.type.startswith("tensor("):
        raise UnsupportedModelError(f"{kind} '{tensor.name}' is a {tensor.type}, not a tensor")
    for axis, size in enumerate(tensor.shape[1:], 1):
        if not isinstance(size, int):
            raise UnsupportedModelError(
                f"{kind} '{tensor.name}': dimension {axis} is dynamic; only the first one, the batch, may be"
            )
    return bool(tensor.shape) and not isinstance(tensor.shape[0], int)


def _spec(kind: str, tensor: Any) -> TensorSpec:
    element = tensor.type.removeprefix("tensor(").removesuffix(")")
    datatype = _TYPES.get(element, element.upper())
    if datatype not in DTYPES:
        raise UnsupportedModelError(f"{kind} '{tensor.name}' holds {element}, not numbers that a request can have")
    shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    row_bytes = math.prod(size for size in shape if size != -1) * DTYPES[datatype].itemsize
    if not 0 < row_bytes <= MAX_TENSOR_BYTES:
        raise UnsupportedModelError(
            f"{kind} '{tensor.name}' of shape {list(shape)} has {row_bytes} bytes;"
            f" 1 to {MAX_TENSOR_BYTES >> 20} MiB are possible"
        )
    return TensorSpec(tensor.name, datatype, shape, row_bytes)


def _shape(tensor: TensorSpec, rows: int) -> list[int]:
    return [rows if size == -1 else size for size in tensor.shape]


def _whole_layer() -> Layer:
    version = Version("onnxruntime", tasks=1, description="onnxruntime")
    return Layer("onnxruntime", "whole model", "", (), (version,), flops=0, bytes=0, max_ranks=1)
