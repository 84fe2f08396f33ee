"""What a model's configuration says of batches, instances, labels, metrics, late requests, queues and priorities.

`docs/explanation/batching.md` and `docs/explanation/targets.md` explain it. Queue policies and priority levels come
from Triton's `dynamic_batching`; the parameters `late` and `max_queue_size` take precedence over it. Without
`dynamic_batching`, `sequence_batching` and the parameter `batching` the server chooses its batches.
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import structs

from gangway.artifact.precision import FP32, PRECISIONS, WantedPrecision
from gangway.base.files import file_beside, require_regular
from gangway.protos.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelQueuePolicy,
    ModelRateLimiter,
    ModelSequenceBatching,
)
from gangway.server.errors import ConfigError, shortened
from gangway.server.models.config_table import (
    BATCHING_OFF,
    BATCHING_PARAMETER,
    IDLE_PARAMETER,
    MIN_COSINE_PARAMETER,
    PRECISION_PARAMETER,
    WHILE_COMPILING_PARAMETER,
    parameter_of,
)
from gangway.server.statistics import MAX_RESPONSE_BOUNDS, TIME_BOUNDS_NS

if TYPE_CHECKING:
    from gangway.scheduler.messages import LoadModel  # which a front end need not make

AUTO: Final = "auto"
OFF: Final = BATCHING_OFF
MODES: Final = (AUTO, OFF)
MAX_PREFERRED: Final = 64  # sizes; each batch is compared with all of them


@dataclass(frozen=True)
class ModelBatching:
    """How requests of a model become batches. `joins`: several to one; `splits`: one to parts that run side by side.

    `preferred_rows`: sizes that begin at once, ascending; empty: any. `max_delay_us`: how long a request waits for
    others at most; None: as long as it is predicted to pay.
    """

    joins: bool = False
    splits: bool = True
    preferred_rows: tuple[int, ...] = ()
    max_delay_us: float | None = None
    preserve_ordering: bool = False

    @classmethod
    def of(cls, config: ModelConfig, enabled: bool = True) -> "ModelBatching":
        """Read a completed configuration; `enabled`: the command line allows batches. Raises ConfigError."""
        wanted = mode_of(config) == AUTO and enabled
        batching = _configured(config)
        _check_sizes(batching.preferred_rows, config.max_batch_size)
        if not wanted:
            return cls(splits=False, preserve_ordering=batching.preserve_ordering)
        return replace(batching, joins=config.max_batch_size > 1)

    @classmethod
    def of_spec(cls, spec: "LoadModel") -> "ModelBatching":
        """Return what the scheduler was told of a model."""
        return cls(**{each.name: getattr(spec, each.name) for each in fields(cls)})

    def applied_to(self, spec: "LoadModel") -> "LoadModel":
        """Return what the scheduler is told of the model, or of it compiled for certain sizes.

        What forbids to split requests does so still.
        """
        same = vars(self) | {"splits": self.splits and spec.splits}  # fields have the same names there
        return structs.replace(spec, **same)


def mode_of(config: ModelConfig) -> str:
    """Return the parameter `batching`, `auto` without it. Raises ConfigError."""
    mode = parameter_of(config, BATCHING_PARAMETER, AUTO)
    if mode not in MODES:
        raise ConfigError(f'parameter {BATCHING_PARAMETER}: expected "auto" or "off", got "{mode}"')
    return mode


def precision_of(config: ModelConfig, default: str = FP32) -> WantedPrecision:
    """Return the precision that a configuration asks for; `default`: its name, if it names none. Raises ConfigError."""
    name = parameter_of(config, PRECISION_PARAMETER, default)
    if name not in PRECISIONS:
        expected = ", ".join(f'"{one}"' for one in PRECISIONS)
        raise ConfigError(f'parameter {PRECISION_PARAMETER}: expected one of {expected}, got "{shortened(name)}"')
    if MIN_COSINE_PARAMETER not in config.parameters:
        return WantedPrecision(name)
    text = parameter_of(config, MIN_COSINE_PARAMETER)
    return WantedPrecision(name, _number(MIN_COSINE_PARAMETER, text, "a number from 0 to 1", 1))


def serves_while_compiling(config: ModelConfig, default: bool) -> bool:
    """Whether onnxruntime is to serve the model until it is compiled. Raises ConfigError."""
    text = parameter_of(config, WHILE_COMPILING_PARAMETER, str(default).lower())
    if text not in ("true", "false"):
        raise ConfigError(f'parameter {WHILE_COMPILING_PARAMETER}: expected "true" or "false", got "{shortened(text)}"')
    return text == "true"


def idle_unload_s_of(config: ModelConfig, default: float) -> float:
    """Return after how many seconds without a request workers give its memory back; 0: never. Raises ConfigError."""
    return _number(IDLE_PARAMETER, parameter_of(config, IDLE_PARAMETER, str(default)), "seconds", sys.float_info.max)


def _number(parameter: str, text: str, expected: str, most: float) -> float:
    """Return a number from 0 to another. Raises ConfigError, which says what was expected."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise ConfigError(f'parameter {parameter}: expected {expected}, got "{shortened(text)}"')
    return value


