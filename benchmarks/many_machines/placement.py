"""Placement on 8 simulated machines of 8 cores, 20 models of the zoo, skewed and shifting load.

Seven models were measured, the others are scaled from the nearest of them by multiply-adds. Popularity follows Zipf's
law and shifts by some ranks each phase. Strategies:

- everywhere, round robin: every machine has every model, which needs the memory; each model's calls go round;
- everywhere, least calls: the same behind `gangway route`;
- dealt: models are dealt out in turn until memory is full, whatever their load; behind `gangway route`;
- placed once: by `gangway place` for the first phase;
- placed: again in each phase, by the rates of its first part; the numbers are of the rest of it.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from gangway.cluster.placement import PlacedMachine, PlacedModel, Placement, make_plan
from gangway.cluster.prediction import REQUEST_US, PredictedModel, SimulatorPredictor
from gangway.scheduler.policies.registry import DEFAULT_POLICY, make_policy
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine, Overheads
from gangway.simulator.measured import MeasuredModel, one_row, read_measured, shipped_models
from gangway.simulator.scaling import scale_model
from gangway.simulator.scenario import level_per_demand
from gangway.workload.arrivals import Arrivals, poisson
from gangway.workload.mix import Mix, MixModel
from gangway.workload.qos import Qos
from testing.report import Row, option_parser, start_report

MACHINES, CORES = 8, 8
TARGET = Qos(multiple=3.0)
OVERHEADS = Overheads(REQUEST_US / 2, REQUEST_US / 2)
MIB = 1 << 20
ACTIVATIONS_MIB = 20
SECONDS_TO_DECIDE = 5.0
# Name: the measured model it is scaled from, multiply-adds over that one's, parameters in millions.
MODELS = {
    "resnet18": ("resnet50", 0.44, 11.7),
    "resnet34": ("resnet50", 0.89, 21.8),
    "resnet50": ("resnet50", 1.0, 25.6),
    "resnet101": ("resnet50", 1.9, 44.5),
    "googlenet": ("googlenet", 1.0, 7.0),
    "inception_v3": ("googlenet", 3.8, 23.8),
    "mobilenetv2": ("mobilenetv2", 1.0, 3.5),
    "efficientnet_b0": ("efficientnet_b0", 1.0, 5.3),
    "alexnet": ("tiny_yolov2", 0.2, 61.0),
    "vgg16": ("tiny_yolov2", 4.4, 138.0),
    "ssd_resnet34": ("ssd_resnet34", 1.0, 20.0),
    "tiny_yolov2": ("tiny_yolov2", 1.0, 15.9),
    "bert_base": ("bert_large", 0.28, 109.0),
    "bert_large": ("bert_large", 1.0, 335.0),
    "xlnet_base": ("bert_large", 0.4, 117.0),
    "gpt2": ("bert_large", 0.15, 124.0),
    "mlp": ("mobilenetv2", 0.01, 0.1),
    "simple": ("mobilenetv2", 0.002, 0.1),
    "simple_image": ("mobilenetv2", 0.005, 0.1),
    "simple_identity": ("mobilenetv2", 0.002, 0.1),
}


@dataclass(frozen=True)
class Phase:
    """Requests of all models. `rates`: by model."""

    rates: Mapping[str, float]
    arrivals: Arrivals


Dispatch = Callable[[Arrivals, Placement, SimulatorPredictor, Sequence[str]], list[np.ndarray]]


def main() -> int:
    """Run the benchmark; status 0 if every target is met, else 1."""
    parser = option_parser("placement of 20 models on 8 machines of 8 cores")
    parser.add_argument("--phases", type=int, default=4, help="between which popularity shifts")
    parser.add_argument("--requests", type=int, default=12_000, help="of each phase")
    parser.add_argument("--load", type=float, default=0.7, help="of what all cores could do")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the models' shares of the work")
    parser.add_argument("--memory-mib", type=int, default=1536, help="of a machine; all models need 4700")
    options = parser.parse_args()
    report = start_report("placement on simulated machines")
    names = tuple(MODELS)
    predictor = _predictor(names)
    phases = [_phase(names, predictor, number, options) for number in range(options.phases)]
    machines = [PlacedMachine(f"m{number}", CORES, options.memory_mib * MIB) for number in range(MACHINES)]
    everywhere = {machine.name: frozenset(names) for machine in machines}
    dealt = _dealt(names, machines)
    once: Placement = {}
    plan: Placement = dealt
    decisions: list[Row] = []
    strategies: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for number, phase in enumerate(phases):
        models = [PlacedModel(name, phase.rates[name], _memory_bytes(name)) for name in names]
        begin_s, cpu_s = time.monotonic(), time.process_time()
        made = make_plan(models, machines, plan, _predictor(names))
        wall_s, cpu_s = time.monotonic() - begin_s, time.process_time() - cpu_s
        plan, once = made.placement, once or made.placement
        total = sum(phase.rates[name] * made.after[name] for name in names) / sum(phase.rates.values())
        decisions.append({"phase": number + 1, "moves": len(made.moves), "replicas": sum(map(len, plan.values())),
                          "predicted": total, "CPU s": cpu_s, "wall s": wall_s})  # fmt: skip
        for title, placement, dispatch in (
            ("everywhere, round robin", everywhere, round_robin),
            ("everywhere, least calls", everywhere, least_calls),
            ("dealt", dealt, least_calls),
            ("placed once", once, least_calls),
            ("placed", plan, least_calls),
        ):
            strategies.setdefault(title, []).append(_in_time(phase.arrivals, placement, dispatch, predictor, names))
    report.table("decisions", decisions)
    shares = {title: _shares(results, len(names)) for title, results in strategies.items()}
    rows: list[Row] = [
        {"model": name, **{title: of_model[index] for title, (of_model, _) in shares.items()}}
        for index, name in enumerate(names)
    ]
    rows.append({"model": "all requests", **{title: total for title, (_, total) in shares.items()}})
    rows.append({"model": "mean of models", **{title: fmean(of_model) for title, (of_model, _) in shares.items()}})
    rows.append({"model": "worst model", **{title: min(of_model) for title, (of_model, _) in shares.items()}})
    report.table("share of requests in time", rows)
    report.table("by phase, all models", [
        {"strategy": title, **{f"phase {n + 1}": float(in_time.mean()) for n, (_, in_time) in enumerate(results)}}
        for title, results in strategies.items()
    ])  # fmt: skip
    report.target("CPU seconds to decide", max(float(row["CPU s"]) for row in decisions), SECONDS_TO_DECIDE)
    report.goal("placed over dealt, share in time", shares["placed"][1] - shares["dealt"][1], 0.0)
    report.goal("placed over placed once", shares["placed"][1] - shares["placed once"][1], 0.0)
    return report.finish(options.json)


def round_robin(
    arrivals: Arrivals, placement: Placement, _: SimulatorPredictor, names: Sequence[str]
) -> list[np.ndarray]:
    """Return which arrivals each machine gets if each model's go round its machines."""
    machines = list(placement)
    chosen = np.empty(len(arrivals), dtype=np.int64)
    for index, name in enumerate(names):
        hosts = np.array([number for number, machine in enumerate(machines) if name in placement[machine]])
        of_model = np.flatnonzero(arrivals.models == index)
        chosen[of_model] = hosts[np.arange(len(of_model)) % len(hosts)] if len(hosts) else -1
    return [np.flatnonzero(chosen == number) for number in range(len(machines))]


