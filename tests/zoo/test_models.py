"""Answers of the zoo's models, by ONNX Runtime: finite, not trivial, and different for different inputs."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from gangway.zoo import write_model
from gangway.zoo.digits import DIGITS
from gangway.zoo.repository import write_ensemble
from tests.helpers.sampled import sampled

# vgg16, alexnet and resnet101 have the layers of others here, and are too large to be written in a test.
IMAGES = [
    "resnet18",
    "resnet34",
    "resnet50",
    "googlenet",
    "inception_v3",
    "mobilenetv2",
    "efficientnet_b0",
    "ssd_resnet34",
    "tiny_yolov2",
]


def session(directory: Path, name: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # Optimising takes longer than the one query.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return onnxruntime.InferenceSession(str(write_model(directory, name) / "1" / "model.onnx"), options)


@pytest.mark.parametrize("name", sampled([*IMAGES, "mlp"], ["mobilenetv2", "resnet50", "googlenet", "mlp"]))
def test_answers_are_finite_and_depend_on_the_input(tmp_path: Path, name: str) -> None:
    model = session(tmp_path, name)
    (info,) = model.get_inputs()
    x = np.random.default_rng(1).standard_normal((2, *info.shape[1:]), dtype=np.float32)
    for y, output in zip(model.run(None, {info.name: x}), model.get_outputs(), strict=True):
        assert y.shape == (2, *output.shape[1:])
        assert np.isfinite(y).all()
        assert 0.1 < y.std() < 30
        assert np.abs(y[0] - y[1]).max() > 0.1 * np.abs(y).max()


@pytest.mark.parametrize(
    ("name", "datatype"), [("simple", np.int32), ("simple_string", np.object_), ("simple_int8", np.int8)]
)
def test_simple_adds_and_subtracts(tmp_path: Path, name: str, datatype: type) -> None:
    def typed(values: np.ndarray) -> np.ndarray:
        return values.astype(str).astype(object) if datatype is np.object_ else values.astype(datatype)

    a, b = np.arange(-32, 32, 2)[None].repeat(2, axis=0)[:, :16], np.full((2, 16), -30)
    model = session(tmp_path, name)
    total, difference = model.run(["OUTPUT0", "OUTPUT1"], {"INPUT0": typed(a), "INPUT1": typed(b)})
    assert (total == typed(a + b)).all()
    assert (difference == typed(a - b)).all()


def test_the_identity_keeps_strings(tmp_path: Path) -> None:
    texts = np.array([["", "é", "he\0llo"], ["a" * 1000, "1", "\n"]], object)
    (answer,) = session(tmp_path, "simple_identity").run(None, {"INPUT0": texts})
    assert answer.tolist() == texts.tolist()


def test_the_classifier_sees_colours(tmp_path: Path) -> None:
    images = np.zeros((3, 3, 64, 64), np.float32)
    for channel in range(3):
        images[channel, channel] = 1
    (answer,) = session(tmp_path, "simple_image").run(None, {"IMAGE": images})
    assert answer.argmax(axis=1).tolist() == [0, 1, 2]
    assert (tmp_path / "simple_image" / "labels.txt").read_text() == "red\ngreen\nblue\n"
    config = (tmp_path / "simple_image" / "config.pbtxt").read_text()
    assert 'label_filename: "labels.txt"' in config and "format: FORMAT_NCHW" in config


def test_the_digits_network_recognises_what_it_was_not_trained_with(tmp_path: Path) -> None:
    models = [(session(tmp_path, "digits_pixels"), "PIXELS"), (session(tmp_path, "digits_network"), "CELLS")]
    answers = {}
    for path in (write_ensemble(tmp_path, "digits") / "samples").iterdir():
        value = np.asarray(Image.open(path).convert("RGB"))[None]
        for model, tensor in models:
            (value,) = model.run(None, {tensor: value})
        answers[path.stem] = DIGITS[int(value.argmax())]
    assert answers == {name: name for name in DIGITS}
