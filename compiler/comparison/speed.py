"""Whether a quantised model is compiled to its advantage: kernels and onnxruntime compute its integers by other means.

Which of the two is faster depends on the processor, so both are measured. A model that onnxruntime computes faster is
left to it.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from gangway.artifact.format import Layer
from gangway.compiler.comparison.candidate import Call, CandidateMemory, CompiledCandidate
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.lower.reference import best_us
from gangway.compiler.model_file import open_model

MOST_RATIO = 1.1  # of times
MOST_RATIO_OF_ISLANDS = 0.9  # if onnxruntime computes layers anyway: on several cores a whole model gains more
LEAST_GAIN_US = 100  # less is gained by a compiled model elsewhere: it needs no Python
ROUNDS = 4  # of both, by turns
REFUSAL_S = 0.5  # of a core, before a model is refused: what slows down one side, as a neighbour's tiles do, is over
CLEAR_RATIO = 1.2  # of times of one round: more rounds would not change the answer
_QUANTISED = ("Quantise", "Quantize", "Integer", "QLinear", "QGemm")  # parts of operators' names


def is_doubtful(layers: Sequence[Layer]) -> bool:
    """Whether a model is quantised."""
    return any(part in layer.operator for layer in layers for part in _QUANTISED)


def require_speed(path: Path, dimensions: Mapping[str, int], candidate: CompiledCandidate) -> None:
    """Raise UnsupportedModelError if a row of a quantised model takes 1.1 times onnxruntime's time, and 0.1 ms more.

    With layers that onnxruntime computes, 0.9 times are too much. Nothing is said of models that onnxruntime cannot
    compute with random numbers.
    """
    layers, feeds = candidate.layers, candidate.examples(dimensions)
    try:
        session = open_model(path)
        session.run(None, feeds)
    except Exception:  # onnxruntime's own exceptions have no common base
        return
    calls = candidate.calls(CandidateMemory.of(candidate, feeds))
    has_islands = any(layer.onnx_file for layer in layers)
    ours_us = theirs_us = float("inf")
    is_slow, rounds, end_s = True, 0, time.thread_time() + REFUSAL_S
    while rounds < ROUNDS or (is_slow and time.thread_time() < end_s):
        theirs_us = min(theirs_us, best_us(lambda: session.run(None, feeds)))
        ours_us = min(ours_us, best_us(lambda: [call() for call in calls]))
        if ours_us * CLEAR_RATIO < theirs_us:
            return
        limit_us = max(MOST_RATIO * theirs_us, theirs_us + LEAST_GAIN_US)
        is_slow = ours_us > (MOST_RATIO_OF_ISLANDS * theirs_us if has_islands else limit_us)
        rounds += 1
    if not is_slow:
        return
    slowest = _slowest(layers, calls)
    if has_islands:
        raise UnsupportedModelError(f"onnxruntime computes most of this quantised model, such as {slowest}")
    raise UnsupportedModelError(
        f"onnxruntime computes this quantised model {ours_us / theirs_us:.1f} times as fast as these kernels,"
        f" which need most time for {slowest}"
    )


def _slowest(layers: Sequence[Layer], calls: Sequence[Call]) -> str:
    """Return the operator whose layers take the most time together."""
    times = Counter[str]()
    for layer, call in zip(layers, calls, strict=True):
        begin_ns = time.perf_counter_ns()
        call()
        times[layer.operator.partition("+")[0]] += time.perf_counter_ns() - begin_ns
    return times.most_common(1)[0][0]
