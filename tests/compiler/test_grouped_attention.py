"""GroupQueryAttention of com.microsoft, as model builders write it, compiled, against onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gangway.artifact.format import Engine
from tests.helpers.onnx_models import make_model

Array = Any
node = helper.make_node
HEADS, SHARED, SIZE = 4, 2, 32
FLOAT, WHOLE = TensorProto.FLOAT, TensorProto.INT64
ROTARY = {"do_rotary": 1}
KINDS: dict[str, tuple[list[int | str], int]] = {
    "q": (["N", "S", HEADS * SIZE], FLOAT),
    "k": (["N", "S", SHARED * SIZE], FLOAT),
    "v": (["N", "S", SHARED * SIZE], FLOAT),
    "joint": (["N", "S", (HEADS + 2 * SHARED) * SIZE], FLOAT),
    "past k": (["N", SHARED, "P", SIZE], FLOAT),
    "past v": (["N", SHARED, "P", SIZE], FLOAT),
    "shown": (["N", "T"], WHOLE),
    "places": (["N", "S"], WHOLE),
    "near": (["N", HEADS, "S", "T"], FLOAT),
}


def model(names: list[str], angles: int, attributes: dict[str, Any]) -> Any:
    """The operator behind what counts the tokens of each row; `names` of its inputs, but for those counts."""
    random = np.random.default_rng(3)
    constants = {name: random.standard_normal((40, angles)).astype(np.float32) for name in ("cos", "sin")}
    nodes = [
        node("ReduceSum", ["shown", "one"], ["sum"]),
        node("Sub", ["sum", "one"], ["last"]),
        node("Cast", ["last"], ["seqlens"], to=TensorProto.INT32),
        node("Shape", ["shown"], ["shape"]),
        node("Gather", ["shape", "second"], ["tokens"]),
        node("Cast", ["tokens"], ["total"], to=TensorProto.INT32),
        node(
            "GroupQueryAttention", [*names[:5], "seqlens", "total", *names[5:]], ["y", "keys", "values"],
            domain="com.microsoft", num_heads=HEADS, kv_num_heads=SHARED, **attributes,
        ),
    ]  # fmt: skip
    used = {name for item in nodes for name in item.input}
    constants = {name: value for name, value in constants.items() if name in used}
    inputs = {name: (kind, dims) for name, (dims, kind) in KINDS.items() if name in used}
    constants |= {"one": np.array([1]), "second": np.array(1)}
    return make_model(nodes, inputs, outputs(), constants, opset=21, ir_version=10, domains={"com.microsoft": 1})


def outputs() -> dict[str, list[int | str]]:
    later: list[int | str] = ["N", SHARED, "later", SIZE]
    return {"y": ["N", "S", HEADS * SIZE], "keys": later, "values": later}


PAST, TABLES = ["past k", "past v"], ["cos", "sin"]
APART, JOINT = ["q", "k", "v", *PAST], ["joint", "", "", *PAST]


@pytest.mark.parametrize(
    ("names", "angles", "attributes", "sizes"),
    [
        ([*APART, *TABLES], 16, ROTARY, {"S": 1, "P": 5, "T": 6}),
        ([*JOINT, *TABLES], 8, {**ROTARY, "rotary_interleaved": 1, "local_window_size": 2}, {"S": 1, "P": 9, "T": 6}),
        ([*APART, *TABLES, "places"], 16, ROTARY, {"S": 1, "P": 5, "T": 6}),
        ([*APART, "", "", "", "near"], 0, {"softcap": 2.0, "scale": 0.3}, {"S": 1, "P": 8, "T": 6}),
        ([*APART, *TABLES], 16, ROTARY, {"S": 4, "P": 9, "T": 4}),
        ([*JOINT, *TABLES], 16, {**ROTARY, "local_window_size": 3}, {"S": 3, "P": 5, "T": 8, "N": 1}),
        ([*APART, *TABLES], 16, {**ROTARY, "local_window_size": 2}, {"S": 4, "P": 0, "T": 4, "N": 1}),
    ],
    ids=["step", "buffer", "places", "bias", "first", "tokens", "empty"],
)
def test_keys_in_a_buffer(
    tmp_path: Path,
    compile_file: Any,
    load_artifact: Any,
    names: list[str],
    angles: int,
    attributes: dict[str, Any],
    sizes: dict[str, int],
) -> None:
    """Rows have as many earlier keys as their masks say; several new keys behind those are possible in one row only."""
    path = tmp_path / "model.onnx"
    path.write_bytes(model(names, angles, attributes).SerializeToString())
    compiled = compile_file(path, None, sizes)
    assert compiled.manifest.engine is Engine.NATIVE, compiled.manifest.fallback_reason
    assert compiled.manifest.batched is ("N" not in sizes)
    assert [layer.operator for layer in compiled.manifest.layers].count("FusedAttention") == 1
    random, rows = np.random.default_rng(5), sizes.get("N", 3)
    session = onnxruntime.InferenceSession(path)
    feeds: dict[str, Array] = {}
    for given in session.get_inputs():
        dims, kind = KINDS[given.name]
        shape = [{"N": rows, **sizes}.get(size, size) for size in dims]
        feeds[given.name] = random.standard_normal(shape).astype(np.float32)
        if kind == WHOLE:
            feeds[given.name] = random.integers(0, 30, shape)
    counts = [sizes["T"]] * 3 if sizes["S"] > 1 else [sizes["T"], 4, 1]
    feeds["shown"] = (np.arange(sizes["T"]) < np.array(counts[:rows])[:, None]).astype(np.int64)
    run = load_artifact(compiled.folder)
    answers = [run({name: value[row : row + 1] for name, value in feeds.items()}) for row in range(rows)]
    for output, expected in zip(outputs(), session.run(list(outputs()), feeds), strict=True):
        found = np.concatenate([answer[output] for answer in answers])
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5, err_msg=output)
