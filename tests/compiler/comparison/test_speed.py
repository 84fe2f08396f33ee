"""Quantised models that onnxruntime computes faster; the kernels here take a known time of a core."""

import struct
import subprocess
from pathlib import Path

import pytest
from onnx import parser

from gangway.artifact.format import BufferRef, Layer, MemorySpace, Version
from gangway.compiler.comparison.candidate import CompiledCandidate
from gangway.compiler.comparison.speed import is_doubtful, require_speed
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.importer import read_graph

MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[N, 8] x) => (float[N, 8] y)
<float s = {0.1}, int8 z = {0}> { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Relu(d) }"""
KERNELS = """
#include <stdint.h>
#include <time.h>

static int64_t thread_ns(void) {
    struct timespec spent;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
    return spent.tv_sec * INT64_C(1000000000) + spent.tv_nsec;
}

void compute_at_first(void *input, int32_t *weights, int32_t *output, int32_t begin, int32_t end) {
    static int calls;
    (void)input;
    for (int64_t last_ns = thread_ns() + *weights; calls < 40 && thread_ns() < last_ns;) {}
    calls++;
    for (int32_t task = begin; task < end; task++)
        output[task] = 1;
}

void compute_for(void *input, int32_t *weights, int32_t *output, int32_t begin, int32_t end) {
    (void)input;
    for (int64_t last_ns = thread_ns() + (int64_t)(end - begin) * *weights; thread_ns() < last_ns;) {}
    for (int32_t task = begin; task < end; task++)
        output[task] = 1;
}
"""
LONG_NS, SHORT_NS = 20_000_000, 1_000_000


def layer(operator: str, weights_offset: int = 0, onnx_file: str = "", symbol: str = "compute_for") -> Layer:
    arguments = (
        BufferRef(MemorySpace.INPUT, 0),
        BufferRef(MemorySpace.WEIGHTS, weights_offset),
        BufferRef(MemorySpace.OUTPUT, 0),
    )
    return Layer(
        "l",
        operator,
        "",
        arguments,
        (Version(symbol, 1, ""),),
        flops=0,
        bytes=0,
        max_ranks=1,
        onnx_file=onnx_file,
    )


def test_only_a_model_that_stays_slow_is_refused(tmp_path: Path) -> None:
    path, kernels, weights = (tmp_path / name for name in ("model.onnx", "kernels.so", "weights.bin"))
    path.write_bytes(parser.parse_model(MODEL).SerializeToString())
    source = tmp_path / "kernels.c"
    source.write_text(KERNELS)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(source), "-o", str(kernels)], check=True)
    weights.write_bytes(struct.pack("<16i", 0, *[LONG_NS] * 14, SHORT_NS))
    graph = read_graph(path)
    short, long = layer("FakeQuantise"), layer("MatMul+Relu", weights_offset=4)
    (tmp_path / "island0.onnx").write_bytes(parser.parse_model(MODEL.replace("N", "1")).SerializeToString())
    nothing = [short] * 3
    require_speed(path, {}, CompiledCandidate(graph, nothing, kernels, weights, 0))
    disturbed = layer("MatMul+Relu", weights_offset=4 * 15, symbol="compute_at_first")
    require_speed(path, {}, CompiledCandidate(graph, [disturbed], kernels, weights, 0))
    island = Layer("i", "Relu", "", (short.arguments[0], short.arguments[2]), (), 0, 0, 1, onnx_file="island0.onnx")
    with pytest.raises(UnsupportedModelError, match="onnxruntime computes most of this quantised model, such as Relu"):
        require_speed(path, {}, CompiledCandidate(graph, [short, *[island] * 3], kernels, weights, 0))
    with pytest.raises(UnsupportedModelError, match=r"times as fast as these kernels.* time for MatMul$"):
        require_speed(path, {}, CompiledCandidate(graph, [short, long, short], kernels, weights, 0))


def test_what_is_in_doubt() -> None:
    assert is_doubtful([layer("Conv"), layer("MatMul+FakeQuantise")])
    assert is_doubtful([layer("DynamicQuantizeLinear")])
    assert not is_doubtful([layer("Conv+Relu")])
    assert is_doubtful([layer("Conv"), layer("com.microsoft.DynamicQuantizeLSTM", onnx_file="island0.onnx")])
