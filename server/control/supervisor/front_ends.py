"""The front ends as the supervisor sees them: started, replaced when they die, and told everything again."""

import asyncio
import logging
import socket
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec

from gangway.base.process import raise_priority
from gangway.protos import StatusCode
from gangway.server import messages
from gangway.server.access import UNIX, port_of, socket_address, why_not_bound
from gangway.server.control.supervisor.announcements import Announcements
from gangway.server.control.supervisor.events import EventQueue, ReadinessCall
from gangway.server.control.supervisor.exporter import ExporterControl
from gangway.server.control.supervisor.log import ServerLog
from gangway.server.control.supervisor.processes import Child, PeerProcess, pin
from gangway.server.control.supervisor.regions import RegionRegistry
from gangway.server.control.supervisor.scheduler import SchedulerControl
from gangway.server.control.supervisor.shared_memory import FRONT_END, SLOTS, CorePlacement, SharedMemory
from gangway.server.options.command_line import FrontEndOptions, ServeOptions
from gangway.server.tracing.settings import TraceOverrides

_log = logging.getLogger(__name__)


class FrontEndProcess(PeerProcess[messages.FrontEndMessage]):
    """One front end: its process, which may be replaced, and the peer that it is.

    `index` is its number in the control segment, `control` what all of them have.
    """

    def __init__(self, index: int, name: str, core: int, control: "FrontEndControl") -> None:
        super().__init__(name, messages.front_end_peer)
        self.index = index
        self.listened = False  # until then there are no requests
        self._core = core
        self._control = control
        self._is_clean = True  # no front end has listened since
        self._cleaning: asyncio.Task[None] | None = None
        self._known: tuple[messages.FrontEndMessage, ...] = ()

    def launch(self) -> "subprocess.Popen[bytes]":
        """Start a process, which is told what is known now. Raises OSError."""
        self._known = tuple(self._control.known())
        with (
            self.inherited_end() as theirs,
            self._control.log.of_child(self.name) as stderr,
            self._control.options_of(self.index) as options,
        ):
            process = replace(options, supervisor_fd=theirs.fileno()).start(stderr)
        pin(process.pid, self._core)
        raise_priority(process.pid)
        return process

    def begun(self) -> None:
        """Tell a process what is known. It starts while workers may still write into the io segment of a predecessor.

        So it does not listen before the segment is clean.
        """
        super().begun()
        for message in self._known:
            self.send(message)
        self._known = ()
        if self._is_clean:
            self._let_listen()
        elif self._cleaning is None:
            self._cleaning = asyncio.get_running_loop().create_task(self._clean_then_listen())

    def _let_listen(self) -> None:
        self._is_clean = False
        self.send(messages.AllKnown())

    async def _clean_then_listen(self) -> None:
        await self._control.clean(self.index)
        self._is_clean, self._cleaning = True, None
        if self.is_up:  # else its successor finds it clean
            self._let_listen()

    def heard(self, message: messages.FrontEndMessage) -> None:
        """The process has said something."""
        self._control.heard(self, message)

    def ended(self, child: Child) -> None:
        """Wait for nothing of it any more."""
        super().ended(child)
        self._control.ended(self.index)

    async def end(self, timeout_seconds: float) -> bool:
        """Return when the process has ended, which is killed if that takes too long; False if requests were left."""
        self.stop_restarting()
        if self._cleaning is not None:
            self._cleaning.cancel()
        await self.wait(timeout_seconds)
        return self.child is None or self.child.returncode == 0 or not self.listened


Send = Callable[[int, messages.FrontEndMessage], None]


@dataclass
class _Round:
    """One change; `waiting` are the front ends that have not answered yet. None: they just come this far."""

    change: messages.Change | None
    waiting: set[int]
    done: Callable[[str, str], None]
    answers: list[messages.Applied] = field(default_factory=list)


