"""What a configuration says of batches, and what the scheduler is told of it."""

import pytest
from google.protobuf import text_format

from gangway.artifact.format import TensorSpec
from gangway.executor.frames import plan_frame
from gangway.executor.slots import NEVER_JOINED
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.scheduler.messages import LoadModel
from gangway.server.control.repository.completed_config import complete_config
from gangway.server.errors import ConfigError
from gangway.server.models.settings import ModelBatching, describe_batching, tell_batching
from gangway.server.requests.data_plane import RequestLayout

X = [TensorSpec("x", "FP32", (-1, 4), 16)]
Y = [TensorSpec("y", "FP32", (-1, 4), 16)]
OFF = ' parameters { key: "batching" value { string_value: "off" } }'
SPEC = LoadModel(model_id=3, name="m", key="k", layers=1, max_ranks=1, arena_bytes=0, max_rows=8)


def completed(text: str) -> ModelConfig:
    return complete_config(text_format.Parse(text, ModelConfig()), "m", X, Y, batched=True)


def read(text: str) -> ModelBatching:
    return ModelBatching.of(completed(text))


@pytest.mark.parametrize(
    ("text", "expected", "words"),
    [
        ("max_batch_size: 8", ModelBatching(joins=True), "up to 8"),
        ("", ModelBatching(joins=True), "up to 4"),  # as completed
        ("max_batch_size: 1", ModelBatching(), "-"),
        ('input { name: "x" dims: [ -1, 4 ] } output { name: "y" dims: [ -1, 4 ] }', ModelBatching(), "-"),
        ("max_batch_size: 8 dynamic_batching { }", ModelBatching(True, max_delay_us=0.0), "up to 8"),
        (
            "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 8, 4, 8 ] max_queue_delay_microseconds: 90 }",
            ModelBatching(True, True, (4, 8), 90.0),
            "4, 8, waits 90 us",
        ),
        (
            "max_batch_size: 2 dynamic_batching { preserve_ordering: true }",
            ModelBatching(True, max_delay_us=0.0, preserve_ordering=True),
            "up to 2",
        ),
        ("max_batch_size: 8" + OFF, ModelBatching(splits=False), "-"),
        (
            "max_batch_size: 8 dynamic_batching { preserve_ordering: true }" + OFF,
            ModelBatching(splits=False, preserve_ordering=True),
            "-",
        ),
        ("max_batch_size: 8" + OFF.replace("off", "auto"), ModelBatching(joins=True), "up to 8"),
        ("max_batch_size: 8 sequence_batching { }", ModelBatching(True, max_delay_us=0.0), "up to 8"),
        (
            "max_batch_size: 8 sequence_batching { direct { max_queue_delay_microseconds: 90 } }",
            ModelBatching(True, max_delay_us=0.0),
            "up to 8",
        ),
        (
            "max_batch_size: 8 sequence_batching {"
            " direct { max_queue_delay_microseconds: 90 minimum_slot_utilization: 0.75 } }",
            ModelBatching(True, True, (6, 7, 8), 90.0),
            "6, 7, 8, waits 90 us",
        ),
        (
            "max_batch_size: 10 sequence_batching { direct { minimum_slot_utilization: 0.9 } }",
            ModelBatching(True, True, (9, 10), 0.0),
            "9, 10",
        ),
        (
            "max_batch_size: 8 sequence_batching {"
            " oldest { max_queue_delay_microseconds: 5 preserve_ordering: true } }",
            ModelBatching(True, True, (8,), 5.0, preserve_ordering=True),  # preferred as completed
            "8, waits 5 us",
        ),
    ],
)
def test_what_is_read(text: str, expected: ModelBatching, words: str) -> None:
    assert read(text) == expected
    assert describe_batching(completed(text)) == words


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OFF.replace("off", "on"), 'parameter batching: expected "auto" or "off", got "on"'),
        ("dynamic_batching { preferred_batch_size: 8 }", "expected 1 to max_batch_size, 4, got 8"),
        ("max_batch_size: 80 dynamic_batching {" + "".join(f"preferred_batch_size: {n + 1} " for n in range(65)) + "}",
         "65 sizes, at most 64 are possible"),
        ("sequence_batching { direct { minimum_slot_utilization: 1.5 } }", "minimum_slot_utilization is 1.5"),
        ("sequence_batching { direct { minimum_slot_utilization: nan } }", "minimum_slot_utilization is nan"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(text)


def test_the_scheduler_is_told_all_of_it() -> None:
    spec = ModelBatching(True, False, (4, 8), 90.0, preserve_ordering=True).applied_to(SPEC)
    assert (spec.joins, spec.splits, spec.preferred_rows, spec.max_delay_us) == (True, False, (4, 8), 90.0)
    assert spec.preserve_ordering
    assert (spec.model_id, spec.max_rows) == (3, 8)


def test_clients_are_told_whether_there_are_batches() -> None:
    for text, enabled, told in (("", True, "auto"), ("", False, "off"), (OFF, True, "off")):
        config = completed(text)
        tell_batching(config, enabled)
        assert config.parameters["batching"].string_value == told
        assert ModelBatching.of(config).joins == (told == "auto")


def test_requests_to_onnxruntime_are_joined_by_their_shapes() -> None:
    def key_of(*shapes: tuple[int, ...], size_bytes: int = 8) -> int:
        return RequestLayout(1, frame=plan_frame([(shape, size_bytes) for shape in shapes]), answer_bytes=64).join_key

    assert key_of((1, 5), (1, 2, 3)) == key_of((7, 5), (7, 2, 3)) == key_of((1, 5), (1, 2, 3), size_bytes=99)
    others = [key_of((1, 5), (1, 3, 2)), key_of((1, 2, 3), (1, 5)), key_of((1, 5)), key_of((1, 5), (), size_bytes=0)]
    assert len({key_of((1, 5), (1, 2, 3)), *others}) == 5
    assert not any(key & NEVER_JOINED for key in others)
    assert key_of((1, 5)) == 5_677_591_076_613_162_817  # the same in every process
