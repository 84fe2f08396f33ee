"""Latency targets: from what a configuration asks for to what the scheduler is told."""

import base64
import logging

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.scheduler.messages import SetProfile
from gangway.server.messages import ModelReady
from gangway.server.models.config import Qos
from gangway.server.models.served import open_symbols
from gangway.server.models.settings import QueuePolicies
from gangway.server.repository.trials import Isolated

_log = logging.getLogger(__name__)


def resolve_qos_us(qos: Qos, isolated: Isolated | None) -> float | None:
    """Return the latency target in microseconds, None for best effort, and for a multiple of what is not known.

    No multiple is less than what any request costs on a busy machine.
    """
    if qos.multiple is not None:
        return None if isolated is None else max(qos.multiple * isolated.latency_us, isolated.busy_cost_us)
    return None if qos.milliseconds is None else qos.milliseconds * 1e3


def profile_message(model_id: int, ready: ModelReady, isolated: Isolated | None = None) -> SetProfile:
    """Return what the scheduler is to know of a model, or of it compiled for certain sizes (`model_id` is its own)."""
    isolated_us = 0.0 if isolated is None else isolated.compute_us
    varies = model_id == ready.model_id and bool(open_symbols(ready.inputs, ready.batched))
    terms = policies_of(ready).terms(0, 0, ready.qos_us)
    return SetProfile(model_id, isolated_us, terms.target_us or None, terms.rejects_late, varies)


def config_of(ready: ModelReady) -> ModelConfig:
    """Return a model's completed configuration."""
    return ModelConfig.FromString(base64.b64decode(ready.config))


def policies_of(ready: ModelReady) -> QueuePolicies:
    """Return a model's queue policies."""
    return QueuePolicies.of(config_of(ready))


def warn_of_target(ready: ModelReady, qos: Qos, isolated: Isolated | None, request_cost_us: float = 0.0) -> None:
    """Say in the log if the target of a model is out of reach, or not known.

    `request_cost_us`: what any request costs; counts where the model's own latency is not known.
    """
    policies = policies_of(ready)
    timeouts_us = [policy.timeout_us for policy in (policies.default, *policies.by_level.values())]
    target_us = min((limit for limit in (ready.qos_us, *timeouts_us) if limit), default=None)
    alone = Isolated(0.0, request_cost_us, request_cost_us) if isolated is None else isolated
    if isolated is None and qos.multiple is not None:
        _log.warning(
            "%s: a target of %gx is not known without a measured latency: best effort", ready.name, qos.multiple
        )
    elif target_us is not None and target_us < alone.latency_us:
        _log.warning(
            "%s: the target of %.3f ms is out of reach, requests are served late: one takes %.3f ms alone, %.3f ms of"
            " them whatever the model",
            ready.name,
            target_us / 1e3,
            alone.latency_us / 1e3,
            alone.request_cost_us / 1e3,
        )
