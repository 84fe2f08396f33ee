"""The front-end process as the supervisor sees it: started, replaced when it dies, and told everything again."""

import asyncio
import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace

from gangway.scheduler.packets import packet_pair
from gangway.server.children import Child, DeathLimit
from gangway.server.control import SchedulerControl
from gangway.server.front_end_messages import (
    BindFailed,
    Drain,
    FrontEndMessage,
    InitialLoadDone,
    Listening,
    ModelReady,
    ModelRemoved,
    ModelRetired,
    ModelUnavailable,
    RepositoryAnswer,
    RepositoryCall,
    ShapeWanted,
    VariantGone,
    VariantReady,
    from_json,
    to_json,
)
from gangway.server.front_end_options import FrontEndOptions
from gangway.server.in_place.keeper import MappingKeeper
from gangway.server.link import Link
from gangway.server.logs.server_log import ServerLog
from gangway.server.logs.settings import LogSettings
from gangway.server.options.serve_options import ServeOptions
from gangway.server.placement import Placement
from gangway.server.shared_memory import FRONT_END, SLOTS, SharedMemory
from gangway.server.tracing.exporter_control import ExporterControl
from gangway.server.tracing.settings import TraceOverrides

_log = logging.getLogger(__name__)


class BindError(Exception):
    """The address cannot be listened on; the message says why."""


