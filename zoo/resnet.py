"""ResNets v1.5 (He et al. 2015), and SSD300 on ResNet-34 (Liu et al. 2015).

A bottleneck's stride stands in its 3x3 convolution, as torchvision builds them. SSD is as MLPerf trains it for the 81
classes of COCO, without NMS: its trunk is ResNet-34's up to the third stage, which keeps its resolution of 38 x 38.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gangway.zoo.graph import GraphBuilder, ModelGraph

FIRST_WIDTH = 64  # doubles from stage to stage
EXPANSION = 4  # of a bottleneck
# A small last gain keeps the residual stream from growing with depth, as training does.
LAST_GAIN = 0.3

CLASSES = 81  # of SSD
COORDINATES = 4  # of a box
FIRST_ANCHORS = 4  # of each pixel of the trunk's output
ANCHORS = 8732  # of all feature maps

Stages = Sequence[tuple[int, int]]  # blocks, and the stride of the first
Block = Callable[[GraphBuilder, str, str, int, int, int], tuple[str, int]]


@dataclass(frozen=True)
class Scale:
    """One feature map: how it is made from the one before, and how many anchors each of its pixels has."""

    anchors: int
    hidden: int
    channels: int
    stride: int
    padding: int


SCALES = (
    Scale(6, 256, 512, 2, 1),  # 19 x 19
    Scale(6, 256, 512, 2, 1),  # 10 x 10
    Scale(6, 128, 256, 2, 1),  # 5 x 5
    Scale(4, 128, 256, 1, 0),  # 3 x 3
    Scale(4, 128, 256, 1, 0),  # 1 x 1
)


def resnet18(seed: int) -> ModelGraph:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    return _resnet("resnet18", seed, _basic_block, ((2, 1), (2, 2), (2, 2), (2, 2)))


def resnet34(seed: int) -> ModelGraph:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    return _resnet("resnet34", seed, _basic_block, ((3, 1), (4, 2), (6, 2), (3, 2)))


def resnet50(seed: int) -> ModelGraph:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    return _resnet("resnet50", seed, _bottleneck, ((3, 1), (4, 2), (6, 2), (3, 2)))


def resnet101(seed: int) -> ModelGraph:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    return _resnet("resnet101", seed, _bottleneck, ((3, 1), (4, 2), (23, 2), (3, 2)))


def _resnet(name: str, seed: int, block: Block, stages: Stages) -> ModelGraph:
    net = GraphBuilder(name, seed)
    x, channels = _trunk(net, "input", block, stages)
    net.classify(x, channels)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})


def ssd_resnet34(seed: int) -> ModelGraph:
    """input [N, 3, 300, 300] -> scores [N, 8732, 81] (logits), boxes [N, 8732, 4] (relative to the anchors)."""
    net = GraphBuilder("ssd_resnet34", seed)
    x, channels = _trunk(net, "input", _basic_block, ((3, 1), (4, 2), (6, 1)))
    features = [(x, channels, FIRST_ANCHORS)]
    for index, scale in enumerate(SCALES):
        x = _extra(net, x, f"extra{index}", channels, scale)
        channels = scale.channels
        features.append((x, channels, scale.anchors))
    for name, values in (("scores", CLASSES), ("boxes", COORDINATES)):
        shape = net.integers(f"{name}.shape", [0, -1, values])
        heads = [
            _head(net, feature, f"{name}{index}", (inputs, anchors * values), shape)
            for index, (feature, inputs, anchors) in enumerate(features)
        ]
        net.node("Concat", heads, name, axis=1)
    return net.finish({"input": (3, 300, 300)}, {"scores": (ANCHORS, CLASSES), "boxes": (ANCHORS, COORDINATES)})


def _extra(net: GraphBuilder, x: str, name: str, channels: int, scale: Scale) -> str:
    x = net.conv(x, f"{name}.conv1", (channels, scale.hidden), kernel=1, bias=True)
    x = net.node("Relu", [x], f"{name}.relu1")
    sizes = (scale.hidden, scale.channels)
    x = net.conv(x, f"{name}.conv2", sizes, kernel=3, stride=scale.stride, padding=scale.padding, bias=True)
    return net.node("Relu", [x], f"{name}.relu2")


def _head(net: GraphBuilder, x: str, name: str, channels: tuple[int, int], shape: str) -> str:
    """Convolution, then [N, anchors x values, H, W] -> [N, H x W x anchors, values]."""
    x = net.conv(x, f"{name}.conv", channels, kernel=3, bias=True)
    x = net.node("Transpose", [x], f"{name}.transpose", perm=[0, 2, 3, 1])
    return net.node("Reshape", [x, shape], f"{name}.reshape")


def _trunk(net: GraphBuilder, x: str, block: Block, stages: Stages) -> tuple[str, int]:
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


def _basic_block(net: GraphBuilder, x: str, name: str, channels: int, width: int, stride: int) -> tuple[str, int]:
    """Two 3x3 convolutions around which the input is added."""
    y = net.batch_norm(net.conv(x, f"{name}.conv1", (channels, width), 3, stride), f"{name}.bn1", width)
    y = net.node("Relu", [y], f"{name}.relu1")
    y = net.batch_norm(net.conv(y, f"{name}.conv2", (width, width), 3), f"{name}.bn2", width, LAST_GAIN)
    return _add(net, x, y, name, channels, width, stride)


def _bottleneck(net: GraphBuilder, x: str, name: str, channels: int, width: int, stride: int) -> tuple[str, int]:
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
