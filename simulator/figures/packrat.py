"""The figures of Packrat (2024): what splitting a batch over gangs brings, and what a change of the split costs."""

from gangway.simulator.figures import FigureRequest, packrat_splits, packrat_step


def draw(request: FigureRequest) -> None:
    """Write all files of `packrat_splits` and `packrat_step`. Raises OSError."""
    packrat_splits.draw(request)
    packrat_step.draw(request)
