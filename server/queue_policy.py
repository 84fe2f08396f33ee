"""What a model's configuration says of late requests, of full queues and of priorities; docs/deadlines.md explains it.

The source is Triton's `dynamic_batching` (queue policies and priority levels); for configurations without it there are
the parameters `late` and `max_queue_size`, which also go before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gangway.protos.model_config_pb2 import ModelConfig, ModelDynamicBatching, ModelQueuePolicy
from gangway.server.config_error import ConfigError

LATE_PARAMETER = "late"
MAX_QUEUE_PARAMETER = "max_queue_size"
LATE_ACTIONS = {"serve": False, "reject": True}
USUAL_LEVEL = 2  # of models that declare no levels: 1 goes before it, 3 and more go after it
MAX_CLASS = 2**31 - 1  # as a slot can hold
MAX_QUEUE = 2**32 - 1


@dataclass(frozen=True)
class QueuePolicy:
    """What becomes of a model's requests, or of those of one priority level. Times are microseconds, 0 is none."""

    timeout_us: int = 0
    allows_timeout: bool = True  # a request's own `timeout` counts
    rejects_late: bool = False
    max_queue: int = 0  # so many may wait; 0: any number

    @classmethod
    def of(cls, config: ModelQueuePolicy) -> "QueuePolicy":
        """Return a policy that is written in a configuration: REJECT is what Triton means by an empty one."""
        timeout_us = config.default_timeout_microseconds
        return cls(
            timeout_us=timeout_us,
            allows_timeout=config.allow_timeout_override or not timeout_us,  # there may be nothing to override
            rejects_late=config.timeout_action == ModelQueuePolicy.REJECT,
            max_queue=config.max_queue_size,
        )


@dataclass(frozen=True)
class Terms:
    """How one request is treated. `target_us`: from arrival to answer, 0: none. `by_client`: the client has set it."""

    target_us: float
    priority: int  # class, across all models: lower ones go first, 0 is normal
    rejects_late: bool
    max_queue: int
    by_client: bool = False


@dataclass(frozen=True)
class QueuePolicies:
    """Those of one model. `levels` 0: the model declares none."""

    default: QueuePolicy = QueuePolicy()
    by_level: Mapping[int, QueuePolicy] = field(default_factory=dict)
    levels: int = 0
    default_level: int = USUAL_LEVEL

    @classmethod
    def of(cls, config: ModelConfig) -> "QueuePolicies":
        """Read a configuration. Raises ConfigError."""
        batching = config.dynamic_batching
        levels, default_level = _levels(batching)
        written = batching.HasField("default_queue_policy")
        default = QueuePolicy.of(batching.default_queue_policy) if written else QueuePolicy()
        by_level = {level: QueuePolicy.of(policy) for level, policy in batching.priority_queue_policy.items()}
        if strangers := [level for level in by_level if not 1 <= level <= levels]:
            raise ConfigError(f"dynamic_batching.priority_queue_policy: level {strangers[0]} is not of 1 to {levels}")
        return cls(
            _with_parameters(default, config),
            {level: _with_parameters(policy, config) for level, policy in by_level.items()},
            levels,
            default_level,
        )

    def terms(self, timeout_us: int, level: int, qos_us: float | None) -> Terms:
        """Return what holds for a request with these parameters (0: not given) to a model with this target.

        Levels below the lowest one count as that.
        """
        level = min(level or self.default_level, self.levels or MAX_CLASS)
        policy = self.by_level.get(level, self.default)
        stated_us = min((limit for limit in (qos_us or 0, policy.timeout_us) if limit), default=0)
        by_client = policy.allows_timeout and timeout_us > 0 and (not stated_us or timeout_us < stated_us)
        return Terms(
            target_us=timeout_us if by_client else stated_us,
            priority=level - self.default_level,
            rejects_late=policy.rejects_late,
            max_queue=policy.max_queue,
            by_client=by_client,
        )


def _levels(batching: ModelDynamicBatching) -> tuple[int, int]:
    levels, default_level = batching.priority_levels, batching.default_priority_level
    if levels > MAX_CLASS:
        raise ConfigError(f"dynamic_batching.priority_levels is {levels}, at most {MAX_CLASS} are possible")
    if not levels:
        if default_level:
            raise ConfigError(f"dynamic_batching.default_priority_level is {default_level}, but there are no levels")
        return 0, USUAL_LEVEL
    if not 1 <= default_level <= levels:
        raise ConfigError(f"dynamic_batching.default_priority_level is {default_level}, expected 1 to {levels}")
    return levels, default_level


def _with_parameters(policy: QueuePolicy, config: ModelConfig) -> QueuePolicy:
    """Return the policy with what the parameters say instead."""
    if LATE_PARAMETER in config.parameters:
        text = config.parameters[LATE_PARAMETER].string_value
        if text not in LATE_ACTIONS:
            raise ConfigError(f'parameter {LATE_PARAMETER}: expected "serve" or "reject", got "{text}"')
        policy = replace(policy, rejects_late=LATE_ACTIONS[text])
    if MAX_QUEUE_PARAMETER in config.parameters:
        text = config.parameters[MAX_QUEUE_PARAMETER].string_value
        if not (text.isascii() and text.isdigit() and int(text) <= MAX_QUEUE):
            raise ConfigError(f'parameter {MAX_QUEUE_PARAMETER}: expected a whole number, got "{text}"')
        policy = replace(policy, max_queue=int(text))
    return policy
