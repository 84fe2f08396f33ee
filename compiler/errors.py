"""Why a model cannot be compiled. All errors carry a message for the model's owner."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_CAUSE = 500  # an exception of TVM may show a whole program


class ModelError(Exception):
    """The file is not a valid ONNX model: truncated, broken, or contradictory in its shapes."""


class UnreadableModelError(ModelError):
    """The file holds no ONNX graph at all: it is something else, truncated, or it changes while it is read."""


class UnsupportedModelError(ModelError):
    """A valid model that this compiler cannot compile; the message names node, operator and what is missing.

    `pipeline.compile_model` raises it only where onnxruntime cannot serve the model either.
    """


class CompilerFaultError(UnsupportedModelError):
    """The compiler itself fails at the model. The message names the exception, and the node or layer where known."""


class EndedApartError(UnsupportedModelError):
    """A process that computes apart from the compiler's own is ended by a signal, or by a library that exits."""


class CompilerMissingError(UnsupportedModelError):
    """Packages that compile a model are not installed."""


class MixedRowsError(UnsupportedModelError):
    """Rows of the model's batch influence each other, as its operators say: requests must not share a run."""


class WrongSizeError(UnsupportedModelError):
    """A tensor has another size than its node takes: `size` on `axis`, which a file may leave open."""

    def __init__(self, message: str, tensor: str, axis: int, size: int) -> None:
        super().__init__(message)
        self.tensor, self.axis, self.size = tensor, axis, size


class OneEngineError(UnsupportedModelError):
    """A node that could be compiled, but not so that it always answers what onnxruntime answers."""


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Say of exceptions where they arise: at a node or a layer."""
    try:
        yield
    except Exception as error:
        error.add_note(place)
        raise


@contextmanager
def faults_as_refusals(*expected: type[Exception]) -> Iterator[None]:
    """Raise CompilerFaultError for an exception that says nothing of the model, with its traceback on standard error.

    OSError and MemoryError pass: another attempt may succeed. So do `expected` ones.
    """
    passing: tuple[type[Exception], ...] = (ModelError, OSError, MemoryError, *expected)
    try:
        yield
    except Exception as error:
        if isinstance(error, passing):
            raise
        traceback.print_exc()
        cause = " ".join(f"{type(error).__name__}: {error}"[:LONGEST_CAUSE].split())
        places = getattr(error, "__notes__", ())
        raise CompilerFaultError(f"a fault of the compiler{f' at {places[0]}' if places else ''}: {cause}") from error
