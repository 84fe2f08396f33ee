"""Operators of ai.onnx.ml."""

from typing import Any

import numpy as np

from benchmarks.fuzz.differential.draft import Draft
from benchmarks.fuzz.differential.rules.registry import rule


@rule("Scaler", domain="ml")
def scaled(draft: Draft) -> None:
    """An offset and a scale, of all or of each column."""
    columns = draft.whole(1, 4)
    length = draft.pick(1, columns)
    x = draft.tensor(
        [draft.whole(1, 3), columns], draft.type_of("T", "float32", "int64", "int32"), draft.pick("finite", "")
    )
    draft.finish(x, offset=[draft.pick(0.5, -1.0, 2.0)] * length, scale=[draft.pick(0.5, 3.0)] * length)


@rule("Normalizer", domain="ml")
def normalised(draft: Draft) -> None:
    """Rows of length one."""
    x = draft.tensor(
        [draft.whole(1, 3), draft.whole(1, 4)],
        draft.type_of("T", "float32", "int64", "int32"),
        draft.pick("plain", "ties"),
    )
    draft.finish(x, norm=draft.pick("MAX", "L1", "L2"))


@rule("Binarizer", domain="ml")
def above(draft: Draft) -> None:
    """Whether numbers are above a threshold."""
    x = draft.tensor(draft.shape(1), draft.type_of("T", "float32", "float64", "int64", "int32"), "finite")
    draft.finish(x, threshold=draft.pick(None, 0.5, -1.0))


@rule("Imputer", domain="ml")
def imputed(draft: Draft) -> None:
    """Values in place of missing ones."""
    columns = draft.whole(1, 4)
    if draft.chance(0.6):
        x = draft.tensor([draft.whole(1, 3), columns], "float32")
        length = draft.pick(1, columns)
        missing = draft.pick(float("nan"), 0.5, None)
        draft.finish(x, imputed_value_floats=[draft.pick(7.0, -0.5)] * length, replaced_value_float=missing)
    else:
        x = draft.tensor([draft.whole(1, 3), columns], "int64")
        draft.finish(x, imputed_value_int64s=[9], replaced_value_int64=draft.pick(0, 1))


@rule("FeatureVectorizer", domain="ml")
def joined(draft: Draft) -> None:
    """Columns beside each other."""
    rows = draft.whole(1, 3)
    sizes = [draft.whole(1, 3) for _ in range(draft.whole(1, 3))]
    dtype = draft.type_of("T1", "float32", "int64", "int32")
    draft.finish(*(draft.tensor([rows, size], dtype, constant=0) for size in sizes), inputdimensions=sizes)


@rule("ArrayFeatureExtractor", domain="ml")
def extracted(draft: Draft) -> None:
    """Some columns."""
    columns = draft.whole(1, 5)
    x = draft.tensor([*draft.shape(0, 2, empty=0), columns], draft.type_of("T", "float32", "int64", "int32"))
    draft.finish(x, draft.weight(draft.random.integers(0, columns, [draft.whole(1, 3)]), "int64"))


@rule("OneHotEncoder", domain="ml")
def one_hot(draft: Draft) -> None:
    """A column for each category."""
    x = draft.tensor(draft.shape(1, 2, empty=0), draft.pick("int64", "float32", "int32"), "ties")
    draft.finish(x, cats_int64s=[0, 1, -1, 2], zeros=draft.pick(None, 1))


@rule("LabelEncoder", domain="ml")
def encoded(draft: Draft) -> None:
    """One label for another."""
    kind, result = draft.pick("int64s", "floats", "strings"), draft.pick("int64s", "floats", "strings")
    keys: dict[str, list[Any]] = {"int64s": [0, 1, -1], "floats": [0.5, float("nan"), -1.0], "strings": ["a", "b", ""]}
    values: dict[str, list[Any]] = {"int64s": [7, 8, 9], "floats": [0.25, 1e9, -0.0], "strings": ["x", "y", "z"]}
    dtype = {"int64s": "int64", "floats": "float32", "strings": "object"}[kind]
    x = draft.tensor(draft.shape(1), dtype, "ties" if kind == "int64s" else "")
    attributes: dict[str, Any] = {f"keys_{kind}": keys[kind], f"values_{result}": values[result]}
    defaults: dict[str, tuple[str, Any]] = {
        "int64s": ("default_int64", -5),
        "floats": ("default_float", 3.5),
        "strings": ("default_string", "?"),
    }
    name, value = defaults[result]
    draft.finish(x, **attributes, **({name: value} if draft.chance(0.5) else {}))


