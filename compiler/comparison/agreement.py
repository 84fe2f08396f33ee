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
from gangway.compiler.comparison.candidate import Call, CandidateMemory, CompiledCandidate
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.kernels.specs import Array
from gangway.compiler.kernels.templates.bf16 import words
from gangway.compiler.lower.reference import example
from gangway.compiler.pipeline import CompileResult

EXAMPLES = 4
SHARE = 0.5  # of what is allowed, that parts of layers may add up to: they add up only about


@dataclass(frozen=True)
class PrecisionComparison:
    """The agreement of a model, and the layers that stay in fp32 so that it is better; none if it is good enough.

    `keeps_all`: no other layer is in bf16.
    """

    agreement: Agreement
    to_keep: tuple[str, ...] = ()
    keeps_all: bool = False


def compare(
    path: Path, dimensions: Mapping[str, int], fp32: CompileResult, bf16: CompileResult, min_cosine: float
) -> PrecisionComparison:
    """Compare the answers of two artifacts of a model to random numbers. Raises ModelError, OSError."""
    graph = read_graph(path, dimensions)
    exact, low = (CompiledCandidate.of(graph, each.manifest, each.folder) for each in (fp32, bf16))
    feeds = [
        {name: example(graph.types[name], EXAMPLES * seed + number) for seed, name in enumerate(graph.inputs)}
        for number in range(EXAMPLES)
    ]
    model, lowered_model = _Model(exact, feeds[0]), _Model(low, feeds[0])
    expected = [model.answers(each) for each in feeds]
    whole = [agreement_of(lowered_model.answers(each), wanted) for each, wanted in zip(feeds, expected, strict=True)]
    agreement = Agreement(min(one.cosine for one in whole), float(np.mean([one.top1 for one in whole])), len(whole))
    lowered = [number for number, layer in enumerate(low.layers) if layer.versions and _is_low(layer)]
    if agreement.cosine >= min_cosine or not lowered:
        return PrecisionComparison(agreement)
    lost = {}
    for number in lowered:
        answers = model.answers(feeds[0], rounded_layer=number)
        lost[low.layers[number].name] = 1 - agreement_of(answers, expected[0]).cosine
    to_keep = layers_to_keep(lost, SHARE * (1 - min_cosine))
    return PrecisionComparison(agreement, to_keep, len(to_keep) == len(lost))


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


class _Model:
    """A compiled model, which answers one example after the other in the same memory."""

    def __init__(self, candidate: CompiledCandidate, feeds: Mapping[str, Array]) -> None:
        self._candidate = candidate
        self._memory = CandidateMemory.of(candidate, feeds)
        self._calls = candidate.calls(self._memory)
        self._rounded: Sequence[Call] = ()

    def answers(self, feeds: Mapping[str, Array], rounded_layer: int | None = None) -> list[Array]:
        """Return the outputs; with a `rounded_layer`, of which the weights are rounded to bf16."""
        calls = list(self._calls)
        if rounded_layer is not None:
            calls[rounded_layer] = self._with_rounded_weights()[rounded_layer]
        self._memory.feed([feeds[name] for name in self._candidate.graph.inputs])
        for call in calls:
            call()
        return [answer.copy() for answer in self._candidate.answers(self._memory)]

    def _with_rounded_weights(self) -> Sequence[Call]:
        if not self._rounded:
            weights = np.fromfile(self._candidate.weights, np.uint8)
            self._rounded = self._candidate.calls(self._memory, rounded(weights[: len(weights) & ~3].view(np.float32)))
        return self._rounded


def agreement_of(answers: Sequence[Array], expected: Sequence[Array]) -> Agreement:
    """Return how the answers to one example agree with those that are right."""
    pairs = list(zip(answers, expected, strict=True))
    return Agreement(min(cosine(*pair) for pair in pairs), float(np.mean([top1(*pair) for pair in pairs])), 1)


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
