"""The phases of a compilation: what is reported while they run, and how long each took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""`progress(phase, done, total)`; those of PHASES in this order, or some of them and then FALLBACK_PHASE."""

COMPARISON_PHASE = "comparison"  # with onnxruntime
PHASES = ("key", "import", "read", "graph", "kernels", "weights", COMPARISON_PHASE, "write")
AGREEMENT_PHASE = "agreement"  # comes after all others of a model in bf16
TUNED_PHASE = "versions"  # comes after all others if the model has been tuned
FALLBACK_PHASE = "onnxruntime"  # comes after the phase in which it turns out that the model cannot be compiled


class Phases:
    """Reports the phases of one compilation and measures them."""

    def __init__(self, report: Progress, times_us: dict[str, int]) -> None:
        self.report = report
        self.times_us = times_us
        """Microseconds of wall time by phase."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Report that a phase begins, and add its time when the body ends without an error."""
        self.report(name, 0, 1)
        start_ns = time.monotonic_ns()
        yield
        self.times_us[name] = (time.monotonic_ns() - start_ns) // 1000
