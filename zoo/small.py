"""The smallest model with weights: a multilayer perceptron."""

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

MLP_WIDTHS = (16, 64, 64, 10)


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
