"""Inception v3 without the auxiliary head (Szegedy et al. 2015, as torchvision builds it)."""

from collections.abc import Sequence

from gangway.zoo.blocks import conv_relu
from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder, Pair

SMALL_POOLED = (32, 64, 64)  # channels of the pooled branch in the blocks at 35 x 35
MIDDLE_HIDDEN = (128, 160, 160, 192)  # channels inside the blocks at 17 x 17
ROW: Pair = (1, 7)
COLUMN: Pair = (7, 1)
FORK: dict[str, Pair] = {"row": (1, 3), "column": (3, 1)}

Chain = Sequence[tuple[int, Pair]]  # channels and kernel of convolutions one after another


def inception_v3(seed: int) -> Blueprint:
    """input [N, 3, 299, 299] -> output [N, 1000] (logits)."""
    net = GraphBuilder("inception_v3", seed)
    x, channels = _stem(net), 192
    for index, pooled in enumerate(SMALL_POOLED):
        x, channels = _small(net, x, f"small{index}", channels, pooled)
    x, channels = _reduce_small(net, x, "reduce_small", channels)
    for index, hidden in enumerate(MIDDLE_HIDDEN):
        x, channels = _middle(net, x, f"middle{index}", channels, hidden)
    x, channels = _reduce_middle(net, x, "reduce_middle", channels)
    for index in range(2):
        x, channels = _large(net, x, f"large{index}", channels)
    net.classify(x, channels)
    return net.finish({"input": (3, 299, 299)}, {"output": (1000,)})


def _stem(net: GraphBuilder) -> str:
    x = conv_relu(net, "input", "stem0", (3, 32), kernel=3, stride=2, padding=0)
    x = conv_relu(net, x, "stem1", (32, 32), kernel=3, padding=0)
    x = conv_relu(net, x, "stem2", (32, 64), kernel=3)
    x = net.max_pool(x, "stem2.pool", kernel=3, stride=2)
    x = conv_relu(net, x, "stem3", (64, 80))
    x = conv_relu(net, x, "stem4", (80, 192), kernel=3, padding=0)
    return net.max_pool(x, "stem4.pool", kernel=3, stride=2)


def _small(net: GraphBuilder, x: str, name: str, channels: int, pooled: int) -> tuple[str, int]:
    branches = [
        _chain(net, x, f"{name}.a", channels, [(64, 1)]),
        _chain(net, x, f"{name}.b", channels, [(48, 1), (64, 5)]),
        _chain(net, x, f"{name}.c", channels, [(64, 1), (96, 3), (96, 3)]),
        _pooled(net, x, f"{name}.d", channels, pooled),
    ]
    return net.node("Concat", branches, name, axis=1), 64 + 64 + 96 + pooled


def _reduce_small(net: GraphBuilder, x: str, name: str, channels: int) -> tuple[str, int]:
    y = _chain(net, x, f"{name}.b", channels, [(64, 1), (96, 3)])
    branches = [
        conv_relu(net, x, f"{name}.a", (channels, 384), kernel=3, stride=2, padding=0),
        conv_relu(net, y, f"{name}.b2", (96, 96), kernel=3, stride=2, padding=0),
        net.max_pool(x, f"{name}.pool", kernel=3, stride=2),
    ]
    return net.node("Concat", branches, name, axis=1), 384 + 96 + channels


def _middle(net: GraphBuilder, x: str, name: str, channels: int, hidden: int) -> tuple[str, int]:
    twice: Chain = [(hidden, 1), (hidden, COLUMN), (hidden, ROW), (hidden, COLUMN), (192, ROW)]
    branches = [
        _chain(net, x, f"{name}.a", channels, [(192, 1)]),
        _chain(net, x, f"{name}.b", channels, [(hidden, 1), (hidden, ROW), (192, COLUMN)]),
        _chain(net, x, f"{name}.c", channels, twice),
        _pooled(net, x, f"{name}.d", channels, 192),
    ]
    return net.node("Concat", branches, name, axis=1), 4 * 192


def _reduce_middle(net: GraphBuilder, x: str, name: str, channels: int) -> tuple[str, int]:
    y = _chain(net, x, f"{name}.a", channels, [(192, 1)])
    z = _chain(net, x, f"{name}.b", channels, [(192, 1), (192, ROW), (192, COLUMN)])
    branches = [
        conv_relu(net, y, f"{name}.a1", (192, 320), kernel=3, stride=2, padding=0),
        conv_relu(net, z, f"{name}.b3", (192, 192), kernel=3, stride=2, padding=0),
        net.max_pool(x, f"{name}.pool", kernel=3, stride=2),
    ]
    return net.node("Concat", branches, name, axis=1), 320 + 192 + channels


def _large(net: GraphBuilder, x: str, name: str, channels: int) -> tuple[str, int]:
    branches = [
        _chain(net, x, f"{name}.a", channels, [(320, 1)]),
        _fork(net, _chain(net, x, f"{name}.b", channels, [(384, 1)]), f"{name}.b1"),
        _fork(net, _chain(net, x, f"{name}.c", channels, [(448, 1), (384, 3)]), f"{name}.c2"),
        _pooled(net, x, f"{name}.d", channels, 192),
    ]
    return net.node("Concat", branches, name, axis=1), 320 + 768 + 768 + 192


def _fork(net: GraphBuilder, x: str, name: str) -> str:
    """A row and a column of three, side by side."""
    sides = [conv_relu(net, x, f"{name}.{side}", (384, 384), side_kernel) for side, side_kernel in FORK.items()]
    return net.node("Concat", sides, name, axis=1)


def _chain(net: GraphBuilder, x: str, name: str, channels: int, convolutions: Chain) -> str:
    for index, (outputs, kernel) in enumerate(convolutions):
        x = conv_relu(net, x, f"{name}.{index}", (channels, outputs), kernel)
        channels = outputs
    return x


def _pooled(net: GraphBuilder, x: str, name: str, channels: int, outputs: int) -> str:
    """3x3 average in which the padding counts (PyTorch's default), then 1x1."""
    x = net.node(
        "AveragePool",
        [x],
        f"{name}.pool",
        kernel_shape=[3, 3],
        strides=[1, 1],
        pads=[1, 1, 1, 1],
        count_include_pad=1,
    )
    return conv_relu(net, x, name, (channels, outputs))
