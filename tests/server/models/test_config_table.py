"""Every field of a configuration is honoured, accepted or refused."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.message_factory import GetMessageClass

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import ConfigError
from gangway.server.models.config import (
    check_fields,
    check_onnx,
    check_supported,
    field_name,
    value_type,
    without_effect,
)
from gangway.server.models.config_table import FIELDS, Support

EVERY_ACCELERATOR = "optimization.execution_accelerators"


def parsed(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def fields_within(message: Any, above: frozenset[str] = frozenset()) -> Iterator[Any]:
    """The fields of a message and of those within it, but not within one that is refused or accepted as a whole."""
    for field in message.fields:
        yield field
        kind, entry = value_type(field), FIELDS.get(field_name(field))
        if kind is not None and entry is not None and entry.support is Support.HONOURED and kind.full_name not in above:
            yield from fields_within(kind, above | {kind.full_name})


def test_every_field_has_its_entry_and_no_other_has_one() -> None:
    names = {field_name(field) for field in fields_within(ModelConfig.DESCRIPTOR)}
    assert names == FIELDS.keys()
    assert len(names) > 70


def set_field(field: Any, message: Any) -> None:
    """Give a field a value that is not its default."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)["key"] = "value"
    elif field.message_type is not None and field.is_repeated:
        getattr(message, field.name).add()
    elif field.message_type is not None:
        part = getattr(message, field.name)
        part.SetInParent()
        if FIELDS[field_name(field)].support is Support.REFUSED:  # an empty one asks for nothing
            set_field(part.DESCRIPTOR.fields[0], part)
    elif field.is_repeated:
        getattr(message, field.name).append("x" if field.cpp_type == field.CPPTYPE_STRING else 1)
    else:
        setattr(message, field.name, "x" if field.cpp_type == field.CPPTYPE_STRING else 1)


def config_with(wanted: Any) -> ModelConfig:
    """The smallest configuration that has this field set."""

    def fill(message: Any) -> bool:
        for field in message.DESCRIPTOR.fields:
            kind = value_type(field)
            if field_name(field) == wanted:
                set_field(field, message)
                return True
            if kind is None or FIELDS[field_name(field)].support is not Support.HONOURED:
                continue
            part = GetMessageClass(kind)()
            if fill(part):
                if field.message_type.GetOptions().map_entry:
                    getattr(message, field.name)[1].CopyFrom(part)
                elif field.is_repeated:
                    getattr(message, field.name).append(part)
                else:
                    getattr(message, field.name).CopyFrom(part)
                return True
        return False

    config = ModelConfig()
    assert fill(config), wanted
    return config


@pytest.mark.parametrize("name", [name for name, entry in FIELDS.items() if entry.support is Support.REFUSED])
def test_a_refused_field_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name.rpartition('.')[2]} is not supported: "):
        check_fields(config_with(name))


@pytest.mark.parametrize("name", ["model_operations", "model_repository_agents"])
def test_an_empty_message_asks_for_nothing(name: str) -> None:
    assert list(check_fields(text_format.Parse(f"{name} {{}}", ModelConfig()))) == []


ACCEPTED = [name for name, entry in FIELDS.items() if entry.support is Support.ACCEPTED]


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_field_is_named(name: str) -> None:
    config = config_with(name)
    config.max_batch_size = 8
    (said,) = check_fields(config)
    place, _, why = said.partition(" (")
    assert re.split(r"[. ]", place)[-1] == name.rpartition(".")[2]
    assert why == f"{FIELDS[name].note})"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("instance_group { count: -1 }", "count is -1"),
        ("instance_group { kind: 9 }", r"instance_group\[0\].kind: 9 is no Kind"),
        ("instance_group { count: 2147483647 } instance_group { count: 1 }", "the counts add up"),
        ("instance_group { passive: true }", "passive is not supported"),
        ("instance_group { rate_limiter { resources { count: 1 } } }", "has no name"),
        ('input { name: "x" data_type: 99 }', "input 'x': data_type: 99 is no DataType"),
        ('input { name: "x" format: FORMAT_NCHW dims: [2, 2] }', "FORMAT_NCHW needs 3 dims, got 2"),
        ('input { name: "x" is_shape_tensor: true }', "input 'x': is_shape_tensor is not supported"),
        ('input { name: "a\\000b" }', "has a zero byte"),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }", "expected 1 to max_batch_size, got 8"),
        ("dynamic_batching { preferred_batch_size: 0 }", "got 0"),
        (f'default_model_filename: "{"x" * 300}"', "is no name of a file"),
        (f'name: "{"x" * 300_000}"', "at most 256000 are possible"),
    ],
)
def test_what_is_refused_by_its_value(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_supported(parsed(text), "m")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('input { name: "x" allow_ragged_batch: true }', "input 'x': allow_ragged_batch is not supported"),
        ('batch_input { target_name: "n" source_input: "x" }', "batch_input is not supported"),
        ('batch_output { target_name: "y" source_input: "x" }', "batch_output is not supported"),
    ],
)
def test_an_onnx_model_has_batches_of_one_shape(text: str, reason: str) -> None:
    check_supported(parsed(text), "m")  # a Python model may have it
    with pytest.raises(ConfigError, match=f"{reason}: a batch of an ONNX model has one shape"):
        check_onnx(parsed(text))


