"""Tiny YOLOv2 for the 20 classes of Pascal VOC (Redmon and Farhadi 2016), without the decoding of boxes."""

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

CHANNELS = (16, 32, 64, 128, 256, 512, 1024, 1024)
POOL_STRIDES = (2, 2, 2, 2, 2, 1)  # behind the first six convolutions
BOXES, CLASSES = 5, 20
OUTPUTS = BOXES * (CLASSES + 5)  # per box: centre, size, objectness, classes
LEAK = 0.1


def tiny_yolov2(seed: int) -> Blueprint:
    """input [N, 3, 416, 416] -> grid [N, 125, 13, 13]."""
    net = GraphBuilder("tiny_yolov2", seed)
    x, channels = "input", 3
    for index, outputs in enumerate(CHANNELS):
        x = net.conv(x, f"conv{index}", (channels, outputs), kernel=3)
        x = net.node("LeakyRelu", [net.batch_norm(x, f"bn{index}", outputs)], f"leaky{index}", alpha=LEAK)
        if index < len(POOL_STRIDES):
            x = _pool(net, x, f"pool{index}", POOL_STRIDES[index])
        channels = outputs
    net.conv(x, "grid", (channels, OUTPUTS), kernel=1, bias=True)
    return net.finish({"input": (3, 416, 416)}, {"grid": (OUTPUTS, 13, 13)})


def _pool(net: GraphBuilder, x: str, name: str, stride: int) -> str:
    """2x2 maximum; with stride 1 the size stays, for which ONNX pads below and to the right."""
    return net.node("MaxPool", [x], name, kernel_shape=[2, 2], strides=[stride, stride], auto_pad="SAME_UPPER")
