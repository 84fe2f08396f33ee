"""Fused attention against numpy in double precision, for every target."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.attention_specs import AttentionSpec, ScoreBias
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.objects import KernelObjects
from gangway.compiler.kernels.specs import Array
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.tiling import UnsupportedSpecError
from tests.helpers.kernel_runs import build, in_pieces

Attention = Callable[[str, list[Array], list[Array]], Array]

LOWEST = np.finfo(np.float32).min
KEY_MASK, CAUSAL, RELATIVE = ScoreBias(False, False), ScoreBias(False, True), ScoreBias(True, True, scaled=True)
PER_HEAD_KEY = ScoreBias(True, False, scaled=True)
WINDOW_MASK = ScoreBias(False, True, per_window=True)
PLAIN = (2 * 9 * 16, 9 * 16, 16, 1)  # 4 heads of 9 positions, 16 channels
TURNED = (0, 16 * 21, 1, 21)  # channels first, the same for all windows

SPECS = {
    "odd": AttentionSpec(2, 48, 37, 29, 0.3, (CAUSAL, KEY_MASK)),  # full and partial blocks of queries
    "long": AttentionSpec(2, 16, 20, 531, 0.25, (RELATIVE, PER_HEAD_KEY)),  # several blocks of keys
    "two of queries": AttentionSpec(1, 16, 3, 18, 0.25, (CAUSAL, RELATIVE)),
    "single": AttentionSpec(3, 16, 1, 1, 1.0),
    "windows": AttentionSpec(2, 32, 19, 18, 0.2, (RELATIVE, WINDOW_MASK), windows=3),
    "window of each head": AttentionSpec(2, 16, 5, 6, 0.2, (ScoreBias(True, False, per_window=True),), windows=2),
    "shared keys": AttentionSpec(4, 32, 7, 300, 0.2, (CAUSAL,), sharing=2, value_size=16, softcap=1.5),
    "by strides": AttentionSpec(
        2, 16, 9, 21, 0.4, windows=2, sharing=2, strides=(PLAIN, TURNED, (336, 336, 16, 1), PLAIN)
    ),
    "odd heads": AttentionSpec(
        2,
        12,
        19,
        21,
        0.3,
        (CAUSAL,),
        value_size=20,
        strides=((0, 12, 24, 1), (0, 12, 24, 1), (0, 20, 40, 1), (0, 20, 40, 1)),
    ),
    "apart": AttentionSpec(2, 16, 9, 9, 0.3, value_size=32, windows=2, strides=((64,), (64,), (96,), ())),
    "zero": AttentionSpec(2, 16, 20, 531, 0.25, (CAUSAL, KEY_MASK), empty_rows="zero"),
    "zero and nan": AttentionSpec(2, 16, 37, 29, 0.25, (CAUSAL, KEY_MASK), empty_rows="zero and nan"),
}


def blocks(plain: Array, lanes: int) -> Array:
    """[P][C] -> [C/L][P][L]."""
    return aligned(plain.reshape(len(plain), -1, lanes).transpose(1, 0, 2))


def stored(tensor: Array, strides: tuple[int, ...], lanes: int) -> Array:
    """[windows][heads][positions][channels] as the kernel reads it: blocked, or by strides."""
    windows, heads, positions, channels = tensor.shape
    if len(strides) == 1:  # zeros between heads, and none behind the last
        gap = strides[0] - channels
        wide = np.pad(tensor, [(0, 0), (0, 0), (0, 0), (0, gap)]).transpose(0, 2, 1, 3)
        return blocks(wide.reshape(windows * positions, -1)[:, : heads * strides[0] - gap], lanes)
    if not strides:
        return blocks(tensor.transpose(0, 2, 1, 3).reshape(windows * positions, heads * channels), lanes)
    memory = np.full(1 + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True)), 9, np.float32)
    view_of(memory, tensor.shape, strides)[...] = tensor
    return aligned(memory, 4)


def view_of(memory: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    return np.lib.stride_tricks.as_strided(memory, shape, [4 * step for step in strides])


def operands(spec: AttentionSpec, rng: np.random.Generator) -> tuple[list[Array], list[Array]]:
    """Queries, keys and values [windows][heads][positions][channels], and biases [windows][heads][queries][keys]."""
    shared = spec.heads // spec.sharing
    shapes = [
        (spec.windows, spec.heads, spec.queries, spec.head_size),
        (spec.windows, shared, spec.keys, spec.head_size),
        (spec.windows, shared, spec.keys, spec.value_channels),
    ]
    tensors = [rng.standard_normal(shape, np.float32) for shape in shapes]
    for tensor, strides in zip(tensors, spec.strides, strict=False):
        if len(strides) == 4 and not strides[0]:
            tensor[1:] = tensor[:1]
    lengths = (spec.windows, spec.heads, spec.queries, spec.keys)
    there = [(b.per_window, b.per_head, b.per_query, True) for b in spec.biases]
    biases = [[n if is_there else 1 for n, is_there in zip(lengths, axes, strict=True)] for axes in there]
    return tensors, [rng.standard_normal(shape, np.float32) for shape in biases]


def attention(spec: AttentionSpec, tensors: list[Array], biases: list[Array]) -> Array:
    """[windows][heads][queries][channels], in double precision, but scores rounded to float32 as the masks need it."""
    q, k, v = (np.repeat(t, spec.heads // t.shape[1], 1).astype(np.float64) for t in tensors)
    scores = q @ k.swapaxes(-1, -2) * spec.scale
    if spec.softcap:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    for bias, numbers in zip(spec.biases, biases, strict=True):
        scores = scores + numbers.astype(np.float64) * (spec.scale if bias.scaled else 1)
    scores = np.maximum(scores, -np.inf).astype(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = weights / weights.sum(axis=-1, keepdims=True)
    if spec.empty_rows == "zero":
        shares[(scores == -np.inf).all(-1)] = 0
    elif spec.empty_rows == "zero and nan":
        shares[np.isnan(shares)] = 0
    return np.asarray(shares @ v)


@pytest.fixture(scope="module")
def kernels(target: TargetSpec, tmp_path_factory: pytest.TempPathFactory) -> Attention:
    """A function of a spec's name, operands and biases that gives [windows][heads][queries][channels] of its kernel."""
    path: Path = tmp_path_factory.mktemp("attention") / "kernels.so"
    plans = {name: registry.plan(spec, target) for name, spec in SPECS.items()}
    symbols = {name: f"k{i}" for i, name in enumerate(SPECS)}
    library = build({symbols[name]: plan for name, plan in plans.items()}, target, path)

    def compute(name: str, tensors: list[Array], biases: list[Array]) -> Array:
        spec = SPECS[name]
        shape = (spec.windows, spec.heads, spec.queries, spec.value_channels)
        y = stored(np.full(shape, 9, np.float32), spec.strides[3], target.lanes)
        inputs = [stored(*pair, target.lanes) for pair in zip(tensors, spec.strides, strict=False)]
        arguments = [*inputs, *(aligned(b, 4) for b in biases), y]
        in_pieces(library, symbols[name], arguments, plans[name].tasks)
        if spec.strides[3]:
            return view_of(y, shape, spec.strides[3])
        return y.transpose(1, 0, 2).reshape(spec.windows, spec.queries, spec.heads, -1).transpose(0, 2, 1, 3)

    return compute


