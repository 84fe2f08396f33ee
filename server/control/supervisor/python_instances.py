"""Instances of Python models: processes of their own (`python_backend/`), each started again when it ends.

They may run in another Python environment. What model.py writes goes to the server's log. Over its control socket an
instance also asks for what only the supervisor can do (`python_backend/supervisor_link.py`). Between the supervisor and
an instance is its keeper (`python_backend/keeper.py`), which ends when all has ended that the model has started.
"""

import asyncio
import itertools
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gangway.base.process import LOWERED_WORKER_NICE, WORKER_NICE, may_raise_priority
from gangway.base.python_process import python_environment
from gangway.executor.instance_addresses import InstanceAddresses
from gangway.python_backend.messages import MAX_HEADER_BYTES, PREFIX
from gangway.server.control.supervisor.custom_metrics import CustomMetrics, MetricError, User
from gangway.server.control.supervisor.events import EventQueue, InstanceCall
from gangway.server.control.supervisor.log import ServerLog
from gangway.server.control.supervisor.processes import Child, SupervisedProcess, end_orphans
from gangway.server.errors import ModelLoadError, shortened
from gangway.server.messages import InstanceAttended, ModelPresence

_log = logging.getLogger(__name__)

HOST: Final = Path(__file__).resolve().parents[3] / "python_backend" / "__main__.py"
MARK: Final = "GANGWAY_INSTANCE"  # a variable that all have that a model starts
FINALIZE_SECONDS: Final = 5.0
SLOW_SECONDS: Final = 10.0  # of a start, until the log says so
TIMEOUT_FLAG: Final = "--backend-config=python,stub-timeout-seconds"
MOST_MESSAGE_CHARACTERS: Final = 2000
DIFFERENCES: Final = {
    "names": ": it is left out",
    "types": ": it is passed on",
    "shapes": ": it is passed on",
}  # what is done about each kind
READINESS_SECONDS: Final = 5.0  # for `is_ready` of model.py, as in Triton
MOST_CALLS: Final = 16  # to load, unload or ask for models, of an instance at the same time
# Libraries that would start a thread for each core, of which an instance has one.
ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class InstancePlan:
    """What to load, and how. `python`: of the environment. `config`: as JSON, as far as config.pbtxt says it.

    `completes`: model.py may complete it. `kinds`, `names`: one for each instance, which it is told. `memory_bytes`: of
    its data; 0: any. `start_seconds`: how long an instance may take until it is initialised. `strict_outputs`:
    responses must be as the configuration says.
    """

    name: str
    version: int
    folder: Path
    filename: str
    config: str
    completes: bool
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    memory_bytes: int
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 600.0
    strict_outputs: bool = False

    def arguments(self, instance: int) -> dict[str, str]:
        """Return what `initialize` gets, but for the configuration."""
        return {
            "model_instance_kind": self.kinds[instance],
            "model_instance_name": self.names[instance],
            "model_instance_device_id": "0",
            "model_repository": str(self.folder),
            "model_version": str(self.version),
            "model_name": self.name,
        }


@dataclass(frozen=True)
class Services:
    """What instances have of the supervisor. `events` get what concerns other models, front ends and clients.

    `cancellations_fd`: the memory that says which requests are cancelled (`server/cancellations.py`).
    """

    log: ServerLog
    metrics: CustomMetrics
    addresses: InstanceAddresses
    events: EventQueue
    cancellations_fd: int


