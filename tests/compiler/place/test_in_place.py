"""Concatenation and transposition: what is computed in place, what is copied, against onnxruntime."""

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gangway.compiler.target import detect
from tests.helpers.sampled import sampled
from tests.helpers.targets import ENDS

node = helper.make_node


def weights(*shape: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


@pytest.mark.parametrize("target", ENDS)
def test_an_inception_block_is_computed_in_place(check: Any, network: Any, target: str) -> None:
    """Nested; the parts have readers that need a halo; the last one does not fill its registers."""
    nodes = [
        node("Conv", ["x", "a"], ["a0"]),
        node("Conv", ["a0", "b"], ["b0"], pads=[1, 1, 1, 1]),
        node("Relu", ["b0"], ["b1"]),
        node("MaxPool", ["a0"], ["c0"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Conv", ["c0", "c"], ["c1"]),
        node("Concat", ["b1", "c1"], ["d"], axis=1),
        node("Concat", ["a0", "d"], ["e"], axis=-3),
        node("Conv", ["e", "f"], ["y"], pads=[2, 2, 2, 2]),
        node("AveragePool", ["e"], ["z"], kernel_shape=[3, 3]),
    ]
    constants = {"a": weights(32, 5, 1, 1), "b": weights(16, 32, 3, 3), "c": weights(20, 32, 1, 1)}
    constants["f"] = weights(24, 68, 5, 5)
    graph = network(nodes, {"x": ["N", 5, 7, 9]}, {"y": None, "z": None}, constants)
    operators = check(graph, target)
    assert "Copy" not in operators
    assert operators.count("Pack") + operators.count("Unpack") <= 3


def test_parts_that_have_another_place_are_copied(check: Any, network: Any) -> None:
    nodes = [
        node("Conv", ["x", "a"], ["a0"]),
        node("Conv", ["a0", "b"], ["b0"]),
        node("Concat", ["a0", "b0", "a0"], ["c"], axis=1),
        node("Concat", ["a0", "x", "c"], ["d"], axis=1),
        node("Conv", ["d", "e"], ["y"], pads=[1, 1, 1, 1]),
    ]
    constants = {"a": weights(32, 16, 1, 1), "b": weights(48, 32, 1, 1), "e": weights(8, 160, 3, 3)}
    graph = network(nodes, {"x": ["N", 16, 7, 9]}, {"y": None, "c": None}, constants)
    assert check(graph).count("Copy") == 2


@pytest.mark.parametrize("axis", sampled([1, 2, 3], [1]))
def test_concatenation_of_odd_sizes(check: Any, network: Any, axis: int) -> None:
    nodes = [
        node("Conv", ["x", "a"], ["a0"]),
        node("Conv", ["x", "b"], ["b0"]),
        node("Concat", ["a0", "x", "b0"], ["c"], axis=axis),
        node("Conv", ["c", "e"], ["y"], pads=[1, 1, 1, 1]),
    ]
    channels = (5, 7) if axis == 1 else (20, 20)
    total = 20 + sum(channels) if axis == 1 else 20
    constants = {"a": weights(channels[0], 20, 1, 1), "b": weights(channels[1], 20, 1, 1), "e": weights(8, total, 3, 3)}
    check(network(nodes, {"x": ["N", 20, 7, 9]}, {"y": None}, constants))


def test_concatenated_vectors_and_what_reads_their_parts(check: Any, network: Any) -> None:
    """A part has no surplus of its own behind it: a dense layer that needs zeros there must get a copy."""
    nodes = [
        node("Relu", ["x"], ["a"]),
        node("Gemm", ["x", "w"], ["b"]),
        node("Mul", ["x", "x"], ["c"]),
        node("Gemm", ["c", "w"], ["c1"]),
        node("Concat", ["a", "b", "c"], ["d"], axis=1),
        node("Gemm", ["a", "w"], ["e"]),
        node("Gemm", ["d", "v"], ["y"]),
    ]
    constants = {"w": weights(10, 10), "v": weights(30, 7)}
    check(network(nodes, {"x": ["N", 10]}, {"y": None, "e": None, "c1": None}, constants))


@pytest.mark.parametrize("target", ENDS)
def test_heads_of_a_detector_are_written_into_the_output(check: Any, network: Any, target: str) -> None:
    nodes, parts = [], []
    for n in range(3):
        nodes += [
            node("Conv", ["x" if n == 0 else f"f{n - 1}", "w"], [f"f{n}"], pads=[1, 1, 1, 1], strides=[2, 2]),
            node("Conv", [f"f{n}", "h"], [f"h{n}"], pads=[1, 1, 1, 1]),
            node("Transpose", [f"h{n}"], [f"t{n}"], perm=[0, 2, 3, 1]),
            node("Reshape", [f"t{n}", "shape"], [f"r{n}"]),
        ]
        parts.append(f"r{n}")
    nodes.append(node("Concat", parts, ["y"], axis=1))
    constants = {"w": weights(20, 20, 3, 3), "h": weights(18, 20, 3, 3), "shape": np.array([0, -1, 6])}
    operators = check(network(nodes, {"x": ["N", 20, 17, 19]}, {"y": None}, constants), target)
    assert operators.count("Transpose") == 3
    assert not {"Copy", "Unpack"} & set(operators)


@pytest.mark.parametrize("perm", [[0, 2, 3, 1], [0, 3, 1, 2], [0, 1, 3, 2], [0, 2, 1, 3], None])
def test_transpositions(check: Any, network: Any, perm: list[int] | None) -> None:
    """Of a plain and of a blocked tensor; without `perm` all axes are reversed."""
    attributes = {"perm": perm} if perm else {}
    nodes = [
        node("Transpose", ["x"], ["y"], **attributes),
        node("MaxPool", ["x"], ["b"], kernel_shape=[1, 1]),
        node("Transpose", ["b"], ["z"], **attributes),
    ]
    check(network(nodes, {"x": ["N" if perm else 1, 20, 7, 9]}, {"y": None, "z": None}))


def test_transposition_of_integers_and_of_nothing(check: Any, network: Any) -> None:
    nodes = [
        node("Transpose", ["x"], ["y"], perm=[2, 0, 1]),
        node("Reshape", ["x", "shape"], ["a"]),
        node("Transpose", ["a"], ["z"], perm=[0, 2, 1, 3]),
    ]
    constants = {"shape": np.array([5, 1, 7, 4])}
    operators = check(network(nodes, {"x": [5, 4, 7]}, {"y": None, "z": None}, constants, TensorProto.INT32))
    assert operators == ["Transpose", "Copy"]


def test_concatenation_of_the_batch_is_not_compiled(compile_file: Any, network: Any, tmp_path: Any) -> None:
    graph = network([node("Concat", ["x", "x"], ["y"], axis=0)], {"x": ["N", 4]}, {"y": None})
    manifest = compile_file(graph.save(tmp_path / "model.onnx"), detect().name).manifest
    assert "mixes rows" in manifest.fallback_reason
    assert not manifest.batched


def test_attention_reads_keys_and_values_where_the_request_gets_them(check: Any, network: Any) -> None:
    """Each step of a decoder returns them: past and new ones are joined in the output, and copied there only."""
    nodes = [
        node("Concat", ["past_k", "k"], ["keys"], axis=2),
        node("Concat", ["past_v", "v"], ["values"], axis=2),
        node("Transpose", ["keys"], ["turned"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "turned"], ["scores"]),
        node("Softmax", ["scores"], ["shares"], axis=-1),
        node("MatMul", ["shares", "values"], ["y"]),
    ]
    new, past = ["N", 2, 1, 16], ["N", 2, 7, 16]
    inputs = {"q": new, "k": new, "v": new, "past_k": past, "past_v": past}
    operators = check(network(nodes, inputs, {"y": None, "keys": None, "values": None}, {}))
    assert "FusedAttention" in operators
    assert operators.count("Copy") == 4
