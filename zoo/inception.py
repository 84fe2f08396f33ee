"""GoogLeNet (Szegedy et al. 2014) and Inception v3 (Szegedy et al. 2015), without their auxiliary heads.

GoogLeNet has batch normalisation, and the layers and pooling of torchvision's; but its third branch has the 5x5 kernels
of the paper, where torchvision's has 3x3. Inception v3 is as torchvision builds it.
"""

from collections.abc import Sequence

from gangway.zoo.graph import GraphBuilder, ModelGraph, Pair

# Channels of GoogLeNet's four branches: 1x1; 1x1 then 3x3; 1x1 then 5x5; pooling then 1x1.
INCEPTIONS = {
    "3a": (64, (96, 128), (16, 32), 32),
    "3b": (128, (128, 192), (32, 96), 64),
    "4a": (192, (96, 208), (16, 48), 64),
    "4b": (160, (112, 224), (24, 64), 64),
    "4c": (128, (128, 256), (24, 64), 64),
    "4d": (112, (144, 288), (32, 64), 64),
    "4e": (256, (160, 320), (32, 128), 128),
    "5a": (256, (160, 320), (32, 128), 128),
    "5b": (384, (192, 384), (48, 128), 128),
}
POOL_AFTER = {"3b": 3, "4e": 2}  # kernel of GoogLeNet's pooling after a block

SMALL_POOLED = (32, 64, 64)  # channels of the pooled branch in the blocks at 35 x 35
MIDDLE_HIDDEN = (128, 160, 160, 192)  # channels inside the blocks at 17 x 17
ROW: Pair = (1, 7)
COLUMN: Pair = (7, 1)
FORK: dict[str, Pair] = {"row": (1, 3), "column": (3, 1)}

Chain = Sequence[tuple[int, Pair]]  # channels and kernel of convolutions one after another


def googlenet(seed: int) -> ModelGraph:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("googlenet", seed)
    x = _conv_relu(net, "input", "conv1", (3, 64), kernel=7, stride=2)
    x = net.max_pool(x, "maxpool1", kernel=3, stride=2, ceil_mode=True)
    x = _conv_relu(net, x, "conv2", (64, 64))
    x = _conv_relu(net, x, "conv3", (64, 192), kernel=3)
    x = net.max_pool(x, "maxpool2", kernel=3, stride=2, ceil_mode=True)
    channels = 192
    for key in INCEPTIONS:
        x, channels = _inception(net, x, key, channels)
        if kernel := POOL_AFTER.get(key):
            x = net.max_pool(x, f"maxpool{key}", kernel, stride=2, ceil_mode=True)
    net.classify(x, channels)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})


def _inception(net: GraphBuilder, x: str, key: str, channels: int) -> tuple[str, int]:
    name = f"inception{key}"
    single, triple, quintuple, pooled = INCEPTIONS[key]
    first = _conv_relu(net, x, f"{name}.branch1", (channels, single))
    second = _conv_relu(net, x, f"{name}.branch2.0", (channels, triple[0]))
    second = _conv_relu(net, second, f"{name}.branch2.1", triple, kernel=3)
    third = _conv_relu(net, x, f"{name}.branch3.0", (channels, quintuple[0]))
    third = _conv_relu(net, third, f"{name}.branch3.1", quintuple, kernel=5)
    fourth = net.max_pool(x, f"{name}.branch4.pool", kernel=3, stride=1, padding=1, ceil_mode=True)
    fourth = _conv_relu(net, fourth, f"{name}.branch4", (channels, pooled))
    x = net.node("Concat", [first, second, third, fourth], name, axis=1)
    return x, single + triple[1] + quintuple[1] + pooled


def inception_v3(seed: int) -> ModelGraph:
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
    x = _conv_relu(net, "input", "stem0", (3, 32), kernel=3, stride=2, padding=0)
    x = _conv_relu(net, x, "stem1", (32, 32), kernel=3, padding=0)
    x = _conv_relu(net, x, "stem2", (32, 64), kernel=3)
    x = net.max_pool(x, "stem2.pool", kernel=3, stride=2)
    x = _conv_relu(net, x, "stem3", (64, 80))
    x = _conv_relu(net, x, "stem4", (80, 192), kernel=3, padding=0)
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
        _conv_relu(net, x, f"{name}.a", (channels, 384), kernel=3, stride=2, padding=0),
        _conv_relu(net, y, f"{name}.b2", (96, 96), kernel=3, stride=2, padding=0),
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
        _conv_relu(net, y, f"{name}.a1", (192, 320), kernel=3, stride=2, padding=0),
        _conv_relu(net, z, f"{name}.b3", (192, 192), kernel=3, stride=2, padding=0),
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
    sides = [_conv_relu(net, x, f"{name}.{side}", (384, 384), side_kernel) for side, side_kernel in FORK.items()]
    return net.node("Concat", sides, name, axis=1)


def _chain(net: GraphBuilder, x: str, name: str, channels: int, convolutions: Chain) -> str:
    for index, (outputs, kernel) in enumerate(convolutions):
        x = _conv_relu(net, x, f"{name}.{index}", (channels, outputs), kernel)
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
    return _conv_relu(net, x, name, (channels, outputs))


def _conv_relu(
    net: GraphBuilder,
    x: str,
    name: str,
    channels: tuple[int, int],
    kernel: Pair = 1,
    stride: int = 1,
    padding: Pair | None = None,
) -> str:
    """Convolution, batch normalisation (epsilon 1e-3, as the Inception networks have it), ReLU."""
    x = net.conv(x, f"{name}.conv", channels, kernel, stride, padding=padding)
    return net.node("Relu", [net.batch_norm(x, f"{name}.bn", channels[1], epsilon=1e-3)], f"{name}.relu")
