"""Resize in every mode, blocked between convolutions and plain, against onnxruntime."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.helpers.onnx_models import save_model
from tests.helpers.targets import ENDS

pytestmark = pytest.mark.long

node = helper.make_node
COORDINATES = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
MODES: list[dict[str, Any]] = [
    *({"mode": "nearest", "nearest_mode": rounding} for rounding in ("floor", "ceil", "round_prefer_floor")),
    {"mode": "linear"},
    {"mode": "cubic", "cubic_coeff_a": -0.5},
    {"mode": "cubic", "exclude_outside": 1},
]
FACTORS = [(2.0, 2.0), (0.5, 0.7), (3.4, 1.0), (1.5, 4.0)]


def weights(*shape: int) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


@pytest.mark.parametrize("target", ENDS)
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_between_convolutions_nothing_is_unpacked(check: Any, network: Any, target: str, coordinates: str) -> None:
    """Channels that fill no register; a halo before and after."""
    nodes = [node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]), node("Conv", ["a", "w0"], ["b"], pads=[1, 1, 1, 1])]
    constants = {"w": weights(20, 5, 3, 3), "w0": weights(20, 20, 3, 3), "w1": weights(3, 20, 3, 3)}
    outputs = {"b": None}
    for index, (mode, factors) in enumerate((mode, factors) for mode in MODES for factors in FACTORS[:3]):
        constants[f"s{index}"] = np.array([1, 1, *factors], np.float32)
        attributes = {"coordinate_transformation_mode": coordinates, **mode}
        nodes.append(node("Resize", ["a", "", f"s{index}"], [f"r{index}"], **attributes))
        nodes.append(node("Conv", [f"r{index}", "w1"], [f"y{index}"], pads=[1, 1, 1, 1]))
        outputs[f"y{index}"] = None
    operators = check(network(nodes, {"x": ["N", 5, 11, 14]}, outputs, constants, opset=19), target)
    assert operators.count("Resize") == len(outputs) - 1
    assert operators.count("Unpack") == len(outputs)
    assert operators.count("Pack") == 1


@pytest.mark.parametrize("target", ENDS)
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_of_plain_tensors(check: Any, network: Any, target: str, coordinates: str) -> None:
    nodes, constants = [], {}
    for index, (mode, factors) in enumerate((mode, factors) for mode in MODES for factors in FACTORS):
        constants[f"s{index}"] = np.array([1, 1, *factors], np.float32)
        attributes = {"coordinate_transformation_mode": coordinates, **mode}
        nodes.append(node("Resize", ["x", "", f"s{index}"], [f"y{index}"], **attributes))
    outputs = {item.output[0]: None for item in nodes}
    operators = check(network(nodes, {"x": ["N", 3, 13, 17]}, outputs, constants, opset=19), target)
    assert set(operators) == {"Resize"}


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_sizes_instead_of_scales(check: Any, network: Any, mode: str) -> None:
    """Of which floor(length * (size / length)) may be another size; and of some axes only."""
    for sizes in ([1, 3, 49, 41], [1, 3, 1, 7]):
        nodes = [node("Resize", ["x", "", "", "sizes"], ["y"], mode=mode)]
        check(network(nodes, {"x": [1, 3, 13, 17]}, {"y": None}, {"sizes": np.array(sizes)}, opset=19))
    nodes = [node("Resize", ["x", "", "", "sizes"], ["y"], mode=mode, axes=[3, 2])]
    check(network(nodes, {"x": ["N", 3, 13, 17]}, {"y": None}, {"sizes": np.array([30, 29])}, opset=19))


def test_smoothed(check: Any, network: Any) -> None:
    nodes = [
        node("Resize", ["x", "", "s"], [mode], mode=mode, antialias=1, coordinate_transformation_mode="half_pixel")
        for mode in ("linear", "cubic")
    ]
    scales = {"s": np.array([1, 1, 0.4, 0.3], np.float32)}
    check(network(nodes, {"x": ["N", 3, 41, 37]}, {"linear": None, "cubic": None}, scales, opset=19))


TYPES = ("uint8", "int8", "int32", "float32")
WAYS = (*COORDINATES, "tf_crop_and_resize")


@pytest.mark.parametrize(("coordinates", "dtype"), list(itertools.product(WAYS, TYPES)))
def test_of_every_type(coordinates: str, dtype: str, compile_file: Any, load_artifact: Any, tmp_path: Path) -> None:
    """Behind a convolution, so that kernels compute the rest. onnxruntime has no cubic one of integers."""
    modes = ["nearest", "linear", *(["cubic"] if dtype == "float32" else [])]
    nodes = [
        node("Resize", ["x", "r", "s"], [mode], mode=mode, coordinate_transformation_mode=coordinates) for mode in modes
    ]
    nodes += [node("Conv", ["z", "w"], ["c"])]
    limits = (-4, 5) if dtype == "float32" else (max(np.iinfo(dtype).min, -1000), min(np.iinfo(dtype).max, 1000))
    feeds = {"x": np.random.default_rng(1).integers(*limits, (1, 2, 6, 7)).astype(dtype), "z": weights(1, 3, 8, 8)}
    constants = {"r": np.array([0, 0, 0.1, -0.2, 1, 1, 0.9, 1.1], np.float32), "w": weights(4, 3, 3, 3)}
    constants["s"] = np.array([1, 1, 1.7, 0.6], np.float32)
    path = save_model(tmp_path / "model.onnx", nodes, feeds, dict.fromkeys((*modes, "c"), ...), constants, opset=18)
    compiled = compile_file(path)
    assert not compiled.manifest.fallback_reason
    answers = load_artifact(compiled.folder)(feeds)
    for name, expected in zip((*modes, "c"), onnxruntime.InferenceSession(path).run(None, feeds), strict=True):
        assert answers[name].dtype == expected.dtype
        np.testing.assert_allclose(answers[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("operator", "opset"), [("Upsample", 9), ("Resize", 10)])
def test_of_old_operator_sets(check: Any, network: Any, operator: str, opset: int) -> None:
    nodes = [node(operator, ["x", "s"], [mode], mode=mode) for mode in ("nearest", "linear")]
    scales = {"s": np.array([1, 1, 2.0, 3.0], np.float32)}
    check(network(nodes, {"x": ["N", 3, 7, 9]}, {"nearest": None, "linear": None}, scales, opset=opset))


@pytest.mark.parametrize("opset", [11, 12, 13])
def test_of_operator_sets_that_want_empty_inputs(check: Any, network: Any, opset: int) -> None:
    nodes = [node("Resize", ["x", "empty", "s"], ["a"]), node("Resize", ["x", "empty", "empty", "sizes"], ["b"])]
    constants = {"empty": np.zeros(0, np.float32), "s": np.array([1, 1, 2, 3], np.float32)}
    constants["sizes"] = np.array([1, 3, 5, 4])
    check(network(nodes, {"x": [1, 3, 7, 9]}, {"a": None, "b": None}, constants, opset=opset))


def test_infinite_numbers_reach_only_what_is_made_of_them(
    compile_file: Any, load_artifact: Any, network: Any, tmp_path: Any
) -> None:
    """Where others have two taps, a number of one tap must not multiply its neighbour by 0."""
    scales = {"s": np.array([1, 1, 2, 2], np.float32)}
    nodes = [node("Resize", ["x", "", "s"], ["y"], mode="linear", coordinate_transformation_mode="asymmetric")]
    path = network(nodes, {"x": [1, 1, 4, 4]}, {"y": None}, scales).save(tmp_path / "model.onnx")
    x = np.zeros((1, 1, 4, 4), np.float32)
    x[0, 0, 1, 1] = np.inf
    y = load_artifact(compile_file(path).folder)({"x": x})["y"]
    wanted = np.zeros((1, 1, 8, 8), bool)
    wanted[0, 0, 1:4, 1:4] = True
    np.testing.assert_array_equal(~np.isfinite(y), wanted)


def test_long_images_of_many_rows_and_lines(check: Any, network: Any) -> None:
    """More than one strip, of more than one band."""
    scales = {"s": np.array([1, 1, 1.5, 2], np.float32)}
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Resize", ["a", "", "s"], ["b"], mode="cubic"),
        node("Conv", ["b", "w1"], ["y"]),
        node("Resize", ["x", "", "s"], ["z"], mode="cubic"),
    ]
    constants = {**scales, "w": weights(4, 4, 1, 1), "w1": weights(1, 4, 1, 1)}
    check(network(nodes, {"x": ["N", 4, 40, 800]}, {"y": None, "z": None}, constants))


@pytest.mark.parametrize("shape", [[2, 3, 9], [7, 5], [2, 2, 3, 5, 7]])
def test_tensors_that_are_no_images(check: Any, network: Any, shape: list[int]) -> None:
    scales = {"s": np.array([1.0] * (len(shape) - 1) + [2.0], np.float32)}
    nodes = [node("Resize", ["x", "", "s"], ["y"], mode="nearest")]
    check(network(nodes, {"x": shape}, {"y": None}, scales, datatype=TensorProto.FLOAT))


@pytest.mark.parametrize(
    ("opset", "attributes", "is_native"),
    [
        (16, {}, True),
        (20, {"mode": "linear", "align_corners": 1}, True),
        (20, {"padding_mode": "border"}, False),
        (20, {"mode": "nearest"}, False),
    ],
)
def test_samples_at_points(
    check: Any,
    network: Any,
    compile_file: Any,
    tmp_path: Path,
    opset: int,
    attributes: dict[str, Any],
    is_native: bool,
) -> None:
    """As transformers of images, and attention at points, have them; of a batch, each row by its own points."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("GridSample", ["c", "grid"], ["y"], **attributes),
    ]
    shapes = {"x": ["N", 3, 9, 7], "grid": ["N", 4, 6, 2]}
    model = network(nodes, shapes, {"y": None}, {"w": weights(5, 3, 3, 3)}, opset=opset)
    check(model)
    islands = compile_file(model.save(tmp_path / "model.onnx")).manifest.islands
    assert [layer.operator for layer in islands] == ([] if is_native else ["GridSample"])
