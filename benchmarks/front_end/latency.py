"""Where the time of a single request goes, from the client's send to its receive: idle, in a row, under a load.

The client is a blocking grpcio one. A server that does nothing but answer, of the same library, is asked by the same
client in the same run. The CPU time is what a request adds to what the processes use without it.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import tritonclient.grpc as triton

from benchmarks.front_end.grpc_floor import floor_server
from benchmarks.front_end.latency_client import Client, Errand, background, floor_arrivals, floor_traces
from benchmarks.front_end.latency_parts import (
    FLOOR_PARTS,
    Trip,
    Way,
    beyond_idle,
    draw,
    join,
    part_rows,
    read_traces,
    use_rows,
)
from testing.live_server import LiveServer, live_server
from testing.processes import CoreUse, core_use, running_below
from testing.quiet import QuietMachine
from testing.reference import Example, example_of
from testing.report import Report, add_repository_option, option_parser, start_report
from testing.repository import ensure_profiles, ensure_zoo, onnx_file

FLOOR = "do-nothing"
FIELDS = {
    "run_ns": "CPU us",
    "wait_ns": "us that threads wait for a core, all together",
    "turns": "how often a thread is given a core",
}
BEYOND_US = {"mobilenetv2": 300.0, "mlp": 80.0}  # what one client may wait longer than for the do-nothing server
SERVING_US = {"mobilenetv2": 1300.0, "mlp": 180.0}  # CPU of front end and scheduler
SETTLE_S = 0.5  # until whoever waits awake has gone to sleep


@dataclass(frozen=True)
class Case:
    """How the client asks. `traced`: one of so many requests, since a trace costs CPU, too."""

    pause_s: float = 0.02
    traced: int = 1
    loaded: bool = False


CASES = {"idle": Case(), "in a row": Case(pause_s=0.0, traced=10), "loaded": Case(loaded=True)}


@dataclass
class Followed:
    """A case's requests, what each role used for them, and the way of each that was traced."""

    trips: list[Trip]
    uses: dict[str, CoreUse]
    ways: list[Way]


@dataclass(frozen=True)
class Run:
    """What all cases share. `models`: those that are followed. `load`: model, request, and rate per second."""

    server: LiveServer
    floor_url: str
    floor_pid: int
    examples: Mapping[str, Example]
    load: tuple[str, bytes, float]
    requests: int
    seconds: float

    def follow(self, model: str, name: str, case: Case) -> Followed:
        """Let one client ask for a model."""
        idle_s = self.seconds if case.loaded else self.seconds / 2
        model_of_load, request, rate_per_s = self.load
        load = background(self.server.url, model_of_load, request, rate_per_s, idle_s + 3 * self.seconds + 60)
        with self._traced(model, case.traced), load if case.loaded else nullcontext():
            client = Client(self._errand(self.server.url, model, name, case))
            time.sleep(SETTLE_S)
            idle = self._uses_in(idle_s)
            before, begin_s = self._uses(), time.monotonic()
            trips, own = client.run()
            seconds = time.monotonic() - begin_s
            during = _differences(self._uses(), before)
        uses = {role: beyond_idle(use, seconds, idle[role], idle_s) for role, use in during.items()}
        return Followed(trips, {"client": own, **uses}, [])

    def floor(self, model: str, name: str, case: Case) -> Followed:
        """Let one client ask the server that does nothing."""
        client = Client(self._errand(self.floor_url, model, f"{FLOOR} {name}", case))
        before = core_use(self.floor_pid)
        trips, own = client.run()
        use = CoreUse(*(now - then for now, then in zip(core_use(self.floor_pid), before, strict=True)))
        traces = floor_traces(trips, floor_arrivals(self.floor_url))
        return Followed(trips, {"client": own, FLOOR: use}, join(trips, traces, FLOOR_PARTS))

    def _errand(self, url: str, model: str, name: str, case: Case) -> Errand:
        request = self.examples[model].request
        return Errand(url, request, f"{model} {name}", self.requests, self.seconds, case.pause_s)

    @contextmanager
    def _traced(self, model: str, rate: int) -> Iterator[None]:
        with triton.InferenceServerClient(self.server.url) as client:
            client.update_trace_settings(model, {"trace_level": ["TIMESTAMPS"], "trace_rate": str(rate)})
            yield
            client.update_trace_settings(model, {"trace_level": ["OFF"]})

    def _uses(self) -> dict[str, CoreUse]:
        pids = self.server.pids()
        pids["exporter"] = running_below(self.server.process.pid, "tracing.exporter")
        return {role: CoreUse(*map(sum, zip(*map(core_use, found), strict=True))) for role, found in pids.items()}

    def _uses_in(self, seconds: float) -> dict[str, CoreUse]:
        before = self._uses()
        time.sleep(seconds)
        return _differences(self._uses(), before)