@rule("LinearRegressor", "LinearClassifier", domain="ml")
def linear(draft: Draft) -> None:
    """Products with coefficients."""
    columns, targets = draft.whole(1, 4), draft.whole(2, 3)
    x = draft.tensor(
        [draft.whole(1, 3), columns],
        draft.type_of("T" if draft.operator == "LinearRegressor" else "T1", "float32", "int64", "int32"),
        "plain",
    )
    numbers = draft.random.standard_normal(columns * targets).round(2).tolist()
    draft.sums()
    transform = draft.pick("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")
    if draft.operator == "LinearRegressor":
        draft.finish(
            x,
            coefficients=numbers,
            intercepts=[0.5] * targets,
            targets=targets,
            post_transform=draft.pick("NONE", "SOFTMAX"),
        )
    else:
        draft.finish(
            x,
            outputs=2,
            coefficients=numbers,
            intercepts=[0.5, -0.5, 0.1][:targets],
            classlabels_ints=list(range(10, 10 + targets)),
            post_transform=transform,
        )


@rule("SVMRegressor", "SVMClassifier", domain="ml")
def vectors(draft: Draft) -> None:
    """Sums of kernels of support vectors."""
    columns, count = draft.whole(1, 3), 4
    x = draft.tensor([draft.whole(1, 3), columns], "float32", "plain")
    kernel = draft.pick("LINEAR", "POLY", "RBF", "SIGMOID")
    common: dict[str, Any] = {
        "kernel_type": kernel,
        "kernel_params": [0.3, 0.5, 2.0],
        "support_vectors": draft.random.standard_normal(count * columns).round(2).tolist(),
    }
    draft.sums(1e-3, 1e-4)
    coefficients = draft.random.standard_normal(count).round(2).tolist()
    if draft.operator == "SVMRegressor":
        draft.finish(x, coefficients=coefficients, rho=[0.2], n_supports=count, **common)
    else:
        draft.finish(
            x,
            outputs=2,
            coefficients=coefficients,
            rho=[0.2],
            vectors_per_class=[2, 2],
            classlabels_ints=[0, 1],
            **common,
        )


@rule("TreeEnsembleRegressor", "TreeEnsembleClassifier", domain="ml")
def trees(draft: Draft) -> None:
    """Small trees, whose comparisons meet ties and NaN."""
    columns = draft.whole(1, 3)
    count = draft.whole(1, 3)
    x = draft.given(draft.numbers([draft.whole(1, 3), columns], "float32", draft.pick("ties", "", "plain")))
    mode = draft.pick("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
    nodes: dict[str, Any] = {
        "nodes_treeids": [tree for tree in range(count) for _ in range(3)],
        "nodes_nodeids": [0, 1, 2] * count,
        "nodes_featureids": [value for _ in range(count) for value in (draft.whole(0, columns - 1), 0, 0)],
        "nodes_values": [value for _ in range(count) for value in (draft.pick(0.0, 0.5, -0.5), 0.0, 0.0)],
        "nodes_modes": [mode, "LEAF", "LEAF"] * count,
        "nodes_truenodeids": [1, 0, 0] * count,
        "nodes_falsenodeids": [2, 0, 0] * count,
        "nodes_missing_value_tracks_true": [draft.whole(0, 1), 0, 0] * count,
    }
    leaf = "target" if draft.operator == "TreeEnsembleRegressor" else "class"
    leaves: dict[str, Any] = {
        f"{leaf}_treeids": [tree for tree in range(count) for _ in range(2)],
        f"{leaf}_nodeids": [1, 2] * count,
        f"{leaf}_ids": [draft.whole(0, 1) for _ in range(2 * count)],
        f"{leaf}_weights": [float(np.round(value, 2)) for value in draft.random.standard_normal(2 * count)],
    }
    draft.sums()
    transform = draft.pick("NONE", "NONE", "SOFTMAX", "LOGISTIC")
    if leaf == "target":
        draft.finish(
            x,
            n_targets=2,
            aggregate_function=draft.pick("SUM", "AVERAGE", "MIN", "MAX"),
            post_transform=draft.pick("NONE", "SOFTMAX"),
            **nodes,
            **leaves,
        )
    else:
        draft.finish(x, outputs=2, classlabels_int64s=[3, 5], post_transform=transform, **nodes, **leaves)
