"""Types and shapes of a request's inputs, checked against the model: a client's, and those between an ensemble's steps.

The order of the checks and, where clients may depend on them, the texts of the messages are Triton's.
"""

from collections.abc import Sequence

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.models import ServedModel, Shapes, Tensor

InputTensor = pb.ModelInferRequest.InferInputTensor


def shapes_of(inputs: Sequence[tuple[InputTensor, Tensor]], model: ServedModel) -> Shapes:
    """Return the shapes of inputs, each beside the model's. Raises RequestError (INVALID_ARGUMENT)."""
    rows = 0
    sizes: dict[str, int] = {}
    for given, tensor in inputs:
        if given.datatype != tensor.datatype:
            invalid(
                f"inference input '{tensor.name}' data-type is '{given.datatype}', but model '{model.name}'"
                f" expects '{tensor.datatype}'"
            )
        shape = tuple(given.shape)
        if not fits(shape, tensor, model.batched):
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
    return Shapes(rows or 1, tuple((tensor, tuple(given.shape)) for given, tensor in inputs), sizes)


def fits(shape: Sequence[int], tensor: Tensor, batched: bool) -> bool:
    """Whether a tensor may have this shape. A symbolic dimension may be 0, but the batch."""
    least = [int(batched and axis == 0) for axis in range(len(tensor.shape))]
    return len(shape) == len(tensor.shape) and all(
        size >= at_least if expected == -1 else size == expected
        for size, expected, at_least in zip(shape, tensor.shape, least, strict=True)
    )


def _check_rows(rows: int, size: int, tensor: Tensor, model: ServedModel) -> int:
    """Return the number of rows, which all inputs share; `rows` is that of the inputs before, 0 for the first."""
    if size > model.max_rows:
        invalid(f"inference request batch-size must be <= {model.max_rows} for '{model.name}', got {size}")
    if rows not in (0, size):
        invalid(
            f"input '{tensor.name}' batch size does not match other inputs for '{model.name}'."
            f" Expected {rows}, got {size}"
        )
    return size
