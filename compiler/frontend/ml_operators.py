"""Definitions of the operators of ai.onnx.ml but trees: linear and support vector models, and what prepares features.

Kernels compute numbers only. So a label that is a string is looked up in a table by the number of its class, and an
encoder that makes strings of numbers becomes operators on strings; these are in the model's tail.

ZipMap is what converters from scikit-learn put behind a classifier, so that each row's scores become a map. A request
cannot hold a sequence of maps. So the operator is left out, and its output is the tensor of scores that it was given,
[rows, classes] in the order of the labels.
"""

from itertools import combinations
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from gangway.compiler.frontend.decompositions import Body, defines
from gangway.compiler.kernels.specs import Array
from gangway.compiler.opsets import add_import

DOMAIN = "ai.onnx.ml"
_OPSET = 13  # of ONNX's own operators, for a model that imports none
_MOST_KEYS = 4096  # of a LabelEncoder: each is compared with each number
_MOST_DIFFERENCES = 1 << 22  # numbers between support vectors and one row


def floats(body: Body, index: int = 0) -> str:
    """An input as float32, which is what onnxruntime computes with."""
    name = body.node.inputs[index]
    return name if body.type(index).dtype == "float32" else body.op("Cast", name, to=TensorProto.FLOAT)


def rows_and_columns(body: Body) -> tuple[int, int]:
    """The shape of input 0. Raises UnsupportedModelError unless it is a matrix."""
    shape = body.type(0).shape
    if len(shape) != 2:
        raise body.node.unsupported(f"its input has the shape {list(shape)}, not [rows, features]")
    return shape[0], shape[1]


def labels_of(body: Body, attribute: str) -> Array:
    """The classes: int64, or strings as objects."""
    if texts := body.attribute("classlabels_strings", ()):
        return np.array([text.decode() for text in texts], object)
    return np.array(body.attribute(attribute, ()), np.int64)


def transform(body: Body, kind: bytes, scores: str, output: str, dtype: str = "float32") -> None:
    """Scores [rows, two or more], after ONNX's post_transform; SOFTMAX_ZERO passes over zeros."""
    match kind:
        case b"NONE":
            body.op("Identity", scores, output=output)
        case b"SOFTMAX":
            body.op("Softmax", scores, axis=1, output=output)
        case b"LOGISTIC":
            body.op("Sigmoid", scores, output=output)
        case b"SOFTMAX_ZERO":
            zero, epsilon = (body.constant(value, dtype) for value in (0, 1e-7))
            counts = body.op("Greater", body.op("Abs", scores), epsilon)
            most = body.reduce("ReduceMax", scores, [1])
            shifted = body.op("Exp", body.op("Sub", scores, most))
            total = body.reduce("ReduceSum", body.op("Where", counts, shifted, zero), [1])
            left = body.op("Mul", scores, body.op("Exp", body.op("Neg", most)))
            body.op("Div", body.op("Where", counts, shifted, left), total, output=output)
        case b"PROBIT":
            probit(body, scores, output, dtype)
        case _:
            raise body.node.unsupported(f"post_transform {kind.decode()}")


def probit(body: Body, x: str, output: str, dtype: str = "float32") -> None:
    """The quantile of the normal distribution, by onnxruntime's approximation of the inverse error function."""
    number = {value: body.constant(value, dtype) for value in (0.0, 0.5, 1.0, 2.0, -1.0, 1.41421356)}
    z = body.op("Sub", body.op("Mul", number[2.0], x), number[1.0])
    sign = body.op("Where", body.op("Less", z, number[0.0]), number[-1.0], number[1.0])
    product = body.op("Mul", body.op("Sub", number[1.0], z), body.op("Add", number[1.0], z))
    logarithm = body.op("Log", product)
    offset = body.constant(2 / (3.14159 * 0.147), dtype)
    v = body.op("Add", offset, body.op("Mul", number[0.5], logarithm))
    quotient = body.op("Mul", body.constant(1 / 0.147, dtype), logarithm)
    root = body.op("Sqrt", body.op("Sub", body.op("Mul", v, v), quotient))
    inverse = body.op("Mul", sign, body.op("Sqrt", body.op("Sub", root, v)))
    body.op("Mul", number[1.41421356], inverse, output=output)