def _differences(now: Mapping[str, CoreUse], then: Mapping[str, CoreUse]) -> dict[str, CoreUse]:
    return {role: CoreUse(*(a - b for a, b in zip(use, then[role], strict=True))) for role, use in now.items()}


def measure(
    repository: Path, models: list[str], load: str, rate_per_s: float, requests: int, seconds: float
) -> dict[str, dict[str, Followed]]:
    """Return what was followed by model, and by case within a model, those of the do-nothing server first."""
    found: dict[str, dict[str, Followed]] = {model: {} for model in models}
    served = list(dict.fromkeys([*models, load]))
    examples = {model: example_of(model, onnx_file(repository, model)) for model in served}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        flags = [f"--trace-config=triton,file={file}", "--model-control-mode=explicit"]
        flags += [f"--load-model={name}" for name in served]
        with ExitStack() as stack:
            server = stack.enter_context(live_server(repository, flags))
            core = min(os.sched_getaffinity(server.pids()["front end"][0]))
            floor_url, pid = stack.enter_context(floor_server(examples, core))
            run = Run(server, floor_url, pid, examples, (load, examples[load].request, rate_per_s), requests, seconds)
            for model, cases in found.items():
                for name, case in CASES.items():
                    if not case.loaded:
                        cases[f"{FLOOR}, {name}"] = run.floor(model, name, case)
                    cases[name] = run.follow(model, name, case)
        traces = read_traces(file.read_text())  # which is complete when the server has ended
    for cases in found.values():
        for name in CASES:
            cases[name].ways = join(cases[name].trips, traces)
    return found


def add_tables(report: Report, found: Mapping[str, Mapping[str, Followed]]) -> None:
    """Report parts and CPU of every case."""
    for model, cases in found.items():
        for name, case in CASES.items():
            followed = cases[name]
            bare = cases[f"{FLOOR}, {'idle' if case.loaded else name}"]
            report.table(f"{model}, {name}: {len(followed.ways)} traced requests", part_rows(followed.ways, bare.ways))
        uses = {name.replace(", ", "\n"): (each.uses, len(each.trips)) for name, each in cases.items()}
        for field, what in FIELDS.items():
            report.table(f"{model}, a request's mean: {what}", use_rows(uses, field))


def add_targets(report: Report, found: Mapping[str, Mapping[str, Followed]]) -> None:
    """Set medians of requests in a row against what they may be."""
    for model, cases in found.items():
        if model in BEYOND_US:
            followed, bare = cases["in a row"], cases[f"{FLOOR}, in a row"]
            beyond_us = statistics.median(way.beyond_compute_us for way in followed.ways)
            beyond_us -= statistics.median(way.total_us for way in bare.ways)
            serving_ns = followed.uses["front end"].run_ns + followed.uses["scheduler"].run_ns
            report.target(f"{model} in a row: us beyond compute and do-nothing", beyond_us, BEYOND_US[model])
            serving_us = serving_ns / len(followed.trips) / 1e3
            report.target(f"{model} in a row: CPU us of front end and scheduler", serving_us, SERVING_US[model])


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", default="mobilenetv2,mlp", metavar="NAME,NAME", help="models to follow")
    parser.add_argument("--requests", type=int, default=5000, metavar="N", help="of a case, at most")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of a case, at most")
    parser.add_argument("--load", default="resnet50", metavar="NAME", help="model of the load beside the client")
    parser.add_argument("--load-rate", type=float, default=8.0, metavar="R", help="requests a second of the load")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the medians")
    options = parser.parse_args()
    models = options.models.split(",")
    repository = ensure_zoo(options.repository, [*models, options.load])
    ensure_profiles(repository, list(dict.fromkeys([*models, options.load])))
    report = start_report("where a request's time goes")
    QuietMachine().wait(limit_s=20)
    found = measure(repository, models, options.load, options.load_rate, options.requests, options.seconds)
    add_tables(report, found)
    add_targets(report, found)
    if options.picture:
        ways = {model: {name: followed.ways for name, followed in cases.items()} for model, cases in found.items()}
        draw(options.picture, ways)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
