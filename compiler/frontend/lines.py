"""Convolutions of several lines, [lines, channels, length], as those of one image whose rows are the lines.

A model whose batch is no batch of requests has such tensors: of a speech detector with three streams, or of a signal
that is cut into windows. The kernels know one image, [1, channels, lines, length], and a window of one row reaches no
other line. So operators that treat lines apart are applied to that image; others get the lines back.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gangway.compiler.frontend.batch.rules import ELEMENTWISE
from gangway.compiler.frontend.graph import Graph, Node, TensorType
from gangway.compiler.kernels.specs import Array

_WINDOWS = ("Conv", "MaxPool", "AveragePool")
_ELEMENTWISE = {*ELEMENTWISE.split(), "Identity"} - {"QuantizeLinear", "DequantizeLinear", "CastLike"}


def as_images(graph: Graph) -> Graph:
    """Return an equivalent graph in which convolutions of several lines are of images."""
    return graph if graph.batched else _Rewriter(graph).result()


class _Rewriter:
    """Goes through the nodes; `_images` are tensors that exist as an image, `_missing` those that only do so."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._nodes = graph, list[Node]()
        self._types, self._constants = dict(graph.types), dict(graph.constants)
        self._images: dict[str, str] = {}
        self._missing: set[str] = set()

    def result(self) -> Graph:
        """Return the graph with all nodes rewritten that can be."""
        for node in self._graph.nodes:
            rewritten = self._image_node(node)
            if rewritten is None:
                for name in node.inputs:
                    self._restore(name)
            self._nodes.append(rewritten or node)
        for name in self._graph.outputs:
            self._restore(name)
        return replace(self._graph, nodes=tuple(self._nodes), types=self._types, constants=self._constants)

    def _image_node(self, node: Node) -> Node | None:
        """Return the node that computes the output as an image; None if there is none, or if that is not useful."""
        shape = self._shape(node.outputs[0])
        if len(shape) != 3 or shape[0] == 1 or any(node.outputs[1:]) or node.captured:
            return None
        if node.operator in _WINDOWS and self._is_window(node):
            return self._window(node)
        if not any(name in self._images for name in node.inputs):
            return None
        first, *others = (self._shape(name) for name in node.inputs if name not in self._constants)
        if node.operator in _ELEMENTWISE and all(other in (shape, (), (1,)) for other in (first, *others)):
            return self._made(node, tuple(map(self._operand, node.inputs)), node.attributes)
        if node.operator == "BatchNormalization" and not others:
            return self._made(node, (self._image(node.inputs[0]), *node.inputs[1:]), node.attributes)
        if node.operator == "Slice" and not others and first[0] == shape[0]:
            return self._slice(node)
        return None

    def _is_window(self, node: Node) -> bool:
        kind = self._types.get(node.inputs[0])
        constants = all(name in self._constants for name in node.inputs[1:] if name)
        return kind is not None and kind.dtype == "float32" and len(kind.shape) == 3 and constants

    def _window(self, node: Node) -> Node:
        attributes = dict(node.attributes)
        for name in ("kernel_shape", "strides", "dilations"):
            if name in attributes:
                attributes[name] = [1, *attributes[name]]
        if "pads" in attributes:
            begin, end = attributes["pads"]
            attributes["pads"] = [0, begin, 0, end]
        x, *others = node.inputs
        if others:
            others[0] = self._constant(node.outputs[0], "weights", self._constants[others[0]][:, :, np.newaxis])
        return self._made(node, (self._image(x), *others), attributes)

    def _slice(self, node: Node) -> Node | None:
        """Along channels or lengths: the number of lines is the same."""
        x, *places = node.inputs
        if len(places) < 3 or any(name not in self._constants for name in places):
            return None
        axes = self._constants[places[2]] % 3
        if not axes.all():
            return None
        places[2] = self._constant(node.outputs[0], "axes", 2 * axes - 1)  # 1 and 3
        return self._made(node, (self._image(x), *places), node.attributes)

    def _made(self, node: Node, inputs: tuple[str, ...], attributes: Mapping[str, Any]) -> Node:
        """Return the node with an image as its output."""
        name, output = node.outputs[0], f"{node.outputs[0]}/image"
        self._images[name] = output
        self._missing.add(name)
        lines, channels, length = self._types[name].shape
        self._types[output] = replace(self._types[name], shape=(1, channels, lines, length))
        return replace(node, inputs=inputs, outputs=(output,), attributes=attributes)

    def _operand(self, name: str) -> str:
        """Return an operand as it is broadcast to an image."""
        if not name or self._shape(name) in ((), (1,)):
            return name
        if name not in self._constants:
            return self._image(name)
        value = self._constants[name]
        value = value.reshape((1,) * (3 - value.ndim) + value.shape)
        return self._constant(name, "image", value.swapaxes(0, 1)[np.newaxis])

    def _image(self, name: str) -> str:
        """Return a tensor as an image, which is made of the lines if need be."""
        if name not in self._images:
            kind = self._types[name]
            lines, channels, length = kind.shape
            rows = name if channels == 1 else f"{name}/rows"
            if channels > 1:
                self._step("Transpose", (name,), rows, replace(kind, shape=(channels, lines, length)), perm=[1, 0, 2])
            self._images[name] = f"{name}/image"
            self._reshape(rows, f"{name}/image", replace(kind, shape=(1, channels, lines, length)))
        return self._images[name]

    def _restore(self, name: str) -> None:
        """Make the lines of a tensor that only exists as an image."""
        if name not in self._missing:
            return
        self._missing.remove(name)
        kind = self._types[name]
        lines, channels, length = kind.shape
        if channels == 1:
            self._reshape(self._images[name], name, kind)
            return
        self._reshape(self._images[name], f"{name}/rows", replace(kind, shape=(channels, lines, length)))
        self._step("Transpose", (f"{name}/rows",), name, kind, perm=[1, 0, 2])

    def _reshape(self, source: str, output: str, kind: TensorType) -> None:
        self._step("Reshape", (source, self._constant(output, "shape", np.array(kind.shape, np.int64))), output, kind)

    def _step(self, operator: str, inputs: tuple[str, ...], output: str, kind: TensorType, **attributes: Any) -> None:
        self._types[output] = kind
        self._nodes.append(Node(output, operator, inputs, (output,), attributes))

    def _constant(self, owner: str, name: str, value: Array) -> str:
        self._constants[f"{owner}/{name}"] = value
        return f"{owner}/{name}"

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self._constants:
            return self._constants[name].shape
        return self._types[name].shape if name in self._types else ()
