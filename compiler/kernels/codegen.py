"""TIR kernels to machine code by LLVM and the linker, and calls of such kernels in this process.

The pass list leaves out `MakePackedAPI`, so that a kernel stays the plain C function its template wrote: a call costs 2
ns and the result needs no TVM at run time.
"""

import ctypes
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import tirx

from gangway.artifact.format import ALIGNMENT_BYTES, TargetSpec

# Calls of compiled kernels in this process: for the check of Relax, tests and benchmarks, not for serving.

Array = npt.NDArray[Any]


def aligned(array: Array, offset_bytes: int = 0) -> Array:
    """A copy that begins `offset_bytes` after a cache line's boundary."""
    memory = np.empty(array.nbytes + 2 * ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES + offset_bytes
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Library:
    """The kernels of a shared library."""

    def __init__(self, path: Path):
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


@dataclass(frozen=True)
class BuildTimes:
    """Wall time of the phases of one `build_library`."""

    lower_us: int
    llvm_us: int
    link_us: int


class LinkError(RuntimeError):
    """The system's linker failed; the message is its own."""


def _tvm_target(target: TargetSpec) -> Any:
    return tvm.target.Target({"kind": "llvm", "mcpu": target.cpu, "num-cores": 1})


def lower(functions: Mapping[str, Any], target: TargetSpec) -> Any:
    """The functions as one `IRModule` of LLVM-ready TIR, without argument checks or packed calls."""
    llvm = _tvm_target(target)
    passes = [
        tirx.transform.BindTarget(llvm.with_host(llvm)),
        tirx.transform.StmtSimplify(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
        tirx.transform.StmtSimplify(),
        tirx.transform.RemoveNoOp(),
        tirx.transform.LowerIntrin(),
    ]
    return tvm.ir.transform.Sequential(passes)(tvm.IRModule(dict(functions)))


def build_object(functions: Mapping[str, Any], target: TargetSpec, path: Path) -> tuple[int, int]:
    """Write the kernels as one relocatable object file; returns microseconds spent on lowering and on LLVM."""
    start = time.monotonic_ns()
    module = lower(functions, target)
    lowered = time.monotonic_ns()
    tvm.get_global_func("target.build.llvm")(module, _tvm_target(target)).write_to_file(str(path), "o")
    return (lowered - start) // 1000, (time.monotonic_ns() - lowered) // 1000


def link(objects: list[Path], library: Path) -> None:
    """Link object files into a shared library; raises `LinkError`."""
    command = ["ld", "-shared", "-z", "noexecstack", "-o", str(library), *map(str, objects)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(done.stderr.strip())


def build_library(functions: Mapping[str, Any], target: TargetSpec, library: Path) -> BuildTimes:
    """Compile the kernels (symbol -> `tirx.PrimFunc`) and link them into the shared library `library`."""
    path = library.with_suffix(".o")
    lower_us, llvm_us = build_object(functions, target, path)
    start = time.monotonic_ns()
    link([path], library)
    path.unlink()
    return BuildTimes(lower_us, llvm_us, (time.monotonic_ns() - start) // 1000)
