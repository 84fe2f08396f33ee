"""GoogLeNet with batch normalisation, without auxiliary heads (Szegedy et al. 2014).

Layers and pooling are torchvision's, but the third branch has the 5x5 kernels of the paper; torchvision's are 3x3.
"""

from gangway.zoo.blocks import conv_relu
from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

# Channels of the four branches: 1x1; 1x1 then 3x3; 1x1 then 5x5; pooling then 1x1.
INCEPTIONS = {
    "3a": (64, (96, 128), (16, 32), 32),
    "3b": (128, (128, 192), (32, 96), 64),
    "4a": (192, (96, 208), (16, 48), 64),
    "4b": (160, (112, 224), (24, 64), 64),
    "4c": (128, (128, 256), (24, 64), 64),
    "4d": (112, (144, 288), (32, 64), 64),
    "4e": (256, (160, 320), (32, 128), 128),
    "5a": (256, (160, 320), (32, 128), 128),
    "5b": (384, (192, 384), (48, 128), 128),
}
POOL_AFTER = {"3b": 3, "4e": 2}  # kernel


def googlenet(seed: int) -> Blueprint:
    """input [N, 3, 224, 224] -> output [N, 1000] (logits)."""
    net = GraphBuilder("googlenet", seed)
    x = conv_relu(net, "input", "conv1", (3, 64), kernel=7, stride=2)
    x = net.max_pool(x, "maxpool1", kernel=3, stride=2, ceil_mode=True)
    x = conv_relu(net, x, "conv2", (64, 64))
    x = conv_relu(net, x, "conv3", (64, 192), kernel=3)
    x = net.max_pool(x, "maxpool2", kernel=3, stride=2, ceil_mode=True)
    channels = 192
    for key in INCEPTIONS:
        x, channels = _inception(net, x, key, channels)
        if kernel := POOL_AFTER.get(key):
            x = net.max_pool(x, f"maxpool{key}", kernel, stride=2, ceil_mode=True)
    net.classify(x, channels)
    return net.finish({"input": (3, 224, 224)}, {"output": (1000,)})


def _inception(net: GraphBuilder, x: str, key: str, channels: int) -> tuple[str, int]:
    name = f"inception{key}"
    single, triple, quintuple, pooled = INCEPTIONS[key]
    first = conv_relu(net, x, f"{name}.branch1", (channels, single))
    second = conv_relu(net, x, f"{name}.branch2.0", (channels, triple[0]))
    second = conv_relu(net, second, f"{name}.branch2.1", triple, kernel=3)
    third = conv_relu(net, x, f"{name}.branch3.0", (channels, quintuple[0]))
    third = conv_relu(net, third, f"{name}.branch3.1", quintuple, kernel=5)
    fourth = net.max_pool(x, f"{name}.branch4.pool", kernel=3, stride=1, padding=1, ceil_mode=True)
    fourth = conv_relu(net, fourth, f"{name}.branch4", (channels, pooled))
    x = net.node("Concat", [first, second, third, fourth], name, axis=1)
    return x, single + triple[1] + quintuple[1] + pooled
