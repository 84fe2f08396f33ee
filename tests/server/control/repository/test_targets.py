"""From what a configuration asks for to what the scheduler is told."""

import logging
from dataclasses import replace

import pytest
from google.protobuf import text_format

from gangway.artifact.format import TensorSpec
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository.loaded import IsolatedLatency, profile_message, resolve_qos_us, warn_of_target
from gangway.server.messages import ModelReady
from gangway.server.models.config import QosConfig, parse_qos

ALONE = IsolatedLatency(compute_us=900.0, latency_us=1000.0, busy_cost_us=1200.0)
FLOATS = TensorSpec("x", "FP32", (-1, 4), 16)
LEVELS = """dynamic_batching { priority_levels: 2 default_priority_level: 1
    priority_queue_policy { key: 2 value { default_timeout_microseconds: 90 } } }"""
WORDS = TensorSpec("x", "INT64", (-1, -1), 8, ("N", "words"))


def ready(config: str, inputs: TensorSpec = FLOATS, qos_us: float | None = None) -> ModelReady:
    encoded = text_format.Parse(config, ModelConfig()).SerializeToString()
    return ModelReady(4, "m", 1, encoded, (inputs,), (inputs,), 8, 8, True, qos_us=qos_us)


def test_a_multiple_is_of_the_latency_seen_from_outside() -> None:
    assert resolve_qos_us(parse_qos("3x"), ALONE) == 3000.0
    assert resolve_qos_us(parse_qos("3x"), None) is None
    assert resolve_qos_us(parse_qos("2.5"), None) == 2500.0
    assert resolve_qos_us(QosConfig(), ALONE) is None
    assert resolve_qos_us(parse_qos("1x"), ALONE) == 1200.0, "any request may cost that"


def test_the_scheduler_is_told_what_counts_for_requests_without_a_timeout() -> None:
    policy = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 700 } }"
    message = profile_message(4, ready(policy, qos_us=3000.0), ALONE)
    assert (message.isolated_us, message.qos_us, message.rejects_late, message.varies) == (900.0, 3000.0, True, False)
    assert profile_message(4, ready("")).qos_us is None
    assert profile_message(4, ready("", qos_us=3000.0), ALONE).qos_us == 3000.0


def test_times_of_a_model_of_open_shapes_are_guesses_but_not_those_of_its_variants() -> None:
    assert profile_message(4, ready("", WORDS), ALONE).varies
    assert not profile_message(5, ready("", WORDS)).varies


def test_targets_out_of_reach_are_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_target(ready("", qos_us=1500.0), QosConfig(milliseconds=1.5), ALONE)
        assert not caplog.messages
        warn_of_target(ready("", qos_us=500.0), QosConfig(milliseconds=0.5), ALONE)
        refusing = replace(ready("dynamic_batching { default_queue_policy {} }"), qos_us=500.0)
        warn_of_target(refusing, QosConfig(milliseconds=0.5), ALONE)
        warn_of_target(ready("", qos_us=60.0), QosConfig(milliseconds=0.06), None)
        warn_of_target(ready(LEVELS), QosConfig(), ALONE)
        warn_of_target(ready(""), QosConfig(multiple=3), None)  # its first answer will show its time
    late = "is out of reach: a request takes"
    least = "0.100 ms of which any model would take; set a larger target: 3x would be"
    assert caplog.messages == [
        f"m: its latency target of 0.500 ms {late} 1.000 ms alone, {least} 3.000 ms",
        f"m: its latency target of 0.500 ms {late} 1.000 ms alone, {least} 3.000 ms",
        f"m: its latency target of 0.060 ms {late} 0.100 ms alone, {least} 0.300 ms",
        f"m: its latency target of 0.090 ms {late} 1.000 ms alone, {least} 3.000 ms",
    ]