class _InstanceProcess(SupervisedProcess):
    """One instance, in one process after the other. `told`: the configuration that it is initialised with, in time.

    `changed` is called whenever there is a process that answers, from then on or no longer (`is_present`). `refusal`:
    what the last process has said that could not be initialised. `differs` is called with what responses are like that
    are not as the configuration says: a sentence by kind.
    """

    def __init__(
        self,
        plan: InstancePlan,
        user: User,
        sockets: str,
        services: Services,
        changed: Callable[[], None],
        differs: Callable[[Mapping[str, str]], None],
    ) -> None:
        super().__init__(f"{plan.name}, instance {user.instance}")
        self._plan, self._user, self._services, self._changed = plan, user, services, changed
        self._differs = differs
        self._metrics = services.metrics
        self._socket = f"{sockets}-{user.model_id}-{user.instance}"
        self._launches = itertools.count(1)
        self._address = ""
        self._pid = 0  # of the process that executes the model, the keeper's child
        self._ending: asyncio.Task[None] | None = None
        self.is_present, self.refusal = False, ""
        self.has_is_ready = False  # model.py says whether it is ready
        self._readiness: asyncio.Future[bool] | None = None  # what it is about to say
        self._calls: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self.completed: asyncio.Future[str] = loop.create_future()
        self.told: asyncio.Future[str] = loop.create_future()
        self.ready: asyncio.Future[None] = loop.create_future()
        self._control: socket.socket | None = None
        self._conversation: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Have it finalized, or killed where that takes too long."""
        self.stop_restarting()
        self._end_watch()
        if self._control is not None:
            self._say(self._control, {"finalize": True})
        await self.wait(FINALIZE_SECONDS if self.ready.done() else 0.0)
        await self.prepare()
        self._end_conversation()

    async def says_ready(self) -> bool:
        """Return what `is_ready` of model.py says. Who asks meanwhile gets the same answer."""
        if not self.has_is_ready:
            return True
        if self._readiness is None and self._control is not None:
            self._readiness = asyncio.get_running_loop().create_future()
            self._say(self._control, {"is_ready": True})
        return self._readiness is not None and await asyncio.shield(self._readiness)

    def _settle_readiness(self, is_ready: bool) -> None:
        if self._readiness is not None and not self._readiness.done():
            self._readiness.set_result(is_ready)
        self._readiness = None

    async def prepare(self) -> None:
        """Return when nothing is left of what the last process has started."""
        if self._ending is not None:
            await self._ending

    def launch(self) -> "subprocess.Popen[bytes]":
        """Start a process. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX)  # it listens when the model is ready, not before
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), listener.fileno(), self._metrics.values_fd, self._services.cancellations_fd)
        command = [self._plan.python, "-B", str(HOST), *map(str, fds), str(os.getpid())]
        self._pid, self._address = 0, f"\0{self._socket}-{next(self._launches)}"
        variables = dict.fromkeys(ONE_THREAD, "1") | python_environment() | dict(self._plan.environment)
        variables[MARK] = self._address[1:]
        try:
            with listener, theirs, self._services.log.of_child(self.name, logging.INFO) as stderr:
                listener.bind(self._address)
                process = subprocess.Popen(
                    command,
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=variables,
                    cwd=self._plan.folder,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        self._end_conversation()
        ours.setblocking(False)
        self._control = ours
        return process

    def begun(self) -> None:
        """Talk with the process that has been launched."""
        assert self._control is not None, "launched"
        control = self._control
        self._conversation = asyncio.get_running_loop().create_task(self._converse(control))
        self._conversation.add_done_callback(_ignore_end)
        self._conversation.add_done_callback(lambda _: control.close())
        self._end_watch()
        self._watch = asyncio.get_running_loop().create_task(self._watch_start())

    async def _watch_start(self) -> None:
        """Tell of a start that takes long, and end one that takes too long."""
        limit_s = self._plan.start_seconds
        await asyncio.sleep(min(SLOW_SECONDS, limit_s))
        if limit_s > SLOW_SECONDS:
            _log.warning(
                "%s is not initialised after %.0f s, %s; it fails after %.0f s (%s)",
                self.name,
                SLOW_SECONDS,
                _doing(self._pid),
                limit_s,
                TIMEOUT_FLAG,
            )
            await asyncio.sleep(limit_s - SLOW_SECONDS)
        doing = _doing(self._pid)
        self._started({"error": f"it is not initialised after {limit_s:g} s ({TIMEOUT_FLAG}), {doing}"})
        self.kill()

    def _end_watch(self) -> None:
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()

    def _end_conversation(self) -> None:
        """Hear no more of the process before. The task's end closes the socket, which the loop reads until then."""
        if self._conversation is not None:
            self._conversation.cancel()
        elif self._control is not None:
            self._control.close()
        self._conversation = self._control = None

    async def _converse(self, control: socket.socket) -> None:
        """Tell a process what to load, and do what it asks for until it ends."""
        plan, loop = self._plan, asyncio.get_running_loop()
        completes = plan.completes and self._user.instance == 0 and not self.told.done()
        order = {
            "folder": str(plan.folder),
            "filename": plan.filename,
            "arguments": plan.arguments(self._user.instance),
            "memory_bytes": plan.memory_bytes,
            "completes": completes,
            "strict_outputs": plan.strict_outputs,
            "config": plan.config if completes else await self.told,
        }
        await loop.sock_sendall(control, _packed(order))
        try:
            while True:
                message = await _received(control)
                await asyncio.sleep(0)  # others have their turns, however much it asks for
                if "config" in message and not self.completed.done():
                    self.completed.set_result(message["config"])
                    await loop.sock_sendall(control, _packed({**order, "config": await self.told}))
                else:
                    self._hear(control, message)
        except (ValueError, LookupError, TypeError, RecursionError) as error:  # the model may write there, too
            _log.error("%s says what is no message (%s), so it is ended", self.name, shortened(repr(error)))
            self.kill()

    def _hear(self, control: socket.socket, message: Mapping[str, Any]) -> None:
        if "begun" in message:
            self._begin_life(int(message["begun"]))
        elif "control" in message:
            self._begin_call(control, message["call"], message)
        elif "call" in message:
            self._say(control, {"answer": message["call"], **self._answer(message)})
        elif "differences" in message:
            self._differs({kind: str(text) for kind, text in dict(message["differences"]).items()})
        elif "is_ready" in message:
            self._settle_readiness(message["is_ready"] is True)
        elif "attends" in message:
            self._services.events.put(InstanceAttended(self._address))
        elif "release" in message:
            self._release(*message["release"])
        else:
            self._started(message)

    def _begin_life(self, pid: int) -> None:
        """A keeper has forked the process that executes the model."""
        self._pid = pid
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, WORKER_NICE if may_raise_priority() else LOWERED_WORKER_NICE)

    def _started(self, message: Mapping[str, Any]) -> None:
        """The model is ready, or cannot be."""
        self._end_watch()
        if "error" in message:
            reason = shortened(str(message["error"]), MOST_MESSAGE_CHARACTERS)
            if self.ready.done():
                _log.error("%s cannot be initialised again: %s", self.name, reason)
                self.refusal = reason
                self._changed()
            else:
                self._fail(reason)
            return
        self._services.addresses.set(*self._user, self._address)
        self.is_present, self.refusal = True, ""
        self.has_is_ready = message.get("has_is_ready") is True
        self._changed()
        if self.ready.done():
            _log.info("%s is ready again", self.name)
        else:
            self.ready.set_result(None)

    def _answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a model asks for. It may be anything: what is no sense is an error, too."""
        try:
            if "family" in call:
                self._metrics.family(self._user, *call["family"])
                return {}
            return self._metrics.metric(self._user, *call["metric"])._asdict()
        except (MetricError, LookupError, TypeError, OverflowError) as error:
            return {"error": str(error)}

    def _begin_call(self, control: socket.socket, number: Any, call: Mapping[str, Any]) -> None:
        """Do what concerns other models, beside everything else that the instance asks for."""
        if len(self._calls) >= MOST_CALLS:
            reason = f"{MOST_CALLS} calls of the instance wait for their answers, more cannot"
            self._say(control, {"answer": number, "error": reason})
            return
        task = asyncio.get_running_loop().create_task(self._answer_later(control, number, call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer_later(self, control: socket.socket, number: Any, call: Mapping[str, Any]) -> None:
        answer = asyncio.get_running_loop().create_future()
        is_loading = not self.ready.done()
        self._services.events.put(InstanceCall(self._plan.name, is_loading, self._pid, call, answer))
        content = await answer
        if control is self._control:  # else its process has ended
            self._say(control, {"answer": number, **content})

    def _release(self, kind: str, what: Any) -> None:
        if kind == "family":
            self._metrics.release_family(self._user, what)
        else:
            self._metrics.release_metric(self._user, what)

    def _say(self, control: socket.socket, header: Mapping[str, Any]) -> None:
        """Tell a process something short. One that leaves so much unread that there is no room is ended."""
        content = _packed(header)
        try:
            if control.send(content) == len(content):
                return
        except BlockingIOError:
            pass
        except OSError:
            return  # its end is dealt with where it is seen
        _log.error("%s does not read what it asks for, so it is ended", self.name)
        self.kill()

    def ended(self, child: Child) -> None:
        """Tell that it does not answer, and end what it has left."""
        self._end_watch()
        self._services.addresses.set(*self._user, "")
        self.is_present = False
        self._settle_readiness(False)
        self._changed()
        mark = f"{MARK}={self._address[1:]}\0".encode()
        self._ending = asyncio.get_running_loop().create_task(end_orphans(child.pid, mark))
        if self._control is not None:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RD)  # a process that the model has forked may have the other end
        if not self.ready.done():
            self.stop_restarting()
            reason, conversation = f"its process {child.exit_text()}", self._conversation
            if conversation is None or conversation.done():
                self._fail(reason)
            else:  # the process may have said more about it
                conversation.add_done_callback(lambda _: self._fail(reason))

    def _fail(self, reason: str) -> None:
        self.stop_restarting()
        error = ModelLoadError(reason)
        for future in (self.completed, self.ready):
            if not future.done():
                future.set_exception(error)
                future.exception()  # one of them may be nobody's


def _doing(pid: int) -> str:
    """Say what a process does at this moment, as far as the kernel says it."""
    with suppress(OSError, IndexError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R":
            return "it computes"
        place = Path(f"/proc/{pid}/wchan").read_text()
        return f"it waits in {place} of the kernel" if place not in ("", "0") else "it waits"
    return "its process has not begun"


class ModelInstances:
    """All instances of one model, which has this number."""

    def __init__(self, plan: InstancePlan, sockets: str, model_id: int, services: Services) -> None:
        self._plan, self._model_id, self._services = plan, model_id, services
        self._is_served = False
        self._absence = ""  # why no instance can answer
        self._told: set[str] = set()  # kinds of differences between responses and the configuration
        self._instances = [
            _InstanceProcess(plan, User(model_id, number), sockets, services, self._changed, self._tell_differences)
            for number in range(len(plan.kinds))
        ]

    async def completed_config(self) -> str:
        """Start the first instance; return the configuration as model.py has completed it, as JSON.

        Raises ModelLoadError.
        """
        first = self._instances[0]
        self._start(first)
        return await first.completed if self._plan.completes else self._plan.config

    async def initialise(self, config: str) -> None:
        """Return when all instances are ready. Raises ModelLoadError."""
        for instance in self._instances:
            instance.told.set_result(config)
        for instance in self._instances[1:]:
            self._start(instance)
        await asyncio.gather(*(instance.ready for instance in self._instances))
        self._is_served = True
        self._changed()

    def _changed(self) -> None:
        """Tell clients when there is no instance that can answer, and when there is one again."""
        absence = ""
        if self._is_served and not any(instance.is_present for instance in self._instances):
            refusals = [f": {instance.refusal}" for instance in self._instances if instance.refusal]
            absence = f"no instance of it is ready; one is started again{''.join(refusals[:1])}"
        if absence != self._absence:
            self._absence = absence
            self._services.events.put(ModelPresence(self._model_id, absence))

    def _tell_differences(self, found: Mapping[str, str]) -> None:
        """Warn of responses that are unlike the configuration: once of each kind, however many instances there are."""
        news = {kind: found[kind] for kind in DIFFERENCES if kind in found and kind not in self._told}
        self._told.update(news)
        if news:
            text = "; ".join(
                f"{shortened(text, MOST_MESSAGE_CHARACTERS)}{DIFFERENCES[kind]}" for kind, text in news.items()
            )
            _log.warning("%s: %s (told once)", self._plan.name, text)

    @property
    def have_is_ready(self) -> bool:
        """Whether model.py says whether the model is ready."""
        return any(instance.has_is_ready for instance in self._instances)

    async def say_ready(self) -> bool:
        """Return whether all instances say that the model is ready, each within READINESS_SECONDS."""
        try:
            async with asyncio.timeout(READINESS_SECONDS):
                present = [instance.says_ready() for instance in self._instances if instance.is_present]
                return bool(present) and all(await asyncio.gather(*present))
        except TimeoutError:
            _log.warning("%s: is_ready has not returned within %g s", self._plan.name, READINESS_SECONDS)
            return False

    async def stop(self) -> None:
        """End all of them. Nobody is to use them any more."""
        self._is_served = False
        self._changed()
        await asyncio.gather(*(instance.stop() for instance in self._instances))

    def _start(self, instance: _InstanceProcess) -> None:
        try:
            instance.start()
        except OSError as error:
            raise ModelLoadError(f"{self._plan.python} cannot be started: {error}") from error


class PythonInstances:
    """The instances of all models, by the model's number."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._sockets = f"gangway-{os.getpid()}-{secrets.token_hex(8)}"
        self._models: dict[int, ModelInstances] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[None]] = set()

    def add(self, model_id: int, plan: InstancePlan) -> ModelInstances:
        """Return the instances of a model, none of which is started."""
        self._models[model_id] = instances = ModelInstances(plan, self._sockets, model_id, self._services)
        return instances

    def remove(self, model_id: int, then: Callable[[], None] = lambda: None) -> None:
        """End a model's instances, if it has any; `then` is called when they have ended."""
        instances = self._models.pop(model_id, None)
        if instances is None:
            then()
            return

        def ended() -> None:
            self._services.metrics.forget(model_id)
            then()

        task = asyncio.get_running_loop().create_task(_then(instances.stop(), ended))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def have_is_ready(self, model_id: int) -> bool:
        """Return whether a model has instances that say whether it is ready."""
        return model_id in self._models and self._models[model_id].have_is_ready

    def ask_readiness(self, model_id: int, tell: Callable[[bool], None]) -> None:
        """Have `tell` called with whether a model's instances say that it is ready."""

        async def ask() -> None:
            instances = self._models.get(model_id)
            tell(instances is not None and await instances.say_ready())

        task = asyncio.get_running_loop().create_task(ask())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def stop(self) -> None:
        """End all instances."""
        await asyncio.gather(*(instances.stop() for instances in self._models.values()), *self._ending)


async def _then(work: Awaitable[None], then: Callable[[], None]) -> None:
    await work
    then()


def _ignore_end(task: "asyncio.Task[None]") -> None:
    """A process that ends amid its conversation is dealt with where its end is seen."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, EOFError | OSError):
        raise error


def _packed(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return PREFIX.pack(len(text), 0) + text


async def _received(control: socket.socket) -> dict[str, Any]:
    header_bytes, _ = PREFIX.unpack(await _read(control, PREFIX.size))
    if header_bytes > MAX_HEADER_BYTES:
        raise EOFError
    answer = json.loads(await _read(control, header_bytes))
    if not isinstance(answer, dict):
        raise ValueError("a message whose header is no object")
    return answer


async def _read(control: socket.socket, size_bytes: int) -> bytes:
    content = b""
    while len(content) < size_bytes:
        part = await asyncio.get_running_loop().sock_recv(control, size_bytes - len(content))
        if not part:
            raise EOFError
        content += part
    return content
