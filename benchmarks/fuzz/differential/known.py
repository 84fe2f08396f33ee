"""Differences that are meant, which fuzzing does not count as faults: `docs/reference/operators.md` lists them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fuzz.differential.judge import ONE_STEP, Verdict


@dataclass(frozen=True)
class Known:
    """How the answers of some operators may differ: a pattern for the difference, what a reader is told, and why."""

    operators: tuple[str, ...]
    pattern: str
    what: str
    why: str = ""
    is_of_numbers: bool = False  # `docs/reference/differences.md` has those

    def covers(self, verdict: Verdict) -> bool:
        """Whether a case's difference is of this kind."""
        return verdict.case.operator in self.operators and bool(re.search(self.pattern, verdict.difference))


KNOWN: Sequence[Known] = (
    Known(("ReduceMax", "ReduceMin"), "nan.? instead of|instead of .*nan", "NaN", is_of_numbers=True),
    Known(("Hardmax",), "", "NaN", is_of_numbers=True),
    Known(
        ("MaxPool", "GlobalMaxPool"),
        "3.4028235e|nan.? instead of|instead of .*nan",
        "a window of -inf, or of NaN",
        is_of_numbers=True,
    ),
    Known(
        ("Conv", "ConvTranspose", "FusedConv"),
        r"nan.? instead of|instead of .*(inf|nan)",
        "An infinity or NaN in the input makes more outputs NaN, those beside its window or of other groups.",
        "Kernels pad windows, groups and strides with weights of zero, and zero times infinity is NaN.",
    ),
    Known(
        ("Clip",),
        "inf.? instead of .*3.4028235e",
        "An infinity without a bound on its side stays infinite before opset 13, too.",
        "ONNX says so; onnxruntime takes the largest number for a bound that is left out.",
        is_of_numbers=True,
    ),
    Known(
        ("QLinearSoftmax",),
        r"\(255\) instead of .*\(0\)",
        "A probability of 1, beyond what 8 bits hold, is 255.",
        "onnxruntime's own kernel wraps around to 0.",
    ),
    Known(
        ("DynamicQuantizeMatMul",),
        "instead of",
        "A number between two steps of the quantised operand may become the other one, which changes a row's products.",
        "Quotients by a computed scale are rounded in another order.",
    ),
    Known(
        ("Resize",),
        "answered what onnxruntime refuses: .*Cubic",
        "Cubic interpolation of other axes than onnxruntime's is computed.",
        "onnxruntime refuses scales that change other axes than the last two.",
    ),
    Known(
        ("MeanVarianceNormalization",),
        "instead of .*nan",
        "Numbers without any variance are 0, not NaN.",
        "The kernel follows ONNX's definition, which adds 1e-9 to the deviation.",
        is_of_numbers=True,
    ),
    Known(
        (
            *("QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearConcat"),
            *("QLinearWhere", "QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearReduceMean", "QGemm"),
        ),
        ONE_STEP,
        "An 8-bit result that lies between two integers may be the other one.",
        "The kernel dequantises, computes and quantises; onnxruntime multiplies by ratios of scales.",
    ),
)


def reason_of(verdict: Verdict) -> str:
    """Return why an answer may differ; empty if nothing says so."""
    return next((known.what for known in KNOWN if known.covers(verdict)), "")
