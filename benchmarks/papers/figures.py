"""What every figure of a paper is asked for, and what drawing them shares: CSV files, and matplotlib, imported late."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gangway.base.console import Console

COLOURS = {
    "planaria": "tab:red",
    "fixed_block:6": "tab:olive",
    "fixed_block:11": "tab:brown",
    "model_fcfs": "black",
    "veltair_as": "tab:cyan",
    "veltair_ac": "tab:orange",
    "veltair": "tab:blue",
    "veltair:use": "tab:purple",
    "gangway": "tab:green",
}


class Csv:
    """A CSV file whose rows are there as soon as they are written; a context manager. Raises OSError."""

    def __init__(self, path: Path, header: Sequence[str], keep: bool = False) -> None:
        """Begin the file anew, or append to the rows that are there (`keep`)."""
        self._file = path.open("a" if keep else "w", newline="")
        self._writer = csv.writer(self._file)
        if not keep:
            self.write(*header)

    def write(self, *cells: object) -> None:
        """Append a row; fractions are rounded to six digits."""
        self._writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])
        self._file.flush()

    def __enter__(self) -> "Csv":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def new_figure(title: str, columns: int = 1, rows: int = 1, size: tuple[float, float] = (7.0, 4.2)) -> tuple[Any, Any]:
    """Return a figure and its axes [rows][columns]. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra package, slow to import

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10)
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Any, path: Path) -> None:
    """Write a PNG. Raises OSError."""
    figure.savefig(path, dpi=120)


@dataclass(frozen=True)
class FigureRequest:
    """Where to draw, and how much to simulate for it. `page`: where the page of all figures goes."""

    output: Path
    queries: int
    seed: int
    console: Console
    page: Path | None = None
