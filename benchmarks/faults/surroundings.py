"""What surroundings and clients do to a server besides kill -9: limits, hangs, poison, bombs and silent connections.

Each situation has a server of its own. A small model is asked all the time, and health over HTTP: who notices what?
"""

import gzip
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from benchmarks.faults.__main__ import Resources, longest_gap_s, resources_of, settled
from gangway.clients.inputs import infer_request
from testing.cgroup import Cgroup
from testing.live_server import LiveServer, live_server
from testing.load import RIGHT, Load, LoadProcess, Outcome, raw_channel, raw_infer, running
from testing.raw_connection import RawConnection
from testing.reference import example_of
from testing.report import Report, Row
from testing.repository import ensure_zoo, onnx_file

WATCHED, IMAGES, POISON = "mlp", "mobilenetv2", "divide"
PACE_S = 0.005  # between two requests of the client that watches
QUIET_S = 5.0  # watched before the fault, and behind it
FAULT_S = 5.0
AFTERWARDS_S = 2.0  # from the end of the fault on in which the service must be back
BACK_WITHIN_S, BACK_WITHIN_AFTER_HANG_S = 1.0, 2.0
P99_RATIO = 2.0
TIMEOUT_S = 30.0
ALLOWED = (RIGHT, "UNAVAILABLE", "RESOURCE_EXHAUSTED")
MEMORY_LIMIT_BYTES = 420 << 20
SILENT_CONNECTIONS, SLOW_BODIES, HALF_CALLS = 4096, 200, 200
BOMB_BYTES = 16 << 20


@dataclass(frozen=True)
class Scene:
    """A server that is about to be disturbed."""

    server: LiveServer
    repository: Path
    cache_dir: Path
    cgroup: Cgroup | None

    def group(self) -> Cgroup:
        """The server's own cgroup."""
        assert self.cgroup is not None
        return self.cgroup

    def pid(self, role: str) -> int:
        """The first process of a role."""
        return self.server.pids()[role][0]


@dataclass(frozen=True)
class Situation:
    """What happens to a server: `disturb` returns when the fault is over. `controller`: of the cgroup that it needs.

    What `disturb` returns is how many seconds that was away which it disturbed, for others than those that watch.
    `bounds_p99`: others shall not be slowed down while it lasts; where processes die or hang the outage counts.
    `open_files`: `ulimit -n` of the server. `write`: adds models to its repository, which are loaded on demand.
    `flags`: further ones of the server.
    """

    name: str
    disturb: Callable[[Scene], float | None]
    controller: str = ""
    memory_bytes: int = 0  # limit of that cgroup from the start on
    back_within_s: float = BACK_WITHIN_S
    bounds_p99: bool = False
    open_files: int = 0
    write: Callable[[Path], None] | None = None
    flags: Sequence[str] = ()


@dataclass(frozen=True)
class Watched:
    """What others noticed of a situation: CLOCK_MONOTONIC ns, and how their requests ended."""

    situation: Situation
    begin_ns: int
    end_ns: int
    outcomes: list[Outcome]
    health: list[tuple[int, int, float]]  # asked at ns, status (0: none), seconds
    before: Resources
    after: Resources
    alive: bool
    out_of_memory_kills: int = 0
    away_s: float | None = None

    def outage_s(self) -> float:
        """Return the longest time without a right answer that began during the fault or shortly after it."""
        right_ns = [outcome.end_ns for outcome in self.outcomes if outcome.result == RIGHT]
        return longest_gap_s(right_ns, self.begin_ns, self.end_ns + int(AFTERWARDS_S * 1e9))

    def p99_ms(self, during: bool) -> float:
        """Return the 99th percentile of right answers while the fault lasted, or while it did not."""
        return _p99(
            (outcome.end_ns - outcome.begin_ns) / 1e6
            for outcome in self.outcomes
            if outcome.result == RIGHT and (self.begin_ns <= outcome.begin_ns < self.end_ns) == during
        )

    def not_allowed(self) -> Counter[str]:
        """Count requests by an end that none may have."""
        return Counter(outcome.result for outcome in self.outcomes if outcome.result not in ALLOWED)

    def row(self) -> Row:
        """Return a line of the table."""
        health = [seconds for at_ns, status, seconds in self.health if self.begin_ns <= at_ns < self.end_ns]
        refused = sum(status != 200 for at_ns, status, _ in self.health if self.begin_ns <= at_ns < self.end_ns)
        counts = Counter(outcome.result for outcome in self.outcomes)
        return {
            "situation": self.situation.name,
            "right": counts[RIGHT],
            "refused": sum(counts[name] for name in ALLOWED[1:]),
            "else": ", ".join(f"{count} {name}" for name, count in self.not_allowed().items()) or "none",
            "p99 ms before": self.p99_ms(False),
            "while it lasts": self.p99_ms(True),
            "outage s": self.outage_s(),
            "live, worst s": max(health, default=0.0),
            "not live": refused,
        }


