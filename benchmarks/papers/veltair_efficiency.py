"""Fig. 14a of VELTAIR: cores used by blocks and whole models beyond the layer-wise scheduling, over the load.

The paper does not say what its load is a share of: here of the highest rate of `veltair_as` in the same mix. Core time
is counted twice: as held, with what each unit costs beside its layers, and of the layers alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.papers.figures import COLOURS, Csv, FigureRequest, new_figure, save
from benchmarks.papers.veltair_numbers import CORE_USE_GAP
from gangway.simulator.block import SimulatedBlock
from gangway.simulator.machine import Observer
from gangway.simulator.rates import RateGoal, search_rate
from gangway.simulator.runs import run_policy
from gangway.simulator.scenario import Scenario, make_scenario
from gangway.workload.mix import read_mix

CORES = 64
MIX = "mix"
LOADS = (0.1, 0.25, 0.5, 0.75, 1.0)
FINEST = "planaria"
POLICIES = (FINEST, "fixed_block:6", "veltair_as", "model_fcfs")
MOST_QUERIES = 3000


@dataclass(frozen=True)
class CoreTime:
    """Per query, in milliseconds of one core."""

    held: float
    of_layers: float


class LayerTime(Observer):
    """Adds up the core time of layers, isolated."""

    def __init__(self) -> None:
        self.core_us = 0.0

    def ran(self, block: SimulatedBlock, begin_layer: int, end_layer: int, begin_us: float, end_us: float) -> None:
        """Add a stretch, of which the layers' own time counts at most."""
        layers_us = block.model.span_us(begin_layer, end_layer, len(block.cores))
        self.core_us += len(block.cores) * min(layers_us, end_us - begin_us)


def draw(request: FigureRequest) -> None:
    """Write veltair_fig14a.csv and .png. Raises OSError."""
    scenario = make_scenario(read_mix(MIX), CORES)
    queries = min(request.queries, MOST_QUERIES)
    highest = search_rate("veltair_as", scenario, RateGoal(), queries, request.seed).rate_per_s
    times = {
        policy: [core_time(policy, scenario, load * highest, queries, request.seed) for load in LOADS]
        for policy in POLICIES
    }
    header = ("policy", "load", "rate_per_s", "held_ms", "gap_held", "layers_ms", "gap_layers", "paper_at_75")
    with Csv(request.output / "veltair_fig14a.csv", header) as file:
        for policy in POLICIES:
            for load, one, least in zip(LOADS, times[policy], times[FINEST], strict=True):
                gaps = (one.held / least.held - 1, one.of_layers / least.of_layers - 1)
                paper = CORE_USE_GAP.get(policy, "") if load == 0.75 else ""
                file.write(policy, load, load * highest, one.held, gaps[0], one.of_layers, gaps[1], paper)
    _plot(request, times)


def core_time(policy: str, scenario: Scenario, rate_per_s: float, queries: int, seed: int) -> CoreTime:
    """Simulate, and return what a query took on average."""
    observer = LayerTime()
    run = run_policy(policy, scenario, rate_per_s, queries, seed, observer)
    return CoreTime(run.result.counters.core_busy_us / queries / 1e3, observer.core_us / queries / 1e3)


def _plot(request: FigureRequest, times: Mapping[str, Sequence[CoreTime]]) -> None:
    title = f"VELTAIR's Fig. 14a: core time beyond layer-wise scheduling, {MIX}, {CORES} modelled cores"
    figure, ((held, layers),) = new_figure(title, columns=2, size=(11.5, 4.4))
    loads = [100 * load for load in LOADS]
    for policy in POLICIES[1:]:
        pairs = list(zip(times[policy], times[FINEST], strict=True))
        style = {"marker": "o", "color": COLOURS[policy], "label": policy}
        held.plot(loads, [100 * (one.held / least.held - 1) for one, least in pairs], **style)
        layers.plot(loads, [100 * (one.of_layers / least.of_layers - 1) for one, least in pairs], **style)
    for axes, what in ((held, "held, units' own cost included"), (layers, "layers alone")):
        for policy, gap in CORE_USE_GAP.items():
            axes.plot([75], [100 * gap], "*", ms=12, color=COLOURS[policy], mfc="none", label=f"paper, {policy}")
        axes.axhline(0, color="grey", ls=":", lw=1)
        axes.set(xlabel="load, % of veltair_as's highest rate", ylabel=f"gap to {FINEST}, % ({what})")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(figure, request.output / "veltair_fig14a.png")
