"""What is counted of a model, and that all views of it agree."""

import pytest
from google.protobuf import text_format

from gangway.executor.slots import SlotCounts
from gangway.protos import StatusCode
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import ConfigError
from gangway.server.models.settings import FIRST_RESPONSE, response_bounds_ns
from gangway.server.statistics import MAX_RESPONSE_BOUNDS, REASONS, TIME_BOUNDS_NS, Duration, RequestTimes, Statistics

MS = 1_000_000


def times(total_ms: int) -> RequestTimes:
    return RequestTimes(total_ms * MS, 1 * MS, 2 * MS, (total_ms - 4) * MS, 1 * MS)


def test_bounds_reach_from_a_tenth_of_a_millisecond_to_ten_seconds() -> None:
    assert (TIME_BOUNDS_NS[0], TIME_BOUNDS_NS[-1]) == (100_000, 10**10)
    assert list(TIME_BOUNDS_NS) == sorted(set(TIME_BOUNDS_NS))
    assert {250_000, 10**6, 2_500_000, 5 * 10**9} < set(TIME_BOUNDS_NS)


def test_a_bound_belongs_to_its_range() -> None:
    statistics = Statistics((10, 20))
    for value in (0, 10, 11, 20, 21, 10**9):
        statistics.cache_hit(value, 0, None)
    figures = statistics.figures()
    assert figures.response_counts == (2, 2, 2)
    assert (figures.request_counts[0], sum(figures.request_counts)) == (5, 6)


def test_batches_and_executions() -> None:
    statistics = Statistics()
    statistics.succeeded(1, times(10), None, SlotCounts())
    statistics.succeeded(8, times(20), True, SlotCounts())
    statistics.succeeded(8, times(30), False, SlotCounts())
    figures = statistics.figures()
    assert (figures.success.count, figures.executions, figures.inferences) == (3, 3, 17)
    assert (figures.success.ns, figures.queue.ns, figures.compute("compute_infer").ns) == (60 * MS, 3 * MS, 48 * MS)
    assert list(figures.batches) == [1, 8]
    assert sum(figures.request_counts) == sum(figures.queue_counts) == sum(figures.compute_counts) == 3
    assert figures.queue_counts[TIME_BOUNDS_NS.index(MS)] == 3
    message = figures.message("m", 2)
    assert (message.inference_count, message.execution_count) == (17, 3)
    assert [batch.batch_size for batch in message.batch_stats] == [1, 8]
    assert message.batch_stats[1].compute_infer.count == 2
    assert message.inference_stats.compute_input.ns == 6 * MS
    assert message.last_inference > 1_600_000_000_000
    assert not message.memory_usage
    assert figures.message("m", 2, 5).memory_usage[0].byte_size == 5


def test_a_batch_of_several_requests_is_one_execution() -> None:
    """As Triton counts: each request has waited for the whole batch, and its rows are inferences."""
    statistics = Statistics()
    statistics.succeeded(2, times(10), None, SlotCounts(), batch_rows=7, leads=True)
    statistics.succeeded(1, times(20), None, SlotCounts(), batch_rows=7, leads=False)
    statistics.succeeded(4, times(30), None, SlotCounts(), batch_rows=7, leads=False)
    statistics.succeeded(3, times(10), None, SlotCounts())
    figures = statistics.figures()
    assert (figures.success.count, figures.executions, figures.inferences, figures.batch_rows) == (4, 2, 10, 10)
    assert figures.compute("compute_infer").count == 4
    assert figures.compute("compute_infer").ns == (6 + 16 + 26 + 6) * MS
    assert list(figures.batches) == [3, 7]
    seven = figures.batches[7]
    assert seven.compute_infer == Duration(1, 6 * MS)
    assert (seven.compute_input, seven.compute_output) == (Duration(1, 6 * MS), Duration(1, 3 * MS))
    assert [bucket for bucket, count in enumerate(figures.row_counts) if count] == [2, 3]
    message = figures.message("m", 1)
    assert (message.inference_count, message.execution_count) == (10, 2)
    assert message.inference_stats.compute_infer.count == message.inference_stats.success.count == 4
    assert figures.since(Statistics().figures()).batch_rows == 10
    assert figures.since(figures).executions == 0


def test_an_answer_from_the_cache_is_no_inference() -> None:
    statistics = Statistics()
    statistics.cache_miss(2 * MS)
    statistics.succeeded(4, times(10), None, SlotCounts())
    statistics.cache_hit(3 * MS, 1 * MS, True)
    message = statistics.message("m", 1)
    stats = message.inference_stats
    assert (stats.success.count, message.inference_count, message.execution_count) == (2, 4, 1)
    assert (stats.cache_hit.count, stats.cache_hit.ns, stats.cache_miss.count, stats.cache_miss.ns) == (
        1,
        MS,
        1,
        2 * MS,
    )
    assert (stats.queue.count, stats.compute_infer.count) == (2, 1)
    assert statistics.figures().own["qos_met"] == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (StatusCode.UNAVAILABLE, "REJECTED"),
        (StatusCode.CANCELLED, "CANCELED"),
        (StatusCode.DEADLINE_EXCEEDED, "CANCELED"),
        (StatusCode.INTERNAL, "BACKEND"),
        (StatusCode.INVALID_ARGUMENT, "OTHER"),
        (StatusCode.RESOURCE_EXHAUSTED, "OTHER"),
    ],
)
def test_reasons_of_failure(code: StatusCode, reason: str) -> None:
    statistics = Statistics()
    statistics.failed(MS, code, had_target=False)
    figures = statistics.figures()
    assert figures.failures == {each: int(each == reason) for each in REASONS}
    assert (figures.fail.count, figures.fail.ns) == (1, MS)
    assert tuple(REASONS) == ("REJECTED", "CANCELED", "BACKEND", "OTHER")


def metrics_config(family: str, buckets: str) -> ModelConfig:
    text = 'model_metrics { metric_control { metric_identifier { family: "%s" } histogram_options { %s } } }'
    return text_format.Parse(text % (family, buckets), ModelConfig())


def test_a_model_may_have_buckets_of_its_own() -> None:
    assert response_bounds_ns(ModelConfig()) == TIME_BOUNDS_NS
    bounds = response_bounds_ns(metrics_config(FIRST_RESPONSE, "buckets: [-1, 0.5, 12]"))
    assert bounds == (-MS, MS // 2, 12 * MS)
    statistics = Statistics(bounds)
    statistics.succeeded(1, times(12), None, SlotCounts())
    statistics.cache_hit(13 * MS, 0, None)
    assert statistics.figures().response_counts == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("family", "buckets", "said"),
    [
        ("nv_other", "buckets: [1]", "'nv_other' cannot be configured"),
        (FIRST_RESPONSE, "", "expected ascending numbers"),
        (FIRST_RESPONSE, "buckets: [2, 1]", "expected ascending numbers"),
        (FIRST_RESPONSE, "buckets: [1, inf]", "expected ascending numbers"),
        (FIRST_RESPONSE, f"buckets: {list(range(MAX_RESPONSE_BOUNDS + 1))}", "has 65 buckets, at most 64 can be"),
    ],
)
def test_model_metrics_that_make_no_sense_are_refused(family: str, buckets: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        response_bounds_ns(metrics_config(family, buckets))
