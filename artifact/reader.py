"""Read and check an artifact. Without numpy: workers import this and must stay small."""

import gzip
import os
import re
import stat
import zlib
from pathlib import Path, PurePosixPath

from gangway.artifact.format import (
    ALIGNMENT_BYTES,
    FORMAT_VERSION,
    ISLAND_SUFFIX,
    ITEM_BYTES,
    KERNELS_FILE,
    LIBRARY_PREFIX,
    MANIFEST_FILE,
    MAX_ARGUMENTS,
    MAX_CHECKS,
    MAX_LAYERS,
    MAX_OPERANDS,
    MAX_TASKS,
    MAX_TENSORS,
    ONNX_FOLDER,
    WEIGHTS_FILE,
    BatchKernel,
    BufferRef,
    Engine,
    Layer,
    Manifest,
    MemorySpace,
    TensorSpec,
    Version,
)
from gangway.artifact.instances import MOST, SizeInstances, Varying, row_bytes
from gangway.base.files import file_checksum
from gangway.base.json_codec import decode

GZIP = b"\x1f\x8b"
MAX_VERSIONS = 5
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MAX_BATCH_ROWS = 1 << 16  # of one call
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LIBRARY = re.compile(rf"{LIBRARY_PREFIX}[0-9a-f]{{32}}\.so")
_KEY = re.compile(r"[0-9a-f]{64}")


