"""`gangway simulate`: the scheduling policies on a virtual clock and a machine of any number of cores."""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.progress import SpinnerColumn

from gangway.artifact.profile import ProfileError
from gangway.base.command_line import CommandParser
from gangway.base.console import Console, ProgressBars, Table
from gangway.base.extras import missing_packages
from gangway.base.html_page import write_html
from gangway.base.numbers import count, percent, positive
from gangway.scheduler.policies.registry import DEFAULT_POLICY, POLICIES, make_policy
from gangway.scheduler.stages.compound_policy import StagePlan
from gangway.simulator.batching import Batching
from gangway.simulator.compound import CompoundComparison, compare, compound_table, searched
from gangway.simulator.compound_load import compare_loaded, loaded_table
from gangway.simulator.contention import Contention
from gangway.simulator.loop import ContractError
from gangway.simulator.rates import SEEDS, estimate_both, window
from gangway.simulator.report import (
    Recorder,
    counters_table,
    draw,
    file_stem,
    processes_table,
    rates_table,
    table,
    write_csv,
    write_curves,
    write_probes,
)
from gangway.simulator.runs import PolicyRun, run_policy, share_curve
from gangway.simulator.scenario import OVERHEADS, MachineLayout, Requests, Scenario, make_scenario, read_models
from gangway.workload.mix import Mix, parse_mix, read_mix
from gangway.workload.qos import WorkloadError, parse_qos

SEARCH = "search"
BESIDE_TARGET = "3x"
ALL = "all"
MOST_CORES = 1024
MACHINES = {"measured": None, "contended": Contention()}
PICTURE = "policies.png"
CURVE = (0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25)  # rates that are drawn, over the rate of the run
MOST_CURVE_QUERIES = 2000


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 when it cannot be done. Wrong arguments exit with 2 (argparse)."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not (options.compound or options.output):
        parser.error("the following arguments are required: -o/--output")
    if options.beside and not options.compound:
        parser.error("argument --beside: it needs --compound")
    if options.cores % options.nodes:
        parser.error(f"{options.cores} cores cannot be split evenly over {options.nodes} nodes")
    if options.cores % options.schedulers:
        parser.error(f"{options.cores} cores cannot be split evenly over {options.schedulers} schedulers")
    if max(options.nodes, options.schedulers) % min(options.nodes, options.schedulers):
        parser.error(f"{options.nodes} nodes cannot be split evenly over {options.schedulers} schedulers")
    console = Console(record=options.html is not None)
    try:
        if options.compound:
            return _compare_compound(options, console)
        options.output.mkdir(parents=True, exist_ok=True)
        return _simulate(options, console)
    except (WorkloadError, ProfileError, ContractError, OSError) as error:
        print(f"gangway simulate: {error}", file=sys.stderr)
    return 1


def _simulate(options: argparse.Namespace, console: Console) -> int:
    scenario = _scenario(options)
    if _searches(options) and not any(scenario.targets_us):
        raise WorkloadError(f"mix '{scenario.mix.name}' has no targets to search for: give --qos or --rate")
    for doubt in scenario.doubts:
        print(f"gangway simulate: warning: {doubt}", file=sys.stderr)
    machine = "" if options.machine == "measured" else f" {options.machine}"
    title = f"{scenario.mix.name}, {options.cores} modelled{machine} cores, {options.queries} queries"
    title += f", seed {options.seed}" + f", {options.nodes} nodes" * (options.nodes > 1)
    title += f", {options.schedulers} schedulers" * (options.schedulers > 1)
    runs = [_run(policy, scenario, options) for policy in options.policy]
    for run in runs:
        write_csv(options.output / f"{file_stem(run.policy)}.csv", run)
    if _searches(options):
        write_probes(options.output / "search.csv", runs)
        console.print(rates_table(runs, options.satisfied, options.seeds))
    console.print(table(runs, title))
    console.print(counters_table(runs))
    if scenario.machine.charges_turns:
        console.print(processes_table(runs, scenario.front_end_us))
    if missing := missing_packages(["matplotlib"]):
        console.print(f"no picture: it needs {missing}", highlight=False, soft_wrap=True)
    elif options.clients is None:
        runs = [_with_curve(run, scenario, options) for run in runs]
        write_curves(options.output / "policies.csv", runs)
        draw(options.output / PICTURE, runs, title)
    if options.html:
        drawn = options.output / PICTURE
        pictures = {"share in time over the rate": drawn.read_bytes()} if drawn.exists() else {}
        write_html(options.html, f"gangway simulate: {title}", console, pictures, scenario.doubts)
    console.print(f"written to {options.output}", highlight=False, soft_wrap=True)
    return 0


