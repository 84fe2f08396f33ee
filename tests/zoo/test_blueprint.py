"""Models written without being held in memory: valid bytes, always the same, few at a time."""

import io
import tracemalloc
from typing import BinaryIO, cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gangway.zoo import build
from gangway.zoo.graph import ModelGraph, Normal, Uniform, Weight

MEGABYTE = 1 << 20


def written(graph: ModelGraph) -> bytes:
    file = io.BytesIO()
    graph.write(file)
    return file.getvalue()


@pytest.mark.parametrize("name", ["mlp", "simple", "mobilenetv2", "googlenet"])
def test_the_bytes_are_those_that_protobuf_would_write(name: str) -> None:
    content = written(build(name))
    model = onnx.load_from_string(content)
    assert model.SerializeToString(deterministic=True) == content
    onnx.checker.check_model(model, full_check=True)
    assert content == written(build(name))


def test_a_model_without_weights_has_its_nodes_and_shapes() -> None:
    bare, model = build("mlp").without_weights(), onnx.load_from_string(written(build("mlp")))
    assert list(bare.graph.node) == list(model.graph.node)
    assert [tuple(t.dims) for t in bare.graph.initializer] == [tuple(t.dims) for t in model.graph.initializer]
    assert bare.ByteSize() < 2000


def test_weights_follow_their_distribution() -> None:
    random = np.random.default_rng(1)
    normal = Normal(0.5).draw(random, (100, 1000))
    assert abs(normal.mean()) < 0.01
    assert normal.std() == pytest.approx(0.5, rel=0.01)
    balanced = Normal(0.5, balanced=True).draw(random, (100, 200, 5))
    assert np.abs(balanced.sum(axis=(1, 2))).max() < 1e-3
    assert balanced.std() == pytest.approx(0.5, rel=0.01)
    uniform = Uniform(0.8, 1.2).draw(random, (10_000,))
    assert uniform.dtype == np.float32
    assert 0.8 <= uniform.min() < 0.81
    assert 1.19 < uniform.max() <= 1.2


def test_only_one_weight_is_in_memory_at_a_time() -> None:
    class Nowhere:
        size = 0

        def write(self, content: bytes | memoryview) -> None:
            self.size += len(content)

    weights = [Weight(f"w{index}", (1024, 1024), Normal(1.0)) for index in range(6)]  # 4 MiB each
    info = helper.make_tensor_value_info("w0", TensorProto.FLOAT, [1024, 1024])
    graph = ModelGraph("big", 1, [], [numpy_helper.from_array(np.zeros(3), "c"), *weights], [], [info])
    file = Nowhere()
    tracemalloc.start()
    try:
        graph.write(cast(BinaryIO, file))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert file.size > 24 * MEGABYTE
    assert peak < 9 * MEGABYTE  # one being written, one being drawn
