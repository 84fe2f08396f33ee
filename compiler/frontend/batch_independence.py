"""Check that every row of a batch is computed by itself: only then may a model, read at batch 1, run row by row.

Shapes are inferred at two batch sizes, so that each tensor's batch axis is the one that differs. What is known of a
tensor is the place of the batch in its row-major order: on which axis, and how many items of that axis stand before and
after it ([N * 64, 768] has 64 after). A Reshape keeps the order, a Transpose moves the axis, every other operator must
treat the axis as parallel. Constants that stem from shapes are folded at both sizes, too: where they differ, they may
only say a shape, or must hold equal rows.

A new operator is a name in one of the lists, or one small rule in `RULES`. A rule gets the place of the batch in each
operand and returns that in the outputs. It raises MixedRowsError when the operator mixes rows, UnsupportedModelError
when it could; operators without a rule could.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gangway.compiler.errors import MixedRowsError, UnsupportedModelError
from gangway.compiler.frontend.graph import WIDE_BATCH, Graph, Node, single
from gangway.compiler.frontend.shape_inference import evaluate
from gangway.compiler.kernels.specs import Array

ELEMENTWISE = """
    Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike
    Ceil Celu Clip Cos Cosh DequantizeLinear Div DynamicFakeQuantise Elu Equal Erf Exp Floor Gelu Greater
    GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg
    Not Or PRelu Pow QuantizeLinear Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt
    Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor
"""
FIRST_AXIS = """
    AveragePool BatchNormalization Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool
    GlobalMaxPool GroupNormalization InstanceNormalization LRN LpPool MaxPool QLinearConv QuantisedConv Resize
    SpaceToDepth TreeSums Upsample
"""
VIEWS = ["Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"]
FROM_AXIS = {"Softmax": 1, "LogSoftmax": 1, "Hardmax": 1, "LayerNormalization": -1, "RMSNormalization": -1}
REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"
SHAPE_INPUTS = {  # sizes, and places counted from the first row on: they may depend on the batch
    **{"Reshape": (1,), "Expand": (1,), "Resize": (3,), "Slice": (2,)},
    **{"GatherND": (1,), "ScatterND": (1,)},
}
NOT_KNOWN = "it is not known whether it mixes rows of the batch"
_BEYOND_ANY_BATCH = 10**9  # rows: a request has fewer bytes


@dataclass(frozen=True)
class Rows:
    """The place of the batch: an axis, which at batch 1 is `before` x `after` long, the batch between the two."""

    axis: int
    before: int = 1
    after: int = 1


@dataclass(frozen=True)
class Operands:
    """A node; for each input the place of the batch (None: no batch), its shape at batch 1, its value if constant.

    `wide_values` are those values in a larger batch, which may differ for `SHAPE_INPUTS` only.
    """

    node: Node
    rows: tuple[Rows | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    values: tuple[Array | None, ...]
    wide_values: tuple[Array | None, ...]
    output: tuple[int, ...]  # shape of the first output at batch 1
    wide_output: tuple[int, ...]  # and of a larger batch; empty if it is not known

    def batched(self) -> Iterator[tuple[int, Rows]]:
        """Each input that has the batch."""
        return ((index, rows) for index, rows in enumerate(self.rows) if rows)

    def only_first(self) -> Rows:
        """Return the place in input 0; no other may have one."""
        first = self.rows[0]
        if first is None or any(self.rows[1:]):
            raise self.unknown("an input other than the first depends on the batch")
        return first

    def common(self, places: Iterator[Rows]) -> Rows:
        """Return the place that all inputs agree on."""
        found = set(places)
        if len(found) != 1:
            raise self.mixed("the batch is at different places of its inputs")
        return found.pop()

    def axes(self, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the axes that the node states, as attribute `axis` or `axes` or, since opset 13 or 18, as input 1."""
        rank = len(self.shapes[0])
        given = self.node.attributes.get("axes", self.node.attributes.get("axis"))
        if given is None and len(self.values) > 1 and self.values[1] is not None:
            given = self.values[1].ravel().tolist()
        axes = default if given is None else (given,) if isinstance(given, int) else tuple(given)
        return tuple(axis % rank for axis in axes)

    def mixed(self, why: str) -> MixedRowsError:
        """Return the error of a node that certainly mixes rows."""
        return self.node.mixed(why)

    def unknown(self, why: str) -> UnsupportedModelError:
        """Return the error of a node that may mix rows or not, or that moves them, which a later one may undo."""
        return self.node.unsupported(f"{NOT_KNOWN}: {why}")


