"""Python models that misbehave, in every position of an ensemble and behind a BLS call: what do others notice of it?

An ONNX model with a latency target and another Python model are asked all the while, by turns alone and beside a model
that sleeps, forks, spins, leaks, or does not answer. Then that model's instances are killed: how soon is it back?
"""

import os
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import onnx

from benchmarks.faults.__main__ import BACK_WITHIN_S, Resources, resources_of
from gangway.clients.connection import SERVICE
from gangway.clients.inputs import Array, infer_request
from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import LiveServer, live_server
from testing.load import RIGHT, Load, LoadProcess, Outcome, raw_channel, raw_infer, running
from testing.processes import command_of, descendants_of, memory_of
from testing.report import Report, Row

BAD_LIMIT_S, BAD_LIMIT_MIB = 1.0, 600
CLIENTS, PAUSE_S, PATIENCE_S = 2, 0.02, 20.0
PACE_S = 0.005  # between two requests of a client that watches
PHASE_S, ROUNDS = 1.0, 2
WARM_UP_S = 0.3
SETTLE_TIMEOUT_S, BACK_TIMEOUT_S, POLL_S = 5.0, 30.0, 0.01
P99_RATIO, GROWN_MB = 2.0, 16.0
TARGET_MS = 20
MISDEEDS = {
    "nothing": "pass",
    "sleeps": "time.sleep(.3)",
    "forks": "os.fork() or time.sleep(3600)",
    "spins in threads": "self.once(lambda: [threading.Thread(target=spin, daemon=True).start() for _ in range(4)])",
    "spins in children": "self.once(lambda: [os.fork() or spin() for _ in range(4)])",
    "leaks": "self.left.append(np.ones(1 << 22))",
    "never answers": "time.sleep(3600)",
    "never ends": "spin()",
    "forgets": "return None",
    "raises": "raise KeyError('no such thing')",
    "exits": "sys.exit(3)",
    "kills itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "ignores that its client goes": "spin(time.monotonic() + .5)",
}
GIVEN_UP_AFTER_S = {"ignores that its client goes": 0.1, "forgets": 0.5}  # by a client
HEAD = """import os, signal, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


def spin(until=float("inf")):
    while time.monotonic() < until:
        pass


class TritonPythonModel:
    def initialize(self, args):
        self.left, self.begun = [], False

    def once(self, action):
        if not self.begun:
            self.begun = True
            action()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

"""
CHOICES = "".join(
    f"        if kind == {number}:\n            {code}\n" for number, code in enumerate(MISDEEDS.values())
)
MISBEHAVES = f"    def misbehave(self, kind):\n{CHOICES}        return True\n\n"
ANSWERS = """    def answer(self, request):
        x = request.inputs()[0].as_numpy()
        if self.misbehave(int(x[0, 0])):
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""
SENDS = """    def execute(self, requests):
        for request in requests:
            x, sender = request.inputs()[0].as_numpy(), request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
            if self.misbehave(int(x[0, 0])):
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLS = """    def answer(self, request):
        inner = pb_utils.InferenceRequest(model_name="bad", inputs=request.inputs(), requested_output_names=["y"])
        found = inner.exec()
        if found.has_error():
            return pb_utils.InferenceResponse(error=found.error())
        return pb_utils.InferenceResponse(found.output_tensors())
"""
KEEPS = """    def answer(self, request):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())])
"""
TENSOR = '{{ name: "{}" data_type: TYPE_FP32 dims: [4] }}'
TENSORS = f"max_batch_size: 4\ninput {TENSOR.format('x')}\noutput {TENSOR.format('y')}\n"
LIMITS = "".join(
    f'parameters {{ key: "gangway_python_{key}" value {{ string_value: "{value}" }} }}\n'
    for key, value in (("timeout_s", BAD_LIMIT_S), ("memory_mib", BAD_LIMIT_MIB))
)
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
PYTHON_MODELS = {
    "bad": (MISBEHAVES + ANSWERS, LIMITS),
    "sends": (MISBEHAVES + SENDS, LIMITS + DECOUPLED),
    "calls": (CALLS, ""),
    "keeps": (KEEPS, ""),
    "other": (KEEPS, ""),
}
ENSEMBLES: dict[str, Sequence[str | tuple[str, ...]]] = {
    "first": ("bad", "keeps", "keeps"),
    "middle": ("keeps", "bad", "keeps"),
    "last": ("keeps", "keeps", "bad"),
    "between ONNX": ("same", "bad", "same"),
    "beside ONNX": (("bad", "same"),),
    "decoupled": ("keeps", "sends", "keeps"),
    "behind BLS": ("same", "calls"),
}
POSITIONS = {"alone": "bad", "BLS": "calls", **{name: name.replace(" ", "_") for name in ENSEMBLES}}
CONNECTIONS = 5 * 3 * len(PYTHON_MODELS)  # descriptors of all that a front end and two workers may keep
WATCHED = {"onnx": "same", "python": "other"}


