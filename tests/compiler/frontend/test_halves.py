"""Models of float16 and bfloat16 are computed in float32; inputs, outputs and their types stay those of the file."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from gangway.artifact.cache import Cache
from gangway.artifact.format import Engine
from gangway.clients.inputs import Array
from gangway.compiler.comparison.candidate import CandidateMemory, CompiledCandidate
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
DTYPES: Mapping[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
MODELS = {
    "convolution": """g (KIND[N, 32, 9, 9] x) => (KIND[N, 32, 9, 9] y)
        { c = Conv<pads = [1, 1, 1, 1]>(x, w) r = Relu(c) y = Add(r, x) }""",
    "casts within": """g (float[N, 8] x) => (float[N, 8] y)
        { h = Cast<to = NUMBER>(x) s = MatMul(h, m) t = Mul(s, h) y = Cast<to = 1>(t) }""",
    "a branch that sees them": """g (KIND[8, 8] x, bool c) => (KIND[8, 8] y, KIND[8, 8] e)
        { e = MatMul(x, m) y = If<then_branch = t () => (KIND[8, 8] a) { a = Add(e, x) },
                                  else_branch = f () => (KIND[8, 8] b) { b = Sub(x, e) }>(c) }""",
    "an output within": """g (KIND[N, 8] x) => (KIND[N, 8] a, KIND[N, 8] y) { a = MatMul(x, m) y = Mul(a, a) }""",
    "other types beside": """g (KIND[N, 8] x, int64[N, 1] i) => (KIND[N, 1] y, int64[N, 1] j)
        { p = MatMul(x, m) g = GatherElements<axis = 1>(p, i) y = Neg(g) j = Add(i, i) }""",
}
WEIGHTS = {"w": (32, 32, 3, 3), "m": (8, 8)}


def model_of(text: str, kind: str) -> onnx.ModelProto:
    number = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}[kind]
    model = parser.parse_model(f"{HEADER} {text.replace('KIND', kind).replace('NUMBER', str(number))}")
    for name, shape in WEIGHTS.items():
        if any(name in node.input for node in model.graph.node):
            numbers = np.random.default_rng(0).standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
            raw = numbers.astype(DTYPES[kind]).tobytes()
            model.graph.initializer.append(helper.make_tensor(name, number, shape, raw, raw=True))
    return model


NAMES = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "int64": "INT64"}


def reference(model: onnx.ModelProto, name: str, feeds: Mapping[str, Array]) -> list[Array]:
    """What onnxruntime answers to the same numbers in float32: it has few kernels for bfloat16."""
    wide = parser.parse_model(f"{HEADER} {MODELS[name].replace('KIND', 'float').replace('NUMBER', '1')}")
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        wide.graph.initializer.append(numpy_helper.from_array(values, tensor.name))
    numbers = {key: value.astype(np.float32) if value.dtype.itemsize == 2 else value for key, value in feeds.items()}
    answers: list[Array] = onnxruntime.InferenceSession(wide.SerializeToString()).run(None, numbers)
    return answers


def feeds_of(model: onnx.ModelProto) -> dict[str, Array]:
    random, feeds = np.random.default_rng(1), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value or 1 for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        numbers = random.integers(0, 2, shape) if dtype.kind in "bi" else random.standard_normal(shape)
        feeds[value.name] = np.asarray(numbers).astype(dtype)
    return feeds


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[[onnx.ModelProto], tuple[Any, Path]]:
    def compile_(model: onnx.ModelProto) -> tuple[Any, Path]:
        path = tmp_path / "model.onnx"
        path.write_bytes(model.SerializeToString())
        return compile_model(path, "m", Cache(tmp_path / "cache"), detect(), lambda *_: None), path

    return compile_


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", [name for name in MODELS if "branch" not in name])
def test_answers(compiled: Callable[[onnx.ModelProto], tuple[Any, Path]], name: str, kind: str) -> None:
    model = model_of(MODELS[name], kind)
    found, path = compiled(model)
    feeds = feeds_of(model)
    expected = reference(model, name, feeds)
    assert found.manifest.engine is Engine.NATIVE, found.manifest.fallback_reason
    candidate = CompiledCandidate.of(read_graph(path), found.manifest, found.folder)
    memory = CandidateMemory.of(candidate, feeds)
    for call in candidate.calls(memory):
        call()
    for wanted, spec, output in zip(expected, found.manifest.outputs, memory.outputs, strict=True):
        dtype = np.dtype(DTYPES[kind]) if spec.datatype in ("FP16", "BF16") else wanted.dtype
        assert spec.datatype == NAMES[dtype.name]
        got = output.view(dtype).reshape(wanted.shape)
        # Weights and inputs are the file's; the answer is rounded once.
        unit = 2**-8 if dtype.name == "bfloat16" else 2**-10
        np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=unit, atol=unit * 1e-2)


def test_float16_takes_the_kernels_of_float32(compiled: Callable[[onnx.ModelProto], tuple[Any, Path]]) -> None:
    half, _ = compiled(model_of(MODELS["convolution"], "float16"))
    operators = [layer.operator for layer in half.manifest.layers]
    assert "Conv+Relu+Add" in operators or "Conv+Relu" in operators, operators
    assert not half.manifest.islands


@pytest.mark.parametrize("kind", DTYPES)
def test_types_of_the_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.onnx"
    for text in MODELS.values():
        model = model_of(text, kind)
        path.write_bytes(model.SerializeToString())
        graph = read_graph(path)
        for value in (*model.graph.input, *model.graph.output):
            expected = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
            assert graph.types[value.name].dtype == expected
        inner = {
            graph.types[name].dtype
            for node in graph.nodes
            for name in node.outputs
            if name not in graph.outputs and name in graph.types
        }
        assert kind not in inner
        assert all(value.dtype.name != kind for value in graph.constants.values())


@pytest.mark.parametrize(
    "text",
    [
        "g (float16[8, 8] x) => (float16[8, 8] x, float16[8, 8] y) { y = MatMul(x, x) }",  # x cannot be two types
        "g (float16[2] x) => (float16[2] y) { a = Neg(x) y = Exp(a) }",  # nothing is gained
        "g (float[8, 8] x) => (float[8, 8] y) { h = Cast<to = 10>(x) a = Cast<to = 1>(h) y = MatMul(a, a) }",
    ],
)
def test_what_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model_of(text, "float16").SerializeToString())
    graph = read_graph(path)
    inner = {graph.types[node.outputs[0]].dtype for node in graph.nodes}
    assert "float16" in inner
