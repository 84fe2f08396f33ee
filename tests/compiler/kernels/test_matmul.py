"""Batched matrix products against numpy in double precision, for every target."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.plain_specs import MatMulSpec
from gangway.compiler.kernels.specs import Array, KernelSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.tiling import UnsupportedSpecError
from tests.helpers.kernel_runs import build, numbered

Compile = Callable[[Sequence[KernelSpec]], list[Callable[[Sequence[Array]], None]]]


def strides(array: Array) -> tuple[int, ...]:
    """In elements; 0 where an axis of length 1 is broadcast."""
    return tuple(0 if n == 1 else s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True))


def spec_of(a: Array, b: Array, scale: float) -> MatMulSpec:
    """The product of two views."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    a_strides, b_strides = strides(a), strides(b)
    return MatMulSpec(
        batch,
        rows,
        inner,
        columns,
        a_strides[:-2],
        b_strides[:-2],
        a_strides[-2:],
        b_strides[-2:],
        scale,  # type: ignore[arg-type]
    )


def operands(rng: np.random.Generator) -> list[tuple[Array, Array, float]]:
    """Pairs of views: contiguous, transposed, broadcast, heads of a sequence, single numbers, long inner axes."""

    def numbers(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    heads = numbers(2, 21, 3, 20).transpose(0, 2, 1, 3)  # [2][3 heads][21 positions][20]
    return [
        (numbers(2, 30, 33), numbers(2, 33, 50), 1.0),
        (heads, heads.transpose(0, 1, 3, 2), 0.25),
        (heads.transpose(0, 1, 3, 2), heads, 1.0),
        (numbers(2, 1, 1), numbers(2, 1, 2), 1.0),
        (numbers(5, 1, 40), numbers(1, 40, 64), 0.5),
        (numbers(1, 40, 17), numbers(4, 17, 1), 0.5),
        (numbers(2, 3, 45), numbers(2, 70, 45).transpose(0, 2, 1), 0.5),
        (numbers(21, 43), numbers(43, 1), 1.0),
        (numbers(45, 35)[:, ::5], numbers(35, 7)[::5, ::3], 1.0),
        (numbers(15, 1024)[:, :700], numbers(700, 70), 2.0),
        (numbers(33, 1100), numbers(3, 1100).T, 2.0),
    ]


def test_products(compiled: Compile, target: TargetSpec, rng: np.random.Generator) -> None:
    cases = operands(rng)
    specs = [spec_of(a, b, scale) for a, b, scale in cases]
    for kernel, spec, (a, b, scale) in zip(compiled(specs), specs, cases, strict=True):
        y = aligned(np.full((*spec.batch_shape, spec.rows, spec.columns), 9, np.float32), 4)
        guarded = aligned(np.append(y, np.float32(7)), 4)
        kernel([a, b, guarded])
        wanted = scale * (a.astype(np.float64) @ b.astype(np.float64))
        got = guarded[:-1].reshape(wanted.shape)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * max(1, np.abs(wanted).max()), err_msg=str(spec))
        assert guarded[-1] == 7


def test_large_products_are_shared_and_small_ones_are_not(target: TargetSpec) -> None:
    large = MatMulSpec((), 256, 256, 256, (), (), (256, 1), (256, 1))
    assert registry.plan(large, target).tasks >= 8
    small = MatMulSpec((4,), 2, 2, 2, (4,), (4,), (2, 1), (2, 1))
    assert registry.plan(small, target).tasks <= 2


def test_empty_products_are_refused(target: TargetSpec) -> None:
    with pytest.raises(UnsupportedSpecError, match="2x0x2"):
        registry.plan(MatMulSpec((), 2, 0, 2, (), (), (0, 1), (2, 1)), target)


def test_other_cuts_into_tasks_compute_the_same(
    target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    a, b = rng.standard_normal((3, 40, 20), np.float32), rng.standard_normal((3, 20, 80), np.float32)
    versions = registry.versions(spec_of(a, b, 1.0), target)
    plans = [find(versions, key=lambda plan: plan.tasks) for find in (min, max)]
    assert plans[0].tasks < plans[1].tasks
    library = build(numbered(plans), target, library_path)
    for i, plan in enumerate(plans):
        y = aligned(np.full((3, 40, 80), 9, np.float32))
        library.call(f"k{i}", [a, b, y], 0, plan.tasks)
        np.testing.assert_allclose(y, a @ b, rtol=0, atol=1e-4)
