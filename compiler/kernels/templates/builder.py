"""A small vocabulary for writing kernels in TIR, over TVM's IRBuilder.

A kernel is a plain C function `void symbol(pointers..., int32 begin, int32 end)`. Its pointers must not overlap
(`noalias`). Vector accesses are emitted with the alignment of one element, so pointers need no more than that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

Expr = Any  # TVM's expressions and buffers carry no types that mypy could check
Buffer = Any
tirx: Any = tvm.tirx  # whose annotations demand expressions where Python's numbers do as well


@dataclass(frozen=True)
class Argument:
    """One pointer of a kernel and how many elements lie behind it."""

    name: str
    elements: int
    dtype: str = "float32"


def kernel(symbol: str, arguments: Sequence[Argument], task: Callable[[Expr, tuple[Buffer, ...]], None]) -> Any:
    """The `tirx.PrimFunc` that calls `task(number, buffers)` for every task number in [begin, end)."""
    with IRBuilder() as builder, ir.prim_func():
        ir.func_name(symbol)
        ir.func_attr({"global_symbol": symbol, "tirx.noalias": True})
        pointers = [ir.arg(a.name, ir.handle(a.dtype)) for a in arguments]
        begin, end = ir.arg("begin", ir.int32()), ir.arg("end", ir.int32())
        buffers = tuple(
            ir.decl_buffer((a.elements,), a.dtype, data=pointer) for a, pointer in zip(arguments, pointers, strict=True)
        )
        with ir.serial(end - begin) as index:
            task(begin + index, buffers)
    return builder.get()


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
    return ir.alloc_buffer((elements,), dtype, scope="local")


def choose(value: Expr, options: Sequence[int], body: Callable[[int], None]) -> None:
    """`body(option)` for the option that `value`, known at run time, equals; it must equal one."""
    first, *others = options
    if others:
        either(value == first, lambda: body(first), lambda: choose(value, others, body))
    else:
        body(first)


def quotient(a: Expr, b: int) -> Expr:
    """`a // b` for `a` >= 0, without the correction that floor division of negative numbers needs."""
    return a if b == 1 else tirx.truncdiv(a, b)


def remainder(a: Expr, b: int) -> Expr:
    """`a % b` for `a` >= 0."""
    return 0 if b == 1 else tirx.truncmod(a, b)


def at_most(a: Expr, limit: Expr) -> Expr:
    """The smaller of two integers."""
    return min(a, limit) if isinstance(a, int) and isinstance(limit, int) else tirx.Min(a, limit)


def at_least(a: Expr, limit: Expr) -> Expr:
    """The larger of two integers."""
    return max(a, limit) if isinstance(a, int) and isinstance(limit, int) else tirx.Max(a, limit)


def lanes_at(base: Expr, lanes: int) -> Expr:
    """Index of `lanes` adjacent elements."""
    return base if lanes == 1 else tirx.Ramp(base, 1, lanes)


def strided(base: Expr, step: int, lanes: int) -> Expr:
    """Index of `lanes` elements, every `step`-th one."""
    return tirx.Ramp(base, step, lanes)


def splat(value: Expr, lanes: int) -> Expr:
    """A vector of equal elements."""
    return tirx.Broadcast(value, lanes)


def constant(value: float, lanes: int, dtype: str = "float32") -> Expr:
    """A vector of equal constants, or, if `lanes` is 1, one."""
    number = tirx.const(value, dtype)
    return number if lanes == 1 else splat(number, lanes)


def bind(value: Expr) -> Expr:
    """A name for a value that is used more than once."""
    name: Expr = ir.bind(value)
    return name


class Register:
    """A local vector that LLVM keeps in a register."""

    def __init__(self, lanes: int, value: Expr, dtype: str = "float32"):
        self._index = lanes_at(0, lanes)
        self._buffer = ir.alloc_buffer((lanes,), dtype, scope="local")
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


def lane_sum(register: Register, lanes: int) -> Expr:
    """The sum of a vector's numbers, added pairwise."""
    while lanes > 1:
        lanes //= 2
        register = Register(lanes, register.part(0, lanes) + register.part(lanes, lanes))
    return register.value


def scratch(elements: int, dtype: str = "float32") -> Buffer:
    """A local array. It lies on the stack: templates keep the sum of theirs below 256 KiB."""
    return ir.alloc_buffer((elements,), dtype, scope="local")


def first_lanes(value: Expr, count: int, lanes: int) -> Expr:
    """The vector with zeros from lane `count` on."""
    if count >= lanes:
        return value
    index = tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), lanes)
    return tirx.Select(index < constant(count, lanes, "int32"), value, constant(0.0, lanes))


def store(buffer: Buffer, base: Expr, value: Expr, lanes: int, step: int = 1) -> None:
    """Write a vector (or, if `lanes` is 1, a number) to `buffer[base]` and every `step`-th element after it."""
    ir.buffer_store(buffer, value, [base if lanes == 1 else tirx.Ramp(base, step, lanes)])


REFUSED = Argument("refused", 2, "int64")  # the last argument of kernels that check numbers


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


# Square matrices transposed in registers.


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
