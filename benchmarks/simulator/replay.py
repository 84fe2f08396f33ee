"""One trace, live through real gRPC on two cores and simulated: how far the two are apart, and what a request costs.

The simulator is told nothing of the live runs but what a lone request takes on this machine now (medians): layers are
the measured ones that come with it, stretched to that, and what is left is the way to the scheduler and back. Lone
requests are sent before and after every run: where they differ the machine's speed has changed (`drift`). The CPU that
front end, scheduler and client take from the workers in a run is counted. The trace runs several times; each query
counts with its median. `others`: the share of the cores that other processes used meanwhile. Where it is not near zero
nothing can be compared.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from benchmarks.simulator.live_run import LiveRun, Lone, Replayed
from gangway.artifact.profile import LayerProfile, Profile, ProfiledMachine, whole_machine_id, write_profile
from gangway.clients.connection import ServerConnection
from gangway.scheduler.policies.registry import DEFAULT_POLICY, make_policy
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine, Overheads
from gangway.simulator.measured import MeasuredModel, one_row, read_measured, shipped_models
from gangway.simulator.results import Result
from gangway.simulator.scaling import scale_model
from gangway.simulator.scenario import WAKE_UP_US, level_per_demand
from gangway.workload.arrivals import Arrivals, poisson
from gangway.workload.mix import Mix, MixModel
from gangway.workload.outcomes import OutcomeRow, Outcomes, summarise
from testing.live_server import live_server
from testing.report import add_repository_option, option_parser, start_report
from testing.repository import compile_model, ensure_zoo

CORES = 2
MIX = Mix("replayed", (MixModel("mobilenetv2", 6.0), MixModel("resnet50", 1.0)))
QOS_MULTIPLE = 5
TARGET = "target"
TRIES = 3  # for each undisturbed run that is wanted
_Around: TypeAlias = tuple[Mapping[str, Lone], ...]  # what lone requests took before and after a run


@dataclass(frozen=True)
class Replay:
    """Both sides of the comparison; `live` sums up the runs that were chosen."""

    lone: Mapping[str, Lone]
    rate_per_s: float
    runs: Sequence[LiveRun]
    live: OutcomeRow
    simulated: OutcomeRow
    result: Result


def replay(
    artifacts: Mapping[str, Path],
    models: Path,
    folder: Path,
    policy: str = DEFAULT_POLICY,
    load: float = 0.4,
    queries: int = 80,
    runs: int = 3,
    others_at_most: float = float("inf"),
    drift_at_most: float = float("inf"),
) -> Replay | None:
    """Serve the trace live, until `runs` were undisturbed and repeat each other, and simulate it.

    None if other processes were at work from the start or in too many runs, or if runs of the same trace differ by more
    than `drift_at_most`. Others' use, lone requests and repeated runs tell, never what the simulator says.

    `artifacts`: compiled models by name, `models`: the repository with their ONNX files, `folder`: an empty one.
    `load`: queries a second, times what a lone one takes on average.
    """
    measured = {name: one_row(read_measured(shipped_models()[name])) for name in MIX.names}
    scaled = [scale_model(measured[name], CORES, index) for index, name in enumerate(MIX.names)]
    scaled = [replace(model, qos_us=QOS_MULTIPLE * model.isolated_us) for model in scaled]
    cache = folder / "cache"
    cache.mkdir()
    for name, artifact in artifacts.items():
        (cache / artifact.name).symlink_to(artifact)
        write_profile(cache, _profile_of(measured[name], artifact.name))
    repository = _repository(folder / "models", models, scaled)
    flags = [f"--cache-dir={cache}", f"--scheduler={policy}", "--cores=0,1"]
    with live_server(repository, flags) as server, ServerConnection(server.url, 10) as connection:
        live = Replayed(server, connection, MIX.names)
        meter = live.meter()
        lone = live.all_lone(scaled)
        if meter.others() > others_at_most:
            return None
        mean_us = float(np.dot(MIX.shares, [lone[name].compute_us + lone[name].way_us for name in MIX.names]))
        arrivals = poisson(MIX, load * 1e6 / mean_us, queries, seed=1)
        seen_lone = [lone]
        outcomes: Outcomes | None = None
        done: list[LiveRun] = []
        quiet: list[tuple[LiveRun, _Around]] = []  # with the lone requests around each
        steady: Sequence[tuple[LiveRun, _Around]] = ()
        while not steady and len(done) < TRIES * runs:
            outcomes, run = live.replay(arrivals)
            seen_lone.append(live.all_lone(scaled))
            done.append(replace(run, drift=_drift(*seen_lone[-2:])))
            if done[-1].others <= others_at_most and done[-1].drift <= drift_at_most:
                quiet.append((done[-1], tuple(seen_lone[-2:])))
                steady = _steady(quiet, runs, drift_at_most)
    if outcomes is None or not steady:
        return None
    chosen = [run for run, _ in steady]
    lone_around = [lone for _, around in steady for lone in around]
    lone = _medians(lone_around)
    way_us = float(np.median([each.way_us for seen in lone_around for each in seen.values()]))
    result = _simulate(policy, measured, scaled, lone, way_us, arrivals, chosen)
    targets = {TARGET: [model.qos_us for model in scaled]}
    seen = replace(outcomes, latency_us=np.median([run.latency_us for run in chosen], axis=0))
    return Replay(
        lone,
        load * 1e6 / mean_us,
        done,
        summarise(seen, targets).total,
        summarise(result.outcomes, targets).total,
        result,
    )


def _steady(
    quiet: Sequence[tuple[LiveRun, _Around]], runs: int, spread_at_most: float
) -> Sequence[tuple[LiveRun, _Around]]:
    """Return so many runs of the same trace whose mean latencies are nearest; none if they differ by more than that."""
    by_mean = sorted(quiet, key=lambda each: float(each[0].latency_us.mean()))
    windows = [by_mean[first : first + runs] for first in range(len(by_mean) - runs + 1)]

    def spread(window: Sequence[tuple[LiveRun, _Around]]) -> float:
        return float(window[-1][0].latency_us.mean() / window[0][0].latency_us.mean()) - 1

    nearest = min(windows, key=spread, default=())
    return nearest if nearest and spread(nearest) <= spread_at_most else ()


def _drift(before: Mapping[str, Lone], after: Mapping[str, Lone]) -> float:
    """Return by how much the machine's speed has changed between two measurements of lone requests."""
    return max(abs(after[name].compute_us / lone.compute_us - 1) for name, lone in before.items())


