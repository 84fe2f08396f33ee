"""Index arithmetic over the batch: what picks numbers of its own row only is accepted, what may reach others is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gangway.compiler.errors import UnsupportedModelError
from tests.helpers.batch_networks import SEQUENCE, integers, is_row_by_row, numbers, refusal

node = helper.make_node
Case = tuple[list[Any], dict[str, Any]]
BATCH = [node("Shape", ["x"], ["n1"], start=0, end=1), node("Squeeze", ["n1"], ["n"])]
ROWS = [*BATCH, node("Range", ["zero", "n", "one"], ["rows"])]
ONE_EACH = helper.make_tensor("value", TensorProto.INT64, [1], [1])
LARGEST = [
    node("ReduceMax", ["x", "last"], ["scores"], keepdims=0),
    node("TopK", ["scores", "two"], ["largest", "where"]),
]
SMALL = {
    **{"zero": np.array(0), "one": np.array(1), "four": np.array(4), "axis1": integers(1), "axis2": integers(2)},
    **{
        "two": integers(2),
        "last": integers(-1),
        "all": integers(-1),
        "slots": integers(-1, 6),
        "many": integers(-1, 24),
    },
}


def offsets(step: int, shape: tuple[int, ...] = (-1, 1)) -> Case:
    """`offsets`: `step` times the number of each row, a column."""
    return [*ROWS, node("Mul", ["rows", "step"], ["steps"]), node("Reshape", ["steps", "column"], ["offsets"])], {
        "step": np.array(step),
        "column": integers(*shape),
    }


def picked(source: str, places: str, step: int, **constants: Any) -> Case:
    """What a flattened tensor has at `places` behind the offset of each row."""
    nodes, more = offsets(step)
    gather = [
        node("Add", [places, "offsets"], ["indices"]),
        node("Reshape", ["x", source], ["flat"]),
        node("Gather", ["flat", "indices"], ["y"]),
    ]
    return [*nodes, *gather], more | constants


def strided(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Case:
    """A tensor as a view of strides, as torch's exporter spells that out: axis by axis, from the last one on."""
    nodes = [*BATCH, node("Concat", ["n1", "sizes"], ["size"], axis=0)]
    constants: dict[str, Any] = {"sizes": integers(*sizes), "far": integers(99), "one_float": np.ones(1, np.float32)}
    indices = "origin"
    for axis in reversed(range(len(strides))):
        constants |= {
            f"a{axis}": np.array(axis),
            f"from{axis}": integers(axis),
            f"stride{axis}": np.array(strides[axis]),
        }
        ones = ["one_float"] * (len(strides) - 1 - axis)
        nodes += [
            node("Slice", ["size", f"from{axis}", "far"], [f"behind{axis}"]),
            node("Expand", [indices, f"behind{axis}"], [f"more{axis}"]),
            node("Gather", ["size", f"a{axis}"], [f"length{axis}"]),
            node("Range", ["zero", f"length{axis}", "one"], [f"range{axis}"]),
            node("Mul", [f"range{axis}", f"stride{axis}"], [f"steps{axis}"]),
            node("Reshape", [f"length{axis}", "all"], [f"vector{axis}"]),
            node("Cast", [f"vector{axis}"], [f"floats{axis}"], to=TensorProto.FLOAT),
            node("Concat", [f"floats{axis}", *ones], [f"shape{axis}"], axis=0),
            node("Cast", [f"shape{axis}"], [f"whole{axis}"], to=TensorProto.INT64),
            node("Reshape", [f"steps{axis}", f"whole{axis}"], [f"places{axis}"]),
            node("Add", [f"more{axis}", f"places{axis}"], [f"indices{axis}"]),
        ]
        indices = f"indices{axis}"
    nodes += [node("Reshape", ["x", "all"], ["flat"]), node("Gather", ["flat", indices], ["y"])]
    return nodes, constants | {"origin": integers(0)}


