"""SSD300 on ResNet-34 (Liu et al. 2015, as MLPerf trains it for the 81 classes of COCO), without NMS.

The trunk is ResNet-34's up to its third stage, which keeps its resolution of 38 x 38.
"""

from dataclasses import dataclass

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder
from gangway.zoo.resnet import basic_block, trunk

CLASSES = 81
COORDINATES = 4


@dataclass(frozen=True)
class Scale:
    """One feature map: how it is made from the one before, and how many anchors each of its pixels has."""

    anchors: int
    hidden: int
    channels: int
    stride: int
    padding: int


FIRST_ANCHORS = 4  # of the trunk's 38 x 38
SCALES = (
    Scale(6, 256, 512, 2, 1),  # 19 x 19
    Scale(6, 256, 512, 2, 1),  # 10 x 10
    Scale(6, 128, 256, 2, 1),  # 5 x 5
    Scale(4, 128, 256, 1, 0),  # 3 x 3
    Scale(4, 128, 256, 1, 0),  # 1 x 1
)
ANCHORS = 8732  # in all


def ssd_resnet34(seed: int) -> Blueprint:
    """input [N, 3, 300, 300] -> scores [N, 8732, 81] (logits), boxes [N, 8732, 4] (relative to the anchors)."""
    net = GraphBuilder("ssd_resnet34", seed)
    x, channels = trunk(net, "input", basic_block, ((3, 1), (4, 2), (6, 1)))
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
