"""Fused attention against numpy in double precision, for every target."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import Array, AttentionSpec, ScoreBias
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.tiling import UnsupportedSpecError

Attention = Callable[[str, list[Array], list[Array]], Array]

LOWEST = np.finfo(np.float32).min
KEY_MASK, CAUSAL, RELATIVE = ScoreBias(False, False), ScoreBias(False, True), ScoreBias(True, True, scaled=True)
PER_HEAD_KEY = ScoreBias(True, False, scaled=True)

SPECS = {
    "odd": AttentionSpec(2, 48, 37, 29, 0.3, (CAUSAL, KEY_MASK)),  # full and partial blocks of queries
    "long": AttentionSpec(2, 16, 20, 531, 0.25, (RELATIVE, PER_HEAD_KEY)),  # several blocks of keys
    "two of queries": AttentionSpec(1, 16, 3, 18, 0.25, (CAUSAL, RELATIVE)),
    "single": AttentionSpec(3, 16, 1, 1, 1.0),
}


def blocks(plain: Array, lanes: int) -> Array:
    """[P][C] -> [C/L][P][L]."""
    return aligned(plain.reshape(len(plain), -1, lanes).transpose(1, 0, 2))


def operands(spec: AttentionSpec, rng: np.random.Generator) -> tuple[list[Array], list[Array]]:
    """Queries, keys and values [positions][channels], and biases [heads][queries][keys]."""
    channels = spec.heads * spec.head_size
    tensors = [rng.standard_normal((count, channels), np.float32) for count in (spec.queries, spec.keys, spec.keys)]
    shapes = [(spec.heads if b.per_head else 1, spec.queries if b.per_query else 1, spec.keys) for b in spec.biases]
    return tensors, [rng.standard_normal(shape, np.float32) for shape in shapes]


def attention(spec: AttentionSpec, tensors: list[Array], biases: list[Array]) -> Array:
    """[queries][channels], in double precision, but scores rounded to float32 as the masks need it."""
    q, k, v = (t.reshape(len(t), spec.heads, -1).transpose(1, 0, 2).astype(np.float64) for t in tensors)
    scores = q @ k.transpose(0, 2, 1) * spec.scale
    for bias, numbers in zip(spec.biases, biases, strict=True):
        scores = scores + numbers.astype(np.float64) * (spec.scale if bias.scaled else 1)
    scores = np.maximum(scores, -np.inf).astype(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        y = weights / weights.sum(axis=-1, keepdims=True) @ v
    return y.transpose(1, 0, 2).reshape(spec.queries, -1)


@pytest.fixture(scope="module")
def kernels(target: TargetSpec, tmp_path_factory: pytest.TempPathFactory) -> Attention:
    """A function of a spec's name, operands and biases that gives [queries][channels] of its kernel."""
    path: Path = tmp_path_factory.mktemp("attention") / "kernels.so"
    plans = {name: registry.plan(spec, target) for name, spec in SPECS.items()}
    symbols = {name: f"k{i}" for i, name in enumerate(SPECS)}
    functions = {symbols[name]: registry.emit(plan, target, symbols[name]) for name, plan in plans.items()}
    codegen.build_library(functions, target, path)
    library = Library(path)

    def compute(name: str, tensors: list[Array], biases: list[Array]) -> Array:
        y = aligned(np.full_like(blocks(tensors[0], target.lanes), 9))
        arguments = [*(blocks(t, target.lanes) for t in tensors), *(aligned(b, 4) for b in biases), y]
        middle = plans[name].tasks // 2
        library.call(symbols[name], arguments, middle, plans[name].tasks)
        library.call(symbols[name], arguments, 0, middle)
        return y.transpose(1, 0, 2).reshape(len(tensors[0]), -1)

    return compute


@pytest.mark.parametrize("name", SPECS)
def test_attention(name: str, kernels: Attention, rng: np.random.Generator) -> None:
    tensors, biases = operands(SPECS[name], rng)
    wanted = attention(SPECS[name], tensors, biases)
    np.testing.assert_allclose(kernels(name, tensors, biases), wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("hidden", [-np.inf, LOWEST])
@pytest.mark.parametrize("name", ["odd", "long"])
def test_masks(name: str, hidden: float, kernels: Attention, rng: np.random.Generator) -> None:
    spec = SPECS[name]
    tensors, biases = operands(spec, rng)
    biases[0][:, np.arange(spec.keys) > np.arange(spec.queries)[:, None]] = hidden
    biases[0][:, 4] = hidden  # this query sees nothing
    biases[1][...] = 0
    got = kernels(name, tensors, biases)
    assert np.isnan(got[4]).all() == (hidden == -np.inf)
    np.testing.assert_allclose(got, attention(spec, tensors, biases), rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ["odd", "long"])
def test_nan_is_not_hidden(name: str, kernels: Attention, rng: np.random.Generator) -> None:
    tensors, biases = operands(SPECS[name], rng)
    tensors[0][1] = np.nan
    got = kernels(name, tensors, biases)
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[2:]).all()


@pytest.mark.parametrize("name", ["odd", "long"])
def test_large_scores_do_not_overflow(name: str, kernels: Attention, rng: np.random.Generator) -> None:
    tensors, biases = operands(SPECS[name], rng)
    tensors[0] *= 1000
    got = kernels(name, tensors, biases)
    np.testing.assert_allclose(got, attention(SPECS[name], tensors, biases), rtol=0, atol=5e-3)


def test_heads_beyond_local_memory_are_refused(target: TargetSpec) -> None:
    with pytest.raises(UnsupportedSpecError, match="heads of 1024"):
        registry.plan(AttentionSpec(1, 1024, 8, 8, 1.0), target)
