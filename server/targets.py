"""Latency targets: from what a configuration asks for to what the scheduler is told."""

import base64

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.scheduler.control import SetProfile
from gangway.server.front_end_messages import ModelReady
from gangway.server.isolated import Isolated
from gangway.server.model_config import Qos
from gangway.server.models import open_symbols
from gangway.server.queue_policy import QueuePolicies


def resolve_qos_us(qos: Qos, isolated: Isolated | None) -> float | None:
    """Return the latency target in microseconds, None for best effort, and for a multiple of what is not known."""
    if qos.multiple is not None:
        return None if isolated is None else qos.multiple * isolated.latency_us
    return None if qos.milliseconds is None else qos.milliseconds * 1e3


def profile_message(model_id: int, ready: ModelReady, isolated: Isolated | None = None) -> SetProfile:
    """Return what the scheduler is to know of a model, or of it compiled for certain sizes (`model_id` is its own)."""
    policies = QueuePolicies.of(ModelConfig.FromString(base64.b64decode(ready.config)))
    isolated_us = 0.0 if isolated is None else isolated.compute_us
    varies = model_id == ready.model_id and bool(open_symbols(ready.inputs, ready.batched))
    return SetProfile(model_id, isolated_us, ready.qos_us, policies.default.rejects_late, varies)
