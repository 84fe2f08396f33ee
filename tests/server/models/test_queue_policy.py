"""From a configuration and a request's parameters to how the request is treated."""

import pytest
from google.protobuf import text_format

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import ConfigError
from gangway.server.models.settings import MAX_CLASS, QueuePolicies, Terms


def policies(text: str) -> QueuePolicies:
    return QueuePolicies.of(text_format.Parse(text, ModelConfig()))


LEVELS = "priority_levels: 3 default_priority_level: 2"


def test_without_a_policy_requests_are_served_late() -> None:
    assert policies("").terms(0, 0, None) == Terms(0, 0, False, 0)
    assert policies("dynamic_batching {}").terms(700, 0, 900.0) == Terms(700, 0, False, 0, by_client=True)


def test_the_smaller_of_target_and_timeout_counts() -> None:
    assert policies("").terms(700, 0, 900.5).target_us == 700
    assert policies("").terms(1000, 0, 900.5).target_us == 900.5
    assert policies("").terms(0, 0, 900.5).target_us == 900.5
    assert policies("").terms(1000, 0, None).target_us == 1000


def test_a_written_policy_refuses_as_triton_s_default_is() -> None:
    assert policies("dynamic_batching { default_queue_policy {} }").terms(0, 0, 5.0) == Terms(5.0, 0, True, 0)
    delaying = policies("dynamic_batching { default_queue_policy { timeout_action: DELAY max_queue_size: 4 } }")
    assert delaying.terms(9, 0, None) == Terms(9, 0, False, 4, by_client=True)


@pytest.mark.parametrize(("allowed", "queue_us"), [("true", 300), ("false", 500)])
def test_a_default_timeout_may_be_shortened_if_that_is_allowed(allowed: str, queue_us: int) -> None:
    """It is one of the queue, and makes no deadline."""
    written = f"default_timeout_microseconds: 500 allow_timeout_override: {allowed}"
    some = policies(f"dynamic_batching {{ default_queue_policy {{ {written} }} }}")
    assert [some.terms(timeout_us, 0, None).queue_us for timeout_us in (0, 300, 800)] == [500, queue_us, 500]
    assert [some.terms(timeout_us, 0, 900.5).target_us for timeout_us in (0, 300, 800)] == [900.5] * 3
    assert not some.terms(300, 0, None).by_client


def test_requests_may_set_a_timeout_of_the_queue_where_there_is_none() -> None:
    some = policies("dynamic_batching { default_queue_policy { allow_timeout_override: true timeout_action: DELAY } }")
    terms = some.terms(700, 0, None)
    assert (terms.target_us, terms.queue_us, terms.delays) == (0, 700, True)
    assert some.terms(0, 0, None) == Terms(0, 0, False, 0)


def test_a_timeout_that_no_request_can_reach_is_none() -> None:
    written = f"default_timeout_microseconds: {2**64 - 1}"
    assert policies(f"dynamic_batching {{ default_queue_policy {{ {written} }} }}").terms(0, 0, None).queue_us == 0


def test_parameters_go_before_the_policy() -> None:
    late = 'parameters { key: "late" value { string_value: "%s" } }'
    queue = 'parameters { key: "max_queue_size" value { string_value: "3" } }'
    assert policies(late % "reject").terms(0, 0, 5.0).rejects_late
    assert not policies("dynamic_batching { default_queue_policy {} }" + late % "serve").terms(0, 0, 5.0).rejects_late
    assert policies(queue).terms(0, 0, None).max_queue == 3


def test_priority_is_relative_to_the_model_s_default() -> None:
    some = policies(f"dynamic_batching {{ {LEVELS} }}")
    assert [some.terms(0, level, None).priority for level in (0, 1, 2, 3, 4, 2**62)] == [0, -1, 0, 1, 1, 1]
    plain = policies("")
    assert [plain.terms(0, level, None).priority for level in (0, 1, 2, 3, 9)] == [0, -1, 0, 1, 7]
    assert plain.terms(0, 2**62, None).priority == MAX_CLASS - 2


def test_a_level_may_have_its_own_policy() -> None:
    own = "priority_queue_policy { key: 3 value { timeout_action: REJECT max_queue_size: 2 } }"
    some = policies(f"dynamic_batching {{ {LEVELS} default_queue_policy {{ timeout_action: DELAY }} {own} }}")
    assert [some.terms(0, level, 5.0).rejects_late for level in (0, 1, 3, 7)] == [False, False, True, True]
    assert [some.terms(0, level, 5.0).max_queue for level in (0, 3)] == [0, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynamic_batching { default_priority_level: 1 }", "there are no levels"),
        ("dynamic_batching { priority_levels: 2 }", "default_priority_level is 0, expected 1 to 2"),
        ("dynamic_batching { priority_levels: 2 default_priority_level: 3 }", "is 3, expected 1 to 2"),
        ("dynamic_batching { priority_levels: 3000000000 default_priority_level: 1 }", "at most 2147483647"),
        (f"dynamic_batching {{ {LEVELS} priority_queue_policy {{ key: 4 value {{}} }} }}", "level 4 is not of 1 to 3"),
        ('parameters { key: "late" value { string_value: "drop" } }', 'expected "serve" or "reject", got "drop"'),
        ('parameters { key: "max_queue_size" value { string_value: "-1" } }', 'expected a whole number, got "-1"'),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policies(text)
