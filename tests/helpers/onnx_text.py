"""ONNX models from a text: onnx's own language, so that a reader sees the graph."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from tests.helpers.ways import Array

DOMAINS = {"ai.onnx.ml": 2, "com.microsoft": 1, "com.microsoft.extensions": 1}


def model_of(graph: str, opset: int = 17, **weights: Array) -> onnx.ModelProto:
    """Return the model of "(float[N,4] x) => (float[N,4] y) { y = Add(x, w) }", with its weights by name."""
    versions = {"": opset} | {name: version for name, version in DOMAINS.items() if f"= {name}." in graph}
    imports = ", ".join(f'"{name}" : {version}' for name, version in versions.items())
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]> g {graph}")
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items())
    return model


def write(path: Path, graph: str, **weights: Array) -> Path:
    """Write an ONNX file; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model_of(graph, **weights), path)
    return path


def save(repository: Path, name: str, graph: str, config: str = "", **weights: Array) -> Path:
    """Write a model of a repository, and its configuration if it has one; return the ONNX file."""
    path = write(repository / name / "1" / "model.onnx", graph, **weights)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return path


def convolutions(count: int, pads: int = 1) -> str:
    """Return nodes from x to t: so many convolutions, by weights w0, w1, ..., each with a Relu."""
    names = ["x", *(f"t{number}" for number in range(1, count)), "t"]
    return " ".join(
        f"c{number} = Conv<pads=[{pads}, {pads}, {pads}, {pads}]>({source}, w{number}) {target} = Relu(c{number})"
        for number, (source, target) in enumerate(pairwise(names))
    )


def weights_of(seed: int, shapes: Mapping[str, tuple[int, ...]], scale: float = 1) -> dict[str, Array]:
    """Return standard normal float32 values times `scale`, by name."""
    random = np.random.default_rng(seed)
    return {name: (random.standard_normal(shape) * scale).astype(np.float32) for name, shape in shapes.items()}
