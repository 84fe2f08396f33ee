"""Recurrent layers as loops, compiled with one step after the other, against onnxruntime: alone and in batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gangway.artifact.format import Engine
from tests.helpers.onnx_models import save_model

Array = Any
Compare = Callable[..., list[str]]
node = helper.make_node
FLOAT, WHOLE, TRUTH = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
STEPS, WIDE, STATE = 5, 6, 8
RANDOM = np.random.default_rng(8)
WEIGHTS = {
    "w": RANDOM.standard_normal((WIDE, STATE)).astype(np.float32) / 3,
    "r": RANDOM.standard_normal((STATE, STATE)).astype(np.float32) / 3,
    "b": RANDOM.standard_normal(STATE).astype(np.float32),
}
NUMBERS = {"zero": np.array(0), "one": np.array(1), "true": np.array(True), "axis": np.array([0]), "two": np.array([2])}
VALUE = helper.make_tensor_value_info
CELL = [
    node("MatMul", ["item", "w"], ["a"]),
    node("MatMul", ["h", "r"], ["c"]),
    node("Add", ["a", "c"], ["d"]),
    node("Add", ["d", "b"], ["e"]),
    node("Tanh", ["e"], ["new"]),
]


@pytest.fixture
def compare(tmp_path: Path, compile_file: Any, load_artifact: Any) -> Compare:
    """Return the function that compares the answers for `x`, [rows, steps, channels]; it returns layers' operators."""

    def compare(
        nodes: list[Any], outputs: dict[str, list[Any]], opset: int = 17, rows: tuple[int, ...] = (1, 3)
    ) -> Any:
        constants, inputs = {**WEIGHTS, **NUMBERS}, {"x": ["N", STEPS, WIDE]}
        path = save_model(tmp_path / "model.onnx", nodes, inputs, outputs, constants, opset)
        compiled = compile_file(path)
        assert compiled.manifest.engine is Engine.NATIVE, compiled.manifest.fallback_reason
        assert compiled.manifest.batched
        run, session = load_artifact(compiled.folder), onnxruntime.InferenceSession(path)
        for count in rows:
            x = np.random.default_rng(count).standard_normal((count, STEPS, WIDE)).astype(np.float32)
            answers = [run({"x": x[row : row + 1]}) for row in range(count)]
            for name, expected in zip(outputs, session.run(list(outputs), {"x": x}), strict=True):
                found = np.concatenate([answer[name] for answer in answers])
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        return [layer.operator for layer in compiled.manifest.layers]

    return compare


def of_rows(*names: str) -> list[Any]:
    """Steps in front, and states of zeros for all rows."""
    return [
        node("Transpose", ["x"], ["turned"], perm=[1, 0, 2]),
        node("MatMul", ["x", "w"], ["wide"]),
        node("ReduceMean", ["wide"], ["flat"], axes=[1], keepdims=0),
        *(node("Sub", ["flat", "flat"], [name]) for name in names),
    ]


BACK = [node("Transpose", ["all"], ["y"], perm=[1, 0, 2])]


def loop(nodes: list[Any], states: list[str], trips: str, condition: str, outputs: list[str]) -> Any:
    """A counter `at` and the state `h` change; all states are a result, too."""
    body = helper.make_graph(
        [node("Gather", ["turned", "at"], ["item"]), *CELL, *nodes, node("Identity", ["new"], ["kept"])],
        "step",
        [VALUE("number", WHOLE, []), VALUE("on", TRUTH, []), VALUE("at", WHOLE, []), VALUE("h", FLOAT, None)],
        [VALUE("again", TRUTH, []), VALUE("next", WHOLE, []), VALUE("new", FLOAT, None), VALUE("kept", FLOAT, None)],
    )
    return node("Loop", [trips, condition, *states], outputs, body=body)


COUNTS = [
    node("Shape", ["turned"], ["shape"]),
    node("Gather", ["shape", "zero"], ["length"]),
    node("Less", ["zero", "length"], ["begins"]),
]


