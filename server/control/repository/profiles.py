"""Profiles of loaded models: found in the cache, or made in the background while the server has nothing to do.

A measurement is right only if nothing else runs, and no request may wait for one. So it begins after the server was
idle for a while, in processes that get a core only when no other wants it. It is killed as soon as a request arrives,
and made later; the pause doubles each time.

A profile in doubt is used, and measured again while the rest of the machine is idle, too. The better one is kept.
"""

import asyncio
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gangway.artifact.format import Manifest
from gangway.artifact.profile import (
    LEAST_WHOLE,
    Profile,
    ProfileError,
    machine_id,
    note_name,
    profile_path,
    read_profile,
)
from gangway.base.host_limits import cpu_name, idle_seconds
from gangway.base.python_process import start_of
from gangway.executor.control import ControlSegment
from gangway.server.control.repository.compile_jobs import Compiler
from gangway.server.control.supervisor.job_share import WaitLog, keep_share
from gangway.server.control.supervisor.jobs import Jobs
from gangway.server.control.supervisor.log import ServerLog
from gangway.server.control.supervisor.processes import Child
from gangway.server.control.supervisor.scheduler import SchedulerControl
from gangway.server.options.server import GeneralOptions

QUIET_SECONDS = 2.0  # without a request, before a measurement begins; doubled by each one that was disturbed
LONGEST_QUIET_SECONDS = 60.0
POLL_SECONDS = 0.02
LONGEST_SECONDS = 60.0  # of one measurement: a large model's single run may take longer than planned
AGAIN_SECONDS = (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0)  # before each further measurement while in doubt
BUSY_SECONDS = 60.0  # until the machine is looked at again, when other processes keep it busy
_log = logging.getLogger(__name__)


def pause_seconds(profile: Profile | None, measurements: int) -> float | None:
    """Return how long a model waits for its next measurement, None if there is none while this server runs.

    `measurements`: how many this server has made of it. Each server makes one of what is missing or in doubt at once.
    """
    if profile is not None and not profile.doubtful:
        return None
    return (0.0, *AGAIN_SECONDS, None)[min(measurements, len(AGAIN_SECONDS) + 1)]


def is_quiet(before: Sequence[float] | None, now: Sequence[float] | None, seconds: float) -> bool:
    """Return whether no core worked for more than a fifth of so many seconds, by `idle_seconds`; True if unknown."""
    if before is None or now is None:
        return True
    return min(end - begin for begin, end in zip(before, now, strict=True)) >= LEAST_WHOLE * seconds


@dataclass
class _Pending:
    """A model to be measured, at `due_s` of the loop's clock or later, and how often it has been so far.

    `name`: of the model that is loaded; that of the manifest is whose bytes were compiled first. `title`: what the log
    calls it, with sizes.
    """

    name: str
    title: str
    manifest: Manifest
    due_s: float
    measurements: int = 0


