"""The papers' figures, one a module: `gangway simulate --figures NAME`.

Each module has `draw(request: FigureRequest) -> None`, which writes CSV files and PNG pictures, the paper's numbers
beside ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gangway.artifact.console import Console
from gangway.simulator.measured import MeasuredModel


@dataclass(frozen=True)
class FigureRequest:
    """Where to draw, and how much to simulate for it. `measured`: models to draw, for figures that take any."""

    output: Path
    queries: int
    seed: int
    console: Console
    measured: Mapping[str, MeasuredModel] = field(default_factory=dict)


# By name: the module, imported only when it is asked for.
FIGURES: Mapping[str, str] = {
    "layerweaver_fig4": "gangway.simulator.figures.layerweaver_fig4",
    "layerweaver_fig5": "gangway.simulator.figures.layerweaver_fig5",
    "packrat": "gangway.simulator.figures.packrat",
    "veltair_demands": "gangway.simulator.figures.veltair_demands",
    "veltair_efficiency": "gangway.simulator.figures.veltair_efficiency",
    "veltair_granularity": "gangway.simulator.figures.veltair_granularity",
    "veltair_rates": "gangway.simulator.figures.veltair_rates",
    "veltair_versions": "gangway.simulator.figures.veltair_versions",
}
# Drawn of models that are given: those that come with the simulator have one version of each layer.
OF_GIVEN_MODELS = ("veltair_versions",)
