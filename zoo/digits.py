"""The zoo's trained models: handwritten digits, from the pixels of a picture to a name.

`digits.npz` has the weights and sample pictures of `python -m benchmarks.train_digits`.
"""

import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from gangway.zoo.graph import GraphBuilder, ModelGraph

PICTURE_SIZE = 64  # pixels of a side
CELLS = 8  # of a side: means of so many pixels are what the network sees
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MOST = 255.0  # of a pixel's colour
SAMPLE_MOST = 16  # of a sample's cell

Pixels = npt.NDArray[np.uint8]


@cache
def _trained() -> dict[str, npt.NDArray[np.generic]]:
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        return {name: file[name] for name in file.files}


def digits_pixels(seed: int) -> ModelGraph:
    """PIXELS UINT8 [N, 64, 64, 3], white on black -> CELLS FP32 [N, 64]: mean brightness of 8 x 8 cells, 0 to 1."""
    net = GraphBuilder("digits_pixels", seed)
    numbers = net.node("Cast", ["PIXELS"], "numbers", to=TensorProto.FLOAT)
    planes = net.node("Transpose", [numbers], "planes", perm=[0, 3, 1, 2])
    side = PICTURE_SIZE // CELLS
    means = net.node("AveragePool", [planes], "means", kernel_shape=[side, side], strides=[side, side])
    grey = net.node("ReduceMean", [means], "grey", axes=[1], keepdims=0)
    shares = net.node("Div", [grey, net.scalar("most", MOST)], "shares")
    net.node("Flatten", [shares], "CELLS", axis=1)
    inputs, outputs = {"PIXELS": (PICTURE_SIZE, PICTURE_SIZE, 3)}, {"CELLS": (CELLS * CELLS,)}
    return net.finish(inputs, outputs, TensorProto.UINT8, TensorProto.FLOAT)


def digits_network(seed: int) -> ModelGraph:
    """CELLS FP32 [N, 64] -> DIGIT FP32 [N, 10]: the probability of each digit."""
    net = GraphBuilder("digits_network", seed)
    last = "CELLS"
    for layer, activation in enumerate(("Relu", "Softmax")):
        names = [f"{kind}{layer}" for kind in ("weights", "bias")]
        for name in names:
            net.constant(name, _trained()[name].astype(np.float32))
        sums = net.node("Gemm", [last, *names], f"sums{layer}")
        last = net.node(activation, [sums], "DIGIT" if activation == "Softmax" else "hidden")
    return net.finish({"CELLS": (CELLS * CELLS,)}, {"DIGIT": (len(DIGITS),)})


def sample_pictures() -> dict[str, bytes]:
    """Return a PNG file of each digit, by name: handwriting that the network was not trained with."""
    samples = _trained()["samples"]
    return {f"{name}.png": _png(_enlarged(sample)) for name, sample in zip(DIGITS, samples, strict=True)}


def _enlarged(sample: npt.NDArray[np.generic]) -> Pixels:
    """Return [64, 64] pixels of [8, 8] cells."""
    side = PICTURE_SIZE // CELLS
    return (sample.astype(np.float32) * (MOST / SAMPLE_MOST)).astype(np.uint8).repeat(side, 0).repeat(side, 1)


def _png(pixels: Pixels) -> bytes:
    """Return a grey PNG file of [height, width] pixels."""
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits, grey, no interlacing
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # no filter
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