BatchRule = Callable[[Operands], Rows | tuple[Rows, ...]]


def check_rows(graph: Graph, constants: Mapping[str, Array]) -> None:
    """Do nothing if the model treats rows of the batch apart; `constants` are all that do not depend on the inputs.

    Raises MixedRowsError that names the first operator which mixes rows, UnsupportedModelError where that is not known.
    """
    if graph.batched:
        walk = _Walk(graph, constants)
        for node in graph.nodes:
            walk.visit(node)
        walk.check_outputs()


@dataclass
class _Walk:
    """What is known so far: where each activation has the batch, and constants as a batch of WIDE_BATCH has them."""

    graph: Graph
    constants: Mapping[str, Array]

    def __post_init__(self) -> None:
        self.rows = {name: Rows(0) for name in self.graph.inputs}
        self.wide: dict[str, Array] = {}

    def visit(self, node: Node) -> None:
        """Follow one node. Raises UnsupportedModelError."""
        if all(name in self.constants for name in filter(None, node.outputs)):
            self._fold(node)
            return
        if node.operator not in RULES:
            raise node.unsupported(NOT_KNOWN)
        operands = tuple(self._operand(node, index, name) for index, name in enumerate(node.inputs))
        result = RULES[node.operator](self._describe(node, operands))
        places = result if isinstance(result, tuple) else (result,) * len(node.outputs)
        for name, place in zip(node.outputs, places, strict=False):
            if name:
                self._check_shape(node, name, place)
                self.rows[name] = place

    def check_outputs(self) -> None:
        """Raise UnsupportedModelError unless a batch of answers is one after the other."""
        for name in self.graph.outputs:
            producer = self.graph.producers().get(name)
            if producer and self.rows.get(name) != Rows(0):
                raise producer.mixed(f"they are not the first axis of its output '{name}'")

    def _fold(self, node: Node) -> None:
        """Find out what a constant would be in a larger batch, if it depends on that."""
        if node.operator == "Shape":
            begin, end = node.attributes.get("start", 0), node.attributes.get("end")
            shape = self.graph.wide_shapes.get(node.inputs[0])
            if shape is None:
                raise node.unsupported(f"the shape of '{node.inputs[0]}' is not known for all batches")
            found = {node.outputs[0]: np.array(shape[begin:end], np.int64)}
        elif any(name in self.wide for name in node.inputs):
            found = evaluate(node, {**self.constants, **self.wide}, self.graph.opset)
        else:
            return
        for name, value in found.items():
            if not np.array_equal(value, self.constants[name]):
                self.wide[name] = value

    def _operand(self, node: Node, index: int, name: str) -> Rows | None:
        if name in self.wide and index not in SHAPE_INPUTS.get(node.operator, ()):
            return self._rows_of_constant(node, name)
        return self.rows.get(name)

    def _rows_of_constant(self, node: Node, name: str) -> Rows:
        """Return the axis on which a constant of a larger batch repeats that of batch 1."""
        small, wide = self.constants[name], self.wide[name]
        axes = [axis for axis, n in enumerate(small.shape) if n == 1 and wide.shape[axis : axis + 1] == (WIDE_BATCH,)]
        if len(axes) != 1 or not np.array_equal(wide, np.broadcast_to(small, wide.shape)):
            raise node.mixed(f"the number '{name}' depends on how many there are")
        return Rows(axes[0])

    def _describe(self, node: Node, operands: tuple[Rows | None, ...]) -> Operands:
        known = {name: self.constants[name].shape for name in node.inputs if name in self.constants}
        shapes = [known.get(name) or self._shape(node, name) for name in node.inputs]
        values = tuple(self.constants.get(name) for name in node.inputs)
        wide_values = tuple(self.wide.get(name, self.constants.get(name)) for name in node.inputs)
        output = node.outputs[0]
        wide = self.graph.wide_shapes.get(output, ())
        return Operands(node, operands, tuple(shapes), values, wide_values, self._shape(node, output), wide)

    def _shape(self, node: Node, name: str) -> tuple[int, ...]:
        if not name or name in self.constants:
            return ()
        if name not in self.graph.types:
            raise node.unsupported(f"the shape of tensor '{name}' depends on data or cannot be inferred")
        return self.graph.types[name].shape

    def _check_shape(self, node: Node, name: str, place: Rows) -> None:
        """Compare the place with the inferred shapes: whatever a rule overlooks is likely to be seen here."""
        shape, wide = list(self._shape(node, name)), self.graph.wide_shapes.get(name)
        fits = place.axis < len(shape) and shape[place.axis] == place.before * place.after
        if fits:
            shape[place.axis] *= WIDE_BATCH
        if not fits or wide != tuple(shape):
            many = "an unknown shape" if wide is None else list(wide)
            raise node.unsupported(f"{NOT_KNOWN}: 1 gives {list(self._shape(node, name))}, {WIDE_BATCH} give {many}")