def test_what_many_people_write_is_served() -> None:
    text = """
        name: "m" platform: "onnxruntime_onnx" backend: "onnxruntime" max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 4, 4 ] } ]
        instance_group [ { count: 2 kind: KIND_CPU } ]
        dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
        optimization { graph { level: 1 } execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }
        parameters { key: "intra_op_thread_count" value { string_value: "1" } }
        metric_tags { key: "team" value: "a" }
        response_cache { enable: true }
    """
    check_supported(parsed(text), "m")
    assert without_effect(parsed(text)) == (
        "optimization.graph (the compiler, and onnxruntime where it serves, use all they have)",
        "optimization.execution_accelerators (models are compiled for this CPU anyway)",
        "parameter 'intra_op_thread_count' (the scheduler chooses the cores of each request)",
    )


# What the backend for ONNX of Triton reads, as its README and source have it, and its dynamic batcher.
ONNX_PARAMETERS = """
intra_op_thread_count inter_op_thread_count execution_mode enable_mem_arena enable_mem_pattern arena_extend_strategy
memory.enable_memory_arena_shrinkage session.use_device_allocator_for_initializers session.intra_op.allow_spinning
cudnn_conv_algo_search gpu_mem_limit do_copy_in_default_stream TRITON_BATCH_STRATEGY_PATH
""".split()  # noqa: SIM905 - a list of words is easier to compare


@pytest.mark.parametrize("name", ONNX_PARAMETERS)
def test_a_parameter_of_tritons_backend_is_told_why_it_has_no_effect(name: str) -> None:
    config = parsed(f'parameters {{ key: "{name}" value {{ string_value: "1" }} }}')
    (said,) = without_effect(config)
    assert re.fullmatch(rf"parameter '{name}' \((?!unknown)[^()]{{10,}}\)", said)
    assert without_effect(config, is_python=True) == (), "its code may read it"


def test_what_comes_from_another_machine_is_served() -> None:
    text = """
        backend: "openvino" runtime: "libtriton_openvino.so" max_batch_size: 8
        instance_group [ { name: "a" kind: KIND_GPU gpus: [ 0 ] host_policy: "numa0" }, { kind: KIND_CPU } ]
        optimization { execution_accelerators {
            gpu_execution_accelerator { name: "tensorrt" } cpu_execution_accelerator { name: "dnnl" }
        } }
        parameters { key: "qos-ms" value { string_value: "5" } }
        parameters { key: "Batching" value { string_value: "off" } }
    """
    check_supported(parsed(text), "m")
    names = [said.partition(" (")[0] for said in without_effect(parsed(text))]
    assert names[0] == "backend 'openvino'"
    group = ["name", "kind KIND_GPU", "gpus", "host_policy"]
    assert sorted(names[1:6]) == sorted([*(f"instance_group 'a': {field}" for field in group), EVERY_ACCELERATOR])
    assert set(without_effect(parsed(text))[6:]) == {
        "parameter 'qos-ms' (unknown, did you mean 'qos_ms'?)",
        "parameter 'Batching' (unknown, did you mean 'batching'?)",
    }


def test_a_reason_has_an_end() -> None:
    with pytest.raises(ConfigError) as caught:
        check_supported(parsed(f'default_model_filename: "{"y/" * 15_000}"'), "m")
    assert len(str(caught.value)) < 2100
