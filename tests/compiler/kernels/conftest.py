"""Kernels against numpy: buffers in the compiler's layouts, and one shared library per test."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.specs import Array, KernelSpec
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.key import compiler_version
from gangway.compiler.target import TARGETS, UnsupportedTargetError, detect, extended
from tests.conftest import kept_folder
from tests.helpers.kernel_runs import KEPT, build, in_pieces, planned
from tests.helpers.targets import BESIDE_TILES, EVERY

Kernel = Callable[[Sequence[Array]], None]


@pytest.fixture(params=EVERY, scope="module")
def target(request: pytest.FixtureRequest) -> TargetSpec:
    """Every target this machine can run."""
    return detect(request.param)


@pytest.fixture(
    params=[
        pytest.param("vectors", marks=BESIDE_TILES),
        "tiles",
        pytest.param("avx2", marks=pytest.mark.long),
    ]
)
def int8_target(request: pytest.FixtureRequest) -> TargetSpec:
    """What this machine has for 8-bit numbers, without tiles and with them; and AVX2, which has no VNNI."""
    if request.param in TARGETS:
        try:
            return detect(request.param)
        except UnsupportedTargetError as error:
            pytest.skip(str(error))
    found = extended(detect())
    names = [name for name in found.extensions if name == "avx512_vnni" or request.param == "tiles"]
    chosen = replace(found, extensions=tuple(names))
    if not int8.has_words(chosen) or int8.has_tiles(chosen) != (request.param == "tiles"):
        pytest.skip(f"this machine has no {request.param} of 8-bit numbers")
    return chosen


@pytest.fixture(scope="session")
def kept_libraries(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of libraries that this compiler has built for tests."""
    return kept_folder(pytestconfig, tmp_path_factory, "libraries", compiler_version())


@pytest.fixture
def library_path(tmp_path: Path, kept_libraries: Path) -> Path:
    (tmp_path / KEPT).symlink_to(kept_libraries)
    return tmp_path / "kernels.so"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def blocked() -> Callable[[Array, int, int], Array]:
    """[C][H][W] -> [C/L][H + 2h][W + 2h][L]."""

    def convert(plain: Array, lanes: int, halo: int) -> Array:
        channels = len(plain)
        padded = np.pad(plain, ((0, -channels % lanes), (halo, halo), (halo, halo)))
        return aligned(padded.reshape(-1, lanes, *padded.shape[1:]).transpose(0, 2, 3, 1))

    return convert


@pytest.fixture
def plain() -> Callable[[Array, int, int], Array]:
    """Blocked -> [C][H][W]; fails unless halo and surplus channels are zero."""

    def convert(blocks: Array, channels: int, halo: int) -> Array:
        full = blocks.transpose(0, 3, 1, 2).reshape(-1, *blocks.shape[1:3])
        inner = full[:, halo : full.shape[1] - halo, halo : full.shape[2] - halo]
        assert not full[channels:].any(), "surplus channels are not zero"
        assert np.abs(full).sum() == pytest.approx(np.abs(inner).sum()), "the halo is not zero"
        return np.ascontiguousarray(inner[:channels])

    return convert


@pytest.fixture
def compiled(target: TargetSpec, library_path: Path) -> Callable[[Sequence[KernelSpec]], list[Kernel]]:
    """Compile specs into one library; a kernel runs in two calls, last half first: no task may need another."""

    def compile_specs(specs: Sequence[KernelSpec]) -> list[Kernel]:
        plans = planned(specs, target)
        library = build(plans, target, library_path)
        return [partial(in_pieces, library, symbol, tasks=plan.tasks) for symbol, plan in plans.items()]

    return compile_specs
