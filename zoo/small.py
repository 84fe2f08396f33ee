"""The small models: a multilayer perceptron, and Triton's examples `simple`, `simple_string` and `simple_int8`."""

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder
from onnx import TensorProto

MLP_WIDTHS = (16, 64, 64, 10)
SIMPLE_ELEMENTS = 16
SIMPLE_OPERATORS = {"OUTPUT0": "Add", "OUTPUT1": "Sub"}


def mlp(seed: int) -> Blueprint:
    """input [N, 16] -> two hidden layers with ReLU -> output [N, 10]."""
    net = GraphBuilder("mlp", seed)
    x = "input"
    last = len(MLP_WIDTHS) - 1
    for layer in range(1, last):
        x = net.dense(x, f"fc{layer}", MLP_WIDTHS[layer - 1], MLP_WIDTHS[layer])
        x = net.node("Relu", [x], f"relu{layer}")
    net.dense(x, "output", MLP_WIDTHS[last - 1], MLP_WIDTHS[last])
    return net.finish({"input": MLP_WIDTHS[:1]}, {"output": MLP_WIDTHS[last:]})


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
