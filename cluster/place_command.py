"""`gangway place`: load each model on those of several servers where its requests will be in time."""

import argparse
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gangway.artifact.cache import add_cache_dir
from gangway.artifact.profile import ProfileError
from gangway.base.command_line import CommandParser
from gangway.base.commands import ending_signals
from gangway.base.console import Console, Table
from gangway.base.numbers import seconds
from gangway.clients.errors import ClientError, InputError, UnreachableError
from gangway.clients.tls import Tls
from gangway.cluster.moves import Mover
from gangway.cluster.observation import (
    Demand,
    ServerReading,
    demands,
    guessed_model,
    read_server,
)
from gangway.cluster.placement import PlacedMachine, PlacedModel, Placement, PlacementPlan, make_plan
from gangway.cluster.prediction import PredictedModel, SimulatorPredictor
from gangway.cluster.repository import ask_all
from gangway.cluster.server_address import ServerAddress, add_servers, servers_of, tls_of
from gangway.simulator.measured import MeasuredModel, profiled_models
from gangway.workload.qos import WorkloadError

ALL = "*"
WINDOW_S = 10.0
MEMORY_SHARE = 0.9  # of what a machine has free, for models; requests need some, too
UNKNOWN_BYTES = 256 << 20  # of a model that is loaded nowhere
UNKNOWN_US = 10_000.0  # of a request to a model that has answered none and has no profile
GIB = 1 << 30
Readings = Mapping[str, ServerReading]


