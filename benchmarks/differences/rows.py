"""The rows of `docs/reference/differences.md`: a model each, and what each engine answers.

`python -m benchmarks.differences` asks all engines again, `tests/benchmarks/test_differences.py` those that tests have.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import helper

NAN, INF, LOWEST = float("nan"), float("inf"), float(np.finfo(np.float32).min)
REFUSED = "refused"
ORT, REFERENCE, TVM, OPENVINO, GANGWAY = "onnxruntime", "ONNX's reference", "TVM", "OpenVINO", "Gangway"
PACKAGES = {ORT: "onnxruntime", REFERENCE: "onnx", TVM: "apache-tvm", OPENVINO: "openvino"}

Answer = Sequence[float] | str  # the numbers of all outputs, one after the other, or REFUSED


@dataclass(frozen=True)
class Difference:
    """One row.

    `others`: a sentence about the engines; `gangway`: what Gangway does; `shown_by`: a further file that shows it. The
    model is in onnx's language, without its head; `inputs` in the order of the model's.
    """

    area: str
    what: str
    others: str
    gangway: str
    model: str
    inputs: Sequence[Any]
    answers: Mapping[str, Answer] = field(repr=False)
    opset: int = 17
    shown_by: str = ""

    @property
    def proto(self) -> onnx.ModelProto:
        """The model."""
        domains = {"": self.opset, **({"ai.onnx.ml": 3} if "ai.onnx.ml." in self.model else {})}
        imports = ", ".join(f'"{name}" : {version}' for name, version in domains.items())
        model: onnx.ModelProto = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]> g {self.model}")
        return model

    def feeds(self) -> dict[str, Any]:
        """Return the inputs as arrays by name."""
        found = {}
        for given, value in zip(self.inputs, self.proto.graph.input, strict=True):
            kind = value.type.tensor_type
            shape = [dim.dim_value for dim in kind.shape.dim]
            found[value.name] = np.array(given, helper.tensor_dtype_to_np_dtype(kind.elem_type)).reshape(shape)
        return found


MASKS, POOLS, QUANTISED = "Attention", "Pooling", "Quantisation"
INTEGERS, NOT_NUMBERS = "Integers", "NaN and infinity"
TREES, IMAGES, OTHERS = "Classifiers", "Boxes and images", "Others"

_POOL = "(float[1,1,1,{0}] x) => (float[1,1,1,n] y) {{ y = {1}(x) }}"
_RESIZE = (
    "({2}[1,1,1,{0}] x) => ({2}[a,b,c,d] y)"
    " {{ s = Constant<value = float[4] {{1, 1, 1, {3}}}>() y = Resize<{1}>(x, , s) }}"
)
_ATTENTION = (
    "(float[1,1,2,2] q, float[1,1,2,2] k, float[1,1,2,2] v, float[2,2] m) => (float[1,1,2,2] y)"
    " {{ y = Attention{}(q, k, v, m) }}"
)
_UNARY = "({0}[{1}] x) => ({2}[{3}] y) {{ y = {4}(x) }}"
_BOXES = """(float[1,2,4] boxes, float[1,1,2] scores) => (int64[n,3] y) {
    most = Constant<value = int64[1] {5}>() overlap = Constant<value = float[1] {0.5}>()
    y = NonMaxSuppression(boxes, scores, most, overlap) }"""
_TREE = """(float[2,1] x) => (int64[2] label, float[2,2] scores) { label, scores = ai.onnx.ml.TreeEnsembleClassifier<
    nodes_treeids = [0, 0, 0], nodes_nodeids = [0, 1, 2], nodes_featureids = [0, 0, 0], nodes_values = [0.5, 0.0, 0.0],
    nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0],
    class_treeids = [0, 0, 0, 0], class_nodeids = [1, 1, 2, 2], class_ids = [0, 1, 0, 1],
    class_weights = [0.9, 0.1, 0.3, 0.7], classlabels_int64s = [10, 20]>(x) }"""
_ONES, _VALUES = [1.0] * 4, [1, 2, 3, 4]


def _same(engines: Iterable[str], answer: Answer) -> dict[str, Answer]:
    """Return one answer of several engines."""
    return dict.fromkeys(engines, answer)


DIFFERENCES: Sequence[Difference] = (
    Difference(
        MASKS, "A mask whose row is the lowest float32",
        "onnxruntime answers zeros, the reference and OpenVINO the mean of the values.", "zeros",
        _ATTENTION.format(""), [_ONES, _ONES, _VALUES, [LOWEST, LOWEST, 0, 0]],
        {ORT: [0, 0, 2, 3], GANGWAY: [0, 0, 2, 3], REFERENCE: [2, 3, 2, 3], OPENVINO: [2, 3, 2, 3]},
        opset=23, shown_by="findings/onnxruntime_attention_lowest_mask.sh",
    ),
    Difference(
        MASKS, "NaN in a mask, for a key that `is_causal` hides",
        "onnxruntime hides it, in the reference the query's answer is NaN.", "NaN",
        _ATTENTION.format("<is_causal = 1>"), [_ONES, _ONES, _VALUES, [0, NAN, 0, 0]],
        {ORT: [1, 2, 2, 3], GANGWAY: [NAN, NAN, 2, 3], REFERENCE: [NAN, NAN, 2, 3]}, opset=23,
    ),
    Difference(
        POOLS, "MaxPool of nothing but -inf",
        "TVM and OpenVINO answer the lowest float32, onnxruntime so at some edges only.", "-inf",
        "(float[1,1,3,3] x) => (float[1,1,3,3] y) { y = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x) }",
        [[-INF] * 9],
        {ORT: [LOWEST, -INF, LOWEST] * 3, **_same((TVM, OPENVINO), [LOWEST] * 9),
         **_same((REFERENCE, GANGWAY), [-INF] * 9)},
        shown_by="findings/onnxruntime_maxpool_of_minus_infinity.sh",
    ),
    Difference(
        POOLS, "MaxPool with NaN",
        "Of 1 and NaN the reference and OpenVINO answer 1, onnxruntime and TVM NaN; of NaN and 2 all answer 2.",
        "as onnxruntime",
        _POOL.format(4, "MaxPool<kernel_shape = [1, 2]>"), [[1, NAN, 2, 3]],
        {ORT: [NAN, 2, 3], TVM: [NAN, 2, 3], GANGWAY: [NAN, 2, 3], REFERENCE: [1, 2, 3], OPENVINO: [1, 2, 3]},
    ),
    Difference(
        POOLS, "MaxPool with `ceil_mode`, whose last window is all padding",
        "OpenVINO answers it, with the lowest float32; the others leave it out.", "leaves it out",
        _POOL.format(2, "MaxPool<kernel_shape = [1, 2], strides = [1, 3], pads = [0, 1, 0, 1], ceil_mode = 1>"),
        [[1, 2]], {ORT: [1], REFERENCE: [1], TVM: [1], GANGWAY: [1], OPENVINO: [1, LOWEST]},
    ),
    Difference(
        POOLS, "AveragePool with `ceil_mode` and `count_include_pad`",
        "OpenVINO also counts what lies beyond the padding; the others do not.", "does not",
        _POOL.format(4, "AveragePool<kernel_shape = [1, 3], strides = [1, 2], pads = [0, 1, 0, 1], ceil_mode = 1,"
                        " count_include_pad = 1>"),
        [_VALUES],
        {ORT: [1, 3, 2], REFERENCE: [1, 3, 2], TVM: [1, 3, 2], GANGWAY: [1, 3, 2], OPENVINO: [1, 3, 4 / 3]},
        shown_by="findings/openvino_ceil_mode_pools_beyond_padding.sh",
    ),
    Difference(
        POOLS, "LpPool with `ceil_mode`",
        "The reference and OpenVINO scale the last window as if it were full, onnxruntime does not.", "onnxruntime's",
        _POOL.format(5, "LpPool<kernel_shape = [1, 2], strides = [1, 2], ceil_mode = 1>"), [[*_VALUES, 5]],
        {ORT: [5**0.5, 5, 5], GANGWAY: [5**0.5, 5, 5], REFERENCE: [5**0.5, 5, 50**0.5], OPENVINO: [5**0.5, 5, 50**0.5]},
        opset=18,
    ),
    Difference(
        POOLS, "MaxPool with `auto_pad` SAME and dilations",
        "onnxruntime pads as if there were no dilations, so fewer numbers come.", "onnxruntime's",
        _POOL.format(8, 'MaxPool<kernel_shape = [1, 3], dilations = [1, 2], auto_pad = "SAME_UPPER">'), [[*range(8)]],
        {ORT: [3, 4, 5, 6, 7, 6], GANGWAY: [3, 4, 5, 6, 7, 6],
         **_same((REFERENCE, TVM, OPENVINO), [2, 3, 4, 5, 6, 7, 6, 7])},
        shown_by="findings/onnxruntime_dilated_same_padding.sh",
    ),
    Difference(
        QUANTISED, "Ties of QuantizeLinear with an odd zero point",
        "OpenVINO rounds after it has added the zero point, so ties end elsewhere.", "as ONNX: half to even, then adds",
        "(float[3] x) => (uint8[3] y) { s = Constant<value = float {1}>() z = Constant<value = uint8 {1}>()"
        " y = QuantizeLinear(x, s, z) }",
        [[0.5, 1.5, 2.5]],
        {**_same((ORT, REFERENCE, TVM, GANGWAY), [1, 3, 3]), OPENVINO: [2, 2, 4]},
        shown_by="findings/openvino_quantises_beside_the_zero_point.sh",
    ),
    Difference(
        QUANTISED, "QuantizeLinear of NaN and infinity to int8",
        "The reference answers -128 for all, TVM 127 for NaN.", "as onnxruntime: -128, and the nearest limit",
        "(float[3] x) => (int8[3] y) { s = Constant<value = float {1}>() z = Constant<value = int8 {0}>()"
        " y = QuantizeLinear(x, s, z) }",
        [[NAN, INF, -INF]],
        {**_same((ORT, OPENVINO, GANGWAY), [-128, 127, -128]), REFERENCE: [-128] * 3, TVM: [127, 127, -128]},
    ),
    Difference(
        QUANTISED, "DynamicQuantizeLinear with NaN",
        "For onnxruntime, TVM and OpenVINO it does not count for the scale.", "the scale is NaN, as in the reference",
        "(float[2] x) => (uint8[2] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear(x) }", [[NAN, 255]],
        {ORT: [0, 255, 1, 0], OPENVINO: [0, 255, 1, 0], TVM: [255, 255, 1, 0], GANGWAY: [0, 0, NAN, 0],
         REFERENCE: [0, 0, NAN, 255]},
    ),
    Difference(
        INTEGERS, "int64 beyond 32 bits", "OpenVINO keeps the low 32 bits.", "64 bits",
        _UNARY.format("int64", 2, "int64", 2, "Identity"), [[2**31, 2**40 + 7]],
        {**_same((ORT, REFERENCE, TVM, GANGWAY), [2**31, 2**40 + 7]), OPENVINO: [-(2**31), 7]},
    ),
    Difference(
        INTEGERS, "ReduceSum of int64 beyond 2^53",
        "onnxruntime adds in float64 and saturates; the reference and TVM are exact.", "as onnxruntime",
        _UNARY.format("int64", 1, "int64", 1, "ReduceSum"), [[2**53 + 1]],
        {ORT: [2**53], GANGWAY: [2**53], REFERENCE: [2**53 + 1], TVM: [2**53 + 1]},
        shown_by="findings/onnxruntime_integers_summed_as_doubles.sh",
    ),
    Difference(
        INTEGERS, "ReduceProd of int32 that overflows",
        "onnxruntime saturates; the reference, TVM and OpenVINO wrap around.", "saturates",
        _UNARY.format("int32", 3, "int32", 1, "ReduceProd"), [[2**16, 2**16, 4]],
        {ORT: [2**31 - 1], GANGWAY: [2**31 - 1], REFERENCE: [0], TVM: [0], OPENVINO: [0]},
    ),
    Difference(
        INTEGERS, "Pow of int32 that overflows",
        "onnxruntime and OpenVINO answer the least integer, the reference wraps around, TVM refuses it.",
        "the least integer",
        "(int32[1] x, int32[1] e) => (int32[1] y) { y = Pow(x, e) }", [[3], [40]],
        {**_same((ORT, OPENVINO, GANGWAY), [-(2**31)]), REFERENCE: [689956897], TVM: REFUSED},
    ),
    Difference(
        INTEGERS, "Cast to int32 of what it cannot hold",
        "TVM keeps the low 32 bits, the others answer the least integer.", "the least integer",
        _UNARY.format("float", 3, "int32", 3, "Cast<to = 6>"), [[3e9, -3e9, INF]],
        {**_same((ORT, REFERENCE, OPENVINO, GANGWAY), [-(2**31)] * 3), TVM: [-1294967296, 1294967296, 0]},
    ),
    Difference(
        INTEGERS, "Add of int8 that overflows", "OpenVINO saturates, the others wrap around.", "wraps around",
        "(int8[1] x) => (int8[1] y) { y = Add(x, x) }", [[100]],
        {**_same((ORT, REFERENCE, TVM, GANGWAY), [-56]), OPENVINO: [127]},
    ),
    Difference(
        INTEGERS, "Narrow types, such as Relu of int16",
        "onnxruntime has no kernels for many of them, and refuses the file.", "computes them",
        _UNARY.format("int16", 2, "int16", 2, "Relu"), [[100, -1]],
        {ORT: REFUSED, **_same((REFERENCE, TVM, OPENVINO, GANGWAY), [100, 0])},
        shown_by="tests/compiler/frontend/test_opsets.py",
    ),
    Difference(
        INTEGERS, "BitShift by the width or more", "OpenVINO answers 255 for uint8, the others 0.", "0",
        '(uint8[2] x, uint8[2] by) => (uint8[2] y) { y = BitShift<direction = "LEFT">(x, by) }', [[213, 213], [0, 8]],
        {**_same((ORT, REFERENCE, TVM, GANGWAY), [213, 0]), OPENVINO: [213, 255]},
    ),
    Difference(
        NOT_NUMBERS, "TopK",
        "Of 1, NaN, 3, 2 onnxruntime and OpenVINO answer 1 and NaN; the reference holds NaN for the largest.",
        "as onnxruntime",
        "(float[4] x) => (float[2] y, int64[2] place) { k = Constant<value = int64[1] {2}>() y, place = TopK(x, k) }",
        [[1, NAN, 3, 2]],
        {**_same((ORT, OPENVINO, GANGWAY), [1, NAN, 0, 1]), REFERENCE: [NAN, 3, 1, 2], TVM: [NAN, 1, 1, 0]},
    ),
    Difference(
        NOT_NUMBERS, "ArgMax of a vector",
        "onnxruntime and the reference answer the place of NaN; onnxruntime passes over it in rows of a matrix.",
        "passes over NaN in both, unless it is first",
        _UNARY.format("float", 4, "int64", 1, "ArgMax"), [[1, NAN, 3, 2]],
        {ORT: [1], REFERENCE: [1], TVM: [2], OPENVINO: [2], GANGWAY: [2]},
    ),
    Difference(
        NOT_NUMBERS, "ArgMax of rows", "The reference answers the place of NaN, the others pass over it.",
        "passes over it",
        _UNARY.format("float", "2,3", "int64", "2,1", "ArgMax<axis = 1>"), [[1, NAN, 3, 2, 4, 1]],
        {**_same((ORT, TVM, OPENVINO, GANGWAY), [2, 1]), REFERENCE: [1, 1]},
    ),
    Difference(
        NOT_NUMBERS, "ReduceMax",
        "TVM and OpenVINO pass over NaN; onnxruntime does unless it comes first.", "NaN",
        _UNARY.format("float", "2,4", "float", "2,1", "ReduceMax<axes = [1]>"), [[1, NAN, 3, 2, NAN, 1, 3, 2]],
        {ORT: [3, NAN], **_same((TVM, OPENVINO), [3, 3]), **_same((REFERENCE, GANGWAY), [NAN, NAN])},
    ),
    Difference(
        NOT_NUMBERS, "Hardmax", "The reference marks NaN, the others the largest number.", "the largest number",
        _UNARY.format("float", "1,3", "float", "1,3", "Hardmax"), [[1, NAN, 3]],
        {**_same((ORT, TVM, OPENVINO, GANGWAY), [0, 0, 1]), REFERENCE: [0, 1, 0]},
    ),
    Difference(
        NOT_NUMBERS, "Unique of NaN, 1, 2",
        "onnxruntime answers NaN alone, the reference sorts it behind the others, OpenVINO leaves it in front.",
        "onnxruntime's",
        _UNARY.format("float", 3, "float", "n", "Unique"), [[NAN, 1, 2]],
        {ORT: [NAN], GANGWAY: [NAN], REFERENCE: [1, 2, NAN], OPENVINO: [NAN, 1, 2]},
        shown_by="findings/onnxruntime_unique_loses_numbers_to_nan.sh",
    ),
    Difference(
        NOT_NUMBERS, "Relu", "TVM and OpenVINO answer 0 for NaN.", "NaN",
        _UNARY.format("float", 1, "float", 1, "Relu"), [[NAN]],
        {**_same((ORT, REFERENCE, GANGWAY), [NAN]), TVM: [0], OPENVINO: [0]},
    ),
    Difference(
        NOT_NUMBERS, "Clip before opset 13, infinity, no upper bound",
        "onnxruntime and OpenVINO answer the largest float32.", "infinity",
        "(float[1] x) => (float[1] y) { least = Constant<value = float {0}>() y = Clip(x, least) }", [[INF]],
        {ORT: [-LOWEST], OPENVINO: [-LOWEST], **_same((REFERENCE, TVM, GANGWAY), [INF])}, opset=12,
    ),
    Difference(
        NOT_NUMBERS, "ReduceLogSumExp of nothing but -inf", "The reference answers NaN, the others -inf.", "-inf",
        _UNARY.format("float", "1,2", "float", "1,1", "ReduceLogSumExp<axes = [1]>"), [[-INF, -INF]],
        {REFERENCE: [NAN], **_same((ORT, TVM, OPENVINO, GANGWAY), [-INF])},
    ),
    Difference(
        NOT_NUMBERS, "IsInf with `detect_negative = 0`", "TVM finds -inf all the same.", "does not",
        _UNARY.format("float", 1, "bool", 1, "IsInf<detect_negative = 0>"), [[-INF]],
        {**_same((ORT, REFERENCE, OPENVINO, GANGWAY), [0]), TVM: [1]},
    ),
    Difference(
        TREES, "The label of a TreeEnsembleClassifier of two classes that both have positive weights",
        "onnxruntime answers 1, whatever the labels are and whichever score is larger.", "as onnxruntime",
        _TREE, [[0.5, 0.6]],
        {ORT: [1, 1, 0.9, 0.1, 0.3, 0.7], GANGWAY: [1, 1, 0.9, 0.1, 0.3, 0.7],
         REFERENCE: [10, 20, 0.9, 0.1, 0.3, 0.7]},
        shown_by="findings/onnxruntime_two_class_trees_answer_1.sh",
    ),
    Difference(
        TREES, "Scores of a LinearClassifier with one row of coefficients",
        "The reference answers -x and x, onnxruntime 1 - x and x.", "as onnxruntime",
        "(float[1,1] x) => (int64[1] label, float[1,2] scores) { label, scores = ai.onnx.ml.LinearClassifier<"
        "coefficients = [1.0], intercepts = [0.0], classlabels_ints = [10, 20]>(x) }",
        [[0.6]], {ORT: [20, 0.4, 0.6], GANGWAY: [20, 0.4, 0.6], REFERENCE: [20, -0.6, 0.6]},
    ),
    Difference(
        TREES, "Normalizer by MAX of negative numbers",
        "The reference divides by the largest magnitude, onnxruntime by the largest number.", "as onnxruntime",
        '(float[1,2] x) => (float[1,2] y) { y = ai.onnx.ml.Normalizer<norm = "MAX">(x) }', [[-4, 2]],
        {ORT: [-2, 1], GANGWAY: [-2, 1], REFERENCE: [-1, 0.5]},
    ),
    Difference(
        TREES, "Binarizer of NaN", "onnxruntime refuses the request, the reference answers 0.", "0",
        "(float[1] x) => (float[1] y) { y = ai.onnx.ml.Binarizer<threshold = 1.0>(x) }", [[NAN]],
        {ORT: REFUSED, REFERENCE: [0], GANGWAY: [0]},
    ),
    Difference(
        IMAGES, "NonMaxSuppression of boxes that overlap by exactly the threshold",
        "TVM and OpenVINO drop the second, onnxruntime and the reference keep it.", "onnxruntime's",
        _BOXES, [[0, 0, 1, 1, 0, 0, 1, 0.5], [0.9, 0.8]],
        {**_same((ORT, REFERENCE, GANGWAY), [0, 0, 0, 0, 0, 1]), TVM: [0, 0, 0], OPENVINO: [0, 0, 0]},
    ),
    Difference(
        IMAGES, "Resize with `antialias`", "TVM and OpenVINO ignore it.", "honours it",
        _RESIZE.format(4, 'mode = "linear", antialias = 1', "float", 0.5), [_VALUES],
        {**_same((ORT, REFERENCE, GANGWAY), [1.625, 3.375]), TVM: [1.5, 3.5], OPENVINO: [1.5, 3.5]}, opset=19,
    ),
    Difference(
        IMAGES, "Resize by a scale that sizes do not divide",
        "TVM takes the ratio of the sizes for the scale.", "takes the scale",
        _RESIZE.format(4, 'mode = "linear"', "float", 0.6), [_VALUES],
        {**_same((ORT, REFERENCE, OPENVINO, GANGWAY), [4 / 3, 3]), TVM: [1.5, 3.5]}, opset=13,
    ),
    Difference(
        IMAGES, "Resize, cubic, with `exclude_outside`", "OpenVINO ignores it.", "honours it",
        _RESIZE.format(2, 'mode = "cubic", exclude_outside = 1', "float", 2.0), [[1, 2]],
        {**_same((ORT, REFERENCE, TVM, GANGWAY), [0.8636364, 1.2294520, 1.7705479, 2.1363635]),
         OPENVINO: [0.89453125, 1.2265625, 1.7734375, 2.10546875]},
        opset=13,
    ),
    Difference(
        IMAGES, "Resize, linear, of uint8", "onnxruntime and TVM cut fractions off, the others round.", "onnxruntime's",
        _RESIZE.format(2, 'mode = "linear"', "uint8", 2.0), [[0, 3]],
        {**_same((ORT, TVM, GANGWAY), [0, 0, 2, 3]), REFERENCE: [0, 1, 2, 3], OPENVINO: [0, 1, 2, 3]},
        opset=13,
    ),
    Difference(
        OTHERS, "Softmax before opset 13",
        "ONNX flattens all axes from `axis` on. The reference and OpenVINO take one axis.", "flattens",
        _UNARY.format("float", "1,2,2", "float", "1,2,2", "Softmax"), [[0] * 4],
        {**_same((ORT, TVM, GANGWAY), [0.25] * 4), REFERENCE: [0.5] * 4, OPENVINO: [0.5] * 4}, opset=11,
    ),
    Difference(
        OTHERS, "Clip before opset 11, a lower limit above the upper one",
        "onnxruntime and OpenVINO refuse the file.", "the upper limit",
        _UNARY.format("float", 2, "float", 2, "Clip<min = 2.0, max = 1.0>"), [[0, 3]],
        {ORT: REFUSED, OPENVINO: REFUSED, **_same((REFERENCE, TVM, GANGWAY), [1, 1])}, opset=10,
    ),
    Difference(
        OTHERS, "MeanVarianceNormalization of equal numbers",
        "onnxruntime and TVM answer NaN.", "0",
        _UNARY.format("float", "1,2", "float", "1,2", "MeanVarianceNormalization<axes = [1]>"), [[1, 1]],
        {ORT: [NAN] * 2, TVM: [NAN] * 2, **_same((REFERENCE, OPENVINO, GANGWAY), [0, 0])}, opset=13,
    ),
    Difference(
        OTHERS, "ReduceMean of nothing", "The reference answers NaN, onnxruntime 0.", "0",
        _UNARY.format("float", "1,0", "float", "1,1", "ReduceMean<axes = [1]>"), [[]],
        {ORT: [0], GANGWAY: [0], REFERENCE: [NAN]},
    ),
    Difference(
        OTHERS, "Layer normalisation whose squares overflow",
        "onnxruntime answers NaN for a row of two numbers, the others 0.", "0",
        "(float[1,2] x) => (float[1,2] y) <float[2] w = {1, 1}> { y = LayerNormalization(x, w) }", [[3e38, -3e38]],
        {ORT: [NAN, NAN], **_same((REFERENCE, OPENVINO, GANGWAY), [0, 0])},
    ),
)  # fmt: skip
