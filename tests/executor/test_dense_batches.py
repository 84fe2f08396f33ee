"""Models with dense layers in batches of every kind, on real workers, against onnxruntime."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from gangway.compiler.target import detect, for_precision
from gangway.executor.launch import available_cores
from testing.gang_runner import GangRunner, LoadedModel
from tests.conftest import CompileKept
from tests.helpers import onnx_text

ROWS = (1, 2, 3, 5, 7, 8, 13, 32)


# Image -> convolution, pooling -> dense over the whole image -> dense with a residual -> two outputs.
NETWORK = """(float[N, 3, 10, 8] x) => (float[N, 300] y, float[N, 10] z) {
    conv = Conv<pads=[1, 1, 1, 1]>(x, c)
    pool = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(conv)
    flat = Flatten(pool)
    a = Gemm(flat, w, wb)
    b = Relu(a)
    d = Gemm(b, v, vb)
    y = Add(d, b)
    z = Gemm(y, u, ub)
}"""
WEIGHTS = {"c": (32, 3, 3, 3), "w": (32 * 5 * 4, 300), "v": (300, 300), "u": (300, 10)}


def save_network(path: Path) -> Path:
    biases = onnx_text.weights_of(6, {f"{name}b": WEIGHTS[name][1:] for name in "wvu"})
    return onnx_text.write(path, NETWORK, **onnx_text.weights_of(5, WEIGHTS, 0.1), **biases)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_network(tmp_path_factory.mktemp("network") / "model.onnx")


@pytest.fixture(scope="module")
def loaded(network: Path, compile_kept: CompileKept) -> Iterator[tuple[GangRunner, LoadedModel]]:
    folder = compile_kept(network, "dense", network.parent).folder
    with GangRunner(folder.parent, available_cores()[:2]) as runner:
        yield runner, runner.open_model(folder, max(ROWS))


@pytest.mark.parametrize("ranks", [1, min(2, len(available_cores()))])
def test_answers_match_onnxruntime(network: Path, loaded: tuple[GangRunner, LoadedModel], ranks: int) -> None:
    runner, model = loaded
    session = onnxruntime.InferenceSession(str(network))
    random = np.random.default_rng(ranks)
    for rows in ROWS:
        x = random.standard_normal((rows, 3, 10, 8), np.float32)
        answers = runner.run(model, {"x": x}, ranks).outputs
        for name, expected in zip(("y", "z"), session.run(["y", "z"], {"x": x}), strict=True):
            np.testing.assert_allclose(answers[name], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.long
@pytest.mark.skipif(not for_precision(detect(), "bf16").extensions, reason="this machine has no bfloat16")
def test_rows_in_bfloat16_are_near_float32(network: Path, tmp_path: Path, compile_kept: CompileKept) -> None:
    """Workers are processes of their own, each of which must ask for tiles."""
    compiled = compile_kept(network, "dense", tmp_path, precision="bf16")
    dense = [layer for layer in compiled.manifest.layers if layer.operator.startswith("Gemm")]
    assert ["bf16" in layer.versions[0].description for layer in dense] == [True] * 3
    assert all(layer.versions[0].batch for layer in dense)
    session, random = onnxruntime.InferenceSession(str(network)), np.random.default_rng(6)
    with GangRunner(compiled.folder.parent, available_cores()[:2]) as runner:
        model = runner.open_model(compiled.folder, max(ROWS))
        for rows in ROWS:
            x = random.standard_normal((rows, 3, 10, 8), np.float32)
            answers = runner.run(model, {"x": x}, 1).outputs
            for name, expected in zip(("y", "z"), session.run(["y", "z"], {"x": x}), strict=True):
                for got, row in zip(answers[name].astype(np.float64), expected, strict=True):
                    cosine = got @ row / (np.linalg.norm(got) * np.linalg.norm(row))
                    assert cosine >= 0.998


def test_all_its_dense_layers_take_several_rows(loaded: tuple[GangRunner, LoadedModel]) -> None:
    _, model = loaded
    dense = [layer for layer in model.manifest.layers if layer.operator.startswith("Gemm")]
    assert len(dense) == 3
    assert all(version.batch for layer in dense for version in layer.versions)
    others = [layer for layer in model.manifest.layers if layer not in dense]
    assert not any(version.batch for layer in others for version in layer.versions)
