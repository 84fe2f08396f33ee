"""A small vocabulary for writing kernels in TIR, over TVM's IRBuilder: loops, vectors, numbers of any element type.

Templates import it as `T`, as TVM's scripts do: what they call by that name becomes code, all else computes now.

A kernel is a plain C function `void symbol(pointers..., int32 begin, int32 end)`. Its pointers must not overlap
(`noalias`). Vector accesses are emitted with the alignment of one element, so pointers need no more than that.

A *number* of dtype float16 or bfloat16 is held as float32 in registers, bool as uint8, 0 or 1. No conversion traps,
whatever the numbers are.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from gangway.compiler.kernels.extents import LONGEST, current, expression, is_constant

Expr = Any  # TVM's expressions and buffers carry no types that mypy could check
Buffer = Any
tirx: Any = tvm.tirx  # whose annotations demand expressions where Python's numbers do as well
FLOATS = ("bfloat16", "float16", "float32", "float64")
LEAST_CAPACITY = 1 << 10
FLAT: Any = {"layout": None}  # of a buffer of one dimension; to make TVM's default one takes a fifth of a kernel's text
_MEMORY = {"bool": "uint8", "bfloat16": "uint16", "float16": "uint16"}
_REGISTERS = {"bool": "uint8", "bfloat16": "float32", "float16": "float32"}


@dataclass(frozen=True)
class Argument:
    """One pointer of a kernel and how many elements lie behind it."""

    name: str
    elements: int
    dtype: str = "float32"


EXTENTS = Argument("extents", 0, "int32")  # the numbers that a kernel reads at run time, behind all tensors
BATCH = "batch"  # the name of the last argument of kernels for several rows
REFUSED = Argument("refused", 2, "int64")  # the last argument of kernels that check numbers


def kernel(
    symbol: str, arguments: Sequence[Argument], task: Callable[[Expr, tuple[Buffer, ...]], None], functions: str = ""
) -> Any:
    """The `tirx.PrimFunc` that calls `task(number, buffers)` for every task number in [begin, end).

    `functions`: LLVM's text of those that `task` calls as extern ones, for instructions that TIR has no name for.
    """
    with IRBuilder() as builder, ir.prim_func():
        ir.func_name(symbol)
        ir.func_attr({"global_symbol": symbol, "tirx.noalias": True})
        trace = current()
        end_of_tensors = len(arguments) - (arguments[-1] is REFUSED or arguments[-1].name == BATCH)
        extents = [EXTENTS] if trace else []
        given = [*arguments[:end_of_tensors], *extents, *arguments[end_of_tensors:]]
        pointers = {a.name: ir.arg(a.name, ir.handle(a.dtype)) for a in given}
        begin, end = ir.arg("begin", ir.int32()), ir.arg("end", ir.int32())
        if trace:
            numbers = ir.decl_buffer((len(trace.extents),), "int32", data=pointers[EXTENTS.name], **FLAT)
            trace.begin([ir.bind(numbers[place]) for place in range(len(trace.extents))], ir.bind)
        buffers = tuple(
            ir.decl_buffer((_length(a.elements),), a.dtype, data=pointers[a.name], **FLAT) for a in arguments
        )
        with ExitStack() as imports:
            if functions:
                imports.enter_context(ir.attr(tirx.IntImm("int32", 0), "pragma_import_llvm", functions))
            with ir.serial(end - begin) as index:
                task(begin + index, buffers)
    return builder.get()


def batch_argument(arguments: Sequence[Argument]) -> Argument:
    """What a batch kernel has behind these tensors: how many rows, and each tensor's distance of two rows."""
    return Argument(BATCH, len(arguments) + 1, "int64")


def _length(elements: int) -> int:
    """The length of a buffer, of which no more is known if a kernel reads it at run time."""
    return elements if is_constant(elements) else LONGEST


def _capacity(elements: int) -> int:
    """The elements of a local array: of an extent the next power of two, so that one kernel serves many."""
    if is_constant(elements):
        return elements
    capacity = LEAST_CAPACITY
    while capacity < elements:
        capacity *= 2
    return capacity


