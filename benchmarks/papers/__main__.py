"""`python -m benchmarks.papers NAME[,NAME...] -o OUT`: the papers' figures, one a module.

Each module has `draw(request: FigureRequest) -> None`, which writes CSV files and PNG pictures, the paper's numbers
beside ours. They are computed by the simulator.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.figures import FigureRequest
from gangway.artifact.profile import ProfileError
from gangway.base.console import Console
from gangway.simulator.loop import ContractError
from gangway.workload.qos import WorkloadError

ALL = "all"
FIGURES = (
    *("decision_costs", "layerweaver_fig4", "layerweaver_fig5", "packrat", "veltair_demands", "veltair_efficiency"),
    *("veltair_granularity", "veltair_rates", "veltair_latency", "fidelity"),
)


def main(argv: Sequence[str]) -> int:
    """Draw the figures that are asked for; return 0, or 1 when it cannot be done. Wrong arguments exit with 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description="Draw figures of the papers.")
    parser.add_argument("figures", metavar="NAME", help=f"some of: {', '.join((ALL, *FIGURES))}, with commas between")
    parser.add_argument("--queries", type=int, default=20_000, metavar="N", help="in one run (20000)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the arrivals (1)")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="of fidelity: where to write the page (DIR/papers.md)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="where to write")
    options = parser.parse_args(argv)
    names = list(FIGURES) if options.figures == ALL else options.figures.split(",")
    if unknown := [name for name in names if name not in FIGURES]:
        parser.error(f"unknown figure {unknown[0]!r}; known: {', '.join((ALL, *FIGURES))}")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        page = options.page or options.output / "papers.md"
        request = FigureRequest(options.output, options.queries, options.seed, Console(), page)
        for name in names:
            importlib.import_module(f"benchmarks.papers.{name}").draw(request)
    except (WorkloadError, ProfileError, ContractError, OSError) as error:
        print(f"benchmarks.papers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