@pytest.mark.parametrize("name", SPECS)
def test_attention(name: str, kernels: Attention, rng: np.random.Generator) -> None:
    tensors, biases = operands(SPECS[name], rng)
    wanted = attention(SPECS[name], tensors, biases)
    np.testing.assert_allclose(kernels(name, tensors, biases), wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("hidden", [-np.inf, LOWEST])
@pytest.mark.parametrize("name", ["odd", "long", "zero", "zero and nan"])
def test_masks(name: str, hidden: float, kernels: Attention, rng: np.random.Generator) -> None:
    spec = SPECS[name]
    tensors, biases = operands(spec, rng)
    biases[0][..., np.arange(spec.keys) > np.arange(spec.queries)[:, None]] = hidden
    biases[0][..., 4, :] = hidden  # this query sees nothing
    biases[1][...] = 0
    got = kernels(name, tensors, biases)
    empty = got[:, :, 4]
    assert np.isnan(empty).all() == (hidden == -np.inf and spec.empty_rows == "nan")
    assert (empty == 0).all() == (hidden == -np.inf and spec.empty_rows != "nan")
    np.testing.assert_allclose(got, attention(spec, tensors, biases), rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ["odd", "long", "zero", "zero and nan"])
def test_nan_is_not_hidden(name: str, kernels: Attention, rng: np.random.Generator) -> None:
    tensors, biases = operands(SPECS[name], rng)
    tensors[0][:, :, 1] = np.nan
    got = kernels(name, tensors, biases)
    zeros = SPECS[name].empty_rows == "zero and nan"
    assert (got[:, :, 1] == 0).all() if zeros else np.isnan(got[:, :, 1]).all()
    assert np.isfinite(got[:, :, 2:]).all()


@pytest.mark.parametrize("name", ["odd", "long"])
def test_large_scores_do_not_overflow(name: str, kernels: Attention, rng: np.random.Generator) -> None:
    tensors, biases = operands(SPECS[name], rng)
    tensors[0] *= 1000
    got = kernels(name, tensors, biases)
    np.testing.assert_allclose(got, attention(SPECS[name], tensors, biases), rtol=0, atol=5e-3)


def test_heads_beyond_local_memory_are_refused(target: TargetSpec) -> None:
    with pytest.raises(UnsupportedSpecError, match="heads of 1024"):
        registry.plan(AttentionSpec(1, 1024, 8, 8, 1.0), target)


def test_one_kernel_reads_any_number_of_earlier_keys(
    target: TargetSpec, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Keys and values of a head lie one behind the other: where a head begins depends on how many there are."""
    symbols: set[str] = set()
    for keys in (600, 700):
        head = (0, 16 * keys, 16, 1)
        spec = AttentionSpec(4, 16, 1, keys, 0.3, sharing=2, strides=((), head, head, ()))
        plan = registry.plan(spec, target)
        scratch = tmp_path / str(keys)
        scratch.mkdir()
        objects = KernelObjects(tmp_path, scratch, target, "shared")
        kernel = objects.build([plan], {spec: "layer"}, lambda done, total: None)[plan]
        symbols.add(kernel.symbol)
        objects.link(scratch / "kernels.so")
        tensors, _ = operands(spec, rng)
        y = stored(np.full((1, 4, 1, 16), 9, np.float32), (), target.lanes)
        inputs = [stored(*pair, target.lanes) for pair in zip(tensors, spec.strides, strict=False)]
        extents = np.array(kernel.extents, np.int32)
        Library(scratch / "kernels.so").call(kernel.symbol, [*inputs, y, extents], 0, plan.tasks)
        got = y.transpose(1, 0, 2).reshape(1, 1, 4, 16).transpose(0, 2, 1, 3)
        np.testing.assert_allclose(got, attention(spec, tensors, []), rtol=0, atol=5e-6)
    assert len(symbols) == 1
