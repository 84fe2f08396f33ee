"""Which layers a batch computes pass by pass, and that its answers are those of onnxruntime."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from gangway.compiler.place.costs import Passes, passes_of
from gangway.executor.launch import available_cores
from gangway.executor.leases import passes_for
from testing.gang_runner import GangRunner
from tests.conftest import CompileKept
from tests.helpers import onnx_text

MB = 1 << 20
ROWS = (2, 3, 5, 8)


@pytest.mark.parametrize(
    ("activations", "weights", "passes"),
    [
        ([4, 4, 2, 1], [0, 1, 4, 9], Passes(2, 1)),
        ([4, 1, 4, 1], [0, 2, 1, 9], Passes(3, 1)),  # what the second loses the third makes up for
        ([4, 1, 4, 1], [0, 5, 1, 9], Passes(0, 1)),  # one layer is no pass
        ([1, 1, 1], [2, 2, 2], Passes(0, 1)),
        ([1, 1, 1], [0, 0, 0], Passes(3, 1)),
    ],
)
def test_the_layers_are_those_that_save_most(activations: list[int], weights: list[int], passes: Passes) -> None:
    assert passes_of([MB * one for one in activations], [MB * one for one in weights]) == passes


def test_a_pass_has_the_rows_that_stay_in_the_cache() -> None:
    assert passes_of([MB // 8, MB // 16], [0, 0]) == Passes(2, 8)


# Two convolutions of a large image -> pooling -> a dense layer with many weights.
NETWORK = """(float[N, 3, 160, 160] x) => (float[N, 500] y) {
    a = Conv<pads=[1, 1, 1, 1]>(x, c)
    b = Relu(a)
    e = Conv<pads=[1, 1, 1, 1]>(b, d)
    f = MaxPool<kernel_shape=[10, 10], strides=[10, 10]>(e)
    g = Flatten(f)
    y = MatMul(g, w)
}"""
WEIGHTS = {"c": (16, 3, 3, 3), "d": (16, 16, 3, 3), "w": (16 * 16 * 16, 500)}


def test_answers_match_onnxruntime(tmp_path: Path, compile_kept: CompileKept) -> None:
    network = onnx_text.write(tmp_path / "model.onnx", NETWORK, **onnx_text.weights_of(6, WEIGHTS, 0.1))
    folder = compile_kept(network, "passes", tmp_path).folder
    session = onnxruntime.InferenceSession(str(network))
    random = np.random.default_rng(7)
    with GangRunner(folder.parent, available_cores()[:2]) as runner:
        model = runner.open_model(folder, max(ROWS))
        layers, rows = model.manifest.pass_layers, model.manifest.pass_rows
        assert 2 <= layers < len(model.manifest.layers)
        assert passes_for(layers, rows, max(ROWS), 1) == max(ROWS), "a row of it fills the cache"
        for ranks in {1, min(2, len(available_cores()))}:
            for count in ROWS:
                x = random.standard_normal((count, 3, 160, 160), np.float32)
                (expected,) = session.run(["y"], {"x": x})
                answer = runner.run(model, {"x": x}, ranks).outputs["y"]
                np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