@dataclass(frozen=True)
class Held:
    """What must not grow: that of the server's own processes, all processes, and the threads of its own."""

    own: Resources
    processes: int
    threads: int

    def exceed(self, before: "Held") -> int:
        """Count what was not there before, memory apart."""
        grown = self.processes - before.processes, self.threads - before.threads
        return self.own.exceed(before.own) + sum(max(0, more) for more in grown)


@dataclass
class Phases:
    """When a misdeed was done, and when nothing was: CLOCK_MONOTONIC ns. And how its requests ended."""

    alone: list[tuple[int, int]] = field(default_factory=list)
    beside: list[tuple[int, int]] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    back_s: list[float] = field(default_factory=list)
    leaks: int = 0


@dataclass(frozen=True)
class Seen:
    """All situations, what the requests of others came to, and the memory of each process before and after, MB."""

    phases: dict[tuple[str, str], Phases]
    others: dict[str, list[Outcome]]
    memory_mb: dict[str, tuple[float, float]]

    def p99_ms(self, who: str, spans: Sequence[tuple[int, int]]) -> float:
        """Return the median over some spans of the 99th percentile of the right answers in them."""
        found = []
        for begin_ns, end_ns in spans:
            inside = [o for o in self.others[who] if begin_ns <= o.begin_ns < end_ns and o.result == RIGHT]
            taken = sorted((o.end_ns - o.begin_ns) / 1e6 for o in inside)
            found.append(taken[int(0.99 * len(taken))] if taken else float("inf"))
        return statistics.median(found)

    def ratio(self, who: str, misdeed: str) -> float:
        """Return the 99th percentile beside a misdeed in all its positions, over that alone."""
        mine = [phases for (name, _), phases in self.phases.items() if name == misdeed]
        beside = self.p99_ms(who, [span for each in mine for span in each.beside])
        return beside / self.p99_ms(who, [span for each in mine for span in each.alone])

    def not_right(self) -> Counter[str]:
        """Count what others got in the place of their answers."""
        return Counter(o.result for outcomes in self.others.values() for o in outcomes if o.result != RIGHT)

    def rows(self) -> Iterator[Row]:
        """Return a line for each situation."""
        for (misdeed, position), phases in self.phases.items():
            p99_ms: Row = {
                f"{who} {when}": self.p99_ms(who, spans)
                for who in WATCHED
                for when, spans in (("alone", phases.alone), ("beside", phases.beside))
            }
            ends = ", ".join(f"{count} {name}" for name, count in phases.ends.most_common())
            yield {
                "misdeed": misdeed,
                "position": position,
                **p99_ms,
                "its ends": ends,
                "back s": statistics.median(phases.back_s),
                "leaks": phases.leaks,
            }


def write_repository(repository: Path) -> None:
    """Write models and ensembles; `same` is an ONNX model with a target."""
    text = '<ir_version: 8, opset_import: ["" : 17]> same (float[n, 4] x) => (float[n, 4] y) { y = Mul(x, one) }'
    model = onnx.parser.parse_model(text.replace("{ y", "<float[1] one = {1.0}> { y", 1))
    (repository / "same" / "1").mkdir(parents=True)
    onnx.save(model, repository / "same" / "1" / "model.onnx")
    target = f'parameters {{ key: "qos_ms" value {{ string_value: "{TARGET_MS}" }} }}\n'
    (repository / "same" / "config.pbtxt").write_text(f'platform: "onnxruntime_onnx"\n{TENSORS}{target}')
    for name, (code, more) in PYTHON_MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(HEAD + code)
        (repository / name / "config.pbtxt").write_text(f'backend: "python"\n{TENSORS}{more}')
    for name, steps in ENSEMBLES.items():
        (repository / POSITIONS[name] / "1").mkdir(parents=True)
        (repository / POSITIONS[name] / "config.pbtxt").write_text(_ensemble(steps))


