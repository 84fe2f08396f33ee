"""Specs of kernels over plain tensors: row-major, of any rank and type, as ONNX has them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gangway.compiler.kernels.specs import Check, DepthWindow, KernelSpec, PoolSpec

FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
ELEMENT_TYPES = FLOATS | {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
MOST_OPERANDS = 6
MOST_BEST = 4096  # numbers that `TopSpec` finds, which lie on the stack
_POLYNOMIAL = 16
_STEP = 512  # of a tree: about 5 ns, while a core computes 100,000 operations in a microsecond
_SIMPLE = frozenset(
    """
    constant cast where equal less less_or_equal greater greater_or_equal is_nan is_inf add sub mul div and or xor not
    bit_and bit_or bit_xor bit_not shift_left shift_right min max neg abs sign floor ceil round truncate sqrt mod
    clip leaky_relu bounded_leaky_relu hard_sigmoid hard_swish
    """.split()  # noqa: SIM905
)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Distance, in numbers, of neighbours along each axis of a plain tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def broadcast_strides(shape: Sequence[int], into: Sequence[int]) -> tuple[int, ...]:
    """The strides with which a plain tensor is read as one of the shape `into`; 0 where it is repeated.

    Raises ValueError if it cannot be broadcast.
    """
    aligned = (1,) * (len(into) - len(shape)) + tuple(shape)
    if len(aligned) != len(into) or any(n not in (1, wanted) for n, wanted in zip(aligned, into, strict=True)):
        raise ValueError(f"{list(shape)} cannot be broadcast to {list(into)}")
    return tuple(0 if n == 1 else step for n, step in zip(aligned, contiguous(aligned), strict=True))


@dataclass(frozen=True)
class Operand:
    """An input: its element type and, for each axis of the output's shape, its stride in elements (0 broadcasts)."""

    dtype: str  # numpy's name
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """One operator of a straight-line program: what it takes and what type comes out.

    `sources` number the values so far: first the operands, then the results of the instructions before. `parameters`
    are immediate numbers, whose meaning is the operator's (the number of "constant", alpha and beta of an activation).
    Operators are those of `templates/instructions.py` and, of float16 and float32, the activations of `specs.py`.
    "quantise" is what quantise_int8 and quantise_uint8 are, its limits being the kernel's: see `PointwiseSpec`.
    """

    operator: str
    sources: tuple[int, ...]
    dtype: str
    parameters: tuple[float | int, ...] = ()


@dataclass(frozen=True)
class PointwiseSpec(KernelSpec):
    """y[i, j, ...] = program(operands at i, j, ...); y is plain, contiguous, of the last instruction's type.

    Arguments: the operands (six at most), y. A chain of ONNX nodes without other readers becomes one kernel. If there
    are instructions "quantise", "limits" follow the first operand, float32 [n][3], raw weights of this name: of each
    its scale, and the least and the largest number less the zero point.
    """

    shape: tuple[int, ...]
    operands: tuple[Operand, ...]
    program: tuple[Instruction, ...]

    @property
    def limits(self) -> int:
        """How many instructions read limits."""
        return sum(item.operator == "quantise" for item in self.program)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Those of all instructions, in their order."""
        return tuple(check for item in self.program for check in self.checks_of(item))

    def checks_of(self, item: Instruction) -> Sequence[Check]:
        """What a division of integers has no answer to, as far as its divisor is not known.

        The least integer of 8 or 16 bits has one, itself.
        """
        if item.operator not in ("div", "mod", "fmod") or np.dtype(item.dtype).kind not in "iu":
            return ()
        divisor = item.sources[1] - len(self.operands)
        known = self.program[divisor] if divisor >= 0 and self.program[divisor].operator == "constant" else None
        checks: list[Check] = ["zero"] if known is None or known.parameters[0] == 0 else []
        limits = np.iinfo(item.dtype)
        if (
            item.operator != "fmod"
            and limits.min < 0
            and limits.bits >= 32
            and (known is None or known.parameters[0] == -1)
        ):
            checks.append("least")
        return checks

    @property
    def cost(self) -> int:
        """Arithmetic operations of one number, roughly: a polynomial counts as many."""
        return sum(_POLYNOMIAL if item.operator not in _SIMPLE else 1 for item in self.program)

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row, roughly."""
        return self.cost * math.prod(self.shape)


