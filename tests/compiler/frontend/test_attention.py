"""Attention as exporters write it, in many forms: found, and replaced by what computes the same (by numpy, here)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from gangway.compiler.frontend.graph import Node
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.frontend.patterns import find_patterns
from gangway.compiler.frontend.simplify import simplify
from tests.compiler.frontend.interpreter import Interpreter

node = helper.make_node
S, HEADS, SIZE = 6, 2, 16
C = HEADS * SIZE
LOWEST = float(np.finfo(np.float32).min)


def _cut_heads(name: str, perm: list[int]) -> list[Any]:
    return [node("Reshape", [name, "split"], [f"{name}4"]), node("Transpose", [f"{name}4"], [f"{name}h"], perm=perm)]


def separate() -> list[Any]:
    """Three linear layers; keys are turned at once."""
    linear = [node("MatMul", ["x", f"w{part}"], [part]) for part in "qkv"]
    return [*linear, *_cut_heads("q", [0, 2, 1, 3]), *_cut_heads("k", [0, 2, 3, 1]), *_cut_heads("v", [0, 2, 1, 3])]


def turned_twice() -> list[Any]:
    return [
        *[item for item in separate() if "kh" not in item.output],
        node("Transpose", ["k4"], ["k5"], perm=[0, 2, 1, 3]),
        node("Transpose", ["k5"], ["kh"], perm=[0, 1, 3, 2]),
    ]


def joint() -> list[Any]:
    """One linear layer, split along its channels."""
    return [
        node("MatMul", ["x", "wqkv"], ["qkv"]),
        node("Split", ["qkv", "three"], ["q", "k", "v"], axis=-1),
        *separate()[3:],
    ]


def joint_with_five_axes() -> list[Any]:
    """As vision transformers have it: [N, S, 3, heads, size], turned, then one item of the first axis each."""
    return [
        node("MatMul", ["x", "wqkv"], ["qkv"]),
        node("Reshape", ["qkv", "split5"], ["qkv5"]),
        node("Transpose", ["qkv5"], ["turned"], perm=[2, 0, 3, 1, 4]),
        *(node("Gather", ["turned", f"item{index}"], [name], axis=0) for index, name in enumerate(("qh", "kp", "vh"))),
        node("Transpose", ["kp"], ["kh"], perm=[0, 1, 3, 2]),
    ]


def heads_in_the_batch() -> list[Any]:
    """[N x heads, S, size]: three axes."""
    flat = [node("Reshape", [f"{name}h", "flat"], [f"{name}f"]) for name in "qv"]
    return [
        *[item for item in separate() if "kh" not in item.output],
        node("Transpose", ["k4"], ["k5"], perm=[0, 2, 3, 1]),
        *flat,
        node("Reshape", ["k5", "flat_turned"], ["kf"]),
    ]


SOURCES: dict[str, Callable[[], list[Any]]] = {
    "separate": separate,
    "turned twice": turned_twice,
    "joint": joint,
    "joint with five axes": joint_with_five_axes,
    "heads in the batch": heads_in_the_batch,
}
MASKS: dict[str, list[Any]] = {
    "none": [node("Div", ["s", "root"], ["m"])],
    "scale by Mul": [node("Mul", ["inverse", "s"], ["m"])],
    "bias": [node("Div", ["s", "root"], ["d"]), node("Add", ["d", "bias"], ["m"])],
    "bias before the scale": [node("Add", ["bias", "s"], ["d"]), node("Div", ["d", "root"], ["m"])],
    "causal": [node("Div", ["s", "root"], ["d"]), node("Where", ["triangle", "d", "lowest"], ["m"])],
    "causal, reversed": [node("Where", ["others", "lowest", "s"], ["d"]), node("Div", ["d", "root"], ["m"])],
    "causal and bias": [
        node("Where", ["triangle", "s", "lowest"], ["c"]),
        node("Mul", ["c", "inverse"], ["d"]),
        node("Add", ["d", "bias"], ["m"]),
    ],
    "bias that is a product itself": [
        node("MatMul", ["qh", "places"], ["r"]),
        node("Add", ["r", "s"], ["d"]),
        node("Mul", ["d", "inverse"], ["m"]),
    ],
    "three biases and two scales": [
        node("Add", ["position", "s"], ["c"]),
        node("Mul", ["c", "inverse"], ["d"]),
        node("Add", ["d", "bias"], ["e"]),
        node("Div", ["e", "root"], ["f"]),
        node("Add", ["f", "bias2"], ["m"]),
    ],
}
CONSTANTS = {
    "split": np.array([0, S, HEADS, SIZE]),
    "split5": np.array([0, S, 3, HEADS, SIZE]),
    "flat": np.array([-1, S, SIZE]),
    "flat_turned": np.array([-1, SIZE, S]),
    "unflat": np.array([-1, HEADS, S, SIZE]),
    "merge": np.array([0, S, C]),
    "three": np.array([C, C, C]),
    **{f"item{index}": np.array(index) for index in range(3)},
    **{
        f"w{part}": np.random.default_rng(index).standard_normal((C, C)).astype(np.float32) / 4
        for index, part in enumerate("qkv")
    },
    "wqkv": np.random.default_rng(9).standard_normal((C, 3 * C)).astype(np.float32) / 4,
    "root": np.array(SIZE**0.5, np.float32),
    "inverse": np.array(SIZE**-0.5, np.float32),
    "lowest": np.array(LOWEST, np.float32),
    "triangle": np.tril(np.ones((1, 1, S, S), np.bool_)),
    "others": ~np.tril(np.ones((1, 1, S, S), np.bool_)),
    "places": np.random.default_rng(8).standard_normal((SIZE, S)).astype(np.float32),
    "position": np.random.default_rng(7).standard_normal((HEADS, S, S)).astype(np.float32),
}
INPUTS: dict[str, list[int | str]] = {"x": ["N", S, C], "bias": ["N", 1, 1, S], "bias2": ["N", HEADS, S, S]}


def attention(source: str, mask: str) -> list[Any]:
    flat = source == "heads in the batch"
    query, key, value = ("qf", "kf", "vf") if flat else ("qh", "kh", "vh")
    masked = "s" if flat else "m"
    nodes = [*SOURCES[source](), node("MatMul", [query, key], ["s"])]
    nodes += [] if flat else MASKS[mask]
    nodes += [node("Softmax", [masked], ["p"], axis=-1), node("MatMul", ["p", value], ["c0"])]
    nodes += [node("Reshape", ["c0", "unflat"], ["context"])] if flat else [node("Identity", ["c0"], ["context"])]
    return [
        *nodes,
        node("Transpose", ["context"], ["back"], perm=[0, 2, 1, 3]),
        node("Reshape", ["back", "merge"], ["merged"]),
        node("MatMul", ["merged", "wq"], ["y"]),
    ]


def _compare(network: Any, path: Path, nodes: list[Any], outputs: Sequence[str] = ("y",)) -> list[Node]:
    """Return the attention nodes of the rewritten graph, which computes what onnxruntime does."""
    used = {name for item in nodes for name in item.input}
    constants = {name: value for name, value in CONSTANTS.items() if name in used}
    inputs = {name: dims for name, dims in INPUTS.items() if name in used}
    network(nodes, inputs, dict.fromkeys(outputs), constants).save(path)
    random = np.random.default_rng(3)
    feeds = {
        name: random.standard_normal([1 if n == "N" else n for n in dims]).astype(np.float32)
        for name, dims in inputs.items()
    }
    if "bias" in feeds:
        feeds["bias"][..., -2:] = LOWEST
    graph = find_patterns(simplify(read_graph(path)))
    expected = onnxruntime.InferenceSession(str(path)).run(None, feeds)
    for answer, value in zip(Interpreter(graph).run(feeds), expected, strict=True):
        np.testing.assert_allclose(answer.reshape(value.shape), value, rtol=1e-4, atol=1e-5)
    return [item for item in graph.nodes if item.operator == "FusedAttention"]


@pytest.mark.parametrize("source", SOURCES)
def test_wherever_heads_come_from(network: Any, tmp_path: Path, source: str) -> None:
    (found,) = _compare(network, tmp_path / "model.onnx", attention(source, "none"))
    assert found.attributes["spec"].heads == HEADS
    assert len(set(found.inputs)) == (1 if "joint" in source else 3)


@pytest.mark.parametrize("mask", MASKS)
def test_whatever_happens_to_the_scores(network: Any, tmp_path: Path, mask: str) -> None:
    (found,) = _compare(network, tmp_path / "model.onnx", attention("separate", mask))
    assert len(found.inputs) <= 5


@pytest.mark.parametrize("part", ["q", "k"])
def test_scale_of_queries_or_keys(network: Any, tmp_path: Path, part: str) -> None:
    nodes = attention("separate", "causal and bias")
    index = next(index for index, item in enumerate(nodes) if item.output[0] == f"{part}4")
    nodes[index] = node("Reshape", [f"{part}s", "split"], [f"{part}4"])
    nodes.insert(index, node("Mul", [f"{part}", "inverse"], [f"{part}s"]))
    assert len(_compare(network, tmp_path / "model.onnx", nodes)) == 1


def test_what_does_not_fit_stays(network: Any, tmp_path: Path) -> None:
    """Softmax over the queries; a mask that is not low enough to absorb a score; scores that others read."""
    path = tmp_path / "model.onnx"
    wrong_axis = attention("separate", "none")
    wrong_axis[[item.op_type for item in wrong_axis].index("Softmax")] = node("Softmax", ["m"], ["p"], axis=2)
    assert not _compare(network, path, wrong_axis)
    mild = attention("separate", "causal")
    index = [item.op_type for item in mild].index("Where")
    mild[index] = node("Where", ["triangle", "d", "inverse"], ["m"])
    assert not _compare(network, path, mild)
    read_twice = attention("separate", "bias")
    assert not _compare(network, path, read_twice, ["y", "d"])
