"""A file of float16 or bfloat16 as one of float32, for onnxruntime, which refuses some that kernels compute.

Converters mix both types in one node, and onnxruntime has few operators of bfloat16. Kernels compute all of it in
float32 (`frontend/halves.py`), so this is the model that they compute.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from onnx import numpy_helper

from gangway.compiler.errors import ModelError, UnsupportedModelError
from gangway.compiler.frontend.halves import has_halves
from gangway.compiler.frontend.importer import open_file
from gangway.compiler.model_file import initializer_field, make_readable, parse, with_initializers

Found = TypeVar("Found")


def or_widened(path: Path, look: Callable[[Iterable[bytes] | None], Found]) -> Found:
    """Return what `look` finds in a file, or in one of float32 if it refuses that of halves.

    `look` gets the parts of the other file, None for the file as it is. Raises what it raises of that.
    """
    try:
        return look(None)
    except UnsupportedModelError:
        with suppress(ModelError):
            if (parts := _widened(path)) is not None:
                return look(parts)
        raise


def _widened(path: Path) -> Iterator[bytes] | None:
    """Return the parts of the file of float32; None: no weight or input is a half. Raises ModelError, OSError."""
    written, _ = parse(path)
    if not has_halves(written.graph):
        return None
    model, constants = open_file(path)
    make_readable(model)
    kept = {tensor.name for tensor in model.graph.initializer}
    added = constants.keys() - {value.name for value in written.graph.input}
    inputs = [value for value in model.graph.input if value.name not in added]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    rest = (numpy_helper.from_array(value, name) for name, value in constants.items() if name not in kept)
    return with_initializers(model, map(initializer_field, rest))
