"""Small ONNX networks that are compiled up to outputs whose sizes depend on data."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.helpers import onnx_text
from tests.helpers.island_networks import loop
from tests.helpers.onnx_networks import Array

NAMES = np.array(["cat", "dog", "Überhund", "", "bird"], object)
FILE = "model.onnx"


def _floats(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def detector(folder: Path, rows: int | str = 1) -> Path:
    """Boxes and scores of two classes at 64 places; those that are left of them, and all scores."""
    graph = f"""(float[{rows}, 3, 32, 32] image)
    => (float[n, 4] boxes, float[n] scores, int64[n, 1] classes, float[{rows}, 2, 64] all_scores) {{
        c = Conv<pads=[1, 1, 1, 1], strides=[2, 2]>(image, first)
        r = Relu(c)
        d = Conv<pads=[1, 1, 1, 1], strides=[2, 2]>(r, second)
        features = Relu(d)
        e = Conv(features, corners)
        f = Reshape(e, four)
        g = Transpose<perm=[0, 2, 1]>(f)
        places = Sigmoid(g)
        h = Conv(features, kinds)
        i = Reshape(h, two)
        all_scores = Sigmoid(i)
        kept = NonMaxSuppression(places, all_scores, most, overlap, least)
        which = Gather<axis=1>(kept, place)
        scores = GatherND(all_scores, kept)
        classes = Gather<axis=1>(kept, kind)
        index = Squeeze(which, kind)
        picked = Gather<axis=1>(places, index)
        boxes = Squeeze(picked, zero)
    }}"""
    weights = {
        "first": _floats(16, 3, 3, 3) / 2,
        "second": _floats(32, 16, 3, 3) / 6,
        "corners": _floats(4, 32, 1, 1) / 3,
        "kinds": _floats(2, 32, 1, 1) / 4,
    }
    numbers = {"four": [0, 4, -1], "two": [0, 2, -1], "most": [20], "place": [2], "kind": [1], "zero": [0]}
    limits = {"overlap": np.array([0.5], np.float32), "least": np.array([0.7], np.float32)}
    return onnx_text.write(folder / FILE, graph, **weights, **{k: np.array(v) for k, v in numbers.items()}, **limits)


def numbered(folder: Path) -> Path:
    """Boxes of several images, each with the number of its image; an image of zeros has one."""
    graph = """(float[N, 3, 32, 32] image) => (int64[n, 3] kept) {
        e = Conv<strides=[4, 4]>(image, corners, wide)
        f = Reshape(e, four)
        g = Transpose<perm=[0, 2, 1]>(f)
        places = Sigmoid(g)
        h = Conv<strides=[4, 4]>(image, kinds)
        i = Reshape(h, one)
        scores = Sigmoid(i)
        kept = NonMaxSuppression(places, scores, most, overlap, least)
    }"""
    constants = {
        "corners": _floats(4, 3, 4, 4) / 2,
        "kinds": _floats(1, 3, 4, 4) / 2,
        "wide": np.array([0, 0, 2, 2], np.float32),
        "four": np.array([0, 4, -1]),
        "one": np.array([0, 1, -1]),
        "most": np.array([20]),
        "overlap": np.array([0.5], np.float32),
        "least": np.array([0.4], np.float32),
    }
    return onnx_text.write(folder / FILE, graph, **constants)


def image(seed: int) -> Array:
    """An image; in the first one there is nothing."""
    return (np.random.default_rng(seed).standard_normal((1, 3, 32, 32)) * (seed > 0) / 2).astype(np.float32)


def places(folder: Path) -> Path:
    """Where numbers are not zero: many of an image, and of what as many products give as the request says."""
    graph = """(float[1, 3, 32, 32] x, int64[1] count) => (int64[] y, int64[] z) {
        c = Conv<pads=[1, 1, 1, 1]>(x, w)
        r = Relu(c)
        y = NonZero(r)
        z = NonZero(looped)
    }"""
    model = onnx_text.model_of(graph, w=_floats(8, 3, 3, 3), eye=np.eye(32, dtype=np.float32))
    model.graph.node.insert(3, loop("count", "eye", "looped"))
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / FILE)
    return folder / FILE


def first(folder: Path) -> Path:
    """The places of numbers above zero, and the first one, which there must be."""
    graph = """(float[1, 3, 6, 6] x) => (int64[] y, int64[] z) {
        c = Conv(x, w)
        r = Relu(c)
        y = NonZero(r)
        z = Gather<axis=1>(y, zero)
    }"""
    return onnx_text.write(folder / FILE, graph, w=_floats(8, 3, 3, 3), zero=np.array(0))


def labels(folder: Path) -> Path:
    """A text for each row, and the scores that it was chosen by."""
    graph = """(float[N, 3, 6, 6] x) => (string[N] label, float[N, 5] scores) {
        c = Conv(x, w)
        r = Relu(c)
        p = GlobalAveragePool(r)
        f = Flatten(p)
        scores = Gemm(f, v)
        best = ArgMax<axis=1, keepdims=0>(scores)
        label = Gather(names, best)
    }"""
    return onnx_text.write(folder / FILE, graph, w=_floats(8, 3, 3, 3), v=_floats(8, 5), names=NAMES)


def classifier(folder: Path) -> Path:
    """What converters from scikit-learn write for a pipeline whose classes are words."""
    words, coefficients, intercepts = (
        str(each).replace("'", '"') for each in (NAMES.tolist(), _floats(5, 4).ravel().tolist(), _floats(5).tolist())
    )
    graph = f"""(float[N, 4] x) => (string[N] label) {{
        label, raw = ai.onnx.ml.LinearClassifier<
            classlabels_strings={words}, coefficients={coefficients}, intercepts={intercepts}>(x)
        scores = ai.onnx.ml.Normalizer<norm="L1">(raw)
        chances = ai.onnx.ml.ZipMap<classlabels_strings={words}>(scores)
    }}"""
    model = onnx_text.model_of(graph)
    number = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.STRING, number))
    model.graph.output.append(helper.make_value_info("chances", maps))
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / FILE)
    return folder / FILE


def extracted(folder: Path) -> Path:
    """The same as converters from scikit-learn write it, and each row's best two classes by another encoder."""
    graph = """(float[N, 8] x) => (string[N] label, string[N, 2] tops) {
        scores = Gemm(x, v)
        best = ArgMax<axis=1, keepdims=0>(scores)
        picked = ai.onnx.ml.ArrayFeatureExtractor(names, best)
        label = Reshape(picked, line)
        _, kinds = TopK(scores, two)
        tops = ai.onnx.ml.LabelEncoder<keys_int64s=[0, 1, 3], values_strings=["a", "b", "ü"]>(kinds)
    }"""
    constants = {"v": _floats(8, 5), "names": NAMES, "line": np.array([-1]), "two": np.array([2])}
    return onnx_text.write(folder / FILE, graph, **constants)


def accumulator(folder: Path) -> Path:
    """Adds up twice what a sequence sends, and says where the sum is not zero."""
    graph = """(float[1, 4] x, float[1, 4] before) => (int64[] y, float[1, 4] after) {
        d = MatMul(x, double)
        after = Add(before, d)
        y = NonZero(after)
    }"""
    return onnx_text.write(folder / FILE, graph, double=2 * np.eye(4, dtype=np.float32))


def sums(folder: Path) -> Path:
    """A sum for each box."""
    graph = "(float[n, 4] x) => (float[n] y) { y = ReduceSum<keepdims=0>(x, one) }"
    return onnx_text.write(folder / FILE, graph, one=np.array([1]))