def _elementwise(op: Operands) -> Rows:
    """Axes are aligned at the last one; axes of length 1 are repeated."""
    rank = len(op.output)
    return op.common(replace(rows, axis=rows.axis + rank - len(op.shapes[index])) for index, rows in op.batched())


def _view(op: Operands) -> Rows:
    """The same numbers in the same order: as many of them outside and inside of the batch as before."""
    rows, shape = op.only_first(), op.shapes[0]
    outside = math.prod(shape[: rows.axis]) * rows.before
    inside = rows.after * math.prod(shape[rows.axis + 1 :])
    grown = [axis for axis, pair in enumerate(zip(op.output, op.wide_output, strict=False)) if pair[0] != pair[1]]
    if len(op.output) == len(op.wide_output) and len(grown) == 1:
        (axis,) = grown
        before, rest = divmod(outside, math.prod(op.output[:axis]))
        after, other = divmod(inside, math.prod(op.output[axis + 1 :]))
        if not rest and not other and before * after == op.output[axis]:
            return Rows(axis, before, after)
    raise op.unknown(f"{list(shape)} becomes {list(op.output)}, of more rows {list(op.wide_output)}")


def _transpose(op: Operands) -> Rows:
    """The axis moves."""
    rows, rank = op.only_first(), len(op.shapes[0])
    order = list(op.node.attributes.get("perm", range(rank)[::-1]))
    return replace(rows, axis=order.index(rows.axis))


def _first_axis(op: Operands) -> Rows:
    """Images: the batch is the first axis, which nothing but the batch normalisation of training looks across."""
    rows = op.only_first()
    if op.node.attributes.get("training_mode", 0):
        raise op.mixed("it normalises over the batch")
    if rows.axis:
        raise op.unknown("the batch is not its first axis")
    return rows


def _from_axis(op: Operands) -> Rows:
    """Normalisation over `axis` and (always, or before opset 13) all axes after it."""
    rows = op.only_first()
    if rows.axis >= min(op.axes((FROM_AXIS[op.node.operator] % len(op.shapes[0]),))):
        raise op.mixed("it normalises over the batch")
    return rows


