"""If nodes that shapes and constants decide, against onnxruntime; and those that they do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '
RANK = """shape = Shape(x) rank = Size(shape) three = Constant<value = int64 {3}>() is_three = Equal(rank, three)
    is_other = Not(is_three)"""
LENGTH = """shape = Shape(x) one = Constant<value_ints = [1]>() length = Gather(shape, one)
    four = Constant<value_ints = [4]>() is_four = Equal(length, four)"""
RELU, NEG = "(float[N, 4] t) {t = Relu(x)}", "(float[N, 4] t) {t = Neg(x)}"

NESTED = """(float[N, 4] t) {
    u = Exp(x) inner = Identity(is_four) v = If<then_branch = deep () => (float[N, 4] w) {w = Sub(u, x)},
    else_branch = shallow () => (float[N, 4] w) {w = Neg(u)}>(inner) t = Relu(v)}"""


def choice(condition: str, output: str = "y", then: str = RELU, other: str = NEG) -> str:
    return f"{output} = If<then_branch = then () => {then}, else_branch = other () => {other}>({condition})"


DECIDED = {
    "constant": "yes = Constant<value = bool {1}>() " + choice("yes"),
    "not": "yes = Constant<value = bool {1}>() no = Not(yes) " + choice("no"),
    "rank": f"{RANK} {choice('is_other')}",
    "length": f"{LENGTH} {choice('is_four')}",
    "number": "shape = Shape(x) one = Constant<value_ints = [1]>() n = Gather(shape, one) yes = Cast<to = 9>(n) "
    + choice("yes"),
    "compare": f"{LENGTH} five = Constant<value_ints = [5]>() no = Less(five, length) {choice('no')}",
    "outer": f"{LENGTH} r = Relu(x) {choice('is_four', 'z', then='(float[N, 4] t) {t = Identity(r)}')} y = Exp(z)",
    "siblings": f"{LENGTH} {choice('is_four', 'a')} {choice('is_four', 'b')} y = Sub(a, b)",
    "weights": f"""{LENGTH} {
        choice(
            "is_four",
            then='''(float[N, 4] t)
        <float[4] bias = {1, 2, 3, 4}> {t = Add(x, bias)}''',
        )
    }""",
    "nested": f"""{LENGTH} {choice("is_four", then=NESTED)}""",
    "chained": f"""{LENGTH} p = If<then_branch = a () => (s) {{s = Unsqueeze(x, one)}},
        else_branch = b () => (s) {{s = Identity(x)}}>(is_four) later = Shape(p) rank = Size(later)
        three = Constant<value = int64 {{3}}>() yes = Equal(rank, three)
        y = If<then_branch = c () => (s) {{s = Squeeze(p, one)}}, else_branch = d () => (s) {{s = Exp(p)}}>(yes)""",
    "two": f"""{LENGTH} a, b = If<then_branch = c () => (float[N, 4] s, float[N, 4] t) {{s = Exp(x) t = Relu(s)}},
        else_branch = d () => (float[N, 4] s, float[N, 4] t) {{s = Neg(x) t = Relu(s)}}>(is_four) y = Sub(a, b)""",
}
ROWS = """shape = Shape(x) zero = Constant<value_ints = [0]>() rows = Gather(shape, zero)
    one = Constant<value_ints = [1]>() is_one = Equal(rows, one) """
OPEN = {
    "numbers": "m = ReduceMax<keepdims = 0>(x) z = Relu(m) yes = Cast<to = 9>(z) ",
    "chance": "z = RandomUniform<shape = [1]>() yes = Cast<to = 9>(z) ",
    "rows": f"{ROWS} yes = Identity(is_one) ",
    "three rows": f"{ROWS} three = Constant<value_ints = [3]>() yes = Equal(rows, three) ",
    "odd rows": f"{ROWS} two = Constant<value_ints = [2]>() odd = Mod(rows, two) yes = Cast<to = 9>(odd) ",
    "many rows": f"{ROWS} many = Constant<value_ints = [100]>() yes = Less(rows, many) ",
}


def save(folder: Path, body: str, rows: str = "N") -> Path:
    text = f"{HEAD} (float[N, 4] x) => (float[N, 4] y) {{{body}}}"
    onnx.save(parser.parse_model(text.replace("N,", f"{rows},")), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("rows", ["N", "3"])
@pytest.mark.parametrize("name", DECIDED)
def test_shapes_decide(tmp_path: Path, compile_file: Any, load_artifact: Any, name: str, rows: str) -> None:
    path = save(tmp_path, DECIDED[name], rows)
    compiled = compile_file(path)
    assert not compiled.manifest.fallback_reason and compiled.manifest.batched == (rows == "N")
    x = np.random.default_rng(1).standard_normal((1 if rows == "N" else 3, 4)).astype(np.float32)
    (wanted,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})
    np.testing.assert_allclose(load_artifact(compiled.folder)({"x": x})["y"], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPEN)
def test_others_are_left_to_onnxruntime(tmp_path: Path, compile_file: Callable[[Path], Any], name: str) -> None:
    assert compile_file(save(tmp_path, OPEN[name] + choice("yes"))).manifest.fallback_reason


def test_a_known_number_of_rows_decides(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    path = save(tmp_path, OPEN["rows"] + choice("yes"))
    for rows, operator in ((1, "Relu"), (2, "Neg")):
        manifest = compile_file(path, dimensions={"N": rows}).manifest
        assert [layer.operator for layer in manifest.layers] == [operator]


@pytest.mark.parametrize("length", [1, 4])
def test_the_other_branch_may_contradict_the_shapes(
    tmp_path: Path, compile_file: Any, load_artifact: Any, length: int
) -> None:
    """That is what a condition is for: only one dimension of 1 can be taken away."""
    body = """shape = Shape(x) one = Constant<value_ints = [1]>() n = Gather(shape, one) is_one = Equal(n, one)
        y = If<then_branch = a () => (s) {s = Squeeze(x, one)}, else_branch = b () => (s) {s = Exp(x)}>(is_one)"""
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(f"{HEAD}(float[N, S] x) => (float y) {{{body}}}"), path)
    compiled = compile_file(path, dimensions={"S": length})
    x = np.random.default_rng(1).standard_normal((1, length)).astype(np.float32)
    (wanted,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})
    answer = load_artifact(compiled.folder)({"x": x})["y"]
    np.testing.assert_allclose(answer, wanted, rtol=1e-5)
    assert answer.shape == wanted.shape
