"""Types and shapes of a request's inputs, checked against the model: a client's, and those between an ensemble's steps.

The order of the checks and, where clients may depend on them, the texts of the messages are Triton's.
"""

from collections.abc import Sequence

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Shapes, Tensor

InputTensor = pb.ModelInferRequest.InferInputTensor


def shapes_of(inputs: Sequence[tuple[InputTensor, Tensor]], model: ServedModel) -> Shapes:
    """Return the shapes of inputs, each beside the model's. Raises RequestError (INVALID_ARGUMENT)."""
    rows: int | None = None
    sizes: dict[str, int] = {}
    for given, tensor in inputs:
        if given.datatype != tensor.datatype:
            invalid(
                f"inference input '{tensor.name}' data-type is '{given.datatype}', but model '{model.name}'"
                f" expects '{tensor.datatype}'"
            )
        shape = tuple(given.shape)
        if not fits(shape, tensor, model.least_rows):
            invalid(
                f"unexpected shape for input '{tensor.name}' for model '{model.name}'."
                f" Expected {list(tensor.shape)}, got {list(shape)}"
            )
        for axis, symbol in enumerate(tensor.symbols):
            if symbol and sizes.setdefault(symbol, shape[axis]) != shape[axis] and (axis or not model.batched):
                invalid(
                    f"input '{tensor.name}' for model '{model.name}': dimension {axis} is '{symbol}', of which the"
                    f" request has two sizes, {sizes[symbol]} and {shape[axis]}"
                )
        if model.batched:
            rows = _check_rows(rows, shape[0], tensor, model)
    return Shapes(rows or 1, tuple((tensor, tuple(given.shape)) for given, tensor in inputs), sizes, rows == 0)


def fits(shape: Sequence[int], tensor: Tensor, least_rows: int) -> bool:
    """Whether a tensor may have this shape. Symbolic dimensions may be 0, the first one `least_rows` at least."""
    least = [0 if axis else least_rows for axis in range(len(tensor.shape))]
    return len(shape) == len(tensor.shape) and all(
        size >= at_least if expected == -1 else size == expected
        for size, expected, at_least in zip(shape, tensor.shape, least, strict=True)
    )


def _check_rows(rows: int | None, size: int, tensor: Tensor, model: ServedModel) -> int:
    """Return the number of rows, which all inputs share; `rows` is that of the inputs before, None for the first."""
    if size > model.max_rows and not model.max_batch_size:
        invalid(f"model '{model.name}' computes at most {model.max_rows} rows at a time, got {size}")
    if size > model.max_rows:
        invalid(f"inference request batch-size must be <= {model.max_rows} for '{model.name}', got {size}")
    if rows not in (None, size):
        invalid(
            f"input '{tensor.name}' batch size does not match other inputs for '{model.name}'."
            f" Expected {rows}, got {size}"
        )
    return size
