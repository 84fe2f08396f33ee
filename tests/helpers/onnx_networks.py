"""Small ONNX networks that only onnxruntime can serve, with inputs for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Dims = Sequence[int | str]
node = helper.make_node


@dataclass(frozen=True)
class Foreign:
    """A network; `limit`: integers of its inputs are drawn from [0, limit)."""

    nodes: list[Any]
    inputs: dict[str, tuple[str, Dims]]  # numpy's type, dimensions; "N" is the batch
    outputs: dict[str, tuple[str, Dims | None]]
    constants: dict[str, Array]
    limit: int = 2

    @property
    def batched(self) -> bool:
        return any("N" in dims for _, dims in self.inputs.values())

    def save(self, path: Path, **options: Any) -> Path:
        """Write the model. Its first input goes through a branch of chance, which no compiler of layers accepts."""
        path.parent.mkdir(parents=True, exist_ok=True)
        first = next(iter(self.inputs))
        graph = helper.make_graph(
            [*_branch(first, *self.inputs[first]), *(_renamed(item, first) for item in self.nodes)],
            "foreign",
            [helper.make_tensor_value_info(name, _type(kind), dims) for name, (kind, dims) in self.inputs.items()],
            [helper.make_tensor_value_info(name, _type(kind), dims) for name, (kind, dims) in self.outputs.items()],
            [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path, **options)
        return path

    def feeds(self, rows: int, seed: int = 0) -> dict[str, Array]:
        random = np.random.default_rng(seed)
        feeds = {}
        for name, (kind, dims) in self.inputs.items():
            shape = [rows if size == "N" else int(size) for size in dims]
            numbers = (
                random.standard_normal(shape) if kind.startswith("float") else random.integers(self.limit, size=shape)
            )
            feeds[name] = np.asarray(numbers).astype(kind)
        return feeds


def _branch(name: str, kind: str, dims: Dims) -> list[Any]:
    output = helper.make_tensor_value_info("same", _type(kind), dims)
    bodies = {
        f"{branch}_branch": helper.make_graph([node("Identity", [name], ["same"])], branch, [], [output])
        for branch in ("then", "else")
    }
    return [
        node("RandomUniform", [], ["chance"], shape=[1], low=1.0, high=2.0, name="chance"),
        node("Cast", ["chance"], ["true"], to=TensorProto.BOOL),
        node("If", ["true"], [f"{name}_branched"], name="branch", **bodies),
    ]


def _renamed(item: Any, name: str) -> Any:
    item.input[:] = [f"{name}_branched" if given == name else given for given in item.input]
    return item


def _type(kind: str) -> int:
    return TensorProto.STRING if kind == "object" else helper.np_dtype_to_tensor_dtype(np.dtype(kind))


def _recurrent(operator: str, gates: int, states: int) -> Foreign:
    """Batch in front, as requests have it: the recurrent operators want it second. No kernel has its activation."""
    random = np.random.default_rng(1)
    size, hidden, steps = 6, 5, 7
    weights = {
        "w": random.standard_normal((1, gates * hidden, size)),
        "r": random.standard_normal((1, gates * hidden, hidden)),
        "b": random.standard_normal((1, 2 * gates * hidden)),
    }
    last = [f"h{index}" for index in range(states)]
    functions = ["Sigmoid", "Softsign", "Tanh"][: 1 + states]
    return Foreign(
        [
            node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
            node(operator, ["t", "w", "r", "b"], ["ys", *last], hidden_size=hidden, activations=functions),
            node("Squeeze", ["ys", "axis"], ["s"]),
            node("Transpose", ["s"], ["y"], perm=[1, 0, 2]),
            node("Transpose", [last[-1]], ["state"], perm=[1, 0, 2]),
        ],
        {"x": ("float32", ["N", steps, size])},
        {"y": ("float32", ["N", steps, hidden]), "state": ("float32", ["N", 1, hidden])},
        {**{name: value.astype(np.float32) for name, value in weights.items()}, "axis": np.array([1])},
    )


def _attention() -> Foreign:
    random = np.random.default_rng(2)
    matrices = {name: random.standard_normal((8, 8)).astype(np.float32) for name in ("wq", "wk", "wv")}
    scale = {"scale": np.ones(8, np.float32), "bias": np.zeros(8, np.float32), "root": np.array(8**0.5, np.float32)}
    return Foreign(
        [
            *(node("MatMul", ["x", f"w{name}"], [name]) for name in "qkv"),
            node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
            node("MatMul", ["q", "kt"], ["products"]),
            node("Div", ["products", "root"], ["scores"]),
            node("Softmax", ["scores"], ["attention"], axis=-1),
            node("MatMul", ["attention", "v"], ["mixed"]),
            node("Add", ["mixed", "x"], ["sum"]),
            node("LayerNormalization", ["sum", "scale", "bias"], ["y"]),
            node("CumSum", ["y", "last"], ["z"]),
        ],
        {"x": ("float32", ["N", 5, 8])},
        {"z": ("float32", None)},
        {**matrices, **scale, "last": np.array(2)},
    )


def _topk(dims: Dims) -> Foreign:
    return Foreign(
        [node("TopK", ["x", "k"], ["values", "indices"])],
        {"x": ("float32", [*dims, 20])},
        {"values": ("float32", [*dims, 3]), "indices": ("int64", [*dims, 3])},
        {"k": np.array([3])},
    )


def _of_type(kind: str) -> Foreign:
    """An operator that has every type, and a second input of another type and shape."""
    return Foreign(
        [node("GatherElements", ["x", "index"], ["y"], axis=1)],
        {"x": (kind, ["N", 9]), "index": ("int64", ["N", 4])},
        {"y": (kind, ["N", 4])},
        {},
        limit=9,
    )


def _gather() -> Foreign:
    table = np.arange(40, dtype=np.float32).reshape(10, 4)
    return Foreign(
        [node("Gather", ["table", "index"], ["y"])],
        {"index": ("int64", ["N", 2])},
        {"y": ("float32", ["N", 2, 4])},
        {"table": table},
        limit=10,
    )


def _loop() -> Foreign:
    """As many steps as the request says: so that a test can have one that lasts."""
    body = helper.make_graph(
        [node("Identity", ["go"], ["again"]), node("MatMul", ["before", "m"], ["after"])],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("before", TensorProto.FLOAT, [32, 32]),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("after", TensorProto.FLOAT, [32, 32]),
        ],
    )
    return Foreign(
        [node("Squeeze", ["count"], ["steps"]), node("Loop", ["steps", "", "m"], ["y"], body=body)],
        {"count": ("int64", [1])},
        {"y": ("float32", [32, 32])},
        {"m": np.eye(32, dtype=np.float32)},
        limit=100,
    )


def wide(rows: int | str = 64) -> Foreign:
    """Products that are worth several threads."""
    random = np.random.default_rng(0)
    values = ["x", *(f"x{step}" for step in range(1, 8)), "y"]
    return Foreign(
        [node("MatMul", [before, "w"], [after]) for before, after in pairwise(values)],
        {"x": ("float32", [rows, 512])},
        {"y": ("float32", [rows, 512])},
        {"w": (random.standard_normal((512, 512)) / 512**0.5).astype(np.float32)},
    )


_TYPES = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "float16", "float64")

FOREIGN: dict[str, Callable[[], Foreign]] = {
    "lstm": lambda: _recurrent("LSTM", gates=4, states=2),
    "gru": lambda: _recurrent("GRU", gates=3, states=1),
    "attention": _attention,
    "einsum": lambda: Foreign(
        [node("Einsum", ["a", "b"], ["y"], equation="nij,njk->nik")],
        {"a": ("float32", ["N", 3, 4]), "b": ("float32", ["N", 4, 5])},
        {"y": ("float32", ["N", 3, 5])},
        {},
    ),
    "topk": lambda: _topk(["N"]),
    "topk_unbatched": lambda: _topk([4]),
    "topk_vector": lambda: _topk([]),
    **{f"type_{kind}": lambda kind=kind: _of_type(kind) for kind in _TYPES},
    "gather": _gather,
    "loop": _loop,
}

# Shapes that only a request tells, or the answer to it.
SYMBOLIC: dict[str, Callable[[], Foreign]] = {
    "running_sum": lambda: Foreign(  # a batch, and a length
        [node("CumSum", ["x", "axis"], ["s"]), node("Add", ["s", "z"], ["y"])],
        {"x": ("float32", ["N", "S", 3]), "z": ("float32", ["N", "S", 1])},
        {"y": ("float32", ["N", "S", 3])},
        {"axis": np.array(1)},
    ),
    "nonzero": lambda: Foreign(  # as many as there are
        [node("NonZero", ["x"], ["y"])], {"x": ("float32", ["A", "B"])}, {"y": ("int64", [2, "C"])}, {}
    ),
    "expand": lambda: Foreign(  # as large as a number in the request says
        [node("Expand", ["x", "shape"], ["y"])],
        {"x": ("float32", [1]), "shape": ("int64", ["R"])},
        {"y": ("float32", None)},
        {},
    ),
}