Reduction = Literal["sum", "wrapping_sum", "prod", "max", "min", "argmax", "argmin", "last_argmax", "last_argmin"]
Before = Literal["none", "abs", "square", "exp"]
After = Literal["none", "mean", "sqrt", "log"]


@dataclass(frozen=True)
class ReduceSpec(KernelSpec):
    """Numbers of a contiguous x [shape], reduced over some axes. y has the others, contiguous. Arguments: x, y.

    `before` is applied to each number, `after` to each result. y is of x's type; argmax and argmin, over one axis, give
    int64: the first or the last of equal ones. Neighbouring axes of the same kind should be given as one.

    Sums and products of integers are computed in float64, and are the largest or least integer where they overflow;
    wrapping sums are exact, and wrap around. The place of an extreme is 0 if the first number is NaN, others are passed
    over. All that is onnxruntime's.
    """

    dtype: str
    shape: tuple[int, ...]
    reduced: tuple[bool, ...]
    operator: Reduction
    before: Before = "none"
    after: After = "none"

    @property
    def number(self) -> str:
        """The type that totals have."""
        return "float64" if self.operator in ("sum", "prod") and np.dtype(self.dtype).kind in "iu" else self.dtype

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row, roughly."""
        return math.prod(self.shape) * (16 if self.before == "exp" else 1)


@dataclass(frozen=True)
class PlainPoolSpec(KernelSpec):
    """Pooling of a plain image, whose `depth` is one slice, or of a volume; no halos. Arguments: x, y."""

    pool: PoolSpec
    depth: DepthWindow

    @property
    def output_lines(self) -> int:
        """Lines of one channel of the result."""
        return self.depth.output * self.pool.output_size[0]

    @property
    def input_elements(self) -> int:
        """Numbers of x."""
        return self.pool.channels * self.depth.length * self.pool.height * self.pool.width

    @property
    def output_elements(self) -> int:
        """Numbers of y."""
        return self.pool.channels * self.output_lines * self.pool.output_size[1]

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.pool.flops * self.depth.kernel * self.depth.output

    @property
    def text(self) -> str:
        """Shape for people."""
        return f"plain {self.pool.text}, {self.depth.length} slices"


@dataclass(frozen=True)
class SoftmaxSpec(KernelSpec):
    """exp(x) over its sum, or the logarithm of that, along the middle axis of plain float32 [rows][columns][inner].

    Arguments: x, y.
    """

    rows: int
    columns: int
    inner: int = 1
    logarithm: bool = False

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.rows * self.columns * self.inner


@dataclass(frozen=True)
class MatMulSpec(KernelSpec):
    """Products of plain float32 matrices: y[b] = scale A[b] B[b], y [batches][rows][columns] contiguous.

    Batch b of an operand begins at sum over `batch_shape` of index times batch stride (0 broadcasts); in it, element
    (i, j) lies at i strides[0] + j strides[1], in elements. Arguments: a, b, y.
    """

    flushes_subnormals = True

    batch_shape: tuple[int, ...]
    rows: int
    inner: int
    columns: int
    a_batch_strides: tuple[int, ...]
    b_batch_strides: tuple[int, ...]
    a_strides: tuple[int, int]
    b_strides: tuple[int, int]
    scale: float = 1.0

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        total = 2 * self.rows * self.inner * self.columns
        for length in self.batch_shape:
            total *= length
        return total


@dataclass(frozen=True)
class ZerosSpec(KernelSpec):
    """Zeros in `words` 32-bit words of an arena that was used for other sizes before. Arguments: stamp, zeros.

    The stamp says for which sizes the arena was used last; `stamp` is that of these.
    """

    words: int
    stamp: int


@dataclass(frozen=True)
class CopySpec(KernelSpec):
    """Plain numbers moved: number (i, j, ...) of `shape`, which lies at i input_strides[0] + ..., goes to i
    output_strides[0] + ... Arguments: x, y.
    """

    dtype: str  # numpy's name
    shape: tuple[int, ...]
    input_strides: tuple[int, ...]
    output_strides: tuple[int, ...]


SegmentKind = Literal["run", "table", "fill"]


@dataclass(frozen=True)
class LineSegment:
    """`length` adjacent numbers of a line of y: x at `source`, `source` + `step`, ... ("run"), x where the table says,
    from its entry `source` on ("table"), or a constant ("fill").
    """

    kind: SegmentKind
    length: int
    source: int = 0
    step: int = 0


@dataclass(frozen=True)
class RemapSpec(KernelSpec):
    """y[i, j, ..., k] = x[t0[i] + t1[j] + ... + what `line` says of k], or `fill` where a table says -1.

    Arguments: x, one int32 array with the tables t0, t1, ... of the axes `outer`, then those of the line; y. `reach`
    is how many numbers of x there are.
    """

    dtype: str  # numpy's name
    outer: tuple[int, ...]
    line: tuple[LineSegment, ...]
    reach: int
    table: int  # entries of all tables
    fill: float | int = 0

    @property
    def length(self) -> int:
        """Numbers of a line."""
        return sum(segment.length for segment in self.line)


@dataclass(frozen=True)
class GatherSpec(KernelSpec):
    """ONNX's Gather: data [outer][length][inner], indices [count] -> y [outer][count][inner]; negatives: from the end.

    `item_bytes` is that of one number (1, 2, 4, 8); nothing but moving is done. An index out of range is refused.
    Arguments: data, indices, y.
    """

    outer: int
    length: int
    inner: int
    count: int
    item_bytes: int
    index_dtype: Literal["int32", "int64"]

    @property
    def checks(self) -> tuple[Check, ...]:
        """Indices."""
        return ("index",)


@dataclass(frozen=True)
class Picked:
    """An axis of y whose place an index says: its length, its stride, and where that index lies among its like."""

    length: int
    stride: int
    step: int


@dataclass(frozen=True)
class GatherPlacesSpec(KernelSpec):
    """ONNX's GatherElements and GatherND: y[i, j, ...] = data[place], the place as in `ScatterSpec`.

    `item_bytes` is that of one number (1, 2, 4, 8); nothing but moving is done. Arguments: data, indices, y; all plain.
    """

    item_bytes: int
    index_dtype: Literal["int32", "int64"]
    elements: int  # of data
    shape: tuple[int, ...]  # of y
    strides: tuple[int, ...]
    index_strides: tuple[int, ...]
    picked: tuple[Picked, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        """Indices."""
        return ("index",)


ScatterReduction = Literal["none", "add", "mul", "max", "min"]


@dataclass(frozen=True)
class ScatterSpec(KernelSpec):
    """y = data, then for every update u[i, j, ...] in order: y[place] = y[place] `reduction` u.

    Arguments: data, indices, updates, y; all plain.

    The place is i strides[0] + j strides[1] + ... and, for each of `picked`, stride times the index that lies at
    i index_strides[0] + ... + step. Negative indices count from the end; one out of range is refused.
    """

    dtype: str
    index_dtype: Literal["int32", "int64"]
    elements: int  # of data and y
    shape: tuple[int, ...]  # of updates
    strides: tuple[int, ...]
    index_strides: tuple[int, ...]
    picked: tuple[Picked, ...]
    reduction: ScatterReduction = "none"

    @property
    def checks(self) -> tuple[Check, ...]:
        """Indices."""
        return ("index",)

    @property
    def flops(self) -> int:
        """Updates."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class TopSpec(KernelSpec):
    """ONNX's TopK over the last axis: of each row of x [rows][columns] the best `count` numbers, the best first.

    Of equal numbers the first one is better. NaN is neither better nor worse than anything, so where it ends up is
    onnxruntime's heap's doing, which the kernel follows. Arguments: x; places in their rows, int64; y; both
    [rows][count].
    """

    dtype: str
    rows: int
    columns: int
    count: int
    largest: bool = True

    @property
    def flops(self) -> int:
        """Comparisons, roughly: of all numbers, and of those that enter the heap."""
        return self.rows * (self.columns + 4 * self.count * self.count.bit_length())


