from dataclasses import replace

import pytest
from google.protobuf import text_format

from gangway.artifact.format import Engine, Manifest, TargetSpec, TensorSpec, open_symbols
from gangway.protos.model_config_pb2 import DataType, ModelConfig
from gangway.server.control.repository.completed_config import (
    complete_config,
    counts_rows,
    declared_sizes,
    fixed_sizes,
    max_rows,
)
from gangway.server.errors import ConfigError

IMAGE = TensorSpec("image", "FP32", (-1, 3, 8, 8), 768)
MASK = TensorSpec("mask", "BOOL", (-1, 8), 8)
SCORES = TensorSpec("scores", "FP32", (-1, 10), 40)
WHOLE_MANIFEST = Manifest("", "m", True, (), (), (), 0, TargetSpec("", "", 16, ()), {}, engine=Engine.ONNXRUNTIME)
WHOLE = TensorSpec("x", "INT64", (1, 3), 24)


def complete(text: str, batched: bool = True) -> ModelConfig:
    config = text_format.Parse(text, ModelConfig())
    if batched:
        return complete_config(config, "m", [IMAGE, MASK], [SCORES, MASK], batched=True)
    return complete_config(config, "m", [WHOLE], [WHOLE], batched=False)


def test_no_config_at_all() -> None:
    config = complete("")
    assert (config.name, config.platform, config.backend) == ("m", "onnxruntime_onnx", "onnxruntime")
    assert config.max_batch_size == 4
    assert config.default_model_filename == "model.onnx"
    assert config.version_policy.latest.num_versions == 1
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [
        ("image", DataType.TYPE_FP32, [3, 8, 8]),
        ("mask", DataType.TYPE_BOOL, [8]),
    ]
    assert [(t.name, list(t.dims)) for t in config.output] == [("scores", [10]), ("mask", [8])]
    assert max_rows(config, batched=True) == 4


def test_no_batch_dimension() -> None:
    config = complete("", batched=False)
    assert config.max_batch_size == 0
    assert list(config.input[0].dims) == [1, 3]
    assert max_rows(config, batched=False) == 1
    assert max_rows(complete("max_batch_size: 32"), batched=True) == 32


def test_partial_config_keeps_what_it_says() -> None:
    config = complete('max_batch_size: 8 input { name: "mask" } input { name: "image" dims: [3, 8, 8] }')
    assert config.max_batch_size == 8
    assert [(t.name, list(t.dims)) for t in config.input] == [("mask", [8]), ("image", [3, 8, 8])]
    assert len(config.output) == 2
    assert complete('output { name: "scores" } max_batch_size: 2').output[0].data_type == DataType.TYPE_FP32


def test_max_batch_size_0_with_a_batch_dimension_in_dims() -> None:
    inputs = 'input { name: "image" dims: [-1, 3, 8, 8] } input { name: "mask" dims: [%d, 8] }'
    assert max_rows(complete(inputs % -1), batched=True, most_rows=1000) == 1000
    assert max_rows(complete(inputs % 2), batched=True) == 2


def test_reshape() -> None:
    reshaped = complete('max_batch_size: 8 output { name: "scores" dims: [2, 5] reshape { shape: [10] } }')
    assert list(reshaped.output[0].dims) == [2, 5]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('input { name: "y" }', "input 'y' is not in the ONNX model, which has 'image', 'mask'"),
        ('output { name: "y" }', "output 'y' is not in the ONNX model, which has 'scores', 'mask'"),
        ('input { name: "image" }', "leaves out input 'mask'"),
        (
            'max_batch_size: 1 input { name: "image" data_type: TYPE_INT8 }',
            "TYPE_INT8, but the ONNX model has TYPE_FP32",
        ),
        (
            'max_batch_size: 1 input { name: "image" dims: [-1, 3, 8, 8] }',
            r"dims are \[-1, 3, 8, 8\], but .* \[3, 8, 8\]",
        ),
        ('max_batch_size: 1 input { name: "image" dims: [3, 8, 9] }', r"dims are \[3, 8, 9\]"),
        ('input { name: "image" dims: [3, 8, 8] }', r"has \[-1, 3, 8, 8\]"),
        ('max_batch_size: 1 output { name: "scores" dims: [2, 4] reshape { shape: [10] } }', "differ in size"),
        ('output { name: "scores" dims: [2, 5] reshape { shape: [1, 10] } }', "reshape needs max_batch_size"),
    ],
)
def test_config_and_model_differ(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        complete(text)


def test_batch_size_without_a_batch_dimension() -> None:
    with pytest.raises(ConfigError, match=r"4, but input 'x' .* \[1, 3\]: export it .*, or set max_batch_size: 0"):
        complete("max_batch_size: 4", batched=False)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ('max_batch_size: 2 input { name: "x" dims: [ 3, 8, 16 ] }', {"H": 8, "W": 16}),
        ('max_batch_size: 2 input { name: "x" dims: [ 3, 8, -1 ] }', {"H": 8}),
        ('input { name: "x" dims: [ -1, 3, 8, 16 ] }', {"H": 8, "W": 16}),
        ("max_batch_size: 2", {}),
    ],
)
def test_sizes_that_a_configuration_fixes(text: str, sizes: dict[str, int]) -> None:
    open_sizes = [TensorSpec("x", "FP32", (-1, 3, -1, -1), 0, ("N", "", "H", "W"))]
    config = complete_config(text_format.Parse(text, ModelConfig()), "m", open_sizes, open_sizes, batched=True)
    assert fixed_sizes(config, open_sizes, ["H", "W"]) == sizes


