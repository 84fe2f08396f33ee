"""ONNX models from nodes and plain data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Dims = list[Any] | None
Kind = Dims | tuple[int, Dims] | npt.NDArray[Any] | EllipsisType
"""Of an input or output: the element type and its dimensions, or those of float32 alone, or an array like it; None: of
float32, and any shape; an ellipsis: nothing is known.
"""


def value_info(name: str, kind: Kind) -> Any:
    if isinstance(kind, EllipsisType):
        return helper.make_empty_tensor_value_info(name)
    if isinstance(kind, np.ndarray):
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(kind.dtype), kind.shape)
    element, dims = kind if isinstance(kind, tuple) else (TensorProto.FLOAT, kind)
    return helper.make_tensor_value_info(name, element, dims)


def make_model(
    nodes: Sequence[Any],
    inputs: Mapping[str, Kind],
    outputs: Mapping[str, Kind],
    constants: Mapping[str, Any] | None = None,
    opset: int = 17,
    ir_version: int = 8,
    domains: Mapping[str, int] | None = None,
    functions: Sequence[Any] = (),
) -> Any:
    """Return the model, unchecked; `domains`: versions of those that are not ONNX's own."""
    graph = helper.make_graph(
        nodes,
        "test",
        [value_info(name, kind) for name, kind in inputs.items()],
        [value_info(name, kind) for name, kind in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    imports = [helper.make_opsetid(*pair) for pair in {"": opset, **(domains or {})}.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version, functions=list(functions))


def save_model(path: Path, *parts: Any, **options: Any) -> Path:
    """Write a model as `make_model` makes it; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(make_model(*parts, **options), path)
    return path
