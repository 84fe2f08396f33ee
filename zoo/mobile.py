"""MobileNetV2 (Sandler et al. 2018) and EfficientNet-B0 (Tan and Le 2019), as torchvision builds them.

MobileNetV2 has width 1.0; its ReLU6 is a Clip whose limits 0 and 6 are constant inputs. EfficientNet has MBConv blocks
with squeeze-and-excite and swish.
"""

from gangway.zoo.graph import GraphBuilder, ModelGraph

FIRST_CHANNELS = 32
LAST_CHANNELS = 1280
MOBILENET_BLOCKS = (  # expansion, channels, repeats, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)

EFFICIENTNET_BLOCKS = (  # expansion, kernel, stride of the first, channels, repeats
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
SQUEEZE = 4  # squeeze-and-excite shrinks to a quarter of the block's input channels
# Swish and the gate (about a half) shrink what He initialisation was made for.
INNER_GAIN = 1.0
LAST_GAIN = 1.2
RESIDUAL_GAIN = 0.6


def mobilenetv2(seed: int) -> ModelGraph:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("mobilenetv2", seed)
    net.scalar("zero", 0)
    net.scalar("six", 6)
    x = _conv_relu6(net, "input", "features.0", (3, FIRST_CHANNELS), kernel=3, stride=2)
    channels = FIRST_CHANNELS
    index = 1
    for expansion, outputs, repeats, stride in MOBILENET_BLOCKS:
        for repeat in range(repeats):
            x = _inverted_residual(
                net, x, f"features.{index}", (channels, outputs), expansion, stride if repeat == 0 else 1
            )
            channels = outputs
            index += 1
    x = _conv_relu6(net, x, f"features.{index}", (channels, LAST_CHANNELS), kernel=1)
    net.classify(x, LAST_CHANNELS)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})


def _inverted_residual(
    net: GraphBuilder, x: str, name: str, channels: tuple[int, int], expansion: int, stride: int
) -> str:
    inputs, outputs = channels
    hidden = inputs * expansion
    y = x
    if expansion != 1:
        y = _conv_relu6(net, y, f"{name}.expand", (inputs, hidden), kernel=1)
    y = _conv_relu6(net, y, f"{name}.depthwise", (hidden, hidden), kernel=3, stride=stride, groups=hidden)
    y = net.conv(y, f"{name}.project", (hidden, outputs), kernel=1)
    residual = stride == 1 and inputs == outputs
    y = net.batch_norm(y, f"{name}.project_bn", outputs, gain=0.5 if residual else 0.7)
    return net.node("Add", [x, y], f"{name}.add") if residual else y


def _conv_relu6(
    net: GraphBuilder, x: str, name: str, channels: tuple[int, int], kernel: int, stride: int = 1, groups: int = 1
) -> str:
    x = net.batch_norm(net.conv(x, name, channels, kernel, stride, groups), f"{name}.bn", channels[1])
    return net.node("Clip", [x, "zero", "six"], f"{name}.relu6")


def efficientnet_b0(seed: int) -> ModelGraph:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("efficientnet_b0", seed)
    x = _conv_swish(net, "input", "stem", (3, FIRST_CHANNELS), kernel=3, stride=2)
    channels = FIRST_CHANNELS
    for stage, (expansion, kernel, stride, outputs, repeats) in enumerate(EFFICIENTNET_BLOCKS, start=1):
        for repeat in range(repeats):
            name = f"stage{stage}.{repeat}"
            x = _mbconv(net, x, name, (channels, outputs), expansion, kernel, stride if repeat == 0 else 1)
            channels = outputs
    net.classify(_conv_swish(net, x, "last", (channels, LAST_CHANNELS)), LAST_CHANNELS)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})


def _mbconv(
    net: GraphBuilder, x: str, name: str, channels: tuple[int, int], expansion: int, kernel: int, stride: int
) -> str:
    inputs, outputs = channels
    hidden = inputs * expansion
    y = x
    if expansion != 1:
        y = _conv_swish(net, y, f"{name}.expand", (inputs, hidden))
    y = _conv_swish(net, y, f"{name}.depthwise", (hidden, hidden), kernel, stride, groups=hidden)
    y = _squeeze_excite(net, y, f"{name}.se", hidden, inputs // SQUEEZE)
    y = net.conv(y, f"{name}.project", (hidden, outputs), kernel=1)
    residual = stride == 1 and inputs == outputs
    y = net.batch_norm(y, f"{name}.project_bn", outputs, RESIDUAL_GAIN if residual else LAST_GAIN)
    return net.node("Add", [y, x], f"{name}.add") if residual else y


def _conv_swish(
    net: GraphBuilder, x: str, name: str, channels: tuple[int, int], kernel: int = 1, stride: int = 1, groups: int = 1
) -> str:
    x = net.conv(x, f"{name}.conv", channels, kernel, stride, groups)
    return _swish(net, net.batch_norm(x, f"{name}.bn", channels[1], INNER_GAIN), name)


def _squeeze_excite(net: GraphBuilder, x: str, name: str, channels: int, squeezed: int) -> str:
    """Scale each channel by a factor that a small network derives from all channels' means (Hu et al. 2017)."""
    y = net.node("GlobalAveragePool", [x], f"{name}.avgpool")
    y = net.conv(y, f"{name}.fc1", (channels, squeezed), kernel=1, bias=True)
    y = net.conv(_swish(net, y, f"{name}.fc1"), f"{name}.fc2", (squeezed, channels), kernel=1, bias=True)
    return net.node("Mul", [net.node("Sigmoid", [y], f"{name}.gate"), x], f"{name}.mul")


def _swish(net: GraphBuilder, x: str, name: str) -> str:
    """x * sigmoid(x), in two nodes as PyTorch exports SiLU."""
    return net.node("Mul", [x, net.node("Sigmoid", [x], f"{name}.sigmoid")], f"{name}.swish")
