"""The scheduler's processor time for one request, under four kinds of load; of several checkouts by turns.

`tiny`: a small MLP, 8 clients in a closed loop. `mix`: networks with targets, at half of capacity. `overload`: three
times capacity, one network without a target. `pipeline`: an ensemble of Python, ONNX and Python, 8 clients. A request
counts whether it is answered or refused. The time is that of the scheduler's process, from the kernel.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.python_models.pipeline.repository import Asked, asked, write_pipeline
from benchmarks.serving.servers import warm_up, write_repository
from gangway.clients.open_loop import drive
from gangway.workload.arrivals import poisson_for
from gangway.workload.mix import Mix, MixModel, capacity_per_s
from gangway.workload.qos import Qos
from testing.isolated import Reference
from testing.live_server import QUIET, LiveServer, live_server
from testing.load import Load, LoadProcess, Outcome
from testing.processes import CoreUse, core_use
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import GANGWAY, ensure_zoo, onnx_file

TINY, BEST_EFFORT = "mlp", "googlenet"
LIGHT = ("efficientnet_b0", "mobilenetv2", "tiny_yolov2")
MIX = (*LIGHT, "resnet50", BEST_EFFORT)
CLIENTS = 8
INSTANCES = 2  # of each Python model
SHARES = {"mix": 0.5, "overload": 3.0}  # of capacity
TARGET_TIMES = 3.0
RATIO_AT_MOST = 0.45  # of the first checkout's time
TIMEOUT_S = 60.0
MOST_OUTSTANDING = 100_000
WARM_UP_S = 0.5


@dataclass(frozen=True)
class Side:
    """The servers of one checkout: `timed` has models with targets; in `free` the pipeline has none."""

    name: str
    timed: LiveServer
    free: LiveServer


@dataclass(frozen=True)
class Stretch:
    """What a load took of one scheduler."""

    requests: int
    seconds: float
    used: CoreUse


@contextmanager
def measured(server: LiveServer, found: list[CoreUse]) -> Iterator[None]:
    """Append what the scheduler uses while the block lasts. Raises RuntimeError if it was replaced meanwhile."""
    (pid,) = server.pids()["scheduler"]
    before = core_use(pid)
    yield
    after = core_use(pid)
    if server.pids()["scheduler"] != [pid]:
        raise RuntimeError(f"the scheduler has ended:\n{server.log.read_text()[-3000:]}")
    found.append(CoreUse(*[end - begin for begin, end in zip(before, after, strict=True)]))


def closed_loop(server: LiveServer, request: Asked, seconds: float, clients: int = CLIENTS) -> Stretch:
    """Keep so many requests under way."""
    used: list[CoreUse] = []
    with LoadProcess(Load(server.url, request.request, request.outputs, clients)) as load:
        time.sleep(WARM_UP_S)
        begin_ns = time.monotonic_ns()
        with measured(server, used):
            time.sleep(seconds)
        end_ns = time.monotonic_ns()
        outcomes: list[Outcome] = load.stop().outcomes
    inside = [one for one in outcomes if begin_ns <= one.end_ns < end_ns]
    return Stretch(len(inside), (end_ns - begin_ns) / 1e9, used[0])


def open_loop(
    server: LiveServer, mix: Mix, examples: Mapping[str, Example], rate_per_s: float, seconds: float, seed: int
) -> Stretch:
    """Send at random times, the same ones to every checkout."""
    used: list[CoreUse] = []
    arrivals = poisson_for(mix, rate_per_s, seconds, seed)
    requests = {name: examples[name].request for name in mix.names}
    with measured(server, used):
        drive(server.url, requests, arrivals, TIMEOUT_S, MOST_OUTSTANDING)
    return Stretch(len(arrivals), seconds, used[0])


@contextmanager
def serve(checkout: Path, models: Path, targets_ms: Mapping[str, float | None], pipeline: bool) -> Iterator[LiveServer]:
    """Serve models by a checkout's own environment, with a profile if its cache has one."""
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), models, targets_ms)
        if pipeline:
            write_pipeline(Path(folder), INSTANCES)
        python, quiet = str(checkout / ".venv" / "bin" / "python"), known_flags(checkout, QUIET)
        with live_server(Path(folder), cwd=checkout, python=python, quiet=quiet) as server:
            yield server