def _ensemble(steps: Sequence[str | tuple[str, ...]]) -> str:
    """Steps one after the other; those of a tuple get the same tensor, and each gives an output."""
    lines, known, more = [], "x", ""
    for number, step in enumerate(steps):
        models = (step,) if isinstance(step, str) else step
        gives = "y" if number == len(steps) - 1 else f"t{number}"
        for extra, model in enumerate(models):
            name = f"{gives}{extra or ''}"
            more += f"output {TENSOR.format(name)}\n" if extra else ""
            maps = f'input_map {{ key: "x" value: "{known}" }} output_map {{ key: "y" value: "{name}" }}'
            lines.append(f'step {{ model_name: "{model}" model_version: -1 {maps} }}')
        known = gives
    return f'platform: "ensemble"\n{TENSORS}{more}ensemble_scheduling {{ {" ".join(lines)} }}\n'


def tensor_of(misdeed: str) -> Array:
    """Return what asks for a misdeed."""
    return np.full((1, 4), list(MISDEEDS).index(misdeed), np.float32)


def asked(channel: grpc.Channel, position: str, misdeed: str, timeout_s: float = PATIENCE_S) -> str:
    """Ask once, by a stream where the model is decoupled; return how it ended."""
    request = infer_request(POSITIONS[position], "", {"x": ("FP32", tensor_of(misdeed))})
    try:
        if position != "decoupled":
            raw_infer(channel)(request.SerializeToString(), timeout=timeout_s)
            return RIGHT
        stream = channel.stream_stream(
            SERVICE + "ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        errors = [answer.error_message for answer in stream(iter([request]), timeout=timeout_s) if answer.error_message]
    except grpc.RpcError as error:
        return str(error.code().name)
    return "error in the stream" if errors else RIGHT


def instances_of(server: LiveServer, *models: str) -> list[int]:
    """Return the processes of models' instances, and what they have started."""
    found = []
    for pid in descendants_of(server.process.pid):
        with suppress(OSError):
            if "python_backend" in command_of(pid) and Path(f"/proc/{pid}/cwd").readlink().name in models:
                found.append(pid)
    return found


def held(server: LiveServer) -> Held:
    """Count what the server holds. Raises OSError where a process ends meanwhile."""
    own = [pid for pids in server.pids().values() for pid in pids]
    threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in own)
    return Held(resources_of(server), len(descendants_of(server.process.pid)), threads)


def leaks_of(server: LiveServer, before: Held) -> int:
    """Return what the server holds beyond what it held before, when that is nothing, or for long."""
    deadline, found = time.monotonic() + SETTLE_TIMEOUT_S, 1
    while found and time.monotonic() < deadline:
        time.sleep(POLL_S)
        with suppress(OSError):
            found = held(server).exceed(before)
    return found


def memory_mb(server: LiveServer) -> dict[str, float]:
    """Return the memory of the server's own processes by role."""
    return {role: sum(memory_of(pid).pss_bytes for pid in pids) / 1e6 for role, pids in server.pids().items()}


def misbehave(server: LiveServer, position: str, misdeed: str, seconds: float) -> Counter[str]:
    """Have clients ask for a misdeed for some time; return how their requests ended."""
    over, ends = threading.Event(), Counter[str]()
    timeout_s = GIVEN_UP_AFTER_S.get(misdeed, PATIENCE_S)

    def ask() -> None:
        with raw_channel(server.url) as channel:
            while not over.wait(PAUSE_S):
                ends[asked(channel, position, misdeed, timeout_s)] += 1

    with running([ask] * CLIENTS, over):
        time.sleep(seconds)
    return ends


