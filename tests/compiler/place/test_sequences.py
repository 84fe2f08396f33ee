"""Layers on sequences, tensors whose last axis are the channels: compiled, against onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.frontend.patterns import find_patterns
from gangway.compiler.frontend.simplify import simplify
from tests.helpers.targets import EVERY, NARROWEST, WIDEST

node = helper.make_node
S, C = 9, 32
INPUT: dict[str, list[int | str]] = {"x": ["N", S, C]}


def weights(*shape: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32)


def number(value: float) -> Any:
    return np.array(value, np.float32)


@pytest.mark.parametrize("target", EVERY)
def test_linear_layers_with_bias_and_residual(check: Any, network: Any, target: str) -> None:
    channels = 20
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Add", ["b", "a"], ["h"]),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "v"], ["c"]),
        node("Add", ["c", "d"], ["e"]),
        node("Add", ["x", "e"], ["y"]),
    ]
    constants = {"w": weights(C, channels), "b": weights(channels), "v": weights(channels, C), "d": weights(C)}
    operators = check(network(nodes, INPUT, {"y": None}, constants), target)
    assert operators == ["Pack", "Gemm+Relu", "Gemm+Add", "Unpack"]


def test_gemms_between_reshapes_keep_the_layout(check: Any, network: Any) -> None:
    """As GPT-2 has them; the residual and the activation stand behind a Reshape."""
    nodes = [
        node("Reshape", ["x", "rows"], ["x0"]),
        node("Gemm", ["x0", "w", "b"], ["a0"]),
        node("Reshape", ["a0", "tokens"], ["a"]),
        node("Tanh", ["a"], ["t"]),
        node("Reshape", ["t", "rows"], ["t0"]),
        node("Gemm", ["t0", "w", "b"], ["c0"], transB=1, alpha=0.5, beta=2.0),
        node("Reshape", ["c0", "tokens"], ["c"]),
        node("Add", ["c", "x"], ["y"]),
    ]
    constants = {"w": weights(C, C), "b": weights(C), "rows": np.array([-1, C]), "tokens": np.array([-1, S, C])}
    operators = check(network(nodes, INPUT, {"y": None}, constants))
    assert operators == ["Pack", "Gemm+Tanh", "Gemm+Add", "Unpack"]


def test_a_tensor_that_is_read_and_delivered(check: Any, network: Any) -> None:
    """And one row of it, from the front and from the back."""
    nodes = [
        node("MatMul", ["x", "w"], ["y"]),
        node("MatMul", ["y", "w"], ["z"]),
        node("Gather", ["z", "first"], ["a"], axis=1),
        node("Gather", ["z", "last"], ["b0"], axis=1),
        node("Gemm", ["b0", "w"], ["b"]),
        node("Gather", ["x", "last"], ["c"], axis=1),
        node("Gather", ["y", "last"], ["d"], axis=2),
    ]
    constants = {"w": weights(C, C), "first": np.array(0), "last": np.array(-1)}
    check(network(nodes, INPUT, dict.fromkeys(["y", "a", "b", "c", "d"]), constants))


def test_one_position_is_a_vector(check: Any, network: Any) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("LayerNormalization", ["a", "scale"], ["n"]),
        node("MatMul", ["n", "w"], ["b"]),
        node("Add", ["b", "x"], ["y"]),
    ]
    operators = check(
        network(nodes, {"x": ["N", 1, C]}, {"y": None}, {"w": weights(C, C), "scale": weights(C, seed=2)})
    )
    assert operators == ["MatMul", "LayerNormalization", "MatMul+Add"]


@pytest.mark.parametrize("shape", [[2, 3, 4, C], [C]])
def test_any_number_of_axes(check: Any, network: Any, shape: list[int]) -> None:
    """Without a batch; the dense layer has one output, or more than it has inputs."""
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Relu", ["a"], ["r"]),
        node("MatMul", ["r", "v"], ["y"]),
    ]
    check(network(nodes, {"x": list(shape)}, {"y": None, "a": None}, {"w": weights(C, 40), "v": weights(40, 1)}))


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("channels", [20, 32])
def test_layer_normalisation(check: Any, network: Any, axis: int, channels: int) -> None:
    shape = [channels] if axis == -1 else [S, channels]
    nodes = [node("LayerNormalization", ["x", "a", "b"], ["y"], axis=axis, epsilon=1e-4)]
    constants = {"a": weights(*shape, seed=1), "b": weights(*shape, seed=2)}
    assert "LayerNormalization" in check(network(nodes, {"x": ["N", S, channels]}, {"y": None}, constants))


def _layer_norm(square: str, divide: str, twice: bool) -> list[Any]:
    """As exporters wrote it before opset 17; `twice`: x less its mean is computed twice."""
    deviation = "d2" if twice else "d"
    nodes = [node("ReduceMean", ["x"], ["m"], axes=[-1]), node("Sub", ["x", "m"], ["d"])]
    if twice:
        nodes.append(node("Sub", ["x", "m"], ["d2"]))
    nodes += [
        node("Pow", [deviation, "two"], ["s"]) if square == "Pow" else node("Mul", [deviation, deviation], ["s"]),
        node("ReduceMean", ["s"], ["v"], axes=[2]),
        node("Add", ["epsilon", "v"], ["e"]),
        node("Sqrt", ["e"], ["r"]),
    ]
    if divide == "Div":
        nodes.append(node("Div", ["d", "r"], ["n"]))
    else:
        nodes += [node("Reciprocal", ["r"], ["i"]), node("Mul", ["d", "i"], ["n"])]
    return nodes


@pytest.mark.parametrize(
    ("square", "divide", "twice", "affine"), [("Pow", "Div", True, True), ("Mul", "Mul", False, False)]
)
def test_layer_normalisation_in_parts(
    check: Any, network: Any, square: str, divide: str, twice: bool, affine: bool
) -> None:
    nodes = _layer_norm(square, divide, twice)
    affine_nodes = [node("Mul", ["a", "n"], ["f"]), node("Add", ["f", "b"], ["y"])]
    nodes += affine_nodes if affine else [node("Identity", ["n"], ["y"])]
    constants = {"epsilon": number(1e-5), "two": number(2), "a": weights(C, seed=1), "b": weights(C, seed=2)}
    assert check(network(nodes, INPUT, {"y": None}, constants)) == ["Pack", "LayerNormalization", "Unpack"]


ERF = [node("Div", ["a", "root"], ["u"]), node("Erf", ["u"], ["e"]), node("Add", ["e", "one"], ["g"])]
CUBE = [
    node("Pow", ["a", "three"], ["p"]),
    node("Mul", ["p", "cubic"], ["q"]),
    node("Add", ["a", "q"], ["r"]),
    node("Mul", ["r", "factor"], ["u"]),
]
GELUS = {
    "x (1 + erf) half": [*ERF, node("Mul", ["a", "g"], ["h"]), node("Mul", ["h", "half"], ["y0"])],
    "half x (1 + erf)": [*ERF, node("Mul", ["half", "a"], ["h"]), node("Mul", ["g", "h"], ["y0"])],
    "x (half erf + half)": [
        node("Mul", ["inverse", "a"], ["u"]),
        node("Erf", ["u"], ["e"]),
        node("Mul", ["e", "half"], ["f"]),
        node("Add", ["half", "f"], ["g"]),
        node("Mul", ["g", "a"], ["y0"]),
    ],
    "tanh of a power": [
        *CUBE,
        node("Tanh", ["u"], ["t"]),
        node("Add", ["t", "one"], ["g"]),
        node("Mul", ["a", "half"], ["h"]),
        node("Mul", ["h", "g"], ["y0"]),
    ],
    "tanh of products": [
        node("Mul", ["a", "a"], ["p"]),
        node("Mul", ["a", "p"], ["q"]),
        node("Mul", ["cubic", "q"], ["r"]),
        node("Add", ["r", "a"], ["s"]),
        node("Mul", ["factor", "s"], ["u"]),
        node("Tanh", ["u"], ["t"]),
        node("Add", ["one", "t"], ["g"]),
        node("Mul", ["half", "g"], ["h"]),
        node("Mul", ["a", "h"], ["y0"]),
    ],
}
SCALARS = {
    "root": 2**0.5,
    "inverse": 0.5**0.5,
    "one": 1.0,
    "half": 0.5,
    "three": 3.0,
    "cubic": 0.044715,
    "factor": (2 / np.pi) ** 0.5,
}


@pytest.mark.parametrize("form", ["x (1 + erf) half", "tanh of products"])
def test_gelu_behind_a_dense_layer(check: Any, network: Any, form: str) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), *GELUS[form], node("MatMul", ["y0", "w"], ["y"])]
    operators = check(network(nodes, INPUT, {"y": None}, {"w": weights(C, C), **_scalars(nodes)}))
    assert operators == ["Pack", "MatMul+Gelu", "MatMul", "Unpack"]


def _scalars(nodes: list[Any], **others: float) -> dict[str, Any]:
    used = {name for item in nodes for name in item.input}
    return {name: number(value) for name, value in {**SCALARS, **others}.items() if name in used}


@pytest.mark.parametrize("form", GELUS)
def test_gelu_in_all_forms(network: Any, tmp_path: Path, form: str) -> None:
    def operators(outputs: list[str], **others: float) -> list[str]:
        nodes = [node("Identity", ["x"], ["a"]), *GELUS[form]]
        path = network(nodes, INPUT, dict.fromkeys(outputs), _scalars(nodes, **others)).save(tmp_path / "model.onnx")
        return [item.operator for item in find_patterns(simplify(read_graph(path))).nodes]

    assert operators(["y0"]) == ["Identity", "Gelu"]
    assert "Gelu" not in operators(["y0", "u"])  # somebody else reads what is computed in between
    assert "Gelu" not in operators(["y0"], half=0.501)


def test_embeddings(check: Any, network: Any) -> None:
    nodes = [
        node("Gather", ["words", "ids"], ["a"]),
        node("Gather", ["places", "positions"], ["b"]),
        node("Add", ["a", "b"], ["c"]),
        node("MatMul", ["c", "w"], ["y"]),
    ]
    constants = {"words": weights(40, C), "places": weights(S, C), "w": weights(C, C), "positions": np.arange(S)[None]}
    operators = check(network(nodes, {"ids": ["N", S]}, {"y": None}, constants, TensorProto.INT64, TensorProto.FLOAT))
    assert operators == ["Gather", "Add", "Pack", "MatMul", "Unpack"]


def _heads(name: str, perm: list[int]) -> list[Any]:
    return [node("Reshape", [name, "split"], [f"{name}4"]), node("Transpose", [f"{name}4"], [f"{name}h"], perm=perm)]


@pytest.mark.parametrize(
    ("target", "heads"), [(WIDEST, 2), (WIDEST, 4), pytest.param(NARROWEST, 2, marks=pytest.mark.long)]
)
def test_attention(check: Any, network: Any, target: str, heads: int) -> None:
    """Heads of 16 channels are read where they lie, smaller ones from plain tensors."""
    nodes = [
        node("MatMul", ["x", "w"], ["joint"]),
        node("Split", ["joint", "parts"], ["q", "k", "v"], axis=2),
        *_heads("q", [0, 2, 1, 3]),
        *_heads("k", [0, 2, 3, 1]),
        *_heads("v", [0, 2, 1, 3]),
        node("MatMul", ["qh", "kh"], ["s"]),
        node("Mul", ["s", "scale"], ["m"]),
        node("Add", ["m", "bias"], ["b"]),
        node("Softmax", ["b"], ["p"], axis=-1),
        node("MatMul", ["p", "vh"], ["c"]),
        node("Transpose", ["c"], ["t"], perm=[0, 2, 1, 3]),
        node("Reshape", ["t", "merge"], ["r"]),
        node("MatMul", ["r", "o"], ["y"]),
    ]
    constants = {
        "w": weights(C, 3 * C),
        "o": weights(C, C),
        "parts": np.array([C, C, C]),
        "split": np.array([0, S, heads, C // heads]),
        "merge": np.array([0, S, C]),
        "scale": number((C // heads) ** -0.5),
        "bias": np.where(np.tril(np.ones((S, S))), 0, np.finfo(np.float32).min).astype(np.float32),
    }
    operators = check(network(nodes, INPUT, {"y": None}, constants), target)
    assert "FusedAttention" in operators


@pytest.mark.parametrize(
    ("left", "right"),
    [([5, 4], [4]), ([4], [3, 4, 6]), ([3, 1, 5, 4], [2, 4, 6])],
)
def test_products_of_activations(check: Any, network: Any, left: list[int], right: list[int]) -> None:
    """Stacks of matrices that are broadcast, and vectors on either side."""
    nodes = [node("MatMul", ["x", "z"], ["y"])]
    check(network(nodes, {"x": list(left), "z": list(right)}, {"y": None}))


@pytest.mark.parametrize(("flags", "summand"), [({"transA": 1, "alpha": 0.5}, "z"), ({"transB": 1, "beta": 2.0}, "c")])
def test_gemms_of_activations(check: Any, network: Any, flags: dict[str, Any], summand: str) -> None:
    nodes = [node("Gemm", ["x", "w", summand], ["y"], **flags)]
    inputs = {"x": [5, 7], "w": [5, 6] if "transA" in flags else [6, 7], "z": [7, 6] if "transA" in flags else [5, 6]}
    used = {name: dims for name, dims in inputs.items() if name != "z" or summand == "z"}
    check(network(nodes, used, {"y": None}, {"c": weights(5, 6)} if summand == "c" else {}))


def test_what_is_cut_and_turned_is_copied_once(check: Any, network: Any) -> None:
    """The relative positions of Transformer-XL: [S, 2S] read as [2S, S], less a row, read as [S, 2S - 1], cut to S."""
    nodes = [
        node("Reshape", ["x", "rows"], ["a"]),
        node("Slice", ["a", "one", "all", "first"], ["b"]),
        node("Reshape", ["b", "columns"], ["c"]),
        node("Slice", ["c", "zero", "size", "second"], ["d"]),
        node("Neg", ["d"], ["y"]),
        node("Split", ["x", "parts"], ["p", "q"], axis=-1),
        node("Transpose", ["q"], ["t"], perm=[0, 2, 1]),
        node("Mul", ["t", "t"], ["z"]),
        node("Reshape", ["t", "flat"], ["u"]),  # needs a copy of its own
        node("Neg", ["u"], ["v"]),
    ]
    integers = {"rows": [0, 2 * S, S], "columns": [0, S, 2 * S - 1], "parts": [7, 2 * S - 7], "flat": [0, -1]}
    integers |= {"zero": [0], "one": [1], "all": [2 * S], "size": [S], "first": [1], "second": [-1]}
    constants = {name: np.array(value) for name, value in integers.items()}
    operators = check(network(nodes, {"x": ["N", S, 2 * S]}, dict.fromkeys("yzv"), constants))
    assert operators.count("StridedCopy") == 2
    assert not {"Slice", "Split"} & set(operators)
