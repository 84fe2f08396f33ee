"""Numbers that a kernel reads at run time, so that one kernel serves tensors of many sizes.

A template computes with Python's integers: what is known when it writes a kernel becomes constants of the code. An
`Extent` behaves like such an integer, but remembers how it was computed. In the code it is an expression of
*parameters* that the kernel reads from one more argument. Where the template must decide by an extent (unroll a loop,
leave out a remainder), it decides by the number at hand, and the decision becomes a condition. The kernel is right for
the parameters that meet all conditions, whichever sizes they stand for.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import tvm
from tvm_ffi import ObjectConvertible

tirx: Any = tvm.tirx  # whose annotations demand expressions where Python's numbers do as well

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b if b else 0,
    "%": lambda a, b: a % b if b else 0,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
}
_NEUTRAL = {"+": 0, "-": 0, "*": 1, "//": 1}
LONGEST = 1 << 28  # elements of a tensor: kernels count bytes in 32 bits


@dataclass(frozen=True)
class Conditions:
    """What parameters must meet, as data: `numbers` are computed one after the other, `tests` compare them.

    A number is ("p", i, 0), parameter i; ("c", value, 0); or (operation, a, b) of two numbers before it. A test is
    (comparison, a, b, whether it holds).
    """

    numbers: tuple[tuple[str, int, int], ...] = ()
    tests: tuple[tuple[str, int, int, bool], ...] = ()

    def met(self, parameters: Sequence[int]) -> bool:
        """Whether these parameters meet all conditions."""
        values: list[int] = []
        for operation, a, b in self.numbers:
            if operation == "p":
                values.append(parameters[a])
            elif operation == "c":
                values.append(a)
            else:
                values.append(_OPERATIONS[operation](values[a], values[b]))
        return all(_COMPARISONS[name](values[a], values[b]) is holds for name, a, b, holds in self.tests)

    def to_json(self) -> bytes:
        """Return the data as JSON."""
        return json.dumps([self.numbers, self.tests], separators=(",", ":")).encode()

    @staticmethod
    def from_json(content: bytes) -> "Conditions":
        """Read it again. Raises ValueError."""
        numbers, tests = json.loads(content)
        return Conditions(tuple((o, a, b) for o, a, b in numbers), tuple((c, a, b, h) for c, a, b, h in tests))


class Trace:
    """One kernel as it is written: parameters, numbers computed of them, and conditions."""

    def __init__(self, parameters: Sequence[int], before: "Trace | None" = None) -> None:
        """`before`: the same kernel, written once already; what its code computed is computed once here, at the start.

        Otherwise TVM's passes see the same long expressions again and again, which takes them ten times as long.
        """
        self._numbers: dict[tuple[str, int, int], int] = dict(before._numbers) if before else {}
        self._list: list[tuple[str, int, int]] = list(self._numbers)
        self._tests: dict[tuple[str, int, int], bool] = {}
        self._bound: dict[int, Any] = {}
        self._used: set[int] = set()
        self._wanted = sorted(before._used) if before else []
        self.extents = tuple(Extent(self, self._number("p", place, 0), value) for place, value in enumerate(parameters))

    def begin(self, reads: Sequence[Any], bind: Callable[[Any], Any]) -> None:
        """Tell by which expressions the code reads the parameters, and how an expression gets a name."""
        self._bound = {extent.place: read for extent, read in zip(self.extents, reads, strict=True)}
        for place in self._wanted:
            if place not in self._bound:
                self._bound[place] = bind(self.expression(self._extent(place)))

    @property
    def conditions(self) -> Conditions:
        """What has been decided so far, without the numbers that no decision needs."""
        items = self._list
        needed: set[int] = set()
        wanted = [place for _, a, b in self._tests for place in (a, b)]
        while wanted:
            place = wanted.pop()
            if place not in needed:
                needed.add(place)
                operation, a, b = items[place]
                if operation not in "pc":
                    wanted += (a, b)
        order = {place: index for index, place in enumerate(sorted(needed))}
        numbers = tuple(
            (operation, a, b) if operation in "pc" else (operation, order[a], order[b])
            for operation, a, b in (items[place] for place in order)
        )
        return Conditions(
            numbers, tuple((name, order[a], order[b], held) for (name, a, b), held in self._tests.items())
        )

    def _number(self, operation: str, a: int, b: int) -> int:
        place = self._numbers.setdefault((operation, a, b), len(self._list))
        if place == len(self._list):
            self._list.append((operation, a, b))
        return place

    def constant(self, value: int) -> "Extent":
        """Return an integer as an extent."""
        return Extent(self, self._number("c", value, 0), value)

    def computed(self, operation: str, a: "Extent", b: "Extent") -> "Extent":
        """Return an operation's result."""
        value = _OPERATIONS[operation](a.value, b.value)
        known = self._known(a), self._known(b)
        if None not in known:
            return self.constant(value)
        if (operation in _NEUTRAL and known[1] == _NEUTRAL[operation]) or (known[0], operation) in ((0, "+"), (1, "*")):
            return b if known[0] is not None else a
        return Extent(self, self._number(operation, a.place, b.place), value)

    def _known(self, extent: "Extent") -> int | None:
        """The value of a constant."""
        operation, value, _ = self._list[extent.place]
        return value if operation == "c" else None

    def decided(self, comparison: str, a: "Extent", b: "Extent") -> bool:
        """Return a comparison's result, which becomes a condition."""
        return self._tests.setdefault((comparison, a.place, b.place), _COMPARISONS[comparison](a.value, b.value))

    def expression(self, extent: "Extent") -> Any:
        """Return the code of a number."""
        self._used.add(extent.place)
        if extent.place in self._bound:
            return self._bound[extent.place]
        operation, a, b = self._list[extent.place]
        if operation == "c":
            return tirx.const(a, "int32")
        left, right = self._extent(a), self._extent(b)
        if operation == "+":
            return self.expression(left) + self.expression(right)
        if operation == "*":
            return self.expression(left) * self.expression(right)
        if operation == "-":
            return (
                self._negated(right) if self._list[a] == ("c", 0, 0) else self.expression(left) - self.expression(right)
            )
        self._require(left, right)
        divide = tirx.truncdiv if operation == "//" else tirx.truncmod
        return divide(self.expression(left), self.expression(right))

    def _negated(self, extent: "Extent") -> Any:
        """The code of -extent. That of -(-a // b) is a division that rounds up."""
        operation, a, b = self._list[extent.place]
        dividend = self._negative(a) if operation == "//" else None
        if dividend is None:
            return tirx.const(0, "int32") - self.expression(extent)
        divisor = self._extent(b)
        self._require(dividend, divisor)
        return tirx.truncdiv(self.expression(dividend + divisor - 1), self.expression(divisor))

    def _negative(self, place: int) -> "Extent | None":
        """The number a, if the one there is written -a."""
        operation, a, b = self._list[place]
        if operation == "c" and a < 0:
            return self.constant(-a)
        return self._extent(b) if operation == "-" and self._list[a] == ("c", 0, 0) else None

    def _require(self, dividend: "Extent", divisor: "Extent") -> None:
        """Make it a condition that a division cuts towards zero as Python's does."""
        if not (dividend >= 0 and divisor >= 1):
            raise TypeError("a division of a negative extent")

    def _extent(self, place: int) -> "Extent":
        operation, a, b = self._list[place]
        if operation == "p":
            return self.extents[a]
        if operation == "c":
            return Extent(self, place, a)
        return Extent(self, place, _OPERATIONS[operation](self._extent(a).value, self._extent(b).value))