def pick_label(body: Body, labels: Array, scores: str, output: str) -> None:
    """The label of the first largest score in each row."""
    if output:
        place = body.op("ArgMax", scores, axis=1, keepdims=0)
        body.op("Gather", body.constant(labels), place, output=output)


def choose_label(body: Body, labels: Array, condition: str, output: str) -> None:
    """One of two labels; the condition is [rows, 1], the second label is that of what holds."""
    if output and labels.dtype == object:
        place = body.reshape(body.op("Cast", condition, to=TensorProto.INT64), [-1])
        body.op("Gather", body.constant(labels), place, output=output)
    elif output:
        second, first = (body.constant([label], "int64") for label in (labels[1], labels[0]))
        body.reshape(body.op("Where", condition, second, first), [-1], output)


@defines("Scaler", domain=DOMAIN)
def scaler(body: Body) -> None:
    """(x - offset) scale."""
    offset, scale = (body.constant(body.attribute(name, ()), "float32") for name in ("offset", "scale"))
    body.op("Mul", body.op("Sub", floats(body), offset), scale, output=body.node.outputs[0])


@defines("Normalizer", domain=DOMAIN)
def normalizer(body: Body) -> None:
    """Divided by a norm along the last axis, unless that is 0; MAX is the largest number, of any sign."""
    x, axis = floats(body), len(body.type(0).shape) - 1
    operators = {b"MAX": "ReduceMax", b"L1": "ReduceL1", b"L2": "ReduceL2"}
    norm = body.reduce(operators[body.attribute("norm", b"MAX")], x, [axis])
    zero, one = (body.constant(value, "float32") for value in (0, 1))
    divisor = body.op("Where", body.equal(norm, zero, "float32"), one, norm)
    body.op("Div", x, divisor, output=body.node.outputs[0])


@defines("Binarizer", domain=DOMAIN)
def binarizer(body: Body) -> None:
    """1 above the threshold, else 0."""
    dtype = body.type(0).dtype
    above = body.op("Greater", body.node.inputs[0], body.constant(body.attribute("threshold", 0.0), dtype))
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    body.op("Cast", above, to=to, output=body.node.outputs[0])


@defines("Imputer", domain=DOMAIN)
def imputer(body: Body) -> None:
    """Another number in the place of one, which may be NaN."""
    x, dtype = body.node.inputs[0], body.type(0).dtype
    integers = np.dtype(dtype).kind == "i"
    values = body.attribute("imputed_value_int64s" if integers else "imputed_value_floats", ())
    replaced = body.attribute("replaced_value_int64" if integers else "replaced_value_float", 0)
    is_replaced = body.op("IsNaN", x) if np.isnan(replaced) else body.equal(x, body.constant(replaced, dtype), dtype)
    body.op("Where", is_replaced, body.constant(values, dtype), x, output=body.node.outputs[0])


@defines("FeatureVectorizer", domain=DOMAIN)
def feature_vectorizer(body: Body) -> None:
    """Matrices side by side."""
    widths = list(body.attribute("inputdimensions", ()))
    for index, width in enumerate(widths):
        if len(body.type(index).shape) != 2 or body.type(index).shape[1] != width:
            raise body.node.unsupported(
                f"input {index} of shape {list(body.type(index).shape)} has not {width} columns"
            )
    body.op("Concat", *(floats(body, index) for index in range(len(widths))), axis=1, output=body.node.outputs[0])


@defines("ArrayFeatureExtractor", domain=DOMAIN)
def array_feature_extractor(body: Body) -> None:
    """Columns by their numbers."""
    x, rank = body.node.inputs[0], len(body.type(0).shape)
    x = body.reshape(x, [1, -1]) if rank == 1 else x
    body.op("Gather", x, body.reshape(body.node.inputs[1], [-1]), axis=max(rank, 2) - 1, output=body.node.outputs[0])


