"""Layers for a node that no template computes: by TVM's Relax, and accepted only if onnxruntime answers the same.

Relax imports one ONNX node, legalises it to TIR and fuses; what comes out is a straight line of functions. Each becomes
a layer once its blocks are merged, its outermost loop is one over tasks, and its large temporary tensors come from
outside. The layers are compiled and executed on random numbers, and compared with onnxruntime.
"""

import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax, s_tir, tirx

from gangway.artifact.format import MAX_ARGUMENTS
from gangway.artifact.onnx_session import open_session
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.frontend.shape_inference import evaluate, model_proto, node_proto
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library
from gangway.compiler.kernels.linker import link, undefined
from gangway.compiler.kernels.plain_specs import Role, TensorProgramSpec
from gangway.compiler.kernels.specs import Array, KernelSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.lower.layers import LoweredLayer, Program
from gangway.compiler.lower.reference import best_us, example, run_apart
from gangway.compiler.lower.tensor_expressions import TensorExpression, count_up, reduce_over, resize, slice_at
from gangway.compiler.target import detect

MOST_ELEMENTS = 1 << 22
ELEMENT_TYPES = {"float32", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
STACK_BYTES = 16 << 10  # a worker's stack is not large; what is larger becomes memory of the arena
TASK_OPERATIONS = 1 << 15  # statements of a task, tens of microseconds
COMPARED_US = 50  # a shorter line of layers is not worth a look
CALL_US = 30  # what an island costs beside its work, with margin
SLOWER = 1.1  # times onnxruntime's time
LOOKS = 3  # so many comparisons must agree
TOLERANCE = 1e-3  # of a number, and a tenth of it of the largest one
_C_LIBRARY = {"memcpy", "memset", "memmove"}  # what kernels may call
_SPATIAL = 0  # IterVar.DataPar
_TARGET = {"kind": "llvm", "num-cores": 1}
_PASSES = [
    relax.transform.DecomposeOpsForInference(),
    relax.transform.LegalizeOps(),
    relax.transform.AnnotateTIROpPattern(),
    relax.transform.FoldConstant(),
    relax.transform.FuseOps(),
    relax.transform.FuseTIR(),
    relax.transform.DeadCodeElimination(),
]


@dataclass(frozen=True)
class TirCall:
    """A function of TIR and its operands: names of tensors, or constants; then the names of its outputs."""

    function: Any
    operands: tuple[str | Array, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """The functions that compute a node, and the types of the tensors between them."""

    calls: tuple[TirCall, ...]
    between: Mapping[str, TensorType]
    same: Mapping[str, str]  # outputs that are inputs, unchanged
    examples: Mapping[str, Array] | None = None  # inputs that cannot be any number; None: nothing is known of them


def lower_by_relax(program: Program, node: Node) -> None:
    """Add the layers of one node. Raises UnsupportedModelError that says what Relax cannot or does wrongly."""
    _lower(program, node, is_checked=True)


def lower_unchecked(program: Program, node: Node) -> None:
    """Add the same layers, but without code for them: whether they compute what onnxruntime does is not known."""
    _lower(program, node, is_checked=False)


def _lower(program: Program, node: Node, is_checked: bool) -> None:
    if node.operator == "GridSample":
        raise node.one_engine("onnxruntime has its own answers to coordinates that are no numbers, or beyond integers")
    constants = {name: program.graph.constants[name] for name in node.inputs if name in program.graph.constants}
    inputs = {name: program.type(name) for name in node.inputs if name and name not in constants}
    outputs = {name: program.type(name) for name in node.outputs if name}
    if foreign := {kind.dtype for kind in (*inputs.values(), *outputs.values())} - ELEMENT_TYPES:
        raise UnsupportedModelError(f"Relax: element type {', '.join(sorted(foreign))}")
    if any(math.prod(kind.shape) > MOST_ELEMENTS for kind in (*inputs.values(), *outputs.values())):
        raise UnsupportedModelError(f"Relax: a tensor of more than {MOST_ELEMENTS} numbers cannot be checked")
    try:
        line = legalise(node, inputs, outputs, constants, program.graph.opset)
        types = {**inputs, **outputs, **line.between}
        for call in line.calls:
            _require_types(call, types)
        layers = [_layer(node, index, call) for index, call in enumerate(line.calls)]
        checked = (node, layers, line, types, constants, program.graph.opset, program.measures)
        is_slow = is_checked and check(*checked)
    except UnsupportedModelError:
        raise
    except Exception as error:  # the importer asserts, and TVM raises whatever its passes check
        raise UnsupportedModelError(f"Relax: {_last_line(error)}") from error
    program.add_types(line.between)
    if is_slow:
        program.slow.add(node.outputs[0])
    program.layers += layers
    program.views |= line.same


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


def _require_types(call: TirCall, types: Mapping[str, TensorType]) -> None:
    """Raise UnsupportedModelError unless a function reads and writes tensors of the types that its operands have.

    It would read or write beyond a tensor of fewer or of narrower numbers, also while it is compared with onnxruntime.
    """
    for buffer, item in zip(call.function.params, (*call.operands, *call.outputs), strict=True):
        found = TensorType(tuple(int(length) for length in buffer.shape), str(buffer.dtype))
        kind = types[item] if isinstance(item, str) else TensorType(item.shape, item.dtype.name)
        if found != kind:
            raise UnsupportedModelError(f"Relax: a function has {found} where a tensor is {kind}")


def _layer(node: Node, index: int, call: TirCall) -> LoweredLayer:
    inputs = tuple(item for item in call.operands if isinstance(item, str))
    weights = [item for item in call.operands if not isinstance(item, str)]
    scheduled = schedule(call.function)
    roles: list[Role] = ["input" if isinstance(item, str) else "weight" for item in call.operands]
    roles.extend("output" for _ in call.outputs)
    roles.extend("scratch" for _ in scheduled.scratch)
    if not inputs:
        raise UnsupportedModelError("Relax: a function of constants only")
    if len(roles) > MAX_ARGUMENTS:
        raise UnsupportedModelError(f"Relax: a function of {len(roles)} tensors; {MAX_ARGUMENTS} are possible")
    spec = TensorProgramSpec(scheduled.function, tuple(roles), scheduled.scratch, scheduled.tasks, scheduled.operations)
    raw: dict[str, Array] = {str(place): np.ascontiguousarray(item) for place, item in enumerate(weights)}
    name = node.name if not index else f"{node.name}:{index}"
    return LoweredLayer(name, node.operator, spec, inputs, call.outputs[0], raw, more_outputs=call.outputs[1:])


Own = Callable[[Node, Mapping[str, TensorType], Mapping[str, Array]], TensorExpression | None]
OWN: Mapping[str, Own] = {  # tensor expressions of our own, for some nodes at least
    "Resize": resize,
    "Range": count_up,
    "Slice": slice_at,
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"), reduce_over),
}


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
        return Line((TirCall(own.function, own.operands, names),), {}, {}, own.examples)
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
        self._calls: list[TirCall] = []
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

    def _renamed(self, call: TirCall, names: Mapping[str, str]) -> TirCall:
        operands = tuple(names.get(item, item) if isinstance(item, str) else item for item in call.operands)
        return TirCall(call.function, operands, tuple(names.get(name, name) for name in call.outputs))

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
        self._calls.append(TirCall(target, operands, names))
        return names if isinstance(kinds, relax.TupleType) else names[0]


def _content(constant: Any) -> Any:
    return np.asarray(constant.value.numpy())


def _operator(value: Any) -> str:
    """The operator of a call, else the kind of the expression."""
    return str(getattr(getattr(value, "op", None), "name", type(value).__name__))


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


def check(
    node: Node,
    layers: Sequence[LoweredLayer],
    line: Line,
    types: Mapping[str, TensorType],
    constants: Mapping[str, Array],
    opset: int,
    measures: bool = False,
) -> bool:
    """Return whether onnxruntime is faster than the layers that compute the node, which is this line of functions.

    False unless that is to be measured.

    Raises UnsupportedModelError if they compute something else, or if that cannot be found out.
    """
    names = [name for name in node.inputs if name and name not in constants]
    examples = line.examples or {}
    queries = [
        {name: examples.get(name, example(types[name], seed, infinities)) for seed, name in enumerate(names)}
        for infinities in ((False, True) if line.examples is None else (False,))
    ]
    answers = _reference(node, queries, constants, opset)
    with tempfile.TemporaryDirectory() as folder:
        kernels = _Kernels(layers, Path(folder))
        for query, expected in zip(queries, answers, strict=True):
            found = kernels.run(query, types)
            found |= {output: query[name] for output, name in line.same.items()}
            for name, wanted in expected.items():
                _compare(name, found[name], wanted)
        outputs = {name: types[name] for name in node.outputs if name}
        return measures and _is_slow(kernels, node, queries[0], types, outputs, constants, opset)


def _is_slow(
    kernels: "_Kernels",
    node: Node,
    query: Mapping[str, Array],
    types: Mapping[str, TensorType],
    outputs: Mapping[str, TensorType],
    constants: Mapping[str, Array],
    opset: int,
) -> bool:
    """Compare the time of the layers with onnxruntime's, by turns, on one core. What is short is not compared."""
    run, _ = kernels.prepare(query, types)
    if best_us(run) < COMPARED_US:
        return False
    inputs = {name: types[name] for name in query}
    model = model_proto([node_proto(node, opset)], inputs, outputs, constants, opset).SerializeToString()

    def differs() -> bool:
        session = open_session(model)
        ours, theirs = math.inf, math.inf
        for _ in range(LOOKS):
            ours, theirs = min(ours, best_us(run)), min(theirs, best_us(lambda: session.run(None, dict(query))))
            if ours <= theirs * SLOWER or ours - theirs < CALL_US:
                return False
        return True

    try:
        return run_apart(differs)
    except UnsupportedModelError:  # onnxruntime computed the node before; now it took too long
        return False


def _compare(name: str, found: Array, wanted: Array) -> None:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        raise UnsupportedModelError(f"Relax: '{name}' is {found.dtype}{list(found.shape)}, ONNX says otherwise")
    wanted = np.where(np.isnan(wanted), found, wanted)  # what arithmetic makes of infinities may differ there
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    if not np.allclose(found, wanted, TOLERANCE, TOLERANCE / 10 * largest, equal_nan=True):
        raise UnsupportedModelError(f"Relax: '{name}' differs from the reference")


def _reference(
    node: Node, queries: Sequence[Mapping[str, Array]], constants: Mapping[str, Array], opset: int
) -> list[dict[str, Array]]:
    """Return the node's outputs as the reference computes them."""
    try:
        return run_apart(lambda: [evaluate(node, {**constants, **query}, opset) for query in queries])
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"Relax: not checked, since the reference fails: {error}") from error


class _Kernels:
    """The layers of a node, compiled."""

    def __init__(self, layers: Sequence[LoweredLayer], folder: Path) -> None:
        """Raise UnsupportedModelError if they are no plain C functions."""
        self._layers, self._target = layers, detect()
        specs = [layer.spec for layer in layers if isinstance(layer.spec, KernelSpec)]
        self._plans = [registry.plan(spec, self._target) for spec in specs]
        symbols = [f"k{index}" for index in range(len(specs))]
        try:
            kernels = {
                symbol: registry.emit(plan, self._target, symbol)
                for symbol, plan in zip(symbols, self._plans, strict=True)
            }
        except registry.UnsupportedSpecError as error:
            raise UnsupportedModelError(f"Relax: {error}") from error
        path = folder / "kernels.o"
        codegen.build_object(kernels, self._target, path)
        if missing := undefined(path) - _C_LIBRARY:
            raise UnsupportedModelError(f"Relax: it calls {', '.join(sorted(missing))}")
        link([path], folder / "kernels.so")
        self._library = Library(folder / "kernels.so")

    def run(self, query: Mapping[str, Array], types: Mapping[str, TensorType]) -> dict[str, Array]:
        """Return all tensors after the layers have been executed."""
        run, tensors = self.prepare(query, types)
        run()
        return tensors

    def prepare(
        self, query: Mapping[str, Array], types: Mapping[str, TensorType]
    ) -> tuple[Callable[[], None], dict[str, Array]]:
        """Return a function that executes the layers, and all tensors, which it fills."""
        tensors = {name: np.ascontiguousarray(value) for name, value in query.items()}
        calls: list[tuple[Callable[[int, int], None], int, list[Array]]] = []  # arrays must live as long as calls
        for index, (layer, plan) in enumerate(zip(self._layers, self._plans, strict=True)):
            spec = plan.spec
            assert isinstance(spec, TensorProgramSpec)
            names = (layer.output, *layer.more_outputs)
            result, *more = [np.zeros(types[name].shape, types[name].dtype) for name in names]
            scratch = [np.zeros(elements, np.uint8 if kind == "bool" else kind) for elements, kind in spec.scratch]
            first, *others = [tensors[name] for name in layer.inputs]
            weights = registry.pack(plan, self._target, layer.weights)
            arrays = [first, *weights, *others, *scratch, *more, result]
            calls.append((self._library.bind(f"k{index}", arrays), plan.tasks, arrays))
            tensors |= dict(zip(names, (result, *more), strict=True))

        def run() -> None:
            for call, tasks, _ in calls:
                call(0, tasks)

        return run, tensors