class Extent(ObjectConvertible):
    """An integer that is known when a kernel is written, but read by the kernel at run time.

    Arithmetic with integers and other extents gives extents, comparisons give bools and become conditions. So does the
    use as an integer, as the length of a Python loop: then the kernel is for this value only.
    """

    __slots__ = ("place", "trace", "value")

    def __init__(self, trace: Trace, place: int, value: int) -> None:
        self.trace, self.place, self.value = trace, place, value

    def asobject(self) -> Any:
        """Return the expression of TIR, as TVM asks for it."""
        return self.trace.expression(self)

    def _with(self, other: Any, operation: str, turned: bool = False) -> Any:
        if isinstance(other, int):
            other = self.trace.constant(int(other))
        if isinstance(other, Extent):
            a, b = (other, self) if turned else (self, other)
            return self.trace.computed(operation, a, b)
        return NotImplemented

    def __add__(self, other: Any) -> Any:
        result = self._with(other, "+")
        return self.asobject() + other if result is NotImplemented else result

    def __radd__(self, other: Any) -> Any:
        result = self._with(other, "+", True)
        return other + self.asobject() if result is NotImplemented else result

    def __sub__(self, other: Any) -> Any:
        result = self._with(other, "-")
        return self.asobject() - other if result is NotImplemented else result

    def __rsub__(self, other: Any) -> Any:
        result = self._with(other, "-", True)
        return other - self.asobject() if result is NotImplemented else result

    def __mul__(self, other: Any) -> Any:
        result = self._with(other, "*")
        return self.asobject() * other if result is NotImplemented else result

    def __rmul__(self, other: Any) -> Any:
        result = self._with(other, "*", True)
        return other * self.asobject() if result is NotImplemented else result

    def __floordiv__(self, other: Any) -> Any:
        return self._with(other, "//")

    def __rfloordiv__(self, other: Any) -> Any:
        return self._with(other, "//", True)

    def __mod__(self, other: Any) -> Any:
        return self._with(other, "%")

    def __rmod__(self, other: Any) -> Any:
        return self._with(other, "%", True)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __neg__(self) -> Any:
        return self.trace.computed("-", self.trace.constant(0), self)

    def _decide(self, other: Any, comparison: str, turned: bool = False) -> Any:
        if isinstance(other, int):
            other = self.trace.constant(int(other))
        if not isinstance(other, Extent):
            return NotImplemented
        a, b = (other, self) if turned else (self, other)
        return self.trace.decided(comparison, a, b)

    def __lt__(self, other: Any) -> Any:
        result = self._decide(other, "<")
        return self.asobject() < other if result is NotImplemented else result

    def __le__(self, other: Any) -> Any:
        result = self._decide(other, "<=")
        return self.asobject() <= other if result is NotImplemented else result

    def __gt__(self, other: Any) -> Any:
        result = self._decide(other, "<", True)
        return self.asobject() > other if result is NotImplemented else result

    def __ge__(self, other: Any) -> Any:
        result = self._decide(other, "<=", True)
        return self.asobject() >= other if result is NotImplemented else result

    def __eq__(self, other: object) -> Any:
        result = self._decide(other, "==")
        return self.asobject() == other if result is NotImplemented else result

    def __ne__(self, other: object) -> Any:
        result = self._decide(other, "==")
        return self.asobject() != other if result is NotImplemented else not result

    def __hash__(self) -> int:
        raise TypeError("what looks an extent up would not know its conditions")

    def __bool__(self) -> bool:
        return not self._decide(0, "==")

    def __index__(self) -> int:
        self._decide(self.value, "==")
        return self.value

    __int__ = __index__


_current: ContextVar[Trace | None] = ContextVar("_current", default=None)


def is_constant(number: Any) -> bool:
    """Whether a number is an integer that the code may depend on; False for an extent, and for expressions of TIR."""
    return isinstance(number, int)


def expression(number: Any) -> Any:
    """Return what TIR takes for a number: of an extent its code."""
    return number.asobject() if isinstance(number, Extent) else number


def at_hand(number: Any) -> int:
    """Return the value that a number has now, which is no condition: what is decided by it must be in the plan."""
    return number.value if isinstance(number, Extent) else int(number)


def current() -> Trace | None:
    """Return the trace of the kernel that is being written; None if all its numbers are constants."""
    return _current.get()


@contextmanager
def traced(parameters: Sequence[int], before: Trace | None = None) -> Iterator[Trace]:
    """Let the kernel that is written in the block have parameters; `before`: the trace of the same kernel."""
    token = _current.set(trace := Trace(parameters, before))
    try:
        yield trace
    finally:
        _current.reset(token)
