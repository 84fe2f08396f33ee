"""From steps to machine code: a kernel plan and a symbol for each, packed weights, and the library that LLVM makes.

Templates write TIR, LLVM makes object files of it, `linker` a shared library. The list of passes leaves out
`MakePackedAPI`, so that a kernel stays the plain C function its template wrote: a call costs 2 ns and the result needs
no TVM at run time.
"""

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from gangway.artifact.format import ALIGNMENT_BYTES, BatchKernel, TargetSpec, Version
from gangway.artifact.writer import ArtifactWriter
from gangway.compiler.amx_permission import request_tiles
from gangway.compiler.errors import UnsupportedModelError, naming
from gangway.compiler.kernels.linker import link
from gangway.compiler.kernels.plain_specs import IslandSpec
from gangway.compiler.kernels.specs import Array, BatchPlan, KernelPlan, KernelSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.place.memory import PlacedLayer
from gangway.compiler.target import attributes

Plan = KernelPlan | BatchPlan
_SMALL_BYTES, _VECTOR_BYTES = 1 << 16, 1 << 22  # of an array, and of a vector, that is compared by its content


def choose_plans(steps: Sequence[PlacedLayer], target: TargetSpec) -> list[KernelPlan]:
    """Return the kernel of each step. Raises UnsupportedModelError when no template computes a step."""
    plans: dict[KernelSpec, KernelPlan] = {}
    for step in steps:
        try:
            if step.spec not in plans:
                with naming(f"layer '{step.name}' ({step.operator})"):
                    plans[step.spec] = registry.plan(step.spec, target)
        except registry.UnsupportedSpecError as error:
            raise UnsupportedModelError(f"node '{step.name}' ({step.operator}): {error}") from error
    return [plans[step.spec] for step in steps]


def with_batch_plans(plans: Iterable[KernelPlan], target: TargetSpec, batched: bool = True) -> list[Plan]:
    """Return the distinct plans that have kernels, and, if the model is `batched`, those for several rows."""
    distinct = dict.fromkeys(plan for plan in plans if not isinstance(plan.spec, IslandSpec))
    if not batched:
        return list(distinct)
    batches = (registry.batch_plan(spec, target) for spec in dict.fromkeys(plan.spec for plan in distinct))
    return [*distinct, *(batch for batch in batches if batch)]


def symbol_name(index: int, plan: Plan) -> str:
    """Return the name of a kernel's function, "k3_conv" or, for several rows, "k3_conv_rows"."""
    kind = type(plan.spec).__name__.removesuffix("Spec").lower()
    return f"k{index}_{kind}" + "_rows" * isinstance(plan, BatchPlan)


def make_version(plan: KernelPlan, symbols: Mapping[Plan, str], target: TargetSpec) -> Version:
    """Return how an artifact describes a kernel, and that for several rows; or a call of onnxruntime."""
    batch = registry.batch_plan(plan.spec, target)
    return Version(
        "onnxruntime" if isinstance(plan.spec, IslandSpec) else symbols[plan],
        plan.tasks,
        plan.description,
        plan.blocking_bytes,
        plan.parallelism,
        BatchKernel(symbols[batch], batch.rows, batch.tasks, batch.description) if batch and batch in symbols else None,
    )


