"""What the transformers are made of, in the nodes that PyTorch's exporter makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gangway.zoo.builder import GraphBuilder, Pair

# What several image networks are made of.


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


LOWEST = float(np.finfo(np.float32).min)  # what PyTorch's models add to the score of a masked position


@dataclass(frozen=True)
class Size:
    """Dimensions of a transformer. Every linear layer's weights deviate by 1 / sqrt(inputs): nothing fades or grows,
    and attention is far from uniform."""

    layers: int
    heads: int
    hidden: int
    vocabulary: int
    positions: int

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Channels inside the feed-forward part."""
        return 4 * self.hidden


def embed(net: GraphBuilder, indices: str, name: str, shape: tuple[int, int]) -> str:
    """Look up rows of a table [rows, channels]."""
    return net.node("Gather", [table(net, name, shape), indices], name)


def table(net: GraphBuilder, name: str, shape: tuple[int, int]) -> str:
    """Declare an embedding table [rows, channels]."""
    return net.normal(f"{name}.weight", shape, shape[1] ** -0.5)


def positions(net: GraphBuilder, sequence: int) -> str:
    """0, 1, ... as int64 [1, sequence]."""
    return net.constant("position_ids", np.arange(sequence, dtype=np.int64)[None])


def linear(net: GraphBuilder, x: str, name: str, inputs: int, outputs: int, bias: bool = True) -> str:
    """x [..., inputs] times a weight [inputs, outputs], plus a bias: MatMul and Add."""
    weight = net.normal(f"{name}.weight", (inputs, outputs), inputs**-0.5)
    if not bias:
        return net.node("MatMul", [x, weight], f"{name}.matmul")
    vector = net.normal(f"{name}.bias", (outputs,), 0.05)
    return net.node("Add", [net.node("MatMul", [x, weight], f"{name}.matmul"), vector], f"{name}.add")


def layer_norm(net: GraphBuilder, x: str, name: str, channels: int, epsilon: float) -> str:
    """Normalise over the last axis; scale about 1, small shift."""
    weights = [net.uniform(f"{name}.weight", channels, 0.8, 1.2), net.normal(f"{name}.bias", (channels,), 0.1)]
    return net.node("LayerNormalization", [x, *weights], name, axis=-1, epsilon=epsilon)


def gelu(net: GraphBuilder, x: str, name: str) -> str:
    """x / 2 (1 + erf(x / sqrt 2)), in five nodes. Wants the scalars of `gelu_scalars`."""
    y = net.node("Div", [x, "sqrt_two"], f"{name}.div")
    y = net.node("Add", [net.node("Erf", [y], f"{name}.erf"), "one"], f"{name}.add")
    return net.node("Mul", [net.node("Mul", [x, y], f"{name}.mul"), "half"], f"{name}.half")


def gelu_scalars(net: GraphBuilder) -> None:
    """Declare what every `gelu` of a model shares."""
    for name, value in (("sqrt_two", 2**0.5), ("one", 1.0), ("half", 0.5)):
        net.scalar(name, value)


def feed_forward(net: GraphBuilder, x: str, name: str, size: Size) -> str:
    """Linear to the inner channels, GELU, linear back."""
    y = gelu(net, linear(net, x, f"{name}.fc1", size.hidden, size.inner), f"{name}.gelu")
    return linear(net, y, f"{name}.fc2", size.inner, size.hidden)


def split_heads(net: GraphBuilder, x: str, name: str, shape: str, perm: Sequence[int] = (0, 2, 1, 3)) -> str:
    """[N, S, hidden] -> [N, S, heads, head size], with `shape` the name of that, -> its axes in the order `perm`."""
    return net.node("Transpose", [net.node("Reshape", [x, shape], f"{name}.split")], f"{name}.heads", perm=list(perm))


def merge_heads(net: GraphBuilder, x: str, name: str, shape: str) -> str:
    """[N, heads, S, head size] -> [N, S, hidden], with `shape` the name of that."""
    return net.node("Reshape", [net.node("Transpose", [x], f"{name}.back", perm=[0, 2, 1, 3]), shape], f"{name}.merge")


def attention_bias(net: GraphBuilder, mask: str = "attention_mask") -> str:
    """INT64 mask [N, S], 1 where a token is -> float [N, 1, 1, S], 0 there and the lowest number elsewhere."""
    axes = net.integers("mask.axes", [1, 2])
    x = net.node("Unsqueeze", [mask, axes], "mask.unsqueeze")
    x = net.node("Cast", [x], "mask.cast", to=1)
    x = net.node("Sub", [net.scalar("mask.one", 1.0), x], "mask.sub")
    return net.node("Mul", [x, net.scalar("mask.lowest", LOWEST)], "mask.bias")
