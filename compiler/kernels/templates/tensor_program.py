"""Functions of TVM's own (Relax, TE) as kernels: TIR over tensors of any rank becomes a plain C function.

The statements are written anew, with flat buffers, tasks in place of the outermost loop, and our own approximations in
place of libm's functions. A place that depends on data is clamped into its tensor: a request must not reach beyond.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as ir

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.plain_specs import TensorProgramSpec
from gangway.compiler.kernels.specs import KernelPlan, PackedWeights, RawWeights
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, kernel
from gangway.compiler.kernels.templates.float32_math import erf, exp, log, sigmoid, tanh
from gangway.compiler.kernels.templates.tiling import UnsupportedSpecError, make_plan

DESCRIPTION = "relax"  # plans of these kernels begin with it
_FUNCTIONS: Mapping[str, Callable[[Expr, int], Expr]] = {
    "tirx.exp": exp,
    "tirx.log": log,
    "tirx.tanh": tanh,
    "tirx.erf": erf,
    "tirx.sigmoid": sigmoid,
}
_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
_BINARY: tuple[Any, ...] = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max),
    *(tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.And, tirx.Or),
    *(tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor, tirx.LShift, tirx.RShift),
)
_LOOPS = [
    s_tir.transform.CanonicalizeLoop(),
    s_tir.transform.LowerInitBlock(),
    s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
    s_tir.transform.ConvertBlocksToOpaque(),
    s_tir.transform.CompactBufferAllocation(),
    s_tir.transform.LowerMatchBuffer(),
    s_tir.transform.StmtSimplify(),
    s_tir.transform.LowerOpaqueBlock(),
]


def candidates(spec: TensorProgramSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan."""
    yield make_plan(spec, {}, spec.tasks, f"{DESCRIPTION} {spec.tasks} tasks", 0, 1)


