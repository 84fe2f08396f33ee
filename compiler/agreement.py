"""How answers of a model in bf16 agree with those in fp32, and by which layers they differ.

A layer's own part of the difference is estimated in fp32: by answers for which its weights alone are rounded to bf16.
Parts add up, about: so the layers with the largest stay in fp32, until what the others add up to is small enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gangway.artifact.format import Layer
from gangway.artifact.precision import Agreement
from gangway.compiler.candidate import Call, Candidate, Memory
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.kernels.specs import Array
from gangway.compiler.kernels.templates.bf16 import words
from gangway.compiler.lower.reference import example
from gangway.compiler.pipeline import Compiled

EXAMPLES = 4
SHARE = 0.5  # of what is allowed, that parts of layers may add up to: they add up only about


@dataclass(frozen=True)
class Comparison:
    """The agreement of a model, and the layers that stay in fp32 so that it is better; none if it is good enough.

    `keeps_all`: no other layer is in bf16.
    """

    agreement: Agreement
    to_keep: tuple[str, ...] = ()
    keeps_all: bool = False


def compare(path: Path, dimensions: Mapping[str, int], fp32: Compiled, bf16: Compiled, min_cosine: float) -> Comparison:
    """Compare the answers of two artifacts of a model to random numbers. Raises ModelError, OSError."""
    graph = read_graph(path, dimensions)
    exact, low = (Candidate.of(graph, each.manifest, each.folder) for each in (fp32, bf16))
    names = list(graph.inputs)
    feeds = [[example(graph.types[name], EXAMPLES * seed + number) for seed, name in enumerate(names)]
             for number in range(EXAMPLES)]  # fmt: skip
    answers = [_Answers(exact, dict(zip(names, numbers, strict=True))) for numbers in feeds]
    whole = [each.agreement_of(low) for each in answers]
    agreement = Agreement(min(one.cosine for one in whole), float(np.mean([one.top1 for one in whole])), len(whole))
    lowered = [number for number, layer in enumerate(low.layers) if layer.versions and _is_low(layer)]
    if agreement.cosine >= min_cosine or not lowered:
        return Comparison(agreement)
    lost = {low.layers[number].name: 1 - answers[0].with_rounded(number).cosine for number in lowered}
    to_keep = layers_to_keep(lost, SHARE * (1 - min_cosine))
    return Comparison(agreement, to_keep, len(to_keep) == len(lost))


def layers_to_keep(lost: Mapping[str, float], allowed: float) -> tuple[str, ...]:
    """Return the layers that lose most, as few as possible, so that the others together lose no more than `allowed`.

    At least one is returned: answers have been found to differ.
    """
    ranked = sorted(lost, key=lambda name: (-lost[name], name))
    left = sum(lost.values())
    kept: list[str] = []
    for name in ranked:
        if kept and left <= allowed:
            break
        kept.append(name)
        left -= lost[name]
    return tuple(kept)


class _Answers:
    """What a model answers to one example in fp32."""

    def __init__(self, exact: Candidate, feeds: Mapping[str, Array]) -> None:
        self._kinds = [exact.graph.types[name] for name in exact.graph.outputs]
        self._feeds = feeds
        self._exact = exact
        self._memory = Memory.of(exact, feeds)
        self._calls = exact.calls(self._memory)
        self._expected = self._run(self._calls, self._memory)
        self._rounded: Sequence[Call] = ()

    def agreement_of(self, candidate: Candidate) -> Agreement:
        """Return how another artifact's answers agree with it."""
        memory = Memory.of(candidate, self._feeds)
        return self._agreement(candidate.calls(memory), memory)

    def with_rounded(self, number: int) -> Agreement:
        """Return how answers agree for which the weights of one layer are rounded to bf16."""
        if not self._rounded:
            weights = np.fromfile(self._exact.weights, np.uint8)
            self._rounded = self._exact.calls(self._memory, rounded(weights[: len(weights) & ~3].view(np.float32)))
        calls = [*self._calls[:number], self._rounded[number], *self._calls[number + 1 :]]
        return self._agreement(calls, self._memory)

    def _agreement(self, calls: Sequence[Call], memory: Memory) -> Agreement:
        pairs = list(zip(self._run(calls, memory), self._expected, strict=True))
        least = min(cosine(*pair) for pair in pairs)
        return Agreement(least, float(np.mean([top1(*pair) for pair in pairs])), 1)

    def _run(self, calls: Sequence[Call], memory: Memory) -> list[Array]:
        for call in calls:
            call()
        outputs = zip(memory.outputs, self._kinds, strict=True)
        return [numbers.view(kind.dtype).reshape(kind.shape).copy() for numbers, kind in outputs]


def rounded(numbers: Array) -> Array:
    """Return the bytes of float32 numbers, each the nearest one of bf16, ties to even."""
    result: Array = (words.rounded(numbers).astype(np.uint32) << 16).view(np.uint8)
    return result


def cosine(got: Array, wanted: Array) -> float:
    """Return the cosine of the angle between two tensors, 1 of equal ones; -1 where only one of them is finite."""
    a, b = (each.astype(np.float64).reshape(-1) for each in (got, wanted))
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite):
        return -1.0
    a, b = a[finite], b[finite]
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    if lengths == 0.0:
        return 1.0 if np.array_equal(a, b) else 0.0
    return min(1.0, float(a @ b) / lengths)


def top1(got: Array, wanted: Array) -> float:
    """Return the share of rows, along the last axis, whose largest element is the same; 1 of rows of one element."""
    if wanted.ndim == 0 or wanted.shape[-1] < 2:
        return 1.0
    return float(np.mean(got.argmax(-1) == wanted.argmax(-1)))


def _is_low(layer: Layer) -> bool:
    """Whether a layer multiplies bf16."""
    return "bf16" in layer.versions[0].description