def test_dims_that_give_one_dimension_two_sizes_are_refused() -> None:
    inputs = [TensorSpec(name, "FP32", (-1, -1), 0, ("N", "S")) for name in "xz"]
    text = 'max_batch_size: 2 input { name: "x" dims: [ 3 ] } input { name: "z" dims: [ 4 ] }'
    config = complete_config(text_format.Parse(text, ModelConfig()), "m", inputs, inputs, batched=True)
    with pytest.raises(ConfigError, match="input 'z': dims give 'S' the size 4, those of another input 3"):
        fixed_sizes(config, inputs, ["S"])


@pytest.mark.parametrize(
    ("buckets", "dims", "rows", "sizes"),
    [
        ("", "[ 8, -1 ]", "apart", []),
        ("", "[ 8, 9 ]", "apart", [(8, 9)]),
        ("", "[ 8, 9 ]", "mixed", [(1, 8, 9)]),
        ("W=5,6", "[ 8, -1 ]", "apart", [(8, 5), (8, 6)]),
        ("W=5; H=8", "[ 8, -1 ]", "apart", [(8, 5)]),
        ("W=5; H=1,2", "[ -1, -1 ]", "mixed", [(1, 1, 5), (1, 2, 5)]),
        ("W=5; N=2,4", "[ 8, -1 ]", "mixed", [(2, 8, 5), (4, 8, 5)]),
        ("W=5; N=2,4", "[ 8, -1 ]", "apart", [(2, 8, 5), (4, 8, 5)]),
        ("W=5; H=7", "[ 8, -1 ]", "apart", "'H' has other sizes, but dims fix it to 8"),
        ("H=8", "[ 8, -1 ]", "apart", "no sizes of 'W'"),
        ("V=8", "[ 8, -1 ]", "apart", "no open dimension 'V'; there are: H, W, N"),
        ("W=5; N=5", "[ 8, -1 ]", "mixed", "'N' is the batch, of which max_batch_size allows 4, not 5"),
    ],
)
def test_sizes_that_are_compiled_before_the_model_is_ready(
    buckets: str, dims: str, rows: str, sizes: list[tuple[int, ...]] | str
) -> None:
    x = TensorSpec("x", "FP32", (-1, -1, -1), 0, ("N", "H", "W"))
    parameter = f'parameters {{ key: "gangway_buckets" value: {{ string_value: "{buckets}" }} }}'
    text = f'max_batch_size: 4 input {{ name: "x" dims: {dims} }} {parameter}'
    config = complete_config(text_format.Parse(text, ModelConfig()), "m", [x], [x], batched=True)
    manifest = replace(WHOLE_MANIFEST, inputs=(x,), outputs=(x,), fixed_rows=rows == "mixed")
    symbols = open_symbols([x], counts_rows(config, manifest))
    if isinstance(sizes, str):
        with pytest.raises(ConfigError, match=sizes):
            declared_sizes(config, manifest, symbols, fixed_sizes(config, [x], symbols), 64)
    else:
        assert declared_sizes(config, manifest, symbols, fixed_sizes(config, [x], symbols), 64) == sizes
