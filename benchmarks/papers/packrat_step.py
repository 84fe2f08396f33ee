"""Fig. 6 of Packrat: Inception v3 on 16 cores, and the load goes from bursts of 8 requests to bursts of 64.

A burst comes whenever the configuration for 8 rows has done 64, and a quarter of that time later. Compared are that
configuration kept; the paper's change of it, begun 10 s after the step and done in 5 s, with the latencies that the
paper saw meanwhile; and the `gangway` policy in the simulator, for which a configuration is what it does with a batch.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.papers.figures import Csv, FigureRequest, new_figure, save
from benchmarks.papers.packrat_server import Change, PackratServer, by_burst
from benchmarks.papers.packrat_splits import CHANGE_GAIN, CHANGE_S, CHANGE_SLOWDOWN, profile_of
from gangway.scheduler.batching.planner import split_table
from gangway.scheduler.policies.registry import DEFAULT_POLICY, make_policy
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.batching import Batching
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine
from gangway.simulator.measured import MeasuredModel, read_measured, shipped_models
from gangway.simulator.scenario import SPARE_CORES, level_per_demand
from gangway.workload.arrivals import Arrivals, Floats

MODEL = "inception_v3"
CORES = 16
SMALL, LARGE = 8, 64
STEP_S, CHANGE_AT_S, END_S = 8.0, 18.0, 40.0
ROOM = 1.25  # the bursts' interval over what 64 rows take in the configuration for 8
KEPT, CHANGED = f"kept for {SMALL}", "changed in 5 s"


@dataclass(frozen=True)
class Bursts:
    """When so many requests come."""

    times_us: list[float]
    sizes: list[int]

    @property
    def requests_us(self) -> Floats:
        """Each request's arrival."""
        return np.repeat(np.array(self.times_us), self.sizes)


def draw(request: FigureRequest) -> None:
    """Write packrat_fig6.csv and .png. Raises OSError."""
    models = shipped_models()
    if MODEL not in models:
        return
    bursts, lines = step(read_measured(models[MODEL]))
    header = ("time_s", "requests", *(f"{name}, {what} ms" for name in lines for what in ("mean", "last")))
    with Csv(request.output / "packrat_fig6.csv", header) as file:
        for index, (time_us, size) in enumerate(zip(bursts.times_us, bursts.sizes, strict=True)):
            file.write(time_us / 1e6, size, *(each / 1e3 for line in lines.values() for each in line[index]))
    text = ", ".join(f"{name} {line[-1][0] / 1e3:.0f} / {line[-1][1] / 1e3:.0f}" for name, line in lines.items())
    gain = lines[KEPT][-1][1] / lines[DEFAULT_POLICY][-1][1]
    request.console.print(f"{MODEL}, bursts of {LARGE}, ms at the end, mean / last: {text}", highlight=False)
    request.console.print(f"{KEPT} over {DEFAULT_POLICY}, last: {gain:.2f} (paper: {CHANGE_GAIN})", highlight=False)
    _plot(request, bursts, lines)


def step(model: MeasuredModel) -> tuple[Bursts, dict[str, list[tuple[float, float]]]]:
    """Return the bursts, and the mean and longest latency of each by what serves them, in microseconds."""
    profile = profile_of(model, CORES)
    interval_us = ROOM * (LARGE // SMALL) * split_table(profile, CORES, LARGE).latency_us(CORES, SMALL)
    times_us = np.arange(0, END_S * 1e6, interval_us).tolist()
    bursts = Bursts(times_us, [SMALL if time_us < STEP_S * 1e6 else LARGE for time_us in times_us])
    change = Change(LARGE, CHANGE_AT_S * 1e6, (CHANGE_AT_S + CHANGE_S) * 1e6, sum(CHANGE_SLOWDOWN) / 2)
    lines = {
        name: PackratServer(profile, CORES, SMALL, change_of).serve(bursts.requests_us)
        for name, change_of in ((KEPT, None), (CHANGED, change))
    }
    lines[DEFAULT_POLICY] = simulated(profile, bursts)
    return bursts, {name: by_burst(line, bursts.sizes) for name, line in lines.items()}


def simulated(profile: ModelProfile, bursts: Bursts) -> list[float]:
    """Return each request's latency with the policy, from scheduler to scheduler: Packrat's has no server around it."""
    machine = Machine(CORES, SPARE_CORES, level_per_demand(CORES))
    arrivals = Arrivals(bursts.requests_us, np.zeros(sum(bursts.sizes), dtype=np.int64))
    result = simulate(make_policy(DEFAULT_POLICY), {0: profile}, arrivals, machine, batching=Batching(LARGE))
    latencies_us: list[float] = (result.outcomes.latency_us - SPARE_CORES.submit_us - SPARE_CORES.answer_us).tolist()
    return latencies_us


def _plot(request: FigureRequest, bursts: Bursts, lines: dict[str, list[tuple[float, float]]]) -> None:
    title = f"Packrat's Fig. 6: {MODEL} on {CORES} modelled cores, from bursts of {SMALL} to bursts of {LARGE} requests"
    figure, ((axes,),) = new_figure(title, size=(9, 4.4))
    seconds = [time_us / 1e6 for time_us in bursts.times_us]
    for (name, line), colour in zip(lines.items(), ("black", "tab:blue", "tab:green"), strict=True):
        axes.plot(seconds, [longest_us / 1e3 for _, longest_us in line], ".-", ms=3, lw=1, color=colour, label=name)
    axes.axvline(STEP_S, color="grey", ls=":", lw=1)
    axes.set(xlabel="seconds", ylabel="until the last of a burst is answered, ms", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, request.output / "packrat_fig6.png")
