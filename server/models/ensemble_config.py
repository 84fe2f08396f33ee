"""What can be wrong with an ensemble's configuration in itself, without a look at the models that compose it.

What is refused and, where people may search for them, the texts of the messages are Triton's.
"""

from collections.abc import Iterator, Sequence

from gangway.artifact.format import MAX_TENSORS
from gangway.protos.model_config_pb2 import ModelConfig, ModelEnsembling, ModelInput, ModelOutput
from gangway.server.errors import ConfigError, shortened

PLATFORM = "ensemble"
MAX_STEPS = 64  # those of inner ensembles count, too
MAX_DEPTH = 16  # of ensembles within ensembles
LATEST = -1  # what a step says that wants the latest version; 0, also what it says by silence, is that or version 0

StepConfig = ModelEnsembling.Step

_NOT_FOR_ENSEMBLES = (
    ("instance_group", "instance group should not be specified for ensemble"),
    ("optimization", "optimization should not be specified for ensemble"),
    ("model_warmup", "model_warmup can not be specified for ensemble"),
)
_OTHER_PARAMETERS = ("max_queue_size", "gangway_buckets", "batching")  # which only the composing models can honour


def is_ensemble(config: ModelConfig) -> bool:
    """Whether a configuration is one of an ensemble, be it right or wrong."""
    return config.platform == PLATFORM or config.HasField("ensemble_scheduling")


def composing_models(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the models of all steps, each once."""
    return tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def check_ensemble(config: ModelConfig, name: str) -> None:
    """Raise ConfigError if the ensemble `name` cannot work, whatever its models are."""
    quoted = f"'{shortened(name)}'"
    if config.platform != PLATFORM:
        raise ConfigError(f"ensemble scheduling cannot be set for model {quoted} whose platform is not {PLATFORM}")
    if not config.HasField("ensemble_scheduling"):
        raise ConfigError(f"ensemble scheduling must be set for ensemble {quoted}")
    for field, message in _NOT_FOR_ENSEMBLES:
        if getattr(config, field) if field != "optimization" else config.HasField(field):
            raise ConfigError(f"{message} {quoted}")
    if config.backend or config.runtime:
        raise ConfigError(f"backend or runtime can not be specified for ensemble {quoted}: its models have theirs")
    for parameter in _OTHER_PARAMETERS:
        if parameter in config.parameters:
            raise ConfigError(f"parameter {parameter} can not be specified for ensemble {quoted}, only for its models")
    _check_tensors(config.input, "input", quoted)
    _check_tensors(config.output, "output", quoted)
    _check_steps(config.ensemble_scheduling.step, quoted)
    _check_flow(config, quoted)


def _check_tensors(tensors: Sequence[ModelInput | ModelOutput], group: str, ensemble: str) -> None:
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise ConfigError(f"ensemble {ensemble} has {len(tensors)} {group}s, expected 1 to {MAX_TENSORS}")
    for tensor in tensors:
        where = f"{group} '{shortened(tensor.name)}' of ensemble {ensemble}"
        if not tensor.name:
            raise ConfigError(f"an {group} of ensemble {ensemble} has no name")
        if not tensor.data_type:
            raise ConfigError(f"must specify 'data_type' of {where}")
        if not tensor.dims:
            raise ConfigError(f"must specify 'dims' of {where}")
        if any(size < 1 and size != -1 for size in tensor.dims):
            raise ConfigError(f"{where}: dims are {list(tensor.dims)}, expected 1 or more, or -1 for any size")
        if tensor.HasField("reshape"):
            raise ConfigError(f"{where}: reshape is not supported for ensembles, let the composing models reshape")


def _check_steps(steps: Sequence[StepConfig], ensemble: str) -> None:
    if not steps:
        raise ConfigError(f"must specify 'step' for ensemble {ensemble}")
    if len(steps) > MAX_STEPS:
        raise ConfigError(f"ensemble {ensemble} has {len(steps)} steps, at most {MAX_STEPS} are possible")
    for index, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                raise ConfigError(f"must specify '{field}' in step {index} of ensemble {ensemble}")
        if step.model_version < -1:
            raise ConfigError(f"model_version of step {index} of ensemble {ensemble} is {step.model_version}")


def _check_flow(config: ModelConfig, ensemble: str) -> None:
    """Every tensor has one source and somebody who reads it, and every step gets its tensors some time."""
    steps = config.ensemble_scheduling.step
    inputs = [tensor.name for tensor in config.input]
    outputs = {tensor.name for tensor in config.output}
    written = set(inputs)
    for index, step in enumerate(steps):
        for tensor in step.output_map.values():
            if tensor in written:
                raise ConfigError(
                    f"ensemble tensor '{shortened(tensor)}' can appear in an output map only once for ensemble"
                    f" {ensemble} step {index}: it is {'an input' if tensor in inputs else 'written already'}"
                )
            written.add(tensor)
    read = {tensor for step in steps for tensor in step.input_map.values()}
    for tensor in inputs:
        if tensor not in read:
            raise ConfigError(f"ensemble input '{shortened(tensor)}' for ensemble {ensemble} is not used")
    for tensor in outputs - written:
        raise ConfigError(f"output '{shortened(tensor)}' for ensemble {ensemble} is not written")
    for tensor in outputs & set(inputs):
        raise ConfigError(f"output '{shortened(tensor)}' for ensemble {ensemble} is an input, too")
    for index, tensor in _never_ready(steps, inputs):
        why = "it waits for itself" if tensor in written else "nothing writes it"
        raise ConfigError(
            f"in ensemble {ensemble}, step {index} never gets the ensemble tensor '{shortened(tensor)}': {why}"
        )
    for tensor in sorted(written - read - outputs):
        raise ConfigError(f"ensemble tensor '{shortened(tensor)}' is unused in ensemble {ensemble}")


def _never_ready(steps: Sequence[StepConfig], inputs: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield steps that can never begin, each with a tensor that it misses."""
    ready, waiting = set(inputs), dict(enumerate(steps))
    while runnable := [index for index, step in waiting.items() if ready.issuperset(step.input_map.values())]:
        for index in runnable:
            ready.update(waiting.pop(index).output_map.values())
    for index, step in waiting.items():
        yield index, next(tensor for tensor in step.input_map.values() if tensor not in ready)


def longest_after(times_us: Sequence[float], followers: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Return for each step the time of the longest chain after it: its own time is not part of it.

    `followers`: for each step those that cannot begin before it has ended; they are in no circle.
    """
    found: dict[int, float] = {}
    waiting = list(range(len(times_us)))
    while waiting:
        step = waiting[-1]
        missing = [after for after in followers[step] if after not in found]
        if missing:
            waiting += missing
            continue
        found[step] = max((times_us[after] + found[after] for after in followers[step]), default=0.0)
        waiting.pop()
    return tuple(found[step] for step in range(len(times_us)))
