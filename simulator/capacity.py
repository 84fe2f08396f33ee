"""`gangway capacity`: whether a machine carries a load within its latency targets, and how many cores it takes.

A front of profiles and the simulator: the live scheduler's policy runs on a virtual clock over the measured models.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from gangway.artifact.cache import add_cache_dir
from gangway.artifact.precision import BF16, DEADLINE, FP32
from gangway.artifact.profile import ProfileError
from gangway.base.command_line import CommandParser
from gangway.base.console import Console, ProgressBars, Table
from gangway.scheduler.policies.registry import DEFAULT_POLICY
from gangway.simulator.batching import Batching
from gangway.simulator.machine import Overheads
from gangway.simulator.measured import (
    CachedModel,
    MeasuredModel,
    cached_models,
    read_measured,
    shipped_models,
    with_files,
)
from gangway.simulator.rates import (
    QUERIES,
    TARGET,
    RateEstimate,
    RateGoal,
    capacity_bound,
    estimate_rate,
    share_in_time,
)
from gangway.simulator.runs import run_steady
from gangway.simulator.scenario import OVERHEADS, Requests, Scenario, make_scenario
from gangway.workload.mix import Mix, MixModel
from gangway.workload.outcomes import OutcomeRow
from gangway.workload.qos import WorkloadError, parse_qos

DESCRIPTION = """Say whether so many cores carry a load, at what highest rates, and how many cores it takes. Models are
those that `gangway profile` or a server has measured on this machine, and those that come with the simulator."""
EPILOG = """examples:
  gangway capacity resnet50=20@3x mobilenetv2=60@15
  gangway capacity resnet50=20@3x mobilenetv2=60@15 --cores 8

A target is a number of milliseconds, or a multiple of the model's latency alone. A model without one waits for the
others.

exit status: 0 the load is carried, 1 it is not, 2 wrong usage"""
SEEDS: Final = 3
MOST_CORES: Final = 256
PLANNED: Final = 2 / 3  # of what the simulator finds: what the machine does beside, and how arrivals differ from it
BUSY: Final = 0.95  # of all cores, beyond which no machine carries a load for long


@dataclass(frozen=True)
class ModelAnswer:
    """What becomes of a model's requests at the given rate. `in_time`: their share; None without a target."""

    name: str
    rate_per_s: float
    isolated_us: float
    target_us: float | None
    in_time: float | None
    p50_us: float | None
    p95_us: float | None
    p99_us: float | None


