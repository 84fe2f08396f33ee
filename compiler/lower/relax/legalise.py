"""One ONNX node by Relax: its importer, legalisation to TIR, fusion; what comes out is a straight line of functions."""

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, s_tir, tirx

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.frontend.shape_inference import model_proto, node_proto
from gangway.compiler.kernels.specs import Array
from gangway.compiler.lower.relax.tensor_expressions import Expression, count_up, reduce_over, resize, slice_at

# What Relax's functions lack before they can be layers: blocks merged, a loop for tasks, memory from outside.

STACK_BYTES = 16 << 10  # a worker's stack is not large; what is larger becomes memory of the arena
TASK_OPERATIONS = 1 << 15  # statements of a task, tens of microseconds
_SPATIAL = 0  # IterVar.DataPar


@dataclass(frozen=True)
class Scheduled:
    """A function with its scratch memory, (elements, type), as parameters after its own."""

    function: str  # TVM's JSON
    scratch: tuple[tuple[int, str], ...]
    tasks: int
    operations: int


def schedule(function: Any) -> Scheduled:
    """Return the function, ready for a kernel. Raises UnsupportedModelError if its shapes are not static."""
    work = s_tir.Schedule(tvm.IRModule({"main": function}))
    root = work.get_sblock("root")
    for block in work.get_child_blocks(root):
        with suppress(s_tir.ScheduleError):  # reductions, and what several others read, stay as they are
            work.compute_inline(block)
    blocks = work.get_child_blocks(root)
    operations = sum(_operations(work, block) for block in blocks)
    tasks = _split(work, blocks[0], operations) if len(blocks) == 1 else 1
    merged = work.mod["main"]
    result, scratch = _with_scratch(merged)
    return Scheduled(tvm.ir.save_json(result), scratch, tasks, operations)


def _operations(work: Any, block: Any) -> int:
    return math.prod(_length(work.get(loop)) for loop in work.get_loops(block))


def _length(loop: Any) -> int:
    if not isinstance(loop.extent, tirx.IntImm):
        raise UnsupportedModelError("Relax: a loop whose length depends on data")
    return int(loop.extent)


