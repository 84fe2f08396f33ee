"""Attention as operators and as nodes of exporters, compiled, against onnxruntime: rows alone and batches of 3."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gangway.artifact.format import Engine
from tests.helpers.onnx_models import save_model
from tests.helpers.sampled import sampled

Array = Any
Compare = Callable[..., list[str]]
node = helper.make_node
S, P, HEADS, SIZE = 8, 5, 4, 16
C, SHARED = HEADS * SIZE, 2 * SIZE
KINDS: dict[str, tuple[list[int | str], int]] = {
    "x": (["N", S, C], TensorProto.FLOAT),
    **{name: (["N", S, C], TensorProto.FLOAT) for name in ("q", "k", "v")},
    **{name: (["N", S, SHARED], TensorProto.FLOAT) for name in ("few keys", "few values")},
    **{name: (["N", HEADS, S, SIZE], TensorProto.FLOAT) for name in ("q4", "k4", "v4")},
    **{name: (["N", 2, P, SIZE], TensorProto.FLOAT) for name in ("past keys", "past values")},
    **{name: (["N", HEADS, P, SIZE], TensorProto.FLOAT) for name in ("all past keys", "all past values")},
    "shown": (["N", 1, S, S], TensorProto.BOOL),
    "shown before": (["N", 1, S, S + P], TensorProto.BOOL),
    "near": (["N", HEADS, S, S], TensorProto.FLOAT),
    "pixels": (["N", 3, 4, 5], TensorProto.FLOAT),
    "tokens": (["N", S], TensorProto.INT64),
    "count": (["N"], TensorProto.INT64),
}


def feed(name: str, rows: int, random: np.random.Generator) -> Array:
    """Row 0 shows all; in others the last keys are hidden, and query 2 sees none."""
    dims, kind = KINDS[name]
    shape = [rows if n == "N" else int(n) for n in dims]
    if kind == TensorProto.FLOAT:
        return random.standard_normal(shape).astype(np.float32)
    value = np.ones(shape, helper.tensor_dtype_to_np_dtype(kind))
    if name == "count":
        return value * S - np.arange(rows)
    value[rows // 2 :, ..., -2:] = 0
    if name.startswith("shown"):
        value[rows // 2 :, ..., 2, :] = 0
    return value


@pytest.fixture
def compare(tmp_path: Path, compile_file: Any, load_artifact: Any) -> Compare:
    """Return the function that compares all results that no node reads; it returns the layers' operators."""

    def compare(
        nodes: list[Any], constants: dict[str, Array], opset: int = 20, target: str | None = None, domain: str = ""
    ) -> list[str]:
        used = {name for item in nodes for name in item.input}
        outputs = [name for item in nodes for name in item.output if name and name not in used]
        inputs = {name: KINDS[name] for name in KINDS if name in used}
        kinds = {name: (kind, dims) for name, (dims, kind) in inputs.items()}, dict.fromkeys(outputs, ...)
        domains, path = {domain: 1} if domain else {}, tmp_path / "model.onnx"
        save_model(path, nodes, *kinds, constants, opset, ir_version=10, domains=domains)
        compiled = compile_file(path, target)
        assert compiled.manifest.engine is Engine.NATIVE, compiled.manifest.fallback_reason
        model, session = load_artifact(compiled.folder), onnxruntime.InferenceSession(path)
        for rows in (1, 3):
            random = np.random.default_rng(rows)
            feeds = {name: feed(name, rows, random) for name in inputs}
            for output, expected in zip(outputs, session.run(outputs, feeds), strict=True):
                answers = [
                    model({name: value[row : row + 1] for name, value in feeds.items()})[output] for row in range(rows)
                ]
                np.testing.assert_allclose(np.concatenate(answers), expected, rtol=2e-5, atol=2e-5, err_msg=output)
        return [layer.operator for layer in compiled.manifest.layers]

    return compare


