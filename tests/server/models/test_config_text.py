"""Mistakes in config.pbtxt: the message says where, and what to write."""

from pathlib import Path

import pytest

from gangway.server.errors import ConfigError
from gangway.server.models.config_text import read_config

PARAMETER = 'write parameters { key: "NAME" value: { string_value: "VALUE" } }'
MISTAKES = {
    # a parameter
    'parameters { key: "qos_ms" value: "20" }': (1, 35, 'got "20"; write value: { string_value: "20" }'),
    'parameters [\n{ key: "qos_ms" value: 20 } ]': (2, 24, 'got 20; write value: { string_value: "20" }'),
    'parameters { key: "qos_ms", string_value: "20" }': (1, 29, PARAMETER),
    'parameters: { qos_ms: "20" }': (1, 15, PARAMETER),
    'parameters { key: "a" value: { string_value: 20 } }': (1, 46, "'20'; write it in quotes"),
    # a value
    "input [ { data_type: FP32 } ]": (1, 22, "has no value named FP32; did you mean 'TYPE_FP32'?"),
    "input [ { data_type: float32 } ]": (1, 22, "named float32; did you mean 'TYPE_FP32'?"),
    "input [ { data_type: TYPE_FLOAT32 } ]": (1, 22, "named TYPE_FLOAT32; did you mean 'TYPE_FP32'?"),
    "input [ { data_type: TYPE_INT46 } ]": (1, 22, "named TYPE_INT46; did you mean 'TYPE_INT64'?"),
    'input { data_type: "TYPE_FP32" }': (1, 20, "named \"TYPE_FP32\"; did you mean 'TYPE_FP32', without quotes?"),
    "instance_group { kind: CPU }": (1, 24, "named CPU; did you mean 'KIND_CPU'?"),
    "input [ { data_type: COLOUR } ]": (1, 22, "named COLOUR"),
    "platform: onnxruntime_onnx": (1, 11, "'onnxruntime_onnx'; write it in quotes"),
    "dynamic_batching: true": (1, 19, "got true; write dynamic_batching { }, with its fields between the braces"),
    "max_batch_size = 8": (1, 16, 'expected ":", got ='),
    'name: "m" // it': (1, 11, "got /; a comment begins with #"),
    "input {\n dims: [/* columns */ 7 ] }": (2, 9, "/; a comment begins with #"),
    'name: "m }': (1, 7, "String missing ending quote: '\"m }'"),
    # a field
    "max_batchsize: 8": (1, 1, "has no field named \"max_batchsize\"; did you mean 'max_batch_size'?"),
    # a bracket
    'input [ { name: "x" dims: [3] }': (1, 32, "got the end of the file; the [ at line 1, column 7 is not closed"),
    'input [\n  { name: "x" }\n  # ]\n': (4, 1, "the end of the file; the [ at line 1, column 7 is not closed"),
    'input {\n name: "}"\n dims: 3\n': (3, 8, "got the end of the file; the { at line 1, column 7 is not closed"),
    "input [ { dims: [3 } ]": (1, 20, 'expected ",", got }; the [ at line 1, column 17 is not closed'),
    "input [\n  { dims: [3]\n]\n": (3, 1, "got ]; the { at line 2, column 3 is not closed"),
    'input [ { name: "x" }\noutput [ { name: "y" } ]': (2, 1, "got output; the [ at line 1, column 7 is not closed"),
    "dynamic_batching {\n\ninstance_group { }": (3, 1, '"instance_group"; the { at line 1, column 18 is not closed'),
    "max_batch_size: 8 }": (1, 19, "got }; the } at line 1, column 19 closes nothing"),
    'input [ { name: "x" } { name: "y" } ]': (1, 23, 'expected ",", got {'),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_told_with_its_place_and_what_to_write(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    line, column, ending = MISTAKES[text]
    told = str(caught.value)
    assert told.startswith(f"config.pbtxt: line {line}, column {column}: ")
    assert told.endswith(ending)
