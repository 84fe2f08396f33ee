"""Where the rows of a batch stand in a tensor, and what an operator's rule gets to know of its operands."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gangway.compiler.errors import MixedRowsError, UnsupportedModelError
from gangway.compiler.frontend.batch.numbers import ROWS, UNKNOWN, AffineNumbers, constant
from gangway.compiler.frontend.graph import Node
from gangway.compiler.kernels.specs import Array

NOT_KNOWN = "it is not known whether it mixes rows of the batch"


@dataclass(frozen=True)
class BatchAxis:
    """The place of the batch: an axis, which at batch 1 is `before` x `after` long, the batch between the two."""

    axis: int
    before: int = 1
    after: int = 1


@dataclass(frozen=True)
class BatchedTensor:
    """A tensor in a batch of any size.

    `shape` is that at batch 1, `rows` the place of the batch (None: all batches have the same shape). `value` is that
    at batch 1, None if it depends on data. `numbers` are those of a row; None: `value` in all batches, or not known.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: BatchAxis | None = None
    numbers: AffineNumbers | None = None
    value: Array | None = None

    @property
    def varies(self) -> bool:
        """Whether its numbers depend on the size of the batch or on the row's number."""
        return self.numbers is not None and bool(self.numbers.terms or self.numbers.why_not)


@dataclass(frozen=True)
class Operands:
    """A node, what is known of its inputs, and the shape of its first output: at batch 1, and in a larger batch.

    The latter is empty if it is not known.
    """

    node: Node
    tensors: tuple[BatchedTensor, ...]
    output: tuple[int, ...]
    wide_output: tuple[int, ...]

    @cached_property
    def rows(self) -> tuple[BatchAxis | None, ...]:
        """For each input the place of the batch."""
        return tuple(tensor.rows for tensor in self.tensors)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """For each input its shape at batch 1."""
        return tuple(tensor.shape for tensor in self.tensors)

    @cached_property
    def values(self) -> tuple[Array | None, ...]:
        """For each input its value, if that is the same in all batches."""
        return tuple(None if tensor.varies or tensor.rows else tensor.value for tensor in self.tensors)

    @cached_property
    def numbers(self) -> tuple[AffineNumbers, ...]:
        """For each input its numbers."""
        return tuple(
            tensor.numbers or (UNKNOWN if tensor.value is None else constant(tensor.value)) for tensor in self.tensors
        )

    def batched(self) -> Iterator[tuple[int, BatchAxis]]:
        """Each input that has the batch."""
        return ((index, rows) for index, rows in enumerate(self.rows) if rows)

    def only_first(self) -> BatchAxis:
        """Return the place in input 0; no other may have one."""
        first = self.rows[0]
        if first is None or any(self.rows[1:]):
            raise self.unknown("an input other than the first depends on the batch")
        return first

    def common(self, places: Iterator[BatchAxis]) -> BatchAxis:
        """Return the place that all inputs agree on."""
        found = set(places)
        if len(found) != 1:
            raise self.mixed("the batch is at different places of its inputs")
        return found.pop()

    def axes(self, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the axes that the node states, as attribute `axis` or `axes` or, since opset 13 or 18, as input 1."""
        rank = len(self.shapes[0])
        given = self.node.attributes.get("axes", self.node.attributes.get("axis"))
        if given is None and len(self.values) > 1 and (value := self.values[1]) is not None:
            given = value.ravel().tolist()
        axes = default if given is None else (given,) if isinstance(given, int) else tuple(given)
        return tuple(axis % rank for axis in axes)

    def grown(self, index: int) -> BatchAxis | None:
        """Return the axis that an input, a shape, says to be a multiple of the number of rows; None: there is none."""
        terms = self.numbers[index].terms
        if not terms:
            return None
        own, many = self.numbers[index].low, terms.get(ROWS)
        axes = [] if many is None else np.flatnonzero(np.broadcast_to(many, self.shapes[index])).tolist()
        if len(terms) > 1 or many is None or len(axes) != 1 or np.broadcast_to(own, self.shapes[index])[axes[0]]:
            raise self.unknown("a shape is more than once a multiple of the number of rows, or none")
        return BatchAxis(axes[0], after=int(np.broadcast_to(many, self.shapes[index])[axes[0]]))

    def mixed(self, why: str) -> MixedRowsError:
        """Return the error of a node that certainly mixes rows."""
        return self.node.mixed(why)

    def unknown(self, why: str) -> UnsupportedModelError:
        """Return the error of a node that may mix rows or not, or that moves them, which a later one may undo."""
        return self.node.unsupported(f"{NOT_KNOWN}: {why}")

    def picking(self, inputs: tuple[int, ...]) -> "Operands":
        """Return what is known of these inputs only."""
        return replace(self, tensors=tuple(self.tensors[index] for index in inputs))
