"""What a model's configuration says of batches: whether requests are joined, and how long one waits for company.

docs/batching.md explains it. The sources are Triton's `dynamic_batching` and `sequence_batching`, and the parameter
`batching`; without them the server chooses by itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from gangway.protos.model_config_pb2 import ModelConfig, ModelSequenceBatching
from gangway.scheduler.messages import LoadModel
from gangway.server.config_error import ConfigError
from gangway.server.model_config import BATCHING_OFF, BATCHING_PARAMETER

AUTO: Final = "auto"
OFF: Final = BATCHING_OFF
MODES: Final = (AUTO, OFF)
MAX_PREFERRED: Final = 64  # sizes; more than anybody means, and few enough to be looked through


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
    def told(cls, spec: LoadModel) -> "ModelBatching":
        """Return what the scheduler was told of a model."""
        return cls(**{each.name: getattr(spec, each.name) for each in fields(cls)})

    def give(self, spec: LoadModel) -> LoadModel:
        """Return what the scheduler is told of the model, or of it compiled for certain sizes."""
        return replace(spec, **vars(self))  # the fields have the same names there


def mode_of(config: ModelConfig) -> str:
    """Return the parameter `batching`, `auto` without it. Raises ConfigError."""
    if BATCHING_PARAMETER not in config.parameters:
        return AUTO
    mode = config.parameters[BATCHING_PARAMETER].string_value
    if mode not in MODES:
        raise ConfigError(f'parameter {BATCHING_PARAMETER}: expected "auto" or "off", got "{mode}"')
    return mode


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


def in_words(config: ModelConfig) -> str:
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
