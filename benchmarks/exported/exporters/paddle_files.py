"""Networks of Paddle by paddle2onnx."""

import os
import tempfile

import files
import paddle
from files import sizes, tensor
from paddle.static import InputSpec

PICTURES = sizes("B H W", (1, 64, 96), (3, 64, 96), (1, 96, 128))


class Recogniser(paddle.nn.Layer):
    """A CRNN."""

    def __init__(self):
        super().__init__()
        self.front = paddle.nn.Sequential(
            paddle.nn.Conv2D(3, 16, 3, padding=1), paddle.nn.BatchNorm2D(16), paddle.nn.Hardswish(),
            paddle.nn.MaxPool2D((16, 1)),
        )  # fmt: skip
        self.recurrent = paddle.nn.LSTM(32, 24, direction="bidirect")
        self.head = paddle.nn.Linear(48, 37)

    def forward(self, x):
        h = self.front(x)
        h = h.transpose([0, 3, 1, 2]).flatten(2)
        return paddle.nn.functional.softmax(self.head(self.recurrent(h)[0]))


def write(make, shape):
    def to(path):
        paddle.seed(0)
        network = make()
        network.eval()
        with tempfile.TemporaryDirectory() as scratch:
            made = os.path.join(scratch, "model")
            paddle.onnx.export(network, made, input_spec=[InputSpec(shape, "float32", "x")], opset_version=17)
            files.moved(made + ".onnx", path)

    return to


vision = paddle.vision.models
files.add(
    "paddle_mobilenet_v2",
    write(lambda: vision.mobilenet_v2(scale=0.25), [None, 3, 64, 64]),
    {"x": tensor("B", 3, 64, 64)},
)
files.add("paddle_resnet18", write(vision.resnet18, [None, 3, None, None]), {"x": tensor("B", 3, "H", "W")}, PICTURES)
files.add("paddle_shufflenet", write(vision.shufflenet_v2_x0_25, [None, 3, 64, 64]), {"x": tensor("B", 3, 64, 64)})
files.add("paddle_recogniser", write(Recogniser, [None, 3, 32, None]), {"x": tensor("B", 3, 32, "W")},
          sizes("B W", (1, 64), (3, 64), (1, 100)))  # fmt: skip
if __name__ == "__main__":
    files.main("paddle2onnx", ["paddle2onnx", "paddlepaddle"])
