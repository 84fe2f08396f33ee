"""Inputs of one integer that decide what is computed: which ones do, and models in which they are fixed."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import parser

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.deciding_inputs import find_deciding_inputs
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.frontend.simplify import simplify

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '
THEN, OTHER = "a () => (float[4] s) {s = Relu(x)}", "b () => (float[4] s) {s = Neg(x)}"
CASES = {
    "If": ("bool n", f"y = If<then_branch = {THEN}, else_branch = {OTHER}>(n)", ("n",)),
    "through others": ("int64[1] n", "m = Add(n, n) y = Expand(x, m)", ("n",)),
    "Range": (
        "int64 n",
        "z = Constant<value = int64 {0}>() o = Constant<value = int64 {1}>() y = Range(z, n, o)",
        ("n",),
    ),
    "a number that is computed with": ("int64[1] n", "f = Cast<to = 1>(n) y = Mul(x, f)", ()),
    "only its shape": ("int64[1] n", "m = Shape(n) y = Expand(x, m)", ()),
    "several numbers": ("int64[2] n", "y = Expand(x, n)", ()),
    "a fraction": ("float[1] n", "m = Cast<to = 7>(n) y = Expand(x, m)", ()),
}


@pytest.mark.parametrize("name", CASES)
def test_which_inputs_decide(name: str) -> None:
    declared, nodes, expected = CASES[name]
    model = parser.parse_model(f"{HEAD} (float[4] x, {declared}) => (y) {{ {nodes} }}")
    assert find_deciding_inputs(model) == expected


def saved(folder: Path, text: str) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(parser.parse_model(HEAD + text).SerializeToString())
    return path


def test_a_fixed_value_leaves_a_static_model_with_all_inputs(tmp_path: Path) -> None:
    inner = "c () => (float[K] s) {s = Slice(x, zero, n, zero)}, else_branch = d () => (float[K] s) {s = Exp(x)}"
    path = saved(
        tmp_path,
        f"""(float[4] x, int64[1] n) => (float[K] y) <int64[1] zero = {{0}}, int64[1] three = {{3}}>
        {{ yes = Less(n, three) y = If<then_branch = {inner}>(yes) }}""",
    )
    session = onnxruntime.InferenceSession(path)
    for value, length in ((2, 2), (3, 4), (-1, 3)):
        graph = simplify(read_graph(path, {"n": value}))
        assert graph.inputs == ("x", "n")
        assert graph.types["y"].shape == (length,)
        (answer,) = session.run(None, {"x": np.ones(4, np.float32), "n": np.array([value])})
        assert answer.shape == (length,)


@pytest.mark.parametrize(
    ("declared", "sizes", "reason"),
    [
        ("float[4] x, int32[1] n", {"n": 1 << 40}, "input 'n' cannot be 1099511627776"),
        ("float[4] x, bool[1] n", {"n": 2}, "input 'n' cannot be 2"),
        ("float[4] x, int64[2] n", {"n": 2}, "input 'n' is not one integer"),
        ("float[L] x, int64[1] n", {"L": -1}, "dimension 'L' cannot have the size -1"),
        ("float[L] x, int64[1] n", {"L": 4, "k": 1}, "no input has a symbolic dimension 'k'"),
    ],
)
def test_what_cannot_be_fixed(declared: str, sizes: dict[str, int], reason: str, tmp_path: Path) -> None:
    path = saved(tmp_path, f"({declared}) => (y) {{ y = Relu(x) }}")
    with pytest.raises(UnsupportedModelError, match=reason):
        read_graph(path, sizes)