def least_calls(
    arrivals: Arrivals, placement: Placement, predictor: SimulatorPredictor, names: Sequence[str]
) -> list[np.ndarray]:
    """Return which arrivals each machine gets if each goes to where fewest calls of its model are, as HAProxy does.

    When a call ends is estimated: a machine is a queue that its cores work off together.
    """
    machines = list(placement)
    hosts = [[number for number, machine in enumerate(machines) if name in placement[machine]] for name in names]
    work_us = [predictor.work_us(name) for name in names]
    free_us = [0.0] * len(machines)
    ends: dict[tuple[int, int], list[float]] = {}
    chosen: list[list[int]] = [[] for _ in machines]
    turn = 0
    for index, (at_us, model) in enumerate(zip(arrivals.times_us.tolist(), arrivals.models.tolist(), strict=True)):
        counts = []
        for host in hosts[model]:
            open_us = ends.setdefault((model, host), [])
            while open_us and open_us[0] <= at_us:
                open_us.pop(0)
            counts.append(len(open_us))
        if not counts:
            continue
        turn += 1  # of several with as few, one after the other
        places = [host for host, count in zip(hosts[model], counts, strict=True) if count == min(counts)]
        host = places[turn % len(places)]
        free_us[host] = max(free_us[host], at_us) + work_us[model] / CORES
        ends[model, host].append(free_us[host])
        chosen[host].append(index)
    return [np.array(indices, dtype=np.int64) for indices in chosen]


