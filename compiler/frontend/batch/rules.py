"""Where operators put the rows of a batch.

A new operator is a name in one of the lists, or one small rule in `RULES`. A rule gets the place of the batch in each
operand and returns that in the outputs. It raises MixedRowsError when the operator mixes rows, UnsupportedModelError
when it could; operators without a rule could. It is asked if an operand depends on the batch.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from gangway.compiler.frontend.batch import indices
from gangway.compiler.frontend.batch.places import BatchAxis, Operands
from gangway.compiler.frontend.graph import single

ELEMENTWISE = """
    Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike
    Ceil Celu Clip Cos Cosh DequantizeLinear Div DynamicFakeQuantise Elu Equal Erf Exp Floor Gelu Greater
    GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg
    Not Or PRelu Pow QuantizeLinear Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt
    Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor
"""
FIRST_AXIS = """
    AffineGrid AveragePool BatchNormalization Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool
    GlobalMaxPool GroupNormalization InstanceNormalization LRN LpPool MaxPool QLinearConv QuantisedConv
    SpaceToDepth TreeSums
"""
VIEWS = ["Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"]
FROM_AXIS = {"Softmax": 1, "LogSoftmax": 1, "Hardmax": 1, "LayerNormalization": -1, "RMSNormalization": -1}
REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"
SHAPE_INPUTS = {  # shapes, and places along an axis, of which rules see how they depend on the batch
    **{
        "AffineGrid": (1,),
        "ConstantOfShape": (0,),
        "Expand": (1,),
        "Reshape": (1,),
        "Resize": (3,),
        "Slice": (1, 2),
        "Tile": (1,),
    },
    **dict.fromkeys(("Gather", "GatherElements", "GatherND", "Scatter", "ScatterElements", "ScatterND"), (1,)),
    **{"Range": (0, 1, 2), "Slice": (1, 2), "Split": (1,)},
}
ALWAYS_ASKED = {*SHAPE_INPUTS} - {
    "AffineGrid",
    "Reshape",
    "Resize",
    "Slice",
    "Split",
}  # where no operand has the batch, too
BatchRule = Callable[[Operands], BatchAxis | tuple[BatchAxis, ...] | None]


def _elementwise(op: Operands) -> BatchAxis:
    """Axes are aligned at the last one; axes of length 1 are repeated."""
    rank = len(op.output)
    return op.common(replace(rows, axis=rows.axis + rank - len(op.shapes[index])) for index, rows in op.batched())


def _view(op: Operands) -> BatchAxis:
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
            return BatchAxis(axis, before, after)
    raise op.unknown(f"{list(shape)} becomes {list(op.output)}, of more rows {list(op.wide_output)}")


def _transpose(op: Operands) -> BatchAxis:
    """The axis moves."""
    rows, rank = op.only_first(), len(op.shapes[0])
    order = list(op.node.attributes.get("perm", range(rank)[::-1]))
    return replace(rows, axis=order.index(rows.axis))


def _first_axis(op: Operands) -> BatchAxis:
    """Images: the batch is the first axis, which nothing but the batch normalisation of training looks across."""
    rows = op.only_first()
    if op.node.attributes.get("training_mode", 0):
        raise op.mixed("it normalises over the batch")
    if any(tensor.varies and op.grown(index) != BatchAxis(0) for index, tensor in enumerate(op.tensors)):
        raise op.unknown("its sizes depend on the batch")
    if rows.axis:
        raise op.unknown("the batch is not its first axis")
    return rows


def _resize(op: Operands) -> BatchAxis:
    """Along the batch, nothing changes."""
    rows, attributes = op.only_first(), op.node.attributes
    axes = [axis % len(op.output) for axis in attributes.get("axes") or range(len(op.output))]
    if rows.axis not in axes:
        return rows
    place = axes.index(rows.axis)
    if op.node.inputs[3:] and op.node.inputs[3]:
        grown = op.grown(3)
        if grown != BatchAxis(place, after=rows.before * rows.after):
            raise op.unknown("its sizes are not those of the batch")
    else:
        given = attributes.get("scales", next((value for value in op.values[:0:-1] if value is not None), None))
        if given is None or given[place] != 1:
            raise op.unknown("it resizes the batch")
    if attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        raise op.unknown("the batch decides on a scale")
    if attributes.get("coordinate_transformation_mode", b"") == b"tf_crop_and_resize":
        region = op.values[1]
        if region is None or region[place] != 0 or region[place + len(axes)] != 1:
            raise op.unknown("it cuts the batch")
    return rows


def _from_axis(op: Operands) -> BatchAxis:
    """Normalisation over `axis` and (always, or before opset 13) all axes after it."""
    rows = op.only_first()
    if rows.axis >= min(op.axes((FROM_AXIS[op.node.operator] % len(op.shapes[0]),))):
        raise op.mixed("it normalises over the batch")
    return rows


def _beside_axis(op: Operands) -> BatchAxis:
    """Whatever happens along one axis."""
    rows, rank = op.only_first(), len(op.shapes[0])
    axes = (single(op.node.attributes, "axis", -1, rank),) if op.node.operator == "TopK" else op.axes((0,))
    if rows.axis in axes:
        is_sum_of_constants = op.node.operator == "CumSum" and op.numbers[0].constant is not None
        if not is_sum_of_constants:
            raise op.mixed("it works along the batch")
    return rows


def _reduce(op: Operands) -> BatchAxis:
    """Reduced axes vanish, or keep the length 1."""
    rows = op.only_first()
    axes = op.axes((0,) if op.node.operator.startswith("Arg") else ())
    if not axes and op.node.attributes.get("noop_with_empty_axes", 0):
        return rows
    if not axes or rows.axis in axes:
        raise op.mixed("it reduces the batch")
    gone = 0 if op.node.attributes.get("keepdims", 1) else sum(axis < rows.axis for axis in set(axes))
    return replace(rows, axis=rows.axis - gone)


def _matmul(op: Operands) -> BatchAxis:
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


def _packed_matmul(op: Operands) -> BatchAxis:
    """Rows of the only operand that is no constant."""
    rows = op.only_first()
    if rows.axis == len(op.shapes[0]) - 1:
        raise op.mixed("it sums up over the batch")
    return rows


def _gemm(op: Operands) -> BatchAxis:
    """Rows of the left operand; what is added may have the batch there, too."""
    rows = op.rows[0]
    if rows is None or op.rows[1] or rows.axis != int(bool(op.node.attributes.get("transA", 0))):
        raise op.mixed("it sums up over the batch")
    places = [replace(rows, axis=0)]
    if len(op.rows) > 2 and (added := op.rows[2]):
        places.append(replace(added, axis=added.axis + 2 - len(op.shapes[2])))
    return op.common(iter(places))


def _images(op: Operands) -> BatchAxis:
    """All inputs have the batch as first axis."""
    if any(rows is None or rows.axis for rows in op.rows):
        raise op.unknown("the batch is not the first axis of each input")
    return op.common(rows for _, rows in op.batched())


def _integer_matmul(op: Operands) -> BatchAxis:
    """A product of two inputs, the others being scales and zero points."""
    places = (0, 3) if op.node.operator == "QLinearMatMul" else (0, 1)
    if any(rows for index, rows in op.batched() if index not in places):
        raise op.unknown("a scale depends on the batch")
    return _matmul(op.picking(places))


def _triangle(op: Operands) -> BatchAxis:
    """The last two axes are a matrix."""
    rows = op.only_first()
    if rows.axis >= len(op.output) - 2:
        raise op.mixed("its place in the batch decides on a number")
    return rows


def _one_hot(op: Operands) -> BatchAxis:
    """One more axis."""
    rows, rank = op.only_first(), len(op.output)
    axis = single(op.node.attributes, "axis", -1, rank)
    return replace(rows, axis=rows.axis + (axis <= rows.axis))


def _pad(op: Operands) -> BatchAxis:
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


def _recurrent(op: Operands) -> tuple[BatchAxis, ...]:
    """X and the first states have the batch as second axis, or first (layout 1), as have the last states; Y as third,
    or first. Lengths are one of each row.
    """
    first = bool(op.node.attributes.get("layout", 0))
    state = BatchAxis(0 if first else 1)
    places = {0: state, 4: BatchAxis(0), 5: state, 6: state}
    if any(rows != places.get(index) for index, rows in op.batched()):
        raise op.mixed(f"the batch is not the {'first' if first else 'second'} axis")
    return BatchAxis(0 if first else 2), state, state


def _einsum(op: Operands) -> BatchAxis:
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
    return BatchAxis(result.index(letter), before, after)


RULES: dict[str, BatchRule] = {
    **dict.fromkeys(ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(FIRST_AXIS.split(), _first_axis),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(FROM_AXIS, _from_axis),
    **dict.fromkeys([*(f"Reduce{name}" for name in REDUCTIONS.split()), "ArgMax", "ArgMin"], _reduce),
    **dict.fromkeys(["CumSum", "TopK"], _beside_axis),
    **dict.fromkeys(["LSTM", "GRU", "RNN"], _recurrent),
    "Concat": indices.concat,
    "ConstantOfShape": indices.filled,
    "Einsum": _einsum,
    "Expand": indices.expand,
    "Gather": indices.gather,
    "GatherElements": indices.elements,
    "GatherND": indices.gather_nd,
    "Gemm": _gemm,
    "GridSample": _images,
    "MatMul": _matmul,
    **dict.fromkeys(["MatMulInteger", "QLinearMatMul", "QuantisedMatMul"], _integer_matmul),
    **dict.fromkeys(["Resize", "Upsample"], _resize),
    "PackedMatMul": _packed_matmul,
    "OneHot": _one_hot,
    "Pad": _pad,
    **dict.fromkeys(["Scatter", "ScatterElements"], indices.elements),
    "ScatterND": indices.scatter_nd,
    "Range": indices.counted,
    "Slice": indices.slice_,
    "Split": indices.split,
    "Tile": indices.tile,
    "Transpose": _transpose,
    "Trilu": _triangle,
}