@defines("OneHotEncoder", domain=DOMAIN)
def one_hot_encoder(body: Body) -> None:
    """A new last axis, with a 1 where a number equals a category."""
    if body.attribute("cats_strings", ()):
        raise body.node.unsupported("its categories are strings, and no kernel reads texts")
    if not body.attribute("zeros", 1):
        raise body.node.unsupported("a number that is no category is an error; with zeros=1 it can be computed")
    shape = body.type(0).shape
    x = body.node.inputs[0]
    x = x if body.type(0).dtype == "int64" else body.op("Cast", x, to=TensorProto.INT64)
    wide = body.reshape(x, [*(0 for _ in shape), 1])
    found = body.op("Equal", wide, body.integers(body.attribute("cats_int64s", ())))
    body.op("Cast", found, to=TensorProto.FLOAT, output=body.node.outputs[0])


@defines("LabelEncoder", domain=DOMAIN)
def label_encoder(body: Body) -> None:
    """Numbers or strings for numbers, and another one for those that no key equals."""
    keys, values = (_table(body, name) for name in ("keys", "values"))
    if keys is None or values is None or keys.dtype.kind == "O":
        raise body.node.unsupported("its keys are no numbers, and no kernel reads texts")
    if keys.size > _MOST_KEYS:
        raise body.node.unsupported(f"it has {keys.size} keys, a kernel compares at most {_MOST_KEYS}")
    kind = body.type(0)
    wide = body.reshape(body.node.inputs[0], [*(0 for _ in kind.shape), 1])
    found = body.equal(wide, body.constant(keys, kind.dtype), kind.dtype)
    if np.isnan(keys).any():
        found = body.op("Or", found, body.op("And", body.op("IsNaN", wide), body.constant(np.isnan(keys))))
    axis = len(kind.shape)
    numbers = body.op("Cast", found, to=TensorProto.INT32)
    picked = body.op("Gather", body.constant(values), body.op("ArgMax", numbers, axis=axis, keepdims=0))
    is_known = body.op("Cast", body.reduce("ReduceMax", numbers, [axis], keepdims=0), to=TensorProto.BOOL)
    body.op("Where", is_known, picked, body.constant(_default(body, values)), output=body.node.outputs[0])


def _table(body: Body, name: str) -> Array | None:
    """Keys or values; None if they are of another type."""
    if (texts := body.attribute(f"{name}_strings", None)) is not None:
        return np.array([text.decode() for text in texts], object)
    for suffix, dtype in (("int64s", np.int64), ("floats", np.float32)):
        if (given := body.attribute(f"{name}_{suffix}", None)) is not None:
            return np.array(given, dtype)
    tensor = body.attribute(f"{name}_tensor", None)
    value = None if tensor is None else numpy_helper.to_array(tensor)
    return None if value is None or value.dtype.kind not in "if" else value


def _default(body: Body, values: Array) -> Array:
    if values.dtype.kind == "O":
        return np.array([body.attribute("default_string", b"_Unused").decode()], object)
    tensor = body.attribute("default_tensor", None)
    if tensor is not None:
        return numpy_helper.to_array(tensor).reshape(-1)[:1].astype(values.dtype)
    name, default = ("default_int64", -1) if values.dtype.kind == "i" else ("default_float", -0.0)
    return np.array([body.attribute(name, default)], values.dtype)


def _products(body: Body, outputs: int) -> str:
    """x times the coefficients, plus the intercepts, [rows, outputs]."""
    _, columns = rows_and_columns(body)
    given = np.array(body.attribute("coefficients", ()), np.float32)  # converters may write more than are used
    coefficients = given[: outputs * columns].reshape(outputs, columns)
    product = body.op("MatMul", floats(body), body.constant(np.ascontiguousarray(coefficients.T)))
    intercepts = np.array(body.attribute("intercepts", ()), np.float32)
    return body.op("Add", product, body.constant(intercepts)) if intercepts.size == outputs else product