def _in_time(
    arrivals: Arrivals, placement: Placement, dispatch: Dispatch, predictor: SimulatorPredictor, names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return models [Q] and whether each was in time [Q]; a call that no machine takes is not."""
    in_time = np.zeros(len(arrivals), dtype=np.bool_)
    targets_us = np.array([predictor.times(name, CORES).target_us for name in names])
    for chosen in dispatch(arrivals, placement, predictor, names):
        if not len(chosen):
            continue
        part = Arrivals(arrivals.times_us[chosen], arrivals.models[chosen])
        result = simulate(
            make_policy(DEFAULT_POLICY),
            _profiles(names, predictor),
            part,
            Machine(CORES, OVERHEADS, level_per_demand(CORES)),
        )
        outcomes = result.outcomes
        in_time[chosen] = outcomes.answered & (outcomes.latency_us <= targets_us[outcomes.models])
    return arrivals.models, in_time


def _shares(results: Sequence[tuple[np.ndarray, np.ndarray]], count: int) -> tuple[list[float], float]:
    models, in_time = (np.concatenate(each) for each in zip(*results, strict=True))
    return [float(in_time[models == index].mean()) for index in range(count)], float(in_time.mean())


def _phase(names: Sequence[str], predictor: SimulatorPredictor, number: int, options: object) -> Phase:
    """Return rates and arrivals. Zipf's law is of the work, so that no model is negligible or everything."""
    zipf, load, requests = options.zipf, options.load, options.requests  # type: ignore[attr-defined]
    order = np.random.Generator(np.random.PCG64(7)).permutation(len(names))
    ranks = (order + 7 * number) % len(names) + 1
    work = 1 / ranks**zipf
    work *= load * MACHINES * CORES / work.sum()  # cores that each model keeps busy
    # A request of some microseconds is none to place: 200 requests a second at most.
    rates = {n: min(200.0, float(w) * 1e6 / predictor.work_us(n)) for n, w in zip(names, work, strict=True)}
    mix = Mix("phase", tuple(MixModel(name, rate) for name, rate in rates.items()))
    return Phase(rates, poisson(mix, sum(rates.values()), requests, seed=number + 1))


def _predictor(names: Sequence[str]) -> SimulatorPredictor:
    """Return one that has predicted nothing yet."""
    return SimulatorPredictor({name: PredictedModel(_measured(name), TARGET) for name in names})


def _dealt(names: Sequence[str], machines: Sequence[PlacedMachine]) -> Placement:
    """Deal the models out until nothing fits any more."""
    placement: dict[str, frozenset[str]] = {machine.name: frozenset() for machine in machines}
    free = {machine.name: machine.memory_bytes for machine in machines}
    turn, is_dealt = 0, True
    while is_dealt:
        is_dealt = False
        for name in names:
            for step in range(len(machines)):
                machine = machines[(turn + step) % len(machines)].name
                if name not in placement[machine] and free[machine] >= _memory_bytes(name):
                    placement[machine] |= {name}
                    free[machine] -= _memory_bytes(name)
                    turn, is_dealt = turn + step + 1, True
                    break
    return placement


def _memory_bytes(name: str) -> int:
    return int(MODELS[name][2] * 4e6) + ACTIVATIONS_MIB * MIB


def _measured(name: str) -> MeasuredModel:
    """Return a model's times: measured, or those of another one scaled."""
    if name not in _known:
        source, ratio, _ = MODELS[name]
        model = one_row(read_measured(shipped_models()[source]))
        _known[name] = replace(
            model,
            model_name=name,
            latency_us=tuple(
                tuple(tuple(time_us * ratio for time_us in row) for row in layer) for layer in model.latency_us
            ),
            memory_us=tuple(time_us * ratio for time_us in model.memory_us),
            compute_us=tuple(time_us * ratio for time_us in model.compute_us),
            batches=(1,),
        )
    return _known[name]


def _profiles(names: Sequence[str], predictor: SimulatorPredictor) -> Mapping[int, ModelProfile]:
    if not _scaled:
        for index, name in enumerate(names):
            _scaled[index] = scale_model(_measured(name), CORES, index, predictor.times(name, CORES).target_us)
    return _scaled


_known: dict[str, MeasuredModel] = {}
_scaled: dict[int, ModelProfile] = {}

if __name__ == "__main__":
    sys.exit(main())
