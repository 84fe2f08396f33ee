"""What several front ends cannot serve."""

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.config_error import ConfigError


def require_one_front_end(config: ModelConfig, front_ends: int) -> None:
    """Raise ConfigError for a model whose state is in the front end that got the request."""
    if front_ends > 1 and config.HasField("sequence_batching"):
        raise ConfigError(
            "sequence_batching: a sequence's requests may come over several connections, so over several front ends,"
            f" which do not share its state; --front-ends is {front_ends}, and must be 1 for this model"
        )
