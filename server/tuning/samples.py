"""Which candidates are measured together, and what becomes of their times."""

import statistics
from collections.abc import Sequence

from gangway.artifact.reader import MAX_VERSIONS
from gangway.artifact.tuning import Sample
from gangway.executor.sampling import LayerTimes
from gangway.server.tuning.compiler_process import Kernel, Space
from gangway.server.tuning.decisions import STATIC
from gangway.server.tuning.kept import KeptSamples


def plan_batches(space: Space, kept: KeptSamples) -> list[list[list[int]]]:
    """Return batch by batch what is still to be measured: of each kernel the static choice, then some candidates."""
    missing = [
        [number for number, item in enumerate(kernel.candidates) if number != STATIC and item.knobs not in known]
        for kernel, known in zip(space.kernels, kept.latency_us, strict=True)
    ]
    others = MAX_VERSIONS - 1  # that an artifact can hold beside the static choice
    parts = -(-max(map(len, missing)) // others)
    if not all(kept.latency_us):
        parts = max(1, parts)  # not even the static choices have been measured
    return [[[STATIC, *numbers[part * others : (part + 1) * others]] for numbers in missing] for part in range(parts)]


def keep(kept: KeptSamples, space: Space, batch: Sequence[Sequence[int]], times: LayerTimes) -> None:
    """Note a batch's times.

    A machine's speed drifts. So each batch is scaled to make its static choice, which all batches have, take what it
    took in the first one.
    """
    kept.isolated_us = kept.isolated_us or sum(layer[STATIC] for layer in times)
    for number, (kernel, numbers) in enumerate(zip(space.kernels, batch, strict=True)):
        known = kept.latency_us[number]
        latency_us = kernel_times(times, space, number)
        first_us = known.setdefault(kernel.candidates[STATIC].knobs, latency_us[STATIC])
        scale = first_us / latency_us[STATIC] if latency_us[STATIC] else 1.0
        for place, candidate in enumerate(numbers[1:], start=1):
            known[kernel.candidates[candidate].knobs] = latency_us[place] * scale


def kernel_times(times: LayerTimes, space: Space, number: int) -> tuple[float, ...]:
    """Return a kernel's times by version: the mean of the layers that it computes."""
    layers = [times[layer] for layer, kernel in enumerate(space.layers) if kernel == number]
    return tuple(map(statistics.fmean, zip(*layers, strict=True)))


def samples_of(kernel: Kernel, latency_us: dict[str, float]) -> tuple[Sample, ...]:
    """Return the samples of a kernel, in the order of its candidates; all have been measured."""
    return tuple(Sample(candidate, latency_us[candidate.knobs]) for candidate in kernel.candidates)