def _medians(seen: Sequence[Mapping[str, Lone]]) -> dict[str, Lone]:
    return {
        name: Lone(
            float(np.median([each[name].compute_us for each in seen])),
            float(np.median([each[name].way_us for each in seen])),
        )
        for name in MIX.names
    }


def _simulate(
    policy: str,
    measured: Mapping[str, MeasuredModel],
    scaled: Sequence[ModelProfile],
    lone: Mapping[str, Lone],
    way_us: float,
    arrivals: Arrivals,
    runs: Sequence[LiveRun],
) -> Result:
    models = {}
    for index, model in enumerate(scaled):
        factor = lone[model.name].compute_us / _lone_compute_us(policy, model)
        models[index] = scale_model(_stretched(measured[model.name], factor), CORES, index, model.qos_us)
    overheads = Overheads(
        submit_us=way_us / 2,
        answer_us=way_us / 2,
        leave_us=WAKE_UP_US,
        grow_us=WAKE_UP_US,
        stolen_us=float(np.median([run.overhead_us for run in runs])),
    )
    machine = Machine(CORES, overheads, level_per_demand(CORES))
    return simulate(make_policy(policy), models, arrivals, machine)


def _lone_compute_us(policy: str, model: ModelProfile) -> float:
    """Return how long the policy takes for a lone query on the simulated machine: on as many cores as it likes."""
    alone = Arrivals(np.zeros(1), np.zeros(1, np.int64))
    result = simulate(make_policy(policy), {0: replace(model, model_id=0)}, alone, Machine(CORES))
    return float(result.outcomes.latency_us[0])


