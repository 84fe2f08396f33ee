"""Definitions of operators in simpler ones, as nodes, for operators that ONNX itself does not define so.

They hold for every operator set that the importer accepts; where sets differ, the helper writes what is right.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import Graph, Node, TensorType
from gangway.compiler.frontend.shapes.rules import transposed_begin
from gangway.compiler.kernels.plain_specs import FLOATS, MOST_OPERANDS
from gangway.compiler.kernels.specs import Array

_REDUCED_BY_INPUT = {"ReduceSum": 13}  # the others since 18
_SLICED_BY_INPUT, _PADDED_BY_INPUT = 10, 11
_SELECTS = 9  # the first operator set with Where
_EQUAL_FLOATS = 11  # the first operator set whose Equal takes floats
_ONE_AXIS = 13  # before this operator set, an axis meant all from there on
_MOST_SUMMED = 1 << 16  # of all sums together: tens of microseconds


@dataclass
class Body:
    """Nodes in place of one node, while they grow. Names of results are unique in the graph."""

    node: Node
    graph: Graph
    nodes: list[Node] = field(default_factory=list)

    @property
    def may_mix(self) -> bool:
        """Whether the check of the batch is to see the body, so that what is made for batch 1 must do for all."""
        return self.graph.batched and not self.graph.apart

    def type(self, index: int) -> TensorType:
        """The type of an input."""
        return self.type_of(self.node.inputs[index])

    def type_of(self, name: str) -> TensorType:
        """The type of a tensor. Raises UnsupportedModelError if it is not known."""
        if name in self.graph.constants:
            value = self.graph.constants[name]
            return TensorType(value.shape, value.dtype.name)
        if name not in self.graph.types:
            raise self.node.unsupported(f"the shape of '{name}' is not known")
        return self.graph.types[name]

    def value(self, index: int) -> Array | None:
        """An input that is constant; None if it is left out. Raises UnsupportedModelError if it is not constant."""
        name = self.node.inputs[index] if index < len(self.node.inputs) else ""
        if not name:
            return None
        if name not in self.graph.constants:
            raise self.node.unsupported(f"its input {index}, '{name}', is not a constant")
        return self.graph.constants[name]

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute of the node."""
        return self.node.attributes.get(name, default)

    def op(self, operator: str, *inputs: str, output: str = "", domain: str = "", **attributes: Any) -> str:
        """Add a node with one output; return the output's name."""
        name = output or f"{next(filter(None, self.node.outputs))}/{len(self.nodes)}"
        self.nodes.append(Node(f"{self.node.name}/{len(self.nodes)}", operator, inputs, (name,), attributes, domain))
        return name

    def constant(self, value: Any, dtype: str = "") -> str:
        """Add a constant."""
        array = np.asarray(value, dtype or None)
        return self.op("Constant", value=numpy_helper.from_array(array))

    def integers(self, values: Sequence[int]) -> str:
        """Add a constant vector of int64."""
        return self.constant(np.asarray(values, np.int64))

    def reshape(self, x: str, shape: Sequence[int], output: str = "") -> str:
        """Another shape; 0 keeps the length of the same axis, as the batch must."""
        return self.op("Reshape", x, self.integers(shape), output=output)

    def reduce(self, operator: str, x: str, axes: Sequence[int], keepdims: int = 1, wraps: bool = False) -> str:
        """A reduction; `wraps`, of integers: a sum that wraps around."""
        attributes: dict[str, Any] = {"keepdims": keepdims, **({"wraps": 1} if wraps else {})}
        if self.graph.opset >= _REDUCED_BY_INPUT.get(operator, 18):
            return self.op(operator, x, self.integers(axes), **attributes)
        return self.op(operator, x, axes=list(axes), **attributes)

    def slice(self, x: str, axis: int, begin: int, end: int, output: str = "") -> str:
        """A part of one axis."""
        if self.graph.opset >= _SLICED_BY_INPUT:
            return self.op("Slice", x, *(self.integers([n]) for n in (begin, end, axis)), output=output)
        return self.op("Slice", x, starts=[begin], ends=[end], axes=[axis], output=output)

    def equal(self, x: str, y: str, dtype: str) -> str:
        """Whether numbers of this type are equal; floats of old operator sets finite."""
        if dtype not in FLOATS or self.graph.opset >= _EQUAL_FLOATS:
            return self.op("Equal", x, y)
        return self.op("Not", self.op("Cast", self.op("Sub", x, y), to=TensorProto.BOOL))

    def pad(self, x: str, pads: Sequence[int]) -> str:
        """Zeros around a tensor."""
        if self.graph.opset >= _PADDED_BY_INPUT:
            return self.op("Pad", x, self.integers(pads))
        return self.op("Pad", x, pads=list(pads))