@dataclass(frozen=True)
class Placer:
    """What `gangway place` was told, and what it knows of models. `memory_bytes`: by server, "" for all others."""

    servers: tuple[ServerAddress, ...]
    tls: Tls | None
    timeout_s: float
    models: tuple[str, ...]
    memory_bytes: Mapping[str, int]
    measured: Mapping[str, MeasuredModel]

    def read(self) -> dict[str, ServerReading]:
        """Read all servers, by name; warn of those that do not answer. Raises UnreachableError if none does."""
        answers = ask_all(self.servers, lambda server: read_server(server, self.tls, self.timeout_s))
        errors = [f"{server.name}: {answer}" for server, answer in answers.items() if isinstance(answer, ClientError)]
        readings = {s.name: answer for s, answer in answers.items() if not isinstance(answer, ClientError)}
        if not readings:
            raise UnreachableError("\n".join(("no server answers:", *(f"  {error}" for error in errors))))
        for error in errors:
            print(f"gangway place: warning: {error}; it is left out", file=sys.stderr)
        return readings

    def plan(self, readings: Readings, wanted: Mapping[str, Demand]) -> PlacementPlan:
        """Return the plan for what the servers say. Raises InputError for a model that no server knows."""
        names = self._names(readings)
        models = [self._model(name, readings, wanted) for name in names]
        size = {model.name: model.memory_bytes for model in models}
        present: Placement = {server: reading.ready & size.keys() for server, reading in readings.items()}
        machines = [
            PlacedMachine(server, reading.cores, self._memory(server, reading, sum(size[n] for n in present[server])))
            for server, reading in readings.items()
        ]
        targets = {name: target for reading in readings.values() for name, target in reading.targets.items()}
        predicted = {name: PredictedModel(self._times(name, readings), targets.get(name)) for name in names}
        return make_plan(models, machines, present, SimulatorPredictor(predicted))

    def _names(self, readings: Readings) -> list[str]:
        """Return the models to place: those that were named, else those that are ready anywhere."""
        known = {name for reading in readings.values() for name in reading.known}
        if ALL in self.models:
            return sorted(known)
        if unknown := sorted(set(self.models) - known):
            raise InputError(f"--model {unknown[0]}: no server has it; they have {', '.join(sorted(known)) or 'none'}")
        names = self.models or {name for reading in readings.values() for name in reading.ready}
        if not names:
            raise InputError("no model is loaded anywhere: name those to place by --model")
        return sorted(names)

    def _model(self, name: str, readings: Readings, wanted: Mapping[str, Demand]) -> PlacedModel:
        sizes = [reading.models[name].memory_bytes for reading in readings.values() if name in reading.models]
        rate_per_s = wanted[name].rate_per_s if name in wanted else 0.0
        holders = frozenset(server for server, reading in readings.items() if name in reading.known)
        return PlacedModel(name, rate_per_s, int(max(sizes, default=0)) or UNKNOWN_BYTES, holders)

    def _memory(self, server: str, reading: ServerReading, loaded_bytes: int) -> int:
        given = self.memory_bytes.get(server, self.memory_bytes.get(""))
        free = reading.memory_total_bytes - reading.memory_used_bytes
        return int(free * MEMORY_SHARE) + loaded_bytes if given is None else given

    def _times(self, name: str, readings: Readings) -> MeasuredModel:
        """Return a model's profile; without one its mean time on the servers is taken for that on one core."""
        if name in self.measured:
            return self.measured[name]
        counted = [reading.models[name] for reading in readings.values() if name in reading.models]
        times_us = [model.compute_s / model.answered * 1e6 for model in counted if model.answered]
        return guessed_model(name, max(1.0, fmean(times_us)) if times_us else UNKNOWN_US)


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or the status of the error: 1 refused, 2 usage, 3 no server answers."""
    options = _parser().parse_args(argv)
    try:
        servers, tls = servers_of(options), tls_of(options)
        placer = Placer(servers, tls, options.timeout, tuple(options.models), _memory_of(options, servers),
                        profiled_models(options.cache_dir, options.profile))  # fmt: skip
        mover = Mover({server.name: server for server in servers}, tls, options.route)
        mover.check()
        return _run(placer, mover, options)
    except ClientError as error:
        print(f"gangway place: {error}", file=sys.stderr)
        return error.exit_status
    except (ProfileError, WorkloadError) as error:
        print(f"gangway place: {error}", file=sys.stderr)
        return InputError.exit_status


def _run(placer: Placer, mover: Mover, options: argparse.Namespace) -> int:
    console = Console()
    ending = threading.Event()
    for number in ending_signals():
        signal.signal(number, lambda *_: ending.set())
    window_s = options.every or options.window
    before, before_s, is_first = placer.read(), time.monotonic(), True
    while not ending.wait(window_s):
        try:
            now, now_s = placer.read(), time.monotonic()
            wanted = demands(before, now, now_s - before_s)
            plan = placer.plan(now, wanted)
            before, before_s = now, now_s
            if plan.moves or not options.every:
                console.print(_table(plan, wanted, now))
            if not options.dry_run:
                mover.carry_out(plan.moves)
        except ClientError as error:
            if not options.every or is_first:  # what is wrong from the beginning stays wrong
                raise
            print(f"gangway place: {error}; trying again in {window_s:g} s", file=sys.stderr)
        if not options.every:
            return 0
        is_first = False
    return 0


def _table(plan: PlacementPlan, wanted: Mapping[str, Demand], readings: Readings) -> Table:
    """Return the plan as a table of at most 80 columns, as long as names allow it."""
    table = Table(title=_title(plan), caption=_caption(plan), caption_justify="left")
    for heading in ("model", "calls/s", "in time", "predicted", "planned"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    table.add_column("servers")
    for name in sorted(plan.after):
        demand = wanted.get(name, Demand(0.0, None))
        had = {server for server, reading in readings.items() if name in reading.ready}
        gets = {server for server, names in plan.placement.items() if name in names}
        signs = [f"{'' if server in had & gets else '+' if server in gets else '-'}{server}"
                 for server in sorted(had | gets)]  # fmt: skip
        table.add_row(name, f"{demand.rate_per_s:.1f}", _percent(demand.met), _percent(plan.before[name]),
                      _percent(plan.after[name]), " ".join(signs) or "no memory")  # fmt: skip
    return table


def _title(plan: PlacementPlan) -> str:
    count = len(plan.moves)
    return f"{count} move{'' if count == 1 else 's'}" if count else "nothing to move: no plan is predicted to be better"


def _caption(plan: PlacementPlan) -> str:
    return (
        "in time: since the last reading; predicted: as models are loaded now, and as planned; + load, - unload"
        if plan.moves
        else ""
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _memory_of(options: argparse.Namespace, servers: Sequence[ServerAddress]) -> dict[str, int]:
    """Return the memory for models by server, that of all others as "". Raises InputError."""
    names = {server.name for server in servers}
    if unknown := [name for name, _ in options.memory_gib if name and name not in names]:
        raise InputError(f"--memory-gib {unknown[0]}: there is no --server of this name")
    return dict(options.memory_gib)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway place",
        description="Load each model on those of several servers where its requests are predicted to be in time, and "
        "unload it elsewhere where room is needed. The servers need --model-control-mode=explicit.",
    )
    add = parser.add_argument
    add_servers(parser)
    add("--route", type=Path, metavar="DIR",
        help="folder of the running `gangway route`: before a model is unloaded its calls go elsewhere; without it"
        " calls may be lost")  # fmt: skip
    add("--model", action="append", default=[], metavar="NAME", dest="models",
        help=f"a model to place, several times; `{ALL}`: every one (those that are loaded)")  # fmt: skip
    add("--dry-run", action="store_true", help="print the plan and change nothing")
    add("--every", type=seconds, metavar="SECONDS", help="go on, with a plan so often (one plan)")
    add("--window", type=seconds, default=WINDOW_S, metavar="SECONDS",
        help=f"how long requests are counted before the only plan ({WINDOW_S:g})")  # fmt: skip
    add("--memory-gib", type=_memory, action="append", default=[], metavar="[SERVER=]GIB",
        help="memory for models (nine tenths of what is free, and what the models have)")  # fmt: skip
    add("--profile", type=Path, nargs="+", default=[], metavar="FILE",
        help="profiles of models, beside those in --cache-dir: files of `gangway profile`")  # fmt: skip
    add_cache_dir(parser)
    return parser


def _memory(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:(.+)=)?(\d+(?:\.\d+)?)", text)
    if match is None or not float(match[2]):
        raise argparse.ArgumentTypeError(f"a number of GiB was expected, or SERVER=GIB, not {text!r}")
    return match[1] or "", int(float(match[2]) * GIB)