class ArtifactError(Exception):
    """The folder does not hold a whole artifact of this format."""


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the artifact in `folder`, checked against the schema and for consistency.

    Everything a worker computes addresses from is checked here, so that a damaged manifest cannot make it read or write
    outside its buffers. The files beside it are not opened; `verify` does that. Raises ArtifactError, also if others
    than this user and root may have written any of them.
    """
    path = folder / MANIFEST_FILE
    try:
        _require_trusted(folder, path)
        manifest = decode(Manifest, _unpacked(path.read_bytes()), "manifest")
        _check(manifest)
        _require_trusted(*(folder / name for name in manifest.files))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: {error}") from error
    return manifest


def _unpacked(content: bytes) -> bytes:
    """Return the text of a manifest, which is compressed if the artifact is one of many of its model."""
    if not content.startswith(GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"damaged: {error}") from error


def verify(folder: Path) -> Manifest:
    """Return the manifest after comparing the size and checksum of every file with it. Raises ArtifactError."""
    manifest = read_manifest(folder)
    for name, spec in manifest.files.items():
        path = folder / name
        try:
            size_bytes = path.stat().st_size
            may_be_longer = name == WEIGHTS_FILE  # artifacts for other sizes share it (weights.py)
            if size_bytes != spec.size_bytes and not (may_be_longer and size_bytes > spec.size_bytes):
                raise ArtifactError(f"{path}: has {size_bytes} bytes instead of {spec.size_bytes}")
            checksum = file_checksum(path, spec.size_bytes)
        except OSError as error:
            raise ArtifactError(f"{path}: {error}") from error
        if checksum != spec.checksum:
            raise ArtifactError(f"{path}: its checksum is not the manifest's")
    return manifest


def others_may_write(path: Path) -> str:
    """Describe who may write a file or folder besides this user and root; empty if nobody may. Raises OSError."""
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    return f"can be written by others (mode {mode:04o})" if mode & OTHERS_WRITE else ""


def _require_trusted(*paths: Path) -> None:
    for path in paths:
        if problem := others_may_write(path):
            raise ValueError(f"{path.name} {problem}")


def _check(manifest: Manifest) -> None:
    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(f"format version {manifest.format_version} instead of {FORMAT_VERSION}")
    _require(_KEY.fullmatch(manifest.key) is not None, "the key is not 64 hex digits")
    _require((manifest.engine is Engine.ONNXRUNTIME) == bool(manifest.fallback_reason), "engine and reason differ")
    _require(_has_right_files(manifest), "wrong set of files")
    _require(manifest.arena_bytes >= 0, "negative arena")
    _require(manifest.session_bytes >= 0, "negative memory of sessions")
    _require(manifest.arena_bytes % ALIGNMENT_BYTES == 0, "arena rows would not be aligned")
    _require(1 <= len(manifest.layers) <= MAX_LAYERS, f"{len(manifest.layers)} layers")
    _require(0 <= manifest.pass_layers <= len(manifest.layers), f"passes of {manifest.pass_layers} layers")
    _require(1 <= manifest.pass_rows < 1 << 32, f"passes of {manifest.pass_rows} rows")
    for side in (manifest.inputs, manifest.outputs):
        _require(1 <= len(side) <= MAX_TENSORS, f"{len(side)} inputs or outputs")
        for tensor in side:
            _check_tensor(tensor, manifest, is_open=manifest.tail and side is manifest.outputs)
    if manifest.tail:
        _check_tail(manifest)
    if manifest.is_whole:
        _check_whole(manifest)
    else:
        for layer in manifest.layers:
            _check_layer(manifest, layer)
        _check_outputs(manifest)
        if manifest.instances is not None:
            _check_instances(manifest, manifest.instances)


_SIDES = (Varying.INPUT_BYTES, Varying.OUTPUT_BYTES)


def _check_instances(manifest: Manifest, instances: SizeInstances) -> None:
    """Check what the loop over layers does not (`native/py_program.c`): shapes, and how many numbers there are."""
    _require(1 <= len(instances.each) <= MOST, f"{len(instances.each)} instances")
    _require(manifest.engine is Engine.NATIVE and not manifest.tail, "a model with instances has sizes of its own")
    _require(all(map(_SYMBOL.fullmatch, instances.kernels)), "the name of a kernel of an instance")
    sides = (manifest.inputs, manifest.outputs)
    sized = [(at, (place.kind, place.index)) for at, place in enumerate(instances.places) if place.kind in _SIDES]
    for place, instance in enumerate(instances.each):
        name = f"instance {place}"
        _require(len(instance.sizes) == len(instances.symbols), f"{name} has {len(instance.sizes)} sizes")
        _require(len(instance.numbers) == len(instances.places), f"{name} has {len(instance.numbers)} numbers")
        _require(min(instance.numbers, default=0) >= 0, f"{name} has a negative number")
        numbers = {place: instance.numbers[at] for at, place in sized}
        for kind, shapes, tensors in zip(_SIDES, (instance.inputs, instance.outputs), sides, strict=True):
            _require(
                [len(shape) for shape in shapes] == [len(each.shape) for each in tensors], f"{name} has other ranks"
            )
            for index, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
                size_bytes = row_bytes(shape, manifest.batched, ITEM_BYTES[tensor.datatype])
                stated_bytes = numbers.get((kind, index), tensor.row_bytes)
                _require(size_bytes == stated_bytes, f"{name}: '{tensor.name}' has {stated_bytes} bytes a row")


def _check_tail(manifest: Manifest) -> None:
    _require(manifest.engine is Engine.NATIVE and bool(manifest.layers[-1].onnx_file), "the tail is no island")
    _require(manifest.pass_layers < len(manifest.layers), "the tail computes all rows at once")
    _require(not any(tensor.row_bytes for tensor in manifest.outputs), "outputs of a tail have a size")


def _check_tensor(tensor: TensorSpec, manifest: Manifest, is_open: bool) -> None:
    name = f"tensor '{tensor.name}'"
    _require(len(tensor.symbols) in (0, len(tensor.shape)), f"{name} has {len(tensor.symbols)} symbols")
    _require(not tensor.value_symbol or set(tensor.shape) <= {1}, f"{name} has more than one value")
    _require(min(tensor.shape, default=0) >= -1, f"{name} has a negative dimension")
    _require(not manifest.batched or tensor.shape[:1] == (-1,), f"{name} has no batch dimension")
    if manifest.engine is Engine.NATIVE:
        _require(tensor.row_bytes >= 0, f"{name} has a negative size")
        _require(is_open or -1 not in tensor.shape[manifest.batched :], f"{name} is not of fixed size")


def _has_right_files(manifest: Manifest) -> bool:
    if manifest.engine is Engine.NATIVE:
        needed = {WEIGHTS_FILE, KERNELS_FILE, *(layer.onnx_file for layer in manifest.islands)}
        return needed <= set(manifest.files) and all(map(_LIBRARY.fullmatch, set(manifest.files) - needed))
    if manifest.engine is Engine.PYTHON:
        return not manifest.files
    paths = [PurePosixPath(name) for name in manifest.files]
    inside = all(len(path.parts) > 1 and path.parts[0] == ONNX_FOLDER and ".." not in path.parts for path in paths)
    return manifest.whole_file in manifest.files and inside


def _check_whole(manifest: Manifest) -> None:
    """Check what onnxruntime or Python executes: one layer of one task, for one rank, without memory of ours."""
    _require(manifest.arena_bytes == 0, "onnxruntime needs no arena")
    _require(len(manifest.layers) == 1, f"{len(manifest.layers)} layers")
    (layer,) = manifest.layers
    tasks = [(version.tasks, version.batch) for version in layer.versions]
    _require((layer.arguments, tasks, layer.max_ranks) == ((), [(1, None)], 1), "the layer is not that of onnxruntime")


def _check_layer(manifest: Manifest, layer: Layer) -> None:
    name = f"layer '{layer.name}'"
    most = MAX_OPERANDS if layer.onnx_file else MAX_ARGUMENTS
    _require(1 <= len(layer.arguments) <= most, f"{name} has {len(layer.arguments)} arguments")
    _require(1 <= len(layer.versions) <= MAX_VERSIONS, f"{name} has {len(layer.versions)} versions")
    _require(layer.max_ranks >= 1, f"{name} allows no rank")
    _require(0 <= layer.row_ns < 1 << 32, f"{name} takes {layer.row_ns} ns a row")
    _require(len(layer.checks) <= MAX_CHECKS, f"{name} has {len(layer.checks)} checks")
    if layer.onnx_file:
        _check_island(name, layer)
    for version in layer.versions:
        _check_kernel(name, version)
        _require(not (layer.checks and version.batch), f"{name} checks numbers of several rows in one call")
        if version.batch is not None:
            _check_kernel(name, version.batch)
            _require(1 <= version.batch.rows <= MAX_BATCH_ROWS, f"{name}: a call of {version.batch.rows} rows")
    for argument in layer.arguments:
        _require(0 <= argument.offset_bytes < _space_bytes(manifest, argument), f"{name} points outside its buffer")


def _check_outputs(manifest: Manifest) -> None:
    """An output that no layer has as an argument would show a client what lay there before."""
    found = {
        argument.index
        for layer in manifest.layers
        for argument in layer.arguments
        if argument.space == MemorySpace.OUTPUT
    }
    for index, tensor in enumerate(manifest.outputs):
        _require(index in found or not tensor.row_bytes, f"no layer writes output '{tensor.name}'")


def _check_island(name: str, layer: Layer) -> None:
    path = PurePosixPath(layer.onnx_file)
    _require(len(path.parts) == 1 and path.suffix == ISLAND_SUFFIX, f"{name} is in '{layer.onnx_file}'")
    tasks = [(version.tasks, version.batch) for version in layer.versions]
    _require(tasks == [(1, None)] and not layer.checks, f"{name} is not one call for each row")


def _check_kernel(name: str, kernel: Version | BatchKernel) -> None:
    _require(_SYMBOL.fullmatch(kernel.symbol) is not None, f"{name}: symbol '{kernel.symbol}'")
    _require(1 <= kernel.tasks <= MAX_TASKS, f"{name} has {kernel.tasks} tasks")


def _space_bytes(manifest: Manifest, argument: BufferRef) -> int:
    """Size of one row of the memory that `argument` points into; 0 if there is none."""

    def row_bytes(side: tuple[TensorSpec, ...]) -> int:
        return side[argument.index].row_bytes if 0 <= argument.index < len(side) else 0

    match argument.space:
        case MemorySpace.INPUT:
            return row_bytes(manifest.inputs)
        case MemorySpace.OUTPUT:
            return row_bytes(manifest.outputs)
        case MemorySpace.ARENA:
            return manifest.arena_bytes
        case MemorySpace.WEIGHTS:
            return manifest.files[WEIGHTS_FILE].size_bytes


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
