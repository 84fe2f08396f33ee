"""The front-end process: `python -m gangway.server.serving.process` with the options that the supervisor gives it.

The main thread is the loop, which serves the clients and hears the supervisor (`server/serving/loop.py`).
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until it listens: imports leave no garbage, and to look for it is a tenth of their time

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from gangway.base.logs import ProcessLog
from gangway.base.memory_budget import MESSAGE_SHARE, memory_budget
from gangway.base.peer import Peer
from gangway.base.process import die_with_parent, use_short_slices
from gangway.executor.control import BEAT_EVERY_S, ControlSegment
from gangway.executor.regions import region_peer
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotTable
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.server import messages
from gangway.server.access import Ports, TlsError, remove_socket, why_not_bound
from gangway.server.cancellations import Cancellations
from gangway.server.custom_metrics import CustomMetricsTable
from gangway.server.descriptors import DescriptorWatch, allow_many_descriptors
from gangway.server.errors import RequestError
from gangway.server.models.served import MOST_ANSWER_BYTES, MakeStatistics, Models, own_statistics
from gangway.server.options.command_line import FrontEndOptions, ServeOptions
from gangway.server.process_options import from_stdin
from gangway.server.requests.data_plane import DataPlane
from gangway.server.requests.mapped_tensors import Mappings
from gangway.server.requests.regions import Regions
from gangway.server.serving.access_log import AccessLog
from gangway.server.serving.grpc.front_end import GrpcFrontEnd
from gangway.server.serving.grpc.streams import PERIOD_S, StreamLimits, Streams
from gangway.server.serving.inference.forwarded_headers import ForwardedHeaders
from gangway.server.serving.inference.inference import Inference
from gangway.server.serving.inference.model_run import ShapeWatch
from gangway.server.serving.inference.request import Resources
from gangway.server.serving.inference.response_cache import ResponseCache
from gangway.server.serving.inference.sequences import Sequences
from gangway.server.serving.loop import ServingLoop
from gangway.server.serving.memory import MemoryGuard
from gangway.server.serving.metrics_reading import Peers, SharedStatistics, Source, memory_bytes
from gangway.server.serving.pending import drive, pause
from gangway.server.serving.protocol import AnyMethod, Health, Method, Methods, RegionMethods, ServerMethods, at_once
from gangway.server.serving.readiness import Readiness
from gangway.server.serving.slots import DeferredWork, Slots
from gangway.server.serving.supervisor_calls import LogMethods, RepositoryMethods, SharedChanges, TraceMethods
from gangway.server.serving.tracing import Tracer
from gangway.server.serving.turns import Turns
from gangway.server.serving.watch import Watch
from gangway.server.system import keep_freed_memory, own_version
from gangway.server.threads import NoThreadError
from gangway.server.tracing.settings import TraceOverrides

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from gangway.server.serving.http.front_end import HttpFrontEnd


TELL_AGAIN_SECONDS = 0.01
IDLE_POLL_SECONDS = 0.005
DRAIN_TRACES_SECONDS = 1.0
ORDERS_AT_ONCE = 16  # of the supervisor, before others on the loop have their turn
MAX_DRAIN_SECONDS = 600.0  # the supervisor kills the process earlier
STOPPING = "the server is stopping"


class CannotListenError(Exception):
    """An address cannot be had; the message says why."""


@dataclass(frozen=True)
class Surroundings:
    """The processes around a front end; by default there are none.

    `say` tells the supervisor something; it returns whether that could be told. `is_alone`: no other front end reads
    what this one has counted. `end`: see DescriptorWatch.
    """

    say: Callable[[messages.FrontEndMessage], bool] | None = None
    stream_limits: StreamLimits | None = None
    tracer: Tracer | None = None
    log: ProcessLog | None = None
    mappings: Mappings | None = None
    cancellations: Cancellations | None = None
    make_statistics: MakeStatistics = own_statistics
    control: ControlSegment | None = None
    is_alone: bool = True
    peers: Peers = field(default_factory=Peers)
    end: Callable[[], object] = lambda: None


class FrontEnd:
    """Inference and answers over one data plane, told by the supervisor what to serve."""

    def __init__(
        self, plane: DataPlane, options: ServeOptions, serving: ServingLoop, around: Surroundings = Surroundings()
    ) -> None:
        """Make it. `serving` need not run yet; its maker stops it."""
        self._serving = serving
        self._tell = around.say or (lambda message: True)
        control, mappings = around.control, around.mappings
        regions = Regions() if mappings is None else Regions(mappings.forget)
        cache_bytes = options.models.cache_bytes
        cache = ResponseCache(cache_bytes) if cache_bytes else None
        self.tracer = around.tracer or Tracer(options.traces, serving)
        self.sequences = Sequences(plane, serving)
        self._deferred = DeferredWork(at_once=not around.is_alone)
        slots = Slots(serving, plane, self._deferred)
        flags = around.cancellations or Cancellations.attach(-1, 0)
        forwarded = ForwardedHeaders(options.grpc.header_forward_pattern, options.http.header_forward_pattern)
        resources = Resources(slots, regions, ShapeWatch(self._tell), self.tracer, flags, mappings, forwarded)
        self.inference = Inference(resources, self.sequences, cache)
        limits = around.stream_limits or StreamLimits(message_bytes=options.grpc.max_message_bytes)
        self.streams = Streams(self.inference.order_of, self.inference.has_sequences, limits)
        self._readiness = Readiness(serving.loop, around.say)
        self._answers = ServerMethods(options.general.id)
        self._jobs: tuple[messages.BackgroundJob, ...] = ()
        self._start: messages.StartUnderWay | None = None
        self._watch: Watch | None = None
        if control is not None and options.http.page:
            # A thread reads them. What is answered is counted by the loop alone.
            source = Source(lambda: self._answers.models, plane, control, None, around.peers)
            self._watch = Watch(source, lambda: self._answers.models, lambda: self._jobs, lambda: self._start, control)
        if control is not None:  # other processes write there what models hold, and their heartbeats
            memory_of = partial(memory_bytes, control=control)
            is_served, says_ready = control.heartbeats.all_fresh, self._readiness.of
            self._answers = ServerMethods(options.general.id, memory_of, is_served, says_ready)
        self.models = Models(most_answer_bytes=max(MOST_ANSWER_BYTES, options.grpc.max_message_bytes))
        self._make_statistics = around.make_statistics
        loop = serving.loop
        self.repository = RepositoryMethods(loop, around.say or (lambda message: False), slots.aside)
        self.changes = SharedChanges(loop, self._apply, around.say)
        self._regions = RegionMethods(regions, self.changes.make, options.general.allow_client_shm)
        self.access_log = AccessLog(options.access_log, options.logs.format) if options.access_log.file else None
        self._logs = LogMethods(options.logs, around.log, self.changes.make, Turns(loop), self.access_log)
        traces = TraceMethods(self.tracer, lambda: self.models, self.changes.make, Turns(loop))
        methods = methods_of(self._answers, self._regions, self.repository, traces, self._logs)
        self._methods = Methods(methods, loop, slots.aside, self._deferred.do)
        self.ports = Ports(metrics=options.metrics.target)
        self.server = GrpcFrontEnd(
            serving,
            self.inference,
            self.streams,
            self._methods,
            Health(self._answers),
            options.grpc,
            plane.admission,
            lambda: self.descriptors.is_short,
            self.access_log,
            self.ports,
        )
        self.descriptors = DescriptorWatch(self.server.end_silent, around.end)
        self._options = options
        self._http: HttpFrontEnd | None = None

    @property
    def http(self) -> "HttpFrontEnd":
        """The HTTP server, made when it is first asked for: what it imports takes long, see `Listeners`."""
        if self._http is None:
            from gangway.server.serving.http.front_end import HttpFrontEnd  # noqa: PLC0415 - see above
            from gangway.server.serving.http.site import HttpService  # noqa: PLC0415 - see above

            service = HttpService(
                self.inference.begin,
                self._methods,
                lambda: self.models,
                self._options.http,
                self.ports,
                self.streams.limits.unsent_bytes,
                self.access_log,
            )
            self._http = HttpFrontEnd(service, self._serving, self._watch, lambda: self.descriptors.is_short)
        return self._http

    @property
    def models(self) -> Models:
        """What is served; each answer that has been sent is counted."""
        self._deferred.do()
        return self._answers.models

    @models.setter
    def models(self, models: Models) -> None:
        self._answers.models = models
        self.inference.serve(models)

    def listen(self, target: str) -> str:
        """Serve gRPC at "host:port" or "unix:PATH", and return it with the port it has; do nothing for "".

        Raises CannotListenError.
        """
        if not target:
            return ""
        try:
            address = self.server.bind(target)
        except OSError as error:
            raise CannotListenError(f"cannot listen on {target}: {why_not_bound(error)}") from None
        self.server.start()
        self.ports.grpc = address
        return address

    def watch_memory(self, reason: str, is_full: bool) -> bool:
        """See to the calls that wait for memory; return whether there are any.

        They are told the reason if they have waited too long. If memory is full, end what takes it without being under
        way: calls that arrive, and the stream that holds most.
        """
        error = RequestError(StatusCode.UNAVAILABLE, reason)
        waits = self.server.poll_arrivals(error)
        if is_full:
            self.server.end_arriving(error)
            if not self.streams.end_largest() and self._http is not None:
                self._http.end_largest()
        return waits

    def handle(self, message: messages.FrontEndMessage) -> None:
        """Do what the supervisor says. Quick, for the loop."""
        match message:
            case messages.ModelReady() | messages.ModelUnavailable() | messages.ModelRemoved():
                before = self.models.served_as(message.name, message.version)
                self.models = self.models.updated(message, self._make_statistics)
                after = self.models.served_as(message.name, message.version)
                if after is not None and after.tokenizer is not None:
                    self._serving.aside(after.tokenizer.prepare)
                if before is not None:
                    before.uses.close(lambda: self._retired(before.model_id))
            case messages.ModelPresence():
                self.models = self.models.with_presence(message)
            case messages.ModelIdleness():
                self.models = self.models.with_idle(message)
            case messages.InstanceAttended(address):
                self.inference.attend(address)
            case messages.ModelTarget():
                self.models = self.models.with_target(message)
            case messages.VariantReady() | messages.VariantGone():
                self.models = self.models.with_variant(message)
            case messages.Agreed():
                if (applied := self.changes.agreed(message)) is not None:
                    self._say(applied)
            case messages.Settled():
                self.changes.calls.answered(message)
            case messages.JobsUnderWay(jobs):
                self._jobs = jobs
            case messages.StartUnderWay():
                self._start = message
            case messages.InitialLoadDone(strict_readiness):
                self._start = None
                self._answers.strict_readiness = strict_readiness
                self._answers.ready = True
            case messages.RepositoryAnswer():
                self.repository.calls.answered(message)
            case messages.ReadinessTold():
                self._readiness.calls.answered(message)
            case messages.Leave():
                self._answers.leaving = True
            case _:
                raise ValueError(f"{message} is not for a front end")

    async def drain(self) -> None:
        """Take no further requests; return when the last one has ended, or after MAX_DRAIN_SECONDS."""
        for each in (
            self.inference,
            self.streams,
            self.repository.calls,
            self.changes.calls,
            self._readiness.calls,
        ):
            each.refuse(STOPPING)
        self._answers.ready = False
        # Not by the gRPC server's own stop: it cancels what just arrives.
        await self._await(lambda: self._is_idle, MAX_DRAIN_SECONDS)
        await self._await(self.tracer.flush, DRAIN_TRACES_SECONDS)
        self.tracer.close()

    def _retired(self, model_id: int) -> None:
        """The supervisor waits for it before it unloads the model."""
        self._say(messages.ModelRetired(model_id))

    def _say(self, message: messages.FrontEndMessage) -> None:
        """Tell what the supervisor must hear, as soon as there is room."""
        if not self._tell(message):
            self._serving.loop.call_later(TELL_AGAIN_SECONDS, self._say, message)

    def _apply(self, change: messages.Change) -> None:
        """Make a change that is made in all front ends. Raises RequestError."""
        match change:
            case messages.RegionChange():
                self._regions.apply(change)
            case TraceOverrides():
                self.tracer.override(change, change.restarts)
            case messages.LogSettings():
                self._logs.apply(change)

    async def _await(self, is_done: Callable[[], bool], seconds: float) -> None:
        loop = self._serving.loop
        end_s = loop.time() + seconds
        while not is_done() and loop.time() < end_s:
            await pause(loop, IDLE_POLL_SECONDS)

    @property
    def _is_idle(self) -> bool:
        """Whether all answers have been sent."""
        is_done = self.inference.idle and self.streams.idle
        return is_done and self.server.idle and (self._http is None or self._http.idle)


def methods_of(
    answers: ServerMethods,
    regions: RegionMethods,
    repository: RepositoryMethods,
    traces: TraceMethods,
    logs: LogMethods,
) -> Mapping[str, AnyMethod]:
    """Return what is served besides inference, by the name that it has in the service."""
    return {
        "ServerLive": Method(pb.ServerLiveRequest, at_once(answers.server_live)),
        "ServerReady": Method(pb.ServerReadyRequest, at_once(answers.server_ready)),
        "ModelReady": Method(pb.ModelReadyRequest, answers.model_ready),
        "ServerMetadata": Method(pb.ServerMetadataRequest, at_once(answers.server_metadata)),
        "ModelMetadata": Method(pb.ModelMetadataRequest, at_once(answers.model_metadata)),
        "ModelConfig": Method(pb.ModelConfigRequest, at_once(answers.model_config)),
        "ModelStatistics": Method(
            pb.ModelStatisticsRequest, answers.model_statistics, is_long=lambda request: not request.name
        ),
        "RepositoryIndex": Method(
            pb.RepositoryIndexRequest, answers.repository_index, repository.refresh, is_long=lambda request: True
        ),
        "RepositoryModelLoad": Method(pb.RepositoryModelLoadRequest, repository.load),
        "RepositoryModelUnload": Method(pb.RepositoryModelUnloadRequest, repository.unload),
        "SystemSharedMemoryStatus": Method(pb.SystemSharedMemoryStatusRequest, at_once(regions.system_status)),
        "SystemSharedMemoryRegister": Method(pb.SystemSharedMemoryRegisterRequest, regions.system_register),
        "SystemSharedMemoryUnregister": Method(pb.SystemSharedMemoryUnregisterRequest, regions.system_unregister),
        "CudaSharedMemoryStatus": Method(pb.CudaSharedMemoryStatusRequest, at_once(regions.cuda_status)),
        "CudaSharedMemoryRegister": Method(pb.CudaSharedMemoryRegisterRequest, at_once(regions.cuda_register)),
        "CudaSharedMemoryUnregister": Method(pb.CudaSharedMemoryUnregisterRequest, at_once(regions.cuda_unregister)),
        "TraceSetting": Method(pb.TraceSettingRequest, traces.trace_setting),
        "LogSettings": Method(pb.LogSettingsRequest, logs.log_settings),
    }


Open = Callable[[], str]  # returns "host:port", the port as bound; empty: nothing is served there


class Listeners:
    """Opens the listeners when the front end knows all models. `grpc`, `http` and `metrics` raise CannotListenError or
    OSError.

    gRPC comes first. Importing HTTP and metrics takes as long as the rest of a front end's start, so they are opened
    while gRPC answers: a quick successor matters after a crash. `tell`: as in FrontEnd.
    """

    def __init__(self, grpc: Open, http: Open, metrics: Open, tell: Callable[[messages.FrontEndMessage], bool]) -> None:
        self._grpc = grpc
        self._http = http
        self._metrics = metrics
        self._tell = tell
        self.grpc_address = ""  # as soon as there is one

    def open(self) -> None:
        """Open them. The process ends if one cannot be opened, which the supervisor is told. Not for the loop."""
        try:
            self.grpc_address = self._grpc()
            own_version()  # so that no client waits for it
            metrics_address = self._metrics()
            http_address = self._http()
        except (CannotListenError, OSError) as error:
            self._say(messages.BindFailed(str(error)))
            os._exit(1)
        gc.enable()
        gc.freeze()  # what lives now lives on: a collection would stop the loop for some 10 ms to look at it
        self._say(messages.Listening(self.grpc_address, metrics_address, http_address))

    def _say(self, message: messages.FrontEndMessage) -> None:
        while not self._tell(message):
            time.sleep(TELL_AGAIN_SECONDS)


def make_data_plane(options: FrontEndOptions, control: ControlSegment) -> DataPlane:
    """Map the inherited io segment."""
    io = Segment.attach(options.io_fd)
    slots = SlotTable(io, options.slots)
    return DataPlane(io, slots, control.submit_rings[options.index], control.scheduler_bell)


def make_mappings(options: FrontEndOptions, control: ControlSegment, serving: ServingLoop) -> Mappings | None:
    """Begin to speak with the supervisor about regions, if there is a socket for that."""
    if options.regions_fd < 0:
        return None
    return Mappings(region_peer(socket.socket(fileno=options.regions_fd)), control.lost_regions, serving.loop)


def open_metrics(
    options: FrontEndOptions, front_end: FrontEnd, plane: DataPlane, control: ControlSegment, peers: Peers
) -> str:
    """Serve the metrics of all front ends; return where. Raises OSError."""
    from gangway.server.serving.metrics import exposition_of  # noqa: PLC0415 - see Listeners

    fds, metrics = options.custom_metrics_fds, options.serve.metrics
    custom = CustomMetricsTable.attach(*fds) if fds else None
    exposition = exposition_of(metrics, lambda: front_end.models, plane, control, peers, custom)
    return front_end.http.listen_for_metrics(metrics, exposition)


def run(options: FrontEndOptions, log: ProcessLog) -> int:
    """Serve until the supervisor says Drain; return the exit status."""
    supervisor = messages.front_end_peer(socket.socket(fileno=options.supervisor_fd))
    control = ControlSegment.attach(options.control_fd)
    plane = make_data_plane(options, control)

    say = supervisor.try_send
    shared = SharedStatistics(options.index, options.statistics_fd, options.other_io_fds, plane)

    def end() -> None:
        log.finish()
        os._exit(1)

    try:
        serving = ServingLoop()
        mappings = make_mappings(options, control, serving)
        exporter = socket.socket(fileno=options.trace_fd) if options.trace_fd >= 0 else None
        around = Surroundings(
            say,
            tracer=Tracer(options.serve.traces, serving, exporter),
            log=log,
            mappings=mappings,
            cancellations=Cancellations.attach(options.cancellations_fd, options.index),
            make_statistics=shared.make_statistics,
            control=control,
            is_alone=not options.other_io_fds,
            peers=shared.peers,
            end=end,
        )
        front_end = FrontEnd(plane, options.serve, serving, around)
    except (TlsError, OSError, NoThreadError) as error:
        supervisor.send(messages.BindFailed(str(error)), wait=True)
        return 1
    if front_end.inference.cache is not None:
        shared.count_cache(front_end.inference.cache.count_in)
    memory = MemoryGuard(shared.heap_bytes, plane, memory_budget(), front_end.watch_memory, serving.aside)
    listeners = Listeners(
        partial(front_end.listen, options.address),
        lambda: front_end.http.listen(options.serve.http.target),
        lambda: open_metrics(options, front_end, plane, control, shared.peers),
        say,
    )
    serving.every(BEAT_EVERY_S, lambda: control.heartbeats.beat(options.index, serving.lag.most_s))
    serving.every(0.0, memory.turn)
    serving.every(0.0, front_end.descriptors.turn, aside=True)
    serving.every(PERIOD_S, front_end.streams.poll)
    orders = Orders(supervisor, serving, front_end, listeners, log)
    serving.call(serving.loop.add_reader, supervisor.fileno(), orders.hear)
    serving.serve()
    if front_end.access_log is not None:
        front_end.access_log.close()
    return 0


class Orders:
    """What the supervisor says, as the loop hears it. Whatever fails here ends the process: it has a successor."""

    def __init__(
        self,
        supervisor: Peer[messages.FrontEndMessage],
        serving: ServingLoop,
        front_end: FrontEnd,
        listeners: Listeners,
        log: ProcessLog,
    ) -> None:
        self._supervisor = supervisor
        self._serving = serving
        self._front_end = front_end
        self._listeners = listeners
        self._log = log

    def hear(self) -> None:
        """Follow the next orders. The loop calls again while there are more."""
        try:
            for _ in range(ORDERS_AT_ONCE):
                if (message := self._supervisor.receive()) is None:
                    break
                self._follow(message)
        except EOFError:
            _log.error("the supervisor has ended, so this process ends")
            os._exit(1)  # without waiting for threads, whose answers may never come
        except Exception as error:
            end_with(error, self._log)

    def _follow(self, message: messages.FrontEndMessage) -> None:
        match message:
            case messages.AllKnown():
                self._serving.aside(self._open)
            case messages.Drain():
                drive(self._drain())
            case _:
                self._front_end.handle(message)

    def _open(self) -> None:
        try:
            self._listeners.open()
        except Exception as error:
            end_with(error, self._log)

    async def _drain(self) -> None:
        try:
            await self._front_end.drain()
        except Exception as error:
            end_with(error, self._log)
        remove_socket(self._listeners.grpc_address)
        # Connections break off, which clients take for UNAVAILABLE; a tidy end would cancel their calls.
        self._log.finish()
        os._exit(0)


def end_with(error: Exception, log: ProcessLog) -> NoReturn:
    """Log the error and end the process at once, whatever other threads are at: only then is there a successor."""
    sys.excepthook(type(error), error, error.__traceback__)
    log.finish()
    os._exit(1)


def within_memory(options: ServeOptions) -> ServeOptions:
    """Return the options with messages that are no longer than the memory limit allows."""
    share_bytes = partial(memory_budget().share_bytes, MESSAGE_SHARE)
    return replace(
        options,
        grpc=replace(options.grpc, max_message_bytes=share_bytes(options.grpc.max_message_bytes)),
        http=replace(options.http, max_body_bytes=share_bytes(options.http.max_body_bytes)),
    )


def main() -> int:
    """Run the process."""
    die_with_parent()
    use_short_slices()
    options = from_stdin(FrontEndOptions)
    options = replace(options, serve=within_memory(options.serve))
    log = ProcessLog(options.serve.logs.levels)
    keep_freed_memory()
    allow_many_descriptors()
    try:
        return run(options, log)
    except Exception as error:
        end_with(error, log)


if __name__ == "__main__":
    sys.exit(main())
