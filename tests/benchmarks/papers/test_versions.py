"""The figure that says what versions of a layer are worth where cores contend."""

import csv
from pathlib import Path

import pytest

from benchmarks.papers import veltair_versions
from benchmarks.papers.figures import FigureRequest
from gangway.artifact.console import Console

pytestmark = pytest.mark.long


def test_the_figure_is_drawn_of_ever_more_versions(tmp_path: Path) -> None:
    veltair_versions.draw(FigureRequest(tmp_path, 40, 1, Console(quiet=True)), ["gangway"], [1, 5], seeds=2)
    with (tmp_path / "veltair_fig14b.csv").open(newline="") as file:
        one, five = csv.DictReader(file)
    assert (one["versions"], five["versions"]) == ("1", "5")
    assert float(one["over_one"]) == 1.0 and float(one["over_one_half"]) == 0.0
    assert float(five["over_one"]) > 1.1, "versions that bear interference carry more"
    assert (tmp_path / "veltair_fig14b.png").read_bytes().startswith(b"\x89PNG")
