"""The scheduler process as the supervisor sees it: started, replaced when it dies, and told everything again."""

import asyncio
import logging
import subprocess
from dataclasses import replace
from pathlib import Path

from gangway.scheduler import messages
from gangway.server.control.supervisor.events import EventQueue
from gangway.server.control.supervisor.log import ServerLog
from gangway.server.control.supervisor.processes import Child, PeerProcess, pin
from gangway.server.control.supervisor.shared_memory import SLOTS, CorePlacement, SharedMemory
from gangway.server.errors import ModelLoadError
from gangway.server.options.server import GeneralOptions

_log = logging.getLogger(__name__)


class SchedulerControl(PeerProcess[messages.ControlMessage]):
    """What has been asked of the scheduler is kept until it is answered, and said again to a successor.

    `events` get what concerns other parts of the supervisor; ModelFailed is of a model that workers had.
    `models_bytes`: as in `SchedulerOptions`.
    """

    def __init__(
        self,
        memory: SharedMemory,
        options: GeneralOptions,
        placement: CorePlacement,
        log: ServerLog,
        events: EventQueue,
        models_bytes: int,
    ) -> None:
        super().__init__("scheduler", messages.control_peer)
        self._memory = memory
        self._log = log
        self._plan = messages.SchedulerPlan(
            memory.control.segment.fd,
            memory.arenas.fd,
            memory.io_fds,
            -1,
            SLOTS,
            options.scheduler,
            way_back_us=placement.way_back_us,
            dispatch_us=placement.dispatch_us,
            trace=str(options.trace_decisions or ""),
            timeline=str(options.timeline or ""),
            nodes=_worker_nodes(options),
            models_bytes=models_bytes,
            bell_fds=memory.bell_fds,
        )
        self._core = placement.scheduler
        self._events = events
        self._specs: dict[int, messages.LoadModel] = {}
        self._profiles: dict[int, messages.SetProfile] = {}
        self._measured: dict[int, messages.UseProfile] = {}
        self._schedules: dict[int, messages.UseSchedule] = {}  # by their numbers
        self._loading: dict[int, asyncio.Future[None]] = {}
        self._unloading: set[int] = set()
        self._unloads: dict[int, asyncio.Future[None]] = {}  # those that are waited for
        self._quieting: dict[int, asyncio.Future[None]] = {}  # by front end
        self._missing: set[int] = set()  # workers that have no successor yet

    def launch(self) -> "subprocess.Popen[bytes]":
        """Start a process. Raises OSError."""
        levels = self._log.settings.levels.to_number()
        with self.inherited_end() as theirs, self._log.of_child("scheduler") as stderr:
            plan = replace(self._plan, supervisor_fd=theirs.fileno(), log_levels=levels)
            process = messages.start_scheduler(plan, stderr)
        pin(process.pid, self._core)
        return process

    def begun(self) -> None:
        """Tell a process all there is to know."""
        super().begun()
        known: list[messages.ControlMessage] = [*self._specs.values(), messages.BeginServing()]
        known += [*self._profiles.values(), *self._measured.values(), *self._schedules.values()]
        known += [messages.FrontEndDied(front_end) for front_end in self._quieting]
        known += [messages.UnloadModel(model_id) for model_id in self._unloading]
        known += [messages.WorkerMissing(core) for core in self._missing]
        for message in known:
            self.send(message)

    def after_send(self) -> None:
        """Have the scheduler look."""
        self._memory.control.scheduler_bell.ring_for_control()

    async def load(self, spec: messages.LoadModel) -> None:
        """Return when every worker has the model. Raises ModelLoadError."""
        self._specs[spec.model_id] = spec
        done = self._loading[spec.model_id] = asyncio.get_running_loop().create_future()
        self.send(spec)
        try:
            await done
        finally:
            del self._loading[spec.model_id]

    def loaded_keys(self) -> set[str]:
        """Return the keys of the artifacts that workers have, or are about to load."""
        return {spec.key for spec in self._specs.values()}

    def unload(self, model_id: int) -> None:
        """Forget a model, if it is there; queries that wait for it are answered UNAVAILABLE."""
        if model_id not in self._specs:
            return
        self._forget(model_id)
        self.send(messages.UnloadModel(model_id))

    async def unloaded(self, model_id: int, timeout_seconds: float) -> bool:
        """Return when all memory of a model is given back that was told to unload; False if that takes too long."""
        if model_id not in self._unloading:
            return True
        done = self._unloads[model_id] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(done, timeout_seconds)
        except TimeoutError:
            return False
        finally:
            self._unloads.pop(model_id, None)
        return True

    def set_profile(self, profile: messages.SetProfile) -> None:
        """Tell the measured latency of a model, and its target, if it is still there."""
        if profile.model_id not in self._specs:
            return
        self._profiles[profile.model_id] = profile
        self.send(profile)

    def use_profile(self, model_id: int, path: Path) -> None:
        """Tell where a model's profile is, if the model is still there."""
        if model_id not in self._specs:
            return
        self._measured[model_id] = messages.UseProfile(model_id, str(path))
        self.send(self._measured[model_id])

    @property
    def node_count(self) -> int:
        """How many NUMA nodes there are that gangs keep to."""
        return max(1, len(self._plan.nodes))

    def spec_of(self, model_id: int) -> messages.LoadModel | None:
        """Return what the scheduler was told of a model that is there."""
        return self._specs.get(model_id)

    def use_schedule(self, schedule: messages.UseSchedule) -> None:
        """Tell by what schedule compound tasks of some models run."""
        self._schedules[schedule.number] = schedule
        self.send(schedule)

    def drop_schedule(self, number: int) -> None:
        """Tell that no compound task runs by this schedule any more."""
        if self._schedules.pop(number, None) is not None:
            self.send(messages.UseSchedule(number))

    def worker_missing(self, core: int) -> None:
        """Tell that a worker that died has no successor for now."""
        if core not in self._missing:
            self._missing.add(core)
            self.send(messages.WorkerMissing(core))

    def worker_started(self, core: int) -> None:
        """Note that there is a worker, which reports to the scheduler by itself."""
        self._missing.discard(core)

    async def front_end_quiet(self, front_end: int) -> None:
        """Tell that a front end is dead; return when nothing touches its io segment any more."""
        done = self._quieting[front_end] = asyncio.get_running_loop().create_future()
        self.send(messages.FrontEndDied(front_end))
        await done

    async def stop(self, timeout_seconds: float) -> None:
        """End scheduler and workers (they get Exit from it); kill the scheduler when that takes too long."""
        self.stop_restarting()
        self.send(messages.StopScheduler())
        await self.wait(timeout_seconds)

    def heard(self, message: messages.ControlMessage) -> None:
        """The scheduler has said something."""
        match message:
            case messages.ModelLoaded(model_id):
                if not self._settle(model_id, None):  # it was idle, or the scheduler is another one
                    self._events.put(message)
            case messages.ModelIdle():
                self._events.put(message)
            case messages.ModelFailed(model_id, reason):
                self._forget(model_id)
                if not self._settle(model_id, ModelLoadError(reason)):  # no worker has it any more, or it ends workers
                    self._events.put(message)
            case messages.ArtifactLost(model_id):
                if model_id in self._specs:
                    self._events.put(message)
            case messages.FrontEndQuiet(front_end):
                if not (quiet := self._quieting.pop(front_end)).done():
                    quiet.set_result(None)
            case messages.WorkerStuck():
                self._events.put(message)
            case messages.Recovered(requests):
                self.has_become_ready()
                _log.info(
                    "the scheduler (process %d) is ready, with %d requests of its predecessor", self.pid, requests
                )
            case messages.ModelUnloaded(model_id) if model_id in self._unloading:
                _log.debug("model %d is unloaded", model_id)
                self._unloading.remove(model_id)
                if (done := self._unloads.get(model_id)) is not None and not done.done():
                    done.set_result(None)
                self._events.put(message)
            case messages.ModelUnloaded():
                pass  # said by a scheduler and by its successor
            case _:
                raise ValueError(f"unexpected {message}")

    def _forget(self, model_id: int) -> None:
        """Its number is free again when ModelUnloaded has come."""
        self._specs.pop(model_id, None)
        self._profiles.pop(model_id, None)
        self._measured.pop(model_id, None)
        self._unloading.add(model_id)

    def _settle(self, model_id: int, error: ModelLoadError | None) -> bool:
        """End the wait for a load; return whether somebody has waited."""
        done = self._loading.get(model_id)
        if done is None or done.done():
            return False
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
        return True

    def ended(self, child: Child) -> None:
        """Count it."""
        super().ended(child)
        self._memory.control.server_block.scheduler_restarted()


def _worker_nodes(options: GeneralOptions) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the workers of each NUMA node, which are the places of its cores in all cores."""
    return tuple(
        tuple(number for number, core in enumerate(options.cores) if core in node) for node in options.numa_nodes
    )
