"""Right answers: a model's inputs from a seed, and what onnxruntime makes of them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from gangway.clients.inputs import Array, TensorMetadata, infer_request, random_tensors
from gangway.protos import grpc_service_pb2 as pb

DATATYPES = {"tensor(float)": "FP32", "tensor(int32)": "INT32", "tensor(int64)": "INT64"}


@dataclass(frozen=True)
class Example:
    """A batch of inputs, by name, the outputs that are right, and the same as a serialised ModelInfer request."""

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    request: bytes


def open_session(path: Path, threads: int, rows: int = 1, spinning: bool = True) -> ort.InferenceSession:
    """Load a model into onnxruntime for batches of so many rows; its threads spin by default."""
    options = ort.SessionOptions()
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for name in symbolic_dimensions(path):
        options.add_free_dimension_override_by_name(name, rows)
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def example_of(model: str, path: Path, seed: int = 0, rows: int = 1) -> Example:
    """Make random inputs of so many rows for a model and let onnxruntime compute the outputs."""
    session = open_session(path, threads=1, rows=rows)
    metadata = [
        TensorMetadata(name=node.name, datatype=DATATYPES[node.type], shape=[_size(d) for d in node.shape])
        for node in session.get_inputs()
    ]
    inputs = random_tensors(metadata, batch=1, seed=seed)  # the session has fixed the real one already
    names = [node.name for node in session.get_outputs()]
    values = map(np.asarray, session.run(names, inputs))
    outputs = dict(zip(names, values, strict=True))
    request = infer_request(model, "", {tensor.name: (tensor.datatype, inputs[tensor.name]) for tensor in metadata})
    return Example(inputs, outputs, request.SerializeToString())


def repeated(example: Example, rows: int) -> Example:
    """Return an example of so many rows: those of another one, again and again.

    For models whose first dimension is the batch, on both sides.
    """
    inputs, outputs = (
        {name: np.resize(values, (rows, *values.shape[1:])) for name, values in side.items()}
        for side in (example.inputs, example.outputs)
    )
    request = pb.ModelInferRequest.FromString(example.request)
    tensors = {tensor.name: (tensor.datatype, inputs[tensor.name]) for tensor in request.inputs}
    message = infer_request(request.model_name, request.model_version, tensors)
    return Example(inputs, outputs, message.SerializeToString())


def symbolic_dimensions(path: Path) -> set[str]:
    """Return the names of a model's input sizes that are not fixed; the zoo's have only the batch."""
    graph = onnx.load(path, load_external_data=False).graph
    return {size.dim_param for node in graph.input for size in node.type.tensor_type.shape.dim if size.dim_param}


def _size(dimension: int | str | None) -> int:
    """Return -1 for a symbolic dimension."""
    return dimension if isinstance(dimension, int) else -1