class WrittenWeights:
    """Which arrays an artifact has already, and where, in bytes: sizes of a model have most of them in common.

    Large arrays count by their memory, which is held as long as this is, small ones and vectors by their content: a
    bias that is made anew for each size shall not let a matrix be packed anew.
    """

    def __init__(self) -> None:
        self._places: dict[object, tuple[int, ...]] = {}
        self._held: list[Sequence[Array]] = []

    def place(self, use: object, arrays: Sequence[Array], write: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Return where these arrays are, for this use, and write them if they are nowhere."""
        key = use, *map(_identity, arrays)
        if key not in self._places:
            self._places[key] = write()
            self._held.append(arrays)
        return self._places[key]


def _identity(array: Array) -> object:
    if array.nbytes <= (_VECTOR_BYTES if array.ndim == 1 else _SMALL_BYTES):
        return array.tobytes(), array.shape, array.dtype.str
    return array.ctypes.data, array.strides, array.shape, array.dtype.str


def write_weights(
    steps: Sequence[PlacedLayer],
    plans: Sequence[KernelPlan],
    target: TargetSpec,
    writer: ArtifactWriter,
    written: WrittenWeights | None = None,
) -> list[tuple[int, ...]]:
    """Append every step's packed weights to weights.bin; return their offsets in bytes, in the order of the arguments.

    Constant operands of elementwise steps are written too, and their buffers told where they are. `written`: what the
    same file has of other sizes.
    """
    written = written or WrittenWeights()
    offsets = []
    for step, plan in zip(steps, plans, strict=True):

        def packed(step: PlacedLayer = step, plan: KernelPlan = plan) -> tuple[int, ...]:
            return tuple(append_array(array, writer) for array in registry.pack(plan, target, step.weights))

        raw = [step.weights[name] for name in sorted(step.weights)]
        use = (registry.packing(plan.spec, target), *sorted(step.weights))
        offsets.append(written.place(use, raw, packed) if raw else ())
        for buffer in step.inputs:
            if (constant := buffer.constant) is not None:

                def put(constant: Array = constant) -> tuple[int, ...]:
                    return (append_array(constant, writer),)

                (buffer.offset_bytes,) = written.place("", [constant], put)
    return offsets


def append_array(array: Array, writer: ArtifactWriter) -> int:
    """Return the offset of an array in weights.bin, in bytes, to which it is appended unless its bytes are there."""
    return writer.put_weights(np.ascontiguousarray(array).data)


def build_part(part: Sequence[tuple[Plan, str]], target: TargetSpec, path: Path) -> None:
    """Compile some kernels, with their symbols, into an object file."""
    functions: dict[str, Any] = {symbol: registry.emit(plan, target, symbol) for plan, symbol in part}
    build_object(functions, target, path)


@dataclass(frozen=True)
class BuildTimes:
    """Wall time of the phases of one `build_library`."""

    lower_us: int
    llvm_us: int
    link_us: int


def build_library(functions: Mapping[str, Any], target: TargetSpec, library: Path) -> BuildTimes:
    """Compile the kernels (symbol -> `tirx.PrimFunc`) and link them into the shared library `library`."""
    path = library.with_suffix(".o")
    lower_us, llvm_us = build_object(functions, target, path)
    start = time.monotonic_ns()
    link([path], library)
    path.unlink()
    return BuildTimes(lower_us, llvm_us, (time.monotonic_ns() - start) // 1000)


def build_object(
    functions: Mapping[str, Any], target: TargetSpec, path: Path, simplified: bool = True
) -> tuple[int, int]:
    """Write the kernels as one relocatable object file; returns microseconds spent on lowering and on LLVM.

    `simplified`: by TVM, too, before LLVM does it; of most kernels with extents that takes long and gains nothing.
    """
    start = time.monotonic_ns()
    module = lower(functions, target, simplified)
    lowered = time.monotonic_ns()
    tvm.get_global_func("target.build.llvm")(module, _tvm_target(target)).write_to_file(str(path), "o")
    return (lowered - start) // 1000, (time.monotonic_ns() - lowered) // 1000


def lower(functions: Mapping[str, Any], target: TargetSpec, simplified: bool = True) -> Any:
    """The functions as one `IRModule` of LLVM-ready TIR, without argument checks or packed calls.

    Buffers of templates have one dimension: no pass flattens them, which would take a third of the time.
    """
    llvm = _tvm_target(target)
    passes = [
        tirx.transform.BindTarget(llvm.with_host(llvm)),
        *([tirx.transform.StmtSimplify()] if simplified else []),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
        *([tirx.transform.StmtSimplify()] if simplified else []),
        tirx.transform.LowerIntrin(),
    ]
    return tvm.ir.transform.Sequential(passes)(tvm.IRModule(dict(functions)))


def _tvm_target(target: TargetSpec) -> Any:
    return tvm.target.Target({"kind": "llvm", "mcpu": target.cpu, "mattr": attributes(target), "num-cores": 1})


class Library:
    """The kernels of a shared library, called in this process: for the check of Relax, tests and benchmarks."""

    def __init__(self, path: Path):
        request_tiles()
        self._library = ctypes.CDLL(str(path))

    def call(self, symbol: str, arguments: Sequence[Array], begin: int, end: int) -> None:
        """Compute the tasks [begin, end)."""
        self.bind(symbol, arguments)(begin, end)

    def bind(self, symbol: str, arguments: Sequence[Array]) -> Any:
        """A function of (begin, end) that calls the kernel on these arrays; the caller keeps them alive."""
        kernel = getattr(self._library, symbol)
        kernel.restype = None
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in arguments]
        return lambda begin, end: kernel(*pointers, ctypes.c_int32(begin), ctypes.c_int32(end))


def aligned(array: Array, offset_bytes: int = 0) -> Array:
    """A copy that begins `offset_bytes` after a cache line's boundary."""
    memory = np.empty(array.nbytes + 2 * ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES + offset_bytes
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
