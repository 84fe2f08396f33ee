"""What every figure of a paper is asked for, and what drawing them shares. Imports matplotlib late."""

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
