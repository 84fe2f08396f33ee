"""The pictures of Fig. 12 and 13 of VELTAIR: highest rates, and latencies at them. Each is one panel."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.papers.figures import COLOURS, new_figure, save
from benchmarks.papers.veltair_numbers import LATENCY_OVER_ISOLATED
from gangway.simulator.rates import RateEstimate

SHOWN = ("gangway", "protean", "veltair", "fixed_block:11", "model_fcfs", "planaria")
MACHINES = ("measured", "contended")
BAR_WIDTH = 0.14
OTHER_COLOUR = "tab:pink"


def plot_rates(
    rates: Mapping[tuple[str, str, str, str], RateEstimate], bounds: Mapping[tuple[str, str], float], folder: Path
) -> None:
    """Draw the rates with 95 % of each model in time, as shares of the capacity bound. Raises OSError.

    `rates`: by machine, mix, policy and goal. `bounds`: by machine and mix.
    """
    places = sorted(bounds, key=lambda place: MACHINES.index(place[0]))
    if not places:
        return
    figure, panels = new_figure("Highest rate over the capacity bound, 64 modelled cores", size=(7.0, 4.6))
    axes = panels[0][0]
    for number, policy in enumerate(SHOWN):
        found = {
            spot: (rates[machine, mix, policy, "each"], bounds[machine, mix])
            for spot, (machine, mix) in enumerate(places)
            if (machine, mix, policy, "each") in rates
        }
        spots = [spot + BAR_WIDTH * (number - (len(SHOWN) - 1) / 2) for spot in found]
        shares = [one.mean_per_s / bound for one, bound in found.values()]
        halves = [one.half_per_s / bound if len(one.rates_per_s) > 1 else 0.0 for one, bound in found.values()]
        axes.bar(spots, shares, width=BAR_WIDTH, color=COLOURS.get(policy, OTHER_COLOUR), yerr=halves, label=policy)
    axes.set_xticks(range(len(places)), [f"{mix}\n{machine}" for machine, mix in places], fontsize=9)
    axes.set_ylabel("95 % of each model in time", fontsize=11)
    axes.set_ylim(0, 1)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=10, ncols=3, loc="upper center")
    save(figure, folder / "veltair_fig12.png")


def plot_latencies(rows: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Draw the latency over the isolated one, mean of the models of `mix`, beside the paper's. Raises OSError."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["mix"] == "mix" and (row["policy"] == "gangway" or row["policy"].startswith("veltair")):
            of_machine = found.setdefault(row["machine"], {})
            of_machine.setdefault(row["policy"], []).append(float(row["over_isolated"]))
    if not found:
        return
    figure, panels = new_figure("Mean latency over the isolated one at the highest rate, mix", size=(7.0, 4.2))
    axes = panels[0][0]
    policies = list(dict.fromkeys(policy for of_machine in found.values() for policy in of_machine))
    for number, (machine, of_machine) in enumerate(found.items()):
        spots = [policies.index(policy) + 0.27 * (number - 0.5) for policy in of_machine]
        bars = axes.bar(spots, list(map(fmean, of_machine.values())), width=0.27, label=f"{machine} machine")
        axes.bar_label(bars, fmt="%.1f", fontsize=10)
    theirs = {policy: LATENCY_OVER_ISOLATED.get(policy.partition(":")[0]) for policy in policies}
    known = [(policies.index(policy), value) for policy, value in theirs.items() if value]
    if known:
        axes.plot(*zip(*known, strict=True), "*", color="black", ms=12, label="the paper")
    axes.set_xticks(range(len(policies)), policies, fontsize=10)
    axes.axhline(1.0, color="grey", ls=":", lw=1)
    axes.legend(fontsize=10)
    save(figure, folder / "veltair_fig13.png")