@dataclass(frozen=True)
class GridSampleSpec(KernelSpec):
    """ONNX's GridSample of images, bilinear, with zeros around: x [images][channels][height][width] at points.

    Arguments: x; the grid [images][points][2], where 1 and -1 are the middles (`align_corners`) or the outer edges of
    the last and the first pixel, horizontally first; y [images][channels][points]. All float32.
    """

    images: int
    channels: int
    height: int
    width: int
    points: int
    align_corners: bool = False

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row."""
        return self.images * self.points * (8 * self.channels + 40)


TreeOperator = Literal["add", "min", "max"]


@dataclass(frozen=True)
class TreeSpec(KernelSpec):
    """Sums, or extremes, of the leaves that each row of x [rows][columns] reaches: y [rows][groups][targets].

    The trees are in `groups` of adjacent ones. Node n leads to its first child if x[feature] <= threshold, else to its
    second one; NaN leads to the second one, or, if `missing`, to the one that the node says. Nodes from `inner` on are
    leaves, which lead to themselves. Arguments: x, the raw weights, y. Raw weights: "thresholds" [nodes]; "links",
    int32 [nodes][4], feature, children, whether NaN leads to the first one; "roots", int32 [trees]; "weights" [leaves],
    added to the target that "targets", int32 [leaves], says, or, if `dense`, [leaves][targets].
    """

    dtype: Literal["float32", "float64"]
    rows: int
    columns: int
    trees: int
    inner: int
    leaves: int
    targets: int
    groups: int
    operator: TreeOperator
    dense: bool
    missing: bool
    steps: int  # from the roots to the leaves of all trees, on an average

    @property
    def flops(self) -> int:
        """Steps, each as so many operations as take its time: it waits for memory."""
        return self.rows * self.steps * _STEP


Role = Literal["input", "weight", "scratch", "output"]


@dataclass(frozen=True)
class TensorProgramSpec(KernelSpec):
    """A kernel that TVM wrote itself: a function of its TIR, a loop nest over plain, contiguous tensors.

    `function` is TVM's JSON of it; its parameters have these `roles`. Arguments: the first input, the weights (raw
    weights "0", "1", ...), other inputs, scratch memory, outputs but the first, the first output. Scratch memory holds
    anything before and after. `tasks` is the length of the function's outermost loop if that is parallel, else 1.
    """

    function: str
    roles: tuple[Role, ...]
    scratch: tuple[tuple[int, str], ...]  # elements and type
    tasks: int
    operations: int

    @property
    def flops(self) -> int:
        """Statements that the loops execute."""
        return self.operations

    @property
    def order(self) -> tuple[int, ...]:
        """Which parameter of the function each argument is."""
        places: dict[str, list[int]] = {"input": [], "weight": [], "scratch": [], "output": []}
        for index, role in enumerate(self.roles):
            places[role].append(index)
        first, *others = places["input"]
        result, *more = places["output"]
        return (first, *places["weight"], *others, *places["scratch"], *more, result)


@dataclass(frozen=True)
class IslandSpec(KernelSpec):
    """Operators that onnxruntime computes: an ONNX file, in place of a kernel. Its tensors are plain.

    Arguments: the file's inputs and outputs, in their order. `row_us` is what a row takes on one core, 0: not known.
    Equal files are equal specs, however long they took.
    """

    model: bytes
    row_us: int = field(default=0, compare=False)


@dataclass(frozen=True)
class DeclaredOutput:
    """An output of a model as onnxruntime declares it: numpy's type ("string" for texts), -1 for sizes not known."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TailSpec(IslandSpec):
    """The last island of a model, which makes all of its outputs, of sizes that depend on data: they have no buffers.

    Arguments: the file's inputs. Its outputs are the model's, in their order.
    """

    outputs: tuple[DeclaredOutput, ...] = ()

    @property
    def text(self) -> str:
        """Shapes for people."""
        return ", ".join(
            "x".join("?" if size < 0 else str(size) for size in each.shape) or "1" for each in self.outputs
        )
