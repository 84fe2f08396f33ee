"""MobileNetV2, width 1.0, 224 x 224 (Sandler et al. 2018, as torchvision builds it).

ReLU6 is a Clip whose limits 0 and 6 are constant inputs.
"""

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

BLOCKS = (  # expansion, channels, repeats, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
FIRST_CHANNELS = 32
LAST_CHANNELS = 1280


def mobilenetv2(seed: int) -> Blueprint:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("mobilenetv2", seed)
    net.scalar("zero", 0)
    net.scalar("six", 6)
    x = _conv(net, "input", "features.0", (3, FIRST_CHANNELS), kernel=3, stride=2)
    channels = FIRST_CHANNELS
    index = 1
    for expansion, outputs, repeats, stride in BLOCKS:
        for repeat in range(repeats):
            x = _inverted_residual(
                net, x, f"features.{index}", (channels, outputs), expansion, stride if repeat == 0 else 1
            )
            channels = outputs
            index += 1
    x = _conv(net, x, f"features.{index}", (channels, LAST_CHANNELS), kernel=1)
    net.classify(x, LAST_CHANNELS)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})


def _conv(
    net: GraphBuilder, x: str, name: str, channels: tuple[int, int], kernel: int, stride: int = 1, groups: int = 1
) -> str:
    x = net.batch_norm(net.conv(x, name, channels, kernel, stride, groups), f"{name}.bn", channels[1])
    return net.node("Clip", [x, "zero", "six"], f"{name}.relu6")


def _inverted_residual(
    net: GraphBuilder, x: str, name: str, channels: tuple[int, int], expansion: int, stride: int
) -> str:
    inputs, outputs = channels
    hidden = inputs * expansion
    y = x
    if expansion != 1:
        y = _conv(net, y, f"{name}.expand", (inputs, hidden), kernel=1)
    y = _conv(net, y, f"{name}.depthwise", (hidden, hidden), kernel=3, stride=stride, groups=hidden)
    y = net.conv(y, f"{name}.project", (hidden, outputs), kernel=1)
    residual = stride == 1 and inputs == outputs
    y = net.batch_norm(y, f"{name}.project_bn", outputs, gain=0.5 if residual else 0.7)
    return net.node("Add", [x, y], f"{name}.add") if residual else y
