"""`gangway serve` with an input of one integer that decides what a model computes: compiled for each of its values."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from gangway.artifact.format import Engine, TensorSpec
from gangway.protos.grpc_service_pb2 import ModelInferRequest
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.scheduler.messages import LoadModel
from gangway.server.control.repository.loaded import MAX_VALUES, ModelVariants
from gangway.server.messages import ModelReady, VariantReady
from gangway.server.models.served import Models
from gangway.server.requests.codecs import Codec
from gangway.server.requests.validation import RequestPlanner
from tests.conftest import CompileKept
from tests.helpers import onnx_text
from tests.helpers.served import Served, serving

pytestmark = pytest.mark.long

TIMEOUT_S = 60
# The branches fit other lengths of x: no graph with both of them is valid for any length.
BRANCHES = """(float[1, L] x, int64 rate) => (float[1, 2] y)
<int64 sixteen = {16000}, int64[2] wide = {4, 2}, int64[2] narrow = {2, 2}, int64[1] axis = {0}> {
    yes = Equal(rate, sixteen)
    y = If<then_branch = a () => (float[1, 2] s) {p = Reshape(x, wide) s = ReduceSum<keepdims = 1>(p, axis)},
        else_branch = b () => (float[1, 2] s) {p = Reshape(x, narrow) s = ReduceMax<axes = [0], keepdims = 1>(p)}>(yes)
}"""
LENGTH = """(float[1, 8] x, int32[1] count) => (float[1, K] y)
<int64[1] zero = {0}, int64[1] one = {1}> {
    end = Cast<to = 7>(count) s = Slice(x, zero, end, one) y = Exp(s)
}"""


class Checked(Served):
    def check(self, name: str, x: npt.NDArray[np.float32], value: npt.NDArray[np.signedinteger]) -> None:
        """Compare an answer with onnxruntime's."""
        feeds = {"x": x, "rate" if name == "branches" else "count": value}
        session = onnxruntime.InferenceSession(self.repository / name / "1" / "model.onnx")
        (expected,) = session.run(None, feeds)
        np.testing.assert_allclose(self.infer(name, **feeds)["y"], expected, rtol=1e-6)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Iterator[Checked]:
    repository = tmp_path_factory.mktemp("repository")
    for name, text in (("branches", BRANCHES), ("length", LENGTH)):
        onnx_text.save(repository, name, text)
    cache_dir = tmp_path_factory.mktemp("cache")
    sizes: dict[str, list[dict[str, int]]] = {
        "branches": [{}, {"L": 8, "rate": 16000}, {"L": 4, "rate": 8000}],
        "length": [{}, *({"count": count} for count in range(1, 3))],
    }
    for name, each in sizes.items():
        for dimensions in each:
            path = repository / name / "1" / "model.onnx"
            compile_kept(path, name, cache_dir, dimensions=dimensions)
    with serving(repository, f"--cache-dir={cache_dir}", kind=Checked) as served:
        yield served


def test_each_value_is_compiled_and_answers_for_itself(served: Checked) -> None:
    random = np.random.default_rng(1)
    for rate, length in ((16000, 8), (8000, 4)):
        x = random.standard_normal((1, length)).astype(np.float32)
        served.check("branches", x, np.array(rate))
        served.wait_for(f"L={length}, rate={rate}: ready, compiled for these sizes")
    for rate, length in ((16000, 8), (8000, 4), (16000, 8), (-5, 4)):
        served.check("branches", random.standard_normal((1, length)).astype(np.float32), np.array(rate))


def test_a_value_decides_a_shape(served: Checked) -> None:
    x = np.arange(8, dtype=np.float32).reshape(1, 8)
    for count in (1, 2, 2, 1):
        served.check("length", x, np.array([count], np.int32))
        served.wait_for(f"count={count}: ready, compiled for these sizes")


def test_contents_choose_the_codec() -> None:
    """Of a request to a model that is compiled for one value; headers of all values are equal."""
    inputs = (TensorSpec("x", "FP32", (1, 8), 32), TensorSpec("rate", "INT64", (), 8, (), value_symbol="rate"))
    outputs = (TensorSpec("y", "FP32", (1, 2), 8),)
    config = ModelConfig(
        name="m",
        input=[{"name": "x", "data_type": "TYPE_FP32", "dims": [1, 8]}, {"name": "rate", "data_type": "TYPE_INT64"}],
        output=[{"name": "y", "data_type": "TYPE_FP32", "dims": [1, 2]}],
    )
    encoded = config.SerializeToString()
    ready = ModelReady(1, "m", 1, encoded, inputs, outputs, 0, 1, False, Engine.ONNXRUNTIME)
    models = Models().updated(ready).with_variant(VariantReady(2, "m", 1, (-7,), inputs, outputs, 1))
    request = ModelInferRequest(model_name="m")
    request.inputs.add(name="rate", datatype="INT64", shape=[])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 8])
    planner = RequestPlanner(models)
    for value, is_compiled in ((-7, True), (7, False), (-7, True)):
        plan = planner.plan(request.SerializeToString(), has_raws=True)
        decided = plan.decided([value.to_bytes(8, "little", signed=True), bytes(32)])
        assert isinstance(decided.codec, Codec)
        assert decided.codec.has_places == is_compiled
        assert (decided.fallback is not None) == is_compiled
        assert decided.shapes.sizes == {"rate": value}


def test_values_that_count_upwards_are_not_compiled_for_ever() -> None:
    count = TensorSpec("count", "INT32", (1,), 4, ("",), value_symbol="count")
    ready = ModelReady(1, "length", 1, b"", (count,), (), 0, 1, False)
    model = ModelVariants(ready, Path("model.onnx"), ready.symbols, LoadModel(1, "length", "", 1, 1, 0, 1))
    assert [model.may_try((value,)) for value in range(MAX_VALUES + 2)] == [True] * MAX_VALUES + [False] * 2
    assert model.may_try((0,))