def attention(inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return node("Attention", inputs, outputs, **attributes)


@pytest.mark.parametrize("opset", sampled([23, 24, 25], [24]))
def test_operator_of_onnx(compare: Compare, opset: int) -> None:
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    shared = {"q_num_heads": HEADS, "kv_num_heads": 2}
    nodes = [
        attention(["q", "k", "v"], ["plain"], **heads),
        attention(["q", "k", "v"], ["causal"], **heads, is_causal=1),
        attention(["q", "k", "v", "shown"], ["masked"], **heads),
        attention(["q", "k", "v", "near"], ["capped"], **heads, softcap=2.0, scale=0.3),
        attention(["q", "few keys", "few values"], ["shared"], **shared),
        attention(
            ["q", "few keys", "few values", "shown before", "past keys", "past values"],
            ["after the past", "keys", "values"],
            **shared,
        ),
        attention(["q4", "k4", "v4"], ["heads apart"]),
    ]
    operators = compare(nodes, {}, opset)
    assert operators.count("FusedAttention") == len(nodes)
    assert "Softmax" not in operators


@pytest.mark.parametrize("opset", sampled([24, 25], [24]))
def test_keys_that_count(compare: Compare, opset: int) -> None:
    nodes = [
        attention(["q", "k", "v", "", "", "", "count"], ["y"], q_num_heads=HEADS, kv_num_heads=HEADS),
    ]
    assert compare(nodes, {}, opset).count("FusedAttention") == 1


def test_products_that_are_an_output_stay_apart(compare: Compare) -> None:
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    nodes = [attention(["q", "k", "v"], ["y", "", "", "s"], **heads, qk_matmul_output_mode=1)]
    assert "FusedAttention" not in compare(nodes, {}, 23)


def contrib(operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return node(operator, inputs, outputs, domain="com.microsoft", num_heads=HEADS, **attributes)


def test_operators_of_onnxruntime(compare: Compare) -> None:
    random = np.random.default_rng(4)
    constants = {"b": random.standard_normal(3 * C).astype(np.float32)}
    earlier = ["all past keys", "all past values"]
    nodes = [
        contrib("MultiHeadAttention", ["q", "k", "v", "b"], ["a", "keys", "values"], unidirectional=1),
        contrib("MultiHeadAttention", ["q", "k", "v", "", "", "", *earlier], ["e", "keys2", "values2"]),
        contrib(
            "MultiHeadAttention",
            ["q", "k", "v", "", "", "", *earlier],
            ["f", "keys3", "values3"],
            unidirectional=1,
            scale=0.3,
        ),
    ]
    operators = compare(nodes, constants, domain="com.microsoft")
    assert operators.count("FusedAttention") == 3
    assert "Softmax" not in operators


def test_rotary_positions_of_onnxruntime(compare: Compare) -> None:
    random = np.random.default_rng(6)
    constants = {name: random.standard_normal((40, 8)).astype(np.float32) for name in ("cos", "sin")}
    constants |= {name: random.standard_normal((40, 4)).astype(np.float32) for name in ("few cos", "few sin")}
    constants |= {"first": np.array([3])}
    tables, few = ["cos", "sin"], ["few cos", "few sin"]
    rotary = partial(node, "RotaryEmbedding", domain="com.microsoft")
    nodes = [
        rotary(["q", "tokens", *tables], ["halves"], num_heads=HEADS),
        rotary(["q", "tokens", *tables], ["pairs"], num_heads=HEADS, interleaved=1),
        rotary(["q4", "first", *tables], ["from a position"], interleaved=1),
        rotary(["k", "tokens", *few], ["a part"], num_heads=HEADS, rotary_embedding_dim=8),
        rotary(["k", "first", *few], ["a part, pairs"], num_heads=HEADS, rotary_embedding_dim=8, interleaved=1),
        node("MatMul", ["x", "w"], ["y"]),
    ]
    compare(nodes, {**constants, "w": np.eye(C, dtype=np.float32)}, domain="com.microsoft")


@pytest.mark.parametrize("opset", sampled([23, 25], [25]))
def test_rotary_positions_before_attention(compare: Compare, opset: int) -> None:
    """Both as operators of ONNX."""
    random = np.random.default_rng(6)
    constants = {name: random.standard_normal((40, 8)).astype(np.float32) for name in ("cos", "sin")}
    nodes = [
        *(
            node("RotaryEmbedding", [name, "cos", "sin", "tokens"], [f"{name} turned"], num_heads=heads)
            for name, heads in (("q", HEADS), ("few keys", 2))
        ),
        attention(["q turned", "few keys turned", "few values"], ["y"], q_num_heads=HEADS, kv_num_heads=2, is_causal=1),
    ]
    assert compare(nodes, constants, opset).count("FusedAttention") == 1


def test_products_as_equations(compare: Compare) -> None:
    """Attention as Keras and torchvision's MaxViT write it, with weights of three axes."""
    random = np.random.default_rng(7)
    shapes = {"wq": (C, HEADS, SIZE), "wk": (C, HEADS, SIZE), "wv": (C, HEADS, SIZE), "wo": (HEADS, SIZE, C)}
    constants = {name: random.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    constants["scale"] = np.array(0.25, np.float32)
    nodes = [
        *(node("Einsum", ["x", f"w{part}"], [f"{part}1"], equation="abc,cde->abde") for part in "qkv"),
        node("Mul", ["q1", "scale"], ["q2"]),
        node("Einsum", ["k1", "q2"], ["s"], equation="aecd,abcd->acbe"),
        node("Softmax", ["s"], ["p"], axis=-1),
        node("Einsum", ["p", "v1"], ["c"], equation="acbe,aecd->abcd"),
        node("Einsum", ["c", "wo"], ["y"], equation="abcd,cde->abe"),
        node("Einsum", ["q", "k"], ["outer"], equation="nsc,nsc->ns"),
    ]
    operators = compare(nodes, constants)
    assert operators.count("FusedAttention") == 1
    assert "Einsum" not in operators


@pytest.mark.parametrize(("target", "areas"), sampled([(None, 1), ("avx2", 1), (None, 2)], [(None, 1)]))
def test_pixels_of_an_image(compare: Compare, target: str | None, areas: int) -> None:
    """Between convolutions that look beyond a pixel, of which one reads the values, too; in areas of some rows."""
    random = np.random.default_rng(5)
    constants = {
        "w": random.standard_normal((128, 3, 3, 3)).astype(np.float32) / 8,
        "w2": random.standard_normal((7, 64, 3, 3)).astype(np.float32) / 8,
        "w3": random.standard_normal((64, 1, 3, 3)).astype(np.float32) / 8,
        "line": np.array([-1, 128, 20]),
        "areas": np.array([-1, 20 // areas, 2, 64]),
        "parts": np.array([16, 16, 32]),
        "rows": np.array([-1, 4, 5, 64]),
        "scale": np.array(0.25, np.float32),
    }

    def as_image(name: str, output: str) -> list[Any]:
        return [
            node("Transpose", [name], [f"{output}a"], perm=[0, 3, 1, 2]),
            node("Reshape", [f"{output}a", "rows"], [f"{output}b"]),
            node("Transpose", [f"{output}b"], [output], perm=[0, 3, 1, 2]),
        ]

    nodes = [
        node("Conv", ["pixels", "w"], ["joint"], pads=[1] * 4),
        node("Reshape", ["joint", "line"], ["a0"]),
        node("Transpose", ["a0"], ["a1"], perm=[0, 2, 1]),
        node("Reshape", ["a1", "areas"], ["a2"]),
        node("Transpose", ["a2"], ["a"], perm=[0, 2, 3, 1]),
        node("Split", ["a", "parts"], ["aq", "ak", "av"], axis=2),
        node("Transpose", ["aq"], ["at"], perm=[0, 1, 3, 2]),
        node("MatMul", ["at", "ak"], ["s"]),
        node("Mul", ["s", "scale"], ["t"]),
        node("Softmax", ["t"], ["p"], axis=-1),
        node("Transpose", ["p"], ["pt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["av", "pt"], ["c"]),
        *as_image("c", "y0"),
        *as_image("av", "v0"),
        node("Conv", ["v0", "w3"], ["v1"], pads=[1] * 4, group=64),
        node("Add", ["y0", "v1"], ["y1"]),
        node("Conv", ["y0", "w2"], ["y2"], pads=[1] * 4),
    ]
    assert compare(nodes, constants, target=target).count("FusedAttention") == 1


def exported(heads: int, size: int) -> tuple[list[Any], dict[str, Array]]:
    """Two layers of an encoder as torch's exporter writes it: a mask of truth values, rows without keys become 0."""
    random = np.random.default_rng(2)
    constants: dict[str, Array] = {
        "split": np.array([-1, S, heads, size]),
        "flat": np.array([-1, S, size]),
        "unflat": np.array([-1, heads, size, S]),
        "merge": np.array([-1, S, heads * size]),
        "root": np.array(size**-0.25, np.float32),
        "zero": np.array(0, np.float32),
        "never": np.array(-np.inf, np.float32),
        "axes": np.array([1, 2]),
        "triangle": np.tril(np.ones((1, 1, S, S), np.bool_)),
    }
    nodes = [
        node("Cast", ["tokens"], ["real"], to=TensorProto.BOOL),
        node("Unsqueeze", ["real", "axes"], ["wide"]),
        node("And", ["wide", "triangle"], ["seen"]),
        node("And", ["seen", "shown"], ["mask"]),
        node("Where", ["mask", "zero", "never"], ["added"]),
    ]
    source = "x"
    for layer in ("a", "b"):
        for part in "qkv":
            name = f"{layer}{part}"
            width = C if layer == "a" else heads * size
            constants[f"{name}w"] = random.standard_normal((width, heads * size)).astype(np.float32) / 8
            nodes += [
                node("MatMul", [source, f"{name}w"], [f"{name}0"]),
                node("Reshape", [f"{name}0", "split"], [f"{name}1"]),
                node("Transpose", [f"{name}1"], [name], perm=[0, 2, 1, 3]),
            ]
        nodes += [
            node("Reshape", [f"{layer}k", "flat"], [f"{layer}k2"]),
            node("Transpose", [f"{layer}k2"], [f"{layer}k3"], perm=[0, 2, 1]),
            node("Reshape", [f"{layer}k3", "unflat"], [f"{layer}k4"]),
            node("Mul", [f"{layer}q", "root"], [f"{layer}q5"]),
            node("Mul", [f"{layer}k4", "root"], [f"{layer}k5"]),
            node("MatMul", [f"{layer}q5", f"{layer}k5"], [f"{layer}s"]),
            node("Add", [f"{layer}s", "added"], [f"{layer}t"]),
            node("Softmax", [f"{layer}t"], [f"{layer}p"], axis=-1),
            node("IsNaN", [f"{layer}p"], [f"{layer}bad"]),
            node("Where", [f"{layer}bad", "zero", f"{layer}p"], [f"{layer}r"]),
            node("MatMul", [f"{layer}r", f"{layer}v"], [f"{layer}c"]),
            node("Transpose", [f"{layer}c"], [f"{layer}c2"], perm=[0, 2, 1, 3]),
            node("Reshape", [f"{layer}c2", "merge"], [f"{layer}y"]),
        ]
        source = f"{layer}y"
    return nodes, constants


@pytest.mark.parametrize("target", sampled([None, "avx2"], [None]))
@pytest.mark.parametrize(("heads", "size"), [(4, 16), (3, 20)])
def test_layers_of_an_exporter(compare: Compare, target: str | None, heads: int, size: int) -> None:
    nodes, constants = exported(heads, size)
    operators = compare(nodes, constants, target=target)
    assert operators.count("FusedAttention") == 2
    assert sum("Where" in operator for operator in operators) == 1
