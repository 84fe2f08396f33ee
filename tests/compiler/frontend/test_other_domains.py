"""Operators of com.microsoft and ai.onnx.ml, compiled by their definitions, against onnxruntime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from gangway.artifact.format import Engine
from gangway.compiler.pipeline import CompileResult
from tests.helpers.onnx_models import save_model

pytestmark = pytest.mark.long

Array = Any
Check = Callable[..., list[str]]
RANDOM = np.random.default_rng(5)
_STATE = RANDOM.bit_generator.state


def contrib(operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return helper.make_node(operator, inputs, outputs, domain="com.microsoft", **attributes)


def learned(operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return helper.make_node(operator, inputs, outputs, domain="ai.onnx.ml", **attributes)


def floats(*shape: int, scale: float = 1.0) -> Array:
    return (RANDOM.standard_normal(shape) * scale).astype(np.float32)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test has the same numbers, whichever ran before."""
    RANDOM.bit_generator.state = _STATE


@pytest.fixture
def same(tmp_path: Path, compile_file: Callable[..., CompileResult], load_artifact: Any) -> Check:
    """Return the function that compares a compiled model with onnxruntime; it returns the layers' operators.

    Names of inputs in `batched` have a symbolic first dimension. `steps`: by how much integers may differ.
    """

    def same(
        nodes: list[Any],
        feeds: dict[str, Array],
        constants: dict[str, Array],
        *,
        batched: bool = True,
        opset: int = 17,
        steps: int = 0,
        tolerance: float = 2e-5,
        read: bool = False,
    ) -> list[str]:
        used = {name for item in nodes for name in item.input}
        outputs = [name for item in nodes for name in item.output if name and name not in used]
        inputs = {
            name: (helper.np_dtype_to_tensor_dtype(value.dtype), ["N" if batched else len(value), *value.shape[1:]])
            for name, value in feeds.items()
        }
        newest = 5 if any(item.op_type == "TreeEnsemble" for item in nodes) else 3
        domains = {"com.microsoft": 1, "ai.onnx.ml": newest}
        path = tmp_path / "model.onnx"
        save_model(path, nodes, inputs, dict.fromkeys(outputs, ...), constants, opset, ir_version=9, domains=domains)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        wanted = onnxruntime.InferenceSession(path, options).run(outputs, feeds)
        compiled = compile_file(path)
        assert compiled.manifest.engine is Engine.NATIVE, compiled.manifest.fallback_reason
        answers = load_artifact(compiled.folder)(feeds)
        for name, expected in zip(outputs, wanted, strict=True):
            assert (answers[name].dtype, answers[name].shape) == (expected.dtype, expected.shape), name
            if expected.dtype == object:
                assert answers[name].tolist() == expected.tolist(), name
                continue
            got, wide = answers[name].astype(np.float64), expected.astype(np.float64)
            largest = np.abs(wide).max()
            limit = (
                {"rtol": 0, "atol": steps} if expected.dtype.kind in "iu" else {"rtol": 0, "atol": tolerance * largest}
            )
            np.testing.assert_allclose(got, wide, err_msg=name, **limit)
            if expected.dtype.kind in "iu" and steps:
                assert (got != wide).mean() < 0.01, name
        return [layer.operator for layer in compiled.manifest.layers]

    return same


S, D, HEADS = 8, 32, 2


def test_products_and_activations(same: Check) -> None:
    constants = {"w": floats(7, 5), "b": floats(5), "wc": floats(4, 3, 3, 3), "bc": floats(4), "w1": floats(5, 7)}
    nodes = [
        contrib("FusedConv", ["x", "wc", "bc"], ["relu"], activation="Relu", pads=[1, 1, 1, 1]),
        contrib(
            "FusedConv",
            ["x", "wc", "bc", "z"],
            ["leaky"],
            activation="LeakyRelu",
            activation_params=[0.2],
            pads=[1] * 4,
        ),
        contrib("FusedConv", ["x", "wc"], ["clip"], activation="Clip", activation_params=[-0.5, 0.75], strides=[2, 2]),
        contrib("FusedConv", ["x", "wc"], ["hard"], activation="HardSigmoid", activation_params=[0.3, 0.4]),
        contrib("FusedGemm", ["v", "w1", "b"], ["gemm"], activation="Tanh", transB=1, alpha=0.5, beta=2.0),
        contrib("FusedGemm", ["v", "w"], ["gemm2"], activation="LeakyRelu", activation_alpha=0.1),
        contrib("FusedMatMul", ["m", "m"], ["square"], transB=1, alpha=0.25),
        contrib("FusedMatMul", ["m", "m"], ["other"], transA=1),
        contrib("TransposeMatMul", ["v", "w1"], ["turned"], transB=1, alpha=3.0),
    ]
    feeds = {"x": floats(1, 3, 6, 6), "z": floats(1, 4, 6, 6), "v": floats(1, 7), "m": floats(1, 2, 3, 5)}
    same(nodes, feeds, constants)
    turned = [contrib("FusedMatMul", ["a", "a"], ["y"], transBatchA=1, transBatchB=1, transB=1)]
    same(turned, {"a": floats(3, 2, 4, 5)}, {}, batched=False)