def tuples(where: str) -> list[Any]:
    """Pairs of a row's number and a place in it."""
    return [
        *ROWS,
        node("Unsqueeze", ["rows", "axis1"], ["column"]),
        node("Shape", [where], ["shape"]),
        node("Expand", ["column", "shape"], ["numbers"]),
        node("Unsqueeze", ["numbers", "axis2"], ["numbers2"]),
        node("Unsqueeze", [where, "axis2"], ["where2"]),
        node("Concat", ["numbers2", "where2"], ["pairs"], axis=-1),
    ]


COUNTED = [  # as exporters spell out where to write a causal mask; shapes follow through Where, and its value is small
    *BATCH,
    node("Concat", ["n1", "sizes"], ["size"], axis=0),
    node("Equal", ["size", "open"], ["is_open"]),
    node("Where", ["is_open", "ones", "size"], ["shape"]),
    node("Expand", ["mask", "shape"], ["masks"]),
    node("Shape", ["masks"], ["lengths"]),
    node("Gather", ["lengths", "zero"], ["count"]),
    node("Range", ["zero", "count", "one"], ["numbers"]),
    node("Reshape", ["numbers", "column"], ["places"]),
    node("GatherND", ["x", "places"], ["y"]),
]
COUNTED_BY = {"open": integers(-1), "ones": integers(1, 1, 1), "column": integers(-1, 1)}
APART: dict[str, Case] = {
    **{
        f"rows of a mask of {length} numbers": (
            COUNTED,
            COUNTED_BY | {"mask": np.ones((1, 1, length), "f"), "sizes": integers(1, length)},
        )
        for length in (1, 6, 60)
    },
    "all of it, as ranges": picked("all", "columns", 24, columns=np.arange(24).reshape(1, 24)),
    "all of it, transposed": picked("all", "columns", 24, columns=np.arange(24).reshape(4, 6).T.reshape(1, 24)),
    "view of strides": strided((4, 6), (24, 6, 1)),
    "view of strides, windows": strided((3, 2, 4), (24, 6, 2, 1)),
    "largest of each row": ([*LARGEST, *(made := picked("slots", "where", 4))[0]], made[1]),
    "largest of each row, as pairs": ([*LARGEST, *tuples("where"), node("GatherND", ["x", "pairs"], ["y"])], {}),
    "largest of each row, repeated and flattened": (
        [
            *LARGEST,
            *ROWS,
            node("Unsqueeze", ["rows", "axis1"], ["column"]),
            node("Tile", ["column", "times"], ["repeated"]),
            node("Reshape", ["repeated", "all"], ["numbers"]),
            node("Reshape", ["where", "all"], ["places"]),
            node("Less", ["places", "zero"], ["is_negative"]),
            node("Add", ["places", "four"], ["from_end"]),
            node("Where", ["is_negative", "from_end", "places"], ["positive"]),
            node("Unsqueeze", ["numbers", "last"], ["numbers2"]),
            node("Unsqueeze", ["positive", "last"], ["places2"]),
            node("Concat", ["numbers2", "places2"], ["pairs"], axis=-1),
            node("GatherND", ["x", "pairs"], ["found"]),
            node("Concat", ["n1", "two", "last"], ["back"], axis=0),
            node("Reshape", ["found", "back"], ["y"]),
        ],
        {"times": integers(1, 2)},
    ),
    "largest of all, its box and class": (
        [
            node("Reshape", ["x", "many"], ["scores"]),
            node("TopK", ["scores", "five"], ["largest", "where"]),
            node("Div", ["where", "six"], ["box"]),
            node("Mod", ["where", "six"], ["class"]),
            *tuples("box"),
            node("GatherND", ["x", "pairs"], ["boxes"]),
            node("Cast", ["class"], ["label"], to=TensorProto.FLOAT),
            node("Unsqueeze", ["label", "axis2"], ["labels"]),
            node("Concat", ["boxes", "labels"], ["y"], axis=2),
        ],
        {"five": integers(5), "six": np.array(6)},
    ),
    "negated in a flattened tensor": (
        [
            *LARGEST,
            *(made := offsets(4))[0],
            node("Add", ["where", "offsets"], ["indices"]),
            node("Reshape", ["indices", "all"], ["places"]),
            node("Reshape", ["scores", "all"], ["flat"]),
            node("Reshape", ["largest", "all"], ["found"]),
            node("Neg", ["found"], ["new"]),
            node("ScatterElements", ["flat", "places", "new"], ["changed"]),
            node("Reshape", ["changed", "back"], ["y"]),
        ],
        made[1] | {"back": integers(-1, 4)},
    ),
    "table for each row and head": (
        [
            *BATCH,
            node("Concat", ["n1", "axis1", "axis1"], ["times"], axis=0),
            node("Tile", ["table", "times"], ["tables"]),
            node("Reshape", ["x", "heads"], ["queries"]),
            node("MatMul", ["queries", "tables"], ["products"]),
            node("Reshape", ["products", "back"], ["y"]),
        ],
        {"table": numbers(2, 6, 3), "heads": integers(-1, 2, 6), "back": integers(-1, 4, 3)},
    ),
    "expanded, -1 where the length stays": (
        [
            *BATCH,
            node("Concat", ["n1", "all", "all"], ["wanted"], axis=0),
            node("Shape", ["wanted"], ["rank"]),
            node("ConstantOfShape", ["rank"], ["ones"], value=ONE_EACH),
            node("Mul", ["ones", "all"], ["stays"]),
            node("Equal", ["wanted", "stays"], ["is_open"]),
            node("Where", ["is_open", "ones", "wanted"], ["shape"]),
            node("Expand", ["table", "shape"], ["tables"]),
            node("Add", ["x", "tables"], ["y"]),
        ],
        {"table": numbers(1, 4, 6)},
    ),
    "rows counted by a running sum": (
        [
            *BATCH,
            node("ConstantOfShape", ["n1"], ["ones"], value=ONE_EACH),
            node("CumSum", ["ones", "zero"], ["counted"]),
            node("Sub", ["counted", "one"], ["rows"]),
            node("Mul", ["rows", "four"], ["steps"]),
            node("Unsqueeze", ["steps", "axis1"], ["offsets"]),
            node("Add", ["offsets", "columns"], ["indices"]),
            node("Reshape", ["x", "slots"], ["flat"]),
            node("Gather", ["flat", "indices"], ["y"]),
        ],
        {"columns": integers(3, 0).reshape(1, 2)},
    ),
    "batch behind another axis, flattened": (
        [
            *ROWS,
            node("Transpose", ["x"], ["turned"], perm=[1, 0, 2]),
            node("Reshape", ["turned", "slots"], ["flat"]),
            node("Mul", ["n", "three"], ["begin"]),
            node("Add", ["rows", "begin"], ["indices"]),
            node("Gather", ["flat", "indices"], ["y"]),
        ],
        {"three": np.array(3)},
    ),
    "each row three times": (
        [
            *ROWS,
            node("Unsqueeze", ["rows", "axis1"], ["column"]),
            node("Expand", ["column", "thrice"], ["columns"]),
            node("Reshape", ["columns", "all"], ["indices"]),
            node("Gather", ["x", "indices"], ["more"]),
            node("Reshape", ["more", "back"], ["y"]),
        ],
        {"thrice": integers(1, 3), "back": integers(-1, 3, 4, 6)},
    ),
    "two batches, one behind the other": (
        [
            node("Neg", ["x"], ["negative"]),
            node("Concat", ["x", "negative"], ["both"], axis=0),
            node("Relu", ["both"], ["positive"]),
            node("Split", ["positive"], ["first", "second"], axis=0, num_outputs=2),
            node("Sub", ["first", "second"], ["y"]),
        ],
        {},
    ),
    "two batches, cut at the number of rows": (
        [
            *BATCH,
            node("Neg", ["x"], ["negative"]),
            node("Concat", ["x", "negative"], ["both"], axis=0),
            node("Slice", ["both", "begin", "n1"], ["first"]),
            node("Slice", ["both", "n1", "end"], ["second"]),
            node("Sub", ["first", "second"], ["y"]),
        ],
        {"begin": integers(0), "end": integers(2**63 - 1)},
    ),
    "shape of what is larger": (
        [
            *ROWS,
            node("Unsqueeze", ["rows", "axis1"], ["column"]),
            node("Max", ["column", "columns"], ["larger"]),
            node("Shape", ["larger"], ["shape"]),
            node("Expand", ["column", "shape"], ["numbers"]),
            node("Expand", ["columns", "shape"], ["places"]),
            node("Unsqueeze", ["numbers", "axis2"], ["numbers2"]),
            node("Unsqueeze", ["places", "axis2"], ["places2"]),
            node("Concat", ["numbers2", "places2"], ["pairs"], axis=-1),
            node("GatherND", ["x", "pairs"], ["y"]),
        ],
        {"columns": np.arange(3).reshape(1, 3)},
    ),
}
UNBOUNDED: Callable[[str], list[Any]] = lambda limit: [  # noqa: E731
    node("Slice", ["x", "begin", "end", "axes"], ["first"]),
    node("Reshape", ["first", "column"], ["column1"]),
    node("Cast", ["column1"], ["places"], to=TensorProto.INT64),
    *offsets(4)[0],
    node("Add", ["places", "offsets"], ["indices"]),
    node("Reshape", ["x", "slots"], ["flat"]),
    node("Shape", ["flat"], ["shape"]),
    node("Gather", ["shape", "zero"], ["count"]),
    node("Sub", ["count", "one"], ["most"]),
    node("Clip", ["indices", "zero", limit], ["limited"]),
    node("Gather", ["flat", "limited"], ["y"]),
]
MIXED: dict[str, Case] = {
    "numbers of rows up to 1, as truth values": (
        [
            *ROWS,
            node("Cast", ["rows"], ["is_later"], to=TensorProto.BOOL),
            node("Cast", ["is_later"], ["indices"], to=TensorProto.INT64),
            node("Gather", ["x", "indices"], ["y"]),
        ],
        {},
    ),
    "sums of data and of the number of rows": (
        [
            *BATCH,
            node("Cast", ["n"], ["fraction"], to=TensorProto.FLOAT),
            node("Add", ["x", "fraction"], ["more"]),
            node("CumSum", ["more", "one"], ["y"]),
        ],
        {},
    ),
    "view of strides that reaches the next row": strided((4, 6), (6, 6, 1)),
    "one place before each row": picked("all", "columns", 24, columns=np.arange(24).reshape(1, 24) - 1),
    "wrong length of a row": ([*LARGEST, *(made := picked("slots", "where", 2))[0]], made[1]),
    "data lead to other rows": (
        UNBOUNDED("most"),
        offsets(4)[1] | {"begin": integers(0, 0), "end": integers(1, 1), "axes": integers(1, 2)},
    ),
    "other numbers from three rows on": (
        [
            *BATCH,
            node("Greater", ["n", "axis2"], ["is_large"]),
            node("Where", ["is_large", "half", "whole"], ["factor"]),
            node("Mul", ["x", "factor"], ["y"]),
        ],
        {"half": np.float32(0.5), "whole": np.float32(1)},
    ),
    "number of rows, up to two": (
        [
            *BATCH,
            node("Min", ["n", "axis2"], ["limited"]),
            node("Cast", ["limited"], ["factor"], to=TensorProto.FLOAT),
            node("Mul", ["x", "factor"], ["y"]),
        ],
        {},
    ),
    "table by the number of the row": (
        [*ROWS, node("Gather", ["table", "rows"], ["own"]), node("Add", ["x", "own"], ["y"])],
        {"table": numbers(50, 4, 6)},
    ),
    "table up to the number of rows": (
        [*BATCH, node("Slice", ["table", "begin", "n1"], ["own"]), node("Add", ["x", "own"], ["y"])],
        {"table": numbers(50, 4, 6), "begin": integers(0)},
    ),
    "mark at the number of the row": (
        [
            *ROWS,
            node("Unsqueeze", ["rows", "axis1"], ["column"]),
            node("Equal", ["column", "columns"], ["is_here"]),
            node("Cast", ["is_here"], ["mark"], to=TensorProto.FLOAT),
            node("Unsqueeze", ["mark", "axis2"], ["marks"]),
            node("Add", ["x", "marks"], ["y"]),
        ],
        {"columns": np.arange(4).reshape(1, 4)},
    ),
    "the next row": (
        [
            *ROWS,
            node("Add", ["rows", "one"], ["next"]),
            node("Mod", ["next", "n"], ["indices"]),
            node("Gather", ["x", "indices"], ["y"]),
        ],
        {},
    ),
    "the first row for all": (
        [*ROWS, node("Mul", ["rows", "zero"], ["indices"]), node("Gather", ["x", "indices"], ["y"])],
        {},
    ),
    "the last row for all": (
        [
            *ROWS,
            node("Sub", ["rows", "rows"], ["zeros"]),
            node("Sub", ["n", "one"], ["most"]),
            node("Add", ["zeros", "most"], ["indices"]),
            node("Gather", ["x", "indices"], ["y"]),
        ],
        {},
    ),
    "number of the row in the answer": (
        [
            *ROWS,
            node("Unsqueeze", ["rows", "axis1"], ["column"]),
            node("ArgMax", ["x"], ["best"], axis=1, keepdims=0),
            node("Add", ["best", "column"], ["sum"]),
            node("Cast", ["sum"], ["y"], to=TensorProto.FLOAT),
        ],
        {},
    ),
    "two batches, cut elsewhere": (
        [
            node("Neg", ["x"], ["negative"]),
            node("Concat", ["x", "negative"], ["both"], axis=0),
            node("Reshape", ["both", "pairs"], ["paired"]),
            node("ReduceSum", ["paired", "axis1"], ["sum"], keepdims=0),
            node("Reshape", ["sum", "back"], ["y"]),
        ],
        {"pairs": integers(-1, 2, 24), "back": integers(-1, 4, 6)},
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_stays_in_its_row(network: Any, tmp_path: Path, name: str) -> None:
    nodes, constants = APART[name]
    graph = network(nodes, SEQUENCE, {"y": None}, SMALL | constants, opset=18)
    path = graph.save(tmp_path / "model.onnx")
    assert is_row_by_row(path, graph)
    assert refusal(path) is None


@pytest.mark.parametrize("name", MIXED)
def test_what_may_leave_its_row(network: Any, tmp_path: Path, name: str) -> None:
    nodes, constants = MIXED[name]
    graph = network(nodes, SEQUENCE, {"y": None}, SMALL | constants, opset=18)
    path = graph.save(tmp_path / "model.onnx")
    assert is_row_by_row(path, graph) is False
    assert isinstance(refusal(path), UnsupportedModelError)


def test_a_type_without_room_for_the_number_of_a_row(network: Any, tmp_path: Path) -> None:
    for kind in (TensorProto.UINT8, TensorProto.FLOAT, TensorProto.INT32):
        nodes = [
            *ROWS,
            node("Cast", ["rows"], ["other"], to=kind),
            node("Cast", ["other"], ["indices"], to=TensorProto.INT64),
            node("Gather", ["x", "indices"], ["y"]),
        ]
        path = network(nodes, SEQUENCE, {"y": None}, SMALL, opset=18).save(tmp_path / "model.onnx")
        assert (refusal(path) is None) == (kind == TensorProto.INT32)


@pytest.mark.parametrize("name", ["all of it, as ranges", "view of strides"])
def test_all_of_a_tensor_costs_nothing(network: Any, check: Callable[..., list[str]], name: str) -> None:
    nodes, constants = APART[name]
    given = [node("MatMul", ["given", "weights"], ["x"]), *nodes, node("MatMul", ["y", "others"], ["answer"])]
    constants = {**SMALL, **constants, "weights": numbers(6, 6), "others": numbers(24 if "ranges" in name else 6, 3)}
    layers = check(network(given, {"given": ["N", 4, 6]}, {"answer": None}, constants, opset=18))
    assert [name for name in layers if name not in ("Pack", "Unpack")] == ["MatMul", "MatMul"]


def test_halves_of_two_batches_are_compiled(network: Any, check: Callable[..., list[str]]) -> None:
    nodes, constants = APART["two batches, one behind the other"]
    given = [node("MatMul", ["given", "weights"], ["x"]), *nodes]
    check(
        network(given, {"given": ["N", 4, 6]}, {"y": None}, {**SMALL, **constants, "weights": numbers(6, 6)}, opset=18)
    )
