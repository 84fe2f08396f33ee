"""What Relax's functions lack before they can be layers: blocks merged, a loop for tasks, memory from outside."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir, tirx

from gangway.compiler.errors import UnsupportedModelError

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
