"""Definitions of tree ensembles (ai.onnx.ml): a private operator adds up leaves, ONNX's operators do the rest.

That operator, TreeSums, knows one kind of node only: x[feature] <= threshold leads to the first child, else to the
second. All other comparisons become such nodes here, by neighbouring thresholds and exchanged children.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from gangway.compiler.frontend.decompositions import Body, defines
from gangway.compiler.frontend.graph import PRIVATE_DOMAIN
from gangway.compiler.frontend.ml_operators import (
    DOMAIN,
    choose_label,
    floats,
    labels_of,
    pick_label,
    probit,
    rows_and_columns,
    transform,
)
from gangway.compiler.kernels.specs import Array

TREE_SUMS = "TreeSums"
_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
_LEQ, _LT, _GTE, _GT, _EQ, _NEQ, _MEMBER = range(7)
_TRANSFORMS = (b"NONE", b"SOFTMAX", b"LOGISTIC", b"SOFTMAX_ZERO", b"PROBIT")
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_NOTHING = {"SUM": 0.0, "AVERAGE": 0.0, "MIN": np.inf, "MAX": -np.inf}
_MOST_WEIGHTS = 1 << 26  # of leaves times targets


@dataclass
class Nodes:
    """Inner nodes of all trees; children are numbers of nodes or, of leaf i, -1 - i."""

    features: Array
    thresholds: Array
    modes: Array
    true: Array
    false: Array
    missing: Array  # whether NaN counts as true
    members: list[Array]  # of each node of mode _MEMBER, in their order


@dataclass
class Ensemble:
    """Trees by the numbers of their roots, which may be leaves, and what leaves add: weights of targets.

    A leaf may occur several times in `leaves`.
    """

    nodes: Nodes
    roots: Array
    trees: Array  # of each leaf; which numbers trees have does not matter
    leaves: Array
    targets: Array
    weights: Array


@defines("TreeEnsembleRegressor", domain=DOMAIN)
def regressor(body: Body) -> None:
    """Sums, means or extremes of leaves, for each target."""
    ensemble = _by_node_ids(body, "target")
    aggregate = body.attribute("aggregate_function", b"SUM").decode()
    base = _numbers(body, "base_values")
    _regress(body, ensemble, body.attribute("n_targets", 1), aggregate, body.attribute("post_transform", b"NONE"), base)


@defines("TreeEnsemble", domain=DOMAIN)
def tree_ensemble(body: Body) -> None:
    """The same, with leaves apart from nodes."""
    ensemble = _by_leaves(body)
    aggregate = _AGGREGATES[body.attribute("aggregate_function", 1)]
    kind = _TRANSFORMS[body.attribute("post_transform", 0)]
    _regress(body, ensemble, body.attribute("n_targets", 1), aggregate, kind, None)


@defines("TreeEnsembleClassifier", domain=DOMAIN)
def classifier(body: Body) -> None:
    """Sums of each class, and the label of the largest; two classes may have one sum."""
    labels, kind = labels_of(body, "classlabels_int64s"), body.attribute("post_transform", b"NONE")
    ensemble, base = _by_node_ids(body, "class"), _numbers(body, "base_values")
    label, result = [*body.node.outputs, ""][:2]
    if labels.size < 2:
        raise body.node.unsupported(f"{labels.size} labels")
    if labels.size > 2:
        scores = _based(body, _sums(body, ensemble, labels.size, "SUM"), base)
        if not (ensemble.weights >= 0).all():  # else a class without a score is as one of 0
            _require_scores(body, ensemble, range(labels.size))
        pick_label(body, labels, scores, label)
        transform(body, kind, _as_floats(body, scores), result)
    else:
        _classify_two(body, ensemble, labels, base, kind)


def _classify_two(body: Body, ensemble: Ensemble, labels: Array, base: Array | None, kind: bytes) -> None:
    """Two classes, with sums for both or for one of them, which says how sure the second one is.

    With sums for both, onnxruntime's integer labels are 0 and 1, whatever the node's are.
    """
    label, result = [*body.node.outputs, ""][:2]
    dtype, classes = _dtype(body), np.unique(ensemble.targets).tolist()
    single = classes == [0]
    if base is not None and not (single and base.size == 1):
        raise body.node.unsupported("base values of two classes")
    if single and kind == b"PROBIT":
        raise body.node.unsupported("PROBIT of one sum for two classes")
    _require_scores(body, ensemble, classes)
    sums = _based(body, _sums(body, ensemble, 1 if single else 2, "SUM"), base)
    second = sums if single else body.slice(sums, 1, 1, 2)
    positive = len(classes) == 1 and bool((ensemble.weights >= 0).all())
    above = body.op("Greater", second, body.constant(0.5 if positive else 0.0, dtype))
    is_numbered = len(classes) > 1 and labels.dtype != object
    choose_label(body, np.arange(2) if is_numbered else labels, above, label)
    if not single:
        transform(body, kind, _as_floats(body, sums), result)
        return
    logistic = kind == b"LOGISTIC"
    first = body.op("Sub", body.constant(1, dtype), sums) if positive and not logistic else body.op("Neg", sums)
    both = _as_floats(body, body.op("Concat", first, sums, axis=1))
    transform(body, kind if logistic else b"NONE", both, result)


def _regress(body: Body, ensemble: Ensemble, targets: int, aggregate: str, kind: bytes, base: Array | None) -> None:
    dtype, output = _dtype(body), body.node.outputs[0]
    sums = _sums(body, ensemble, targets, aggregate)
    if aggregate == "AVERAGE":
        sums = body.op("Div", sums, body.constant(ensemble.roots.size, dtype))
    if aggregate in ("MIN", "MAX"):  # of no leaf at all it is 0
        nothing = body.op("Equal", sums, body.constant(_NOTHING[aggregate], dtype))
        sums = body.op("Where", nothing, body.constant(0, dtype), sums)
    if base is not None and targets > 1:
        _require_scores(body, ensemble, range(targets))
    sums = _based(body, sums, base)
    if body.node.operator != "TreeEnsemble":
        sums, dtype = _as_floats(body, sums), "float32"
    if targets > 1:
        transform(body, kind, sums, output, dtype)
    elif kind == b"PROBIT":
        probit(body, sums, output, dtype)
    else:
        body.op("Identity", sums, output=output)


def _based(body: Body, sums: str, base: Array | None) -> str:
    return sums if base is None else body.op("Add", sums, body.constant(base.astype(_dtype(body))))


def _as_floats(body: Body, sums: str) -> str:
    """Sums as outputs of older operators have them: in float32, also of inputs in float64."""
    return body.op("Cast", sums, to=TensorProto.FLOAT) if _dtype(body) == "float64" else sums


def _dtype(body: Body) -> str:
    """What is computed: float64 for inputs of that type, else float32."""
    return "float64" if body.type(0).dtype == "float64" else "float32"


def _require_scores(body: Body, ensemble: Ensemble, classes: Sequence[int]) -> None:
    """Raise UnsupportedModelError unless all leaves of some tree have a weight of the class, for each of these.

    onnxruntime passes over classes without a weight in the leaves that a row reaches, and adds no base value to such a
    target of a regressor that has several.
    """
    leaves = np.bincount(ensemble.trees)
    for number in classes:
        found = np.unique(ensemble.leaves[ensemble.targets == number])
        if not ((np.bincount(ensemble.trees[found], minlength=leaves.size) == leaves) & (leaves > 0)).any():
            raise body.node.unsupported(f"number {number} may have no score, since leaves have no weight of it")


def _sums(body: Body, ensemble: Ensemble, targets: int, aggregate: str) -> str:
    """Add the private operator; return the name of [rows, targets]."""
    _, columns = rows_and_columns(body)
    dtype = np.dtype(_dtype(body))
    nodes = _simplified(ensemble.nodes, dtype)
    inner, leaves = nodes.features.size, np.arange(ensemble.trees.size)
    _require_within(body, "mode", ensemble.nodes.modes, 0, len(_MODES))
    _require_within(body, "feature", nodes.features, 0, columns)
    _require_within(body, "target", ensemble.targets, 0, targets)
    _require_within(body, "leaf", ensemble.leaves, 0, leaves.size)
    _require_within(body, "child", np.concatenate([nodes.true, nodes.false, ensemble.roots]), -leaves.size, inner)
    if not ensemble.roots.size:
        raise body.node.unsupported("no trees")
    weights, places = _leaf_weights(body, ensemble, targets, _NOTHING[aggregate], dtype)
    children = [np.where(side < 0, inner - 1 - side, side) for side in (nodes.true, nodes.false)]
    itself = inner + leaves
    links = np.stack(
        [
            np.append(nodes.features, np.zeros_like(leaves)),
            *(np.append(side, itself) for side in children),
            np.append(nodes.missing, np.zeros_like(leaves)),
        ],
        axis=1,
    )
    roots = np.where(ensemble.roots < 0, inner - 1 - ensemble.roots, ensemble.roots)
    reduction = {"MIN": "min", "MAX": "max"}.get(aggregate, "add")
    x = body.node.inputs[0] if dtype == np.float64 else floats(body)
    arrays = (np.append(nodes.thresholds, np.zeros(leaves.size)).astype(dtype), links.astype(np.int32))
    inputs = [body.constant(value) for value in (*arrays, roots.astype(np.int32), weights, places)]
    return body.op(TREE_SUMS, x, *inputs, domain=PRIVATE_DOMAIN, outputs=targets, reduction=reduction)


def _require_within(body: Body, what: str, values: Array, least: int, end: int) -> None:
    if values.size and not least <= values.min() <= values.max() < end:
        raise body.node.unsupported(f"{what} {values.min()} to {values.max()}, but {least} to {end - 1} exist")


def _leaf_weights(body: Body, ensemble: Ensemble, targets: int, nothing: float, dtype: Any) -> tuple[Array, Array]:
    """Return [leaves] weights and their targets if each leaf has one, else [leaves, targets] weights and no targets."""
    leaf_count = ensemble.trees.size
    count = np.bincount(ensemble.leaves, minlength=leaf_count)
    if leaf_count and (count <= 1).all():
        weights, places = np.full(leaf_count, nothing, dtype), np.zeros(leaf_count, np.int32)
        weights[ensemble.leaves], places[ensemble.leaves] = ensemble.weights, ensemble.targets
        return weights, places
    if leaf_count * targets > _MOST_WEIGHTS:
        raise body.node.unsupported(f"{leaf_count} leaves of {targets} targets")
    weights = np.full((leaf_count, targets), nothing, dtype)
    pairs = ensemble.leaves * targets + ensemble.targets
    if np.unique(pairs).size < pairs.size:
        raise body.node.unsupported("a leaf has two weights of one target")
    weights.reshape(-1)[pairs] = ensemble.weights
    return weights, np.zeros(0, np.int32)


def _numbers(body: Body, name: str) -> Array | None:
    """Floats, given as such or as a tensor; None if there are none."""
    tensor = body.attribute(f"{name}_as_tensor", None)
    values = np.array(body.attribute(name, ()), np.float32) if tensor is None else numpy_helper.to_array(tensor)
    return values if values.size else None


def _by_node_ids(body: Body, kind: str) -> Ensemble:
    """Read nodes that have numbers within their trees, leaves among them."""
    attribute = body.attribute
    trees, numbers = (np.array(attribute(f"nodes_{name}", ()), np.int64) for name in ("treeids", "nodeids"))
    modes = np.array([mode.decode() for mode in attribute("nodes_modes", ())])
    is_leaf = modes == "LEAF"
    if unknown := set(modes[~is_leaf].tolist()).difference(_MODES[:_MEMBER]):
        raise body.node.unsupported(f"nodes of mode {min(unknown)}")
    places = np.where(is_leaf, -np.cumsum(is_leaf), np.cumsum(~is_leaf) - 1)
    place = dict(zip(zip(trees.tolist(), numbers.tolist(), strict=True), places.tolist(), strict=True))
    if len(place) < trees.size:
        raise body.node.unsupported("two nodes of one tree have the same number")
    kept = np.flatnonzero(~is_leaf)
    children = [
        [place[tree, child] for tree, child in zip(trees[kept].tolist(), np.array(ids)[kept].tolist(), strict=True)]
        for ids in (attribute("nodes_truenodeids", ()), attribute("nodes_falsenodeids", ()))
    ]
    missing = np.array(attribute("nodes_missing_value_tracks_true", ()) or np.zeros(trees.size), bool)
    values = _numbers(body, "nodes_values")
    thresholds = np.zeros(trees.size) if values is None else values
    nodes = Nodes(
        np.array(attribute("nodes_featureids", ()), np.int64)[kept],
        thresholds[kept],
        np.array([_MODES.index(mode) for mode in modes[kept].tolist()], np.int64),
        np.array(children[0], np.int64),
        np.array(children[1], np.int64),
        missing[kept],
        [],
    )
    first = np.unique(trees, return_index=True)[1]  # a tree's first node is its root
    ids = [attribute(f"{kind}_{name}", ()) for name in ("treeids", "nodeids")]
    leaves = np.array([-1 - place[pair] for pair in zip(*ids, strict=True)], np.int64)
    targets, weights = np.array(attribute(f"{kind}_ids", ()), np.int64), _numbers(body, f"{kind}_weights")
    is_of_leaf = leaves >= 0  # onnxruntime reads weights of leaves only
    weights = np.zeros(0) if weights is None else weights
    return Ensemble(nodes, places[first], trees[is_leaf], leaves[is_of_leaf], targets[is_of_leaf], weights[is_of_leaf])


def _by_leaves(body: Body) -> Ensemble:
    """Read nodes whose children are nodes or leaves, each with numbers of their own."""
    attribute = body.attribute

    def integers(name: str) -> Array:
        return np.array(attribute(name, ()), np.int64)

    children = [
        np.where(
            integers(f"nodes_{side}leafs") == 1, -1 - integers(f"nodes_{side}nodeids"), integers(f"nodes_{side}nodeids")
        )
        for side in ("true", "false")
    ]
    modes = numpy_helper.to_array(attribute("nodes_modes", None)).astype(np.int64)
    members = attribute("membership_values", None)
    values = np.zeros(0) if members is None else numpy_helper.to_array(members)
    if (values < 0).any():
        raise body.node.unsupported("sets of negative numbers, which onnxruntime takes for others")
    sets = [part[~np.isnan(part)] for part in np.split(values, np.flatnonzero(np.isnan(values)) + 1)]
    missing = integers("nodes_missing_value_tracks_true")
    nodes = Nodes(
        integers("nodes_featureids"),
        numpy_helper.to_array(attribute("nodes_splits", None)),
        modes,
        children[0],
        children[1],
        missing.astype(bool) if missing.size else np.zeros(modes.size, bool),
        sets,
    )
    targets, weights = integers("leaf_targetids"), numpy_helper.to_array(attribute("leaf_weights", None))
    return Ensemble(nodes, integers("tree_roots"), np.zeros_like(targets), np.arange(targets.size), targets, weights)


def _simplified(nodes: Nodes, dtype: Any) -> Nodes:
    """Return nodes of mode _LEQ only; `missing` says of each whether NaN leads to the first child.

    Node i stays number i; what other modes need beside it comes after all.
    """
    thresholds, modes = nodes.thresholds.astype(dtype), nodes.modes
    below = np.nextafter(thresholds, np.array(-np.inf, dtype))
    below = np.where(np.isneginf(thresholds), np.nan, below)  # nothing is below: no number is <= NaN
    exchanged = (modes == _GTE) | (modes == _GT)
    result = Nodes(
        nodes.features.copy(),
        np.where((modes == _LT) | (modes == _GTE), below, thresholds),
        np.zeros_like(modes),
        np.where(exchanged, nodes.false, nodes.true),
        np.where(exchanged, nodes.true, nodes.false),
        np.where(exchanged, ~nodes.missing, nodes.missing),
        [],
    )
    added = _Added(nodes.features.size, dtype)
    sets = iter(nodes.members)
    for index in np.flatnonzero(modes >= _EQ).tolist():
        equal, other = int(nodes.true[index]), int(nodes.false[index])
        values = np.sort(next(sets).astype(dtype)) if modes[index] == _MEMBER else thresholds[index : index + 1]
        equal, other = (other, equal) if modes[index] == _NEQ else (equal, other)
        tracks = bool(nodes.missing[index]) and modes[index] != _NEQ
        added.equal(result, index, values.tolist(), equal, other, tracks)
    return added.to(result)


class _Added:
    """Nodes that follow those of the file."""

    def __init__(self, first: int, dtype: Any) -> None:
        self._first, self._dtype = first, dtype
        self._rows: list[tuple[int, float, int, int, bool]] = []

    def equal(self, nodes: Nodes, index: int, values: Sequence[float], equal: int, other: int, tracks: bool) -> None:
        """Make node `index` one that leads to `equal` if its feature equals one of the values, else to `other`.

        x = v is x <= v and not x <= the number below v. With `tracks`, NaN counts as equal.
        """
        feature = int(nodes.features[index])
        following = other
        for value in values[:0:-1]:
            following = self._append(feature, value, self._below(feature, value, equal, following), following, False)
        value = values[0] if values else float("nan")
        nodes.thresholds[index] = value
        nodes.true[index] = self._below(feature, value, equal, following)
        nodes.false[index] = following
        nodes.missing[index] = tracks

    def _below(self, feature: int, value: float, equal: int, following: int) -> int:
        least = np.nextafter(self._dtype.type(value), self._dtype.type(-np.inf)) if value > -np.inf else float("nan")
        return self._append(feature, float(least), following, equal, False)

    def _append(self, feature: int, threshold: float, first: int, second: int, nan_first: bool) -> int:
        self._rows.append((feature, threshold, first, second, nan_first))
        return self._first + len(self._rows) - 1

    def to(self, nodes: Nodes) -> Nodes:
        """Return the nodes with those that were added."""
        columns = list(zip(*self._rows, strict=True)) or [()] * 5
        features, thresholds, true, false, missing = (np.array(column) for column in columns)
        return Nodes(
            np.append(nodes.features, features).astype(np.int64),
            np.append(nodes.thresholds, thresholds).astype(self._dtype),
            np.zeros(nodes.features.size + len(self._rows), np.int64),
            np.append(nodes.true, true).astype(np.int64),
            np.append(nodes.false, false).astype(np.int64),
            np.append(nodes.missing, missing).astype(bool),
            [],
        )