@pytest.mark.parametrize("opset", [12, 20])
def test_gelus_become_one_function(same: Check, opset: int) -> None:
    nodes = [
        contrib("Gelu", ["x"], ["a"]),
        contrib("BiasGelu", ["x", "b"], ["c"]),
        contrib("FastGelu", ["x", "b"], ["d"]),
        contrib("FastGelu", ["x"], ["e"]),
        contrib("QuickGelu", ["x"], ["f"]),
        contrib("QuickGelu", ["x"], ["g"], alpha=1.0),
    ]
    feeds = {"x": floats(1, 3, 8, scale=3)}
    operators = same(nodes, feeds, {"b": floats(8)}, opset=opset)
    assert sum("Gelu" in operator for operator in operators) == 4
    assert not any("Erf" in operator or "Tanh" in operator for operator in operators)


@pytest.mark.parametrize("opset", [12, 23])
def test_normalisations_become_one_kernel(same: Check, opset: int) -> None:
    constants = {"g": floats(D), "h": floats(D), "bias": floats(D), "skip": floats(S, D)}
    nodes = [
        contrib("SkipLayerNormalization", ["x", "y", "g", "h", "bias"], ["a", "", "", "sum"], epsilon=1e-5),
        contrib("SkipLayerNormalization", ["x", "skip", "g"], ["b"]),
        contrib("SkipSimplifiedLayerNormalization", ["x", "y", "g"], ["c", "", "", "sum2"], epsilon=1e-6),
        helper.make_node("LayerNormalization", ["x", "g", "h"], ["d"], axis=-1, epsilon=1e-6),
        helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["e"], axis=-1, epsilon=1e-6),
    ]
    operators = same(nodes, {"x": floats(1, S, D), "y": floats(1, S, D)}, constants, opset=opset)
    assert sum("Normalization" in operator for operator in operators) == 5
    assert not any("Reduce" in operator for operator in operators)


def test_a_transformer_is_attention_layers(same: Check) -> None:
    """Embedding, attention with each kind of mask, and its other form."""
    constants = {
        "words": floats(30, D), "places": floats(20, D), "kinds": floats(2, D), "g": floats(D), "h": floats(D),
        "w": floats(D, 3 * D, scale=0.2), "b": floats(3 * D), "wide": floats(1, HEADS, S, S),
        "w2": floats(D, 2 * D + 16, scale=0.2), "b2": floats(2 * D + 16),
    }  # fmt: skip
    ids = RANDOM.integers(0, 30, (1, S)).astype(np.int32)
    feeds = {
        "ids": ids, "kind": ids % 2, "mask": (np.arange(S) < 6).astype(np.int32)[None],
        "length": np.array([5], np.int32), "square": RANDOM.integers(0, 2, (1, S, S)).astype(np.int32),
    }  # fmt: skip
    nodes = [
        contrib(
            "EmbedLayerNormalization",
            ["ids", "kind", "words", "places", "kinds", "g", "h", "mask"],
            ["x", "count", "sum"],
        ),
        contrib("Attention", ["x", "w", "b", "mask"], ["masked"], num_heads=HEADS, scale=0.3),
        contrib("Attention", ["x", "w", "b", "length", "", "wide"], ["counted"], num_heads=HEADS),
        contrib("Attention", ["x", "w", "b", "square"], ["each"], num_heads=HEADS, mask_filter_value=-50.0),
        contrib("Attention", ["x", "w", "b", "mask"], ["causal"], num_heads=HEADS, unidirectional=1),
        contrib("Attention", ["x", "w2", "b2"], ["sizes"], num_heads=HEADS, qkv_hidden_sizes=[D, D, 16]),
    ]  # fmt: skip
    operators = same(nodes, feeds, constants)
    assert sum("FusedAttention" in operator for operator in operators) == 5
    assert "Softmax" not in operators


