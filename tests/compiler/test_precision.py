"""Models compiled for products in bfloat16: what is lowered, what is stored so, and how near answers are to float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from onnx import helper

from gangway.artifact.cache import Cache
from gangway.artifact.format import Manifest
from gangway.compiler.amx_permission import request_tiles, tiles_work
from gangway.compiler.arguments import CompileOptions
from gangway.compiler.key import model_key
from gangway.compiler.pipeline import CompileResult, compile_model, find_compiled
from gangway.compiler.target import TARGETS, detect, extended, for_precision
from gangway.zoo.transformers import Size, bert_base, gpt2

pytestmark = pytest.mark.long

Array = npt.NDArray[Any]
LEAST_COSINE = 0.998

needs_bf16 = pytest.mark.skipif(
    not for_precision(detect(), "bf16").extensions, reason="this machine has no instructions for bfloat16"
)


def convolutions() -> tuple[list[Any], dict[str, Array]]:
    """A stem, a residual block, a stage of branches that are joined twice, and a classifier."""
    rng = np.random.default_rng(5)
    nodes: list[Any] = []
    constants: dict[str, Array] = {}

    def conv(x: str, y: str, inputs: int, outputs: int, size: int = 1, stride: int = 1, relu: bool = True) -> str:
        constants[f"{y}.w"] = rng.standard_normal((outputs, inputs, size, size)).astype(np.float32) / np.float32(
            np.sqrt(inputs * size * size / 2)
        )
        constants[f"{y}.b"] = rng.standard_normal(outputs).astype(np.float32) / 10
        result = f"{y}.c" if relu else y
        pad = [size // 2] * 4
        nodes.append(
            helper.make_node(
                "Conv", [x, f"{y}.w", f"{y}.b"], [result], name=f"{y}.conv", strides=[stride] * 2, pads=pad
            )
        )
        if relu:
            nodes.append(helper.make_node("Relu", [result], [y]))
        return y

    conv("x", "stem", 3, 64, 7, 2)
    nodes.append(helper.make_node("MaxPool", ["stem"], ["pool"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    conv("pool", "a", 64, 64, 3)
    conv("a", "b", 64, 64, 3, relu=False)
    nodes.append(helper.make_node("Add", ["b", "pool"], ["sum"]))
    nodes.append(helper.make_node("Relu", ["sum"], ["block"]))
    conv("block", "left", 64, 96, 3)
    conv("block", "up", 64, 32)
    conv("block", "down", 64, 64, 3)
    nodes.append(helper.make_node("Concat", ["up", "down"], ["right"], axis=1))
    nodes.append(helper.make_node("Concat", ["left", "right"], ["all"], axis=1))
    conv("all", "last", 192, 128, 3, 2)
    nodes.append(helper.make_node("GlobalAveragePool", ["last"], ["mean"]))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"]))
    constants["out.w"] = rng.standard_normal((128, 50)).astype(np.float32)
    constants["out.b"] = rng.standard_normal(50).astype(np.float32)
    nodes.append(helper.make_node("Gemm", ["flat", "out.w", "out.b"], ["y"], name="classifier"))
    return nodes, constants


@pytest.fixture
def saved(tmp_path: Path, network: type[Any]) -> Path:
    """A small convolutional network."""
    nodes, constants = convolutions()
    path: Path = network(nodes, {"x": ["N", 3, 64, 64]}, {"y": ["N", 50]}, constants).save(tmp_path / "model.onnx")
    return path


def compile_low(path: Path, cache: Path, keep_fp32: tuple[str, ...] = ()) -> CompileResult:
    options = CompileOptions(precision="bf16", keep_fp32=keep_fp32)
    return compile_model(path, "test", Cache(cache), detect(), lambda *_: None, options)


def low_layers(manifest: Manifest) -> list[str]:
    return [layer.name for layer in manifest.layers if "bf16" in layer.versions[0].description]


def has_tiles(manifest: Manifest) -> bool:
    return "amx_tile" in manifest.target.extensions


def least_cosine(answers: dict[str, Array], expected: dict[str, Array]) -> float:
    pairs = [(answers[name].ravel().astype(np.float64), values.ravel()) for name, values in expected.items()]
    return min(float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) for a, b in pairs)


def reference(path: Path, inputs: dict[str, Array]) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(str(path))
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs), strict=True))


@needs_bf16
def test_a_convolutional_network_is_near_float32(
    saved: Path, tmp_path: Path, load_artifact: Callable[[Path], Any]
) -> None:
    compiled = compile_low(saved, tmp_path / "cache")
    model = load_artifact(compiled.folder)
    assert compiled.manifest.precision == "bf16"
    by_tiles = {"a.conv", "b.conv"} if has_tiles(compiled.manifest) else set()  # else Winograd's kernels are faster
    assert {"last.conv", "classifier"} | by_tiles <= set(low_layers(compiled.manifest))
    rng = np.random.default_rng(3)
    for seed in range(3):
        x = rng.standard_normal((1, 3, 64, 64), np.float32)
        model({"x": np.full_like(x, np.nan)})  # which must leave nothing behind
        expected = reference(saved, {"x": x})
        cosine = least_cosine(model({"x": x}, seed), expected)
        assert LEAST_COSINE <= cosine < 1 - 1e-9, "products are rounded, and no more than that"


@needs_bf16
def test_several_images_are_near_float32(
    network: type[Any], tmp_path: Path, load_artifact: Callable[[Path], Any]
) -> None:
    nodes, constants = convolutions()
    path = network(nodes, {"x": [3, 3, 64, 64]}, {"y": [3, 50]}, constants).save(tmp_path / "model.onnx")
    compiled = compile_low(path, tmp_path / "cache")
    # The classifier's three rows are as fast in float32 where there are tiles.
    assert {f"last.conv/image{image}" for image in range(3)} <= set(low_layers(compiled.manifest))
    x = np.random.default_rng(3).standard_normal((3, 3, 64, 64), np.float32)
    cosine = least_cosine(load_artifact(compiled.folder)({"x": x}), reference(path, {"x": x}))
    assert LEAST_COSINE <= cosine < 1 - 1e-9


@pytest.mark.long
@needs_bf16
def test_activations_between_convolutions_take_half_the_memory(saved: Path, tmp_path: Path) -> None:
    low = compile_low(saved, tmp_path / "cache").manifest
    full = compile_model(saved, "test", Cache(tmp_path / "cache"), detect(), lambda *_: None).manifest
    assert (
        low.arena_bytes <= (0.75 if has_tiles(low) else 1) * full.arena_bytes
    )  # fewer layers are faster without tiles
    assert low.weights_bytes < (0.7 if has_tiles(low) else 1) * full.weights_bytes


@needs_bf16
@pytest.mark.parametrize("make", [bert_base, gpt2], ids=["bert", "gpt2"])
def test_a_transformer_is_near_float32(
    make: Callable[..., Any], tmp_path: Path, load_artifact: Callable[[Path], Any]
) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        make(5, 48, Size(layers=2, heads=2, hidden=128, vocabulary=50, positions=48)).write(file)
    compiled = compile_low(path, tmp_path / "cache")
    model, rng = load_artifact(compiled.folder), np.random.default_rng(3)
    inputs = {}
    for spec in model.manifest.inputs:
        shape = [1 if n == -1 else n for n in spec.shape]
        tokens = rng.integers(0, 50, shape, np.int64)
        limits = {"attention_mask": tokens * 0 + 1, "token_type_ids": tokens % 2}
        inputs[spec.name] = limits.get(spec.name, tokens)
    lowered = [layer for layer in model.manifest.layers if layer.name in low_layers(model.manifest)]
    tiles = has_tiles(model.manifest)
    assert sum(layer.operator.startswith("Gemm") for layer in lowered) >= (8 if tiles else 3)
    assert sum(layer.operator == "FusedAttention" for layer in lowered) == 2 * tiles
    assert least_cosine(model(inputs), reference(path, inputs)) >= LEAST_COSINE


@pytest.mark.long
@needs_bf16
def test_named_layers_stay_float32(saved: Path, tmp_path: Path, load_artifact: Callable[[Path], Any]) -> None:
    lowered = low_layers(compile_low(saved, tmp_path / "cache").manifest)
    kept = compile_low(saved, tmp_path / "cache", ("a.conv", "last.conv"))
    assert kept.manifest.keep_fp32 == ("a.conv", "last.conv")
    assert set(low_layers(kept.manifest)) >= set(lowered) - {"a.conv", "last.conv"} - {"pool"}
    assert not {"a.conv", "last.conv"} & set(low_layers(kept.manifest))
    everything = compile_low(saved, tmp_path / "cache", tuple(lowered))
    assert not low_layers(everything.manifest)
    x = np.random.default_rng(4).standard_normal((1, 3, 64, 64), np.float32)
    answer, expected = load_artifact(everything.folder)({"x": x})["y"], reference(saved, {"x": x})["y"]
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@needs_bf16
def test_each_choice_is_an_artifact_of_its_own(saved: Path, tmp_path: Path) -> None:
    cache, target = Cache(tmp_path / "cache"), detect()
    full = compile_model(saved, "test", cache, target, lambda *_: None)
    low, kept = compile_low(saved, cache.root), compile_low(saved, cache.root, ("a.conv",))
    assert len({full.manifest.key, low.manifest.key, kept.manifest.key}) == 3
    assert full.manifest.key == model_key(saved, target)
    assert full.manifest.precision == "fp32"
    assert not full.manifest.target.extensions
    assert compile_low(saved, cache.root).cached
    found = find_compiled(saved, cache, target, CompileOptions(precision="bf16", keep_fp32=("a.conv",)))
    assert found is not None
    assert found.manifest.key == kept.manifest.key


def test_a_machine_without_the_instructions_compiles_float32(saved: Path, tmp_path: Path) -> None:
    options = CompileOptions(precision="bf16")
    compiled = compile_model(saved, "test", Cache(tmp_path / "cache"), detect("avx2"), lambda *_: None, options)
    assert compiled.manifest.precision == "fp32"
    assert compiled.manifest.key == model_key(saved, detect("avx2"))


def test_a_target_has_what_a_precision_uses() -> None:
    avx512 = TARGETS["avx512"]
    zen4 = frozenset({*avx512.features, "avx512_bf16", "avx512_vnni"})
    sapphire_rapids = zen4 | {"amx_bf16", "amx_tile", "amx_int8"}
    assert for_precision(avx512, "fp32", zen4) == avx512
    assert for_precision(avx512, "bf16", frozenset(avx512.features)) == avx512
    assert for_precision(avx512, "bf16", zen4).extensions == ("avx512_bf16",)
    assert for_precision(avx512, "bf16", sapphire_rapids).extensions == ("amx_bf16", "amx_tile", "avx512_bf16")
    assert for_precision(TARGETS["avx2"], "bf16", sapphire_rapids) == TARGETS["avx2"]


def test_tiles_count_only_if_they_work() -> None:
    has_tiles = "amx_tile" in extended(TARGETS["avx512"]).extensions
    if has_tiles:
        assert request_tiles(), "a process may ask again"
        assert tiles_work()
    else:
        names = Path("/proc/cpuinfo").read_text().split()
        assert "amx_bf16" not in names or not tiles_work()