def back_after_s(server: LiveServer, position: str) -> float:
    """Kill the instances that misbehave with all that they have started; return the seconds until they answer."""
    begin_s = time.monotonic()
    for pid in instances_of(server, _misbehaving(position)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(POLL_S)
    with raw_channel(server.url) as channel:
        while asked(channel, position, "nothing") != RIGHT:
            if time.monotonic() > begin_s + BACK_TIMEOUT_S:
                return float("inf")
            time.sleep(POLL_S)
    return time.monotonic() - begin_s


def run(
    names: Sequence[str] = ("",),
    phase_s: float = PHASE_S,
    rounds: int = ROUNDS,
    positions: Sequence[str] = tuple(POSITIONS),
) -> Seen:
    """Try each misdeed whose name contains one of `names`, in some positions, by turns with nothing."""
    misdeeds = [each for each in MISDEEDS if each != "nothing" and any(name in each for name in names)]
    phases = {(misdeed, position): Phases() for misdeed in misdeeds for position in positions}
    with serving() as server:
        with ExitStack() as stack:
            loads = {who: stack.enter_context(LoadProcess(_watching(server, who))) for who in WATCHED}
            for position in positions:  # what is made once is no leak: connections, threads
                misbehave(server, position, "raises", WARM_UP_S)
                back_after_s(server, position)
            watched = _settled_with_load(server)
            memory_before = memory_mb(server)
            for _ in range(rounds):
                for (misdeed, position), seen in phases.items():
                    try_once(server, position, misdeed, seen, watched, phase_s)
            others = {who: load.stop().outcomes for who, load in loads.items()}
        memory_after = memory_mb(server)
        return Seen(phases, others, {role: (memory_before[role], memory_after[role]) for role in memory_before})


def _misbehaving(position: str) -> str:
    return "sends" if position == "decoupled" else "bad"


def load_anew(server: LiveServer, name: str) -> None:
    """Load a model anew: an instance that has died often is started after pauses."""
    with grpc.insecure_channel(server.url) as channel:
        load = channel.unary_unary(
            SERVICE + "RepositoryModelLoad",
            request_serializer=pb.RepositoryModelLoadRequest.SerializeToString,
            response_deserializer=pb.RepositoryModelLoadResponse.FromString,
        )
        load(pb.RepositoryModelLoadRequest(model_name=name), timeout=PATIENCE_S)


def try_once(
    server: LiveServer, position: str, misdeed: str, seen: Phases, before: Held, phase_s: float = PHASE_S
) -> None:
    """Do nothing, misbehave, kill and count; note it all."""
    load_anew(server, _misbehaving(position))
    begin_ns = time.monotonic_ns()
    time.sleep(phase_s)
    seen.alone.append((begin_ns, time.monotonic_ns()))
    begin_ns = time.monotonic_ns()
    seen.ends += misbehave(server, position, misdeed, phase_s)
    seen.beside.append((begin_ns, time.monotonic_ns()))
    seen.back_s.append(back_after_s(server, position))
    seen.leaks += leaks_of(server, before)


@contextmanager
def serving() -> Iterator[LiveServer]:
    """Serve the models."""
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder) / "models")
        flags = [f"--cache-dir={folder}/cache", "--model-control-mode=explicit", "--load-model=*"]
        with live_server(Path(folder) / "models", flags) as server:
            yield server


def _watching(server: LiveServer, who: str) -> Load:
    x = np.ones((1, 4), np.float32)
    request = infer_request(WATCHED[who], "", {"x": ("FP32", x)}).SerializeToString()
    return Load(server.url, request, {"y": x}, clients=1, timeout_s=PATIENCE_S, pause_s=PACE_S)


def _settled_with_load(server: LiveServer) -> Held:
    """Return the most that the server holds while others are asked."""
    seen = []
    for _ in range(20):
        time.sleep(POLL_S)
        seen.append(held(server))
    own = seen[0].own
    most = Resources(own.processes, own.descriptors + CONNECTIONS, own.shm_names, len(WATCHED), own.memory_mb)
    return Held(most, seen[0].processes, max(each.threads for each in seen))


def report_python_models(report: Report, names: Sequence[str]) -> None:
    """Run what is asked for; print a line for each situation, and hold all against the bounds."""
    seen = run(names)
    report.table("Python models that misbehave", list(seen.rows()))
    memory: list[Row] = [{"process": role, "MB before": a, "MB after": b} for role, (a, b) in seen.memory_mb.items()]
    report.table("memory", memory)
    for misdeed in dict.fromkeys(name for name, _ in seen.phases):
        mine = [phases for (name, _), phases in seen.phases.items() if name == misdeed]
        for who in WATCHED:
            report.target(f"{misdeed}: p99 of {who}, over that alone", seen.ratio(who, misdeed), P99_RATIO)
        back_s = statistics.median(second for phases in mine for second in phases.back_s)
        report.target(f"{misdeed}: back after s, median", back_s, BACK_WITHIN_S)
        report.target(f"{misdeed}: leaks", sum(phases.leaks for phases in mine), 0)
    report.target("others: not answered rightly", seen.not_right().total(), 0)
    for role, (before, after) in seen.memory_mb.items():
        report.target(f"memory of {role}: grown by MB", after - before, GROWN_MB)