@dataclass(eq=False)
class BackgroundProfiler:
    """Has loaded models measured on the server's cores."""

    options: GeneralOptions
    control: ControlSegment
    compiler: Compiler
    scheduler: SchedulerControl
    log: ServerLog
    jobs: Jobs
    tell: Callable[[int, float], None] = field(default=lambda *_: None, init=False)  # a model's number and `compute_us`
    _wanted: dict[int, _Pending] = field(default_factory=dict, init=False)  # by model number, in order of their loading
    _doubts: dict[Path, float] = field(default_factory=dict, init=False)  # shares of profiles, as the log has said them
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def add(self, model_id: int, name: str, manifest: Manifest, title: str = "") -> None:
        """A model has been loaded: use its profile, or make one later. `title`: for the log, if not the name."""
        loaded = _Pending(name, title or name, manifest, asyncio.get_running_loop().time())
        profile = self._use(model_id, loaded)
        if self.options.profile_seconds and pause_seconds(profile, 0) is not None:
            self._wanted[model_id] = loaded
            self._news.set()

    def compute_us(self, manifest: Manifest) -> float | None:
        """Return how long a model's row computes alone on all cores by its profile; None if it has none."""
        try:
            return _alone_us(read_profile(self._path(manifest)))
        except ProfileError:
            return None

    def remove(self, model_id: int) -> None:
        """A model has been unloaded."""
        self._wanted.pop(model_id, None)

    async def run(self) -> None:
        """Make what is missing or in doubt, until cancelled."""
        loop = asyncio.get_running_loop()
        quiet_seconds = QUIET_SECONDS
        while True:
            self._news.clear()
            model_id, wanted = min(self._wanted.items(), key=lambda item: item[1].due_s, default=(0, None))
            if wanted is None or wanted.due_s > loop.time():
                quiet_seconds = QUIET_SECONDS
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(wanted.due_s if wanted else None):
                        await self._news.wait()
            elif not await self._measure(model_id, wanted, quiet_seconds):
                quiet_seconds = min(2 * quiet_seconds, LONGEST_QUIET_SECONDS)

    async def _measure(self, model_id: int, wanted: _Pending, quiet_seconds: float) -> bool:
        """Measure a model once the server is idle, or put that off; return False if a request disturbed it."""
        loop = asyncio.get_running_loop()
        others_idle = await self._wait_until_quiet(quiet_seconds)
        if wanted.measurements and not others_idle:
            wanted.due_s = loop.time() + BUSY_SECONDS
            return True
        if self._wanted.get(model_id) is not wanted:
            return True  # it has been unloaded meanwhile
        failure = await self._run_once(wanted)
        if failure is None:
            return False
        if self._wanted.get(model_id) is not wanted:
            return True
        if failure:
            _log.warning("%s: its layers cannot be measured now, which is tried again later: %s", wanted.title, failure)
        else:
            _log.info("%s: its layers have been measured, the scheduler uses the profile from now on", wanted.title)
        wanted.measurements += 1
        profile = self._use(model_id, wanted)
        if profile is not None:
            self.tell(model_id, _alone_us(profile))
        pause = pause_seconds(profile, wanted.measurements)
        if pause is None:
            del self._wanted[model_id]
        else:
            wanted.due_s = loop.time() + pause
        return True

    async def _run_once(self, wanted: _Pending) -> str | None:
        """Run a measurement to its end; return what went wrong, "" if nothing, None if a request disturbed it."""
        try:
            child = self._start(wanted.manifest)
        except OSError as error:
            return str(error)
        job = self.jobs.begin("profile", wanted.title)
        waits = WaitLog(f"measuring {wanted.title}")
        share = asyncio.get_running_loop().create_task(keep_share(waits, child.pid, len(self.options.cores)))
        try:
            disturbed = await self._watch(child)
        finally:
            share.cancel()
            self.jobs.end(job)
            if child.returncode is None:
                child.kill()
        if disturbed:
            return None
        return f"the measurement {child.exit_text()}" if child.returncode else ""

    def _use(self, model_id: int, loaded: _Pending) -> Profile | None:
        """Have a model's profile used if there is one; return it. One in doubt is better than none."""
        path = self._path(loaded.manifest)
        profile = _kept(loaded.title, path)
        if profile is None:
            return None
        self.scheduler.use_profile(model_id, path)
        if loaded.name != profile.model_name:
            with suppress(OSError):  # a cache that is full, or cannot be written to
                note_name(path, loaded.name)
        if profile.doubtful and self._doubts.get(path) != profile.cores_whole:
            self._doubts[path] = profile.cores_whole
            _log.warning(
                "%s: cores slowed each other down while it was measured (%.0f %% of the speed of one alone): a busy"
                " machine or hyper-threads. Batches may be split less. It is measured again when the machine is"
                " quieter.",
                loaded.title,
                100 * profile.cores_whole,
            )
        return profile

    def _path(self, manifest: Manifest) -> Path:
        machine = machine_id(cpu_name(), len(self.options.cores), manifest.target.name)
        return profile_path(self.options.cache_dir, manifest.key, machine)

    def _start(self, manifest: Manifest) -> Child:
        arguments = {
            "cache-dir": self.options.cache_dir,
            "key": manifest.key,
            "cores": ",".join(map(str, self.options.cores)),
            "seconds": self.options.profile_seconds,
            "parent": os.getpid(),
        }
        start = start_of("gangway.measure.profiler", [f"--{name}={value}" for name, value in arguments.items()])
        with self.log.details_of_child("measurement") as output:
            process = subprocess.Popen(
                start.command, env=start.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        return Child("measurement", process, lambda _: None)

    async def _wait_until_quiet(self, seconds: float) -> bool:
        """Return when the server has been idle for so long; say whether the rest of the machine was so, too."""
        loop = asyncio.get_running_loop()
        seen, since, idle = self._activity(), loop.time(), idle_seconds(self.options.cores)
        while (passed := loop.time() - since) < seconds:
            await asyncio.sleep(POLL_SECONDS)
            if self._activity() != seen or self.compiler.busy:
                seen, since, idle = self._activity(), loop.time(), idle_seconds(self.options.cores)
        return is_quiet(idle, idle_seconds(self.options.cores), passed)

    async def _watch(self, child: Child) -> bool:
        """Return when the measurement has ended, killed if it must not go on; say whether it was disturbed."""
        loop = asyncio.get_running_loop()
        seen, end = self._activity(), loop.time() + LONGEST_SECONDS
        while child.returncode is None:
            disturbed = self._activity() != seen or self.compiler.busy
            if disturbed or loop.time() > end:
                child.kill()
                await child.wait(1.0)
                return disturbed
            await asyncio.sleep(POLL_SECONDS)
        return False

    def _activity(self) -> tuple[int, bool]:
        """Return what changes when a request arrives."""
        statuses = [self.control.status(index) for index in range(len(self.options.cores))]
        return sum(status.runs for status in statuses), any(status.busy for status in statuses)


def _alone_us(profile: Profile) -> float:
    return profile.isolated_us[-1][0]


def _kept(title: str, path: Path) -> Profile | None:
    """Return the profile if there is one of the present format; one of an older format is made again."""
    if not path.is_file():
        return None
    try:
        return read_profile(path)
    except ProfileError as error:
        _log.info("%s: its profile cannot be used, so its layers are measured again: %s", title, error)
        return None
