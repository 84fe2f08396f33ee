"""EfficientNet-B0 (Tan and Le 2019, as torchvision builds it): MBConv blocks with squeeze-and-excite and swish."""

from gangway.zoo.blocks import squeeze_excite, swish
from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

BLOCKS = (  # expansion, kernel, stride of the first, channels, repeats
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
FIRST_CHANNELS = 32
LAST_CHANNELS = 1280
SQUEEZE = 4  # squeeze-and-excite shrinks to a quarter of the block's input channels
# Swish and the gate (about a half) shrink what He initialisation was made for.
INNER_GAIN = 1.0
LAST_GAIN = 1.2
RESIDUAL_GAIN = 0.6


def efficientnet_b0(seed: int) -> Blueprint:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("efficientnet_b0", seed)
    x = _conv(net, "input", "stem", (3, FIRST_CHANNELS), kernel=3, stride=2)
    channels = FIRST_CHANNELS
    for stage, (expansion, kernel, stride, outputs, repeats) in enumerate(BLOCKS, start=1):
        for repeat in range(repeats):
            name = f"stage{stage}.{repeat}"
            x = _mbconv(net, x, name, (channels, outputs), expansion, kernel, stride if repeat == 0 else 1)
            channels = outputs
    net.classify(_conv(net, x, "last", (channels, LAST_CHANNELS)), LAST_CHANNELS)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})


def _conv(
    net: GraphBuilder, x: str, name: str, channels: tuple[int, int], kernel: int = 1, stride: int = 1, groups: int = 1
) -> str:
    x = net.conv(x, f"{name}.conv", channels, kernel, stride, groups)
    return swish(net, net.batch_norm(x, f"{name}.bn", channels[1], INNER_GAIN), name)


def _mbconv(
    net: GraphBuilder, x: str, name: str, channels: tuple[int, int], expansion: int, kernel: int, stride: int
) -> str:
    inputs, outputs = channels
    hidden = inputs * expansion
    y = x
    if expansion != 1:
        y = _conv(net, y, f"{name}.expand", (inputs, hidden))
    y = _conv(net, y, f"{name}.depthwise", (hidden, hidden), kernel, stride, groups=hidden)
    y = squeeze_excite(net, y, f"{name}.se", hidden, inputs // SQUEEZE)
    y = net.conv(y, f"{name}.project", (hidden, outputs), kernel=1)
    residual = stride == 1 and inputs == outputs
    y = net.batch_norm(y, f"{name}.project_bn", outputs, RESIDUAL_GAIN if residual else LAST_GAIN)
    return net.node("Add", [y, x], f"{name}.add") if residual else y
