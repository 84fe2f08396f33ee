"""Whether the models of an ensemble fit together. What is refused, and the messages, are Triton's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gangway.protos.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput
from gangway.server.config_error import ConfigError, shortened
from gangway.server.ensemble.config import Step


@dataclass(frozen=True)
class _Known:
    """What a tensor must be like, according to `model`, which names it first. `dims` leave out the batch."""

    model: str
    data_type: "DataType"
    dims: tuple[int, ...]
    batched: bool

    @classmethod
    def of(cls, model: str, tensor: ModelInput | ModelOutput, config: ModelConfig) -> "_Known":
        return cls(model, tensor.data_type, tuple(tensor.dims), config.max_batch_size > 0)

    @property
    def full_dims(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batched else self.dims


def check_members(ensemble: str, config: ModelConfig, members: Sequence[ModelConfig]) -> None:
    """Raise ConfigError unless the ensemble's checked config fits those of its models, by step, which are complete."""
    tensors = {tensor.name: _Known.of(ensemble, tensor, config) for tensor in config.input}
    tensors |= {tensor.name: _Known.of(ensemble, tensor, config) for tensor in config.output}
    optional = {tensor.name for tensor in config.input if tensor.optional}
    for step, member in zip(config.ensemble_scheduling.step, members, strict=True):
        if member.HasField("sequence_batching"):
            raise ConfigError(
                f"in ensemble {ensemble}, model {step.model_name} keeps state between requests (sequence_batching):"
                " it cannot be a step"
            )
        if 0 < member.max_batch_size < config.max_batch_size:
            raise ConfigError(
                f"ensemble {ensemble} allows maximum batch size {config.max_batch_size}, but it contains model"
                f" {step.model_name} which only allows maximum batch size to be {member.max_batch_size}"
            )
        _check_inputs(ensemble, step, member, tensors, optional)
        _check_outputs(ensemble, step, member, tensors)


def _check_inputs(
    ensemble: str, step: Step, member: ModelConfig, tensors: dict[str, _Known], optional: set[str]
) -> None:
    known = {tensor.name: tensor for tensor in member.input}
    for name, tensor in step.input_map.items():
        if name not in known:
            raise ConfigError(
                f"in ensemble {ensemble}, ensemble tensor {shortened(tensor)} is mapping to non-existing input"
                f" {shortened(name)} in model {step.model_name}"
            )
        if tensor in optional and not known[name].optional:
            raise ConfigError(
                f"in ensemble {ensemble}, the optional input {shortened(tensor)} is mapped to input {shortened(name)}"
                f" in model {step.model_name}, which is not optional"
            )
        _agree(ensemble, tensor, _Known.of(step.model_name, known[name], member), tensors)
    for name, given in known.items():
        if name not in step.input_map and not given.optional:
            raise ConfigError(
                f"in ensemble {ensemble}, input {shortened(name)} in model {step.model_name} is not mapped to any"
                " ensemble tensors"
            )


def _check_outputs(ensemble: str, step: Step, member: ModelConfig, tensors: dict[str, _Known]) -> None:
    known = {tensor.name: tensor for tensor in member.output}
    for name, tensor in step.output_map.items():
        if name not in known:
            raise ConfigError(
                f"in ensemble {ensemble}, ensemble tensor {shortened(tensor)} is mapped from non-existing output"
                f" {shortened(name)} in model {step.model_name}"
            )
        _agree(ensemble, tensor, _Known.of(step.model_name, known[name], member), tensors)


def _agree(ensemble: str, tensor: str, found: _Known, tensors: dict[str, _Known]) -> None:
    """Compare with what is known of a tensor, or remember it. A size that is not fixed is compared in each request."""
    first = tensors.setdefault(tensor, found)
    where = f"in ensemble {ensemble}, ensemble tensor {shortened(tensor)}"
    if first.data_type != found.data_type:
        raise ConfigError(
            f"{where}: inconsistent data type: {DataType.Name(first.data_type)} is inferred from model"
            f" {first.model} while {DataType.Name(found.data_type)} is inferred from model {found.model}"
        )
    if not (_compatible(first.dims, found.dims) or _compatible(first.full_dims, found.full_dims)):
        raise ConfigError(
            f"{where}: inconsistent shape: {list(first.full_dims)} is inferred from model {first.model} while"
            f" {list(found.full_dims)} is inferred from model {found.model}"
        )


def _compatible(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(-1 in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))


def load_order(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names such that each comes after those that it needs, as far as these are among the names.

    What needs itself comes somewhere. No recursion: a chain of ensembles may be as long as somebody likes.
    """
    order: dict[str, None] = {}
    begun: set[str] = set()
    for name in needs:
        stack = [(name, iter(needs[name]))] if name not in begun else []
        begun.add(name)
        while stack:
            current, rest = stack[-1]
            needed = next((other for other in rest if other in needs and other not in begun), None)
            if needed is None:
                order[current] = None
                stack.pop()
            else:
                begun.add(needed)
                stack.append((needed, iter(needs[needed])))
    return list(order)
