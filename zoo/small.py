"""The two small models: a multilayer perceptron, and Triton's example model `simple`."""

from gangway.zoo.builder import GraphBuilder
from onnx import ModelProto, TensorProto

MLP_WIDTHS = (16, 64, 64, 10)
SIMPLE_ELEMENTS = 16


def build_mlp(seed: int) -> ModelProto:
    """input [N, 16] -> two hidden layers with ReLU -> output [N, 10]."""
    net = GraphBuilder("mlp", seed)
    x = "input"
    last = len(MLP_WIDTHS) - 1
    for layer in range(1, last):
        x = net.dense(x, f"fc{layer}", MLP_WIDTHS[layer - 1], MLP_WIDTHS[layer])
        x = net.node("Relu", [x], f"relu{layer}")
    net.dense(x, "output", MLP_WIDTHS[last - 1], MLP_WIDTHS[last])
    return net.finish({"input": MLP_WIDTHS[:1]}, {"output": MLP_WIDTHS[last:]})


def build_simple(seed: int) -> ModelProto:
    """INPUT0, INPUT1 INT32 [N, 16] -> OUTPUT0 = their sum, OUTPUT1 = their difference. It has no weights."""
    net = GraphBuilder("simple", seed)
    net.node("Add", ["INPUT0", "INPUT1"], "OUTPUT0")
    net.node("Sub", ["INPUT0", "INPUT1"], "OUTPUT1")
    shape = (SIMPLE_ELEMENTS,)
    return net.finish({"INPUT0": shape, "INPUT1": shape}, {"OUTPUT0": shape, "OUTPUT1": shape}, TensorProto.INT32)