class FrontEndControl:
    """What clients are to know of the models is kept here, and said again to a successor."""

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
        self._memory = memory
        self._log = log
        self._exporter = exporter
        self._mappings = mappings
        self._trace_overrides: dict[str, TraceOverrides] = {}
        self.on_log_settings: Callable[[LogSettings], None] = lambda settings: None
        self._options = FrontEndOptions(
            index=FRONT_END,
            control_fd=memory.control.segment.fd,
            io_fd=memory.io[FRONT_END].fd,
            supervisor_fd=-1,
            slots=SLOTS,
            address=options.grpc.target,
            serve=options,
            trace_fd=exporter.front_end_fd,
            spin_us=placement.front_end_spin_us,
        )
        self._core = placement.front_end
        self._scheduler = scheduler
        self._limit = DeathLimit("front end")
        self._models: dict[tuple[str, int], ModelReady | ModelUnavailable] = {}
        self._variants: dict[tuple[str, int, tuple[int, ...]], VariantReady] = {}
        self._retiring: dict[int, asyncio.Future[None]] = {}  # by model number
        self.on_shape_wanted: Callable[[ShapeWanted], None] = lambda message: None
        self.on_repository_call: Callable[[RepositoryCall], None] = lambda message: None
        self._load_done: InitialLoadDone | None = None
        self._child: Child | None = None
        self._link: Link[FrontEndMessage] | None = None
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._listened = False  # until then there are no requests
        self.metrics_address = ""  # "host:port"; empty: none
        self.http_address = ""  # the same
        self._stopping = False

    def start(self) -> None:
        """Start a front end and tell it what it shall serve."""
        ours, theirs = packet_pair()
        serve = replace(self._options.serve, logs=self._log.settings)  # which a client may have changed
        regions = self._mappings.front_end(FRONT_END)
        options = replace(self._options, supervisor_fd=theirs.fileno(), regions_fd=regions.fileno(), serve=serve)
        with self._log.of_child("front end") as stderr:
            process = subprocess.Popen(
                options.command(), pass_fds=options.descriptors, stdin=subprocess.DEVNULL, stderr=stderr
            )
        theirs.close()
        regions.close()
        os.sched_setaffinity(process.pid, {self._core})
        self._child = Child("front end", process, self._exited)
        self._link = Link[FrontEndMessage](ours, to_json, from_json, self._heard)
        known: list[FrontEndMessage] = [*self._trace_overrides.values()]
        known += [*self._models.values(), *self._variants.values()]
        for message in known:
            self._send(message)
        if self._load_done is not None:
            self._send(self._load_done)

    @property
    def pid(self) -> int:
        """The running front end's process id."""
        assert self._child is not None, "started"
        return self._child.pid

    async def listening(self) -> str:
        """Return the address ("host:port") once clients can connect. Raises BindError."""
        return await self._listening

    @property
    def entries(self) -> Mapping[tuple[str, int], ModelReady | ModelUnavailable]:
        """What clients know, by name and version."""
        return self._models

    def announce(self, message: ModelReady | ModelUnavailable | ModelRemoved) -> None:
        """Tell clients about a model. What was compiled of it for certain sizes is forgotten."""
        key = (message.name, message.version)
        if message.version:  # an entry without version stands only until there is a real one
            self._models.pop((message.name, 0), None)
        self._variants = {sizes: known for sizes, known in self._variants.items() if sizes[:2] != key}
        if isinstance(message, ModelRemoved):
            self._models.pop(key, None)
        else:
            self._models[key] = message
        self._send(message)

    async def retired(self, model_id: int, timeout_seconds: float) -> bool:
        """Return when no request uses a number that clients do not get any more; False if that takes too long.

        To be called at once after the announcement, before the front end can have answered.
        """
        if self._link is None:  # and its successor never hears of that number
            return True
        done = self._retiring[model_id] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(done, timeout_seconds)
        except TimeoutError:
            return False
        finally:
            self._retiring.pop(model_id, None)
        return True

    def answer(self, message: RepositoryAnswer) -> None:
        """Answer a call. The front end that made it may be dead: its successor does not know the number."""
        self._send(message)

    def announce_variant(self, message: VariantReady | VariantGone) -> None:
        """Tell what of a model is compiled, or is not any more."""
        key = (message.name, message.version, message.sizes)
        if isinstance(message, VariantReady):
            self._variants[key] = message
        else:
            self._variants.pop(key, None)
        self._send(message)

    def initial_load_done(self, strict_readiness: bool) -> None:
        """Let ServerReady answer true."""
        self._load_done = InitialLoadDone(strict_readiness)
        self._send(self._load_done)

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuse new requests, let the running ones finish, end the process; False if requests were left."""
        self._stopping = True
        self._send(Drain())
        if self._child is None:
            return True
        await self._child.wait(timeout_seconds)
        return self._child.returncode == 0 or not self._listened

    def _send(self, message: FrontEndMessage) -> None:
        if self._link is not None:
            self._link.send(message)

    def _heard(self, message: FrontEndMessage) -> None:
        match message:
            case Listening(address, metrics_address, http_address):
                # A successor must take the very port that clients know, also when the system chose the first one.
                self._options = replace(self._options, address=address, serve=self._serve_with(message))
                self.metrics_address, self.http_address = metrics_address, http_address
                self._listened = True
                if not self._listening.done():
                    self._listening.set_result(address)
                _log.debug("front end %d listens on %s", self.pid, address)
            case ShapeWanted():
                self.on_shape_wanted(message)
            case RepositoryCall():
                self.on_repository_call(message)
            case ModelRetired(model_id):
                self._unused(model_id)
            case LogSettings():
                self.on_log_settings(message)
            case TraceOverrides():
                self._trace_overrides[message.model] = message
                if message.level:
                    self._exporter.want()
            case BindFailed(reason) if not self._listening.done():
                self._stopping = True
                self._listening.set_exception(BindError(reason))
            case BindFailed(reason):
                _log.error("the front end cannot listen: %s", reason)
            case _:
                raise ValueError(f"unexpected {message}")

    def _serve_with(self, message: Listening) -> ServeOptions:
        """Return the options with the ports of metrics and HTTP that the system chose."""
        serve = self._options.serve
        if message.metrics_address:
            serve = replace(serve, metrics=replace(serve.metrics, port=_port_of(message.metrics_address)))
        if message.http_address:
            serve = replace(serve, http=replace(serve.http, port=_port_of(message.http_address)))
        return serve

    def _unused(self, model_id: int) -> None:
        done = self._retiring.get(model_id)
        if done is not None and not done.done():
            done.set_result(None)

    def _exited(self, child: Child) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        for model_id in list(self._retiring):
            self._unused(model_id)
        if not self._stopping:
            _log.error("the front end (process %d) %s; starting another", child.pid, child.fate())
            self._limit.count()
            self._memory.control.server_block.front_end_restarted()
            self._replacement = asyncio.get_running_loop().create_task(self._replace())

    async def _replace(self) -> None:
        await self._scheduler.front_end_quiet(FRONT_END)
        if not self._stopping:
            self._memory.tables[FRONT_END].init()
            self.start()


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
