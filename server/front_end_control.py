"""The front ends as the supervisor sees them: started, replaced when they die, and told everything again."""

import asyncio
import logging
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
import socket

from gangway.artifact.host_limits import process_limit
from gangway.server.children import Child, KeptProcess
from gangway.server.control import SchedulerControl
from gangway.server.counting.rows import NO_ROW, RowKeeper
from gangway.server.front_end_messages import (
    WHOLE_MODEL,
    AllKnown,
    Applied,
    BindFailed,
    Change,
    Drain,
    FrontEndMessage,
    InitialLoadDone,
    Listening,
    ModelReady,
    ModelRemoved,
    ModelRetired,
    ModelUnavailable,
    Proposed,
    RepositoryAnswer,
    RepositoryCall,
    Settled,
    ShapeWanted,
    VariantGone,
    VariantReady,
)
from gangway.server.front_end_options import FrontEndOptions
from gangway.server.front_ends.agreements import Agreements
from gangway.server.front_ends.ports import BindError, share_ports
from gangway.server.front_ends.process import FrontEndProcess
from gangway.server.in_place.keeper import MappingKeeper
from gangway.server.listen_address import UNIX
from gangway.server.logs.server_log import ServerLog
from gangway.server.logs.settings import LogSettings
from gangway.server.options.grpc import GrpcOptions
from gangway.server.options.serve_options import ServeOptions
from gangway.server.placement import Placement
from gangway.server.shared_memory import FRONT_END, SLOTS, SharedMemory
from gangway.server.thread_share import thread_share
from gangway.server.tracing.exporter_control import ExporterControl
from gangway.server.tracing.settings import TraceOverrides

_log = logging.getLogger(__name__)


@dataclass
class _Retiring:
    """A model number that clients do not get any more, and the front ends whose requests may still use it."""

    front_ends: set[int]
    done: asyncio.Future[None]


