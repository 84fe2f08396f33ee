"""The scheduler process as the supervisor sees it: started, replaced when it dies, and told everything again."""

import asyncio
import logging
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gangway.executor.peer import peer_sockets
from gangway.scheduler import messages as slow
from gangway.scheduler.policies.per_node import Nodes
from gangway.scheduler.process import SchedulerPlan, start_scheduler
from gangway.server.control.supervisor.log import ServerLog
from gangway.server.control.supervisor.processes import MAX_UNSENT, AsyncPeer, Child, SupervisedProcess, pin
from gangway.server.control.supervisor.shared_memory import SLOTS, Placement, SharedMemory
from gangway.server.errors import ModelLoadError
from gangway.server.messages import LogSettings

_log = logging.getLogger(__name__)


class SchedulerControl:
    """What has been asked of the scheduler is kept until it is answered, and said again to a successor.

    `nodes`: the workers of each NUMA node. `on_worker_stuck` gets a worker's index and process id, `on_model_unloaded`
    a model's number. `on_model_failed` gets a model's number, the reason, and whether its requests were at fault;
    `on_artifact_missing` gets a LoadModel and a reason.
    """

    def __init__(
        self,
        memory: SharedMemory,
        policy: str,
        placement: Placement,
        log: ServerLog,
        trace: Path | None,
        timeline: Path | None,
        nodes: Nodes,
        on_worker_stuck: Callable[[int, int], None],
        on_model_unloaded: Callable[[int], None],
        on_model_failed: Callable[[int, str, bool], None],
        on_artifact_missing: Callable[[slow.LoadModel, str], None],
    ) -> None:
        self._memory = memory
        self._log = log
        self._plan = SchedulerPlan(
            memory.control.segment.fd,
            memory.arenas.fd,
            memory.io_fds,
            -1,
            SLOTS,
            policy,
            way_back_us=placement.way_back_us,
            dispatch_us=placement.dispatch_us,
            trace=str(trace or ""),
            timeline=str(timeline or ""),
            nodes=nodes,
            bell_fds=memory.bell_fds,
        )
        self._core = placement.scheduler
        self.process = SupervisedProcess("scheduler", self._launch, self._ended, begun=self._begun, needed=True)
        self._our_end: socket.socket | None = None
        self._specs: dict[int, slow.LoadModel] = {}
        self._profiles: dict[int, slow.SetProfile] = {}
        self._measured: dict[int, slow.UseProfile] = {}
        self._schedules: dict[int, slow.UseSchedule] = {}  # by their numbers
        self._loading: dict[int, asyncio.Future[None]] = {}
        self._unloading: set[int] = set()
        self._unloads: dict[int, asyncio.Future[None]] = {}  # those that are waited for
        self._quieting: dict[int, asyncio.Future[None]] = {}  # by front end
        self._missing: set[int] = set()  # workers that have no successor yet
        self._peer: AsyncPeer[slow.ControlMessage] | None = None
        self._on_worker_stuck = on_worker_stuck
        self._on_model_unloaded = on_model_unloaded
        self._on_model_lost = on_model_failed
        self._on_artifact_lost = on_artifact_missing

    def start(self) -> None:
        """Start a scheduler and tell it all there is to know. Raises OSError."""
        self.process.start()

    def _launch(self) -> "subprocess.Popen[bytes]":
        self._our_end, theirs = peer_sockets()
        levels = self._log.settings.levels.to_number()
        with theirs, self._log.of_child("scheduler") as stderr:
            plan = replace(self._plan, supervisor_fd=theirs.fileno(), log_levels=levels)
            process = start_scheduler(plan, stderr)
        pin(process.pid, self._core)
        return process

    def _begun(self) -> None:
        assert self._our_end is not None, "it has been launched"
        bell = self._memory.control.scheduler_bell
        self._peer = AsyncPeer(slow.control_peer(self._our_end), self._heard, bell.ring_for_control, self._overflows)
        for spec in self._specs.values():
            self._send(spec)
        self._send(slow.Begin())
        for profile in self._profiles.values():
            self._send(profile)
        for measured in self._measured.values():
            self._send(measured)
        for schedule in self._schedules.values():
            self._send(schedule)
        for front_end in self._quieting:
            self._send(slow.FrontEndDied(front_end))
        for model_id in self._unloading:
            self._send(slow.UnloadModel(model_id))
        for core in self._missing:
            self._send(slow.WorkerMissing(core))
        self._our_end = None

    @property
    def pid(self) -> int:
        """The running scheduler's process id."""
        return self.process.pid

    async def load(self, spec: slow.LoadModel) -> None:
        """Return when every worker has the model. Raises ModelLoadError."""
        self._specs[spec.model_id] = spec
        done = self._loading[spec.model_id] = asyncio.get_running_loop().create_future()
        self._send(spec)
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
        self._send(slow.UnloadModel(model_id))

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

    def set_profile(self, profile: slow.SetProfile) -> None:
        """Tell the measured latency of a model, and its target, if it is still there."""
        if profile.model_id not in self._specs:
            return
        self._profiles[profile.model_id] = profile
        self._send(profile)

    def use_profile(self, model_id: int, path: Path) -> None:
        """Tell where a model's profile is, if the model is still there."""
        if model_id not in self._specs:
            return
        self._measured[model_id] = slow.UseProfile(model_id, str(path))
        self._send(self._measured[model_id])

    @property
    def node_count(self) -> int:
        """How many NUMA nodes there are that gangs keep to."""
        return max(1, len(self._plan.nodes))

    def spec_of(self, model_id: int) -> slow.LoadModel | None:
        """Return what the scheduler was told of a model that is there."""
        return self._specs.get(model_id)

    def use_schedule(self, schedule: slow.UseSchedule) -> None:
        """Tell by what schedule compound tasks of some models run."""
        self._schedules[schedule.number] = schedule
        self._send(schedule)

    def drop_schedule(self, number: int) -> None:
        """Tell that no compound task runs by this schedule any more."""
        if self._schedules.pop(number, None) is not None:
            self._send(slow.UseSchedule(number))

    def set_log(self, settings: LogSettings) -> None:
        """Tell which lines are wanted in the log."""
        self._send(slow.SetLog(settings.levels.to_number()))

    def worker_died(self, core: int, pid: int, crashed: bool, lease: int | None) -> None:
        """Tell that a worker is dead and reaped. `crashed`: by what it did, as `slow.WorkerDied` says."""
        self._send(slow.WorkerDied(core, pid, crashed, -1 if lease is None else lease))

    def worker_missing(self, core: int) -> None:
        """Tell that a worker that died has no successor for now."""
        if core not in self._missing:
            self._missing.add(core)
            self._send(slow.WorkerMissing(core))

    def worker_started(self, core: int) -> None:
        """Note that there is a worker, which reports to the scheduler by itself."""
        self._missing.discard(core)

    async def front_end_quiet(self, front_end: int) -> None:
        """Tell that a front end is dead; return when nothing touches its io segment any more."""
        done = self._quieting[front_end] = asyncio.get_running_loop().create_future()
        self._send(slow.FrontEndDied(front_end))
        await done

    async def stop(self, timeout_seconds: float) -> None:
        """End scheduler and workers (they get Exit from it); kill the scheduler when that takes too long."""
        self.process.stop_restarting()
        self._send(slow.Stop())
        if self.process.child is not None:
            await self.process.child.wait(timeout_seconds)

    def _send(self, message: slow.ControlMessage) -> None:
        if self._peer is not None:
            self._peer.send(message)

    def _heard(self, message: slow.ControlMessage, descriptor: int) -> None:
        match message:
            case slow.ModelLoaded(model_id):
                self._settle(model_id, None)
            case slow.ModelFailed(model_id, reason, at_fault):
                self._forget(model_id)
                self._settle(model_id, ModelLoadError(reason), at_fault)
            case slow.ArtifactLost(model_id, reason):
                if model_id in self._specs:
                    self._on_artifact_lost(self._specs[model_id], reason)
            case slow.FrontEndQuiet(front_end):
                if not (quiet := self._quieting.pop(front_end)).done():
                    quiet.set_result(None)
            case slow.WorkerStuck(core, pid):
                self._on_worker_stuck(core, pid)
            case slow.Recovered(requests):
                self.process.has_become_ready()
                _log.info(
                    "the scheduler (process %d) is ready, with %d requests of its predecessor", self.pid, requests
                )
            case slow.ModelUnloaded(model_id) if model_id in self._unloading:
                _log.debug("model %d is unloaded", model_id)
                self._unloading.remove(model_id)
                if (done := self._unloads.get(model_id)) is not None and not done.done():
                    done.set_result(None)
                self._on_model_unloaded(model_id)
            case slow.ModelUnloaded():
                pass  # said by a scheduler and by its successor
            case _:
                raise ValueError(f"unexpected {message}")

    def _overflows(self) -> None:
        _log.error(
            "the scheduler (process %d) has not read its last %d control messages; it is killed and replaced",
            self.pid,
            MAX_UNSENT,
        )
        self.process.kill()

    def _forget(self, model_id: int) -> None:
        """Its number is free again when ModelUnloaded has come."""
        self._specs.pop(model_id, None)
        self._profiles.pop(model_id, None)
        self._measured.pop(model_id, None)
        self._unloading.add(model_id)

    def _settle(self, model_id: int, error: ModelLoadError | None, at_fault: bool = False) -> None:
        done = self._loading.get(model_id)
        if done is None or done.done():
            if error is not None:  # no worker has it any more, or it ends workers
                self._on_model_lost(model_id, str(error), at_fault)
        elif error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def _ended(self, child: Child) -> None:
        if self._peer is not None:
            self._peer.finish()
            self._peer = None
        self._memory.control.server_block.scheduler_restarted()