def test_attention_of_given_queries_keys_and_values(same: Check) -> None:
    keys = 6
    constants = {"b": floats(3 * D), "cos": floats(S, 8), "sin": floats(S, 8)}
    feeds = {
        "q": floats(1, S, D), "k": floats(1, keys, D), "v": floats(1, keys, D), "near": floats(1, HEADS, S, keys),
        "mask": (np.arange(keys) < 5).astype(np.int32)[None], "length": np.array([4], np.int32),
        "hk": floats(1, HEADS, keys, D // HEADS), "hv": floats(1, HEADS, keys, D // HEADS),
        "where": RANDOM.integers(0, S, (1, S)),
    }  # fmt: skip
    nodes = [
        contrib("MultiHeadAttention", ["q", "k", "v", "b", "mask"], ["a"], num_heads=HEADS),
        contrib("MultiHeadAttention", ["q", "k", "v", "", "length", "near"], ["c"], num_heads=HEADS, scale=0.2),
        contrib("MultiHeadAttention", ["q", "hk", "hv"], ["f"], num_heads=HEADS),
        contrib("RotaryEmbedding", ["q", "where", "cos", "sin"], ["g"]),
    ]
    operators = same(nodes, feeds, constants)
    assert sum("FusedAttention" in operator for operator in operators) == 3, operators


def test_the_last_of_few_queries_sees_every_key(same: Check) -> None:
    feeds = {"q": floats(1, 2, D), "k": floats(1, 5, D), "v": floats(1, 5, D), "x": floats(1, 4, 6)}
    feeds["shown"] = np.array([[0, 0, 1, 1]], np.int32)
    constants = {"w": floats(6, 3 * D), "b": floats(3 * D)}
    nodes = [
        contrib("MultiHeadAttention", ["q", "k", "v"], ["a"], num_heads=HEADS, unidirectional=1),
        contrib("Attention", ["x", "w", "b", "shown"], ["c"], num_heads=HEADS, unidirectional=1),
    ]
    same(nodes, feeds, constants)


def test_quantised_operators(same: Check) -> None:
    zero_points = {"uint8": 120, "int8": -7}
    for dtype, point in zero_points.items():
        low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max + 1)

        def quantised(*shape: int, low: int = low, high: int = high, dtype: str = dtype) -> Array:
            return RANDOM.integers(low, high, shape).astype(dtype)

        scales = {"sa": 0.02, "sb": 0.05, "sy": 0.0713, "s1": 1 / 256}
        constants: dict[str, Array] = {name: np.float32(value) for name, value in scales.items()}
        constants |= {"za": np.array(point, dtype), "zb": np.array(3, dtype), "zy": np.array(-point % 100, dtype)}
        constants |= {"other": quantised(1, 4, 6, 6), "zs": np.array(low, dtype)}
        a, b, y = ["x", "sa", "za"], ["other", "sb", "zb"], ["sy", "zy"]
        nodes = [
            contrib("QLinearAdd", [*a, *b, *y], ["add"]),
            contrib("QLinearMul", [*a, *b, *y], ["mul"]),
            contrib("QLinearSigmoid", [*a, "s1", "zs"], ["sigmoid"]),
            contrib("QLinearLeakyRelu", [*a, *y], ["leaky"], alpha=0.2),
            contrib("QLinearAveragePool", [*a, *y], ["pool"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
            contrib("QLinearGlobalAveragePool", [*a, *y], ["global"]),
            contrib("QLinearConcat", [*y, *a, "more", *b[1:]], ["concat"], axis=1),
            contrib("QLinearSoftmax", [*a, "s1", "zs"], ["softmax"], axis=-1, opset=13),
        ]
        same(nodes, {"x": quantised(1, 4, 6, 6), "more": quantised(1, 2, 6, 6)}, constants, steps=1)


def test_products_of_integers(same: Check) -> None:
    def integers(*shape: int, dtype: str = "uint8") -> Array:
        return RANDOM.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape).astype(dtype)

    constants = {
        "w": integers(32, 6, dtype="int8"), "sw": np.float32(0.01), "zw": np.array(4, np.int8), "bias": floats(6),
        "sws": np.abs(floats(6, scale=0.01)), "zws": np.zeros(6, np.int8), "sx": np.float32(0.03),
        "zx": np.array(99, np.uint8), "c": RANDOM.integers(-3000, 3000, 6).astype(np.int32), "sy": np.float32(0.4),
        "zy": np.array(130, np.uint8),
        "wa": integers(D, 3 * D, dtype="int8"), "ba": floats(3 * D), "swa": np.float32(0.002),
        "one": np.array(1, np.int8),
    }  # fmt: skip
    nodes = [
        contrib("MatMulIntegerToFloat", ["x", "w", "sx", "sw", "zx", "zw", "bias"], ["a"]),
        contrib("MatMulIntegerToFloat", ["x", "w", "sx", "sws", "zx", "zws"], ["b"]),
        contrib("QGemm", ["x", "sx", "zx", "w", "sw", "zw", "c"], ["float"], alpha=0.5),
        contrib("QGemm", ["x", "sx", "zx", "w", "sws", "zws", "c", "sy", "zy"], ["whole"]),
        contrib("QAttention", ["q", "wa", "ba", "sx", "swa", "", "zx", "one"], ["attended"], num_heads=HEADS),
    ]
    same(nodes, {"x": integers(1, 32), "q": integers(1, S, D)}, constants, steps=1)
    dynamic = [
        contrib("DynamicQuantizeMatMul", ["x", "w", "sws", "zws", "bias"], ["a"]),
        contrib("DynamicQuantizeMatMul", ["x", "w", "sw", "zw"], ["b"]),
    ]
    same(dynamic, {"x": floats(3, 32)}, constants, batched=False)


@pytest.mark.parametrize("opset", [9, 17])  # scikit-learn's exporter writes the oldest in which its operators are
def test_features_and_linear_models(same: Check, opset: int) -> None:
    nan = float("nan")
    constants = {"columns": np.array([3, 0, 2], np.int64)}
    nodes = [
        learned("Scaler", ["x"], ["scaled"], offset=[0.5, 1.0, -1.0, 2.0], scale=[2.0, 0.5, 1.0, 3.0]),
        learned("Scaler", ["k"], ["scaled_integers"], offset=[1.0], scale=[0.25]),
        *(learned("Normalizer", ["x"], [f"norm{norm}"], norm=norm) for norm in ("MAX", "L1", "L2")),
        learned("Binarizer", ["x"], ["binary"], threshold=0.2),
        learned("Imputer", ["x"], ["imputed"], imputed_value_floats=[1.0, 2.0, 3.0, 4.0], replaced_value_float=nan),
        learned("Imputer", ["x"], ["imputed_ones"], imputed_value_floats=[0.0], replaced_value_float=1.0),
        learned("Imputer", ["k"], ["imputed_integers"], imputed_value_int64s=[7], replaced_value_int64=2),
        learned("FeatureVectorizer", ["x", "x"], ["vector"], inputdimensions=[4, 4]),
        learned("ArrayFeatureExtractor", ["x", "columns"], ["some"]),
        learned("OneHotEncoder", ["k"], ["hot"], cats_int64s=[0, 2, 5], zeros=1),
        learned("LabelEncoder", ["k"], ["encoded"], keys_int64s=[0, 2], values_floats=[0.5, 1.5], default_float=-2.0),
        learned("LabelEncoder", ["k"], ["back"], keys_int64s=[2, 1], values_int64s=[1 << 60, 9], default_int64=3),
        learned("LinearRegressor", ["x"], ["one"], coefficients=[1.0, -0.5, 2.0, 0.25], post_transform="LOGISTIC"),
        learned(
            "LinearRegressor",
            ["x"],
            ["two"],
            coefficients=[0.1] * 8,
            intercepts=[0.1, 0.2],
            targets=2,
            post_transform="PROBIT",
        ),
        *(
            learned(
                "SVMRegressor",
                ["x"],
                [f"svm{kernel}"],
                kernel_type=kernel,
                n_supports=3,
                rho=[0.3],
                one_class=kernel == "LINEAR",
                coefficients=[0.5, -1.0, 0.75],
                support_vectors=floats(12).tolist(),
                kernel_params=[0.3, 0.2, 3.0],
            )
            for kernel in ("LINEAR", "POLY", "RBF", "SIGMOID")
        ),
        learned("SVMRegressor", ["x"], ["svm"], coefficients=[0.5, -1.0, 2.0, 1.0], rho=[0.1], kernel_params=[0.0] * 3),
    ]
    same(nodes, {"x": floats(1, 4) + 2, "k": np.array([[2, 1, 0]], np.int64)}, constants, opset=opset)


def test_numbers_that_are_equal_in_old_operator_sets(same: Check) -> None:
    nodes = [
        learned("LabelEncoder", ["x"], ["encoded"], keys_floats=[0.5, -1.25], values_floats=[7.0, 8.0]),
        learned("Imputer", ["x"], ["imputed"], imputed_value_floats=[3.0], replaced_value_float=0.5),
        *(learned("Normalizer", [x], [f"norm_{x}"], norm="L1") for x in ("x", "zeros")),
    ]
    x = np.array([[0.5, 0.0, -1.25, 4.0]], np.float32)
    same(nodes, {"x": x, "zeros": np.zeros_like(x)}, {}, opset=9)


def of_labels(kind: str, count: int) -> dict[str, list[int] | list[str]]:
    """The attribute that names classes."""
    return {kind: (["no", "", "été", "7", "no"] if kind.endswith("strings") else [5, -2, 9, 4, 11])[:count]}


@pytest.mark.parametrize("kind", ["classlabels_ints", "classlabels_strings"])
def test_linear_classifiers(same: Check, kind: str) -> None:
    nodes = [
        learned(
            "LinearClassifier", ["x"], [f"label{classes}{side}{transform}", f"{classes}{side}{transform}"],
            coefficients=(side * floats(8 * classes)).tolist(), intercepts=[0.1] * classes,
            **of_labels(kind, max(classes, 2)), post_transform=transform,
        )
        for classes in (1, 2, 3) for side in (1, -1) for transform in ("LOGISTIC", "SOFTMAX_ZERO")
    ]  # fmt: skip
    same(nodes, {"x": floats(1, 4)}, {})


@pytest.mark.parametrize("kind", ["classlabels_ints", "classlabels_strings"])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_support_vector_classifiers(same: Check, classes: int, kind: str) -> None:
    sizes = [3, 1, 4, 2, 1][:classes]
    nodes = [
        learned(
            "SVMClassifier",
            ["x"],
            [f"label{index}", f"scores{index}"],
            kernel_type=kernel,
            kernel_params=[0.3, 0.2, 3.0],
            vectors_per_class=sizes,
            support_vectors=floats(4 * sum(sizes)).tolist(),
            coefficients=floats((classes - 1) * sum(sizes)).tolist(),
            rho=(floats(classes * (classes - 1) // 2) / 4).tolist(),
            **of_labels(kind, classes),
            post_transform=transform,
        )
        for index, (kernel, transform) in enumerate(
            [("LINEAR", "NONE"), ("POLY", "SOFTMAX"), ("RBF", "LOGISTIC"), ("SIGMOID", "NONE"), ("RBF", "SOFTMAX_ZERO")]
        )
    ]
    same(nodes, {"x": floats(1, 4)}, {})


def test_shapes_behind_a_definition_are_followed(same: Check) -> None:
    """What the first definition computes must be inferred before the second one can be written."""
    blocks = np.arange(8 * 2 * 8, dtype=np.uint8).reshape(8, 2, 8)
    constants = {"w": blocks, "s": floats(16) / 8, "one": np.array([1]), "rest": np.array([-1, 2, 4])}
    nodes = [
        contrib("MatMulNBits", ["x", "w", "s"], ["m"], K=32, N=8, bits=4, block_size=16),
        helper.make_node("Shape", ["m"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "one"], ["rows"]),
        helper.make_node("Concat", ["rows", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["m", "to"], ["parts"]),
        contrib("QuickGelu", ["parts"], ["y"]),
    ]
    assert "PackedMatMul" in same(nodes, {"x": floats(1, 3, 32)}, {**constants, "zero": np.array([0])})


def test_a_function_alone_imports_a_domain(compile_file: Any, load_artifact: Any, tmp_path: Path) -> None:
    imports = [helper.make_opsetid(*pair) for pair in (("", 20), ("com.microsoft", 1), ("ai.onnx.ml", 3))]
    inside = [contrib("QuickGelu", ["a"], ["b"]), learned("Scaler", ["b"], ["c"], scale=[2.0], offset=[0.5])]
    function = helper.make_function("own", "act", ["a"], ["c"], inside, imports)
    calls = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("act", ["m"], ["y"], domain="own")]
    own = {"opset": 20, "ir_version": 9, "domains": {"own": 1}, "functions": [function]}
    path = save_model(tmp_path / "model.onnx", calls, {"x": ["N", 8]}, {"y": ["N", 8]}, {"w": floats(8, 8)}, **own)
    compiled = compile_file(path)
    assert not compiled.manifest.fallback_reason
    feeds = {"x": floats(1, 8)}
    (wanted,) = onnxruntime.InferenceSession(path).run(None, feeds)
    np.testing.assert_allclose(load_artifact(compiled.folder)(feeds)["y"], wanted, rtol=2e-5, atol=1e-6)


def test_distances_and_triangles(same: Check) -> None:
    constants = {"points": floats(11, 6), "square": floats(5, 5), "k": np.array(1)}
    nodes = [
        contrib("CDist", ["x", "points"], ["far"], metric="euclidean"),
        contrib("CDist", ["x", "points"], ["squares"], metric="sqeuclidean"),
        contrib("Trilu", ["square", "k"], ["upper"], upper=0),
        helper.make_node("MatMul", ["z", "upper"], ["y"]),
    ]
    same(nodes, {"x": floats(1, 6), "z": floats(1, 5)}, constants)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
def test_quantisers_of_another_domain(same: Check, dtype: Any) -> None:
    """Those of 16 bits, of 8 bits beside them, and of a bias, in a set of operators without 16 bits."""
    kind, zero = np.iinfo(dtype), np.array(np.iinfo(dtype).max // 3, dtype)
    weights = RANDOM.integers(kind.min, kind.max, (6, 7), dtype, endpoint=True)
    constants = {
        "s": np.array(12 / kind.max, np.float32), "z": zero, "w": weights, "sw": abs(floats(7)) / kind.max,
        "zw": np.arange(7).astype(dtype), "b": np.arange(-3, 4, dtype=np.int32), "sb": np.float32([0.01]),
        "zb": np.array(0, np.int32),
    }  # fmt: skip
    nodes = [
        contrib("QuantizeLinear", ["x", "s", "z"], ["q"]),
        contrib("DequantizeLinear", ["q", "s", "z"], ["d"]),
        contrib("DequantizeLinear", ["w", "sw", "zw"], ["dw"], axis=1),
        contrib("DequantizeLinear", ["b", "sb", "zb"], ["db"]),
        helper.make_node("MatMul", ["d", "dw"], ["m"]),
        helper.make_node("Add", ["m", "db"], ["y"]),
    ]
    same(nodes, {"x": floats(1, 3, 6)}, constants)


@pytest.mark.parametrize(("bits", "with_zeros"), [(4, True), (4, False), (8, True)])
def test_embeddings_of_integers(same: Check, bits: int, with_zeros: bool) -> None:
    """As model builders write them; and those of 8 bits that the quantiser writes."""
    bytes_of = {"table": 64 * bits // 8, "zeros": 4 * bits // 8}
    stored = {name: RANDOM.integers(0, 256, (20, count), np.uint8) for name, count in bytes_of.items()}
    tables = {f"e{n}": RANDOM.integers(0, 256, size, np.uint8) for n, size in enumerate([(20, 64), (9, 64), (2, 64)])}
    tables |= {f"e{n}": RANDOM.integers(0, 256, 64, np.uint8) for n in (3, 4)}
    factors = {f"s{n}": np.array(0.02 * (n + 1), np.float32) for n in range(5)}
    names = ["table", "ids", "scales", *(["zeros"] if with_zeros else [])]
    zeros, scales = [f"z{n}" for n in range(5)], [*factors]
    constants = {**stored, **tables, **factors, "scales": abs(floats(20, 4)), "w": floats(64, 8)}
    constants |= {name: np.array(120, np.uint8) for name in zeros}
    constants |= {"blocks": stored["table"].reshape(20, 4, -1), "rows": np.array([20, -1])}
    nodes = [
        contrib("GatherBlockQuantized", names, ["a"], bits=bits, block_size=16),
        helper.make_node("Reshape", ["blocks", "rows"], ["shared"]),  # with the last product of a decoder
        contrib("GatherBlockQuantized", ["shared", *names[1:]], ["c"], bits=bits, block_size=16),
        helper.make_node("Add", ["a", "c"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
        contrib("QEmbedLayerNormalization", ["ids", "kinds", *tables, "mask", *scales, *zeros], ["b", "count"]),
    ]
    feeds = {
        "ids": RANDOM.integers(0, 20, (1, 5), np.int32), "kinds": RANDOM.integers(0, 2, (1, 5), np.int32),
        "mask": np.array([[1, 1, 1, 0, 0]], np.int32),
    }  # fmt: skip
    same(nodes, feeds, constants)
