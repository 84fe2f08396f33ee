"""Float16 copies of models."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

from benchmarks.precision.halves import halved
from testing.reference import example_of


def test_copies_have_numbers_of_float16_and_nearly_the_same_answers(compiled_zoo, tmp_path: Path) -> None:
    source = compiled_zoo.onnx_file("mlp")
    path = halved(source, tmp_path / "half.onnx")
    graph = onnx.load(path).graph
    kinds = {tensor.data_type for tensor in graph.initializer}
    kinds |= {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert TensorProto.FLOAT16 in kinds
    assert TensorProto.FLOAT not in kinds
    example = example_of("mlp", source)
    inputs = {name: values.astype(np.float16) for name, values in example.inputs.items()}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for output, answer in zip(session.get_outputs(), session.run(None, inputs), strict=True):
        wanted = example.outputs[output.name]
        assert np.asarray(answer).dtype == np.float16
        assert np.abs(answer - wanted).max() < 1e-2 * np.abs(wanted).max()