@defines("LinearRegressor", domain=DOMAIN)
def linear_regressor(body: Body) -> None:
    """One product for each target."""
    targets, kind = body.attribute("targets", 1), body.attribute("post_transform", b"NONE")
    scores = _products(body, targets)
    transform(body, kind if targets > 1 or kind == b"PROBIT" else b"NONE", scores, body.node.outputs[0])


@defines("LinearClassifier", domain=DOMAIN)
def linear_classifier(body: Body) -> None:
    """Scores of all classes, or of the second of two."""
    labels, kind = labels_of(body, "classlabels_ints"), body.attribute("post_transform", b"NONE")
    classes = len(body.attribute("intercepts", ()))
    scores = _products(body, classes)
    label, result = [*body.node.outputs, ""][:2]
    if classes > 1:
        if classes != labels.size:
            raise body.node.unsupported(f"{classes} scores for {labels.size} labels")
        pick_label(body, labels, scores, label)
        transform(body, kind, scores, result)
        return
    if labels.size != 2 or kind == b"PROBIT":
        raise body.node.unsupported(f"one score for {labels.size} labels, or PROBIT of it")
    choose_label(body, labels, body.op("Greater", scores, body.constant(0, "float32")), label)
    first = body.op("Neg", scores) if kind == b"LOGISTIC" else body.op("Sub", body.constant(1, "float32"), scores)
    both = body.op("Concat", first, scores, axis=1)
    transform(body, b"LOGISTIC" if kind == b"LOGISTIC" else b"NONE", both, result)


@defines("SVMRegressor", domain=DOMAIN)
def svm_regressor(body: Body) -> None:
    """A sum over kernels with support vectors, or one product; of one class only its sign."""
    _, columns = rows_and_columns(body)
    supports, rho = body.attribute("n_supports", 0), body.attribute("rho", (0.0,))
    coefficients = np.array(body.attribute("coefficients", ()), np.float32).reshape(-1, 1)
    if body.attribute("post_transform", b"NONE") != b"NONE":
        raise body.node.unsupported("a post_transform")
    kernels = _kernels(body, supports, columns) if supports else floats(body)
    total = body.op("MatMul", kernels, body.constant(coefficients))
    total = body.op("Add", total, body.constant(np.array(rho[:1], np.float32)))
    if body.attribute("one_class", 0):
        one, other, zero = (body.constant(value, "float32") for value in (1, -1, 0))
        body.op("Where", body.op("Greater", total, zero), one, other, output=body.node.outputs[0])
    else:
        body.op("Identity", total, output=body.node.outputs[0])


@defines("SVMClassifier", domain=DOMAIN)
def svm_classifier(body: Body) -> None:
    """A sum over kernels for each pair of classes, which votes for one of the two; the label has most votes.

    Probabilities are not defined: onnxruntime finds them step by step, until they change little.
    """
    _, columns = rows_and_columns(body)
    labels, kind = labels_of(body, "classlabels_ints"), body.attribute("post_transform", b"NONE")
    sizes = np.array(body.attribute("vectors_per_class", ()), np.int64)
    if body.attribute("prob_a", ()) or not sizes.sum() or sizes.size != labels.size or labels.size < 2:
        raise body.node.unsupported("probabilities, or no support vectors of at least two classes")
    if labels.size == 2 and kind == b"PROBIT":
        raise body.node.unsupported("PROBIT of two classes")
    pairs, total = [*combinations(range(labels.size), 2)], int(sizes.sum())
    owner = np.repeat(np.arange(labels.size), sizes)  # the class of each support vector
    given = np.array(body.attribute("coefficients", ()), np.float32)[: (labels.size - 1) * total].reshape(-1, total)
    coefficients = np.zeros((total, len(pairs)), np.float32)
    votes = np.zeros((len(pairs), labels.size), np.float32)  # by which a positive sum changes what a negative one gives
    for pair, (first, second) in enumerate(pairs):
        for own, row in ((first, second - 1), (second, first)):
            coefficients[owner == own, pair] = given[row, owner == own]
        votes[pair, [first, second]] = 1, -1
    sums = body.op("MatMul", _kernels(body, total, columns), body.constant(coefficients))
    rho = np.array(body.attribute("rho", ()), np.float32)[: len(pairs)]
    sums = body.op("Add", sums, body.constant(rho))
    label, result = [*body.node.outputs, ""][:2]
    wins = body.op("Cast", body.op("Greater", sums, body.constant(0, "float32")), to=TensorProto.FLOAT)
    won = body.op("Add", body.op("MatMul", wins, body.constant(votes)), body.constant((votes < 0).sum(0), "float32"))
    pick_label(body, labels, won, label)
    if labels.size > 2:
        transform(body, kind, sums, result)
        return
    mirrored = kind in (b"NONE", b"LOGISTIC")
    other = body.op("Neg", sums) if mirrored else body.op("Sub", body.constant(1, "float32"), sums)
    both = body.op("Concat", other, sums, axis=1)
    transform(body, kind if kind == b"LOGISTIC" else b"NONE", both, result)


