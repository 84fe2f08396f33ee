"""`sequence_batching` of a configuration: what it means, and what is refused with its name."""

import struct
from pathlib import Path

import pytest
from google.protobuf import text_format

from gangway.artifact.format import TensorSpec
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository.completed_config import complete_config
from gangway.server.errors import ConfigError
from gangway.server.models.sequences import (
    ControlKind,
    SequencePosition,
    SequenceSettings,
    SequenceTensors,
    control_contents,
    initial_state_files,
)

INPUTS = [
    TensorSpec("x", "FP32", (-1, 3), 12),
    TensorSpec("start", "FP32", (-1, 1), 4),
    TensorSpec("id", "UINT32", (-1, 1), 4),
    TensorSpec("wide", "INT32", (-1, 2), 8),
    TensorSpec("in", "INT32", (-1, 2, 2), 16),
]
OUTPUTS = [TensorSpec("y", "FP32", (-1, 3), 12), TensorSpec("out", "INT32", (-1, 2, 2), 16)]
START = 'control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [-1, 2.5] } }'
CORRID = 'control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT32 } }'
WIDE = 'control_input { name: "wide" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } }'
STATE = 'state { input_name: "in" output_name: "out" data_type: TYPE_INT32 dims: [2, 2] }'
FILE = 'name: "f" data_type: TYPE_INT32 dims: [2, 2] data_file: "begin"'


def parsed(text: str, more: str = "max_batch_size: 8") -> ModelConfig:
    return text_format.Parse(f"{more} sequence_batching {{ {text} }}", ModelConfig())


def settings_of(text: str, more: str = "max_batch_size: 8") -> SequenceSettings:
    settings = SequenceSettings.of(parsed(text, more))
    assert settings is not None
    return settings


def test_without_sequences() -> None:
    assert SequenceSettings.of(ModelConfig()) is None


@pytest.mark.parametrize(
    ("text", "more", "slots"),
    [
        ("", "max_batch_size: 8", 16),
        ("direct { }", "", 2),
        ("direct { }", "max_batch_size: 4 instance_group { count: 3 } instance_group { count: 1 }", 16),
        ("oldest { max_candidate_sequences: 5 }", "instance_group { count: 2 }", 10),
        ("oldest { }", "max_batch_size: 3 instance_group { count: 1 }", 3),
    ],
)
def test_slots(text: str, more: str, slots: int) -> None:
    assert settings_of(text, more).slots == slots


def test_control_contents() -> None:
    settings = settings_of(START + CORRID)
    assert [control.kind for control in settings.controls] == [ControlKind.START, ControlKind.CORRID]
    first, later = SequencePosition(7, True, False), SequencePosition(2**32 - 1, False, True)
    assert list(control_contents(settings, first)) == [struct.pack("<f", 2.5), struct.pack("<I", 7)]
    assert list(control_contents(settings, later)) == [struct.pack("<f", -1), b"\xff" * 4]


