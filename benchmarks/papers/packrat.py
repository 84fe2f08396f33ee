"""The figures of Packrat (2024): what splitting a batch over gangs brings, and what a change of the split costs."""

from benchmarks.papers import packrat_splits, packrat_step
from benchmarks.papers.figures import FigureRequest


def draw(request: FigureRequest) -> None:
    """Write all files of `packrat_splits` and `packrat_step`. Raises OSError."""
    packrat_splits.draw(request)
    packrat_step.draw(request)
