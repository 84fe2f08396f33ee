"""Patterns in memory before a query: an answer that depends on them shows a client what another one's request left.

Halos and surplus channels in an arena are zero before the first query of a model, and kernels keep them so. All else
may hold anything.
"""

from collections.abc import Sequence
from pathlib import Path

from gangway.artifact.format import Engine, Manifest, MemorySpace
from gangway.compiler.arguments import NO_DIMENSIONS
from gangway.compiler.job import steps_of
from gangway.compiler.place.arena import keeps_zeros, size_bytes_of

PATTERNS = (b"\xa5", b"\x5a")  # of each byte; as floats they are -2.9e-16 and 1.5e16
Stretch = tuple[int, int]  # begin and end, bytes of a row's arena


def free_stretches(path: Path, manifest: Manifest) -> list[Stretch]:
    """Return the parts of an arena that may hold anything, of the artifact that the ONNX file at `path` became."""
    if manifest.engine is not Engine.NATIVE:
        return []
    lanes = manifest.target.lanes
    roots = {buffer.root for step in steps_of(path, NO_DIMENSIONS, manifest) for buffer in step.buffers}
    kept = sorted(
        (root.offset_bytes, root.offset_bytes + size_bytes_of(root, lanes))
        for root in roots
        if root.space == MemorySpace.ARENA and keeps_zeros(root, lanes)
    )
    begins, ends = [0, *(end for _, end in kept)], [*(begin for begin, _ in kept), manifest.arena_bytes]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def fill(arena: memoryview, stretches: Sequence[Stretch], rows: int, row_bytes: int, pattern: bytes) -> None:
    """Write the pattern to these stretches of each row."""
    for row in range(rows):
        for begin, end in stretches:
            arena[row * row_bytes + begin : row * row_bytes + end] = pattern * (end - begin)