def _with_curve(run: PolicyRun, scenario: Scenario, options: argparse.Namespace) -> PolicyRun:
    rates = [share * run.rate_per_s for share in CURVE]
    queries = min(options.queries, MOST_CURVE_QUERIES)
    return replace(run, curve=share_curve(run.policy, scenario, rates, queries, options.seed))


def _compare_compound(options: argparse.Namespace, console: Console) -> int:
    comparisons = []
    with ProgressBars(Console(stderr=True)) as progress:
        for names in options.compound:
            mix = parse_mix(",".join(f"{name}=1" for name in names))
            task = progress.add_task("+".join(names), total=2 * searched(names))
            scenario = _machine_with(mix, options, Requests())
            comparisons.append(compare(scenario, options.seed, partial(progress.advance, task)))
    console.print(compound_table(comparisons, options.cores))
    if options.beside:
        for comparison in comparisons:
            console.print(_loaded(comparison, options))
    return 0


def _loaded(comparison: CompoundComparison, options: argparse.Namespace) -> Table:
    """Serve a compound task, by the schedule that was found, under load beside others."""
    names, members = comparison.names, range(len(comparison.names))
    mix = parse_mix(",".join(f"{name}=1" for name in (*names, *options.beside)))
    scenario = _machine_with(mix.with_qos(parse_qos(options.qos or BESIDE_TARGET)), options, Requests())
    tasks = {number: replace(scenario.models[number], qos_us=None) for number in members}
    scenario = replace(scenario, models={**scenario.models, **tasks})
    plan = StagePlan(tuple(members), comparison.found, options.cores, comparison.coordinate_us)
    runs = compare_loaded(scenario, plan, options.queries // len(names), options.seed)
    return loaded_table(runs, f"{'+'.join(names)} beside {'+'.join(options.beside)}, {options.cores} cores, modelled")


def _run(policy: str, scenario: Scenario, options: argparse.Namespace) -> PolicyRun:
    with ProgressBars(Console(stderr=True), SpinnerColumn()) as progress:
        progress.add_task(policy)
        rate = options.rate or math.nan  # a closed loop has none until it is over
        in_all = in_each = None
        if _searches(options):
            share, seeds = options.satisfied / 100, range(options.seed, options.seed + options.seeds)
            in_all, in_each = estimate_both(policy, scenario, share, options.queries, seeds)
            chosen = in_each if options.each else in_all
            rate = chosen.mean_per_s
            if rate == 0:  # it fails everywhere: show by how much at the lowest rate that was tried
                rate = min(probe.rate_per_s for probes in chosen.probes for probe in probes)
                progress.console.print(
                    f"{policy} reaches the goal at no rate; the lowest tried follows", highlight=False
                )
        stem = options.output / file_stem(policy)
        timeline = stem.with_name(f"{stem.name}.trace.json") if options.timeline else None
        decisions = stem.with_name(f"{stem.name}.decisions.csv") if options.trace_decisions else None
        with Recorder(options.cores, timeline, decisions, policy) as recorder:
            observer = recorder if timeline or decisions else None
            counts = window(scenario, rate, options.queries) if _searches(options) else None
            run = run_policy(policy, scenario, rate, options.queries, options.seed, observer, counts)
    return replace(run, in_all=in_all, in_each=in_each)


def _searches(options: argparse.Namespace) -> bool:
    """Whether the rate is to be found."""
    return options.rate is None and options.clients is None


def _scenario(options: argparse.Namespace) -> Scenario:
    mix = parse_mix(options.mix) if "=" in options.mix else read_mix(options.mix)
    if options.qos is not None:
        mix = mix.with_qos(parse_qos(options.qos))
    batching = Batching(max(options.batch, options.rows)) if options.batch > 1 else None
    return _machine_with(mix, options, Requests(options.rows, options.burst, batching, options.clients))


def _machine_with(mix: Mix, options: argparse.Namespace, requests: Requests) -> Scenario:
    measured = read_models(options.profile)
    overheads, contention = OVERHEADS[options.overheads], MACHINES[options.machine]
    layout = MachineLayout(options.memory_share, options.nodes, options.schedulers)
    in_bf16 = read_models(options.bf16_profile)
    return make_scenario(mix, options.cores, measured, overheads, requests, contention, in_bf16, layout)


COMMON = (
    "--cores",
    "--policy",
    "--mix",
    "--qos",
    "--rate",
    "--clients",
    "--satisfied",
    "--queries",
    "--rows",
    "--batch",
    "--seed",
    "--profile",
    "--compound",
    "--beside",
    "--trace-decisions",
    "--timeline",
    "--output",
)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway simulate",
        common=COMMON,
        description="Run scheduling policies, the very ones that serve, on a virtual clock and a modelled machine of N "
        "cores. Models are those measured here, scaled (docs/explanation/simulator.md). Prints tables, writes CSV "
        "files, and draws the share in time over the rate.",
    )
    add = parser.add_argument
    add("--cores", type=_cores, default=64, metavar="N", help="of the machine (64)")
    add("--nodes", type=count, default=1, metavar="N",
        help="of NUMA, over which the cores are split evenly; no gang crosses them (1)")  # fmt: skip
    add("--schedulers", type=count, default=1, metavar="N",
        help="processes that decide, over which the cores are split evenly; a server has one (1)")  # fmt: skip
    add("--policy", type=_policies, default=[DEFAULT_POLICY], metavar="P[,P...]",
        help=f"{ALL}, or some of: {', '.join(POLICIES)} ({DEFAULT_POLICY})")  # fmt: skip
    add("--mix", default="mix", metavar="NAME|FILE", help="light, medium, heavy, mix, MODEL=WEIGHT,... or a file (mix)")
    add(
        "--qos", metavar="MS|Nx", help="the same target for all models: milliseconds, or times isolated (the mix's own)"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=_rate, default=None, metavar="R|search",
        help="queries per second, or the highest rate that reaches the goal (search)")  # fmt: skip
    load.add_argument("--clients", type=count, default=None, metavar="N",
        help="a closed loop: N clients that each ask again when they have an answer")  # fmt: skip
    add("--satisfied", type=percent, default=95.0, metavar="%", help="the goal: so many queries in time (95)")
    add("--each", action="store_true", help="show the rate at which it holds for each model, not for all queries")
    add("--queries", type=count, default=4000, metavar="N", help="in one run (4000)")
    add("--rows", type=count, default=1, metavar="B", help="of each query (1)")
    add("--burst", type=count, default=1, metavar="K", help="so many queries arrive at the same time (1)")
    add("--batch", type=count, default=1, metavar="B",
        help="let the policy join what waits to batches of up to B rows, split over gangs (1: no)")  # fmt: skip
    add("--seed", type=_seed, default=1, metavar="S", help="of the arrivals (1)")
    add("--seeds", type=count, default=SEEDS, metavar="N",
        help=f"a searched rate is the mean over so many seeds, from --seed on ({SEEDS})")  # fmt: skip
    add("--machine", choices=MACHINES, default="measured",
        help="cores that disturb each other as measured, or as VELTAIR's premise has it (measured)")  # fmt: skip
    add("--profile", type=Path, nargs="+", default=[], metavar="FILE",
        help="other measured models: files of `gangway profile`")  # fmt: skip
    add("--bf16-profile", type=Path, nargs="+", default=[], metavar="FILE",
        help="the same of models of the mix in bf16, which queries take that would be late in fp32")  # fmt: skip
    add("--memory-share", type=positive, default=1.0, metavar="X",
        help="bandwidth and shared cache per core, as a part of the measured machine's (1)")  # fmt: skip
    add("--overheads", choices=OVERHEADS, default="spare",
        help="front end and scheduler have spare cores, the same with their whole time charged (turns), share the "
        "workers' cores, or cost nothing (spare)")  # fmt: skip
    add("--compound", type=_compound, nargs="+", default=[], metavar="M+M[+M]",
        help="instead of a load: models on the same input, in stages that a search finds")  # fmt: skip
    add("--beside", type=_beside, default=(), metavar="M[+M]",
        help=f"with --compound: models that others ask for, with targets (--qos, or {BESIDE_TARGET})")  # fmt: skip
    add("--trace-decisions", action="store_true", help="write why each decision was made")
    add("--timeline", action="store_true", help="write which core did what, for Perfetto")
    add("--html", type=Path, metavar="FILE", help="write one page of tables, picture, command and machine")
    add("-o", "--output", type=Path, metavar="DIR", help="where to write; needed but for --compound")
    return parser


def _policies(text: str) -> list[str]:
    names = sorted(POLICIES) if text == ALL else text.split(",")
    for name in names:
        try:
            make_policy(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


def _beside(text: str) -> tuple[str, ...]:
    names = tuple(text.split("+"))
    if len(set(names)) < len(names) or not all(names):
        raise argparse.ArgumentTypeError(f"different models were expected, as a+b, not {text!r}")
    return names


def _compound(text: str) -> tuple[str, ...]:
    names = tuple(text.split("+"))
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        raise argparse.ArgumentTypeError(f"two or more different models were expected, as a+b, not {text!r}")
    return names


def _rate(text: str) -> float | None:
    return None if text == SEARCH else positive(text)


def _cores(text: str) -> int:
    value = count(text)
    if value > MOST_CORES:
        raise argparse.ArgumentTypeError(f"at most {MOST_CORES} cores, not {text}")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a seed is a number from 0 on, not {text!r}")
    return int(text)