@dataclass(frozen=True)
class CapacityAnswer:
    """What a machine makes of a load.

    `highest`: the highest load that it carries, as a multiple of this one, for each of several seeds. `planned`: the
    multiple to plan with. `cores_needed`: None beyond MOST_CORES. `doubts`: why it may be wrong.
    """

    cores: int
    models: tuple[ModelAnswer, ...]
    carried: bool
    core_use: float
    highest: RateEstimate
    planned: float
    cores_needed: int | None
    doubts: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status. Wrong arguments exit with 2 (argparse)."""
    options = _parser().parse_args(argv)
    rate_per_s = math.fsum(model.weight or 0.0 for model in options.load)
    console = Console(width=min(80, Console().width) if sys.stdout.isatty() else 80)
    try:
        mix = Mix("load", tuple(options.load))
        is_bf16 = options.precision == BF16
        of_files = [read_measured(path) for path in options.profile]
        cached_fp32, cached_bf16 = cached_models(options.cache_dir), cached_models(options.cache_dir, BF16)
        in_fp32, in_bf16 = with_files(cached_fp32, of_files), with_files(cached_bf16, of_files if is_bf16 else [])
        measured = {**in_fp32, **in_bf16} if is_bf16 else in_fp32
        either = {name: in_bf16[name] for name in mix.names if name in in_bf16 and options.precision == DEADLINE}
        scenario = partial(_scenario, mix, measured, either, OVERHEADS[options.overheads], options.batch)
        cached = cached_bf16 if is_bf16 else cached_fp32
        print(_sources(options.cache_dir, cached, of_files, mix.names), file=sys.stderr)
        with ProgressBars(Console(stderr=True)) as bars:
            task = bars.add_task("simulate", total=None)
            answer = find_capacity(scenario, options.cores, rate_per_s, options.goal / 100, options.queries)
            bars.update(task, total=1, completed=1)
    except (WorkloadError, ProfileError, OSError) as error:
        print(f"gangway capacity: {error}", file=sys.stderr)
        return 1
    profiled = {FP32: in_fp32, BF16: in_bf16}
    strangers = (
        f"{name} is not measured in {precision} on this machine; `gangway profile FILE` measures it"
        for precision in ((FP32, BF16) if options.precision == DEADLINE else (options.precision,))
        for name in mix.names
        if name not in profiled[precision]
    )
    of_cache = {name: cached[name] for name in mix.names if name in cached and measured[name] is cached[name].model}
    for doubt in (*strangers, *_doubtful_sizes(of_cache), *answer.doubts):
        print(f"gangway capacity: warning: {doubt}", file=sys.stderr)
    if options.json:
        print(json.dumps({**asdict(answer), "highest": answer.highest.mean_per_s}, indent=1))
    else:
        console.print(_table(answer))
        console.print(*_sentences(answer, options.goal), sep="\n", highlight=False)
    return 0 if answer.carried else 1


def _sources(
    cache_dir: Path, cached: Mapping[str, CachedModel], of_files: Sequence[MeasuredModel], names: Sequence[str]
) -> str:
    """Return a line that says of which cache profiles are, and when each model was measured."""
    own, shipped = {model.model_name for model in of_files}, shipped_models()
    texts = []
    for name in names:
        if name in own:
            texts.append(f"{name} of --profile")
        elif name in cached:
            each = cached[name]
            shape = f" with {each.shape}" if each.is_open or len(each.shapes) > 1 else ""
            texts.append(f"{name} of {datetime.fromtimestamp(each.measured_s):%Y-%m-%d %H:%M}{shape}")
        else:
            texts.append(f"{name} as it comes with the simulator" if name in shipped else f"{name}: none")
    return f"profiles: {', '.join(texts)}; in {cache_dir}, which --cache-dir of the server must be, too"


def _doubtful_sizes(cached: Mapping[str, CachedModel]) -> Iterator[str]:
    """Yield a sentence for each model whose requests may have other sizes than what was measured."""
    remedy = "`gangway profile PATH --dimension NAME=SIZE` measures the one that counts"
    for name, each in cached.items():
        if each.is_open:
            yield f"{name} was measured as onnxruntime computes sizes that are not compiled; {remedy}"
        elif len(each.shapes) > 1:
            yield f"{name} was measured in {len(each.shapes)} sizes, the last time with {each.shape}; {remedy}"


def find_capacity(
    scenario: Callable[[int], Scenario], cores: int, rate_per_s: float, share: float, queries: int = QUERIES
) -> CapacityAnswer:
    """Return what `cores` cores make of a load of `rate_per_s` requests a second, and how many cores it takes.

    `scenario`: the load on so many cores. `share`: of each model's requests that are to be in time. Raises
    WorkloadError for a load without a target.
    """
    here = scenario(cores)
    if not any(here.targets_us):
        raise WorkloadError("no model has a target: give one behind @, as in resnet50=20@3x")
    run = run_steady(DEFAULT_POLICY, here, rate_per_s, queries, seed=1)
    alone_us = here.served_alone_us or here.isolated_us
    rows = zip(run.summary.models, here.mix.shares, alone_us, here.targets_us, strict=True)
    goal, seeds = RateGoal(share, each=True), range(1, SEEDS + 1)
    highest = estimate_rate(DEFAULT_POLICY, here, goal, queries, seeds, rate_per_s)
    multiples = tuple(rate / rate_per_s for rate in highest.rates_per_s)
    return CapacityAnswer(
        cores,
        tuple(_model_answer(row, part * rate_per_s, alone_us, target_us) for row, part, alone_us, target_us in rows),
        carries(here, rate_per_s, share, queries),
        run.core_use,
        RateEstimate(multiples),
        PLANNED * min(multiples),
        _cores_needed(scenario, rate_per_s, share, queries),
        (*(f"{doubt}; `gangway profile` measures it" for doubt in here.doubts), *_small_models(here)),
    )


def _small_models(scenario: Scenario) -> Iterator[str]:
    """Yield a sentence for each model whose computing is less than what front end and scheduler do for a request."""
    way_us = scenario.machine.overheads.stolen_us
    for model in scenario.models.values():
        compute_us = model.fastest_us(0, 1)
        if compute_us < way_us:
            yield (
                f"{model.name} computes for {compute_us:.3g} us, and a request costs {way_us:.0f} us of front end and"
                " scheduler beside it: clients on the same cores are not counted, and `gangway perf` finds the rate"
            )


def _model_answer(row: OutcomeRow, rate_per_s: float, isolated_us: float, target_us: float | None) -> ModelAnswer:
    in_time = row.satisfied[TARGET]
    return ModelAnswer(row.name, rate_per_s, isolated_us, target_us, in_time, row.p50_us, row.p95_us, row.p99_us)


def carries(scenario: Scenario, rate_per_s: float, share: float, queries: int = QUERIES) -> bool:
    """Whether most seeds of arrivals have so large a share of each model's requests in time."""
    if rate_per_s > BUSY * capacity_bound(scenario):
        return False
    goal, seeds = RateGoal(share, each=True), range(1, SEEDS + 1)
    shares = (share_in_time(DEFAULT_POLICY, scenario, goal, rate_per_s, queries, seed) for seed in seeds)
    return median(shares) >= share


