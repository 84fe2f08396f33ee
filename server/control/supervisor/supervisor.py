"""The supervisor: makes the shared memory, starts every other process, keeps them alive, and ends them in order."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from gangway.artifact.format import Engine
from gangway.base.commands import ending_signals
from gangway.base.console import Console, Table
from gangway.base.host_limits import memory_limit_bytes
from gangway.base.process import missing_privilege, raise_own_priority
from gangway.base.service_manager import ServiceManager
from gangway.executor.instance_addresses import InstanceAddresses
from gangway.python_backend.keeper import adopt_orphans
from gangway.scheduler.messages import (
    ArtifactLost,
    ModelFailed,
    ModelIdle,
    ModelLoaded,
    ModelUnloaded,
    SetLog,
    WorkerStuck,
)
from gangway.scheduler.policies.targets import alone_us, least_target_us
from gangway.server import messages
from gangway.server.control.repository.compile_jobs import IDLE_SECONDS, Compiler, jobs_at_once
from gangway.server.control.repository.control import ModelControl, RepositoryPoller
from gangway.server.control.repository.loaded import LoadedModel, config_of, policies_of
from gangway.server.control.repository.loader import ModelLoader
from gangway.server.control.repository.profiles import BackgroundProfiler
from gangway.server.control.repository.repository import BrokenModel, OverrideStore, sweep_overrides
from gangway.server.control.repository.service import RepositoryService
from gangway.server.control.repository.start_progress import StartProgress
from gangway.server.control.repository.trials import ModelTrials
from gangway.server.control.supervisor.custom_metrics import CustomMetrics
from gangway.server.control.supervisor.events import Event, EventQueue, InstanceCall, ReadinessCall
from gangway.server.control.supervisor.exporter import ExporterControl
from gangway.server.control.supervisor.front_ends import FrontEndControl
from gangway.server.control.supervisor.jobs import Jobs
from gangway.server.control.supervisor.log import ServerLog, StatisticsLog
from gangway.server.control.supervisor.model_calls import ModelCalls
from gangway.server.control.supervisor.processes import HeartbeatWatch, StartError, reap_adopted
from gangway.server.control.supervisor.python_instances import PythonInstances, Services
from gangway.server.control.supervisor.regions import RegionRegistry
from gangway.server.control.supervisor.scheduler import SchedulerControl
from gangway.server.control.supervisor.shared_memory import SharedMemory, place
from gangway.server.control.supervisor.workers import WorkerSet
from gangway.server.descriptors import allow_many_descriptors
from gangway.server.models.config import qos_of
from gangway.server.models.settings import Terms, describe_batching
from gangway.server.options.command_line import ServeOptions
from gangway.server.system import drop_unwritable
from gangway.server.threads import started_pool

_log = logging.getLogger(__name__)

EXIT_GRACE_SECONDS = 5.0  # for processes that have nothing left to do
READ_THREADS = 4  # for what would block the event loop; all are started at once, while there is room


class Supervisor:
    """One server, from start to stop. Its event loop never blocks: it must see deaths at once."""

    def __init__(self, options: ServeOptions, log: ServerLog) -> None:
        self._options = options
        self._log = log
        self._service_manager = ServiceManager()
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()  # set by a signal; an exception is fatal
        for folder in sweep_overrides():
            _log.info("removed %s, which a killed server had left", folder)
        general = options.general
        memory = SharedMemory.create(len(general.cores), general.front_ends)
        memory.control.server_block.init(general.cores, time.time())
        placement = place(general.cores, general.front_ends)
        if len(general.numa_nodes) > 1:
            nodes = "; ".join(", ".join(map(str, node)) for node in general.numa_nodes)
            _log.info("the cores are of %d NUMA nodes, which no gang crosses: %s", len(general.numa_nodes), nodes)
        self._exporter = ExporterControl(options.traces, log)
        self._regions = RegionRegistry(memory.control.lost_regions)
        self._events = EventQueue(self._handle)
        self._scheduler = SchedulerControl(
            memory, general, placement, log, self._events, options.models.memory_mib << 20
        )
        self._front_ends = FrontEndControl(
            memory, options, placement, log, self._scheduler, self._exporter, self._regions, self._events
        )
        self._announcements = self._front_ends.announcements
        addresses = InstanceAddresses.create()
        self._workers = WorkerSet(memory, general, self._scheduler, log, self._regions, addresses)
        at_once = general.load_threads or jobs_at_once(len(general.cores), memory_limit_bytes())
        self._progress = StartProgress(at_once, self._tell_progress)
        jobs = Jobs(self._tell_jobs)
        self._compiler = Compiler(
            general.cache_dir,
            log,
            limit_bytes=general.max_cache_gib << 30,
            in_use=self._scheduler.loaded_keys,
            idle_seconds=IDLE_SECONDS,
            jobs=jobs,
            at_once=at_once,
        )
        self._profiler = BackgroundProfiler(general, memory.control, self._compiler, self._scheduler, log, jobs)
        self._trials = ModelTrials(memory.own_data_plane(), least_target_us(placement.shared))
        metrics, flags_fd = CustomMetrics(memory.custom_metrics), memory.cancellations.segment.fd
        self._python = PythonInstances(Services(log, metrics, addresses, self._events, flags_fd))
        self._loader = ModelLoader(
            options, self._compiler, self._scheduler, self._announcements, self._profiler, self._trials, self._python
        )
        self._overrides = OverrideStore()
        self._models = ModelControl(options.repository, self._loader, self._announcements, self._overrides)
        self._profiler.tell = self._models.served.profiled
        self._repository = RepositoryService(
            options.repository,
            self._announcements,
            self._overrides,
            self._models.load,
            self._models.unload,
            self._front_ends.answer,
        )
        self._model_calls = ModelCalls(
            self._repository.perform,
            self._announcements.is_ready,
            self._front_ends.settled,
            self._models.needs,
            options.grpc.max_message_bytes,
        )
        self._watch = HeartbeatWatch(memory.control.heartbeats, self._scheduler, self._front_ends.processes)
        self._statistics_log = StatisticsLog(self._announcements.counted, memory.statistics.figures)

    def _handle(self, event: Event) -> None:
        """Pass an event on to the part that it concerns."""
        match event:
            case WorkerStuck(index, pid):
                self._workers.kill(index, pid)
            case ModelUnloaded(model_id):
                self._loader.forget(model_id)
            case ModelIdle(model_id):
                self._announcements.announce_idle(model_id, True)
            case ModelLoaded(model_id):
                self._announcements.announce_idle(model_id, False)
            case ModelFailed(model_id, reason, at_fault):
                self._models.served.model_failed(model_id, reason, at_fault)
            case ArtifactLost(model_id, reason):
                self._loader.artifact_missing(model_id, reason)
            case messages.ShapeWanted():
                self._loader.shapes.want(event)
            case messages.FirstAnswer():
                self._models.served.first_answer(event)
            case messages.RepositoryCall():
                self._repository.take(event)
            case messages.ModelPresence():
                self._announcements.announce_presence(event)
            case messages.InstanceAttended():
                self._front_ends.attend(event)
            case InstanceCall():
                self._model_calls.take(event)
            case ReadinessCall(model_id=model_id):
                self._python.ask_readiness(model_id, partial(self._front_ends.tell_readiness, event))
            case messages.LogSettings():
                self._log.apply(event)
                self._scheduler.send(SetLog(event.levels.to_number()))
                _log.info("log settings changed by a client: %s", event)

    async def run(self) -> None:
        """Serve until a signal comes. Raises BindError, OSError."""
        self._loop.set_exception_handler(self._fail)
        for number in ending_signals():
            self._loop.add_signal_handler(number, self._stop, number)
        tasks = [self._loop.create_task(work) for work in (self._start(), self._watch_processes())]
        for task in tasks:
            task.add_done_callback(self._is_over)
        try:
            await self._end
        finally:
            for task in tasks:
                task.cancel()
            await self._shut_down()

    async def _start(self) -> None:
        self._front_ends.start()
        self._scheduler.start()
        self._workers.start()
        loading = self._loop.create_task(self._models.start(self._front_ends.listening, self._progress))
        try:
            address = await self._front_ends.listening()
            found = await loading
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)  # what no address means for it has been said
        self._compiler.give_way()
        metrics, http = self._front_ends.metrics_address, self._front_ends.http_address
        loaded, broken = self._models.served.loaded, self._models.served.broken
        print_summary(self._options, address, metrics, http, self._compiler.target, loaded, broken)
        if http:
            _log.info("ready: HTTP on %s", http)
        _log.info("ready: %s", f"gRPC on {address}" if address else "no gRPC")
        missing = _not_ready(self._options.repository.strict_readiness, loaded, broken) if broken else ""
        self._service_manager.ready(missing or f"models ready: {len({model.ready.name for model in loaded})}")
        poll_seconds = self._options.repository.poll_seconds if self._options.repository.mode == "poll" else 0.0
        poller = RepositoryPoller(self._models, poll_seconds, found)
        others = (self._profiler.run(), poller.run(), self._statistics_log.run())
        await asyncio.gather(self._loader.shapes.run(), *others)

    def _tell_progress(self, progress: messages.StartUnderWay) -> None:
        self._service_manager.starting(progress.text)
        self._announcements.announce_start(progress)

    def _tell_jobs(self, jobs: messages.JobsUnderWay) -> None:
        self._announcements.announce_jobs(jobs)
        self._progress.take_jobs(jobs)

    async def _watch_processes(self) -> None:
        while True:
            await self._watch.check()
            self._service_manager.alive()
            self._workers.follow_cores()
            reap_adopted()

    def _is_over(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._end.done():
            self._end.set_exception(error)

    def _stop(self, number: int) -> None:
        if self._end.done():
            return
        delay_s = self._options.general.exit_delay_secs
        when = f" after {delay_s:g} s" if delay_s else ""
        name = signal.Signals(number).name
        _log.info("%s: the server stops; running requests are finished, new ones refused%s", name, when)
        self._end.set_result(None)

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of a callback: the state of the supervisor is unknown, so the server ends."""
        error = context.get("exception") or RuntimeError(context["message"])
        if isinstance(error, StartError):
            error = StartError(error.name, error.exit_text, self._log.last_words_of(error.name))
        if not self._end.done():
            self._end.set_exception(error)
        else:
            _log.error("%s", context["message"], exc_info=error)

    async def _shut_down(self) -> None:
        """End front ends first: when their last request is answered, the other processes are not needed."""
        begin = time.monotonic()
        general, is_asked = self._options.general, self._end.exception() is None
        delay_s, timeout_s = (general.exit_delay_secs, general.exit_timeout_secs) if is_asked else (0.0, 0.0)
        self._service_manager.stopping("running requests are finished", delay_s + timeout_s + 4 * EXIT_GRACE_SECONDS)
        if delay_s:
            await self._front_ends.leave(delay_s)
        self._repository.stop()
        self._models.stop()
        self._loader.stop()
        self._trials.stop()
        self._workers.expect_exits()
        if not await self._front_ends.drain(timeout_s) and is_asked:
            _log.warning("the server stops with requests unfinished: they took longer than --exit-timeout-secs")
        self._statistics_log.write_all()
        await self._scheduler.stop(EXIT_GRACE_SECONDS)
        await self._workers.wait(EXIT_GRACE_SECONDS)
        await self._compiler.ended()
        await self._python.stop()
        self._loader.close()
        self._overrides.close()
        self._regions.close()
        await self._exporter.stop(EXIT_GRACE_SECONDS)
        await self._log.finish(1.0)
        _log.info("stopped after %.2f s", time.monotonic() - begin)