def known_flags(checkout: Path, flags: Sequence[str]) -> list[str]:
    """Return those flags of `gangway serve` that a checkout has: one that it lacks does what it stands for anyway."""
    command = [str(checkout / ".venv" / "bin" / "python"), *GANGWAY[1:], "serve", "--help-all"]
    words = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.split()
    return [flag for flag in flags if flag.partition("=")[0] in words]


def table(report: Report, found: Mapping[tuple[str, str], Sequence[Stretch]], sides: Sequence[str]) -> None:
    """Add medians of each load and checkout, and the ratios to the first checkout, turn by turn."""
    rows: list[Row] = []

    def cpu_us(one: Stretch) -> float:
        return one.used.run_ns / 1e3 / one.requests

    for (load, side), stretches in found.items():
        of: Callable[[Callable[[Stretch], float]], float] = lambda figure: median(map(figure, stretches))  # noqa: B023, E731
        ratios = [cpu_us(one) / cpu_us(first) for one, first in zip(stretches, found[load, sides[0]], strict=True)]
        rows.append(
            {
                "load": load,
                "checkout": side,
                "requests/s": of(lambda one: one.requests / one.seconds),
                "CPU us a request": of(cpu_us),
                "wake-ups a request": of(lambda one: one.used.turns / one.requests),
                "ratio": median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
        if side != sides[0]:
            report.target(f"{load}: {side} over {sides[0]}", median(ratios), RATIO_AT_MOST)
    report.table("the scheduler, medians", rows)


def main() -> int:
    """Measure; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    add = parser.add_argument
    own = Path(__file__).parents[2]
    add("--checkouts", nargs="+", type=Path, default=[own], metavar="DIR", help="with .venv; ratios to the first")
    add("--loads", default="tiny,mix,overload,pipeline", type=lambda text: text.split(","), metavar="L[,L]")
    add("--turns", type=int, default=3)
    add("--seconds", type=float, default=6.0, help="of each load")
    options = parser.parse_args()
    report = start_report("The scheduler's processor time for a request")
    names = (TINY, *MIX)
    models = ensure_zoo(options.repository, names)
    examples = {name: example_of(name, onnx_file(models, name)) for name in names}
    isolated_us = Reference(models, examples).isolated_us(MIX)
    target = Qos(multiple=TARGET_TIMES)
    mix = Mix("mix", tuple(MixModel(name) for name in MIX)).with_qos(target).resolve(isolated_us)
    targets_ms: dict[str, float | None] = {name: TARGET_TIMES * isolated_us[name] / 1e3 for name in MIX}
    light = Mix("light", tuple(MixModel(name) for name in LIGHT)).with_qos(target).resolve(isolated_us)
    loads = {
        "mix": mix,
        "overload": Mix("light", (*light.models, MixModel(BEST_EFFORT, weight=min(light.shares)))).resolve(),
    }
    closed = {"tiny": Asked(examples[TINY].request, dict(examples[TINY].outputs)), "pipeline": asked(models)}
    found: dict[tuple[str, str], list[Stretch]] = {}
    with ExitStack() as stack:
        sides = []
        for checkout in options.checkouts:
            timed = stack.enter_context(serve(checkout.absolute(), models, targets_ms, False))
            free = stack.enter_context(
                serve(checkout.absolute(), models, {**dict.fromkeys(names, None), **_light(targets_ms)}, True)
            )
            warm_up(timed.url, {name: examples[name] for name in MIX})
            warm_up(free.url, examples)
            sides.append(Side(checkout.name, timed, free))
        for turn in range(options.turns):
            for load in options.loads:
                for side in sides[:: -1 if turn % 2 else 1]:
                    if load in closed:
                        stretch = closed_loop(side.free, closed[load], options.seconds)
                    else:
                        server = side.timed if load == "mix" else side.free
                        rate_per_s = SHARES[load] * capacity_per_s(loads[load], isolated_us)
                        stretch = open_loop(server, loads[load], examples, rate_per_s, options.seconds, turn)
                    found.setdefault((load, side.name), []).append(stretch)
    table(report, found, [side.name for side in sides])
    return report.finish(options.json)


def _light(targets_ms: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: targets_ms[name] for name in LIGHT}


if __name__ == "__main__":
    sys.exit(main())