def repeat(count: int | Expr, body: Callable[[Expr], None]) -> None:
    """`body(i)` for i in [0, count), as a loop unless it runs once."""
    if isinstance(count, int) and count == 1:
        body(0)
        return
    with ir.serial(count) as index:
        body(index)


def either(condition: Expr | bool, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """`if condition: then() else: otherwise()`, decided now where the condition is known."""
    if isinstance(condition, bool):
        (then if condition else otherwise)()
        return
    with ir.If(condition):
        with ir.Then():
            then()
        with ir.Else():
            otherwise()


def with_blocks(group: Expr, blocks: int, most: int, body: Callable[[Expr, int], None]) -> None:
    """`body(group, its blocks)` for one of the groups that `blocks` make: `most` each, and the last one the rest."""
    full, rest = divmod(blocks, most)
    either(group < full if rest else True, lambda: body(group, most), lambda: body(full, rest))


def when(condition: Expr | bool, then: Callable[[], None]) -> None:
    """`if condition: then()`, decided now where the condition is known."""
    if isinstance(condition, bool):
        if condition:
            then()
        return
    with ir.If(condition), ir.Then():
        then()


def local(elements: int, dtype: str = "float32") -> Buffer:
    """Scratch memory on the stack, uninitialised."""
    return ir.alloc_buffer((_capacity(elements),), dtype, scope="local", **FLAT)


def is_one(number: int | Expr) -> bool:
    """Whether a number is known to be 1: of an extent this is no condition."""
    return isinstance(number, int) and number == 1


def one_by_one(count: int, body: Callable[[Expr], None]) -> None:
    """`body(i)` for i in [0, count), what a loop over vectors has left: unrolled, or a loop if `count` is an extent."""
    if not is_constant(count):
        repeat(count, body)
        return
    for index in range(count):
        body(index)


def reciprocal(number: int, lanes: int) -> Expr:
    """A vector of 1 / number."""
    if is_constant(number):
        return constant(1 / number, lanes)
    return splat(tirx.const(1.0, "float32") / tirx.Cast("float32", number), lanes)


def choose(value: Expr, options: Sequence[int], body: Callable[[int], None]) -> None:
    """`body(option)` for the option that `value`, known at run time, equals; it must equal one."""
    first, *others = options
    if others:
        either(value == first, lambda: body(first), lambda: choose(value, others, body))
    else:
        body(first)


def quotient(a: Expr, b: int) -> Expr:
    """`a // b` for `a` >= 0, without the correction that floor division of negative numbers needs."""
    return a if is_one(b) else tirx.truncdiv(a, b)


def remainder(a: Expr, b: int) -> Expr:
    """`a % b` for `a` >= 0."""
    return 0 if is_one(b) else tirx.truncmod(a, b)


def at_most(a: Expr, limit: Expr) -> Expr:
    """The smaller of two integers."""
    return min(a, limit) if isinstance(a, int) and isinstance(limit, int) else tirx.Min(a, limit)


def at_least(a: Expr, limit: Expr) -> Expr:
    """The larger of two integers."""
    return max(a, limit) if isinstance(a, int) and isinstance(limit, int) else tirx.Max(a, limit)


def lanes_at(base: Expr, lanes: int) -> Expr:
    """Index of `lanes` adjacent elements."""
    return expression(base) if lanes == 1 else tirx.Ramp(base, 1, lanes)


def strided(base: Expr, step: int, lanes: int) -> Expr:
    """Index of `lanes` elements, every `step`-th one."""
    return tirx.Ramp(base, step, lanes)


def splat(value: Expr, lanes: int) -> Expr:
    """A vector of equal elements; the element itself where there is one lane."""
    return value if lanes == 1 else tirx.Broadcast(value, lanes)


def constant(value: float, lanes: int, dtype: str = "float32") -> Expr:
    """A vector of equal constants, or, if `lanes` is 1, one."""
    number = tirx.const(value, dtype) if isinstance(value, (int, float, np.generic)) else tirx.Cast(dtype, value)
    return splat(number, lanes)


def bind(value: Expr) -> Expr:
    """A name for a value that is used more than once."""
    name: Expr = ir.bind(value)
    return name


class Register:
    """A local vector that LLVM keeps in a register."""

    def __init__(self, lanes: int, value: Expr, dtype: str = "float32"):
        self._index = lanes_at(0, lanes)
        self._buffer = ir.alloc_buffer((lanes,), dtype, scope="local", **FLAT)
        self.set(value)

    def set(self, value: Expr) -> None:
        """Assign."""
        ir.buffer_store(self._buffer, value, [self._index])

    @property
    def value(self) -> Expr:
        """The vector."""
        return self._buffer[self._index]

    def lane(self, index: Expr) -> Expr:
        """One number of the vector."""
        return self._buffer[index]

    def set_lane(self, index: Expr, value: Expr) -> None:
        """Assign one number of the vector."""
        ir.buffer_store(self._buffer, value, [index])

    def part(self, first: int, count: int) -> Expr:
        """`count` adjacent numbers of the vector."""
        return self._buffer[lanes_at(first, count)]

    def add(self, value: Expr) -> None:
        """Accumulate; `a * b` becomes a fused multiply-add where the target has one."""
        self.set(self.value + value)


def vector_lanes(most: int, length: int) -> int:
    """The lanes of a vector for lines of `length` numbers: a power of two up to `most`, which is one, too."""
    while most > length:
        most //= 2
    return most


def lane_maximum(register: Register, lanes: int, dtype: str) -> Expr:
    """The largest of a vector's numbers, none of which is NaN."""
    while lanes > 1:
        lanes //= 2
        register = Register(lanes, tirx.Max(register.part(0, lanes), register.part(lanes, lanes)), dtype)
    return register.value


def lane_sum(register: Register, lanes: int) -> Expr:
    """The sum of a vector's numbers, added pairwise."""
    while lanes > 1:
        lanes //= 2
        register = Register(lanes, register.part(0, lanes) + register.part(lanes, lanes))
    return register.value


def scratch(elements: int, dtype: str = "float32") -> Buffer:
    """A local array. It lies on the stack: templates keep the sum of theirs below 256 KiB."""
    return ir.alloc_buffer((_capacity(elements),), dtype, scope="local", **FLAT)


def first_lanes(value: Expr, count: int, lanes: int) -> Expr:
    """The vector with zeros from lane `count` on."""
    if count >= lanes:
        return value
    index = tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), lanes)
    return tirx.Select(index < constant(count, lanes, "int32"), value, constant(0.0, lanes))


