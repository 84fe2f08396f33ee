"""Numbers too small for full precision: sums of products take them as zeros, all other layers keep them."""

from pathlib import Path

import numpy as np

from gangway.executor.launch import available_cores
from testing.gang_runner import GangRunner
from tests.conftest import CompileKept
from tests.helpers import onnx_text

# What is small stays a layer of its own, since others read what it adds.
SHAPE = "float[N, 16, 4, 4]"
GRAPH = f"""({SHAPE} x) => ({SHAPE} conv, {SHAPE} sum, {SHAPE} product, {SHAPE} small) {{
    conv = Conv(x, w)
    sum = Add(x, x)
    product = MatMul(x, x)
    small = Add(conv, x)
}}"""


def test_only_sums_of_products_take_them_as_zeros(tmp_path: Path, compile_kept: CompileKept) -> None:
    path = onnx_text.write(tmp_path / "model.onnx", GRAPH, w=np.eye(16, dtype=np.float32)[:, :, None, None])
    folder = compile_kept(path, "subnormal", tmp_path).folder
    values = np.full((1, 16, 4, 4), 3e-39, np.float32)
    values[:, ::2] = 2
    values[:, :, 0] = 1e-38  # whose products are smaller still
    with GangRunner(folder.parent, available_cores()[:1]) as runner:
        answers = runner.run(runner.open_model(folder), {"x": values}, 1).outputs
    kept = np.where(values < np.finfo(np.float32).tiny, 0, values)
    np.testing.assert_array_equal(answers["conv"], kept)
    np.testing.assert_array_equal(answers["product"], kept @ kept)
    np.testing.assert_array_equal(answers["sum"], values + values)
    np.testing.assert_array_equal(answers["small"], kept + values)