def tell_batching(config: ModelConfig, enabled: bool) -> None:
    """Say in the config's parameters whether the model has batches. Raises ConfigError."""
    config.parameters[BATCHING_PARAMETER].string_value = mode_of(config) if enabled else OFF


def show_dynamic_batching(config: ModelConfig) -> None:
    """Have a config whose tensors are completed show `dynamic_batching`, as Triton's does; it changes nothing."""
    if config.max_batch_size > 1 and not config.HasField("sequence_batching"):
        config.dynamic_batching.SetInParent()


def preserves_ordering(config: ModelConfig) -> bool:
    """Whether answers come in the order of the requests."""
    return config.dynamic_batching.preserve_ordering or config.sequence_batching.oldest.preserve_ordering


def describe_batching(config: ModelConfig) -> str:
    """Return what a completed configuration means, for people."""
    batching = ModelBatching.of(config)
    if not batching.joins:
        return "-"
    sizes = ", ".join(map(str, batching.preferred_rows)) or f"up to {config.max_batch_size}"
    return f"{sizes}, waits {batching.max_delay_us:g} us" if batching.max_delay_us else sizes


def _configured(config: ModelConfig) -> ModelBatching:
    """Return what the fields say; the first two are for others to say."""
    order = preserves_ordering(config)
    if config.HasField("dynamic_batching"):
        given = config.dynamic_batching
        return _of(given.preferred_batch_size, given.max_queue_delay_microseconds, order)
    if config.HasField("sequence_batching"):
        sequences = config.sequence_batching
        if sequences.HasField("oldest"):
            oldest = sequences.oldest
            return _of(oldest.preferred_batch_size, oldest.max_queue_delay_microseconds, order)
        return _of_direct(sequences.direct, config.max_batch_size)
    return ModelBatching()


def _of(sizes: Sequence[int], delay_us: float, order: bool) -> ModelBatching:
    return ModelBatching(
        preferred_rows=tuple(sorted(set(sizes))), max_delay_us=float(delay_us), preserve_ordering=order
    )


def _of_direct(direct: ModelSequenceBatching.StrategyDirect, max_batch_size: int) -> ModelBatching:
    """The delay counts only with a least share of the slots that shall be taken, as in Triton."""
    share = direct.minimum_slot_utilization
    if not (math.isfinite(share) and 0 <= share <= 1):
        raise ConfigError(f"sequence_batching.direct.minimum_slot_utilization is {share:g}, expected 0 to 1")
    if not share:
        return _of((), 0, order=False)
    least = max(1, math.ceil(share * max_batch_size - 1e-6))  # a share of 0.3 is a bit more, as a float
    return _of(range(least, max_batch_size + 1)[:MAX_PREFERRED], direct.max_queue_delay_microseconds, order=False)


def _check_sizes(sizes: Sequence[int], max_batch_size: int) -> None:
    """A configuration that did not say `max_batch_size` has got one only now."""
    if sizes and max_batch_size and sizes[-1] > max_batch_size:
        raise ConfigError(f"preferred_batch_size: expected 1 to max_batch_size, {max_batch_size}, got {sizes[-1]}")
    if len(sizes) > MAX_PREFERRED:
        raise ConfigError(f"preferred_batch_size: {len(sizes)} sizes, at most {MAX_PREFERRED} are possible")


Limit = tuple[str, int, int]  # resource, how much a query holds, how much there is


@dataclass(frozen=True)
class RateLimits:
    """What the command line says of the rate limiter. `resources`: how much there is, where that is said."""

    enabled: bool = False
    resources: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ModelLimits:
    """How many queries of one version of a model may be under way: its instance groups, and Triton's rate limiter.

    `limits`: what a query holds while it is under way. `priority` 0: turns do not count.
    """

    limits: tuple[Limit, ...] = ()
    priority: int = 0

    @classmethod
    def of(
        cls, config: ModelConfig, name: str, version: int, rates: RateLimits, instances: int | None = None
    ) -> "ModelLimits":
        """Read the configuration of model `name`. Raises ConfigError for what can never be had.

        `instances`: how many queries all its instances can have begun, 0: any number; None: as many as there are.
        """
        instances = _instances(config) if instances is None else instances
        own = ((f"instances of {name}, version {version}", 1, instances),) if instances else ()
        limiter = _limiter(config) if rates.enabled else None
        if limiter is None:
            return cls(own)
        return cls((*own, *_shared(limiter, dict(rates.resources))), max(1, limiter.priority))

    def applied_to(self, spec: "LoadModel") -> "LoadModel":
        """Return what the scheduler is told of the model, or of it compiled for certain sizes, with its limits."""
        return structs.replace(spec, limits=self.limits, limit_priority=self.priority)


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


