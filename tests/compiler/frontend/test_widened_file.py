"""Files of halves that onnxruntime refuses are served by it as float32 where sizes are open, and the check says so."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

from gangway.artifact.format import Engine
from gangway.artifact.onnx_session import open_session, run_session
from gangway.compiler.check.file_check import CompiledRows, ServedBy, check_file
from gangway.compiler.errors import EndedApartError, UnsupportedModelError
from gangway.compiler.frontend.widened_file import or_widened

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
RANDOM = np.random.default_rng(5)
WEIGHTS = {
    "m": RANDOM.standard_normal((32, 32)) / 6,  # read one by one
    "b": RANDOM.standard_normal(32),  # small
    "w": RANDOM.standard_normal((32, 4, 3, 3)) / 6,
}
MIXED = """g (float[N, T, 32] x) => (float[N, T, 32] y)
    { h = Cast<to = 10>(x) p = MatMul(h, m) a = Add(p, b) c = Cast<to = 1>(a) y = Mul(c, p) }"""
MODELS = {
    "two types in one node": (MIXED, np.float16, (2, 5, 32)),
    "bfloat16": (
        "g (bfloat16[N, 4, H, W] x) => (bfloat16[N, 32, H, W] y) { c = Conv<pads = [1, 1, 1, 1]>(x, w) y = Relu(c) }",
        ml_dtypes.bfloat16,
        (2, 4, 9, 6),
    ),
}


def model_of(text: str, dtype: Any, opset: int = 17) -> onnx.ModelProto:
    model = parser.parse_model(f"{HEADER.replace('17', str(opset))} {text}")
    for name, value in WEIGHTS.items():
        if any(name in node.input for node in model.graph.node):
            model.graph.initializer.append(numpy_helper.from_array(value.astype(dtype), name))
    return model


def in_float32(text: str) -> onnx.ModelProto:
    """Return the model whose weights are those of halves, but float32 as all that it computes."""
    dtype = MODELS["bfloat16"][1] if "bfloat16" in text else np.float16
    model = model_of(text.replace("bfloat16", "float").replace("to = 10", "to = 1"), np.float32)
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor).astype(dtype).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_halves_that_onnxruntime_refuses(tmp_path: Path, compile_file: Callable[..., Any], name: str) -> None:
    text, dtype, shape = MODELS[name]
    path, model = tmp_path / "model.onnx", model_of(text, dtype)
    onnx.save(model, path)
    with pytest.raises(Exception, match=r"Type|NOT_IMPLEMENTED"):
        onnxruntime.InferenceSession(path)
    compiled = compile_file(path)
    assert compiled.manifest.engine is Engine.ONNXRUNTIME
    assert [spec.datatype for spec in compiled.manifest.inputs] == ["BF16" if "bfloat16" in text else "FP32"]
    found = check_file(path)
    assert (found.served_by, found.rows) == (ServedBy.KERNELS, CompiledRows.ANY)
    x = RANDOM.standard_normal(shape).astype(np.float32).astype(dtype).astype(np.float32)
    (wanted,) = onnxruntime.InferenceSession(in_float32(text).SerializeToString()).run(None, {"x": x})
    session = open_session(compiled.folder / "onnx" / "model.onnx")
    halves = {"x", "y"} if "bfloat16" in text else set[str]()
    (answer,) = run_session(session, ["y"], {"x": x.astype(dtype).view(np.uint16) if halves else x}, halves)
    answer = answer.view(dtype).astype(np.float32) if halves else answer
    np.testing.assert_allclose(answer, wanted, rtol=float(ml_dtypes.finfo(dtype).eps), atol=1e-5)


def test_halves_that_end_onnxruntime(tmp_path: Path) -> None:
    """Versions 1.31 and 1.32 end with some files, and answer them as float32."""
    path = tmp_path / "model.onnx"

    def look(parts: Iterable[bytes] | None) -> onnx.ModelProto:
        if parts is None:
            raise EndedApartError("it ends the process by SIGSEGV")
        return onnx.ModelProto.FromString(b"".join(parts))

    for text, dtype in ((MIXED, np.float16), (MIXED.replace("to = 10", "to = 1"), np.float32)):
        onnx.save(model_of(text, dtype), path)
        if dtype is np.float16:
            assert or_widened(path, look).graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        else:
            with pytest.raises(EndedApartError):
                or_widened(path, look)


def test_what_float32_does_not_mend_is_refused_as_it_is(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    path = tmp_path / "model.onnx"
    text = "g (float16[N, T, 32] x) => (float16[N, T, 32] y) { p = MatMul(x, m) y = Unheard(p) }"
    onnx.save(model_of(text, np.float16), path)
    with pytest.raises(UnsupportedModelError, match="Unheard"):
        compile_file(path)


def test_kernels_alone_do_not_serve_open_sizes(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    """Requests of a size are answered by onnxruntime until the size is compiled, and that has no such operator."""
    path = tmp_path / "model.onnx"
    text = "g (float[N, SIZE, 32] x) => (float[N, SIZE, 32] y) { p = MatMul(x, m) y = SwiGLU(p, x) }"
    onnx.save(model_of(text.replace("SIZE", "4"), np.float32, opset=28), path)
    assert check_file(path).served_by is ServedBy.KERNELS
    onnx.save(model_of(text.replace("SIZE", "T"), np.float32, opset=28), path)
    found = check_file(path)
    assert (found.served_by, found.open_sizes) == (ServedBy.NOTHING, ("T",))
    assert "SwiGLU" in found.reason
    with pytest.raises(UnsupportedModelError, match="SwiGLU"):
        compile_file(path)
