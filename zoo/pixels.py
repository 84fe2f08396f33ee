"""What stands in front of a classifier: from the bytes of an image to what the network was trained on."""

from onnx import TensorProto

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder
from gangway.zoo.examples import COLOURS, IMAGE_SIZE


def simple_pixels(seed: int) -> Blueprint:
    """PIXELS UINT8 [N, 64, 64, 3] -> IMAGE FP32 [N, 3, 64, 64]: the colours first, and 0 to 1."""
    net = GraphBuilder("simple_pixels", seed)
    numbers = net.node("Cast", ["PIXELS"], "numbers", to=TensorProto.FLOAT)
    shares = net.node("Div", [numbers, net.scalar("most", 255.0)], "shares")
    net.node("Transpose", [shares], "IMAGE", perm=[0, 3, 1, 2])
    size = IMAGE_SIZE
    inputs, outputs = {"PIXELS": (size, size, len(COLOURS))}, {"IMAGE": (len(COLOURS), size, size)}
    return net.finish(inputs, outputs, TensorProto.UINT8, TensorProto.FLOAT)
