"""Tree ensembles against onnxruntime: trees as scikit-learn, LightGBM and XGBoost grow them, and odd ones."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gangway.artifact.format import Engine
from tests.compiler.frontend.test_other_domains import Check, learned
from tests.compiler.frontend.test_other_domains import same as same  # noqa: PLC0414 - a fixture
from tests.helpers.onnx_models import save_model

pytestmark = pytest.mark.long

Array = Any
COLUMNS = 5
MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]


def grown(
    trees: int,
    depth: int,
    weights: Callable[[int], Iterator[tuple[int, float]]],
    kind: str,
    modes: list[str],
    seed: int = 0,
    stop: float = 0.2,
) -> dict[str, Any]:
    """Attributes of an ensemble; `weights(tree)` yields pairs of target and weight of one leaf."""
    random = np.random.default_rng(seed)
    nodes: list[tuple[int, int, int, str, float, int, int, int]] = []
    leaves: list[tuple[int, int, int, float]] = []

    def grow(tree: int, number: int, left: int, numbers: Iterator[int]) -> None:
        if not left or (random.random() < stop and number):
            nodes.append((tree, number, 0, "LEAF", 0.0, 0, 0, 0))
            leaves.extend((tree, number, *pair) for pair in weights(tree))
            return
        children = next(numbers), next(numbers)
        mode, value = random.choice(modes), float(random.integers(-2, 3)) / 2
        missing = int(random.random() < 0.5)
        nodes.append((tree, number, int(random.integers(COLUMNS)), str(mode), value, *children, missing))
        for child in children:
            grow(tree, child, left - 1, numbers)

    for tree in range(trees):
        grow(tree, 0, depth, itertools.count(1))
    names = (
        "treeids",
        "nodeids",
        "featureids",
        "modes",
        "values",
        "truenodeids",
        "falsenodeids",
        "missing_value_tracks_true",
    )
    columns = {f"nodes_{name}": list(column) for name, column in zip(names, zip(*nodes, strict=True), strict=True)}
    parts = ("treeids", "nodeids", "ids", "weights")
    return columns | {
        f"{kind}_{name}": list(column) for name, column in zip(parts, zip(*leaves, strict=True), strict=True)
    }


def each(targets: int, seed: int = 1, least: float = -1.0) -> Callable[[int], Iterator[tuple[int, float]]]:
    """Every leaf has a weight for each target, as in a random forest."""
    random = np.random.default_rng(seed)
    return lambda tree: ((target, float(random.uniform(least, 1))) for target in range(targets))


def one(targets: int, seed: int = 2, least: float = -1.0) -> Callable[[int], Iterator[tuple[int, float]]]:
    """Every leaf of a tree has a weight for the same target, as with gradient boosting."""
    random = np.random.default_rng(seed)
    return lambda tree: iter([(tree % targets, float(random.uniform(least, 1)))])


def rows(count: int) -> Array:
    """Numbers that often equal thresholds, and some NaN."""
    random = np.random.default_rng(3)
    x = (random.integers(-3, 4, (count, COLUMNS)) / 2).astype(np.float32)
    x[random.random(x.shape) < 0.1] = np.nan
    return x


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_regressors_of_all_modes(same: Check, dtype: Any) -> None:
    """Of numbers in float64 the sums are float32, too."""
    nodes = []
    for mode in [*MODES, "mixed"]:
        trees = grown(9, 4, each(3), "target", MODES if mode == "mixed" else [mode])
        nodes.append(
            learned("TreeEnsembleRegressor", ["x"], [mode], n_targets=3, base_values=[0.1, 0.2, -0.3], **trees)
        )
    for number, function in enumerate(["SUM", "AVERAGE", "MIN", "MAX"]):
        trees = grown(5, 3, one(2), "target", MODES[:4], seed=number)
        for targets in (1, 2):
            trees["target_ids"] = [target % targets for target in trees["target_ids"]]
            more = {"n_targets": targets, "aggregate_function": function}
            nodes.append(learned("TreeEnsembleRegressor", ["x"], [f"{function}{targets}"], **more, **trees))
    for kind in ("SOFTMAX", "LOGISTIC"):
        for targets in (1, 2):
            trees = grown(4, 3, each(targets), "target", MODES[:1])
            more = {"n_targets": targets, "post_transform": kind}
            nodes.append(learned("TreeEnsembleRegressor", ["x"], [f"{kind}{targets}"], **more, **trees))
    same(nodes, {"x": rows(40).astype(dtype)}, {}, batched=False)


def test_a_target_that_no_leaf_may_have_gets_no_base_value(tmp_path: Any, compile_file: Any) -> None:
    """onnxruntime answers 0 for it. onnxmltools writes such files of XGBoost with several targets."""
    trees = grown(6, 3, one(1), "target", MODES[:1])
    node = learned("TreeEnsembleRegressor", ["x"], ["y"], n_targets=2, base_values=[0.5, 0.25], **trees)
    kinds = {"x": [1, COLUMNS]}, {"y": [1, 2]}
    path = save_model(tmp_path / "model.onnx", [node], *kinds, ir_version=9, domains={"ai.onnx.ml": 3})
    assert "number 1 may have no score" in compile_file(path).manifest.fallback_reason


def test_regressors_in_a_file_of_opset_8(same: Check) -> None:
    """LightGBM's converter writes it: no Constant node of integers is valid there."""
    trees = grown(9, 4, each(2), "target", MODES[:1])
    operators = same(
        [learned("TreeEnsembleRegressor", ["x"], ["y"], n_targets=2, **trees)], {"x": rows(1)}, {}, opset=8
    )
    assert operators == ["TreeSums"]


