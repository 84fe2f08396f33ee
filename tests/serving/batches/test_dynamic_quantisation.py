"""`gangway serve` with a dynamically quantised model: a row's answer is that of a request of one row."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc as triton
from onnx import numpy_helper, parser
from onnxruntime.quantization import QuantType, quantize_dynamic

from gangway.compiler.place.int8 import NO_INTEGERS
from gangway.compiler.target import detect, extended, machine_features
from testing.live_server import live_server

pytestmark = pytest.mark.long

GRAPH = """<ir_version: 8, opset_import: ["": 17]>
    test (float[n, 96] x) => (float[n, 40] y) {h = MatMul(x, v) r = Relu(h) p = MatMul(r, w) y = Add(p, b)}"""
TOGETHER = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 60000 }"
REQUESTS = 12


def integers_of_this_machine() -> str:
    """What the server says that it multiplies integers by."""
    features = machine_features()
    if "avx2" not in features:
        return NO_INTEGERS
    if "avx512f" not in features:
        return "AVX2"
    if "avx512_vnni" not in features:
        return "AVX-512 without VNNI"
    return "AMX" if {"amx_int8", "amx_tile"} <= set(extended(detect()).extensions) else "VNNI"


def test_rows_of_other_requests_change_no_answer(tmp_path: Path, model_cache: Path) -> None:
    """Rows of very different size, in one request and in requests that are joined."""
    random = np.random.default_rng(5)
    model, repository = parser.parse_model(GRAPH), tmp_path / "models"
    for name, shape in {"v": (96, 200), "w": (200, 40), "b": (40,)}.items():
        value = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    path = repository / "rows" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", path, weight_type=QuantType.QUInt8)
    (repository / "rows" / "config.pbtxt").write_text(TOGETHER)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    x = (random.standard_normal((REQUESTS, 96)) * 10.0 ** random.integers(-2, 3, (REQUESTS, 1))).astype(np.float32)
    alone = np.concatenate([session.run(None, {"x": row[None]})[0] for row in x])
    (together,) = session.run(None, {"x": x})
    assert not np.allclose(alone, together, rtol=0.1), "onnxruntime's rows share a scale"
    with (
        live_server(repository, [f"--cache-dir={model_cache}"]) as server,
        triton.InferenceServerClient(server.url) as client,
    ):

        def answer(rows: np.ndarray) -> np.ndarray:
            tensor = triton.InferInput("x", rows.shape, "FP32")
            tensor.set_data_from_numpy(rows)
            return np.asarray(client.infer("rows", [tensor]).as_numpy("y"))

        told = client.get_model_config("rows").config.parameters["gangway_integers"].string_value
        assert told == integers_of_this_machine()
        np.testing.assert_allclose(answer(x[:8]), alone[:8], rtol=1e-5, atol=1e-5)
        with ThreadPoolExecutor(REQUESTS) as pool:
            joined = np.concatenate(list(pool.map(answer, np.split(x, REQUESTS))))
        np.testing.assert_allclose(joined, alone, rtol=1e-5, atol=1e-5)
