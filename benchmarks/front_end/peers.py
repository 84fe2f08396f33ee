"""What a request costs beside real Triton: the same models, clients and machine, the servers in alternating rounds."""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front_end.grpc_floor import floor_server
from benchmarks.front_end.pass_models import CORNER, IDENTITY, PASS_MODELS, PYTHON, write_pass_models
from benchmarks.front_end.transports import ALIGNED, UNALIGNED, in_region, region_with
from benchmarks.peers.triton_server import CONFIGURATIONS, triton_server
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.control.supervisor.shared_memory import place
from testing.cost import ROLES, Pids, Stretch, cost_columns, measure_stretch, median_of
from testing.fetching import FetchError
from testing.live_server import live_server
from testing.load import Load, raw_channel
from testing.processes import descendants_of
from testing.reference import Example, example_of
from testing.report import Report, Row
from testing.repository import onnx_file

OURS, TRITON, FLOOR = "gangway", "triton", "grpcio alone"
TRITON_CONFIGURATION = CONFIGURATIONS["triton 1x1"]  # one process for each model: the least CPU
MLP = "mlp"
RATIO = 1.0


@dataclass(frozen=True)
class Case:
    """A model, the number of clients, and whether the input is in system shared memory."""

    model: str
    clients: int
    shared_memory: bool = False

    def __str__(self) -> str:
        where = ", shared memory" if self.shared_memory else ""
        return f"{self.model}{where}, {self.clients} clients"


CASES = (
    *(Case(model, clients) for model in (MLP, IDENTITY.name) for clients in (1, 8, 32)),
    *(Case(CORNER.name, clients, shared) for clients in (1, 8) for shared in (False, True)),
)


@dataclass(frozen=True)
class Peer:
    """A server that answers at `url`, and its processes by role."""

    url: str
    pids: Pids


Found = Mapping[Case, Mapping[str, list[Stretch]]]  # by name of the server, in order of the rounds


@contextmanager
def peers(repository: Path, examples: Mapping[str, Example]) -> Iterator[Mapping[str, Peer]]:
    """Start all servers, Triton only if it can be had. Each knows an image of CORNER as a region."""
    with ExitStack() as stack:
        gangway = stack.enter_context(live_server(repository))
        url, pid = stack.enter_context(floor_server(examples, place(sorted(os.sched_getaffinity(0))).front_ends[0]))
        found = {OURS: Peer(gangway.url, gangway.pids), FLOOR: Peer(url, lambda: {"front end": [pid]})}
        try:
            codes = dict.fromkeys((model.name for model in PASS_MODELS), PYTHON)
            names = list(examples)
            triton = stack.enter_context(triton_server(repository, names, TRITON_CONFIGURATION, codes))
        except FetchError as error:
            print(f"without Triton: {error}", file=sys.stderr)
        else:
            server = triton.process.pid
            found[TRITON] = Peer(triton.url, lambda: {"front end": [server], "worker": descendants_of(server)})
        (image,) = pb.ModelInferRequest.FromString(examples[CORNER.name].request).raw_input_contents
        for peer in found.values():
            channel = stack.enter_context(raw_channel(peer.url))
            stack.enter_context(region_with(channel, image, len(image) + UNALIGNED))
        yield found


@contextmanager
def repository_of(source: Path) -> Iterator[Path]:
    """Make a repository of MLP, taken from another one, and PASS_MODELS."""
    with tempfile.TemporaryDirectory() as folder:
        write_pass_models(Path(folder))
        (Path(folder) / MLP).symlink_to((source / MLP).resolve())
        yield Path(folder)


def measure(source: Path, rounds: int, seconds: float) -> Found:
    """Measure every case on every server; they take turns, so that all of them see the same machine."""
    found: dict[Case, dict[str, list[Stretch]]] = {case: {} for case in CASES}
    with repository_of(source) as repository:
        names = [MLP, *(model.name for model in PASS_MODELS)]
        examples = {name: example_of(name, onnx_file(repository, name)) for name in names}
        with peers(repository, examples) as servers:
            for number in range(rounds):
                turns = list(servers.items())
                turns = turns[number % len(turns) :] + turns[: number % len(turns)]  # nobody always comes first
                for case in CASES:
                    for name, peer in turns:
                        load = _load(peer.url, case, examples[case.model])
                        found[case].setdefault(name, []).append(measure_stretch(peer.pids, load, seconds))
    return found


def _load(url: str, case: Case, example: Example) -> Load:
    request = in_region(example.request, ALIGNED, 0) if case.shared_memory else example.request
    return Load(url, request, example.outputs, case.clients)


def rows_of(found: Found) -> list[Row]:
    """Return medians over the rounds, a row for each case and server."""
    return [_row(case, name, stretches) for case, servers in found.items() for name, stretches in servers.items()]


def _row(case: Case, name: str, stretches: Sequence[Stretch]) -> Row:
    cpu_us = {role: median_of(stretches, lambda stretch, role=role: stretch.cpu_us(role)) for role in ROLES}
    return {
        "case": str(case),
        "server": name,
        "p50 ms": median_of(stretches, lambda stretch: stretch.latency_ms(0.5)),
        "p99 ms": median_of(stretches, lambda stretch: stretch.latency_ms(0.99)),
        "requests/s": median_of(stretches, lambda stretch: stretch.requests_per_s),
        "CPU us, all": median_of(stretches, lambda stretch: stretch.all_cpu_us),
        **cost_columns(cpu_us, median_of(stretches, lambda stretch: stretch.client_us)),
    }


FIGURES: Mapping[str, Callable[[Stretch], float]] = {
    "CPU": lambda stretch: stretch.all_cpu_us,
    "p50": lambda stretch: stretch.latency_ms(0.5),
    "p99": lambda stretch: stretch.latency_ms(0.99),
    "requests/s": lambda stretch: stretch.requests_per_s,
}


@dataclass(frozen=True)
class Ratio:
    """Ours over another server's: medians of the rounds' ratios, since both sides of a round saw the same machine."""

    ours: Sequence[Stretch]
    others: Sequence[Stretch]

    def of(self, name: str) -> float:
        """Return the ratio of one of FIGURES; NaN without the other server."""
        figure = FIGURES[name]
        pairs = zip(self.ours, self.others, strict=bool(self.others))
        return statistics.median([figure(mine) / figure(other) for mine, other in pairs] or [float("nan")])


def compare(report: Report, source: Path, rounds: int, seconds: float) -> None:
    """Measure, print tables, and set our CPU time against Triton's."""
    found = measure(source, rounds, seconds)
    report.table("beside Triton: medians, CPU microseconds per request", rows_of(found))
    ratios = {case: Ratio(servers[OURS], servers.get(TRITON, ())) for case, servers in found.items()}
    over_floor = {case: Ratio(servers[OURS], servers[FLOOR]) for case, servers in found.items()}
    rows = [
        {
            "case": str(case),
            **{figure: ratio.of(figure) for figure in FIGURES},
            "CPU / floor": over_floor[case].of("CPU"),
        }
        for case, ratio in ratios.items()
    ]
    report.table("ours over Triton's, and over a gRPC server that does nothing", rows)
    for case, ratio in ratios.items():
        report.target(f"{case}: CPU of all processes, over Triton's", ratio.of("CPU"), RATIO)