def store(buffer: Buffer, base: Expr, value: Expr, lanes: int, step: int = 1) -> None:
    """Write a vector (or, if `lanes` is 1, a number) to `buffer[base]` and every `step`-th element after it."""
    ir.buffer_store(buffer, value, [expression(base) if lanes == 1 else tirx.Ramp(base, step, lanes)])


def refuse(refused: Buffer, check: int, value: Expr) -> None:
    """Say that a number has failed a check, whose number counts from 1."""
    store(refused, 0, tirx.const(check, "int64"), 1)
    store(refused, 1, tirx.Cast("int64", value), 1)


def checked_index(index: Expr, length: int, dtype: str, refused: Buffer) -> Expr:
    """The index counted from the beginning, as a 32-bit integer. One out of range is refused, and clamped."""
    index = bind(index)
    zero, end, last = (tirx.const(value, dtype) for value in (0, length, length - 1))
    outside = tirx.Or(index < tirx.const(-length, dtype), index >= end)
    when(outside, lambda: refuse(refused, 1, index))
    counted = bind(tirx.Select(index < zero, index + end, index))
    return bind(tirx.Cast("int32", at_most(at_least(counted, zero), last)))


def prefetch(buffer: Buffer, index: Expr, level: int = 1) -> None:
    """Ask for the cache line of `buffer[index]` in that level; an index beyond the buffer's end does no harm."""
    read, keep, data = (tirx.const(value, "int32") for value in (0, 4 - level, 1))
    ir.evaluate(ir.call_llvm_intrin("void", "llvm.prefetch", ir.address_of(buffer[index]), read, keep, data))


def transposed(rows: list[Expr]) -> list[Expr]:
    """The columns of a square matrix, given as its rows: as many vectors as each has lanes, a power of two.

    In each of log2(lanes) stages pairs of vectors exchange halves, quarters, ... of each other (Eklundh 1972).
    """
    lanes, distance = len(rows), 1
    rows = [bind(row) for row in rows]
    while distance < lanes:
        for first in range(lanes):
            if not first & distance:
                second = first + distance
                rows[first], rows[second] = _exchanged(rows[first], rows[second], distance, lanes)
        distance *= 2
    return rows


