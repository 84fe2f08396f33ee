"""Compile jobs: `python -m gangway.compiler`, one at a time, each in a process of its own at the lowest priority."""

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gangway.artifact.format import Manifest
from gangway.artifact.reader import ArtifactError, read_manifest
from gangway.executor.process import give_way, give_way_less
from gangway.server.children import Child
from gangway.server.logs.server_log import ServerLog
from gangway.server.model_stamp import Stamp
from gangway.server.progress import ProgressDisplay

JOB_END_SECONDS = 10.0  # from the job's last word to its end
BESIDE_REQUESTS_NICE = 10  # of a job that gets no time when it gives way
PATIENCE_SECONDS = 5.0
_log = logging.getLogger(__name__)


class CompileError(Exception):
    """The model cannot be compiled; the message says why."""


class Compiler:
    """Turns ONNX files into artifacts in the cache.

    `log`: where details go, if they are wanted. `target`: what the last artifact was built for, for people.
    """

    def __init__(self, cache_dir: Path, log: ServerLog | None = None) -> None:
        self._cache_dir = cache_dir
        self._log = log
        self._job: Child | None = None
        self._turn = asyncio.Lock()
        self._gives_way = False
        self._found: dict[tuple[Path, Stamp], str] = {}  # folders of artifacts
        self.target = ""

    def give_way(self) -> None:
        """From now on there are requests: let them go before jobs, also while these only look into the cache."""
        self._gives_way = True

    async def compile(
        self,
        name: str,
        path: Path,
        dimensions: Mapping[str, int] = MappingProxyType({}),
        optional: Sequence[str] = (),
        stamp: Stamp = (),
        with_batch: bool = False,
        whole: bool = False,
    ) -> Manifest:
        """Return the manifest of the model's artifact, from the cache if it is there. Raises CompileError.

        One job at a time: further calls wait. `dimensions`: values for symbolic dimensions. `optional`: inputs
        that requests may leave out. `stamp`: of the files, if they may have been looked up. `with_batch`: a model
        whose first dimension cannot be a batch is an error, found before anything is compiled. `whole`: onnxruntime
        is to execute it.
        """
        async with self._turn:
            begin = time.monotonic()
            flags = [*["--batch"] * with_batch, *["--whole"] * whole]
            folder = None if dimensions or optional or whole else self._found.pop((path, stamp), None)
            report: dict[str, Any] = {"folder": folder, "cached": True}
            if folder is None:
                with ProgressDisplay(name) as display:
                    report = await self._job_for(path, dimensions, optional, flags, display.update)
        if "error" in report:
            raise CompileError(report["error"])
        try:
            manifest = read_manifest(Path(report["folder"]))
        except ArtifactError as error:
            raise CompileError(str(error)) from error
        self.target = manifest.target.name
        if not manifest.fallback_reason:
            found = "found in the cache" if report["cached"] else "compiled"
            _log.info("%s: %s, %.2f s", name, found, time.monotonic() - begin)
        return manifest

    async def look_up(self, files: Sequence[tuple[Path, Stamp]]) -> None:
        """Ask the cache for many models by one job, so that `compile` of those that it has needs none."""
        if len(files) < 2:
            return
        stamps = dict(files)

        def found(report: dict[str, Any]) -> None:
            if "found" in report:
                path = Path(report["found"])
                self._found[path, stamps[path]] = report["folder"]

        async with self._turn:
            await self._run(["--look-up", *map(str, stamps)], found)

    @property
    def busy(self) -> bool:
        """Whether a job runs."""
        return self._job is not None and self._job.returncode is None

    def stop(self) -> None:
        """Kill the job that runs, if any."""
        if self._job is not None and self._job.returncode is None:
            self._job.kill()

    async def _job_for(
        self,
        path: Path,
        dimensions: Mapping[str, int],
        optional: Sequence[str],
        flags: Sequence[str],
        progress: Callable[[str, int, int], None],
    ) -> dict[str, Any]:
        """Run one job; return its last report, which has "folder" or "error"."""
        arguments = [str(path), *(f"--dimension={name}={size}" for name, size in dimensions.items())]
        arguments += [*(f"--optional={name}" for name in optional), *flags]
        last: dict[str, Any] = {}

        def take(report: dict[str, Any]) -> None:
            if "phase" in report:
                progress(report["phase"], report["done"], report["total"])
            else:
                last.update(report)

        job = await self._run(arguments, take)
        return last or {"error": f"the compile job {job.fate()}"}

    async def _run(self, arguments: Sequence[str], take: Callable[[dict[str, Any]], None]) -> Child:
        """Run a job to its end. Its warnings are logged, all else that it reports is taken."""
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "gangway.compiler", *arguments]
        command += ["--cache-dir", str(self._cache_dir), "--progress-fd", str(write_fd)]
        with contextlib.nullcontext() if self._log is None else self._log.details_of_child("compile job") as stderr:
            process = subprocess.Popen(
                command,
                pass_fds=(write_fd,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if stderr is None else stderr,
            )
        os.close(write_fd)
        self._job = job = Child("compile job", process, lambda _: None)
        patience = self._give_way(process.pid)
        try:
            async for report in _reports(read_fd):
                if "warning" in report:
                    _log.warning("%s", report["warning"])
                    continue
                if "phase" in report:
                    patience.cancel()  # the cache does not have it: compiling has time
                take(report)
        finally:
            patience.cancel()
        await job.wait(JOB_END_SECONDS)
        return job

    def _give_way(self, pid: int) -> asyncio.TimerHandle:
        """Let requests go before a job; cancel what is returned unless the job must not wait for ever."""
        loop = asyncio.get_running_loop()
        if not self._gives_way:
            return loop.call_later(0, lambda: None)
        give_way(pid)
        return loop.call_later(PATIENCE_SECONDS, give_way_less, pid, BESIDE_REQUESTS_NICE)


async def _reports(read_fd: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON lines of a pipe until its other end is closed; close it."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(read_fd, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        async for line in reader:
            yield json.loads(line)
    finally:
        transport.close()