def pack(spec: TensorProgramSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """The weights as they are."""
    return tuple(raw[str(index)] for index in range(len(raw)))


def emit(spec: TensorProgramSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Raises UnsupportedSpecError for statements that no plain C function can have."""
    module = tvm.ir.transform.Sequential(_LOOPS)(tvm.IRModule({"main": tvm.ir.load_json(spec.function)}))
    function = module["main"]
    tensors = [function.params[index] for index in spec.order]
    arguments = [Argument(f"a{i}", math.prod(_shape(tensor)), memory_type(tensor)) for i, tensor in enumerate(tensors)]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        writer = _Writer(dict(zip(tensors, buffers, strict=True)))
        if spec.tasks == 1:
            writer.statement(function.body)
        else:
            writer.task(function.body, number)

    return kernel(symbol, arguments, task)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(length) for length in tensor.shape)


def memory_type(tensor: Any) -> str:
    """The element type of a tensor in memory."""
    return "uint8" if str(tensor.dtype) == "bool" else str(tensor.dtype)


def _dtype(e: Any) -> str:
    return str(e.ty.dtype)


def _holds_bools(tensor: Any) -> bool:
    return str(tensor.dtype) == "bool"


def _operator(call: Any) -> str:
    return str(call.op.name)


class _Writer:
    """Writes statements again, inside of the kernel that is being built."""

    def __init__(self, buffers: dict[Any, Buffer]) -> None:
        self._buffers = buffers  # by the function's own
        self._values: dict[Any, Expr] = {}  # of its variables
        self._from_data: set[Any] = set()  # variables whose values depend on data

    def task(self, body: Any, number: Expr) -> None:
        """Write the body with its outermost loop, the only one at its level, at one place."""
        for statement in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
            if isinstance(statement, tirx.For):
                self._values[statement.loop_var] = tirx.Cast(_dtype(statement.loop_var), number)
                self.statement(statement.body)
            else:
                self.statement(statement)

    def statement(self, s: Any) -> None:
        """Write one statement."""
        match s:
            case tirx.SeqStmt():
                for inner in s.seq:
                    self.statement(inner)
            case tirx.For():
                with ir.serial(self.value(s.min), self.value(s.min) + self.value(s.extent)) as index:
                    self._values[s.loop_var] = index
                    self.statement(s.body)
            case tirx.IfThenElse():
                self._condition(s)
            case tirx.BufferStore():
                self._store(s)
            case tirx.AllocBuffer():
                self._buffers[s.buffer] = ir.alloc_buffer((math.prod(_shape(s.buffer)),), memory_type(s.buffer))
            case tirx.Bind():
                self._values[s.var] = ir.bind(self.value(s.value))
                if self._depends_on_data(s.value):
                    self._from_data.add(s.var)
            case tirx.Evaluate() if not isinstance(s.value, tvm.ir.Call):
                pass
            case _:
                raise UnsupportedSpecError(f"a statement of the kind {type(s).__name__}")

    def _condition(self, s: Any) -> None:
        with ir.If(self.value(s.condition)):
            with ir.Then():
                self.statement(s.then_case)
            if s.else_case is not None:
                with ir.Else():
                    self.statement(s.else_case)

    def _store(self, s: Any) -> None:
        value = self.value(s.value)
        if str(s.buffer.dtype) == "bool":
            value = tirx.Cast("uint8", value)
        ir.buffer_store(self._buffers[s.buffer], value, [self._place(s.buffer, s.indices)])

    def _place(self, tensor: Any, indices: Any) -> Expr:
        """The place in the flat buffer."""
        place: Expr = 0
        for length, index in zip(_shape(tensor), indices, strict=True):
            at = self.value(index)
            if self._depends_on_data(index):
                last, first = tirx.const(length - 1, _dtype(at)), tirx.const(0, _dtype(at))
                at = tirx.Max(tirx.Min(at, last), first)
            place = place * length + at
        return place

    def _depends_on_data(self, e: Any) -> bool:
        return any(isinstance(part, tvm.ir.TensorLoad) or part in self._from_data for part in _parts(e))

    def value(self, e: Any) -> Expr:
        """Write one expression."""
        match e:
            case tvm.ir.TensorLoad():
                loaded = self._buffers[e.source][self._place(e.source, e.indices)]
                return loaded != 0 if _holds_bools(e.source) else loaded
            case tvm.ir.Call():
                arguments = [self.value(argument) for argument in e.args]
                if _operator(e) in _FUNCTIONS and _dtype(e) == "float32":
                    return _FUNCTIONS[_operator(e)](arguments[0], 1)
                return tvm.ir.Call(e.op, arguments, e.attrs, ret_ty=e.ty)
            case tirx.Var():
                return self._values[e]
            case tirx.Cast():
                return tirx.Cast(_dtype(e), self.value(e.value))
            case tirx.Select():
                return tirx.Select(self.value(e.condition), self.value(e.true_value), self.value(e.false_value))
            case tirx.Not() | tirx.BitwiseNot():
                return type(e)(self.value(e.a))
            case tirx.IntImm() | tirx.FloatImm():
                return e
            case _ if isinstance(e, _DIVISIONS) and "int" in _dtype(e) and self._depends_on_data(e.b):
                raise UnsupportedSpecError("a division of integers by what may be zero")
            case _ if isinstance(e, _BINARY):
                return type(e)(self.value(e.a), self.value(e.b))
            case _:
                raise UnsupportedSpecError(f"an expression of the kind {type(e).__name__}")


def _parts(e: Any) -> Iterator[Any]:
    """An expression and all that it consists of."""
    yield e
    inner: list[Any] = []
    match e:
        case tvm.ir.TensorLoad():
            inner = list(e.indices)
        case tvm.ir.Call():
            inner = list(e.args)
        case tirx.Cast():
            inner = [e.value]
        case tirx.Select():
            inner = [e.condition, e.true_value, e.false_value]
        case tirx.Not() | tirx.BitwiseNot():
            inner = [e.a]
        case _ if isinstance(e, _BINARY):
            inner = [e.a, e.b]
    for part in inner:
        yield from _parts(part)