class Agreements:
    """Changes that all front ends must make before the client is answered that asked one of them.

    Changes go to every front end in the same order, so all of them come to the same result: all refuse a second region
    of one name. When the last one has answered, the change holds, and successors are told of it. A front end that dies
    is not waited for: its successor is told everything before it listens.

    `send` tells a front end something, by its number; `present` are those that run; `holds` gets each change that
    holds.
    """

    def __init__(
        self,
        send: Send,
        present: Callable[[], Collection[int]],
        holds: Callable[[messages.Change], None] = lambda change: None,
    ) -> None:
        self._send = send
        self._present = present
        self._holds = holds
        self._numbers = count(1)
        self._rounds: dict[int, _Round] = {}  # by number, ascending
        self._regions: dict[str, messages.RegionChange] = {}
        self._traces: dict[str, TraceOverrides] = {}

    def known(self) -> list[messages.FrontEndMessage]:
        """Return what a front end must be told that is started now, also what is just being agreed upon."""
        changes: list[messages.Change] = [*self._traces.values(), *self._regions.values()]
        changes += [round_.change for round_ in self._rounds.values() if round_.change is not None]
        return [messages.Agreed(0, change) for change in changes]

    def begin(self, change: messages.Change | None, done: Callable[[str, str], None]) -> None:
        """Have all front ends make a change, then call `done` with the name of a gRPC status and a text.

        None changes nothing: when it is done, all have done what they were told before.
        """
        number, present = next(self._numbers), set(self._present())
        self._rounds[number] = _Round(change, present, done)
        for front_end in sorted(present):
            self._send(front_end, messages.Agreed(number, change))
        self._end_if_complete(number)

    def applied(self, front_end: int, answer: messages.Applied) -> None:
        """A front end has answered."""
        round_ = self._rounds.get(answer.number)
        if round_ is not None and front_end in round_.waiting:
            round_.waiting.remove(front_end)
            round_.answers.append(answer)
            self._end_if_complete(answer.number)

    def left(self, front_end: int) -> None:
        """A front end has died."""
        for number in list(self._rounds):
            self._rounds[number].waiting.discard(front_end)
            self._end_if_complete(number)

    def _end_if_complete(self, number: int) -> None:
        round_ = self._rounds[number]
        if round_.waiting:
            return
        del self._rounds[number]
        refused = [answer for answer in round_.answers if answer.code != messages.OK]
        if round_.change is not None:
            if round_.answers and not refused:
                self._note(round_.change)
            elif len(refused) < len(round_.answers) or not round_.answers:
                self._undo(round_.change)
        first = refused[0] if refused else messages.Applied(number)
        round_.done(first.code, first.message)

    def _note(self, change: messages.Change) -> None:
        match change:
            case messages.RegionChange("register", name):
                self._regions[name] = change
            case messages.RegionChange("unregister", ""):
                self._regions.clear()
            case messages.RegionChange("unregister", name):
                self._regions.pop(name, None)
            case TraceOverrides(model) if not change.own:
                self._traces.pop(model, None)
            case TraceOverrides(model):
                self._traces[model] = change
        self._holds(change)

    def _undo(self, change: messages.Change) -> None:
        """Not all front ends could make the change, of which those have none left that could."""
        if isinstance(change, messages.RegionChange) and change.kind == "register" and change.name not in self._regions:
            for front_end in sorted(self._present()):
                self._send(front_end, messages.Agreed(0, messages.RegionChange("unregister", change.name)))


class BindError(Exception):
    """An address cannot be listened on; the message says why."""


ENDPOINTS = {
    "grpc": "cannot listen on {}",
    "http": "cannot listen on {} for HTTP",
    "metrics": "cannot serve metrics on {}",
}


def share_ports(options: ServeOptions) -> tuple[ServeOptions, tuple[socket.socket, ...]]:
    """Take the ports of gRPC, HTTP and metrics; return options with which front ends share them, and what holds them.

    Front ends share ports by SO_REUSEPORT. Another program of the same user could do so, too, and get a part of the
    connections. So the supervisor takes each port alone first, and then lets others share it. It holds a socket there
    as long as it runs, to which nobody can connect, so the ports stay taken while no front end lives. Ports that are 0
    become those that the system has chosen. Raises BindError.
    """
    held = []
    try:
        for kind, failure in ENDPOINTS.items():
            endpoint = getattr(options, kind)
            if target := endpoint.target:
                is_shared = kind != "metrics" and endpoint.reuse_port
                held.append(_reserve(target, failure, is_shared))
                port = int(held[-1].getsockname()[1])
                options = replace(options, **{kind: replace(endpoint, port=port, reuse_port=True)})
    except BaseException:
        for other in held:
            other.close()
        raise
    return options, tuple(held)


