"""How the supervisor starts the scheduler, and their control messages: structs as JSON, one a packet.

The supervisor rings the scheduler's bell after every message, so that the scheduler has one thing to wait on.
"""

import socket
import subprocess
from dataclasses import dataclass

import msgspec

from gangway.base import json_codec
from gangway.base.logs import LogLevels
from gangway.base.peer import Peer
from gangway.base.process import raise_priority
from gangway.base.python_process import start_of


@dataclass(frozen=True)
class SchedulerPlan:
    """What the process inherits (descriptors), and how it shall work. Every io segment begins with `slots` slots."""

    control_fd: int
    arena_fd: int
    io_fds: tuple[int, ...]
    supervisor_fd: int
    slots: int
    policy: str
    spin_us: int = 0
    way_back_us: int = 0  # of an answer, from the last layer's end to the client, when the machine is busy
    dispatch_us: int = 0  # of the workers' cores, what each dispatch takes
    trace: str = ""  # file for decisions; empty: none
    timeline: str = ""  # file for Perfetto; empty: none
    nodes: tuple[tuple[int, ...], ...] = ()  # the workers of each NUMA node; empty: there is one
    log_levels: int = LogLevels().to_number()
    models_bytes: int = 0  # that all models may hold; 0: any number
    bell_fds: tuple[int, ...] = ()  # eventfds of front ends: the slot tables name them, so no argument does


def start_scheduler(plan: SchedulerPlan, stderr: int | None = None) -> "subprocess.Popen[bytes]":
    """Start the process. It dies with the thread that calls this. `stderr`: where its log goes; None: as this one's."""
    arguments = {
        "control-fd": plan.control_fd,
        "arena-fd": plan.arena_fd,
        "io-fds": ",".join(map(str, plan.io_fds)),
        "supervisor-fd": plan.supervisor_fd,
        "slots": plan.slots,
        "policy": plan.policy,
        "spin-us": plan.spin_us,
        "way-back-us": plan.way_back_us,
        "dispatch-us": plan.dispatch_us,
        "trace": plan.trace,
        "timeline": plan.timeline,
        "nodes": ";".join(",".join(map(str, node)) for node in plan.nodes),
        "log-levels": plan.log_levels,
        "models-bytes": plan.models_bytes,
    }
    start = start_of("gangway.scheduler.process", [f"--{name}={value}" for name, value in arguments.items()])
    fds = (plan.control_fd, plan.arena_fd, *plan.io_fds, *plan.bell_fds, plan.supervisor_fd)
    process = subprocess.Popen(
        start.command, env=start.environment, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=stderr
    )
    raise_priority(process.pid)
    return process


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: make the model servable. Answered by ModelLoaded or ModelFailed.

    `key` names the artifact. An arena is `arena_bytes` for each of up to `max_rows` rows of one query. `indivisible`:
    a query is one task, which nothing can stop. `yields`: its worker can leave it. `long_layers`: their tasks may last
    long, onnxruntime computes them.
    `layer_us` (of one row on one core) and `layer_ranks` (more cores do not help) are estimates, which count until the
    model is measured; empty: not known.
    `limits`: (name, amount, available) of resources that a query holds (`models.py`); `limit_priority`: the larger, the
    fewer turns a model gets where they are short; 0: turns do not count.
    `joins`: its requests may be joined to batches of up to `max_rows` rows; `preferred_rows`: only so many (empty: any
    number) unless the oldest has waited for `max_delay_us` (None: as long as it is predicted to pay).
    `preserve_ordering`: its batches run one after the other, in order of arrival. `splits`: batches may be cut.
    `pass_layers` are computed pass by pass, `pass_rows` rows for each core (`executor/leases.py`).
    `fp32_id`: this is the model of that number in bf16, beside the artifact in fp32; -1: it is a model by itself.
    `idle_unload_s`: workers give its memory back after so long without a request, and load it at the next; 0: never.
    `loaded_bytes`: what workers hold of it, requests apart; all models of one `weights_key` together.
    """

    model_id: int
    name: str
    key: str
    layers: int
    max_ranks: int
    arena_bytes: int
    max_rows: int
    indivisible: bool = False
    yields: bool = False
    long_layers: tuple[int, ...] = ()
    layer_us: tuple[float, ...] = ()
    layer_ranks: tuple[int, ...] = ()
    limits: tuple[tuple[str, int, int], ...] = ()
    limit_priority: int = 0
    joins: bool = False
    preferred_rows: tuple[int, ...] = ()
    max_delay_us: float | None = None
    preserve_ordering: bool = False
    splits: bool = True
    pass_layers: int = 0
    pass_rows: int = 1
    fp32_id: int = -1
    idle_unload_s: float = 0.0
    loaded_bytes: int = 0
    weights_key: str = ""


class ModelLoaded(msgspec.Struct, frozen=True, tag=True):
    """From the scheduler: every worker has the model; requests for `model_id` are accepted."""

    model_id: int


class ModelFailed(msgspec.Struct, frozen=True, tag=True):
    """From the scheduler: the model cannot be served, and is unloaded.

    `at_fault`: its requests ended workers.
    """

    model_id: int
    reason: str
    at_fault: bool = False


class ModelIdle(msgspec.Struct, frozen=True, tag=True):
    """From the scheduler: workers give the model's memory back. ModelLoaded says that they have it again."""

    model_id: int