def _p99(values: Iterator[float] | Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[int(0.99 * len(ordered))] if ordered else float("inf")


@contextmanager
def watching_health(url: str) -> Iterator[list[tuple[int, int, float]]]:
    """Ask for liveness over HTTP, each time over a new connection, twenty times a second while the block lasts."""
    seen: list[tuple[int, int, float]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.05):
            begin_ns, status = time.monotonic_ns(), 0
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(url, timeout=5)
                connection.request("GET", "/v2/health/live")
                status = connection.getresponse().status
                connection.close()
            seen.append((begin_ns, status, (time.monotonic_ns() - begin_ns) / 1e9))

    with running([ask], over):
        yield seen


def repeat(action: Callable[[], object], clients: int, seconds: float = FAULT_S) -> None:
    """Let so many threads do something again and again; errors of the network are the server's answer."""
    over = threading.Event()

    def loop() -> None:
        while not over.is_set():
            with suppress(OSError, http.client.HTTPException):
                action()

    with running([loop] * clients, over):
        time.sleep(seconds)


def post(url: str, model: str, body: bytes, headers: dict[str, str] | None = None) -> int:
    """Send an inference request over HTTP; return the status. Raises OSError."""
    connection = http.client.HTTPConnection(url, timeout=TIMEOUT_S)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", body, headers or {})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def _no_threads(scene: Scene) -> None:
    group = scene.group()
    group.write("pids.max", int(group.read("pids.current")) + 4)
    with RawConnection(scene.server.url) as connection:
        with suppress(OSError):
            for _ in range(HALF_CALLS):
                connection.begin("ModelMetadata")
        time.sleep(FAULT_S)
    group.write("pids.max", "max")


def _no_descriptors(scene: Scene) -> None:
    """No descriptor is free in supervisor and front end; a worker dies meanwhile."""
    pids = [scene.server.process.pid, *scene.server.pids()["front end"]]
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids}
    for pid, (_, hard) in limits.items():
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        free = next(number for number in range(len(used) + 1) if number not in used)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
    os.kill(scene.pid("worker"), signal.SIGKILL)
    time.sleep(FAULT_S)
    for pid, before in limits.items():
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _fewer_cores(scene: Scene) -> None:
    """The last core is taken away and a worker dies; then the core comes back."""
    group = scene.group()
    name = "cpuset.cpus"
    all_cores = group.read(name) or group.read("cpuset.cpus.effective")
    first = sorted(os.sched_getaffinity(scene.pid("supervisor")))[0]
    group.write(name, first)
    os.kill(scene.server.pids()["worker"][-1], signal.SIGKILL)
    time.sleep(FAULT_S)
    group.write(name, all_cores)


def _little_memory(scene: Scene) -> None:
    """Ordinary clients: images one by one as JSON, and in batches of 8 as binary tensors over gRPC."""
    image = np.ones((1, 3, 224, 224), np.float32)
    tensor = {"name": "input", "datatype": "FP32", "shape": list(image.shape), "data": image.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    batch = infer_request(IMAGES, "", {"input": ("FP32", image.repeat(8, axis=0))}).SerializeToString()
    with raw_channel(scene.server.url) as channel:
        infer = raw_infer(channel)
        turns = iter(range(10**9))

        def ask() -> None:
            if next(turns) % 2:
                post(scene.server.http_url, IMAGES, body)
            else:
                infer.future(batch, timeout=TIMEOUT_S).exception()

        repeat(ask, clients=8, seconds=2 * FAULT_S)


def _stopped(role: str) -> Callable[[Scene], None]:
    """Return what stops a process by SIGSTOP; nobody continues it."""

    def stop(scene: Scene) -> None:
        os.kill(scene.pid(role), signal.SIGSTOP)
        time.sleep(FAULT_S)

    return stop


def _poison(scene: Scene) -> None:
    least = [("a", -(2**63)), ("b", -1)]
    inputs = [{"name": name, "datatype": "INT64", "shape": [1, 1], "data": [value]} for name, value in least]
    inputs.append({"name": "s", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]})
    body = json.dumps({"inputs": inputs}).encode()
    repeat(lambda: post(scene.server.http_url, POISON, body), clients=3, seconds=4 * FAULT_S)