def _reserve(target: str, failure: str, shared: bool = False) -> socket.socket:
    """Take a port ("host:port"); `shared`: other servers may have it, too."""
    host, port, family = socket_address(target)
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        if host == "::":
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind((host, port))
        if not shared and port:
            # Two that have only bound the port do not see each other; of two that listen the second one fails. From
            # then on SO_REUSEADDR alone is no way in any more.
            held.listen(1)
            held.shutdown(socket.SHUT_RDWR)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        held.close()
        raise BindError(f"{failure.format(port_of(target, port))}: {why_not_bound(error)}") from None
    return held


class FrontEndControl:
    """Starts the front ends, replaces those that die, and passes on what they say.

    `announcements` is what all of them know of the models. `events` get what concerns other parts of the supervisor; a
    call is answered by `answer`.
    """

    def __init__(
        self,
        memory: SharedMemory,
        options: ServeOptions,
        placement: CorePlacement,
        log: ServerLog,
        scheduler: SchedulerControl,
        exporter: ExporterControl,
        regions: RegionRegistry,
        events: EventQueue,
    ) -> None:
        """Start nothing yet."""
        self.log = log
        self._memory = memory
        self._exporter = exporter
        self._regions = regions
        self._events = events
        self._serve = options
        self._scheduler = scheduler
        self._callers: dict[int, tuple[int, int]] = {}  # front end and its number of a call, by our number
        self._call_numbers = count(1)
        self.processes: Mapping[int, FrontEndProcess] = {  # by their number in the control segment
            index: FrontEndProcess(index, _name(index, placement), core, self)
            for index, core in enumerate(placement.front_ends, FRONT_END)
        }
        self.announcements = Announcements(memory.statistics, self.send_all, self.present)
        self._agreements = Agreements(self._send, self.present, self._holds)
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._held_ports: tuple[socket.socket, ...] = ()
        self.metrics_address = ""  # "host:port"; empty: none
        self.http_address = ""  # the same
        self._stopping = False

    def start(self) -> None:
        """Start the front ends and tell them what they shall serve. Raises BindError, OSError."""
        if len(self.processes) > 1:
            self._serve, self._held_ports = share_ports(self._serve)
        for process in self.processes.values():
            process.start()

    def present(self) -> set[int]:
        """Return the numbers of the front ends that run."""
        return {process.index for process in self.processes.values() if process.is_up}

    def send_all(self, message: messages.FrontEndMessage) -> None:
        """Tell every front end something."""
        for process in self.processes.values():
            process.send(message)

    def attend(self, message: messages.InstanceAttended) -> None:
        """Have a front end that runs execute what an instance asks for while it has no request."""
        for index in sorted(self.present())[:1]:
            self._send(index, message)

    async def listening(self) -> str:
        """Return the address ("host:port") once clients can connect to every front end. Raises BindError."""
        return await asyncio.shield(self._listening)  # several wait for it, of which one may be given up

    def answer(self, message: messages.RepositoryAnswer) -> None:
        """Answer a call, as soon as all front ends know what has come of it.

        The one that made the call may be dead: its successor does not know the number.
        """
        if message.number in self._callers:
            caller, number = self._callers.pop(message.number)
            answer = msgspec.structs.replace(message, number=number)
            self._agreements.begin(None, lambda code, text: self._send(caller, answer))

    def tell_readiness(self, call: ReadinessCall, is_ready: bool) -> None:
        """Answer a front end, or its successor, which does not know the number."""
        code = StatusCode.OK if is_ready else StatusCode.UNAVAILABLE
        self._send(call.front_end, messages.ReadinessTold(call.number, code.name))

    async def settled(self) -> None:
        """Return when all front ends have done what they were told before."""
        done = asyncio.get_running_loop().create_future()
        self._agreements.begin(None, lambda code, text: done.set_result(None))
        await done

    async def leave(self, seconds: float) -> None:
        """Say for so long that nothing is ready, while everything is served."""
        self.send_all(messages.Leave())
        await asyncio.sleep(seconds)

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests, let the running ones finish, end the processes; False if requests were left."""
        self._stopping = True
        self.send_all(messages.Drain())
        ended = await asyncio.gather(*(process.end(timeout_seconds) for process in self.processes.values()))
        return all(ended)

    # -- processes

    def known(self) -> list[messages.FrontEndMessage]:
        """Return what a front end is told that starts now."""
        return [*self._agreements.known(), *self.announcements.known()]

    @contextmanager
    def options_of(self, index: int) -> Iterator[FrontEndOptions]:
        """Yield how to start a front end, whose predecessor has ended, while its descriptors are open."""
        memory = self._memory
        with self._regions.front_end(index) as regions:
            yield FrontEndOptions(
                index=index,
                control_fd=memory.control.segment.fd,
                io_fd=memory.io[index].fd,
                bell_fd=memory.tables[index].bell.event_fd,
                supervisor_fd=-1,
                slots=SLOTS,
                address=self._serve.grpc.target,
                serve=replace(self._serve, logs=self.log.settings),  # which a client may have changed
                trace_fd=self._exporter.front_end_fd,
                statistics_fd=memory.statistics.segment.fd,
                custom_metrics_fds=memory.custom_metrics.fds,
                cancellations_fd=memory.cancellations.segment.fd,
                regions_fd=regions.fileno(),
                other_io_fds=tuple(memory.io[other].fd for other in self.processes if other != index),
            )

    def ended(self, index: int) -> None:
        """A front end has ended: nothing of it is waited for."""
        self.announcements.front_end_ended(index)
        self._memory.cancellations.end_all(index)
        self._agreements.left(index)
        self._callers = {number: call for number, call in self._callers.items() if call[0] != index}
        if not self._stopping:
            self._memory.control.server_block.front_end_restarted()

    async def clean(self, index: int) -> None:
        """Return when nothing is left in the io segment of a front end that has ended."""
        await self._scheduler.front_end_quiet(index)
        self._memory.tables[index].init()
        self._memory.statistics.set_heap_bytes(index - FRONT_END, 0)

    # -- messages

    def _send(self, front_end: int, message: messages.FrontEndMessage) -> None:
        self.processes[front_end].send(message)

    def heard(self, process: FrontEndProcess, message: messages.FrontEndMessage) -> None:
        """A front end has said something."""
        match message:
            case messages.Listening():
                self._listens(process, message)
            case messages.ShapeWanted() | messages.FirstAnswer():
                self._events.put(message)
            case messages.RepositoryCall(number):
                own = next(self._call_numbers)
                self._callers[own] = process.index, number
                self._events.put(msgspec.structs.replace(message, number=own))
            case messages.ReadinessAsked(number, model_id):
                self._events.put(ReadinessCall(process.index, number, model_id))
            case messages.ModelRetired(model_id):
                self.announcements.front_end_retired(process.index, model_id)
            case messages.Proposed(number, change):
                if isinstance(change, TraceOverrides) and change.level:
                    self._exporter.want()
                self._agreements.begin(change, lambda code, text: process.send(messages.Settled(number, code, text)))
            case messages.Applied():
                self._agreements.applied(process.index, message)
            case messages.BindFailed(reason) if not self._listening.done():
                self._stopping = True
                for each in self.processes.values():
                    each.stop_restarting()
                self._listening.set_exception(BindError(reason))
            case messages.BindFailed(reason):
                _log.error("the %s cannot listen, so it is started again: %s", process.name, reason)
            case _:
                raise ValueError(f"unexpected {message}")

    def _listens(self, process: FrontEndProcess, message: messages.Listening) -> None:
        # A successor must take the very ports that clients know, also when the system chose the first ones.
        self._serve = _with_ports(self._serve, message)
        self.metrics_address, self.http_address = message.metrics_address, message.http_address
        process.listened = True
        process.has_become_ready()
        if all(each.listened for each in self.processes.values()) and not self._listening.done():
            self._listening.set_result(message.address)
        _log.debug("%s, process %d, listens on %s", process.name, process.pid, message.address)

    def _holds(self, change: messages.Change) -> None:
        """All front ends have made a change."""
        if isinstance(change, messages.LogSettings):
            self._events.put(change)


def _name(index: int, placement: CorePlacement) -> str:
    return f"front end {index}" if len(placement.front_ends) > 1 else "front end"


def _with_ports(serve: ServeOptions, message: messages.Listening) -> ServeOptions:
    """Return the options with the ports that the system has chosen."""
    grpc = "" if serve.grpc.target.startswith(UNIX) else message.address
    addresses = {"grpc": grpc, "http": message.http_address, "metrics": message.metrics_address}
    return replace(
        serve,
        **{
            kind: replace(getattr(serve, kind), port=int(address.rpartition(":")[2]))
            for kind, address in addresses.items()
            if address
        },
    )
