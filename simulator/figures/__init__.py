"""The papers' figures, one a module: `gangway simulate --figures NAME`.

Each module has `draw(request: FigureRequest) -> None`, which writes CSV files and PNG pictures, the paper's numbers
beside ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True)
class FigureRequest:
    """Where to draw, and how much to simulate for it."""

    output: Path
    queries: int
    seed: int
    console: Console


# By name: the module, imported only when it is asked for.
FIGURES: Mapping[str, str] = {
    "layerweaver_fig4": "gangway.simulator.figures.layerweaver_fig4",
    "layerweaver_fig5": "gangway.simulator.figures.layerweaver_fig5",
    "packrat": "gangway.simulator.figures.packrat",
    "veltair_demands": "gangway.simulator.figures.veltair_demands",
    "veltair_efficiency": "gangway.simulator.figures.veltair_efficiency",
    "veltair_granularity": "gangway.simulator.figures.veltair_granularity",
    "veltair_rates": "gangway.simulator.figures.veltair_rates",
}
