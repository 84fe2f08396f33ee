"""What Triton's public client examples ask for: `simple` and its like, an identity, a classifier with labels."""

from onnx import TensorProto

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder
from gangway.zoo.sequences import (
    simple_dyna_sequence as simple_dyna_sequence,  # noqa: PLC0414 - the catalog finds the examples here
)
from gangway.zoo.sequences import simple_sequence as simple_sequence  # noqa: PLC0414
from gangway.zoo.sequences import simple_string_dyna_sequence as simple_string_dyna_sequence  # noqa: PLC0414

SIMPLE_ELEMENTS = 16
SIMPLE_OPERATORS = {"OUTPUT0": "Add", "OUTPUT1": "Sub"}
IMAGE_SIZE = 64
COLOURS = ("red", "green", "blue")


def simple(seed: int) -> Blueprint:
    """INPUT0, INPUT1 INT32 [N, 16] -> OUTPUT0 = their sum, OUTPUT1 = their difference. It has no weights."""
    net = GraphBuilder("simple", seed)
    for output, operator in SIMPLE_OPERATORS.items():
        net.node(operator, ["INPUT0", "INPUT1"], output)
    return _finish(net, TensorProto.INT32)


def simple_string(seed: int) -> Blueprint:
    """`simple` on decimal numbers as strings; what is not a number makes the query fail."""
    return _simple_cast("simple_string", seed, TensorProto.STRING)


def simple_int8(seed: int) -> Blueprint:
    """`simple` on INT8; sums wrap around."""
    return _simple_cast("simple_int8", seed, TensorProto.INT8)


def simple_identity(seed: int) -> Blueprint:
    """INPUT0 BYTES [N, any] -> OUTPUT0, the same strings."""
    net = GraphBuilder("simple_identity", seed)
    net.node("Identity", ["INPUT0"], "OUTPUT0")
    datatype = TensorProto.STRING
    return net.finish({"INPUT0": ("length",)}, {"OUTPUT0": ("length",)}, datatype, datatype)


def simple_image(seed: int) -> Blueprint:
    """IMAGE FP32 [N, 3, 64, 64] -> COLOUR [N, 3]: which channel of the image is the brightest, as probabilities."""
    net = GraphBuilder("simple_image", seed)
    means = net.node("Flatten", [net.node("GlobalAveragePool", ["IMAGE"], "means")], "flat", axis=1)
    net.node("Softmax", [means], "COLOUR", axis=1)
    return net.finish({"IMAGE": (len(COLOURS), IMAGE_SIZE, IMAGE_SIZE)}, {"COLOUR": (len(COLOURS),)})


def _simple_cast(name: str, seed: int, datatype: int) -> Blueprint:
    """Neither type can be added in ONNX Runtime: INT32 in between, as Triton's examples have it."""
    net = GraphBuilder(name, seed)
    numbers = [net.node("Cast", [side], f"{side}.int32", to=TensorProto.INT32) for side in ("INPUT0", "INPUT1")]
    for output, operator in SIMPLE_OPERATORS.items():
        result = net.node(operator, numbers, f"{output}.int32")
        net.node("Cast", [result], output, to=datatype)
    return _finish(net, datatype)


def _finish(net: GraphBuilder, datatype: int) -> Blueprint:
    shape = (SIMPLE_ELEMENTS,)
    return net.finish({"INPUT0": shape, "INPUT1": shape}, dict.fromkeys(SIMPLE_OPERATORS, shape), datatype, datatype)
