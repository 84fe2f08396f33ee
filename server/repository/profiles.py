"""Profiles of loaded models: found in the cache, or made in the background while the server has nothing to do.

A measurement is right only if nothing else runs, and no request may wait for one. So it begins after the server was
idle for a while, in processes that get a core only when no other wants it. It is killed as soon as a request arrives,
and made later; the pause doubles each time.
"""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

from gangway.artifact.format import Engine, Manifest
from gangway.artifact.profile import Profile, ProfileError, cpu_name, machine_id, profile_path, read_profile
from gangway.executor.control import ControlSegment
from gangway.server.repository.compile_jobs import Compiler
from gangway.server.supervisor.log import ServerLog
from gangway.server.supervisor.processes import Child
from gangway.server.supervisor.scheduler import SchedulerControl

QUIET_SECONDS = 2.0  # without a request, before a measurement begins; doubled by each one that was disturbed
LONGEST_QUIET_SECONDS = 60.0
LOOK_SECONDS = 0.02
LONGEST_SECONDS = 60.0  # of one measurement: a large model's single run may take longer than planned
_log = logging.getLogger(__name__)


class BackgroundProfiler:
    """Everything is called in the supervisor's event loop."""

    def __init__(
        self,
        cache_dir: Path,
        cores: tuple[int, ...],
        control: ControlSegment,
        compiler: Compiler,
        scheduler: SchedulerControl,
        seconds: float,
        log: ServerLog,
    ) -> None:
        self._log = log
        self._cache_dir = cache_dir
        self._cores = cores
        self._control = control
        self._compiler = compiler
        self._scheduler = scheduler
        self._seconds = seconds
        self._wanted: dict[int, Manifest] = {}  # by model number, in the order of their loading
        self._news = asyncio.Event()

    def add(self, model_id: int, manifest: Manifest) -> None:
        """A model has been loaded: use its profile, or make one later. Those for onnxruntime have no layers."""
        if manifest.engine is not Engine.NATIVE:
            return
        believed = self._use(model_id, manifest)
        if self._seconds and not believed:
            self._wanted[model_id] = manifest
            self._news.set()

    def remove(self, model_id: int) -> None:
        """A model has been unloaded."""
        self._wanted.pop(model_id, None)

    async def run(self) -> None:
        """Make what is missing, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self._make_wanted()

    async def _make_wanted(self) -> None:
        quiet_seconds = QUIET_SECONDS
        while self._wanted:
            await self._wait_until_quiet(quiet_seconds)
            if not self._wanted:
                return
            model_id, manifest = next(iter(self._wanted.items()))
            try:
                child = self._start(manifest)
            except OSError as error:
                _log.warning(
                    "%s: its layers cannot be measured now, which is tried again later: %s", manifest.model_name, error
                )
                quiet_seconds = LONGEST_QUIET_SECONDS
                continue
            try:
                disturbed = await self._watch(child)
            finally:
                if child.returncode is None:
                    child.kill()
            if disturbed:
                quiet_seconds = min(2 * quiet_seconds, LONGEST_QUIET_SECONDS)
                continue
            if self._wanted.get(model_id) is not manifest:
                continue  # it has been unloaded meanwhile
            del self._wanted[model_id]
            if child.returncode == 0:
                _log.info(
                    "%s: its layers have been measured, the scheduler uses the profile from now on", manifest.model_name
                )
                self._use(model_id, manifest)
            else:
                _log.warning(
                    "%s: its layers are not measured, so the scheduler uses estimates: the measurement %s",
                    manifest.model_name,
                    child.exit_text(),
                )

    def _use(self, model_id: int, manifest: Manifest) -> bool:
        """Have a model's profile used if there is one; return whether it is there and to be believed."""
        path = self._path(manifest)
        profile = _kept(manifest.model_name, path)
        if profile is not None:
            self._scheduler.use_profile(model_id, path)
        return profile is not None and profile.whole

    def _path(self, manifest: Manifest) -> Path:
        machine = machine_id(cpu_name(), len(self._cores), manifest.target.name)
        return profile_path(self._cache_dir, manifest.key, machine)

    def _start(self, manifest: Manifest) -> Child:
        arguments = {
            "cache-dir": self._cache_dir,
            "key": manifest.key,
            "cores": ",".join(map(str, self._cores)),
            "seconds": self._seconds,
            "parent": os.getpid(),
        }
        command = [sys.executable, "-m", "gangway.measure.profiler"]
        command += [f"--{name}={value}" for name, value in arguments.items()]
        with self._log.details_of_child("measurement") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        return Child("measurement", process, lambda _: None)

    async def _wait_until_quiet(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        seen, since = self._activity(), loop.time()
        while loop.time() - since < seconds:
            await asyncio.sleep(LOOK_SECONDS)
            if self._activity() != seen or self._compiler.busy:
                seen, since = self._activity(), loop.time()

    async def _watch(self, child: Child) -> bool:
        """Return when the measurement has ended, killed if it must not go on; say whether it was disturbed."""
        loop = asyncio.get_running_loop()
        seen, end = self._activity(), loop.time() + LONGEST_SECONDS
        while child.returncode is None:
            disturbed = self._activity() != seen or self._compiler.busy
            if disturbed or loop.time() > end:
                child.kill()
                await child.wait(1.0)
                return disturbed
            await asyncio.sleep(LOOK_SECONDS)
        return False

    def _activity(self) -> tuple[int, bool]:
        """Return what changes when a request arrives."""
        statuses = [self._control.status(index) for index in range(len(self._cores))]
        return sum(status.runs for status in statuses), any(status.busy for status in statuses)


def _kept(name: str, path: Path) -> Profile | None:
    """Return the profile if there is one of the present format; one of an older format is made again.

    One that was measured while cores slowed each other down is used, too: it is better than none.
    """
    if not path.is_file():
        return None
    try:
        profile = read_profile(path)
    except ProfileError as error:
        _log.info("%s: its profile cannot be used, so its layers are measured again: %s", name, error)
        return None
    if not profile.whole:
        _log.warning(
            "%s: cores slowed each other down while it was measured (%.0f %% of the speed of one alone): a busy host or"
            " hyper-threads. Batches may be split less. Nothing to do; `gangway profile` measures again.",
            name,
            100 * profile.cores_whole,
        )
    return profile
