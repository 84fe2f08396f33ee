"""`model_warmup`: samples from a configuration, and a server that runs them before a model is ready."""

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository import trials
from gangway.server.control.repository.trials import samples_of
from gangway.server.errors import ConfigError
from gangway.server.models.config import require_complete

TWO = """
name: "m" max_batch_size: 8
model_warmup {
  name: "zeros" batch_size: 2
  inputs { key: "x" value { data_type: TYPE_FP32 dims: [3] zero_data: true } }
  inputs { key: "s" value { data_type: TYPE_STRING dims: [1] zero_data: true } }
}
model_warmup {
  name: "others" batch_size: 1 count: 3
  inputs { key: "x" value { data_type: TYPE_FP32 dims: [3] input_data_file: "x.bin" } }
  inputs { key: "s" value { data_type: TYPE_INT16 dims: [5] random_data: true } }
}
"""


def config_of(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def test_samples(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "x.bin").write_bytes(np.arange(3, dtype=np.float32).tobytes())
    zeros, others = samples_of(config_of(TWO), tmp_path)
    assert (zeros.name, zeros.count, others.count) == ("zeros", 1, 3)
    request = pb.ModelInferRequest.FromString(zeros.header)
    shapes = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in request.inputs}
    assert shapes == {"x": ("FP32", [2, 3]), "s": ("BYTES", [2, 1])}
    assert sorted(zeros.contents, key=len) == [bytes(8), bytes(24)]
    contents = dict(
        zip((t.name for t in pb.ModelInferRequest.FromString(others.header).inputs), others.contents, strict=True)
    )
    assert np.frombuffer(contents["x"], np.float32).tolist() == [0, 1, 2]
    numbers = np.frombuffer(contents["s"], np.int16)
    assert numbers.shape == (5,) and numbers.min() >= 0 and numbers.max() < 128


def test_a_sample_of_a_model_without_batches_needs_no_batch_size(tmp_path: Path) -> None:
    text = 'model_warmup { inputs { key: "x" value { data_type: TYPE_FP32 dims: [2, 3] zero_data: true } } }'
    (sample,) = samples_of(config_of(text), tmp_path)
    assert list(pb.ModelInferRequest.FromString(sample.header).inputs[0].shape) == [2, 3]
    with pytest.raises(ConfigError, match="batch_size is 0, expected 1 to 8"):
        samples_of(config_of(f"max_batch_size: 8 {text}"), tmp_path)


def test_samples_are_counted_before_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes of configuration that say hundreds of gigabytes."""
    monkeypatch.setattr(trials, "MAX_SAMPLES_BYTES", 1000)
    one = "value { data_type: TYPE_INT64 dims: [5, 10] zero_data: true }"
    inputs = " ".join(f'inputs {{ key: "x{number}" {one} }}' for number in range(2))
    sample = f"model_warmup {{ {inputs} }}"
    assert [len(content) for content in samples_of(config_of(sample), tmp_path)[0].contents] == [400, 400]
    for text in (
        sample * 2,
        sample.replace("[5, 10]", "[5, 10, 2]"),
        sample + sample.replace("zero_data", "random_data"),
    ):
        with pytest.raises(ConfigError, match="the samples have more than 1000 bytes in all"):
            samples_of(config_of(text), tmp_path)


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "FP64", "STRING"])
def test_random_contents_have_the_right_size(tmp_path: Path, datatype: str) -> None:
    text = f'inputs {{ key: "x" value {{ data_type: TYPE_{datatype} dims: 6 random_data: true }} }}'
    (sample,) = samples_of(config_of(f"model_warmup {{ batch_size: 1 {text} }}"), tmp_path)
    sizes = {"BOOL": 6, "UINT8": 6, "INT64": 48, "FP16": 12, "FP64": 48}
    (content,) = sample.contents
    assert len(content) == sizes.get(datatype, len(content)) and content.strip(b"\0")
    assert samples_of(config_of(f"model_warmup {{ batch_size: 1 {text} }}"), tmp_path) == [sample]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("batch_size: 2", "batch_size is 2, expected 0 or 1"),
        ("batch_size: 1 count: 20000", "20000 requests in all"),
        ("batch_size: 1 inputs { key: 'x' value { data_type: TYPE_FP32 dims: 3 } }", "expected zero_data, random_data"),
        ("batch_size: 1 inputs { key: 'x' value { dims: 3 zero_data: true } }", "has no data_type"),
        ("batch_size: 1 inputs { key: 'x' value { data_type: TYPE_FP32 dims: -1 zero_data: true } }", "fixed dims"),
        ("batch_size: 1 inputs { key: 'x' value { data_type: TYPE_FP64 dims: 9999999999 zero_data: true } }", "larger"),
        ("batch_size: 1 inputs { key: 'x' value { data_type: TYPE_FP32 input_data_file: 'a' } }", "cannot be read"),
        ("batch_size: 1 inputs { key: 'x' value { data_type: TYPE_FP32 input_data_file: '../a' } }", "leaves"),
        ("batch_size: 1 inputs { key: 'x' value { data_type: TYPE_FP32 input_data_file: '/a' } }", "leaves"),
    ],
)
def test_samples_that_make_no_sense(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        samples_of(config_of(f"model_warmup {{ name: 'w' {text} }}"), tmp_path)


def test_a_configuration_without_completion() -> None:
    whole = 'backend: "onnxruntime" input { name: "x" data_type: TYPE_FP32 dims: 4 }'
    whole += ' output { name: "y" data_type: TYPE_FP32 dims: 4 }'
    require_complete(config_of(whole))
    for missing, text in [
        ("platform or backend, input, output", ""),
        ("dims of output 'y'", whole[:-9] + "}"),
        ("data_type of input 'x'", whole.replace("data_type: TYPE_FP32", "", 1)),
    ]:
        with pytest.raises(ConfigError, match=f"does not say {missing},"):
            require_complete(config_of(text))
