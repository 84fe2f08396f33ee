"""ResNets v1.5: a bottleneck's stride stands in its 3x3 convolution (He et al. 2015, as torchvision builds them)."""

from collections.abc import Callable, Sequence

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

FIRST_WIDTH = 64  # doubles from stage to stage
EXPANSION = 4  # of a bottleneck
# A small last gain keeps the residual stream from growing with depth, as training does.
LAST_GAIN = 0.3

Stages = Sequence[tuple[int, int]]  # blocks, and the stride of the first
Block = Callable[[GraphBuilder, str, str, int, int, int], tuple[str, int]]


def resnet18(seed: int) -> Blueprint:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    return _resnet("resnet18", seed, basic_block, ((2, 1), (2, 2), (2, 2), (2, 2)))


def resnet34(seed: int) -> Blueprint:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    return _resnet("resnet34", seed, basic_block, ((3, 1), (4, 2), (6, 2), (3, 2)))


def resnet50(seed: int) -> Blueprint:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    return _resnet("resnet50", seed, bottleneck, ((3, 1), (4, 2), (6, 2), (3, 2)))


def resnet101(seed: int) -> Blueprint:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    return _resnet("resnet101", seed, bottleneck, ((3, 1), (4, 2), (23, 2), (3, 2)))


def _resnet(name: str, seed: int, block: Block, stages: Stages) -> Blueprint:
    net = GraphBuilder(name, seed)
    x, channels = trunk(net, "input", block, stages)
    net.classify(x, channels)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})


def trunk(net: GraphBuilder, x: str, block: Block, stages: Stages) -> tuple[str, int]:
    """Everything before the classifier. Return the output and its channels."""
    x = net.conv(x, "conv1", (3, 64), kernel=7, stride=2)
    x = net.node("Relu", [net.batch_norm(x, "bn1", 64)], "relu1")
    x = net.max_pool(x, "maxpool", kernel=3, stride=2, padding=1)
    channels = 64
    for stage, (depth, stride) in enumerate(stages):
        for index in range(depth):
            name = f"layer{stage + 1}.{index}"
            x, channels = block(net, x, name, channels, FIRST_WIDTH << stage, stride if index == 0 else 1)
    return x, channels


def basic_block(net: GraphBuilder, x: str, name: str, channels: int, width: int, stride: int) -> tuple[str, int]:
    """Two 3x3 convolutions around which the input is added."""
    y = net.batch_norm(net.conv(x, f"{name}.conv1", (channels, width), 3, stride), f"{name}.bn1", width)
    y = net.node("Relu", [y], f"{name}.relu1")
    y = net.batch_norm(net.conv(y, f"{name}.conv2", (width, width), 3), f"{name}.bn2", width, LAST_GAIN)
    return _add(net, x, y, name, channels, width, stride)


def bottleneck(net: GraphBuilder, x: str, name: str, channels: int, width: int, stride: int) -> tuple[str, int]:
    """1x1, 3x3 and 1x1 convolutions around which the input is added."""
    outputs = width * EXPANSION
    y = net.batch_norm(net.conv(x, f"{name}.conv1", (channels, width), 1), f"{name}.bn1", width)
    y = net.node("Relu", [y], f"{name}.relu1")
    y = net.batch_norm(net.conv(y, f"{name}.conv2", (width, width), 3, stride), f"{name}.bn2", width)
    y = net.node("Relu", [y], f"{name}.relu2")
    y = net.batch_norm(net.conv(y, f"{name}.conv3", (width, outputs), 1), f"{name}.bn3", outputs, LAST_GAIN)
    return _add(net, x, y, name, channels, outputs, stride)


def _add(net: GraphBuilder, x: str, y: str, name: str, channels: int, outputs: int, stride: int) -> tuple[str, int]:
    if channels != outputs or stride != 1:
        x = net.conv(x, f"{name}.downsample", (channels, outputs), 1, stride)
        x = net.batch_norm(x, f"{name}.downsample_bn", outputs, gain=0.7)
    return net.node("Relu", [net.node("Add", [y, x], f"{name}.add")], f"{name}.relu3"), outputs
