"""ResNet-50 v1.5: a block's stride stands in its 3x3 convolution (He et al. 2015, as torchvision builds it)."""

from gangway.zoo.builder import GraphBuilder
from onnx import ModelProto

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride of the first block
EXPANSION = 4


def build(seed: int) -> ModelProto:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("resnet50", seed)
    x = net.conv("input", "conv1", (3, 64), kernel=7, stride=2)
    x = net.node("Relu", [net.batch_norm(x, "bn1", 64)], "relu1")
    x = net.node("MaxPool", [x], "maxpool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, (width, blocks, stride) in enumerate(STAGES, start=1):
        for block in range(blocks):
            x = _bottleneck(net, x, f"layer{stage}.{block}", channels, width, stride if block == 0 else 1)
            channels = width * EXPANSION
    x = net.node("GlobalAveragePool", [x], "avgpool")
    x = net.node("Flatten", [x], "flatten", axis=1)
    net.dense(x, "output", channels, 1000)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})


def _bottleneck(net: GraphBuilder, x: str, name: str, channels: int, width: int, stride: int) -> str:
    outputs = width * EXPANSION
    y = net.batch_norm(net.conv(x, f"{name}.conv1", (channels, width), 1), f"{name}.bn1", width)
    y = net.node("Relu", [y], f"{name}.relu1")
    y = net.batch_norm(net.conv(y, f"{name}.conv2", (width, width), 3, stride), f"{name}.bn2", width)
    y = net.node("Relu", [y], f"{name}.relu2")
    # A small last gain keeps the residual stream from growing with depth, as training does.
    y = net.batch_norm(net.conv(y, f"{name}.conv3", (width, outputs), 1), f"{name}.bn3", outputs, gain=0.3)
    if channels != outputs or stride != 1:
        x = net.conv(x, f"{name}.downsample", (channels, outputs), 1, stride)
        x = net.batch_norm(x, f"{name}.downsample_bn", outputs, gain=0.7)
    return net.node("Relu", [net.node("Add", [y, x], f"{name}.add")], f"{name}.relu3")
