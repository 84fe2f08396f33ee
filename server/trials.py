"""Requests of the server's own, to try a model with: of which sizes, with which contents.

A trial that fails shows nothing: the model may want other sizes, or other contents.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from gangway.artifact.format import MOST_PLAUSIBLE_ELEMENTS, PLAUSIBLE_SIZES
from gangway.executor.frames import example_bytes
from gangway.server.calls import Call, Contents, call_of
from gangway.server.control import ModelLoadError
from gangway.server.models import ServedModel, Shapes, item_bytes

Sizes: TypeAlias = Mapping[str, int]  # of symbolic dimensions, by their names
Trial: TypeAlias = tuple[Call, Contents, int]  # and its rows
ResultT = TypeVar("ResultT")


class TrialError(ModelLoadError):
    """The model has failed; with other inputs it may not."""


def trial_sizes(model: ServedModel, known: Sizes, warmed: Sequence[Sizes]) -> list[Sizes]:
    """Return the sizes to try a model with, in order; `warmed`, of its owner's samples, and `known` are possible."""
    if not model.symbols:
        return [{}]
    possible = [sizes for sizes in (*warmed, known) if all(symbol in sizes for symbol in model.symbols)]
    plausible = [dict.fromkeys(model.symbols, size) for size in PLAUSIBLE_SIZES]
    return possible + [sizes for sizes in plausible if _elements(model, sizes) <= MOST_PLAUSIBLE_ELEMENTS]


def _elements(model: ServedModel, sizes: Sizes) -> int:
    return max(math.prod(shape) for _, shape in trial_shapes(model, sizes).inputs)


def first_possible(sizes: Sequence[Sizes], attempt: Callable[[Sizes], ResultT]) -> ResultT:
    """Return the result of the first attempt that does not fail. Raises the last TrialError if all do."""
    failed = TrialError("there is nothing to try")
    for some in sizes:
        try:
            return attempt(some)
        except TrialError as error:
            failed = error
    raise failed


def trial_shapes(model: ServedModel, sizes: Sizes, rows: int = 1) -> Shapes:
    """Return shapes of all inputs to try a model with; sizes that its configuration gives go before these."""
    dims = [(tensor, axis, size) for tensor in model.all_inputs for axis, size in enumerate(tensor.shape)]
    configured = {tensor.symbols[axis]: size for tensor, axis, size in dims if tensor.symbols and size >= 0}
    own = {symbol: configured.get(symbol, sizes.get(symbol, 1)) for symbol in model.symbols}
    inputs = []
    for tensor in model.all_inputs:
        symbols = tensor.symbols or ("",) * len(tensor.shape)
        shape = [own.get(symbol, 1) if size == -1 else size for size, symbol in zip(tensor.shape, symbols, strict=True)]
        if model.batched and tensor.shape[0] == -1:
            shape[0] = rows
        inputs.append((tensor, tuple(shape)))
    rows = inputs[0][1][0] if model.batched else 1
    return Shapes(rows, tuple(inputs), own)


def trial_of(model: ServedModel, sizes: Sizes) -> Trial:
    """Return a call to try a model with, its contents, which are zeros, and its rows: one, unless more are configured.

    `sizes` of symbolic dimensions.
    """
    shapes = trial_shapes(model, sizes)
    contents = [example_bytes(tensor.datatype, shape, item_bytes(tensor.datatype)) for tensor, shape in shapes.inputs]
    return call_of(model, shapes, list(model.outputs.values())), contents, shapes.rows