def test_configuration_is_completed_without_controls_and_states() -> None:
    config = parsed(START + CORRID + STATE + "oldest { max_candidate_sequences: 2 }")
    inputs = [spec for spec in INPUTS if spec.name != "wide"]
    complete = complete_config(config, "m", inputs, OUTPUTS, batched=True)
    assert [tensor.name for tensor in complete.input] == ["x"]
    assert [tensor.name for tensor in complete.output] == ["y"]
    assert complete.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert list(complete.sequence_batching.oldest.preferred_batch_size) == [8]
    tensors = SequenceTensors.of(complete, inputs, OUTPUTS, {})
    assert tensors is not None
    assert [(tensor.name, tensor.index) for tensor in tensors.hidden] == [("start", 1), ("id", 2), ("in", 3)]
    (state,) = tensors.states
    assert (state.output, state.shape, state.initial) == (1, (1, 2, 2), bytes(16))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("iterative_sequence: true", "sequence_batching.iterative_sequence is not supported"),
        (STATE.replace("dims", "use_growable_memory: true dims"), "use_growable_memory is not supported"),
        ("oldest { max_candidate_sequences: -1 }", "max_candidate_sequences is -1"),
        ("oldest { max_candidate_sequences: 2000000 }", "at most 100000 are possible"),
        ("oldest { preferred_batch_size: 9 }", "preferred_batch_size: expected 1 to max_batch_size, got 9"),
        (START + START, "more than one input for CONTROL_SEQUENCE_START"),
        (
            START.replace("fp32_false_true: [-1, 2.5]", "bool_false_true: [false, true]"),
            "'start' is TYPE_BOOL, but the ONNX model has TYPE_FP32",
        ),
        (START.replace("[-1, 2.5]", "[1]"), "fp32_false_true has 1 values, expected 2"),
        (START.replace("fp32_false_true: [-1, 2.5]", ""), "expected one of int32_false_true"),
        (START.replace('"start"', '"none"'), "'none' is not in the ONNX model"),
        (START.replace('"start"', '""'), "a control input has no name"),
        (CORRID.replace("UINT32", "FP32"), "data_type is TYPE_FP32, expected UINT64"),
        (CORRID.replace("data_type: TYPE_UINT32", "int32_false_true: 0"), "int32_false_true is not for CONTROL_"),
        (WIDE, r"'wide' has dims \[2\] in the ONNX model, expected \[1\]"),
        (STATE + STATE, "input 'in' is named twice"),
        (STATE.replace('"out"', '""'), "expected input_name and output_name"),
        (STATE.replace("[2, 2]", "[2, -1]"), r"dims are \[2, -1\], but the ONNX model has \[2, 2\]"),
        (STATE.replace("INT32", "FP32"), "'in' is TYPE_FP32, but the ONNX model has TYPE_INT32"),
        (STATE.replace("dims", f"initial_state {{ {FILE} }} initial_state {{ {FILE} }} dims"), "has 2 initial states"),
        (STATE.replace("dims:", 'initial_state { name: "i" data_type: TYPE_INT32 dims: [2] } dims:'), "do not fit"),
        (STATE.replace("dims:", f"initial_state {{ {FILE.replace('begin', '')} }} dims:"), "empty data_file"),
    ],
)
def test_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        complete_config(parsed(text), "m", INPUTS, OUTPUTS, batched=True)


def test_not_both_a_control_and_an_input() -> None:
    with pytest.raises(ConfigError, match="input 'start' is one of sequence_batching, too"):
        complete_config(parsed(START, 'max_batch_size: 8 input { name: "start" }'), "m", INPUTS, OUTPUTS, True)
    with pytest.raises(ConfigError, match="response_cache is not possible together"):
        complete_config(parsed(START, "response_cache { enable: true }"), "m", INPUTS, OUTPUTS, True)


def test_initial_state_from_a_file(tmp_path: Path) -> None:
    config = parsed(STATE.replace("dims:", f"initial_state {{ {FILE} }} dims:"))
    with pytest.raises(ConfigError, match="data_file 'begin' cannot be used"):
        initial_state_files(tmp_path, config)
    file = tmp_path / "initial_state" / "begin"
    file.parent.mkdir()
    file.write_bytes(bytes(15))
    with pytest.raises(ConfigError, match="expected 16 bytes, got 15"):
        initial_state_files(tmp_path, config)
    file.write_bytes(bytes(range(20)))  # Triton allows more than is needed
    files = initial_state_files(tmp_path, config)
    tensors = SequenceTensors.of(config, INPUTS, OUTPUTS, files)
    assert tensors is not None and tensors.states[0].initial == bytes(range(16))
    file.unlink()
    tensors = SequenceTensors.of(config, INPUTS, OUTPUTS, files)
    assert tensors is not None and tensors.states[0].initial is None
    elsewhere = parsed(STATE.replace("dims:", f"initial_state {{ {FILE.replace('begin', '../begin')} }} dims:"))
    with pytest.raises(ConfigError, match="leaves the model's folder"):
        initial_state_files(tmp_path, elsewhere)
