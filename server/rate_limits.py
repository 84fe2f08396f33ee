"""How many queries of a model may be under way at the same time: its instance groups, and Triton's rate limiter."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gangway.protos.model_config_pb2 import ModelConfig, ModelRateLimiter
from gangway.scheduler.messages import LoadModel
from gangway.server.config_error import ConfigError

Limit = tuple[str, int, int]  # resource, how much a query holds, how much there is


@dataclass(frozen=True)
class RateLimits:
    """What the command line says of the rate limiter. `resources`: how much there is, where that is said."""

    enabled: bool = False
    resources: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ModelLimits:
    """What a query of one version of a model holds while it is under way. `priority` 0: turns do not count."""

    limits: tuple[Limit, ...] = ()
    priority: int = 0

    @classmethod
    def of(cls, config: ModelConfig, name: str, version: int, rates: RateLimits) -> "ModelLimits":
        """Read the configuration of model `name`. Raises ConfigError for what can never be had."""
        instances = _instances(config)
        own = ((f"instances of {name}, version {version}", 1, instances),) if instances else ()
        limiter = _limiter(config) if rates.enabled else None
        if limiter is None:
            return cls(own)
        return cls((*own, *_shared(limiter, dict(rates.resources))), max(1, limiter.priority))

    def give(self, spec: LoadModel) -> LoadModel:
        """Return what the scheduler is told of the model, or of it compiled for certain sizes, with its limits."""
        return replace(spec, limits=self.limits, limit_priority=self.priority)


def _instances(config: ModelConfig) -> int:
    """Return how many instances the model has; 0 is any number, and so is a group that does not count its own."""
    counts = [group.count for group in config.instance_group]
    return sum(counts) if all(counts) else 0


def _limiter(config: ModelConfig) -> ModelRateLimiter | None:
    limiters = [group.rate_limiter for group in config.instance_group]
    if any(limiter != limiters[0] for limiter in limiters):
        raise ConfigError("instance_group: the groups have different rate limiters, one is possible")
    return limiters[0] if limiters and limiters[0].resources else None


def _shared(limiter: ModelRateLimiter, there_is: Mapping[str, int]) -> tuple[Limit, ...]:
    amounts: Counter[str] = Counter()
    for resource in limiter.resources:
        amounts[resource.name] += resource.count
    for name, amount in amounts.items():
        if amount > there_is.get(name, amount):
            raise ConfigError(f"instance_group: {amount} of resource '{name}' are needed, there are {there_is[name]}")
    return tuple((f"resource {name}", amount, there_is.get(name, amount)) for name, amount in amounts.items())