Writer = Callable[[Body], None]
_writers: dict[tuple[str, str], Writer] = {}


def defines(*operators: str, domain: str = "") -> Callable[[Writer], Writer]:
    """Register the decorated function as the one that writes the bodies of these operators."""

    def register(writer: Writer) -> Writer:
        _writers.update({(domain, operator): writer for operator in operators})
        return writer

    return register


def decompose(node: Node, graph: Graph) -> tuple[Node, ...]:
    """Return the simpler nodes; empty if there are none."""
    try:
        return write_body(node, graph)
    except UnsupportedModelError:
        return ()


def is_defined(domain: str, operator: str) -> bool:
    """Whether a definition is registered."""
    return (domain, operator) in _writers


def write_body(node: Node, graph: Graph) -> tuple[Node, ...]:
    """Return the simpler nodes; empty if nothing defines the operator.

    Raises UnsupportedModelError that says what the definition does not cover.
    """
    if (node.domain, node.operator) not in _writers:
        return ()
    body = Body(node, graph)
    _writers[node.domain, node.operator](body)
    return tuple(body.nodes)


def hide_keys(node: Node, graph: Graph) -> tuple[Node, ...]:
    """Return nodes that make an Attention's mask one in which -inf is in the place of the lowest number, if need be.

    onnxruntime's answer is 0 where a mask leaves no key of a row, by the one or the other; ONNX knows only -inf.
    """
    body, name = Body(node, graph), node.inputs[3] if len(node.inputs) > 3 else ""
    if not name or body.type_of(name).dtype not in FLOATS:
        return ()
    dtype = body.type_of(name).dtype
    lowest = body.constant(np.finfo(dtype).min, dtype)
    hidden = body.op("LessOrEqual", name, lowest, output=f"{node.outputs[0]}/hidden")
    never = body.constant(-math.inf, dtype)
    body.op("Where", hidden, never, name, output=f"{node.outputs[0]}/mask")
    return tuple(body.nodes)


@defines("Conv", "MaxPool", "AveragePool")
def of_a_line(body: Body) -> None:
    """A line of pixels is an image of one row."""
    kind = body.type(0)
    if len(kind.shape) != 3 or any(body.node.outputs[1:]):
        raise body.node.unsupported("only lines are possible: [batch, channels, length]")
    attributes = dict(body.node.attributes)
    for name, one in (("kernel_shape", 1), ("strides", 1), ("dilations", 1)):
        if name in attributes:
            attributes[name] = [one, *attributes[name]]
    if "pads" in attributes:
        begin, end = attributes["pads"]
        attributes["pads"] = [0, begin, 0, end]
    x, *others = body.node.inputs
    image = body.reshape(x, [0, kind.shape[1], 1, kind.shape[2]])
    if body.node.operator == "Conv":
        outputs, inputs, length = body.type(1).shape
        others[0] = body.reshape(others[0], [outputs, inputs, 1, length])
    result = body.op(body.node.operator, image, *others, **attributes)
    _, channels, length = body.type_of(body.node.outputs[0]).shape
    body.reshape(result, [0, channels, length], body.node.outputs[0])


@defines("GlobalAveragePool", "GlobalMaxPool")
def of_everything(body: Body) -> None:
    """Means and maxima of lines and volumes."""
    axes = list(range(2, len(body.type(0).shape)))
    operator = "ReduceMean" if body.node.operator == "GlobalAveragePool" else "ReduceMax"
    result = body.reduce(operator, body.node.inputs[0], axes)
    if operator == "ReduceMax" and body.type(0).dtype in FLOATS:
        lowest = body.constant(np.finfo(body.type(0).dtype).min, body.type(0).dtype)  # as of onnxruntime
        body.op("Max", result, lowest, output=body.node.outputs[0])
        return
    body.op("Identity", result, output=body.node.outputs[0])