class FrontEndControl:
    """What clients are to know of the models is kept here, and said again to successors."""

    def __init__(
        self,
        memory: SharedMemory,
        options: ServeOptions,
        placement: Placement,
        log: ServerLog,
        scheduler: SchedulerControl,
        exporter: ExporterControl,
        mappings: MappingKeeper,
    ) -> None:
        """Start nothing yet. Raises TooFewThreadsError."""
        self._memory = memory
        self._rows = RowKeeper(memory.statistics)
        self._log = log
        self._exporter = exporter
        self._mappings = mappings
        self._placement = placement
        self._serve = options
        general = options.general
        self._thread_share = thread_share(process_limit(), len(general.cores), general.front_ends)
        self.on_log_settings: Callable[[LogSettings], None] = lambda settings: None
        self._scheduler = scheduler
        self._models: dict[tuple[str, int], ModelReady | ModelUnavailable] = {}
        self._variants: dict[tuple[str, int, tuple[int, ...]], VariantReady] = {}
        self._retiring: dict[int, _Retiring] = {}  # by model number
        self._callers: dict[int, tuple[int, int]] = {}  # front end and its number of a call, by our number
        self._call_numbers = count(1)
        self.on_shape_wanted: Callable[[ShapeWanted], None] = lambda message: None
        self.on_repository_call: Callable[[RepositoryCall], None] = lambda message: None
        self._load_done: InitialLoadDone | None = None
        cores = dict(enumerate(placement.front_ends, FRONT_END))
        self._all = {
            index: FrontEndProcess(
                index, _name(index, placement), core, log, self._launch, self._heard, self._ended, self._prepare
            )
            for index, core in cores.items()
        }
        self._agreements = Agreements(self._send, self._present, self._holds)
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._held_ports: tuple[socket.socket, ...] = ()
        self.metrics_address = ""  # "host:port"; empty: none
        self.http_address = ""  # the same
        self._stopping = False

    def start(self) -> None:
        """Start the front ends and tell them what they shall serve. Raises BindError, OSError."""
        if len(self._all) > 1:
            self._serve, self._held_ports = share_ports(self._serve)
        for process in self._all.values():
            process.kept.start()

    @property
    def processes(self) -> Mapping[int, KeptProcess]:
        """The processes by their number in the control segment."""
        return {index: process.kept for index, process in self._all.items()}

    async def listening(self) -> str:
        """Return the address ("host:port") once clients can connect to every front end. Raises BindError."""
        return await self._listening

    @property
    def grpc(self) -> GrpcOptions:
        """How gRPC is served, once it is: with the port that clients connect to."""
        return self._serve.grpc

    @property
    def entries(self) -> Mapping[tuple[str, int], ModelReady | ModelUnavailable]:
        """What clients know, by name and version."""
        return self._models

    def counted(self) -> list[ModelReady]:
        """Return the models that are served and have counters."""
        ready = [entry for entry in self._models.values() if isinstance(entry, ModelReady)]
        return [model for model in ready if model.statistics_row != NO_ROW]

    def announce(self, message: ModelReady | ModelUnavailable | ModelRemoved) -> None:
        """Tell clients about a model. What was compiled of it for certain sizes is forgotten."""
        key = (message.name, message.version)
        if message.version != WHOLE_MODEL:  # an entry without version stands only until there is a real one
            self._models.pop((message.name, WHOLE_MODEL), None)
        self._variants = {sizes: known for sizes, known in self._variants.items() if sizes[:2] != key}
        if isinstance(message, ModelReady):
            message = replace(message, statistics_row=self._rows.take(message.model_id))
        if isinstance(message, ModelRemoved):
            self._models.pop(key, None)
        else:
            self._models[key] = message
        self._send_all(message)

    async def retired(self, model_id: int, timeout_seconds: float) -> bool:
        """Return when no request uses a number that clients do not get any more; False if that takes too long.

        To be called at once after the announcement, before a front end can have answered.
        """
        retiring = _Retiring(self._present(), asyncio.get_running_loop().create_future())
        self._retiring[model_id] = retiring
        try:
            if retiring.front_ends:  # else none of them knows the number, and successors never hear of it
                await asyncio.wait_for(retiring.done, timeout_seconds)
        except TimeoutError:
            return False
        finally:
            self._retiring.pop(model_id, None)
            self._rows.give_back(model_id)
        return True

    def answer(self, message: RepositoryAnswer) -> None:
        """Answer a call, as soon as all front ends know what has come of it.

        The one that made the call may be dead: its successor does not know the number.
        """
        if message.number in self._callers:
            caller, number = self._callers.pop(message.number)
            answer = replace(message, number=number)
            self._agreements.begin(None, lambda code, text: self._send(caller, answer))

    def announce_variant(self, message: VariantReady | VariantGone) -> None:
        """Tell what of a model is compiled, or is not any more."""
        key = (message.name, message.version, message.sizes)
        if isinstance(message, VariantReady):
            self._variants[key] = message
        else:
            self._variants.pop(key, None)
        self._send_all(message)

    def initial_load_done(self, strict_readiness: bool) -> None:
        """Let ServerReady answer true."""
        self._load_done = InitialLoadDone(strict_readiness)
        self._send_all(self._load_done)

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests, let the running ones finish, end the processes; False if requests were left."""
        self._stopping = True
        self._send_all(Drain())
        ended = await asyncio.gather(*(process.end(timeout_seconds) for process in self._all.values()))
        return all(ended)

    # -- processes

    def _launch(self, process: FrontEndProcess) -> "subprocess.Popen[bytes]":
        memory, index = self._memory, process.index
        known: list[FrontEndMessage] = [*self._agreements.known(), *self._models.values(), *self._variants.values()]
        if self._load_done is not None:
            known.append(self._load_done)
        with self._mappings.front_end(index) as regions:
            options = FrontEndOptions(
                index=index,
                control_fd=memory.control.segment.fd,
                io_fd=memory.io[index].fd,
                supervisor_fd=-1,
                slots=SLOTS,
                address=self._serve.grpc.target,
                serve=replace(self._serve, logs=self._log.settings),  # which a client may have changed
                trace_fd=self._exporter.front_end_fd,
                statistics_fd=memory.statistics.segment.fd,
                regions_fd=regions.fileno(),
                other_io_fds=tuple(memory.io[other].fd for other in self._all if other != index),
                spin_us=self._placement.spin_us(index - FRONT_END),
                thread_share=self._thread_share,
            )
            return process.start_with(options, [*known, AllKnown()])

    def _ended(self, process: FrontEndProcess, child: Child) -> None:
        for model_id in list(self._retiring):
            self._unused(process.index, model_id)
        self._agreements.left(process.index)
        self._callers = {number: call for number, call in self._callers.items() if call[0] != process.index}
        if not self._stopping:
            self._memory.control.server_block.front_end_restarted()

    async def _prepare(self, process: FrontEndProcess) -> None:
        await self._scheduler.front_end_quiet(process.index)
        self._memory.tables[process.index].init()
        self._memory.statistics.set_heap_bytes(process.index - FRONT_END, 0)

    def _present(self) -> set[int]:
        return {process.index for process in self._all.values() if process.is_up}

    # -- messages

    def _send(self, front_end: int, message: FrontEndMessage) -> None:
        self._all[front_end].send(message)

    def _send_all(self, message: FrontEndMessage) -> None:
        for process in self._all.values():
            process.send(message)

    def _heard(self, process: FrontEndProcess, message: FrontEndMessage) -> None:
        match message:
            case Listening():
                self._listens(process, message)
            case ShapeWanted():
                self.on_shape_wanted(message)
            case RepositoryCall(number):
                own = next(self._call_numbers)
                self._callers[own] = process.index, number
                self.on_repository_call(replace(message, number=own))
            case ModelRetired(model_id):
                self._unused(process.index, model_id)
            case Proposed(number, change):
                if isinstance(change, TraceOverrides) and change.level:
                    self._exporter.want()
                self._agreements.begin(change, lambda code, text: process.send(Settled(number, code, text)))
            case Applied():
                self._agreements.applied(process.index, message)
            case BindFailed(reason) if not self._listening.done():
                self._stopping = True
                for each in self._all.values():
                    each.kept.keep_no_more()
                self._listening.set_exception(BindError(reason))
            case BindFailed(reason):
                _log.error("the %s cannot listen: %s", process.name, reason)
            case _:
                raise ValueError(f"unexpected {message}")

    def _listens(self, process: FrontEndProcess, message: Listening) -> None:
        # A successor must take the very ports that clients know, also when the system chose the first ones.
        self._serve = _with_ports(self._serve, message)
        self.metrics_address, self.http_address = message.metrics_address, message.http_address
        process.listened = True
        if all(each.listened for each in self._all.values()) and not self._listening.done():
            self._listening.set_result(message.address)
        _log.debug("%s, process %d, listens on %s", process.name, process.pid, message.address)

    def _holds(self, change: Change) -> None:
        """All front ends have made a change."""
        if isinstance(change, LogSettings):
            self.on_log_settings(change)

    def _unused(self, front_end: int, model_id: int) -> None:
        retiring = self._retiring.get(model_id)
        if retiring is not None:
            retiring.front_ends.discard(front_end)
            if not retiring.front_ends and not retiring.done.done():
                retiring.done.set_result(None)


def _name(index: int, placement: Placement) -> str:
    return f"front end {index}" if len(placement.front_ends) > 1 else "front end"


def _with_ports(serve: ServeOptions, message: Listening) -> ServeOptions:
    """Return the options with the ports that the system has chosen."""
    if message.address and not serve.grpc.target.startswith(UNIX):
        serve = replace(serve, grpc=replace(serve.grpc, port=_port_of(message.address)))
    if message.metrics_address:
        serve = replace(serve, metrics=replace(serve.metrics, port=_port_of(message.metrics_address)))
    if message.http_address:
        serve = replace(serve, http=replace(serve.http, port=_port_of(message.http_address)))
    return serve


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
