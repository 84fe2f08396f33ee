"""What people and the scheduler want to know of a step: its shape as text, its traffic, how far it scales."""

from gangway.compiler.buffers import Step
from gangway.compiler.specs import GatherSpec

# One core of a current server, within a factor of two: only the decision which layers are too small to share needs it.
_FLOPS_PER_US = 100_000
_ACTIVATION_BYTES_PER_US = 40_000  # from the second or third level cache
_WEIGHT_BYTES_PER_US = 20_000  # from memory
_SHARE_US = 8.0  # what a rank should at least have to do in a layer; a page turn and a cold cache cost some of it


def shape_text(step: Step) -> str:
    """Return input -> output, and the window if there is one: "64x56x56 -> 256x56x56 k1 s1"."""
    shape = step.output.kind.shape
    return step.spec.text or "x".join(map(str, shape[1:] if shape[:1] == (1,) else shape)) or "1"


def activation_bytes(step: Step) -> int:
    """Return the bytes of inputs and outputs, without halos and surplus channels; of a table only what is looked up."""
    kinds = [buffer.kind for buffer in (*step.inputs, step.output)]
    if isinstance(step.spec, GatherSpec):
        kinds[0] = step.output.kind
    return sum(kind.size_bytes for kind in kinds)


def weight_bytes(step: Step) -> int:
    """Return the bytes of weights, as the model has them."""
    return sum(array.nbytes for array in step.weights.values())


def row_ns(step: Step) -> int:
    """Estimate what one more row of a batch takes on one core; the weights are there already."""
    row_us = max(step.spec.flops / _FLOPS_PER_US, activation_bytes(step) / _ACTIVATION_BYTES_PER_US)
    return int(row_us * 1000)


def max_ranks(step: Step, tasks: int) -> int:
    """Estimate beyond how many ranks a layer gets slower: those of under about 15 us alone are not worth sharing."""
    alone_us = max(
        step.spec.flops / _FLOPS_PER_US,
        activation_bytes(step) / _ACTIVATION_BYTES_PER_US,
        weight_bytes(step) / _WEIGHT_BYTES_PER_US,
    )
    return max(1, min(tasks, int(alone_us / _SHARE_US)))
