"""The page that compares every figure of the papers with ours: `docs/measurements/papers.md`.

    python -m benchmarks.papers all -o docs/measurements/figures --page docs/measurements/papers.md

It is made of the CSV files that the figures' modules wrote; nothing is simulated here. Each line has the paper's
number, ours on the measured machine and on the one of VELTAIR's premise, and one sentence why they differ.
"""

import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.papers import veltair_numbers as paper
from benchmarks.papers.figures import FigureRequest
from benchmarks.papers.packrat_splits import BATCHES, MEAN_SPEEDUP, MODELS, SERVED_MEAN
from benchmarks.papers.results import NOT_RUN, Results, best, range_of, ratio_text
from benchmarks.papers.veltair_latency import FILE as LATENCY_FILE
from benchmarks.papers.veltair_latency import LOADS
from benchmarks.papers.veltair_rates import BASELINE, DEFAULT, MACHINES, MIXES, RATES, VELTAIRS, read_rows
from gangway.simulator.measured import MeasuredModel, read_measured, shipped_models
from gangway.simulator.rates import RateEstimate
from gangway.simulator.scenario import make_scenario
from gangway.workload.mix import VELTAIR_QOS_MS, read_mix

OVER = "over_gang"  # column of the latencies below the highest rate
GOALS = {"all": "95 % of all", "each": "95 % of each"}


@dataclass(frozen=True)
class Claim:
    """A number of a paper. `measured`, `contended`: ours on the two machines, as text; "" where it has none."""

    figure: str
    what: str
    paper: str
    measured: str
    contended: str
    why: str


def draw(request: FigureRequest) -> None:
    """Write the page. Raises OSError where a figure was not made before."""
    assert request.page is not None
    request.page.write_text(page_text(request.output, request.page.parent))
    request.console.print(f"written {request.page}", highlight=False, soft_wrap=True)


