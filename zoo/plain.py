"""AlexNet (Krizhevsky 2014, one column) and VGG-16 (Simonyan and Zisserman 2014), as torchvision builds them.

Their classifier wants an image of fixed size; at 224 x 224 the adaptive pooling before it becomes a 1x1 AveragePool
when exported, and the dropout disappears.
"""

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

ALEXNET_CONVS = (  # channels, kernel, stride, padding, pooling behind it
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)
VGG16_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions; pooling behind each stage
HIDDEN = 4096


def alexnet(seed: int) -> Blueprint:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("alexnet", seed)
    x, channels = "input", 3
    for index, (outputs, kernel, stride, padding, pooling) in enumerate(ALEXNET_CONVS):
        x = net.conv(x, f"conv{index}", (channels, outputs), kernel, stride, padding=padding, bias=True)
        x = net.node("Relu", [x], f"relu{index}")
        if pooling:
            x = net.max_pool(x, f"pool{index}", kernel=3, stride=2)
        channels = outputs
    return _classify(net, x, channels * 6 * 6)


def vgg16(seed: int) -> Blueprint:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("vgg16", seed)
    x, channels = "input", 3
    for stage, (outputs, convolutions) in enumerate(VGG16_STAGES):
        for index in range(convolutions):
            name = f"stage{stage}.{index}"
            x = net.conv(x, f"{name}.conv", (channels, outputs), kernel=3, bias=True)
            x = net.node("Relu", [x], f"{name}.relu")
            channels = outputs
        x = net.max_pool(x, f"stage{stage}.pool", kernel=2, stride=2)
    return _classify(net, x, channels * 7 * 7)


def _classify(net: GraphBuilder, x: str, features: int) -> Blueprint:
    x = net.node("AveragePool", [x], "avgpool", kernel_shape=[1, 1], strides=[1, 1])
    x = net.node("Flatten", [x], "flatten", axis=1)
    for index, inputs in enumerate((features, HIDDEN)):
        x = net.node("Relu", [net.dense(x, f"fc{index}", inputs, HIDDEN)], f"fc{index}.relu")
    net.dense(x, "output", HIDDEN, 1000)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})
