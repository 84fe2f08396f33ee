"""Hostile configurations: whatever a file says, the model is served or is not ready for a reason; nothing breaks."""

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from google.protobuf import text_format
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from gangway.artifact.format import TensorSpec
from gangway.base.peer import MAX_MESSAGE_BYTES
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository.completed_config import complete_config, max_rows
from gangway.server.control.repository.repository import BrokenModel, ModelVersion, read_model
from gangway.server.errors import ConfigError
from gangway.server.messages import ModelUnavailable, to_json
from gangway.server.models.config import buckets_of
from gangway.server.models.settings import ModelLimits, RateLimits, label_files

INPUTS = [TensorSpec("x", "FP32", (-1, 3), 12)]
OUTPUTS = [TensorSpec("y", "FP32", (-1, 4), 16)]
WORDS = st.sampled_from(["x", "y", "m", "", "../m", "onnxruntime", "openvino", "3x", "S=1", "\0", "é\n" * 30])
NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 8, -1, 2**31 - 1, -(2**31)])


@st.composite
def messages(draw: Any, descriptor: Any, depth: int) -> Any:
    """A message of this kind with some fields set, some of them to nonsense."""
    message = GetMessageClass(descriptor)()
    for field in draw(st.lists(st.sampled_from(list(descriptor.fields)), max_size=5)) if descriptor.fields else ():
        kind = field.message_type
        if kind is not None and (depth == 0 or kind.GetOptions().map_entry):
            continue
        values = messages(kind, depth - 1) if kind is not None else scalars(field)
        value = draw(values)
        if not field.is_repeated:
            getattr(message, field.name).CopyFrom(value) if kind is not None else setattr(message, field.name, value)
        else:
            getattr(message, field.name).append(value)
    return message


def scalars(field: Any) -> Any:
    match field.cpp_type:
        case field.CPPTYPE_STRING:
            return WORDS
        case field.CPPTYPE_BOOL:
            return st.booleans()
        case field.CPPTYPE_ENUM | field.CPPTYPE_INT32 | field.CPPTYPE_INT64:
            return NUMBERS
        case field.CPPTYPE_FLOAT | field.CPPTYPE_DOUBLE:
            return st.floats(width=32 if field.cpp_type == field.CPPTYPE_FLOAT else 64)
    return NUMBERS.map(abs)


def outcome_of(content: bytes) -> str:
    """Do with a configuration what the server does with it; return why the model is not ready, nothing if it is."""
    folder = Path(mkdtemp()) / "m"
    try:
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.onnx").write_bytes(b"")
        (folder / "config.pbtxt").write_bytes(content)
        for entry in read_model(folder):
            if isinstance(entry, BrokenModel):
                assert len(to_json(ModelUnavailable(entry.name, entry.version, entry.reason))) < MAX_MESSAGE_BYTES
                return entry.reason
            prepare(entry)
    except ConfigError as error:
        return str(error)
    finally:
        shutil.rmtree(folder.parent)
    return ""


def prepare(entry: ModelVersion) -> None:
    config = complete_config(entry.config, entry.name, INPUTS, OUTPUTS, batched=True)
    assert max_rows(config, batched=True) > 0
    label_files(entry.path.parent.parent, config)
    ModelLimits.of(config, entry.name, entry.version, RateLimits(True, (("x", 1),)))
    buckets_of(config, ("S",), 8)


@settings(max_examples=80, deadline=None, database=None)
@given(messages(ModelConfig.DESCRIPTOR, depth=4))
def test_any_message(message: ModelConfig) -> None:
    text = text_format.MessageToString(message, as_utf8=True).encode()
    reason = outcome_of(text)
    assert not reason or len(reason) < 3000


@settings(max_examples=60, deadline=None, database=None)
@given(st.one_of(st.binary(max_size=60), st.text(alphabet='nameinput{}[]:"\\0-1 é#\n', max_size=60).map(str.encode)))
def test_any_bytes(content: bytes) -> None:
    outcome_of(content)


def test_a_huge_file_is_not_read() -> None:
    assert outcome_of(b"#" * (1 << 20) + b"#") == "config.pbtxt has more than 1048576 bytes"
    assert "at most 256000" in outcome_of(b'parameters { key: "k" value { string_value: "%s" } }' % (b"v" * 300_000))


def test_deep_nesting() -> None:
    assert outcome_of(b"input {" * 5000).startswith("config.pbtxt: line 1, column ")