class ArtifactLost(msgspec.Struct, frozen=True, tag=True):
    """From the scheduler: a worker cannot load a model that others serve; it tries again periodically."""

    model_id: int
    reason: str


class UnloadModel(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: forget the model; its waiting queries answer UNAVAILABLE, running ones finish first."""

    model_id: int


class ModelUnloaded(msgspec.Struct, frozen=True, tag=True):
    """From the scheduler: no worker maps the model, and its arenas are free."""

    model_id: int


class SetProfile(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: the model's isolated latency on all cores, one row, as measured (0: not), and its target.

    `qos_us` None: best effort. `rejects_late`: its queue policy is to refuse what is certain to be late. `varies`: the
    latency is that of some shapes; requests may have others.
    """

    model_id: int
    isolated_us: float
    qos_us: float | None = None
    rejects_late: bool = False
    varies: bool = False


class UseProfile(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: this file has the model's profile, which policies see from now on."""

    model_id: int
    path: str


class UseSchedule(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: compound tasks of these models, by stream, run by the schedule in this file from now on.

    `number`: that front ends name in the slots of its members. `path` empty: by none any more.
    """

    number: int
    model_ids: tuple[int, ...] = ()
    path: str = ""


class WorkerDied(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: this process of this core has ended and is reaped, so it writes nothing.

    Its successor introduces itself by a `Ready` in its completion ring. `crashed`: it ended, or did not get on, by what
    it executed: `lease`, -1 if that was none. Otherwise it was killed.
    """

    core: int
    pid: int
    crashed: bool = False
    lease: int = -1


class WorkerMissing(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: a worker that died cannot be replaced now; nothing may wait for its successor."""

    core: int


class WorkerStuck(msgspec.Struct, frozen=True, tag=True):
    """From the scheduler: this process keeps its gang waiting; it should be killed."""

    core: int
    pid: int


class FrontEndDied(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: drop this front end's requests. Answered by FrontEndQuiet."""

    front_end: int


class FrontEndQuiet(msgspec.Struct, frozen=True, tag=True):
    """From the scheduler: no process uses that io segment, which may be reset for a successor."""

    front_end: int


class SetLog(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: log these lines from now on (`base/logs.py`, `LogLevels.to_number`)."""

    levels: int


class StopScheduler(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: tell the workers to exit, then exit with 0."""


class BeginServing(msgspec.Struct, frozen=True, tag=True):
    """To the scheduler: every model that was loaded before has been named by LoadModel; take over, then serve."""


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """From the scheduler, once: it took over what a predecessor left; `requests` of them are queued again."""

    requests: int


ControlMessage = (
    LoadModel
    | ModelLoaded
    | ModelFailed
    | ModelIdle
    | ArtifactLost
    | UnloadModel
    | ModelUnloaded
    | SetProfile
    | UseProfile
    | UseSchedule
    | WorkerDied
    | WorkerMissing
    | WorkerStuck
    | FrontEndDied
    | FrontEndQuiet
    | SetLog
    | BeginServing
    | StopScheduler
    | Recovered
)


def encode(message: ControlMessage) -> bytes:
    """Return the message as one packet."""
    return json_codec.encode_tagged(message)


def decode(packet: bytes) -> ControlMessage:
    """Return what `encode` was given. Raises ValueError for anything else."""
    try:
        message: ControlMessage = json_codec.decode_tagged(ControlMessage, packet, "message")
    except ValueError as error:
        raise ValueError(f"not a control message: {packet[:200]!r} ({error})") from error
    return message


def control_peer(end: socket.socket) -> Peer[ControlMessage]:
    """Return one end of a socket that carries these messages."""
    return Peer(end, encode, decode)