def _exchanged(a: Expr, b: Expr, distance: int, lanes: int) -> tuple[Expr, Expr]:
    """Lanes with the bit `distance` of `a` against those without it of `b`."""
    upper = [lanes + lane - distance if lane & distance else lane for lane in range(lanes)]
    lower = [lanes + lane if lane & distance else lane + distance for lane in range(lanes)]
    return bind(tirx.Shuffle([a, b], upper)), bind(tirx.Shuffle([a, b], lower))


def memory_dtype(dtype: str) -> str:
    """The type of a buffer that holds numbers of `dtype`."""
    return _MEMORY.get(dtype, dtype)


def register_dtype(dtype: str) -> str:
    """The type that numbers of `dtype` have in registers."""
    return _REGISTERS.get(dtype, dtype)


def vector_dtype(dtype: str, lanes: int) -> str:
    """TVM's name of a vector."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def keep(value: Expr) -> Expr:
    """A name for a value that is used more than once, but for conditions.

    It is a register: of a mere name TVM would put what it stands for, which makes expressions of exponential size, and
    it would reckon with numbers that neither overflow nor are NaN.
    """
    dtype, _, lanes = str(value.ty.dtype).partition("x")
    return Register(int(lanes or 1), value, dtype).value


def number(value: float, dtype: str, lanes: int) -> Expr:
    """A constant in registers."""
    value = bool(value) if dtype == "bool" else value
    return constant(value, lanes, register_dtype(dtype))


def load(stored: Expr, dtype: str, lanes: int) -> Expr:
    """What was read from memory, as it is held in registers."""
    return _FROM_BITS[dtype](stored, lanes) if dtype in _FROM_BITS else keep(stored)


def stored(value: Expr, dtype: str, lanes: int) -> Expr:
    """What is to be written to memory."""
    return _TO_BITS[dtype](value, lanes) if dtype in _TO_BITS else value


def truth(condition: Expr, lanes: int, negate: bool = False) -> Expr:
    """A condition, or its contrary, as a number of dtype bool."""
    return keep(
        tirx.Select(condition, constant(int(not negate), lanes, "uint8"), constant(int(negate), lanes, "uint8"))
    )


def holds(value: Expr, lanes: int) -> Expr:
    """A number of dtype bool as a condition. It cannot be bound: TVM knows no names for vectors of those."""
    return tirx.NE(value, constant(0, lanes, "uint8"))


def is_nan(x: Expr, dtype: str, lanes: int) -> Expr:
    """Whether floats are no numbers, by their bits: TVM believes that everything equals itself."""
    bits, largest = ("int64", 0x7FF << 52) if dtype == "float64" else ("int32", 0xFF << 23)
    body = tirx.reinterpret(vector_dtype(bits, lanes), x) & constant(largest | (largest & -largest) - 1, lanes, bits)
    return keep(body) > constant(largest, lanes, bits)


def widen(value: Expr, width: int) -> Expr:
    """A vector of `width` equal numbers, of one."""
    return value if width == 1 else splat(value, width)


def convert(value: Expr, source: str, target: str, lanes: int) -> Expr:
    """ONNX's Cast. Floats are cut towards zero; those out of range, and NaN, become what onnxruntime makes of them.

    Integers wrap around. Everything but zero is true.
    """
    if source == target:
        return value
    kind = vector_dtype(register_dtype(target), lanes)
    if target == "bool":
        return truth(tirx.EQ(value, number(0, source, lanes)), lanes, negate=True)  # NaN does not equal zero
    if source in FLOATS and target not in FLOATS:
        return _float_to_integer(value, register_dtype(source), target, lanes)
    if target in _TO_BITS:
        return _FROM_BITS[target](_TO_BITS[target](tirx.Cast(kind, value), lanes), lanes)
    return value if register_dtype(source) == register_dtype(target) else tirx.Cast(kind, value)


def _float_to_integer(value: Expr, source: str, target: str, lanes: int) -> Expr:
    """As the processor does it, and so onnxruntime: through int32, or int64 if that is too small."""
    bits = np.iinfo(target).bits
    if target == "uint64":
        return _float_to_uint64(value, source, lanes)
    wide = "int64" if bits == 64 or target == "uint32" else "int32"
    whole = _float_to_signed(keep(value), source, wide, lanes)
    return whole if wide == target else tirx.Cast(vector_dtype(target, lanes), whole)


def _float_to_signed(x: Expr, source: str, target: str, lanes: int) -> Expr:
    """The instruction cvttss2si and its kind: out of range, and of NaN, the least integer."""
    least = np.iinfo(target).min
    end = constant(-float(least), lanes, source)
    # The largest float below the range, of float64 and int32, is no integer's neighbour.
    below = (
        x > constant(float(least) - 1, lanes, source)
        if (source, target) == ("float64", "int32")
        else x >= constant(float(least), lanes, source)
    )
    inside = tirx.And(below, x < end)
    cut = keep(tirx.Select(inside, x, constant(0.0, lanes, source)))
    whole = keep(tirx.Cast(vector_dtype(target, lanes), cut))
    return keep(tirx.Select(inside, whole, constant(least, lanes, target)))


def _float_to_uint64(value: Expr, source: str, lanes: int) -> Expr:
    """What compilers make of it where there is no instruction: from 2^63 on, the rest and the highest bit."""
    x, kind = keep(value), vector_dtype("uint64", lanes)
    half = constant(2.0**63, lanes, source)
    lower = tirx.reinterpret(kind, _float_to_signed(x, source, "int64", lanes))
    upper = tirx.reinterpret(kind, _float_to_signed(keep(x - half), source, "int64", lanes))
    return keep(tirx.Select(x >= half, keep(upper ^ constant(1 << 63, lanes, "uint64")), keep(lower)))


def from_half(bits: Expr, lanes: int) -> Expr:
    """Half precision, given as uint16, as float32: exact. Not every target has an instruction for it."""
    int32 = partial(constant, lanes=lanes, dtype="int32")
    wide = keep(tirx.Cast(vector_dtype("int32", lanes), bits))
    sign = keep((wide & int32(0x8000)) << int32(16))
    body = keep((wide & int32(0x7FFF)) << int32(13))
    exponent = keep(body & int32(0x7C00 << 13))
    normal = body + int32((127 - 15) << 23)
    odd = body + int32(2 * (127 - 15) << 23)  # infinity and NaN keep an exponent of ones
    kind = vector_dtype("float32", lanes)
    # Numbers below the normal ones: their bits, put below those of 2^-14, are that much more than 2^-14.
    tiny = tirx.reinterpret(kind, body + int32((127 - 14) << 23)) - constant(2.0**-14, lanes)
    tiny_bits = tirx.reinterpret(vector_dtype("int32", lanes), keep(tiny))
    shifted = tirx.Select(tirx.EQ(exponent, int32(0x7C00 << 13)), odd, normal)
    body = tirx.Select(tirx.EQ(exponent, int32(0)), keep(tiny_bits), keep(shifted))
    return keep(tirx.reinterpret(kind, body | sign))


def to_half(value: Expr, lanes: int) -> Expr:
    """float32 as the bits of the nearest number of half precision, ties to even."""
    int32 = partial(constant, lanes=lanes, dtype="int32")
    bits = keep(tirx.reinterpret(vector_dtype("int32", lanes), keep(value)))
    body = keep(bits & int32(0x7FFFFFFF))
    sign = keep((bits >> int32(16)) & int32(0x8000))
    # Below 2^-14, adding 1/2 leaves the rounded number in the low bits of the sum.
    magnitude = tirx.reinterpret(vector_dtype("float32", lanes), body)
    sum_bits = tirx.reinterpret(vector_dtype("int32", lanes), Register(lanes, magnitude + constant(0.5, lanes)).value)
    tiny = keep(sum_bits - int32(126 << 23))
    odd = (body >> int32(13)) & int32(1)
    normal = keep((body - int32((127 - 15) << 23) + int32(0xFFF) + odd) >> int32(13))
    special = tirx.Select(body > int32(0x7F800000), int32(0x7E00), int32(0x7C00))
    large = body >= int32((127 + 16) << 23)
    finite = tirx.Select(body < int32((127 - 14) << 23), tiny, normal)
    result = tirx.Select(large, keep(special), keep(finite)) | sign
    return tirx.Cast(vector_dtype("uint16", lanes), keep(result))


def from_bfloat16(bits: Expr, lanes: int) -> Expr:
    """The upper half of float32, given as uint16, as float32: exact."""
    wide = keep(tirx.Cast(vector_dtype("int32", lanes), bits))
    return keep(tirx.reinterpret(vector_dtype("float32", lanes), wide << constant(16, lanes, "int32")))


def to_bfloat16(value: Expr, lanes: int) -> Expr:
    """float32 as the bits of the nearest number of bfloat16, ties to even; NaN stays NaN."""
    int32 = partial(constant, lanes=lanes, dtype="int32")
    value = keep(value)
    bits = keep(tirx.reinterpret(vector_dtype("int32", lanes), value))
    odd = (bits >> int32(16)) & int32(1)
    rounded = Register(lanes, bits + int32(0x7FFF) + odd, "int32").value
    result = tirx.Select(is_nan(value, "float32", lanes), bits | int32(1 << 22), rounded)
    return tirx.Cast(vector_dtype("uint16", lanes), keep((keep(result) >> int32(16)) & int32(0xFFFF)))


_FROM_BITS = {"float16": from_half, "bfloat16": from_bfloat16}
_TO_BITS = {"float16": to_half, "bfloat16": to_bfloat16}


def truncate(x: Expr, dtype: str, lanes: int) -> Expr:
    """Towards zero, of a float. Zeros keep their sign."""
    dtype = register_dtype(dtype)
    whole = "int32" if dtype == "float32" else "int64"
    limit = 2.0**23 if dtype == "float32" else 2.0**52  # from there on every number is an integer
    x = keep(x)
    inside = tirx.Min(constant(limit, lanes, dtype), tirx.Max(constant(-limit, lanes, dtype), x))
    kind, integers = vector_dtype(dtype, lanes), vector_dtype(whole, lanes)
    small = tirx.abs(x) < constant(limit, lanes, dtype)
    cut = tirx.Cast(kind, tirx.Cast(integers, tirx.Select(small, keep(inside), constant(0.0, lanes, dtype))))
    return keep(tirx.Select(small, _with_sign(keep(cut), x, dtype, lanes), x))


def floor(x: Expr, dtype: str, lanes: int) -> Expr:
    """The largest integer that is not above x."""
    cut, one = truncate(x, dtype, lanes), number(1.0, dtype, lanes)
    return keep(tirx.Select(cut > x, cut - one, cut))


def ceil(x: Expr, dtype: str, lanes: int) -> Expr:
    """The smallest integer that is not below x."""
    cut, one = truncate(x, dtype, lanes), number(1.0, dtype, lanes)
    return keep(tirx.Select(cut < x, _with_sign(cut + one, x, register_dtype(dtype), lanes), cut))


def round_even(x: Expr, dtype: str, lanes: int) -> Expr:
    """The nearest integer, halves to the even one."""
    dtype = register_dtype(dtype)
    limit = 2.0**23 if dtype == "float32" else 2.0**52
    x = keep(x)
    # Added to a number below it, 2^23 (or 2^52) leaves no bits for a fraction.
    shifted = Register(lanes, tirx.abs(x) + constant(limit, lanes, dtype), dtype).value
    rounded = _with_sign(keep(shifted - constant(limit, lanes, dtype)), x, dtype, lanes)
    return keep(tirx.Select(tirx.abs(x) < constant(limit, lanes, dtype), rounded, x))


def _with_sign(value: Expr, sign: Expr, dtype: str, lanes: int) -> Expr:
    bits = "int32" if dtype == "float32" else "int64"
    kind = vector_dtype(bits, lanes)
    mask = constant(-(2**31) if bits == "int32" else -(2**63), lanes, bits)
    return tirx.reinterpret(
        vector_dtype(dtype, lanes), tirx.reinterpret(kind, value) | (tirx.reinterpret(kind, sign) & mask)
    )