def _beside_axis(op: Operands) -> Rows:
    """Whatever happens along one axis."""
    rows, rank = op.only_first(), len(op.shapes[0])
    default = {"TopK": -1, "Split": 0}.get(op.node.operator)  # their input 1 is no axis
    axes = op.axes((0,)) if default is None else (single(op.node.attributes, "axis", default, rank),)
    if rows.axis in axes:
        if op.node.operator == "Split":
            raise op.unknown("it picks rows of the batch")
        raise op.mixed("it works along the batch")
    return rows


def _reduce(op: Operands) -> Rows:
    """Reduced axes vanish, or keep the length 1."""
    rows = op.only_first()
    axes = op.axes((0,) if op.node.operator.startswith("Arg") else ())
    if not axes and op.node.attributes.get("noop_with_empty_axes", 0):
        return rows
    if not axes or rows.axis in axes:
        raise op.mixed("it reduces the batch")
    gone = 0 if op.node.attributes.get("keepdims", 1) else sum(axis < rows.axis for axis in set(axes))
    return replace(rows, axis=rows.axis - gone)


def _matmul(op: Operands) -> Rows:
    """Rows of the left operand, columns of the right one, or a product for each row of the batch."""
    ranks = [len(shape) for shape in op.shapes]
    rank = max(*ranks, 2)
    places = []
    for index, rows in op.batched():
        axis = rows.axis + rank - ranks[index]
        if ranks[index] == 1 or axis == rank - 1 - index:
            raise op.mixed("it sums up over the batch")
        alone = axis == rank - 2 + index
        if alone and op.rows[1 - index]:
            raise op.mixed("both operands depend on the batch")
        dropped = index == 1 and ranks[0] == 1 and axis == rank - 1
        places.append(replace(rows, axis=axis - dropped))
    return op.common(iter(places))


def _packed_matmul(op: Operands) -> Rows:
    """Rows of the only operand that is no constant."""
    rows = op.only_first()
    if rows.axis == len(op.shapes[0]) - 1:
        raise op.mixed("it sums up over the batch")
    return rows


def _gemm(op: Operands) -> Rows:
    """Rows of the left operand; what is added may have the batch there, too."""
    rows = op.rows[0]
    if rows is None or op.rows[1] or rows.axis != int(bool(op.node.attributes.get("transA", 0))):
        raise op.mixed("it sums up over the batch")
    places = [replace(rows, axis=0)]
    if len(op.rows) > 2 and (added := op.rows[2]):
        places.append(replace(added, axis=added.axis + 2 - len(op.shapes[2])))
    return op.common(iter(places))


def _gather(op: Operands) -> Rows:
    """Data without the batch and indices with it, or the reverse along another axis."""
    data, indices = op.rows
    axis = op.node.attributes.get("axis", 0) % len(op.shapes[0])
    if (data is None) == (indices is None):
        raise op.mixed("both inputs depend on the batch")
    if data is None:
        assert indices is not None
        return replace(indices, axis=indices.axis + axis)
    if data.axis == axis:
        raise op.unknown("it picks rows of the batch")
    return replace(data, axis=data.axis + (len(op.shapes[1]) - 1 if data.axis > axis else 0))


def _elements(op: Operands, does: str) -> Rows:
    """Data, places and, if any, new numbers with the batch on the same axis."""
    axis = op.node.attributes.get("axis", 0) % len(op.shapes[0])
    if not all(op.rows) or any(rows.axis == axis for _, rows in op.batched()):
        raise op.unknown(does)
    return op.common(rows for _, rows in op.batched())


def _gather_nd(op: Operands) -> Rows:
    """Tuples of places in the axes after the first `batch_dims`; of the batch all rows, in their order."""
    data, indices = op.rows
    shared, rank = op.node.attributes.get("batch_dims", 0), len(op.shapes[1]) - 1
    if data and indices and data == indices and data.axis < shared:
        return data
    if data is None and indices and shared <= indices.axis < rank:
        return indices
    if data is None or indices or data.axis < shared:
        raise op.unknown("it picks rows of the batch")
    return _picked(op, data, shared)


