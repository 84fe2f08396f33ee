"""How the answers of a compiled model differ from onnxruntime's, where the same request is asked of both."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gangway.compiler.comparison.candidate import CandidateMemory, CompiledCandidate
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.kernels.specs import Array
from gangway.compiler.lower.reference import run_apart
from gangway.compiler.model_file import open_model

MOST_DIFFERENCE = 1e-3  # of the largest number of an output: sums in another order differ by less
MOST_DIFFERENCE_OF_HALVES = 1e-2  # onnxruntime rounds each result to float16, kernels those of the model only
LARGEST_BYTES = 64 << 20  # of weights: sessions of larger models take seconds


def difference_from_onnxruntime(
    path: Path, dimensions: Mapping[str, int], candidate: CompiledCandidate, tail: bool
) -> str:
    """Return how answers to random numbers differ from those of onnxruntime; empty if they agree.

    Products of 8-bit numbers are exact on both sides, whatever the processor. `tail`: the last layer makes all outputs.
    Nothing is said of large models, and of those that onnxruntime cannot compute with random numbers, or not in a few
    seconds.
    """
    if candidate.weights.stat().st_size > LARGEST_BYTES:
        return ""
    feeds = candidate.examples(dimensions)

    def compare() -> str:
        session = open_model(path)
        names = [output.name for output in session.get_outputs()]
        memory = CandidateMemory.of(candidate, feeds)
        results: list[Any] = [call() for call in candidate.calls(memory)]
        answers = results[-1] if tail else candidate.answers(memory)
        return describe(names, answers, session.run(names, feeds))

    try:
        return run_apart(compare)
    except UnsupportedModelError:
        return ""


def describe(names: Sequence[str], answers: Sequence[Array], expected: Sequence[Array]) -> str:
    """Return how outputs differ most, by name; empty if none differs by more than is allowed."""
    found = []
    for name, ours, theirs in zip(names, answers, expected, strict=True):
        share, how = _difference(np.asarray(ours), np.asarray(theirs))
        allowed = MOST_DIFFERENCE_OF_HALVES if theirs.dtype == np.float16 else MOST_DIFFERENCE
        if share > allowed:
            found.append((share, f"output '{name}' differs {how}"))
    return max(found)[1] if found else ""


def _difference(ours: Array, theirs: Array) -> tuple[float, str]:
    """Return how large the difference of two tensors is, and in words: a share of the largest number, or of all."""
    if ours.shape != theirs.shape or ours.dtype.kind != theirs.dtype.kind:
        return np.inf, f"in shape or type: {list(ours.shape)} instead of {list(theirs.shape)}"
    if not theirs.size:
        return 0.0, ""
    if theirs.dtype.kind != "f":
        share = float(np.mean(ours != theirs))
        return share, f"in {_percent(share)} of its values"
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    odd = ~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if odd.any():
        return np.inf, f"in {_percent(float(np.mean(odd)))} of its values, which are infinite or no numbers in one"
    largest = float(np.abs(b[finite]).max(initial=0.0))
    most = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    share = most / largest if largest else float(most > 0)
    return share, f"by up to {_percent(share)} of its largest number"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
