"""Operators on several images, [images, channels, height, width], as those of one image each.

A model whose batch is no batch of requests has such tensors: its file says how many images there are, or its rows are
mixed at the end. The kernels know one image. So operators that treat images apart are applied to each in turn, with
the same weights; others get the images joined.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gangway.compiler.frontend.batch.rules import ELEMENTWISE, FIRST_AXIS, FROM_AXIS, REDUCTIONS, VIEWS
from gangway.compiler.frontend.graph import Graph, Node, TensorType, single
from gangway.compiler.kernels.specs import Array

MAX_NODES = 3600  # of all images together: an artifact has a limit of layers
LEAST_RANK = 4  # lines, [lines, channels, length], become rows of one image
_WINDOWS = {*FIRST_AXIS.split()} - {"ConvInteger", "QuantisedConv", "TreeSums"}
_ELEMENTWISE = {*ELEMENTWISE.split(), "Identity"} - {"DynamicFakeQuantise"}  # its range is that of all images
_REDUCTIONS = {f"Reduce{name}" for name in REDUCTIONS.split()}
_LIGHT = _WINDOWS | _ELEMENTWISE | _REDUCTIONS | {"Concat", "Pad", "Slice", "Split"}


def has_several_images(graph: Graph) -> bool:
    """Whether windows slide over several images of a row; of a batch it must be known that no node mixes its rows."""
    shapes = (graph.types[node.inputs[0]].shape for node in graph.nodes if _is_window(node, graph.types))
    return graph.apart and any(shape[0] > 1 for shape in shapes)


def split_images(graph: Graph) -> Graph:
    """Return an equivalent graph in which windows slide over one image only; constants must have been folded."""
    for between in (True, False):
        rewriter = _Rewriter(graph, between)
        if 0 < rewriter.count <= MAX_NODES:
            return rewriter.result()
    return graph


def _is_window(node: Node, types: Mapping[str, TensorType]) -> bool:
    kind = types.get(node.inputs[0]) if node.operator in _WINDOWS else None
    return kind is not None and len(kind.shape) >= LEAST_RANK


class _Rewriter:
    """Goes through the nodes; `_images` has the tensors that exist as images, `_missing` those that only do so.

    `between`: whether all that lies between windows is split, too, or light operators only.
    """

    def __init__(self, graph: Graph, between: bool) -> None:
        self._graph, self._nodes = graph, list[Node]()
        self._types, self._constants = dict(graph.types), dict(graph.constants)
        self._images: dict[str, tuple[str, ...]] = {}
        self._missing: set[str] = set()
        self._sources = self._chosen(between)
        self.count = sum(self._shape(name)[0] for name in self._sources)  # of nodes that are made

    def _chosen(self, between: bool) -> dict[str, tuple[int, ...]]:
        """Return the nodes to be split, by their first outputs, each with the inputs that are split.

        These are windows, what lies between them, and light operators in front of and behind them.
        """
        possible = [(node, self._split_inputs(node)) for node in self._graph.nodes]
        wanted = set[str]()  # tensors that windows read, directly or not
        for node, sources in reversed(possible):
            if sources and (_is_window(node, self._types) or not wanted.isdisjoint(node.outputs)):
                wanted.update(node.inputs[index] for index in sources)
        made, chosen = set[str](), {}  # by nodes that are split
        for node, sources in possible:
            is_behind = any(node.inputs[index] in made for index in sources)
            is_before = not wanted.isdisjoint(node.outputs)
            if node.operator in _LIGHT:
                is_image = len(self._shape(node.outputs[0])) >= LEAST_RANK
                is_split = is_behind or (is_before and is_image)
            else:
                is_split = between and is_behind and is_before
            if sources and (is_split or _is_window(node, self._types)):
                chosen[node.outputs[0]] = sources
                made.update(node.outputs)
        return chosen

    def _split_inputs(self, node: Node) -> tuple[int, ...]:
        """Return the inputs of which image i is all that image i of the outputs needs; none if there are others."""
        shape, count = self._shape(node.outputs[0]), len(node.inputs)
        if len(shape) < 2 or shape[0] < 2 or node.captured or any(name not in self._types for name in node.outputs):
            return ()
        if node.operator in _ELEMENTWISE:
            return self._elementwise(node, shape)
        if node.operator == "Concat":
            return tuple(range(count)) if single(node.attributes, "axis", 0, len(shape)) else ()
        if node.operator == "MatMul" and node.inputs[1] not in self._constants:
            both = [self._shape(name) for name in node.inputs]
            return (0, 1) if all(len(each) == len(shape) > 2 and each[0] == shape[0] for each in both) else ()
        x = self._shape(node.inputs[0])
        others = all(name in self._constants or not name for name in node.inputs[1:])
        return (0,) if others and x[:1] == shape[:1] and self._keeps_first(node, len(x)) else ()

    def _elementwise(self, node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
        shapes = [self._shape(name) for name in node.inputs]
        if node.operator in ("QuantizeLinear", "DequantizeLinear"):
            is_apart = len(shapes[1]) < 2 and (not shapes[1] or single(node.attributes, "axis", 1, len(shape)))
            return (0,) if is_apart else ()
        return tuple(index for index, each in enumerate(shapes) if len(each) == len(shape) and each[0] == shape[0])

    def _keeps_first(self, node: Node, rank: int) -> bool:
        """Whether a node of one activation, with as many images in as out, treats them apart."""
        match node.operator:
            case operator if operator in _WINDOWS:
                return not node.attributes.get("training_mode", 0)
            case operator if operator in VIEWS:
                return True
            case operator if operator in FROM_AXIS:
                return single(node.attributes, "axis", FROM_AXIS[operator], rank) > 0
            case operator if operator in _REDUCTIONS or operator in ("Pad", "Slice"):
                return self._is_beside_first(node, rank)
            case "Split" | "Gather":
                return single(node.attributes, "axis", 0, rank) > 0
            case "Transpose":
                return bool(node.attributes.get("perm", (1,))[0] == 0)
            case "MatMul":
                return self._shape(node.inputs[1])[:-2] == ()
            case "Gemm":
                added = self._shape(node.inputs[2]) if len(node.inputs) > 2 else ()
                return not node.attributes.get("transA", 0) and (len(added) < 2 or added[0] == 1)
        return False

    def _is_beside_first(self, node: Node, rank: int) -> bool:
        """Whether a reduction, Pad or Slice leaves the first axis alone; its axes may be an attribute or an input."""
        if node.operator == "Pad" and len(node.inputs) < 4:
            pads = self._constants[node.inputs[1]] if len(node.inputs) > 1 else np.array(node.attributes["pads"])
            return not pads.reshape(2, -1)[:, 0].any()
        place = {"Pad": 3, "Slice": 3}.get(node.operator, 1)
        axes = node.attributes.get("axes", ())
        if len(node.inputs) > place and node.inputs[place]:
            axes = self._constants[node.inputs[place]].ravel().tolist()
        return len(axes) > 0 and all(axis % rank for axis in axes)

    def result(self) -> Graph:
        """Return the graph with the chosen nodes split."""
        for node in self._graph.nodes:
            if node.outputs[0] in self._sources:
                self._split(node, self._sources[node.outputs[0]])
                continue
            for name in node.inputs:
                self._join(name)
            self._nodes.append(node)
        for name in self._graph.outputs:
            self._join(name)
        return replace(self._graph, nodes=tuple(self._nodes), types=self._types, constants=self._constants)

    def _split(self, node: Node, sources: tuple[int, ...]) -> None:
        """Add one node for each image."""
        node = self._of_one(node)
        parts = {index: self._parts(node.inputs[index]) for index in sources}
        for name in node.outputs:
            kind = self._types[name]
            self._images[name] = tuple(f"{name}/image{place}" for place in range(kind.shape[0]))
            self._missing.add(name)
            self._types |= dict.fromkeys(self._images[name], replace(kind, shape=(1, *kind.shape[1:])))
        for place in range(self._shape(node.outputs[0])[0]):
            inputs = tuple(parts[index][place] if index in parts else name for index, name in enumerate(node.inputs))
            for index, name in enumerate(inputs):
                if index not in parts:
                    self._join(name)
            outputs = tuple(self._images[name][place] for name in node.outputs)
            self._nodes.append(replace(node, name=f"{node.name}/image{place}", inputs=inputs, outputs=outputs))

    def _of_one(self, node: Node) -> Node:
        """Return the node with shapes among its inputs as they are of one image."""
        output = node.outputs[0]
        shape = self._shape(output)
        if node.operator in VIEWS and node.operator not in ("Identity", "Dropout"):
            target = self._constant(f"{output}/shape", np.array((1, *shape[1:]), np.int64))
            return replace(node, operator="Reshape", inputs=(node.inputs[0], target), attributes={})
        if node.operator == "Resize" and len(node.inputs) > 3 and not node.attributes.get("axes"):
            sizes = self._constants[node.inputs[3]].copy()
            sizes[0] = 1
            return replace(node, inputs=(*node.inputs[:3], self._constant(f"{output}/sizes", sizes)))
        return node

    def _parts(self, name: str) -> tuple[str, ...]:
        """Return the images of a tensor, which may be a constant."""
        if name in self._images:
            return self._images[name]
        count = self._shape(name)[0]
        parts = self._images[name] = tuple(f"{name}/image{place}" for place in range(count))
        if name in self._constants:
            self._constants |= {part: self._constants[name][place, None] for place, part in enumerate(parts)}
            return parts
        kind = self._types[name]
        for place, part in enumerate(parts):
            limits = (place, place + 1, 0)
            places = [self._constant(f"{part}/{index}", np.array([n], np.int64)) for index, n in enumerate(limits)]
            self._add("Slice", (name, *places), part, replace(kind, shape=(1, *kind.shape[1:])))
        return parts

    def _join(self, name: str) -> None:
        """Make the tensor of all images that only exists in parts."""
        if name in self._missing:
            self._missing.remove(name)
            self._add("Concat", self._images[name], name, self._types[name], axis=0)

    def _add(self, operator: str, inputs: tuple[str, ...], output: str, kind: TensorType, **attributes: Any) -> None:
        self._types[output] = kind
        self._nodes.append(Node(output, operator, inputs, (output,), attributes))

    def _constant(self, name: str, value: Array) -> str:
        self._constants[name] = value
        return name

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self._constants:
            return self._constants[name].shape
        return self._types[name].shape if name in self._types else ()