def _kernels(body: Body, supports: int, columns: int) -> str:
    """The kernel of each row and each support vector, [rows, supports]."""
    vectors = np.array(body.attribute("support_vectors", ()), np.float32).reshape(supports, columns)
    gamma, offset, degree = [*body.attribute("kernel_params", ()), 0.0, 0.0, 0.0][:3]
    x, kind = floats(body), body.attribute("kernel_type", b"LINEAR")
    if kind == b"RBF":
        if vectors.size > _MOST_DIFFERENCES:
            raise body.node.unsupported(f"{vectors.size} numbers of support vectors")
        difference = body.op("Sub", body.reshape(x, [-1, 1, columns]), body.constant(vectors))
        squares = body.reduce("ReduceSum", body.op("Mul", difference, difference), [2], keepdims=0)
        return body.op("Exp", body.op("Mul", squares, body.constant(-gamma, "float32")))
    product = body.op("MatMul", x, body.constant(np.ascontiguousarray(vectors.T)))
    if kind == b"LINEAR":
        return product
    scaled = body.op("Mul", product, body.constant(gamma, "float32"))
    shifted = body.op("Add", scaled, body.constant(offset, "float32"))
    if kind == b"POLY":
        return body.op("Pow", shifted, body.constant(degree, "float32"))
    return body.op("Tanh", shifted)


def classes_of_zip_maps(model: Any) -> dict[str, tuple[str, ...]]:
    """Return the outputs of a model that a ZipMap makes, and what the classes of each are called."""
    made = {node.output[0]: _classes(node) for node in model.graph.node if _is_zip_map(node)}
    return {value.name: made[value.name] for value in model.graph.output if value.name in made}


def _classes(node: Any) -> tuple[str, ...]:
    texts = [text.decode() for item in node.attribute for text in item.strings]
    return tuple(texts or [str(number) for item in node.attribute for number in item.ints])


def drop_zip_maps(model: Any) -> None:
    """Replace each ZipMap whose result is an output, in place."""
    names = classes_of_zip_maps(model)
    if names:
        add_import(model, "", _OPSET)
    for node in model.graph.node:
        if node.output[0] not in names:
            continue
        classes = len(names[node.output[0]])
        (output,) = (value for value in model.graph.output if value.name == node.output[0])
        output.CopyFrom(helper.make_tensor_value_info(output.name, TensorProto.FLOAT, [None, classes]))
        rows = output.type.tensor_type.shape.dim[0]
        for value in model.graph.input:
            dims = value.type.tensor_type.shape.dim
            rows.CopyFrom(dims[0] if len(dims) > 1 else rows)
        node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output, name=node.name))


def _is_zip_map(node: Any) -> bool:
    return bool(node.op_type == "ZipMap" and node.domain == DOMAIN)