def _picked(op: Operands, data: Rows, shared: int = 0) -> Rows:
    """Return the place in what constant tuples pick, which are input 1: behind them, or where they count the rows."""
    small, wide, rank = op.values[1], op.wide_values[1], len(op.shapes[1]) - 1
    if small is None or wide is None:
        raise op.unknown("which rows it picks depends on data")
    depth = small.shape[-1]
    if data.axis >= shared + depth and np.array_equal(small, wide):
        return replace(data, axis=data.axis - shared - depth + rank)
    grown = [axis for axis in range(rank) if (small.shape[axis], wide.shape[axis]) == (1, WIDE_BATCH)]
    if shared or data.axis >= depth or len(grown) != 1 or (data.before, data.after) != (1, 1):
        raise op.unknown("it picks rows of the batch")
    expected = np.broadcast_to(small, wide.shape).copy()
    expected[..., data.axis] = np.arange(WIDE_BATCH).reshape([-1 if axis == grown[0] else 1 for axis in range(rank)])
    if small[..., data.axis].any() or not np.array_equal(wide, expected):
        raise op.unknown("it picks rows of the batch")
    return Rows(grown[0])


def _scatter_nd(op: Operands) -> Rows:
    """Each row of the batch gets new numbers at the same places."""
    data, indices, updates = op.rows
    if data is None or indices or updates != _picked(op, data):
        raise op.unknown("it changes certain rows of the batch")
    return data


def _images(op: Operands) -> Rows:
    """All inputs have the batch as first axis."""
    if any(rows is None or rows.axis for rows in op.rows):
        raise op.unknown("the batch is not the first axis of each input")
    return op.common(rows for _, rows in op.batched())


def _integer_matmul(op: Operands) -> Rows:
    """A product of two inputs, the others being scales and zero points."""
    places = (0, 3) if op.node.operator == "QLinearMatMul" else (0, 1)
    if any(rows for index, rows in op.batched() if index not in places):
        raise op.unknown("a scale depends on the batch")
    rows, shapes = tuple(op.rows[index] for index in places), tuple(op.shapes[index] for index in places)
    return _matmul(replace(op, rows=rows, shapes=shapes))


def _slice(op: Operands) -> Rows:
    """Along the batch only all of it, in its order."""
    rows, shape = op.only_first(), op.shapes[0]
    length = shape[rows.axis]
    both = zip(_slices(op, op.values), _slices(op, op.wide_values), strict=True)
    for (start, end, axis, step), (_, wide_end, _, _) in both:
        if axis % len(shape) != rows.axis:
            if end != wide_end:
                raise op.unknown("where it ends depends on the batch")
            continue
        from_first = step == 1 and (start == 0 or start <= -_BEYOND_ANY_BATCH)
        to_last = end >= _BEYOND_ANY_BATCH or (end, wide_end) == (length, WIDE_BATCH * length)
        if not from_first or not to_last:
            raise op.unknown("it picks rows of the batch")
    return rows


def _slices(op: Operands, values: tuple[Array | None, ...]) -> list[tuple[int, int, int, int]]:
    """Start, end, axis and step of each sliced axis; before opset 10 they are attributes."""
    given = [op.node.attributes.get(name) for name in ("starts", "ends", "axes", "steps")]
    for index, value in enumerate(values[1:]):
        if value is None and op.node.inputs[index + 1]:
            raise op.unknown("where it begins or ends depends on data")
        given[index] = given[index] if value is None else value.ravel().tolist()
    starts, ends = given[0] or [], given[1] or []
    return list(zip(starts, ends, given[2] or range(len(starts)), given[3] or [1] * len(starts), strict=True))


