"""ONNX models from a text: onnx's own language, so that a reader sees the graph."""

from pathlib import Path

import onnx
import onnx.parser
from onnx import numpy_helper

from tests.helpers.served import Array


def model_of(graph: str, **weights: Array) -> onnx.ModelProto:
    """Return the model of "(float[N,4] x) => (float[N,4] y) { y = Add(x, w) }", with its weights by name."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {graph}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


def save(repository: Path, name: str, graph: str, config: str = "", **weights: Array) -> Path:
    """Write a model of a repository, and its configuration if it has one; return the ONNX file."""
    path = repository / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model_of(graph, **weights), path)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return path