def page_text(figures: Path, folder: Path) -> str:
    """Return the page, of the figures' data, as it lies in a folder. Raises OSError."""
    results = Results(figures)
    to_figures = os.path.relpath(figures, folder)
    pictures = {
        name: "".join(f"![{each}]({to_figures}/{each}.png)\n\n" for each in some) for name, some in PICTURES.items()
    }
    parts = [
        _head(results),
        "## VELTAIR\n",
        _claims(veltair_claims(results)),
        *(_rates(results, machine) for machine in MACHINES),
        ORDER_TEXT,
        _best_other(results),
        _below_the_rate(results),
        pictures["veltair"],
        "## Layerweaver+\n",
        _claims(layerweaver_claims(results)),
        pictures["layerweaver"],
        "## Packrat\n",
        _claims(packrat_claims(results)),
        pictures["packrat"],
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def veltair_claims(results: Results) -> list[Claim]:
    """Return the numbers of VELTAIR's text."""
    machines = {name: make_scenario(read_mix("mix"), 64, contention=one) for name, one in MACHINES.items()}
    names = list(VELTAIR_QOS_MS)
    resnet50 = {name: scenario.models[names.index("resnet50")] for name, scenario in machines.items()}
    alone = f"{1e6 / resnet50['measured'].isolated_us:.0f}"
    slowed = {
        name: one.span_us(0, one.layers, 1, 1, 1.0) / one.span_us(0, one.layers, 1) for name, one in resnet50.items()
    }
    versions = {name: [len(layer) for layer in read_measured(shipped_models()[name]).latency_us] for name in names}
    with_choice = [counts for counts in versions.values() if max(counts) > 1]
    counted = [count for counts in with_choice for count in counts]
    few = sum(count <= 3 for count in counted) / len(counted)
    layers = {(row["policy"], row["rate_per_s"]): row for row in results.rows("veltair_fig3_5a")}
    layer_wise = layers[BASELINE, "300"]
    cores = {row["policy"]: row for row in results.rows("veltair_fig14a") if row["load"] == "0.75"}
    costs = {row["policy"]: row for row in results.rows("decision_costs")}
    claims = [
        Claim("Fig. 1a", "ResNet-50 on all cores, queries per second", "about 300", alone, alone,
              "The gang's serial part comes from two cores and is pessimistic on 64."),
        Claim("Fig. 1b", "ResNet-50 on a machine full of others, over alone", "1.8", f"{slowed['measured']:.2f}",
              f"{slowed['contended']:.2f}", "At level 1, which only a full contended machine reaches."),
        Claim("Fig. 3b", "layer-wise latency at 300 per s, ms", f"{paper.LATENCY_MS[BASELINE, 300]}",
              f"{float(layer_wise['mean_ms']):.0f}", "", "300 per s is less of what our machine carries."),
        Claim("Fig. 5a", "layer-wise units in conflict at 300 per s", f"{paper.CONFLICT_RATE[BASELINE, 300]:.1%}",
              f"{float(layer_wise['conflict_rate']):.1%}", "", "For the same reason; higher rates are in the figure."),
        Claim("Fig. 7b", "layers that need three versions or fewer", "over 80 %", f"{few:.0%}", "five each",
              f"Of {len(with_choice)} networks of {len(versions)}; {sum(count > 1 for count in counted)} of "
              f"{len(counted)} layers have two."),
    ]  # fmt: skip
    for mix in MIXES:
        for policy in ("veltair", "veltair:use"):
            claims.append(
                Claim("Fig. 12", f"`{policy}` over `{BASELINE}`, {mix}", f"{paper.RATE_OVER_PLANARIA[mix]['veltair']}",
                      *results.over_baseline(policy, mix), WHY_RATES[policy])
            )  # fmt: skip
    claims.append(
        Claim("Fig. 12", f"`veltair_ac` over `{BASELINE}`, mix", f"{paper.RATE_OVER_PLANARIA['mix']['veltair_ac']}",
              *results.over_baseline("veltair_ac", "mix"),
              "Its decisions take 0.9 ms of CPU a query; versions to choose are on contended cores only.")
    )  # fmt: skip
    for policy in (*VELTAIRS, DEFAULT):
        theirs = f"{paper.LATENCY_OVER_ISOLATED.get(policy.partition(':')[0], '')}"
        measured, contended = (results.over_isolated(machine, policy) for machine in MACHINES)
        what = f"`{policy}`, mix, latency over isolated"
        claims.append(Claim("Fig. 13", what, theirs, measured, contended, WHY_LATENCY[policy]))
    for policy, gap in paper.CORE_USE_GAP.items():
        claims.append(
            Claim("Fig. 14a", f"core time of `{policy}` beyond layer-wise, 75 % load", f"{gap:+.0%}",
                  f"{float(cores[policy]['gap_layers']):+.0%}", "",
                  f"Of the layers; {float(cores[policy]['gap_held']):+.0%} with what holding cores costs.")
        )  # fmt: skip
    claims.append(
        Claim("5.5", "scheduling of a query, ms", "below 0.1",
              ", ".join(f"{float(costs[one]['us_per_query']) / 1e3:.2f} (`{one}`)" for one in ("veltair", DEFAULT)),
              "", "Python decides; its time counts on the virtual clock.")
    )  # fmt: skip
    return [one for one in claims if {one.measured, one.contended} - {"", NOT_RUN}]


WHY_RATES = {
    "veltair": "Measured cores have no contention to adapt to; on contended ones `planaria` plans as if alone.",
    "veltair:use": "It spends idle cores: wide gangs lose core time where neighbours do not disturb.",
}
WHY_LATENCY = {
    "veltair_as": "Demands are for the target, so queries take the time that they have.",
    "veltair_ac": "The same; and each layer waits for its cores.",
    "veltair": "Read as a cap, blocks never take more cores than the target needs.",
    "veltair:use": "Blocks take idle cores, as the paper's text says.",
    DEFAULT: "It spends latency up to the target where that carries more.",
}


def layerweaver_claims(results: Results) -> list[Claim]:
    """Return the numbers of Layerweaver+."""
    numbers = {row["number"]: row for row in results.rows("layerweaver_fig4_summary")}
    late = {(row["setting"][0], row["scheduler"], row["model"]): row for row in results.rows("layerweaver_fig5")
            if "ours" in row["setting"]}  # fmt: skip
    claims = [
        Claim("Fig. 4", f"{name}, throughput over the baseline", numbers[name]["paper"], numbers[name]["ours"], "",
              "The paper states neither the array's shape nor its batches.")
        for name in ("mean of layerweaver_plus", "best of layerweaver_plus")
    ]  # fmt: skip
    for scheduler, theirs in (("baseline", "80"), ("layerweaver", "10"), ("layerweaver_plus", "below 1")):
        row = late["a", scheduler, "resnet50"]
        claims.append(
            Claim("Fig. 5a", f"ResNet-50 late under `{scheduler}`, %", theirs, row["late_percent"], "",
                  "Our accelerator bears the paper's rates, so a rate of 95 % of ours is shown.")
        )  # fmt: skip
    return claims


def packrat_claims(results: Results) -> list[Claim]:
    """Return the numbers of Packrat."""
    splits = [row for row in results.rows("packrat_fig4") if row["cores"] == "16" and int(row["batch"]) in BATCHES]
    claims, means = [], []
    for model in MODELS:
        some = [row for row in splits if row["model"] == model]
        if some:
            mean, neighbours = (fmean(float(row[name]) for row in some) for name in ("speedup", "neighbours"))
            means.append(mean)
            claims.append(
                Claim("Fig. 4", f"{model}: one gang over the split, 16 cores, mean", f"{MEAN_SPEEDUP[model]}",
                      f"{mean:.2f} ({neighbours:.2f})", "",
                      "A split gains what a wide gang loses as serial. In brackets: if neighbours are the cause.")
            )  # fmt: skip
    claims.append(
        Claim("Abstract", "the same through a server, least and largest of the models", range_of(SERVED_MEAN),
              range_of(means), "", "Ours are those of Fig. 4, without a server around them.")
    )  # fmt: skip
    for row in results.rows("packrat_fig1"):
        if row["paper"]:
            what = f"{row['model']}, {row['batch']} rows, {row['threads']} threads over half as many"
            claims.append(
                Claim("Fig. 1", what, row["paper"],
                      f"{float(row['gain_over_half']):.2f}", "",
                      "All that gangs of two cores lose counts as serial, 3 %; more cores may lose more.")
            )  # fmt: skip
    same = [row["ours"] == row["paper"] for row in results.rows("packrat_table2")]
    last = results.rows("packrat_fig6")[-1]
    kept_over_ours = {
        what: float(last[f"kept for 8, {what} ms"]) / float(last[f"{DEFAULT}, {what} ms"]) for what in ("last", "mean")
    }
    claims.append(
        Claim("Table 2", "BERT: configurations alike", f"{len(same)}", f"{sum(same)} of {len(same)}", "",
              "Gangs of one core are best on 16 here: at 64 rows the paper's take 7 % longer.")
    )  # fmt: skip
    claims.append(
        Claim("Fig. 6", "bursts of 64, kept configuration over ours: until the last is answered", "1.54",
              f"{kept_over_ours['last']:.2f}", "",
              "The configuration for 8 rows loses less here. It answers its first rows early: "
              f"{kept_over_ours['mean']:.2f} in the mean.")
    )  # fmt: skip
    return claims


def _head(results: Results) -> str:
    runs = read_rows(results.folder, RATES)
    least = min(int(row["queries"]) for row in runs)
    seeds = sorted({len(one.rates_per_s) for one in results.rates.values()})
    doubts = [name for name, model in _models().items() if model.doubts]
    text = f"""# Figures of the papers

This page is generated, {datetime.date.today().isoformat()}:

    python -m benchmarks.papers all -o docs/measurements/figures --page docs/measurements/papers.md

Rates are modelled, of [loads that last](../explanation/simulator.md): {least} queries or more, found to 3 %. Seeds
behind a mean: {_listed(seeds)}. An empty cell, or one that says {NOT_RUN}, had no search. Commits of the policies:
{_commits(runs)}. The data are in `docs/measurements/figures`.

*Measured* is a machine of 64 cores scaled from two, *contended* one of
[VELTAIR's premise](../explanation/simulator.md#a-machine-of-veltairs-premise). All that gangs of two cores lose
counts as serial; numbers in brackets say what follows if it does not. Our readings: [papers](../explanation/papers.md).
"""
    if doubts:
        text += "\n" + f"Doubtful measurements: {', '.join(doubts)}.\n"
    return text


def _commits(runs: Iterable[Mapping[str, str]]) -> str:
    found: dict[str, dict[str, None]] = {}
    for row in runs:
        found.setdefault(f"`{DEFAULT}`" if row["policy"] == DEFAULT else "others", {})[row["commit"]] = None
    return "; ".join(f"{who} {', '.join(commits)}" for who, commits in found.items())


def _listed(counts: Sequence[int]) -> str:
    return " or ".join(map(str, counts))


def _models() -> Mapping[str, MeasuredModel]:
    return {name: read_measured(path) for name, path in shipped_models().items()}


def _claims(claims: Sequence[Claim]) -> str:
    """Return the table, and below it why ours differ: several claims have one reason."""
    reasons = list(dict.fromkeys(one.why for one in claims))
    header = ["claim, and why ours differs", "the paper", "measured machine", "contended machine"]
    rows = [
        [f"{one.figure}: {one.what} ({reasons.index(one.why) + 1})", one.paper, one.measured, one.contended]
        for one in claims
    ]
    if not any(one.contended for one in claims):
        header, rows = header[:3], [row[:3] for row in rows]
    table = _table(header, rows)
    return table + "\n" + "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, start=1))


def _rates(results: Results, machine: str) -> str:
    found = {mix: [results.of(machine, mix, goal) for goal in GOALS] for mix in MIXES}
    shares: dict[str, list[float]] = {}
    for mix, (in_all, _) in found.items():
        for policy, one in in_all.items():
            shares.setdefault(policy, []).append(one.mean_per_s / results.bounds[machine, mix])
    rows = [
        (f"`{policy}`", *(_both(found[mix], policy) for mix in MIXES))
        for policy in sorted(shares, key=lambda policy: -fmean(shares[policy]))
    ]
    bounds = [results.bounds.get((machine, mix)) for mix in MIXES]
    rows.append(("capacity bound", *(f"{bound:.4g}" if bound else NOT_RUN for bound in bounds)))
    title = f"### Fig. 12, {machine} machine\n\nHighest rate with {', '.join(GOALS.values())} in time, per second.\n\n"
    return title + _table(("policy", *MIXES), rows)


def _both(found: Sequence[Mapping[str, RateEstimate]], policy: str) -> str:
    return ", ".join(str(one[policy]) for one in found) if policy in found[0] else NOT_RUN


ORDER_TEXT = """
On the measured machine versions gain nothing, and whole models carry about as much as
blocks. Where cores contend, versions carry most: `protean`, of whole models, carries more than `veltair`.
"""


def _best_other(results: Results) -> str:
    rows = []
    for machine in MACHINES:
        for goal, title in GOALS.items():
            cells = []
            for mix in MIXES:
                found = dict(results.of(machine, mix, goal))
                ours = found.pop(DEFAULT, None)
                other = best(found) if ours and found else ""
                cells.append(f"{ratio_text(ours, found[other])} (`{other}`)" if ours and other else NOT_RUN)
            rows.append((f"{machine}, {title}", *cells))
    for machine in MACHINES:
        shares = [results.share_of_bound(machine, mix, "each") for mix in MIXES]
        cells = [f"{share:.2f}" if share else NOT_RUN for share in shares]
        rows.append((f"{machine}, {GOALS['each']}: share of the capacity bound", *cells))
    return f"### `{DEFAULT}` over the best other policy that was searched\n\n" + _table(("", *MIXES), rows)


def _below_the_rate(results: Results) -> str:
    places = dict.fromkeys((row["mix"], row["policy"], row["highest_per_s"]) for row in results.rows(LATENCY_FILE))
    now = {(mix, policy): one for mix in MIXES for policy, one in results.of("measured", mix, "each").items()}
    rows = [
        (mix, f"`{policy}`", _highest(float(highest), now[mix, policy]), ", ".join(
            f"{results.below_the_rate(mix, policy, load, OVER).mean_per_s:.2f}" for load in LOADS
        ))
        for mix, policy, highest in places
        if policy == DEFAULT
    ]  # fmt: skip
    seeds = len({row["seed"] for row in results.rows(LATENCY_FILE)})
    header = ("mix", "policy", "highest rate", f"at {_comma(LOADS)} of it")
    return f"""### Latency over the gang that just meets the target, measured machine

Mean of the models' mean latencies; the gang is the narrowest one on which a query alone meets its target. Rates are
the highest with {GOALS["each"]} in time, per second. Seeds: {seeds}; the other policies' latencies are in the data.

{_table(header, rows)}"""


def _highest(then_per_s: float, now: RateEstimate) -> str:
    """Return the rate that the loads are shares of, and the present one where it was searched again since."""
    then = str(RateEstimate((then_per_s,)))
    return then if abs(now.mean_per_s / then_per_s - 1) < 1e-3 else f"{then} (now {now})"


def _comma(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def headline(results: Results) -> str:
    """Return what the overview says: the default policy's rates with 95 % of each model in time."""
    shares = [results.share_of_bound("measured", mix, "each") for mix in MIXES]
    over = "; ".join(f"{machine} {results.range_over_best(machine)}" for machine in MACHINES)
    listed = ", ".join(f"{mix} {share:.2f}" for mix, share in zip(MIXES, shares, strict=True) if share)
    seeds = min(len(one.rates_per_s) for one in results.rates.values())
    return f"{over}; seeds: {seeds}; share of the capacity bound, measured: {listed}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    shown = ([cell.replace(NOT_RUN, "") for cell in row] for row in rows)
    lines = [f"|{'|'.join(cells)}|" for cells in (header, *shown)]
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join(lines) + "\n"


PICTURES: Mapping[str, Sequence[str]] = {
    "veltair": ("veltair_fig3_5a", "veltair_fig4b_10", "veltair_fig12", "veltair_fig13", "veltair_fig14a"),
    "layerweaver": ("layerweaver_fig4", "layerweaver_fig5"),
    "packrat": ("packrat_fig4", "packrat_fig6"),
}
