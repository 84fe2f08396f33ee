"""Products of 8-bit numbers are exact, whichever engine computes them, and whatever the processor has."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gangway.artifact.onnx_session import open_session, products_saturate
from gangway.base.host_limits import cpu_flags
from testing.exact_integers import exact_session
from tests.helpers.onnx_models import save_model
from tests.helpers.targets import NAMES

node = helper.make_node
SCALE, OUTPUT_SCALE = np.float32(0.02), np.float32(4)
OUTPUTS, DEPTH = 48, 320
QUANTISED = {"s": SCALE, "z": np.uint8(0), "ws": np.float32(0.01), "wz": np.int8(0), "os": OUTPUT_SCALE,
             "oz": np.uint8(128)}  # fmt: skip


def weights() -> Any:
    """Weights of 8 bits, of which two beside each other leave 16 bits when they are multiplied by 255."""
    random = np.random.default_rng(17)
    signs = random.choice([-1, 1], (DEPTH // 2, OUTPUTS)).repeat(2, 0)
    return (random.integers(96, 128, (DEPTH, OUTPUTS)) * signs).astype(np.int8)


QUANTISE = node("QuantizeLinear", ["x", "s", "z"], ["xq"])
DEQUANTISE = node("DequantizeLinear", ["yq", "os", "oz"], ["y"])
NODES = {
    "pairs": [
        QUANTISE, node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]),
        node("MatMul", ["xd", "wd"], ["m"]), node("QuantizeLinear", ["m", "os", "oz"], ["yq"]), DEQUANTISE,
    ],
    "linear": [QUANTISE, node("QLinearMatMul", ["xq", "s", "z", "w", "ws", "wz", "os", "oz"], ["yq"]), DEQUANTISE],
    "integer": [QUANTISE, node("MatMulInteger", ["xq", "w", "z"], ["sums"]), node("Cast", ["sums"], ["f"], to=1),
                node("Mul", ["f", "both"], ["y"])],
}  # fmt: skip


def saved(kind: str, path: Path) -> Path:
    constants: Mapping[str, Any] = {**QUANTISED, "w": weights(), "both": SCALE * QUANTISED["ws"]}
    read = {name for item in NODES[kind] for name in item.input}
    constants = {name: value for name, value in constants.items() if name in read}
    return save_model(path, NODES[kind], {"x": [4, DEPTH]}, {"y": [4, OUTPUTS]}, constants)


def numbers(kind: str) -> tuple[dict[str, Any], Any]:
    """Return inputs, mostly large, and what is right, in 64 bits."""
    x = np.random.default_rng(3).uniform(0, 256 * SCALE, (4, DEPTH)).astype(np.float32)
    x[0] = 255 * SCALE
    sums = np.clip(np.rint(x / SCALE), 0, 255).astype(np.int64) @ weights().astype(np.int64)
    products = sums * (SCALE * QUANTISED["ws"]).astype(np.float64)
    if kind == "integer":
        return {"x": x}, products
    return {"x": x}, (np.clip(np.rint(products / OUTPUT_SCALE) + 128, 0, 255) - 128) * OUTPUT_SCALE


def tolerance(kind: str) -> float:
    """A number half way between two integers may become either."""
    return 1e-3 if kind == "integer" else float(OUTPUT_SCALE)


@pytest.mark.parametrize("kind", NODES)
def test_sessions_do_not_saturate(tmp_path: Path, kind: str) -> None:
    path = saved(kind, tmp_path / "model.onnx")
    feeds, expected = numbers(kind)
    for session in (open_session(path), open_session(path, exact=True), exact_session(path)):
        (found,) = session.run(None, feeds)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=tolerance(kind))
        assert np.mean(np.abs(found - expected) > 1e-3 * np.abs(expected).max()) < 0.05


@pytest.mark.parametrize("kind", NODES)
@pytest.mark.parametrize("target", NAMES)
def test_kernels_do_not_saturate(
    tmp_path: Path, compile_file: Callable[..., Any], load_artifact: Callable[[Path], Any], kind: str, target: str
) -> None:
    compiled = compile_file(saved(kind, tmp_path / "model.onnx"), target)
    feeds, expected = numbers(kind)
    if compiled.manifest.fallback_reason:
        (found,) = open_session(compiled.folder / compiled.manifest.whole_file).run(None, feeds)
    else:
        found = load_artifact(compiled.folder)(feeds)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=tolerance(kind))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", NODES)
def test_what_is_saved_for_processors_without_vnni(tmp_path: Path, kind: str, exact: bool) -> None:
    """Weights are uint8 there, with which onnxruntime's products are exact as they are."""
    path, made = saved(kind, tmp_path / "model.onnx"), tmp_path / "saved.onnx"
    open_session(path, save=made, exact=exact)
    kinds = {tensor.data_type for tensor in onnx.load(made).graph.initializer if len(tensor.dims) == 2}
    assert kinds == {TensorProto.UINT8 if exact else TensorProto.INT8}
    feeds, expected = numbers(kind)
    if exact:
        (found,) = open_session(made, optimise=False).run(None, feeds)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=tolerance(kind))


def test_who_needs_it() -> None:
    assert products_saturate() == (not {"avx512_vnni", "avx_vnni"} & cpu_flags())


def test_flags_are_those_of_the_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 avx_vnni\n\nflags\t\t: fpu\n")
    assert cpu_flags(tmp_path) == {"fpu", "avx2", "avx_vnni"}
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert not cpu_flags(tmp_path)
