"""The ensemble of `benchmarks.python_models.pipeline` is answered as numpy and onnxruntime compute it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.python_models.pipeline.repository import CLASSIFIER, asked, echo_asked, write_pipeline
from testing.live_server import live_server
from testing.load import is_right, raw_channel, raw_infer
from testing.repository import onnx_file

TIMEOUT_S = 30
CONFIG = """
platform: "onnxruntime_onnx" max_batch_size: 8
input { name: "input" data_type: TYPE_FP32 dims: [3, 224, 224] }
output { name: "output" data_type: TYPE_FP32 dims: [1000] }
"""


def write_classifier(repository: Path) -> None:
    """A classifier with the tensors of the benchmark's that compiles at once: the mean colour, times a matrix."""
    weights = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    nodes = [
        helper.make_node("GlobalAveragePool", ["input"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["output"]),
    ]
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])
        for name, shape in (("input", [3, 224, 224]), ("output", [1000]))
    ]
    graph = helper.make_graph(
        nodes, "classifier", tensors[:1], tensors[1:], [numpy_helper.from_array(weights, "weights")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = onnx_file(repository, CLASSIFIER)
    path.parent.mkdir(parents=True)
    onnx.save(model, path)
    (repository / CLASSIFIER / "config.pbtxt").write_text(CONFIG)


@pytest.mark.long
def test_the_ensemble_answers_as_its_parts_do_without_a_server(tmp_path: Path) -> None:
    """With more clients than instances, too, so that requests come while an instance computes."""
    write_classifier(tmp_path / "models")
    write_pipeline(tmp_path / "models", instances=1)
    image, echo = asked(tmp_path / "models"), echo_asked()
    flags = [f"--cache-dir={tmp_path / 'cache'}"]
    with live_server(tmp_path / "models", flags) as server, raw_channel(server.url) as channel:
        infer = raw_infer(channel)
        assert is_right(infer(echo.request, timeout=TIMEOUT_S), echo.outputs)
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda _: infer(image.request, timeout=TIMEOUT_S), range(64))
            assert all(is_right(answer, image.outputs) for answer in answers)
