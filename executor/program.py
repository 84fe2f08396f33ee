"""From an artifact on disk to the C table that the layer loop runs (`struct layer_record`, native/py_program.c)."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gangway.artifact.format import KERNELS_FILE, MAX_ARGUMENTS, WEIGHTS_FILE, Engine, Layer, Manifest, TensorSpec
from gangway.artifact.reader import MAX_VERSIONS, read_manifest
from gangway.artifact.staging import plan_staging
from gangway.executor import _native

CLAIM_US: Final = 200.0  # largest claim: what STOP_NOW and a joining rank may have to wait for
_FLOPS_PER_US: Final = 50e3  # what a kernel does on one core where no profile says better
_BYTES_PER_US: Final = 10e3
_HEAD: Final = struct.Struct("<4I")  # arguments, versions, max_ranks, row_ns
_ARGUMENT: Final = struct.Struct("<IIQ")  # space, index, offset
_KERNEL: Final = struct.Struct(
    "<III"
)  # tasks, chunk, rows; of a version's own, then of its batch kernel (rows 0: none)
_NO_KERNEL: Final = bytes(_KERNEL.size)
_NOT_STAGED: Final = (1 << 64) - 1


def load_program(folder: Path) -> _native.Program:
    """Load the artifact in `folder`: kernels by dlopen, weights mapped read-only (one copy in the machine).

    A model for onnxruntime makes this process import it, and numpy; others leave it as small as it is.
    The files' checksums are not compared here, that is done once in the machine and not in every worker.
    Raises ArtifactError for a bad manifest, OSError or ValueError where files and manifest do not fit together.
    """
    manifest = read_manifest(folder)
    if manifest.engine is Engine.ONNXRUNTIME:
        from gangway.executor.onnxruntime_program import load_whole  # noqa: PLC0415

        return load_whole(folder, manifest)
    staging = plan_staging(manifest)
    return _native.Program(
        kernels=str(folder / KERNELS_FILE),
        weights=str(folder / WEIGHTS_FILE),
        table=b"".join(pack_layer(layer) for layer in manifest.layers),
        symbols=symbols(manifest),
        arena_bytes=manifest.arena_bytes,
        staging_bytes=staging.size_bytes,
        inputs=_tensors(manifest.inputs, staging.inputs),
        outputs=_tensors(manifest.outputs, staging.outputs),
        checks=tuple(layer.checks for layer in manifest.layers),
    )


def _tensors(tensors: Sequence[TensorSpec], places: Mapping[int, int]) -> list[tuple[int, int]]:
    return [(tensor.row_bytes, places.get(index, _NOT_STAGED)) for index, tensor in enumerate(tensors)]


def symbols(manifest: Manifest) -> list[str]:
    """Names of the kernels in the order of the table: by layer, by version, each followed by its batch kernel."""
    versions = [version for layer in manifest.layers for version in layer.versions]
    return [kernel.symbol for version in versions for kernel in (version, version.batch) if kernel]


def pack_layer(layer: Layer) -> bytes:
    """Return the layer as one record of the table."""
    arguments = [_ARGUMENT.pack(ref.space, ref.index, ref.offset_bytes) for ref in layer.arguments]
    versions = [
        _pack_kernel(layer, version.tasks, 1)
        + (_pack_kernel(layer, version.batch.tasks, version.batch.rows) if version.batch else _NO_KERNEL)
        for version in layer.versions
    ]
    return (
        _HEAD.pack(len(arguments), len(versions), layer.max_ranks, layer.row_ns)
        + b"".join(arguments).ljust(MAX_ARGUMENTS * _ARGUMENT.size, b"\0")
        + b"".join(versions).ljust(MAX_VERSIONS * 2 * _KERNEL.size, b"\0")
    )


def _pack_kernel(layer: Layer, tasks: int, rows: int) -> bytes:
    return _KERNEL.pack(tasks, chunk_tasks(layer, tasks, rows), rows)


def chunk_tasks(layer: Layer, tasks: int, rows: int) -> int:
    """Return how many of a kernel's tasks take about CLAIM_US, at least one, when a call computes so many rows."""
    task_us = max(rows * layer.flops / _FLOPS_PER_US, layer.bytes / _BYTES_PER_US) / tasks
    return max(1, min(tasks, int(CLAIM_US / task_us))) if task_us > 0 else tasks