@defines("Split")
def split(body: Body) -> None:
    """A Slice for each part."""
    shape = body.type(0).shape
    axis = body.attribute("axis", 0) % len(shape)
    given = body.value(1)
    sizes = body.attribute("split", None) if given is None else given.reshape(-1).tolist()
    if sizes is None:
        size = -(-shape[axis] // len(body.node.outputs))
        sizes = [min(size, shape[axis] - begin) for begin in range(0, shape[axis], size)]
    begin = 0
    for output, size in zip(body.node.outputs, sizes, strict=True):
        if output:
            body.slice(body.node.inputs[0], axis, begin, begin + size, output)
        begin += size


@defines("DepthToSpace")
def depth_to_space(body: Body) -> None:
    """Channels become pixels: two changes of shape around a transposition."""
    _, channels, height, width = body.type(0).shape
    size = body.attribute("blocksize", 1)
    depth = channels // size**2
    if body.attribute("mode", b"DCR") == b"DCR":
        parts, order = [0, size, size, depth, height, width], [0, 3, 4, 1, 5, 2]
    else:
        parts, order = [0, depth, size, size, height, width], [0, 1, 4, 2, 5, 3]
    moved = body.op("Transpose", body.reshape(body.node.inputs[0], parts), perm=order)
    body.reshape(moved, [0, depth, height * size, width * size], body.node.outputs[0])


@defines("SpaceToDepth")
def space_to_depth(body: Body) -> None:
    """Pixels become channels."""
    _, channels, height, width = body.type(0).shape
    size = body.attribute("blocksize", 1)
    parts = [0, channels, height // size, size, width // size, size]
    order = [0, 3, 5, 1, 2, 4] if body.attribute("mode", b"DCR") == b"DCR" else [0, 1, 3, 5, 2, 4]
    moved = body.op("Transpose", body.reshape(body.node.inputs[0], parts), perm=order)
    body.reshape(moved, [0, channels * size**2, height // size, width // size], body.node.outputs[0])


@defines("Sum", "Mean", "Max", "Min")
def of_many_operands(body: Body) -> None:
    """A chain of the same operator, in onnxruntime's order, each with as many operands as one layer reads."""
    operator, inputs = body.node.operator, list(body.node.inputs)
    if len(inputs) <= MOST_OPERANDS:
        raise body.node.unsupported(f"it has {len(inputs)} operands, which one layer reads")
    total, is_mean = inputs.pop(0), operator == "Mean"
    while inputs:
        taken, inputs = inputs[: MOST_OPERANDS - 1], inputs[MOST_OPERANDS - 1 :]
        output = "" if inputs or is_mean else body.node.outputs[0]
        total = body.op("Sum" if is_mean else operator, total, *taken, output=output)
    if is_mean:
        count = body.constant(len(body.node.inputs), body.type(0).dtype)
        body.op("Div", total, count, output=body.node.outputs[0])


@defines("Trilu")
def trilu(body: Body) -> None:
    """A triangle of the last two axes, zeros elsewhere."""
    kind, offset = body.type(0), body.value(1)
    if body.may_mix and body.graph.wide_shapes.get(body.node.inputs[0], ())[-2:] != kind.shape[-2:]:
        raise body.node.unsupported("the triangle depends on the batch")
    k = 0 if offset is None else int(offset.reshape(()))
    rows, columns = np.indices(kind.shape[-2:])
    kept = columns - rows >= k if body.attribute("upper", 1) else columns - rows <= k
    zero = body.constant(np.zeros(1, kind.dtype))
    body.op("Where", body.constant(kept), body.node.inputs[0], zero, output=body.node.outputs[0])


@defines("EyeLike")
def eye_like(body: Body) -> None:
    """A constant."""
    rows, columns = body.type(0).shape
    if body.may_mix:
        raise body.node.unsupported("its output's size depends on the batch")
    dtype = body.type_of(body.node.outputs[0]).dtype
    eye = body.constant(np.eye(rows, columns, body.attribute("k", 0), dtype))
    body.op("Identity", eye, output=body.node.outputs[0])


@defines("TopK")
def top_of_one(body: Body) -> None:
    """Of a single number, as exporters sort the length of a single sequence."""
    shape, k = body.type(0).shape, body.value(1)
    count = body.attribute("k", 1) if k is None else int(k.reshape(-1)[0])
    if not shape or shape[body.attribute("axis", -1)] != 1 or count != 1 or body.may_mix:
        raise body.node.unsupported("several numbers are sorted")
    values, places = (*body.node.outputs, "")[:2]
    if values:
        body.op("Identity", body.node.inputs[0], output=values)
    if places:
        body.op("Identity", body.constant(np.zeros(shape, np.int64)), output=places)


@defines("OneHot")
def one_hot(body: Body) -> None:
    """Where an index equals the position; negative ones count from the end."""
    depth = body.value(1)
    assert depth is not None
    length, rank = int(depth.reshape(-1)[0]), len(body.type(0).shape)
    axis = body.attribute("axis", -1) % (rank + 1)
    if body.may_mix:
        raise body.node.unsupported("the model has a batch")
    shape = list(body.type(0).shape)
    indices = body.reshape(body.node.inputs[0], [*shape[:axis], 1, *shape[axis:]])
    fractions = body.type(0).dtype in FLOATS  # only a whole number is a place
    if not fractions:
        indices = body.op("Cast", indices, to=7)
    positions = np.arange(length, dtype=body.type(0).dtype if fractions else np.int64)
    positions = positions.reshape([-1 if n == axis else 1 for n in range(rank + 1)])
    here = body.op("Equal", indices, body.constant(positions))
    from_end = body.op("Equal", indices, body.constant(positions - length))
    values = body.node.inputs[2]
    off, on = (body.slice(values, 0, n, n + 1) for n in (0, 1))
    body.op("Where", body.op("Or", here, from_end), on, off, output=body.node.outputs[0])


@defines("Hardmax")
def hardmax(body: Body) -> None:
    """1 at the first maximum along an axis."""
    kind = body.type(0)
    if body.graph.opset < _ONE_AXIS:
        raise body.node.unsupported(f"before opset {_ONE_AXIS} it works on all axes from the given one on")
    axis = body.attribute("axis", -1) % len(kind.shape)
    place = body.op("ArgMax", body.node.inputs[0], axis=axis, keepdims=1)
    positions = np.arange(kind.shape[axis]).reshape([-1] + [1] * (len(kind.shape) - axis - 1))
    here = body.op("Equal", place, body.constant(positions))
    if kind.dtype in FLOATS:  # where NaN is the first number, there is no largest one
        here = body.op("And", here, body.op("Not", body.op("IsNaN", body.node.inputs[0])))
    one, zero = (body.constant(np.full(1, value, kind.dtype)) for value in (1, 0))
    body.op("Where", here, one, zero, output=body.node.outputs[0])


@defines("CumSum")
def cumulative_sum(body: Body) -> None:
    """Sums of what a triangle of truth values leaves of repeated rows: quadratic, for short axes."""
    kind, given = body.type(0), body.value(1)
    assert given is not None
    rank = len(kind.shape)
    axis = int(given.reshape(-1)[0]) % rank
    length = kind.shape[axis]
    if length * math.prod(kind.shape) > _MOST_SUMMED:
        raise body.node.unsupported(f"an axis of {length} numbers would make more than {_MOST_SUMMED} summands")
    into, source = np.indices((length, length))
    taken = source >= into if body.attribute("reverse", 0) else source <= into
    taken = taken & (source != into) if body.attribute("exclusive", 0) else taken
    taken = taken.reshape([length, length] + [1] * (rank - axis - 1))
    shape = [kind.shape[0] if axis == 0 else 0, *kind.shape[1:]]
    repeated = body.reshape(body.node.inputs[0], [*shape[:axis], 1, *shape[axis:]])
    kept = body.op("Where", body.constant(taken), repeated, body.constant(np.zeros(1, kind.dtype)))
    summed = body.reduce("ReduceSum", kept, [axis + 1], keepdims=0, wraps=True)
    body.op("Identity", summed, output=body.node.outputs[0])


@defines("InstanceNormalization")
def instance_normalization(body: Body) -> None:
    """Over all pixels of each channel."""
    x, scale, shift = body.node.inputs
    rank, dtype = len(body.type(0).shape), body.type(0).dtype
    axes = list(range(2, rank))
    mean = body.reduce("ReduceMean", x, axes)
    centred = body.op("Sub", x, mean)
    variance = body.reduce("ReduceMean", body.op("Mul", centred, centred), axes)
    epsilon = body.constant(np.array(body.attribute("epsilon", 1e-5), dtype))
    deviation = body.op("Sqrt", body.op("Add", variance, epsilon))
    columns = [body.reshape(name, [-1, *(1 for _ in axes)]) for name in (scale, shift)]
    scaled = body.op("Mul", body.op("Div", centred, deviation), columns[0])
    body.op("Add", scaled, columns[1], output=body.node.outputs[0])


@defines("BatchNormalization")
def batch_normalization(body: Body) -> None:
    """Of a line, which is an image of one row; of other tensors, or with statistics that are computed at run time."""
    if body.attribute("training_mode", 0) or any(body.node.outputs[1:]):
        raise body.node.unsupported("training mode")
    x, *others = body.node.inputs
    shape = body.type(0).shape
    if len(shape) == 3 and all(name in body.graph.constants for name in others):
        image = body.reshape(x, [0, shape[1], 1, shape[2]])
        result = body.op("BatchNormalization", image, *others, **body.node.attributes)
        body.reshape(result, [0, *shape[1:]], body.node.outputs[0])
        return
    pixels = [1] * (len(body.type(0).shape) - 2)
    scale, shift, mean, variance = (body.reshape(name, [-1, *pixels]) if pixels else name for name in others)
    epsilon = body.constant(np.array(body.attribute("epsilon", 1e-5), body.type(4).dtype))
    deviation = body.op("Sqrt", body.op("Add", variance, epsilon))
    factor = body.op("Div", scale, deviation)
    body.op("Add", body.op("Mul", body.op("Sub", x, mean), factor), shift, output=body.node.outputs[0])


@defines("LpNormalization")
def lp_normalization(body: Body) -> None:
    """Divided by a norm, or zero where that is."""
    kind = body.type(0)
    axis, power = body.attribute("axis", -1) % len(kind.shape), body.attribute("p", 2)
    norm = body.reduce(f"ReduceL{power}", body.node.inputs[0], [axis])
    zero = body.constant(np.zeros(1, kind.dtype))
    quotient = body.op("Div", body.node.inputs[0], norm)
    body.op("Where", body.equal(norm, zero, kind.dtype), zero, quotient, output=body.node.outputs[0])


@defines("ReduceLogSumExp")
def log_sum_exp(body: Body) -> None:
    """Less the maximum, so that nothing overflows."""
    kind, given = body.type(0), body.value(1)
    stated = body.attribute("axes", ()) if given is None else given.reshape(-1).tolist()
    axes = list(stated)
    if not axes and body.attribute("noop_with_empty_axes", 0):
        body.op("Identity", body.node.inputs[0], output=body.node.outputs[0])
        return
    axes = axes or list(range(len(kind.shape)))
    most = body.reduce("ReduceMax", body.node.inputs[0], axes)
    if body.graph.opset >= _SELECTS and kind.dtype in FLOATS:  # less an infinite maximum, all would be NaN
        finite = body.op("Less", body.op("Abs", most), body.constant(math.inf, kind.dtype))
        most = body.op("Where", finite, most, body.constant(0, kind.dtype))
    shifted = body.op("Exp", body.op("Sub", body.node.inputs[0], most))
    logarithm = body.op("Log", body.reduce("ReduceSum", shifted, axes))
    total = body.op("Add", logarithm, most)
    if body.attribute("keepdims", 1):
        body.op("Identity", total, output=body.node.outputs[0])
    else:
        summed = body.reduce("ReduceSum", total, axes, keepdims=0)
        body.op("Identity", summed, output=body.node.outputs[0])


@defines("DynamicQuantizeLinear")
def dynamic_quantisation(body: Body) -> None:
    """By a range that has 0 in it; that of zeros alone has the scale 1."""
    (x,), dtype = body.node.inputs, body.type(0).dtype
    zero, steps = body.constant(0, dtype), body.constant(255, dtype)
    axes = list(range(len(body.type(0).shape)))
    least, largest = (
        body.op(limit, body.reduce(f"Reduce{limit}", x, axes, keepdims=0), zero) for limit in ("Min", "Max")
    )
    width = body.op("Sub", largest, least)
    width = body.op("Where", body.op("Equal", width, zero), steps, width)
    y, scale, point = (*body.node.outputs, "", "")[:3]
    scale = body.op("Div", width, steps, output=scale)
    begin = body.op("Max", zero, body.op("Min", steps, body.op("Sub", zero, body.op("Div", least, scale))))
    point = body.op("Cast", body.op("Round", begin), output=point, to=TensorProto.UINT8)
    body.op("QuantizeLinear", x, scale, point, output=y)


@defines("LRN")
def local_response_normalization(body: Body) -> None:
    """Squares are summed up over neighbouring channels by a convolution of one pixel."""
    kind = body.type(0)
    if len(kind.shape) != 4 or kind.dtype != "float32":
        raise body.node.unsupported("only float32 images are possible")
    channels, size = kind.shape[1], body.attribute("size", 1)
    into, source = np.indices((channels, channels))
    before, after = (size - 1) // 2, -(-(size - 1) // 2)
    window = (source >= into - before) & (source <= into + after)
    alpha, beta, bias = (body.attribute(*pair) for pair in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    weights = (window * (alpha / size)).astype(np.float32).reshape(channels, channels, 1, 1)
    squares = body.op("Mul", body.node.inputs[0], body.node.inputs[0])
    offset = body.constant(np.full(channels, bias, np.float32))
    sums = body.op("Conv", squares, body.constant(weights), offset)
    scale = body.op("Pow", sums, body.constant(np.array(beta, np.float32)))
    body.op("Div", body.node.inputs[0], scale, output=body.node.outputs[0])


@defines("GlobalLpPool")
def global_lp_pool(body: Body) -> None:
    """A norm of all pixels."""
    kind, power = body.type(0), body.attribute("p", 2)
    axes = list(range(2, len(kind.shape)))
    if power in (1, 2):
        norm = body.reduce(f"ReduceL{power}", body.node.inputs[0], axes)
        body.op("Identity", norm, output=body.node.outputs[0])
        return
    sizes = body.op("Pow", body.op("Abs", body.node.inputs[0]), body.constant(np.array(power, kind.dtype)))
    total = body.reduce("ReduceSum", sizes, axes)
    body.op("Pow", total, body.constant(np.array(1 / power, kind.dtype)), output=body.node.outputs[0])


@defines("LpPool")
def lp_pool(body: Body) -> None:
    """A mean of powers, times how many numbers a window has."""
    kind, power = body.type(0), body.attribute("p", 2)
    window = body.attribute("kernel_shape", ())
    if body.attribute("dilations", None) or body.attribute("ceil_mode", 0):
        raise body.node.unsupported("dilations and ceil_mode are not supported")
    names = ("auto_pad", "pads", "strides", "kernel_shape")
    given = {name: body.node.attributes[name] for name in names if name in body.node.attributes}
    sizes = body.op("Pow", body.op("Abs", body.node.inputs[0]), body.constant(np.array(power, kind.dtype)))
    means = body.op("AveragePool", sizes, count_include_pad=1, **given)
    total = body.op("Mul", means, body.constant(np.array(math.prod(window), kind.dtype)))
    body.op("Pow", total, body.constant(np.array(1 / power, kind.dtype)), output=body.node.outputs[0])


@defines("ConvTranspose")
def transposed_convolution(body: Body) -> None:
    """A convolution of the same image whose outputs are put between each other (Shi et al. 2016).

    With stride s, outputs o, o + s, ... depend on every s-th number of the kernel: a convolution for each o < s. All of
    them are one convolution, with s times as many outputs along each axis and kernels padded to one length.
    """
    kind, weights = body.type(0), body.value(1)
    if weights is None or kind.dtype != "float32":
        raise body.node.unsupported("its weights are not constant, or its input is not float32")
    sizes = kind.shape[2:]
    ones = [1] * len(sizes)
    strides, dilations = (list(body.attribute(name, ones)) for name in ("strides", "dilations"))
    groups = body.attribute("group", 1)
    kernel = _dilated(weights, dilations)
    taps = [-(-length // stride) for length, stride in zip(kernel.shape[2:], strides, strict=True)]
    phases = _phases(kernel, strides, taps, groups)
    pads = [tap - 1 for tap in taps]
    outputs = weights.shape[1] * groups
    convolved = body.op(
        "Conv", body.node.inputs[0], body.constant(phases), pads=[*pads, *pads], group=groups, kernel_shape=taps
    )
    lengths = [length + tap - 1 for length, tap in zip(sizes, taps, strict=True)]
    whole = _interleaved(body, convolved, outputs, lengths, strides)
    full = [length * stride for length, stride in zip(lengths, strides, strict=True)]
    begins, wanted = _window(body, sizes, kernel.shape[2:], strides)
    ends = [n - (length - begin) for n, length, begin in zip(wanted, full, begins, strict=True)]
    amounts = [0, 0, *(-begin for begin in begins), 0, 0, *ends]
    bias = body.node.inputs[2] if len(body.node.inputs) > 2 else ""
    cut = body.pad(whole, amounts) if any(amounts) else whole
    if bias:
        body.op("Add", cut, body.reshape(bias, [-1, *ones]), output=body.node.outputs[0])
    else:
        body.op("Identity", cut, output=body.node.outputs[0])


def _dilated(weights: Array, dilations: Sequence[int]) -> Array:
    """The kernel with zeros between its numbers."""
    lengths = [(length - 1) * step + 1 for length, step in zip(weights.shape[2:], dilations, strict=True)]
    result = np.zeros((*weights.shape[:2], *lengths), weights.dtype)
    result[(slice(None), slice(None), *(slice(None, None, step) for step in dilations))] = weights
    return result


def _phases(kernel: Array, strides: Sequence[int], taps: Sequence[int], groups: int) -> Array:
    """[inputs, outputs per group, ...] to [outputs x strides, inputs per group, taps ...]: phases beside each other."""
    inputs, per_group, *lengths = kernel.shape
    ends = [tap * stride - length for tap, stride, length in zip(taps, strides, lengths, strict=True)]
    padded = np.pad(kernel, [(0, 0), (0, 0), *((0, end) for end in ends)])
    split: list[int] = []
    for tap, stride in zip(taps, strides, strict=True):
        split += [tap, stride]
    rank = len(taps)
    parts = padded.reshape(groups, inputs // groups, per_group, *split)
    tap_axes, phase_axes = [3 + 2 * n for n in range(rank)], [4 + 2 * n for n in range(rank)]
    ordered = parts.transpose(0, 2, *phase_axes, 1, *tap_axes)
    flat = ordered.reshape(groups * per_group * math.prod(strides), inputs // groups, *taps)
    return np.ascontiguousarray(np.flip(flat, axis=tuple(range(2, 2 + rank))))


def _interleaved(body: Body, x: str, outputs: int, lengths: Sequence[int], strides: Sequence[int]) -> str:
    """[1, outputs x strides, ...] to [1, outputs, ...], each axis `stride` times as long."""
    if max(strides) == 1:
        return x
    rank = len(lengths)
    parts = body.reshape(x, [0, outputs, *strides, *lengths])
    order = [0, 1]
    for axis in range(rank):
        order += [2 + rank + axis, 2 + axis]
    moved = body.op("Transpose", parts, perm=order)
    return body.reshape(moved, [0, outputs, *(n * s for n, s in zip(lengths, strides, strict=True))])


def _window(
    body: Body, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Where in the whole result the wanted one begins, and how long it is."""
    rank = len(sizes)
    wanted = list(body.type_of(body.node.outputs[0]).shape[2:])
    mode, is_given = body.attribute("auto_pad", b"NOTSET").decode(), bool(body.attribute("output_shape", ()))
    pads, extra = body.attribute("pads", [0] * (2 * rank)), body.attribute("output_padding", [0] * rank)
    whole = [strides[axis] * (sizes[axis] - 1) + extra[axis] + kernel[axis] for axis in range(rank)]
    begins = [transposed_begin(mode, is_given, pads[axis], whole[axis], wanted[axis]) for axis in range(rank)]
    return begins, wanted