def _cores_needed(scenario: Callable[[int], Scenario], rate_per_s: float, share: float, queries: int) -> int | None:
    """Return the smallest number of cores that carries a load, by doubling and bisection."""
    high = 1
    while not carries(scenario(high), rate_per_s, share, queries):
        high *= 2
        if high > MOST_CORES:
            return None
    low = high // 2  # which does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if carries(scenario(middle), rate_per_s, share, queries) else (middle, high)
    return high


def _scenario(
    mix: Mix,
    measured: Mapping[str, MeasuredModel],
    in_bf16: Mapping[str, MeasuredModel],
    overheads: Overheads,
    batch: int,
    cores: int,
) -> Scenario:
    requests = Requests(batching=Batching(batch) if batch > 1 else None)
    return make_scenario(mix, cores, measured, overheads, requests=requests, in_bf16=in_bf16, as_served=True)


def _table(answer: CapacityAnswer) -> Table:
    title = f"{answer.cores} cores, {answer.core_use:.0%} busy, simulated"
    table = Table("model", title=title)
    for heading in ("per s", "alone ms", "target ms", "in time", "p50 ms", "p95 ms", "p99 ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in answer.models:
        table.add_row(
            model.name,
            f"{model.rate_per_s:.4g}",
            _ms(model.isolated_us),
            _ms(model.target_us),
            "-" if model.in_time is None else f"{model.in_time:.1%}",
            *(_ms(value) for value in (model.p50_us, model.p95_us, model.p99_us)),
        )
    return table


def _ms(value_us: float | None) -> str:
    if value_us is None:
        return "-"
    return f"{value_us / 1e3:.3g}" if value_us < 1e6 else f"{value_us / 1e3:.0f}"


def _sentences(answer: CapacityAnswer, percent: float) -> list[str]:
    needed = f"more than {MOST_CORES}" if answer.cores_needed is None else str(answer.cores_needed)
    found = [
        f"highest load on {answer.cores} cores: {answer.highest} times this one",
        f"plan with {answer.planned:.3g} times this one: two thirds of the least of {SEEDS} simulations",
        f"cores for this load: {needed}",
    ]
    late = [model for model in answer.models if model.in_time is not None and model.in_time < percent / 100]
    if late and answer.core_use < BUSY:
        targets = ", ".join(f"{model.name} {_ms(model.p95_us)}" for model in late)
        found.append(f"targets, ms, that 95 % of requests meet at this load: {targets}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("gangway capacity", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("load", type=_loaded_model, nargs="+", metavar="MODEL=RATE[@TARGET]", help="requests per second, and a target")
    add("--cores", type=_cores, default=len(os.sched_getaffinity(0)), metavar="N", help="of the machine (this one's)")
    add("--goal", type=float, default=95.0, metavar="PERCENT", help="of each model's requests in time (95)")
    add("--batch", type=int, default=4, metavar="B", help="rows of a batch at most, 1: none (4)")
    add(
        "--overheads",
        choices=("shared", "spare"),
        default="shared",
        help="front end and scheduler use the same cores, or others (shared)",
    )
    add("--precision", choices=(FP32, BF16, DEADLINE), default=FP32, help="as of `gangway serve` (%(default)s)")
    add("--profile", type=Path, nargs="+", default=[], metavar="FILE", help="files of `gangway profile`")
    add(
        "--queries",
        type=int,
        default=QUERIES,
        metavar="N",
        help=f"that count in a simulation; fewer are quicker ({QUERIES})",
    )
    add("--json", action="store_true", help="print everything as one object")
    add_cache_dir(parser)
    return parser


def _loaded_model(text: str) -> MixModel:
    name, _, load = text.rpartition("=")
    rate, _, target = load.partition("@")
    try:
        model = MixModel(name, float(rate), parse_qos(target) if target else None)
        if not (name and math.isfinite(float(rate)) and float(rate) > 0):
            raise ValueError("the rate must be positive")
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected MODEL=RATE[@TARGET], as resnet50=20@3x, got {text!r}: {error}"
        ) from error
    return model


def _cores(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_CORES:
        raise argparse.ArgumentTypeError(f"1 to {MOST_CORES} cores were expected, not {text!r}")
    return int(text)
