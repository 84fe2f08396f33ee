"""An ONNX model as plain data: nodes in topological order, constants as arrays, types of activations at batch 1."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gangway.compiler.errors import MixedRowsError, OneEngineError, UnsupportedModelError
from gangway.compiler.kernels.specs import Array

WIDE_BATCH = 7  # the second batch size, at which shapes are inferred to see where the batch is


@dataclass(frozen=True)
class TensorType:
    """Shape at batch 1 and numpy's name of the element type."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the plain tensor."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Node:
    """One ONNX operator. Optional inputs that are left out are empty strings."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def unsupported(self, why: str) -> UnsupportedModelError:
        """Return the error that says why this node cannot be compiled."""
        return UnsupportedModelError(f"node '{self.name}' ({self.operator}): {why}")

    def mixed(self, why: str) -> MixedRowsError:
        """Return the error that says how this node lets rows of the batch influence each other."""
        return MixedRowsError(f"node '{self.name}' ({self.operator}): it mixes rows of the batch: {why}")

    def one_engine(self, why: str) -> OneEngineError:
        """Return the error that says why onnxruntime alone is to compute this node."""
        return OneEngineError(f"node '{self.name}' ({self.operator}): {why}")


@dataclass(frozen=True)
class Graph:
    """A model. If `batched`, the first dimension of every input and output is a symbolic batch, taken as 1 here."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batched: bool
    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    types: Mapping[str, TensorType]
    wide_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # in a batch of WIDE_BATCH
    opset: int = 21  # of ONNX's own operators

    def uses(self) -> Counter[str]:
        """How often each tensor is read, by nodes or as an output of the model."""
        return Counter([name for node in self.nodes for name in node.inputs] + list(self.outputs))

    def producers(self) -> dict[str, Node]:
        """The node that computes each tensor."""
        return {name: node for node in self.nodes for name in node.outputs}
