"""Which models compute the rows of a batch apart: whatever is accepted gives, in onnxruntime, the same answers row by
row as all at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gangway.compiler.errors import MixedRowsError, UnsupportedModelError
from tests.helpers.batch_networks import SEQUENCE, integers, is_row_by_row, numbers, refusal

node = helper.make_node


ROWS_OF_GEMM = [
    node("Reshape", ["x", "rows"], ["a"]),
    node("Gemm", ["a", "w"], ["b"]),
    node("Reshape", ["b", "tokens"], ["y"]),
]
DYNAMIC_SHAPE = [
    node("Shape", ["x"], ["shape"]),
    node("Gather", ["shape", "zero"], ["batch"], axis=0),
    node("Unsqueeze", ["batch", "axis0"], ["batch1"]),
    node("Concat", ["batch1", "heads"], ["target"], axis=0),
    node("Reshape", ["x", "target"], ["a"]),
    node("Transpose", ["a"], ["y"], perm=[0, 2, 1, 3]),
]
ATTENTION = [
    node("Transpose", ["x"], ["k"], perm=[0, 2, 1]),
    node("MatMul", ["x", "k"], ["s"]),
    node("Softmax", ["s"], ["p"], axis=-1),
    node("MatMul", ["p", "x"], ["y"]),
]
EXPANDED_MASK = [
    node("Shape", ["x"], ["shape"]),
    node("ConstantOfShape", ["shape"], ["zeros"]),
    node("Add", ["x", "zeros"], ["a"]),
    node("Expand", ["c", "shape"], ["more"]),
    node("Add", ["a", "more"], ["y"]),
]
APART = {
    "gemm on [N x S, C]": (ROWS_OF_GEMM, {"rows": integers(-1, 6), "w": numbers(6, 5), "tokens": integers(-1, 4, 5)}),
    "shape of a dynamic batch": (
        DYNAMIC_SHAPE,
        {"zero": np.array(0), "axis0": integers(0), "heads": integers(4, 2, 3)},
    ),
    "attention": (ATTENTION, {}),
    "numbers as many as rows": (EXPANDED_MASK, {"c": numbers(1, 1, 6)}),
    "batch in the middle and back": (
        [
            node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
            node("MatMul", ["t", "w"], ["m"]),
            node("ReduceMean", ["m"], ["r"], axes=[0], keepdims=0),
            node("Identity", ["r"], ["y"]),
        ],
        {"w": numbers(6, 5)},
    ),
    "heads x batch as one axis": (
        [
            node("Reshape", ["x", "split"], ["s"]),
            node("Transpose", ["s"], ["t"], perm=[2, 0, 1, 3]),
            node("Reshape", ["t", "merged"], ["m"]),
            node("Relu", ["m"], ["r"]),
            node("Reshape", ["r", "apart"], ["a"]),
            node("Transpose", ["a"], ["y"], perm=[1, 2, 0, 3]),
        ],
        {"split": integers(0, 4, 2, 3), "merged": integers(-1, 4, 3), "apart": integers(2, -1, 4, 3)},
    ),
    "slice of everything": (
        [node("Slice", ["x", "from", "to", "axes"], ["y"])],
        {"from": integers(0, 1), "to": integers(2**63 - 1, 3), "axes": integers(0, 1)},
    ),
    **{
        f"slice of everything, {kind.__name__}, {start} to {end}": (
            [node("Slice", ["x", "from", "to"], ["y"])],
            {"from": np.full(3, start, kind), "to": np.full(3, end, kind)},
        )
        for kind, start, end in (
            (np.int64, 0, 10**9),
            (np.int64, -(2**63), 2**63 - 1),
            (np.int64, -(10**9), 2**31 - 1),
            (np.int32, 0, 10**9),
            (np.int32, -(2**31), 2**31 - 1),
        )
    },
    "slice to the number of rows": (
        [
            node("Shape", ["x"], ["shape"]),
            node("Slice", ["shape", "zero", "two"], ["sizes"]),
            node("Slice", ["x", "from", "sizes"], ["y"]),
        ],
        {"zero": integers(0), "two": integers(2), "from": integers(0, 1)},
    ),
    "gather": ([node("Gather", ["x", "last"], ["y"], axis=1)], {"last": np.array(-1)}),
    "einsum": ([node("Einsum", ["x", "x"], ["y"], equation="bij,bkj->bik")], {}),
}
NUMBERED = [
    node("Shape", ["x"], ["shape"]),
    node("Gather", ["shape", "zero"], ["batch"]),
    node("Range", ["zero", "batch", "one"], ["range"]),
    node("Reshape", ["range", "column"], ["numbers"]),
    node("Unsqueeze", ["batch", "axis"], ["batches"]),
    node("Concat", ["batches", "many"], ["places"], axis=0),
    node("Expand", ["numbers", "places"], ["rows"]),
    node("Expand", ["others", "places"], ["columns"]),
]
PLACES = [*NUMBERED, node("Concat", ["rows", "columns"], ["indices"], axis=2)]
NUMBERS = {
    **{"zero": np.array(0), "one": np.array(1), "axis": integers(0), "column": integers(-1, 1, 1)},
    **{"many": integers(3, 1), "others": integers(3, 0, 2).reshape(1, 3, 1)},
}
APART |= {
    "numbered rows, gathered": ([*PLACES, node("GatherND", ["x", "indices"], ["y"])], NUMBERS),
    "numbered rows, replaced": (
        [
            *PLACES,
            node("GatherND", ["x", "indices"], ["part"]),
            node("Relu", ["part"], ["new"]),
            node("ScatterND", ["x", "indices", "new"], ["y"]),
        ],
        NUMBERS,
    ),
    "places behind the batch": (
        [
            node("Transpose", ["x"], ["t"], perm=[1, 2, 0]),
            node("GatherND", ["t", "at"], ["g"]),
            node("Transpose", ["g"], ["y"], perm=[1, 0]),
        ],
        {"at": integers(3, 1, 0, 2).reshape(2, 2)},
    ),
    "new numbers along a row": (
        [
            node("TopK", ["x", "two"], ["largest", "where"]),
            node("Neg", ["largest"], ["new"]),
            node("ScatterElements", ["x", "where", "new"], ["y"], axis=2),
        ],
        {"two": integers(2)},
    ),
    "samples of a grid": (
        [
            node("Reshape", ["x", "image"], ["i"]),
            node("Reshape", ["x", "pairs"], ["g"]),
            node("GridSample", ["i", "g"], ["y"]),
        ],
        {"image": integers(-1, 2, 3, 4), "pairs": integers(-1, 3, 4, 2)},
    ),
    "product of integers": (
        [
            node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
            node("MatMulInteger", ["q", "w", "zero"], ["m"]),
            node("Cast", ["m"], ["y"], to=TensorProto.FLOAT),
        ],
        {"scale": np.float32(0.02), "zero": np.uint8(128), "w": np.arange(30, dtype=np.int8).reshape(6, 5)},
    ),
}
MIXED = {
    "numbered rows in reverse": (
        [
            *NUMBERED,
            node("Sub", ["batch", "one"], ["last"]),
            node("Sub", ["last", "rows"], ["reverse"]),
            node("Concat", ["reverse", "columns"], ["indices"], axis=2),
            node("GatherND", ["x", "indices"], ["y"]),
        ],
        NUMBERS,
    ),
    "first row at certain places": (
        [node("GatherND", ["x", "at"], ["g"]), node("Add", ["x", "g"], ["y"])],
        {"at": integers(0, 3).reshape(1, 2)},
    ),
    "new numbers in the first row": (
        [node("ScatterND", ["x", "at", "new"], ["y"])],
        {"at": integers(0, 3).reshape(1, 2), "new": numbers(1, 6)},
    ),
    "sum over the batch": ([node("ReduceSum", ["x", "axis"], ["y"], keepdims=1)], {"axis": integers(0)}),
    "sum of everything": ([node("ReduceMean", ["x"], ["s"], keepdims=1), node("Add", ["x", "s"], ["y"])], {}),
    "softmax over the batch": ([node("Softmax", ["x"], ["y"], axis=0)], {}),
    "reshape that moves the batch": ([node("Reshape", ["x", "to"], ["y"])], {"to": integers(4, -1, 6)}),
    "reshape that moves it, and another back": (
        [node("Reshape", ["x", "to"], ["a"]), node("Softmax", ["a"], ["b"]), node("Reshape", ["b", "back"], ["y"])],
        {"to": integers(6, -1), "back": integers(-1, 4, 6)},
    ),
    "transpose, then a view of the first axis": (
        [
            node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
            node("Reshape", ["t", "to"], ["a"]),
            node("Relu", ["a"], ["y"]),
        ],
        {"to": integers(-1, 4, 6)},
    ),
    "batch as the second axis of the answer": ([node("Transpose", ["x"], ["y"], perm=[1, 0, 2])], {}),
    "number of rows as a number": (
        [
            node("Shape", ["x"], ["shape"]),
            node("Gather", ["shape", "zero"], ["batch"], axis=0),
            node("Cast", ["batch"], ["factor"], to=TensorProto.FLOAT),
            node("Mul", ["x", "factor"], ["y"]),
        ],
        {"zero": np.array(0)},
    ),
    "number of rows, tile": (
        [
            node("Shape", ["x"], ["shape"]),
            node("Slice", ["shape", "from", "to"], ["batch"]),
            node("Concat", ["one", "batch", "one"], ["times"], axis=0),
            node("Tile", ["x", "times"], ["y"]),
        ],
        {"from": integers(0), "to": integers(1), "one": integers(1)},
    ),
    "numbered rows": (
        [
            node("Shape", ["x"], ["shape"]),
            node("Gather", ["shape", "zero"], ["batch"], axis=0),
            node("Range", ["zero", "batch", "one"], ["range"]),
            node("Cast", ["range"], ["factor"], to=TensorProto.FLOAT),
            node("Reshape", ["factor", "column"], ["factors"]),
            node("Add", ["x", "factors"], ["y"]),
        ],
        {"zero": np.array(0), "one": np.array(1), "column": integers(-1, 1, 1)},
    ),
    "product of rows": (
        [
            node("Flatten", ["x"], ["f"]),
            node("Transpose", ["f"], ["t"]),
            node("MatMul", ["f", "t"], ["m"]),
            node("ReduceSum", ["m", "axis"], ["s"], keepdims=1),
            node("Mul", ["f", "s"], ["y"]),
        ],
        {"axis": integers(1)},
    ),
    "rows in reverse": (
        [node("Slice", ["x", "from", "to", "axes", "steps"], ["y"])],
        {"from": integers(-1), "to": integers(-(2**62)), "axes": integers(0), "steps": integers(-1)},
    ),
    "last row": (
        [node("Slice", ["x", "from", "to"], ["a"]), node("Add", ["x", "a"], ["y"])],
        {"from": integers(-1), "to": integers(10**9)},
    ),
    "slice of another axis to the number of rows": (
        [
            node("Shape", ["x"], ["shape"]),
            node("Slice", ["shape", "zero", "one"], ["rows"]),
            node("Slice", ["x", "zero", "rows", "one"], ["a"]),
            node("ReduceSum", ["a", "one"], ["y"]),
        ],
        {"zero": integers(0), "one": integers(1)},
    ),
    "first row": ([node("Gather", ["x", "first"], ["a"]), node("Add", ["x", "a"], ["y"])], {"first": integers(0)}),
    "running sum": ([node("CumSum", ["x", "zero"], ["y"])], {"zero": np.array(0)}),
    "einsum": ([node("Einsum", ["x", "x"], ["y"], equation="bij,aij->bj")], {}),
    "broadcast against seven constants": (
        [node("Reshape", ["x", "to"], ["f"]), node("Add", ["f", "c"], ["y"])],
        {"to": integers(-1, 24), "c": numbers(7, 24)},
    ),
}


@pytest.mark.parametrize("upper", [0, 1])
def test_a_triangle_of_rows_is_no_row_by_itself(
    network: Any, compile_file: Callable[..., Any], tmp_path: Path, upper: int
) -> None:
    nodes = [node("Trilu", ["x"], ["y"], upper=upper)]
    path = network(nodes, {"x": ["N", 5]}, {"y": None}, {}).save(tmp_path / "model.onnx")
    assert "batch" in compile_file(path).manifest.fallback_reason
    path = network(nodes, {"x": ["N", 3, 5]}, {"y": None}, {}).save(tmp_path / "images.onnx")
    assert not compile_file(path).manifest.fallback_reason


@pytest.mark.parametrize("name", APART)
def test_rows_that_are_computed_apart(network: Any, tmp_path: Path, name: str) -> None:
    nodes, constants = APART[name]
    graph = network(nodes, SEQUENCE, {"y": None}, constants)
    path = graph.save(tmp_path / "model.onnx")
    assert is_row_by_row(path, graph)
    assert refusal(path) is None


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_mixed(network: Any, tmp_path: Path, name: str) -> None:
    nodes, constants = MIXED[name]
    graph = network(nodes, SEQUENCE, {"y": None}, constants)
    path = graph.save(tmp_path / "model.onnx")
    assert is_row_by_row(path, graph) is False
    assert isinstance(refusal(path), UnsupportedModelError)


Grow = Callable[[np.random.Generator, str, str, list[int]], tuple[list[Any], dict[str, Any]]]


def _reshape(random: np.random.Generator, x: str, y: str, shape: list[int]) -> tuple[list[Any], dict[str, Any]]:
    """To random axes: the factors of the shape, in their order or not, the batch wherever -1 stands."""
    factors = [2, 2, 3] if random.random() < 0.8 else [4, 3]
    target = [int(n) for n in random.permutation(factors)]
    target.insert(int(random.choice([0, 0, 0, 0, 0, 0, 1, 2])), -1)
    return [node("Reshape", [x, f"{y}_shape"], [y])], {f"{y}_shape": integers(*target)}


def _transpose(random: np.random.Generator, x: str, y: str, shape: list[int]) -> tuple[list[Any], dict[str, Any]]:
    """Mostly one that leaves the first axis alone."""
    order = random.permutation(len(shape)) if random.random() < 0.4 else [0, *(1 + random.permutation(len(shape) - 1))]
    return [node("Transpose", [x], [y], perm=[int(n) for n in order])], {}


def _axis(random: np.random.Generator, shape: list[int]) -> int:
    return int(random.integers(len(shape))) if random.random() < 0.3 else len(shape) - 1


def _softmax(random: np.random.Generator, x: str, y: str, shape: list[int]) -> tuple[list[Any], dict[str, Any]]:
    return [node("Softmax", [x], [y], axis=_axis(random, shape))], {}


def _mean(random: np.random.Generator, x: str, y: str, shape: list[int]) -> tuple[list[Any], dict[str, Any]]:
    mean = node("ReduceMean", [x], [f"{y}_mean"], axes=[_axis(random, shape)], keepdims=1)
    return [mean, node("Sub", [x, f"{y}_mean"], [y])], {}


def _twice(random: np.random.Generator, x: str, y: str, shape: list[int]) -> tuple[list[Any], dict[str, Any]]:
    axis = _axis(random, shape)
    total = node("Concat", [x, x], [f"{y}_both"], axis=axis)
    return [total, node("Split", [f"{y}_both"], [f"{y}_first", y], axis=axis)], {}


@pytest.mark.parametrize("seed", range(24))
def test_random_models(network: Any, tmp_path: Path, seed: int) -> None:
    """What is accepted is computed row by row, what is said to mix rows is not; of the others it is not known."""
    random = np.random.default_rng(seed)
    steps: list[Grow] = [_reshape, _transpose, _softmax, _mean, _twice]
    nodes: list[Any] = []
    constants: dict[str, Any] = {"end": integers(-1, 12)}
    x, shape = "x", [1, 4, 3]
    for index in range(4):
        added, more = steps[random.integers(len(steps))](random, x, f"t{index}", shape)
        nodes, constants, x = [*nodes, *added], {**constants, **more}, f"t{index}"
        if added[0].op_type == "Reshape":
            shape = [1] * len(more[f"{x}_shape"])
    nodes.append(node("Reshape", [x, "end"], ["y"]))
    graph = network(nodes, {"x": ["N", 4, 3]}, {"y": None}, constants)
    path = graph.save(tmp_path / "model.onnx")
    why = refusal(path)
    if why is None or isinstance(why, MixedRowsError):
        assert is_row_by_row(path, graph) == (why is None)
    else:
        assert isinstance(why, UnsupportedModelError)
        assert "rows of the batch" in str(why) or "batch of 7 is impossible" in str(why)


@pytest.mark.parametrize("outputs", [("y", "x"), ("x", "y"), ("x",)])
@pytest.mark.parametrize("declared", [None, ["N", 6], ["other", 6], ["N", 7]])
def test_an_input_may_be_an_output(
    network: Any, compile_file: Any, load_artifact: Any, tmp_path: Path, outputs: tuple[str, ...], declared: Any
) -> None:
    """What is declared of the output, even wrongly, is no reason to look at one number of rows only."""
    shapes = {"x": declared, "y": ["N", 5]}
    model = network(
        [node("MatMul", ["x", "w"], ["y"])],
        {"x": ["N", 6]},
        {name: shapes[name] for name in outputs},
        {"w": numbers(6, 5)},
    )
    compiled = compile_file(model.save(tmp_path / "model.onnx"))
    assert compiled.manifest.batched
    assert not compiled.manifest.fallback_reason
    x = numbers(1, 6)
    answers = load_artifact(compiled.folder)({"x": x})
    np.testing.assert_array_equal(answers["x"], x)
    assert answers.keys() == {*outputs}