def _split(work: Any, block: Any, operations: int) -> int:
    """Make one loop over tasks of the outer parallel loops; return its length."""
    loops, iterators = work.get_loops(block), work.get(block).iter_vars
    if len(loops) != len(iterators):
        return 1
    spatial = next((n for n, item in enumerate(iterators) if item.iter_type != _SPATIAL), len(iterators))
    if not spatial:
        return 1
    outer = work.fuse(*loops[:spatial]) if spatial > 1 else loops[0]
    length = _length(work.get(outer))
    wanted = max(1, min(length, operations // TASK_OPERATIONS))
    size = -(-length // wanted)
    tasks = -(-length // size)
    if tasks == 1:
        return 1
    work.split(outer, factors=[tasks, size])
    return tasks


def _with_scratch(function: Any) -> tuple[Any, tuple[tuple[int, str], ...]]:
    """Return the function with its large temporary tensors as further parameters."""
    root = function.body.block
    large = [buffer for buffer in root.alloc_buffers if _bytes(buffer) > STACK_BYTES]
    if not large:
        return function, ()
    kept = [buffer for buffer in root.alloc_buffers if _bytes(buffer) <= STACK_BYTES]
    block = s_tir.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, root.body, root.init, kept)
    body = s_tir.SBlockRealize([], tirx.const(True, "bool"), block)
    extended = tirx.PrimFunc([*function.params, *large], body, function.ret_type, function.attrs)
    return extended, tuple((_elements(buffer), str(buffer.dtype)) for buffer in large)


def _elements(buffer: Any) -> int:
    return math.prod(int(length) for length in buffer.shape)


def _bytes(buffer: Any) -> int:
    return _elements(buffer) * int(tvm.DataType(str(buffer.dtype)).itemsize)


_PASSES = [
    relax.transform.DecomposeOpsForInference(),
    relax.transform.LegalizeOps(),
    relax.transform.AnnotateTIROpPattern(),
    relax.transform.FoldConstant(),
    relax.transform.FuseOps(),
    relax.transform.FuseTIR(),
    relax.transform.DeadCodeElimination(),
]
Own = Callable[[Node, Mapping[str, TensorType], Mapping[str, Array]], Expression | None]
OWN: Mapping[str, Own] = {  # tensor expressions of our own, for some nodes at least
    "Resize": resize,
    "Range": count_up,
    "Slice": slice_at,
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"), reduce_over),
}
_TARGET = {"kind": "llvm", "num-cores": 1}


@dataclass(frozen=True)
class Call:
    """A function of TIR and its operands: names of tensors, or constants; then the names of its outputs."""

    function: Any
    operands: tuple[str | Array, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """The functions that compute a node, and the types of the tensors between them."""

    calls: tuple[Call, ...]
    between: Mapping[str, TensorType]
    same: Mapping[str, str]  # outputs that are inputs, unchanged
    examples: Mapping[str, Array] | None = None  # inputs that cannot be any number; None: nothing is known of them


def legalise(
    node: Node,
    inputs: Mapping[str, TensorType],
    outputs: Mapping[str, TensorType],
    constants: Mapping[str, Array],
    opset: int,
) -> Line:
    """Return what computes a node with these inputs and constants.

    Raises UnsupportedModelError if Relax cannot, and whatever its importer and TVM's passes raise.
    """
    own = OWN[node.operator](node, {**inputs, **outputs}, constants) if node.operator in OWN else None
    if own:
        names = tuple(name for name in node.outputs if name)
        return Line((Call(own.function, own.operands, names),), {}, {}, own.examples)
    from tvm.relax.frontend.onnx import from_onnx  # noqa: PLC0415 - a second, which most models do not need

    model = model_proto([node_proto(node, opset)], inputs, outputs, constants, opset)
    with tvm.target.Target(_TARGET), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names of tensors that it changes
        module = from_onnx(model, opset=opset, keep_params_in_input=False)
        module = tvm.ir.transform.Sequential(_PASSES)(module)
    return _Reader(module, node, inputs, outputs).read()


class _Reader:
    """Reads the main function of a legalised module."""

    def __init__(
        self, module: Any, node: Node, inputs: Mapping[str, TensorType], outputs: Mapping[str, TensorType]
    ) -> None:
        self._module = module
        self._node = node
        self._inputs, self._wanted = inputs, outputs
        main = module["main"]
        self._values: dict[Any, Any] = dict(zip(main.params, inputs, strict=True))  # names, arrays, tuples of them
        self._calls: list[Call] = []
        self._between: dict[str, TensorType] = {}

    def read(self) -> Line:
        """Return the calls in their order. Raises UnsupportedModelError."""
        body = self._module["main"].body
        for block in body.blocks:
            for binding in block.bindings:
                self._values[binding.var] = self._bound(binding.value)
        results = self._values[body.body]
        names = results if isinstance(results, tuple) else (results,)
        given = [name for name in self._node.outputs if name]
        if len(names) < len(given):
            raise UnsupportedModelError(f"Relax: {len(names)} outputs instead of {len(given)}")
        same = {output: name for name, output in zip(names, given, strict=False) if name in self._inputs}
        renamed = {name: output for name, output in zip(names, given, strict=False) if output not in same}
        if len(renamed) + len(same) != len(given) or any(name not in self._between for name in renamed):
            raise UnsupportedModelError("Relax: an output is a constant, or two are the same")
        for name, wanted in renamed.items():
            if self._between[name] != self._wanted[wanted]:
                raise UnsupportedModelError(
                    f"Relax: an output is {self._between[name]} instead of {self._wanted[wanted]}"
                )
        calls = tuple(self._renamed(call, renamed) for call in self._calls)
        return Line(calls, {name: kind for name, kind in self._between.items() if name not in renamed}, same)

    def _renamed(self, call: Call, names: Mapping[str, str]) -> Call:
        operands = tuple(names.get(item, item) if isinstance(item, str) else item for item in call.operands)
        return Call(call.function, operands, tuple(names.get(name, name) for name in call.outputs))

    def _bound(self, value: Any) -> Any:
        match value:
            case tvm.ir.GenericConst():
                return _content(value)
            case relax.Tuple():
                return tuple(self._bound(field) for field in value.fields)
            case relax.TupleGetItem():
                return self._bound(value.tuple_value)[value.index]
            case tvm.ir.Var():
                return self._values[value]
            case tvm.ir.Call() if _operator(value) == "relax.call_tir":
                return self._called(value)
        raise UnsupportedModelError(f"Relax: {_operator(value)}")

    def _called(self, call: Any) -> Any:
        function, operands = call.args[0], self._bound(call.args[1])
        if len(call.args) > 2:
            raise UnsupportedModelError("Relax: a function of a symbolic shape")
        kinds = call.ty_args[0]
        fields = list(getattr(kinds, "fields", [kinds]))
        names = tuple(f"{self._node.outputs[0]}/relax{len(self._calls)}.{index}" for index in range(len(fields)))
        for name, kind in zip(names, fields, strict=True):
            self._between[name] = TensorType(tuple(int(n) for n in kind.shape.values), str(kind.dtype))
        target = self._module[function]
        assert isinstance(target, tirx.PrimFunc)
        self._calls.append(Call(target, operands, names))
        return names if isinstance(kinds, relax.TupleType) else names[0]


def _content(constant: Any) -> Any:
    return np.asarray(constant.value.numpy())


def _operator(value: Any) -> str:
    """The operator of a call, else the kind of the expression."""
    return str(getattr(getattr(value, "op", None), "name", type(value).__name__))
