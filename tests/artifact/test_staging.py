"""Which tensors are staged for batches of several requests, and where."""

from dataclasses import replace

from gangway.artifact.format import (
    BatchKernel,
    BufferRef,
    Layer,
    Manifest,
    MemorySpace,
    TargetSpec,
    TensorSpec,
    Version,
    plan_staging,
    staging_bytes,
)


def layer(*arguments: BufferRef, batch: bool) -> Layer:
    kernel = BatchKernel("rows", 8, 1, "") if batch else None
    return Layer("layer", "Test", "", arguments, (Version("row", 1, ""), Version("row", 1, "", batch=kernel)), 1, 1, 1)


def tensors(*sizes: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"t{size}", "INT8", (-1, size), size) for size in sizes)


WEIGHTS, ARENA = BufferRef(MemorySpace.WEIGHTS, 0), BufferRef(MemorySpace.ARENA, 0)
MANIFEST = Manifest(
    key="ab" * 32,
    model_name="test",
    batched=True,
    inputs=tensors(100, 200, 300),
    outputs=tensors(10, 20),
    layers=(
        layer(BufferRef(MemorySpace.INPUT, 0, 0), WEIGHTS, ARENA, batch=False),
        layer(BufferRef(MemorySpace.INPUT, 8, 2), WEIGHTS, ARENA, batch=True),
        layer(BufferRef(MemorySpace.INPUT, 0, 1), ARENA, BufferRef(MemorySpace.OUTPUT, 4, 0), batch=True),
        layer(BufferRef(MemorySpace.INPUT, 0, 1), ARENA, BufferRef(MemorySpace.OUTPUT, 0, 1), batch=False),
    ),
    arena_bytes=128,
    target=TargetSpec("baseline", "x86-64", 4, ()),
    files={},
)


def test_what_batch_kernels_use_is_staged_behind_the_arena() -> None:
    staging = plan_staging(MANIFEST)
    assert staging.inputs == {1: 128, 2: 128 + 256}, "200 bytes take 256, 300 take 320"
    assert staging.outputs == {0: 128 + 256 + 320}
    assert staging_bytes(MANIFEST) == staging.size_bytes == 256 + 320 + 64


def test_nothing_is_staged_without_batch_kernels_or_batches() -> None:
    plain = replace(MANIFEST, layers=(layer(BufferRef(MemorySpace.INPUT, 0, 0), ARENA, batch=False),))
    for manifest in (plain, replace(MANIFEST, batched=False)):
        staging = plan_staging(manifest)
        assert (staging.inputs, staging.outputs, staging_bytes(manifest)) == ({}, {}, 0)
