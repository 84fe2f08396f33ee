"""What a model's configuration says of its metrics: `model_metrics`. Its labels (`metric_tags`) are read by metrics."""

import math

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.config_error import ConfigError
from gangway.server.counting.layout import MAX_RESPONSE_BOUNDS
from gangway.server.histogram import TIME_BOUNDS_NS

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"


def response_bounds_ns(config: ModelConfig) -> tuple[int, ...]:
    """Return the bounds of the histogram of the time to the first response. Raises ConfigError."""
    bounds_ns = TIME_BOUNDS_NS
    for control in config.model_metrics.metric_control:
        family, buckets_ms = control.metric_identifier.family, list(control.histogram_options.buckets)
        if family != FIRST_RESPONSE:
            raise ConfigError(f"model_metrics: nothing can be said of '{family}', only of {FIRST_RESPONSE}")
        if (
            not buckets_ms
            or not all(math.isfinite(bound_ms * 1e6) for bound_ms in buckets_ms)
            or buckets_ms != sorted(set(buckets_ms))
        ):
            raise ConfigError(f"model_metrics: the buckets of {family} are {buckets_ms}, expected ascending numbers")
        if len(buckets_ms) > MAX_RESPONSE_BOUNDS:
            count = len(buckets_ms)
            raise ConfigError(f"model_metrics: {family} has {count} buckets, at most {MAX_RESPONSE_BOUNDS} can be")
        bounds_ns = tuple(round(bound_ms * 1e6) for bound_ms in buckets_ms)
    return bounds_ns