def serve(options: ServeOptions, log: ServerLog) -> int:
    """Run a server; return the exit status."""
    if missing := missing_privilege():
        _log.info("%s", missing)
    adopt_orphans()  # of Python models, whose instances have keepers that somebody may kill
    raise_own_priority()  # requests wait for it when a process has died
    try:
        asyncio.run(_serve(options, log))
    except Exception as error:
        _log.debug("fatal", exc_info=True)
        print(f"gangway serve: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(options: ServeOptions, log: ServerLog) -> None:
    allow_many_descriptors()
    asyncio.get_running_loop().set_default_executor(started_pool(READ_THREADS, "supervisor"))
    await Supervisor(options, log).run()


def print_summary(
    options: ServeOptions,
    address: str,
    metrics_address: str,
    http_address: str,
    target: str,
    loaded: Sequence[LoadedModel],
    broken: Sequence[BrokenModel],
) -> None:
    """Print models, latency targets, cores, addresses and a client command to copy."""
    console = Console(highlight=False)
    cores = ", ".join(map(str, options.general.cores))
    lines = [f"cores      {cores} ({target or 'nothing compiled'}), scheduler {options.general.scheduler}"]
    if loaded:
        of_any = milliseconds(alone_us(0.0))
        unknown = "; -: shown by the first request" * any(model.isolated is None for model in loaded)
        lines.insert(0, f"alone      latency of a request on an idle server, {of_any} of it for any model{unknown}")
        # Targets in milliseconds are the owner's; a multiple of a short latency is raised to this.
        least_us = {model.isolated.busy_cost_us for model in loaded if model.isolated and _has_least_target(model)}
        lines[1:1] = [f"target     a multiple of that, but at least {milliseconds(each)}" for each in least_us]
    if http_address:
        lines.append(f"HTTP       {http_address}" + ", TLS" * bool(options.http.tls))
        if options.http.page:
            lines.append(f"page       http{'s' * bool(options.http.tls)}://{client_url(http_address)}/")
    if address:
        lines.append(f"gRPC       {address}" + ", TLS" * bool(options.grpc.tls))
    if metrics_address:
        lines.append(f"metrics    http://{metrics_address}/metrics")
    if loaded and address and not options.grpc.tls:
        lines.append(f"try        gangway client {loaded[0].ready.name} --url {client_url(address)}")
    if broken:
        lines.append(_not_ready(options.repository.strict_readiness, loaded, broken))
    try:
        if loaded or broken:
            console.print(_model_table(loaded, broken))
        console.print(*lines, sep="\n", soft_wrap=True)
    except OSError as error:
        _log.warning("the summary cannot be written to standard output: %s", error)
        drop_unwritable(sys.stdout)


def _not_ready(is_strict: bool, loaded: Sequence[LoadedModel], broken: Sequence[BrokenModel]) -> str:
    """Say how many models are missing, and what the server therefore says of itself."""
    missing = {entry.name for entry in broken}
    names = missing | {model.entry.name for model in loaded}
    text = f"{len(missing)} of {len(names)} models {'is' if len(missing) == 1 else 'are'} not ready"
    is_missed = any(entry.reason != messages.DUPLICATE for entry in broken)  # see ModelUnavailable.is_missed
    return text + ", so the server says not ready" * (is_strict and is_missed)


def client_url(address: str) -> str:
    """Return what a client on this machine connects to."""
    for everywhere in ("0.0.0.0:", "[::]:"):
        if address.startswith(everywhere):
            return "localhost:" + address.removeprefix(everywhere)
    return address


def _model_table(loaded: Sequence[LoadedModel], broken: Sequence[BrokenModel]) -> Table:
    table = Table()
    for heading, side in (("model", "left"), ("version", "right"), ("alone", "right"), ("target", "right")):
        table.add_column(heading, justify="right" if side == "right" else "left")
    table.add_column("batches", overflow="fold")
    table.add_column("status", overflow="fold")
    for model in sorted(loaded, key=lambda model: (model.ready.name, model.ready.version)):
        ready = model.ready
        target = _target(policies_of(ready).terms(0, 0, ready.qos_us))
        alone = "-" if model.isolated is None else milliseconds(model.isolated.latency_us)
        status = "ready, ensemble" if model.entry.is_ensemble else _status(model)
        table.add_row(ready.name, str(ready.version), alone, target, _batches(model), status)
    for entry in broken:
        version = "-" if entry.is_whole else str(entry.version)
        table.add_row(entry.name, version, "", "", "", f"not ready: {entry.reason}")
    return table


def _has_least_target(model: LoadedModel) -> bool:
    """Whether the latency target is a multiple of so short a latency that the least target counts."""
    isolated, multiple = model.isolated, qos_of(config_of(model.ready)).multiple
    return isolated is not None and multiple is not None and multiple * isolated.latency_us < isolated.busy_cost_us


def _target(terms: Terms) -> str:
    """Return what requests that state no target get."""
    if not terms.target_us:
        return "best effort"
    return milliseconds(terms.target_us) + " or refused" * terms.rejects_late


def _batches(model: LoadedModel) -> str:
    """Return how many rows are joined; those of an ensemble are joined step by step."""
    return "-" if model.entry.is_ensemble else describe_batching(config_of(model.ready))


def _status(model: LoadedModel) -> str:
    until = " until it is compiled" if model.pending_compilation else ""
    return "ready" if model.engine is Engine.NATIVE else f"ready, served by {model.engine}{until}"


def milliseconds(microseconds: float) -> str:
    """Return a time for people, three digits."""
    value = microseconds / 1e3
    return f"{value:.3f} ms" if value < 1 else f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"
