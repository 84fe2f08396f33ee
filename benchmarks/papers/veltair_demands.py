"""Fig. 4b and 10 of VELTAIR: what ResNet-50's layers, blocks and the whole model ask for. No simulation.

Demands are those of the policies: 90 % of 15 ms, with what a unit costs beside its layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.papers.figures import Csv, FigureRequest, new_figure, save
from gangway.scheduler.policies.veltair import TARGET_SHARE, UNIT_US
from gangway.scheduler.prediction import Block, Demands, demands, threshold_share
from gangway.simulator.scenario import make_scenario
from gangway.workload.mix import Mix, MixModel
from gangway.workload.qos import Qos

CORES = 64
QOS_MS = 15.0
TOGETHER = 2  # ResNet-50s, as in Fig. 10b


@dataclass(frozen=True)
class Use:
    """Cores that a granularity asks for: the mean over time, and the most."""

    granularity: str
    mean: float
    most: int


def draw(request: FigureRequest) -> None:
    """Write veltair_fig4b_10a.csv, veltair_fig10b.csv and veltair_fig4b_10.png. Raises OSError."""
    of = resnet50()
    threshold = threshold_share(CORES, of.average_cores, TOGETHER * of.average_cores)
    blocks = of.blocks(threshold)
    plans = granularities(of, blocks)
    with Csv(request.output / "veltair_fig4b_10a.csv", ("layer", *plans)) as file:
        lines = {name: per_layer(plan) for name, plan in plans.items()}
        for layer in range(of.layers):
            file.write(layer, *(line[layer] for line in lines.values()))
    uses = [use(of, name, plan) for name, plan in plans.items()]
    with Csv(request.output / "veltair_fig10b.csv", ("granularity", "mean_cores", "most_cores")) as file:
        for one in uses:
            file.write(one.granularity, TOGETHER * one.mean, TOGETHER * one.most)
            request.console.print(
                f"{one.granularity}: {one.mean:.1f} cores on average, {one.most} at most", highlight=False
            )
    _plot(request, of, threshold, plans, uses)


def resnet50() -> Demands:
    """Return ResNet-50's demands on the modelled machine."""
    scenario = make_scenario(Mix("resnet50", (MixModel("resnet50", 1.0, Qos(milliseconds=QOS_MS)),)), CORES)
    return demands(scenario.models[0], share=TARGET_SHARE, unit_us=UNIT_US)


def granularities(of: Demands, blocks: Sequence[Block]) -> dict[str, Sequence[Block]]:
    """Return a model's units by granularity."""
    return {
        "layer-wise": [Block(layer, layer + 1, cores) for layer, cores in enumerate(of.layer_cores)],
        "layer blocks": blocks,
        "model-wise": [Block(0, of.layers, of.block_cores(0, of.layers))],
    }


def per_layer(plan: Sequence[Block]) -> list[int]:
    """Return the cores of each layer."""
    return [block.cores for block in plan for _ in range(block.begin, block.end)]


def use(of: Demands, granularity: str, plan: Sequence[Block]) -> Use:
    """Return how many cores a plan holds, weighted by time."""
    times_us = [of.span_us(block.begin, block.end, block.cores) + of.unit_us for block in plan]
    held = sum(block.cores * time_us for block, time_us in zip(plan, times_us, strict=True))
    return Use(granularity, held / sum(times_us), max(block.cores for block in plan))


def _plot(
    request: FigureRequest, of: Demands, threshold: float, plans: dict[str, Sequence[Block]], uses: Sequence[Use]
) -> None:
    title = f"VELTAIR's Fig. 4b and 10: ResNet-50's demands for {QOS_MS:g} ms on {CORES} modelled cores"
    figure, ((by_layer, bars),) = new_figure(title, columns=2, size=(13.5, 4.6))
    edges = range(of.layers + 1)
    by_layer.stairs(per_layer(plans["layer-wise"]), edges, fill=True, color="tab:red", alpha=0.3, label="layer-wise")
    by_layer.stairs(per_layer(plans["layer blocks"]), edges, baseline=None, color="gold", lw=2, label="layer blocks")
    by_layer.axhline(of.average_cores, color="black", label=f"Avg_C = {of.average_cores:.1f}")
    limit = of.average_cores + threshold
    by_layer.axhline(limit, color="tab:blue", ls="--", label=f"Avg_C + threshold = {limit:.1f}")
    for before, _ in pairwise(plans["layer blocks"]):
        by_layer.axvline(before.end, color="grey", lw=0.5)
    by_layer.set(xlabel="layer", ylabel="cores asked for", xlim=(0, of.layers), ylim=(0, None))
    by_layer.legend(fontsize=8)
    places = range(len(uses))
    for shift, label, values in (
        (-0.2, "mean over time", [TOGETHER * one.mean for one in uses]),
        (0.2, "at most", [TOGETHER * one.most for one in uses]),
    ):
        drawn = bars.bar([place + shift for place in places], values, width=0.4, label=label)
        bars.bar_label(drawn, fmt="%.0f")
    bars.axhline(CORES, color="grey", ls=":", lw=1)
    bars.set_xticks(list(places), [one.granularity for one in uses])
    bars.set_ylabel(f"cores asked for by {TOGETHER} ResNet-50 (Fig. 10b)")
    bars.legend(fontsize=8)
    save(figure, request.output / "veltair_fig4b_10.png")
