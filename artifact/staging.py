"""Memory that a batch of several requests needs besides the arena.

A batch kernel computes several rows in one call, and there is one stride between them. Rows of different requests have
none. So the inputs and outputs that batch kernels read or write are *staged* while requests are executed together: each
row has a place for them in its stretch of the arena, behind `arena_bytes`. They are copied there before the first layer
and from there to the requests after the last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gangway.artifact.format import ALIGNMENT_BYTES, Manifest, Space, TensorSpec


@dataclass(frozen=True)
class Staging:
    """Where staged tensors lie, by number of the input or output: bytes from the start of a row's stretch.

    `size_bytes` are what a row has behind its arena for them.
    """

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    size_bytes: int


def plan_staging(manifest: Manifest) -> Staging:
    """Give each tensor that a batch kernel uses a place, aligned to 64 bytes; none if the model takes no batches."""
    used = _used_by_batch_kernels(manifest) if manifest.batched else set()
    end = manifest.arena_bytes
    places: dict[Space, dict[int, int]] = {Space.INPUT: {}, Space.OUTPUT: {}}
    for space, index in sorted(used):
        places[space][index] = end
        end += -(-_tensor(manifest, space, index).row_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Staging(places[Space.INPUT], places[Space.OUTPUT], end - manifest.arena_bytes)


def staging_bytes(manifest: Manifest) -> int:
    """Return how many bytes more than `arena_bytes` a row takes where several requests are executed together."""
    return plan_staging(manifest).size_bytes


def _used_by_batch_kernels(manifest: Manifest) -> set[tuple[Space, int]]:
    return {
        (argument.space, argument.index)
        for layer in manifest.layers
        if any(version.batch for version in layer.versions)
        for argument in layer.arguments
        if argument.space in (Space.INPUT, Space.OUTPUT)
    }


def _tensor(manifest: Manifest, space: Space, index: int) -> TensorSpec:
    return (manifest.inputs if space is Space.INPUT else manifest.outputs)[index]
