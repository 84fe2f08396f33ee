"""The supervisor: makes the shared memory, starts every other process, keeps them alive, and ends them in order."""

import asyncio
import logging
import signal
import sys
import time
from typing import Any

from gangway.executor.process import take_precedence_alone
from gangway.scheduler.gangs import lease_count
from gangway.server.compile_jobs import Compiler
from gangway.server.control import SchedulerControl
from gangway.server.counting_pool import started_pool
from gangway.server.front_end_control import FrontEndControl
from gangway.server.heartbeat_watch import HeartbeatWatch
from gangway.server.in_place.keeper import MappingKeeper
from gangway.server.logs.server_log import ServerLog
from gangway.server.logs.settings import LogSettings
from gangway.server.model_control import ModelControl
from gangway.server.model_loader import ModelLoader
from gangway.server.options.serve_options import ServeOptions
from gangway.server.overrides import OverrideKeeper, sweep_overrides
from gangway.server.placement import place
from gangway.server.process import allow_many_descriptors
from gangway.server.profile_keeper import ProfileKeeper
from gangway.server.repository_desk import RepositoryDesk
from gangway.server.repository_poller import RepositoryPoller
from gangway.server.shared_memory import SharedMemory
from gangway.server.statistics_log import StatisticsLog
from gangway.server.summary import print_summary
from gangway.server.tracing.exporter_control import ExporterControl
from gangway.server.worker_set import WorkerSet

EXIT_GRACE_SECONDS = 5.0  # for processes that have nothing left to do
READ_THREADS = 4  # for what would block the event loop; none must be started when there is no room for one
_log = logging.getLogger(__name__)


class Supervisor:
    """One server, from start to stop. Its event loop never blocks: it must see deaths at once."""

    def __init__(self, options: ServeOptions, log: ServerLog) -> None:
        self._options = options
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()  # set by a signal; an exception is fatal
        for folder in sweep_overrides():
            _log.info("removed %s, left by a killed server", folder)
        general = options.general
        memory = SharedMemory.create(len(general.cores), general.front_ends)
        memory.control.server_block.init(general.cores, time.time())
        placement = place(general.cores, general.front_ends)
        self._scheduler = SchedulerControl(
            memory, general.scheduler, placement, log, general.trace_decisions, general.timeline
        )
        self._mappings = MappingKeeper(memory.control.lost_regions)
        self._workers = WorkerSet(memory, general.cores, general.cache_dir, self._scheduler, log, self._mappings)
        self._exporter = ExporterControl(options.traces, log)
        self._front_end = FrontEndControl(
            memory, options, placement, log, self._scheduler, self._exporter, self._mappings
        )
        self._front_end.on_log_settings = self._set_log
        self._compiler = Compiler(general.cache_dir, log)
        self._profiles = ProfileKeeper(
            general.cache_dir,
            general.cores,
            memory.control,
            self._compiler,
            self._scheduler,
            general.profile_seconds,
            log,
        )
        self._loader = ModelLoader(
            self._compiler,
            self._scheduler,
            self._front_end,
            memory.own_data_plane(),
            general.max_shapes,
            self._profiles,
            general.front_ends,
            options.repository.complete_configs,
            options.models.rates,
            options.models.batching,
            lease_count(len(general.cores)),
            options.models.default_max_batch_size,
            len(general.cores),
            placement.way_back_us,
        )
        self._overrides = OverrideKeeper()
        self._models = ModelControl(options.repository, self._loader, self._front_end, self._overrides)
        self._desk = RepositoryDesk(self._front_end, self._models, self._overrides, options.repository)
        self._watch = HeartbeatWatch(memory.control.heartbeats, self._scheduler.process, self._front_end.processes)
        self._statistics_log = StatisticsLog(self._front_end.counted, memory.statistics.figures)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises BindError, OSError."""
        self._loop.set_exception_handler(self._fail)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop, number)
        tasks = [self._loop.create_task(work) for work in (self._start(), self._look_after_processes())]
        for task in tasks:
            task.add_done_callback(self._is_over)
        try:
            await self._end
        finally:
            for task in tasks:
                task.cancel()
            await self._shut_down()

    async def _start(self) -> None:
        self._front_end.start()
        self._scheduler.start()
        self._workers.start()
        address = await self._front_end.listening()
        found = await self._models.start()
        self._compiler.give_way()
        metrics, http = self._front_end.metrics_address, self._front_end.http_address
        loaded, broken = self._models.loaded, self._models.broken
        target, cost_us = self._compiler.target, self._loader.request_cost_us
        print_summary(self._options, address, metrics, http, target, loaded, broken, cost_us)
        if http:
            _log.info("ready: HTTP on %s", http)
        _log.info("ready: %s", f"gRPC on {address}" if address else "no gRPC")
        poll_seconds = self._options.repository.poll_seconds if self._options.repository.mode == "poll" else 0.0
        poller = RepositoryPoller(self._models, poll_seconds, found)
        others = (self._profiles.run(), poller.run(), self._statistics_log.run())
        await asyncio.gather(self._loader.compile_shapes(), *others)

    async def _look_after_processes(self) -> None:
        while True:
            await self._watch.look()
            self._workers.follow_cores()

    def _set_log(self, settings: LogSettings) -> None:
        """A client has changed the settings of the log."""
        self._log.apply(settings)
        self._scheduler.set_log(settings)
        _log.info("log settings changed by a client: %s", settings)

    def _is_over(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._end.done():
            self._end.set_exception(error)

    def _stop(self, number: int) -> None:
        if self._end.done():
            return
        _log.info("%s: finishing what runs, refusing what comes", signal.Signals(number).name)
        self._end.set_result(None)

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of a callback: the supervisor is no longer what it should be, so the server ends."""
        error = context.get("exception") or RuntimeError(context["message"])
        if not self._end.done():
            self._end.set_exception(error)
        else:
            _log.error("%s", context["message"], exc_info=error)

    async def _shut_down(self) -> None:
        """Front end first: when its last request is answered nobody needs the others any more."""
        begin = time.monotonic()
        self._desk.stop()
        self._models.stop()
        self._loader.stop()
        self._workers.expect_exits()
        patience = self._options.general.exit_timeout_secs if self._end.exception() is None else 0.0
        if not await self._front_end.drain(patience):
            _log.warning("stopped with requests unfinished")
        self._statistics_log.write_all()
        await self._scheduler.stop(EXIT_GRACE_SECONDS)
        await self._workers.wait(EXIT_GRACE_SECONDS)
        self._overrides.close()
        self._mappings.close()
        await self._exporter.stop(EXIT_GRACE_SECONDS)
        await self._log.finish(1.0)
        _log.info("stopped after %.2f s", time.monotonic() - begin)


def serve(options: ServeOptions, log: ServerLog) -> int:
    """Run a server; return the exit status."""
    take_precedence_alone()  # requests wait for it when a process has died
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
