"""What several image networks are made of."""

from gangway.zoo.builder import GraphBuilder, Pair


def conv_relu(
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


def swish(net: GraphBuilder, x: str, name: str) -> str:
    """x * sigmoid(x), in two nodes as PyTorch exports SiLU."""
    return net.node("Mul", [x, net.node("Sigmoid", [x], f"{name}.sigmoid")], f"{name}.swish")


def squeeze_excite(net: GraphBuilder, x: str, name: str, channels: int, squeezed: int) -> str:
    """Scale each channel by a factor that a small network derives from all channels' means (Hu et al. 2017)."""
    y = net.node("GlobalAveragePool", [x], f"{name}.avgpool")
    y = net.conv(y, f"{name}.fc1", (channels, squeezed), kernel=1, bias=True)
    y = net.conv(swish(net, y, f"{name}.fc1"), f"{name}.fc2", (squeezed, channels), kernel=1, bias=True)
    return net.node("Mul", [net.node("Sigmoid", [y], f"{name}.gate"), x], f"{name}.mul")