def test_many_trees_are_cut_into_groups(same: Check) -> None:
    trees = grown(350, 5, one(3), "target", MODES[:1], stop=0.0)
    operators = same([learned("TreeEnsembleRegressor", ["x"], ["y"], n_targets=3, **trees)], {"x": rows(1)}, {})
    assert operators == ["TreeSums", "TreeSums"]


@pytest.mark.parametrize(
    ("kind", "labels", "dtype"),
    [
        ("int64s", [5, -3, 8], np.float32),
        ("int64s", [5, -3, 8], np.float64),
        ("strings", ["no", "", "été"], np.float32),
    ],
)
def test_classifiers(same: Check, kind: str, labels: list[int] | list[str], dtype: Any) -> None:
    nodes = []
    for name, weights, classes, more in (
        ("forest", each(3, least=0.0), 3, {}),
        ("boosted", one(3), 3, {"base_values": [0.5, 0.25, -0.5]}),
        ("two", each(2, least=0.0), 2, {}),
        ("two_signs", each(2), 2, {}),
        ("binary", one(1), 2, {}),
        ("second", one(1), 2, {}),
        ("second_positive", one(1, least=0.0), 2, {}),
        ("binary_positive", one(1, least=0.0), 2, {}),
        ("binary_base", one(1), 2, {"base_values": [-0.25]}),
    ):  # fmt: skip
        trees = grown(6, 4, weights, "class", ["BRANCH_LEQ", "BRANCH_LT"])
        if name == "binary_positive":
            trees["class_weights"] = [weight / 6 for weight in trees["class_weights"]]
        if name.startswith("second"):
            trees["class_ids"] = [1 for _ in trees["class_ids"]]
        keys = {f"classlabels_{kind}": labels[:classes], **more, **trees}
        for transform in ("LOGISTIC", "NONE") if classes == 2 else ("SOFTMAX",):
            outputs = [f"{name}_{transform}_label", f"{name}_{transform}"]
            nodes.append(learned("TreeEnsembleClassifier", ["x"], outputs, post_transform=transform, **keys))
    same(nodes, {"x": rows(50).astype(dtype)}, {}, batched=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ensembles_with_leaves_apart(same: Check, dtype: Any) -> None:
    def tensor(values: list[float], kind: Any = dtype) -> Any:
        return numpy_helper.from_array(np.array(values, kind))

    nan = float("nan")
    # Node 0: x0 in {0.5, 1, 2}; node 1: x1 <= 0; node 2: x2 in {0}; node 3 is a tree of one leaf.
    node = learned(
        "TreeEnsemble",
        ["x"],
        ["y"],
        n_targets=2,
        tree_roots=[0, 3],
        nodes_featureids=[0, 1, 2, 0],
        nodes_splits=tensor([0.0, 0.0, 0.0, 0.0]),
        nodes_modes=tensor([6, 0, 6, 0], np.uint8),
        nodes_truenodeids=[1, 0, 3, 5],
        nodes_trueleafs=[0, 1, 1, 1],
        nodes_falsenodeids=[2, 1, 4, 5],
        nodes_falseleafs=[0, 1, 1, 1],
        leaf_targetids=[0, 1, 0, 0, 1, 1],
        leaf_weights=tensor([1.0, 10.0, 20.0, 40.0, 80.0, 0.125]),
        membership_values=tensor([1.0, 0.5, 2.0, nan, 0.0, nan]),
    )
    same([node], {"x": rows(60).astype(dtype)}, {}, batched=False)


def test_nodes_that_are_no_trees_are_left_to_onnxruntime(tmp_path: Any, compile_file: Any) -> None:
    """A kernel would never leave a cycle."""
    trees = grown(1, 2, each(1), "target", MODES[:1])
    trees["nodes_truenodeids"] = [0 for _ in trees["nodes_truenodeids"]]
    node = learned("TreeEnsembleRegressor", ["x"], ["y"], n_targets=1, **trees)
    kinds = {"x": [1, COLUMNS]}, {"y": [1, 1]}
    path = save_model(tmp_path / "model.onnx", [node], *kinds, ir_version=9, domains={"ai.onnx.ml": 3})
    try:
        reason = compile_file(path).manifest.fallback_reason
    except Exception as error:
        reason = str(error)
    assert "leads back to itself" in reason


def test_scores_are_a_tensor_without_their_zip_map(tmp_path: Any, compile_file: Any, load_artifact: Any) -> None:
    trees = grown(6, 4, each(3, least=0.0), "class", MODES[:1])
    x = rows(2)
    for kind, labels in (("int64s", [5, -3, 8]), ("strings", ["a", "b", "c"])):
        keys: dict[str, Any] = {f"classlabels_{kind}": labels}
        nodes = [
            learned("TreeEnsembleClassifier", ["x"], ["label", "scores"], post_transform="SOFTMAX", **keys, **trees),
            learned("ZipMap", ["scores"], ["probabilities"], **keys),
        ]
        element = TensorProto.INT64 if kind == "int64s" else TensorProto.STRING
        maps = helper.make_sequence_type_proto(
            helper.make_map_type_proto(element, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
        )
        graph = helper.make_graph(
            nodes,
            "test",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", COLUMNS])],
            [helper.make_tensor_value_info("label", element, ["N"]), helper.make_value_info("probabilities", maps)],
        )
        path = tmp_path / f"{kind}.onnx"
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)], ir_version=8)
        path.write_bytes(model.SerializeToString())
        answers = onnxruntime.InferenceSession(path).run(None, {"x": x})
        wanted = np.array([[row[label] for label in labels] for row in answers[1]], np.float32)
        compiled = compile_file(path)
        manifest = compiled.manifest
        assert [(item.name, item.shape) for item in manifest.outputs] == [("label", (-1,)), ("probabilities", (-1, 3))]
        assert manifest.outputs[1].datatype == "FP32"
        assert manifest.engine is Engine.NATIVE
        runner = load_artifact(compiled.folder)
        got = [runner({"x": x[row : row + 1]}) for row in range(2)]
        assert [answer["label"].tolist() for answer in got] == answers[0].reshape(2, 1).tolist()
        np.testing.assert_allclose(np.concatenate([answer["probabilities"] for answer in got]), wanted, rtol=1e-5)