def _right(scene: Scene) -> None:
    """Two clients ask rightly, as often as others ask wrongly: what a bomb costs is to be compared with that."""
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}
    body = json.dumps({"inputs": [tensor]}).encode()
    repeat(lambda: post(scene.server.http_url, WATCHED, body), clients=2)


def _bombs(content: bytes) -> Callable[[Scene], None]:
    """Return what sends a gzip body by two clients that wait for the answer."""
    bomb = gzip.compress(content, 9)

    def send(scene: Scene) -> None:
        repeat(lambda: post(scene.server.http_url, WATCHED, bomb, {"Content-Encoding": "gzip"}), clients=2)

    return send


def _json_objects() -> bytes:
    return b'{"inputs":[' + (b'{"a":1},' * (BOMB_BYTES // 8))[:-1] + b"]}"


def _json_numbers() -> bytes:
    numbers = (b"0," * (BOMB_BYTES // 2))[:-1]
    return b'{"inputs":[{"name":"input","datatype":"FP32","shape":[1,16],"data":[' + numbers + b"]}]}"


def _silent(scene: Scene) -> None:
    """Thousands of connections say nothing."""
    with ExitStack() as stack:
        stack.enter_context(_descriptors(SILENT_CONNECTIONS + 1000))
        for _ in range(SILENT_CONNECTIONS):
            with suppress(OSError):
                stack.enter_context(_connect(scene.server.http_url))
        time.sleep(FAULT_S)


def _slow(scene: Scene) -> None:
    """Bodies of a MiB come a byte at a time."""
    head = f"POST /v2/models/{WATCHED}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 20}\r\n\r\n".encode()
    with ExitStack() as stack:
        connections = [stack.enter_context(_connect(scene.server.http_url)) for _ in range(SLOW_BODIES)]
        for connection in connections:
            connection.sendall(head)
        end = time.monotonic() + 2 * FAULT_S
        while time.monotonic() < end:
            for connection in connections:
                with suppress(OSError):
                    connection.send(b" ")
            time.sleep(0.2)


def _connect(url: str) -> socket.socket:
    host, _, port = url.rpartition(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


@contextmanager
def _descriptors(count: int) -> Iterator[None]:
    """Allow this process so many open files. Raises ValueError where the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _cache_away(scene: Scene) -> None:
    """The cache folder is away for 2 s, in which a worker dies."""
    away = scene.cache_dir.with_name("away")
    scene.cache_dir.rename(away)
    os.kill(scene.pid("worker"), signal.SIGKILL)
    time.sleep(2)
    if scene.cache_dir.exists():
        shutil.rmtree(scene.cache_dir)
    away.rename(scene.cache_dir)
    time.sleep(FAULT_S - 2)


HANG_S = BACK_WITHIN_AFTER_HANG_S
SITUATIONS = (
    Situation("no more threads", _no_threads, "pids"),
    Situation("no more descriptors, a worker dies", _no_descriptors),
    Situation("a core less, a worker dies", _fewer_cores, "cpuset"),
    Situation("420 MiB of memory", _little_memory, "memory", MEMORY_LIMIT_BYTES),
    Situation("scheduler stopped", _stopped("scheduler"), back_within_s=HANG_S),
    Situation("front end stopped", _stopped("front end"), back_within_s=HANG_S),
    Situation("poison requests", _poison),
    Situation("right requests, to compare with", _right),
    Situation("gzip of 16 MiB of JSON objects", _bombs(_json_objects()), bounds_p99=True),
    Situation("gzip of 16 MiB of numbers", _bombs(_json_numbers()), bounds_p99=True),
    Situation("slow bodies", _slow, bounds_p99=True),
    Situation("4096 silent connections", _silent, bounds_p99=True),
    Situation("cache away for 2 s, a worker dies", _cache_away),
)


def watch(situation: Situation, zoo: Path) -> Watched:
    """Disturb a server of its own while a small model is asked. Raises OSError where no cgroup can be made."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        repository, cache_dir = folder / "models", folder / "cache"
        write_repository(repository, zoo)
        cgroup = Cgroup(situation.controller) if situation.controller else None
        if cgroup is not None:
            stack.callback(cgroup.remove)
            if situation.memory_bytes:
                cgroup.limit_memory(situation.memory_bytes)
        warm_cache(repository, cache_dir)
        prefix = [*(cgroup.prefix if cgroup else ())]
        if situation.open_files:
            prefix += ["sh", "-c", f'ulimit -n {situation.open_files} && exec "$@"', "sh"]
        flags = [f"--cache-dir={cache_dir}", *situation.flags]
        if situation.write is not None:
            flags += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in os.listdir(repository))]
            situation.write(repository)
        server = stack.enter_context(live_server(repository, flags, prefix=prefix))
        health = stack.enter_context(watching_health(server.http_url))
        example = example_of(WATCHED, onnx_file(zoo, WATCHED))
        before = resources_of(server)
        load = Load(server.url, example.request, example.outputs, clients=1, timeout_s=TIMEOUT_S, pause_s=PACE_S)
        with LoadProcess(load) as process:
            time.sleep(QUIET_S)
            begin_ns = time.monotonic_ns()
            away_s = situation.disturb(Scene(server, repository, cache_dir, cgroup))
            end_ns = time.monotonic_ns()
            time.sleep(QUIET_S)
            outcomes = process.stop().outcomes
        alive = server.process.poll() is None
        after = settled(server, before) if alive else before
        kills = cgroup.out_of_memory_kills() if cgroup and situation.memory_bytes else 0
        return Watched(situation, begin_ns, end_ns, outcomes, list(health), before, after, alive, kills, away_s)


def write_repository(repository: Path, zoo: Path) -> None:
    """Link two models of the zoo, and write one whose requests can kill a process of onnxruntime."""
    ensure_zoo(zoo, [WATCHED, IMAGES])
    repository.mkdir()
    for name in (WATCHED, IMAGES):
        (repository / name).symlink_to(zoo.resolve() / name)
    text = """<ir_version: 8, opset_import: ["" : 17]>
        divide (int64[n, 1] a, int64[n, 1] b, string[n, 1] s) => (int64[n, 1] c, string[n, 1] t)
        { c = Div(a, b)  t = Identity(s) }"""
    (repository / POISON / "1").mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(text), repository / POISON / "1" / "model.onnx")


def warm_cache(repository: Path, cache_dir: Path) -> None:
    """Compile everything: what is measured begins with a server that finds its models."""
    with live_server(repository, [f"--cache-dir={cache_dir}"]):
        pass


def report_surroundings(report: Report, zoo: Path, situations: Sequence[Situation], names: Sequence[str]) -> None:
    """Run the situations whose names contain one of `names`; print a line for each and its bounds."""
    seen: list[Watched] = []
    for situation in situations:
        if not any(name in situation.name for name in names):
            continue
        try:
            seen.append(watch(situation, zoo))
        except OSError as error:
            print(f"{situation.name}: not tried here: {error}")
    if seen:
        report.table("surroundings", [one.row() for one in seen])
    for one in seen:
        name = one.situation.name
        report.target(f"{name}: ends that none may have", one.not_allowed().total(), 0)
        report.target(f"{name}: outage, s", one.outage_s(), one.situation.back_within_s)
        report.target(f"{name}: leaks", one.after.exceed(one.before), 0)
        report.target(f"{name}: server ended", not one.alive, 0)
        if one.situation.bounds_p99:
            report.target(f"{name}: p99, over that before and after", one.p99_ms(True) / one.p99_ms(False), P99_RATIO)
        if one.away_s is not None:
            report.target(f"{name}: what was disturbed is back after, s", one.away_s, BACK_WITHIN_S)
        if one.situation.memory_bytes:
            report.target(f"{name}: processes killed for memory", one.out_of_memory_kills, 0)