def test_a_loop_that_counts_to_a_length(compare: Compare) -> None:
    """As converters from Keras write it: the number of the step and a counter are both compared with the length."""
    inside = [
        node("Add", ["at", "one"], ["next"]),
        node("Less", ["number", "length"], ["few"]),
        node("Less", ["next", "length"], ["more"]),
        node("And", ["few", "more"], ["again"]),
    ]
    steps = loop(inside, ["zero", "h0"], "length", "begins", ["count", "last", "all"])
    operators = compare([*of_rows("h0"), *COUNTS, steps, *BACK], {"y": ["N", STEPS, STATE], "last": ["N", STATE]})
    assert "Loop" not in " ".join(operators)
    assert sum("Tanh" in operator for operator in operators) == STEPS


@pytest.mark.parametrize("trips", ["length", ""])
def test_a_loop_that_ends_early(compare: Compare, trips: str) -> None:
    """A condition that only a counter decides; each second step is left out."""
    inside = [
        node("Add", ["at", "one"], ["between"]),
        node("Add", ["between", "one"], ["next"]),
        node("Less", ["next", "length"], ["again"]),
    ]
    steps = loop(inside, ["zero", "h0"], trips, "true", ["count", "last", "all"])
    operators = compare([*of_rows("h0"), *COUNTS, steps, *BACK], {"y": ["N", 3, STATE], "last": ["N", STATE]}, opset=12)
    assert sum("Tanh" in operator for operator in operators) == 3


def test_a_loop_that_data_end_stays(tmp_path: Path, compile_file: Any, load_artifact: Any) -> None:
    inside = [
        node("Add", ["at", "one"], ["next"]),
        node("ReduceMax", ["new"], ["most"], keepdims=0),
        node("Less", ["most", "limit"], ["again"]),
    ]
    steps = loop(inside, ["zero", "h0"], "length", "true", ["count", "last", "all"])
    tensors = {**WEIGHTS, **NUMBERS, "limit": np.array(0.9, np.float32)}
    nodes, kinds = [*of_rows("h0"), *COUNTS, steps], ({"x": [1, STEPS, WIDE]}, {"last": [1, STATE]})
    path = save_model(tmp_path / "model.onnx", nodes, *kinds, tensors)
    compiled = compile_file(path)
    assert [layer.operator for layer in compiled.manifest.islands] == ["Loop"]
    run, session = load_artifact(compiled.folder), onnxruntime.InferenceSession(path)
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((1, STEPS, WIDE)).astype(np.float32)
        (wanted,) = session.run(None, {"x": x})
        np.testing.assert_allclose(run({"x": x})["last"], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("axis", "backward", "opset"), [(0, 0, 17), (1, 0, 21), (0, 1, 12), (1, 1, 17)])
def test_a_scan_whose_steps_need_those_before(compare: Compare, axis: int, backward: int, opset: int) -> None:
    body = helper.make_graph(
        [*CELL, node("Identity", ["new"], ["kept"])],
        "step",
        [VALUE("h", FLOAT, None), VALUE("item", FLOAT, None)],
        [VALUE("new", FLOAT, None), VALUE("kept", FLOAT, None)],
    )
    options = {"scan_input_axes": [axis], "scan_output_axes": [axis]} if axis else {}
    options |= {"scan_input_directions": [1], "scan_output_directions": [1]} if backward else {}
    source, result = ("x", "y") if axis else ("turned", "all")
    steps = node("Scan", ["h0", source], ["last", result], body=body, num_scan_inputs=1, **options)
    begin = [
        node("MatMul", ["x", "w"], ["wide"]),
        node("ReduceMax", ["wide"], ["highest"], axes=[1], keepdims=0) if opset < 18 else
        node("ReduceMax", ["wide", "axis1"], ["highest"], keepdims=0),
        node("Sub", ["highest", "highest"], ["h0"]),
    ]  # fmt: skip
    first = [node("Constant", [], ["axis1"], value=numpy_helper.from_array(np.array([1])))]
    turned = [node("Transpose", ["x"], ["turned"], perm=[1, 0, 2])]
    nodes = [*first, *turned, *begin, steps, *([] if axis else BACK)]
    operators = compare(nodes, {"y": ["N", STEPS, STATE], "last": ["N", STATE]}, opset=opset)
    assert sum("Tanh" in operator for operator in operators) == STEPS