MAX_LABEL_BYTES = 16 << 20


def label_files(folder: Path, config: ModelConfig) -> dict[str, str]:
    """Return the label file of each output that has one, `folder` being the model's. Raises ConfigError.

    A name that leads out of the folder is refused: clients may load configurations, and see the labels.
    """
    files = {}
    for output in config.output:
        if output.label_filename:
            where = f"output '{shortened(output.name)}': label_filename '{shortened(output.label_filename)}'"
            files[output.name] = str(_checked(folder, output.label_filename, where))
    return files


def read_labels(path: Path) -> tuple[str, ...]:
    """Return the names of an output's classes from its `label_filename`, one name per line.

    Raises OSError, or ValueError for what is too large, no file, or no text.
    """
    require_regular(path)
    if path.stat().st_size > MAX_LABEL_BYTES:
        raise ValueError(f"more than {MAX_LABEL_BYTES} bytes")
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    return tuple(line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1]))


def labels_of(files: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the names of each output's classes. A file that has gone since it was checked has none."""
    labels = {}
    for output, path in files.items():
        try:
            labels[output] = read_labels(Path(path))
        except (OSError, ValueError):
            labels[output] = ()
    return labels


def _checked(folder: Path, name: str, where: str) -> Path:
    try:
        path = file_beside(folder, name)
        read_labels(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{where} cannot be read: {reason}") from error
    return path


FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"


def response_bounds_ns(config: ModelConfig) -> tuple[int, ...]:
    """Return the bounds of the histogram of the time to the first response (`model_metrics`). Raises ConfigError."""
    bounds_ns = TIME_BOUNDS_NS
    for control in config.model_metrics.metric_control:
        family, buckets_ms = control.metric_identifier.family, list(control.histogram_options.buckets)
        if family != FIRST_RESPONSE:
            raise ConfigError(f"model_metrics: '{family}' cannot be configured, only {FIRST_RESPONSE}")
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


LATE_PARAMETER = "late"
MAX_QUEUE_PARAMETER = "max_queue_size"
LATE_ACTIONS = {"serve": False, "reject": True}
USUAL_LEVEL = 2  # of models that declare no levels: 1 goes before it, 3 and more go after it
MAX_CLASS = 2**31 - 1  # as a slot can hold
MAX_QUEUE = 2**32 - 1
MAX_QUEUE_US = 600 * 10**6  # no request waits longer for anything


@dataclass(frozen=True)
class QueuePolicy:
    """What becomes of a model's requests, or of those of one priority level. Times are microseconds, 0 is none.

    `timeout_us`: a request waits no longer in the queue. `allows_timeout`: its own `timeout` may be less than that.
    `rejects_late`: it is refused then, and once it is certain to miss its deadline; else it is served later.
    """

    timeout_us: int = 0
    allows_timeout: bool = False
    rejects_late: bool = False
    max_queue: int = 0  # requests that may wait; 0: any number

    @classmethod
    def of(cls, config: ModelQueuePolicy) -> "QueuePolicy":
        """Return a policy that is written in a configuration: REJECT is what Triton means by an empty one."""
        return cls(
            timeout_us=config.default_timeout_microseconds,
            allows_timeout=config.allow_timeout_override,
            rejects_late=config.timeout_action == ModelQueuePolicy.REJECT,
            max_queue=config.max_queue_size,
        )


@dataclass(frozen=True)
class Terms:
    """How one request is treated. `target_us`: from arrival to answer, 0: none. `by_client`: the client has set it.

    `queue_us`: from the hand-over to the start of its computation, at most; 0: as long as it takes. `timeout_us`: the
    request's own `timeout`, whatever that means to its model.
    """

    target_us: float
    priority: int  # class, across all models: lower ones go first, 0 is normal
    rejects_late: bool
    max_queue: int
    by_client: bool = False
    queue_us: int = 0
    timeout_us: int = field(default=0, compare=False)

    @cached_property
    def delays(self) -> bool:
        """Whether a request that has waited for so long goes behind others; else it is refused."""
        return not self.rejects_late


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

        Levels below the lowest one count as that. A request's timeout is one of the queue where the policy has such or
        lets requests set them; else it is a deadline.
        """
        level = min(level or self.default_level, self.levels or MAX_CLASS)
        policy = self.by_level.get(level, self.default)
        queues = policy.timeout_us > 0 or policy.allows_timeout
        limits_us = (policy.timeout_us, timeout_us if policy.allows_timeout else 0)
        by_client = not queues and timeout_us > 0 and (not qos_us or timeout_us < qos_us)
        return Terms(
            target_us=timeout_us if by_client else qos_us or 0,
            priority=level - self.default_level,
            rejects_late=policy.rejects_late,
            max_queue=policy.max_queue,
            by_client=by_client,
            queue_us=min((limit for limit in limits_us if 0 < limit < MAX_QUEUE_US), default=0),
            timeout_us=timeout_us,
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