def _concat(op: Operands) -> Rows:
    """Beside the batch, which all inputs have."""
    if not all(op.rows) or op.node.attributes["axis"] % len(op.output) in {rows.axis for _, rows in op.batched()}:
        raise op.unknown("it puts rows of the batch beside each other")
    return op.common(rows for _, rows in op.batched())


def _pad(op: Operands) -> Rows:
    """Nothing before or after the batch."""
    rows, rank = op.only_first(), len(op.shapes[0])
    pads = op.node.attributes.get("pads") or (op.values[1].tolist() if op.values[1] is not None else [])
    if not pads:
        raise op.unknown("how much it pads depends on data")
    axes = op.values[3].tolist() if len(op.values) > 3 and op.values[3] is not None else list(range(rank))
    axes = [axis % rank for axis in axes]
    at_batch = [pads[index] for index, axis in enumerate([*axes, *axes]) if axis == rows.axis]
    if any(at_batch):
        raise op.unknown("it pads the batch")
    return rows


def _tile(op: Operands) -> Rows:
    """Once along the batch, and along all axes outside of it."""
    rows = op.only_first()
    if op.values[1] is None:
        raise op.unknown("how often it repeats depends on data")
    if op.values[1][rows.axis] != 1:
        raise op.unknown("it repeats the batch")
    return rows


def _recurrent(op: Operands) -> tuple[Rows, ...]:
    """X and the first states have the batch as second axis, or first (layout 1), as have the last states; Y as third,
    or first. Lengths are one of each row.
    """
    first = bool(op.node.attributes.get("layout", 0))
    state = Rows(0 if first else 1)
    places = {0: state, 4: Rows(0), 5: state, 6: state}
    if any(rows != places.get(index) for index, rows in op.batched()):
        raise op.mixed(f"the batch is not the {'first' if first else 'second'} axis")
    return Rows(0 if first else 2), state, state


def _einsum(op: Operands) -> Rows:
    """A letter of the result, the same in all inputs that have the batch."""
    equation = op.node.attributes["equation"].decode().replace(" ", "")
    terms, arrow, result = equation.partition("->")
    names = terms.split(",")
    if not arrow or "." in equation or any(len(set(name)) != len(name) for name in names):
        raise op.unknown(f"the equation {equation}")
    letters = {(names[index][rows.axis], rows.before, rows.after) for index, rows in op.batched()}
    if len(letters) != 1:
        raise op.mixed("the batch is at different places of its inputs")
    ((letter, before, after),) = letters
    with_letter = {index for index, name in enumerate(names) if letter in name}
    if letter not in result or with_letter != {index for index, _ in op.batched()}:
        raise op.mixed("it sums up over the batch")
    return Rows(result.index(letter), before, after)


RULES: dict[str, BatchRule] = {
    **dict.fromkeys([*ELEMENTWISE.split(), "Expand"], _elementwise),
    **dict.fromkeys(FIRST_AXIS.split(), _first_axis),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(FROM_AXIS, _from_axis),
    **dict.fromkeys([*(f"Reduce{name}" for name in REDUCTIONS.split()), "ArgMax", "ArgMin"], _reduce),
    **dict.fromkeys(["Split", "CumSum", "TopK"], _beside_axis),
    **dict.fromkeys(["LSTM", "GRU", "RNN"], _recurrent),
    "Concat": _concat,
    "Einsum": _einsum,
    "Gather": _gather,
    "GatherElements": partial(_elements, does="it picks rows of the batch"),
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "GridSample": _images,
    "MatMul": _matmul,
    **dict.fromkeys(["MatMulInteger", "QLinearMatMul", "QuantisedMatMul"], _integer_matmul),
    "PackedMatMul": _packed_matmul,
    "Pad": _pad,
    **dict.fromkeys(["Scatter", "ScatterElements"], partial(_elements, does="it changes certain rows of the batch")),
    "ScatterND": _scatter_nd,
    "Slice": _slice,
    "Tile": _tile,
    "Transpose": _transpose,
}