def _stretched(model: MeasuredModel, factor: float) -> MeasuredModel:
    times = tuple(tuple(tuple(t * factor for t in version) for version in layer) for layer in model.latency_us)
    return replace(model, latency_us=times)


def _repository(folder: Path, source: Path, models: Sequence[ModelProfile]) -> Path:
    for model in models:
        (folder / model.name / "1").mkdir(parents=True)
        onnx_file = (source / model.name / "1" / "model.onnx").resolve()
        (folder / model.name / "1" / "model.onnx").symlink_to(onnx_file)
        qos = f'parameters {{ key: "qos_ms" value: {{ string_value: "{(model.qos_us or 0) / 1000:.3f}" }} }}'
        (folder / model.name / "config.pbtxt").write_text(f'backend: "onnxruntime"\nmax_batch_size: 8\n{qos}\n')
    return folder


def _profile_of(model: MeasuredModel, key: str) -> Profile:
    """Return the same for the live scheduler."""
    layers = tuple(
        LayerProfile("layer", tuple(tuple((t,) for t in version) for version in versions), memory, compute, (), ())
        for versions, memory, compute in zip(model.latency_us, model.memory_us, model.compute_us, strict=True)
    )
    isolated = tuple((sum(versions[0][i] for versions in model.latency_us),) for i in range(len(model.cores)))
    machine = ProfiledMachine(whole_machine_id(model.target), model.cpu, CORES, model.target, 1.0, 1.0)
    return Profile(
        key, model.model_name, machine, model.cores, (1,), layers, isolated, isolated, (), 0, (9,), 0.01, 1.0
    )


def main() -> int:
    """Run the benchmark."""
    parser = option_parser("replay one trace live and simulated, on two cores")
    add_repository_option(parser)
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="of server and simulator")
    parser.add_argument("--load", type=float, default=0.4, help="queries a second times a lone one's latency")
    parser.add_argument("--queries", type=int, default=120, help="of the trace")
    parser.add_argument("--runs", type=int, default=3, help="of the trace")
    options = parser.parse_args()
    report = start_report("a trace, live and simulated")
    models = ensure_zoo(options.repository, MIX.names).resolve()
    artifacts = {name: compile_model(models, name) for name in MIX.names}
    with tempfile.TemporaryDirectory() as folder:
        outcome = replay(artifacts, models, Path(folder), options.policy, options.load, options.queries, options.runs)
    assert outcome is not None
    report.table("a lone request, us", [{"model": name, **vars(lone)} for name, lone in outcome.lone.items()])
    report.table(
        "live runs",
        [
            {
                "mean ms": run.latency_us.mean() / 1000,
                "other CPU us/query": run.overhead_us,
                "others": run.others,
                "drift": run.drift,
            }
            for run in outcome.runs
        ],
    )
    rows = [("live, medians", outcome.live), ("simulated", outcome.simulated)]
    report.table(
        f"{options.policy}, {outcome.rate_per_s:.1f} queries a second",
        [
            {
                "": name,
                "mean ms": (row.mean_us or 0) / 1000,
                "p50 ms": (row.p50_us or 0) / 1000,
                "p95 ms": (row.p95_us or 0) / 1000,
                "in time": row.satisfied[TARGET] or 0,
            }
            for name, row in rows
        ],
    )
    real, model = outcome.live, outcome.simulated
    report.target("mean latency, simulated over live - 1", abs((model.mean_us or 0) / (real.mean_us or 1) - 1), 0.15)
    report.target(
        "share in time, difference", abs((model.satisfied[TARGET] or 0) - (real.satisfied[TARGET] or 0)), 0.05
    )
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
