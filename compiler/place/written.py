"""What an answer holds has been written by a kernel: the sizes of outputs are compared with what kernels write."""

import math
from collections.abc import Sequence

import numpy as np

from gangway.artifact.format import MemorySpace
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.written_bytes import written_bytes
from gangway.compiler.place.memory import Buffer, PlacedLayer


def require_sizes(steps: Sequence[PlacedLayer]) -> None:
    """Raise UnsupportedModelError if a kernel writes more or less than its output has, halos and surplus aside."""
    for step in steps:
        found_bytes, output_bytes = written_bytes(step.spec), _bytes(step.output)
        if found_bytes not in (None, output_bytes):
            raise UnsupportedModelError(
                f"layer '{step.name}' ({step.operator}) would write {found_bytes} bytes instead of {output_bytes}"
            )


def require_whole_outputs(steps: Sequence[PlacedLayer], outputs: Sequence[TensorType]) -> None:
    """Raise UnsupportedModelError if steps leave out bytes of an output, which they may write in parts, each once."""
    for index, kind in enumerate(outputs):
        found_bytes = sum(
            _bytes(buffer)
            for step in steps
            for buffer in (step.output, *step.more)
            if (buffer.space, buffer.index) == (MemorySpace.OUTPUT, index)
        )
        if found_bytes < kind.size_bytes:
            raise UnsupportedModelError(f"layers write {found_bytes} of {kind.size_bytes} bytes of output {index}")


def _bytes(buffer: Buffer) -> int:
    """Of a row, without halos and surplus channels."""
    if buffer.layout == "plain" or buffer.image is None:
        return buffer.kind.size_bytes
    image = buffer.image
    return math.prod((image.channels, image.height, image.width)) * np.dtype(buffer.kind.dtype).itemsize
