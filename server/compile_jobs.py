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
    ) -> Manifest:
        """Return the manifest of the model's artifact, from the cache if it is there. Raises CompileError.

        One job at a time: further calls wait. `dimensions`: values for symbolic dimensions. `optional`: inputs
        that requests may leave out.
        """
        async with self._turn:
            begin = time.monotonic()
            with ProgressDisplay(name) as display:
                report = await self._run(path, dimensions, optional, display.update)
        if "error" in report:
            raise CompileError(report["error"])
        try:
            manifest = read_manifest(Path(report["folder"]))
        except ArtifactError as error:
            raise CompileError(str(error)) from error
        self.target = manifest.target.name
        made = "left to onnxruntime" if manifest.fallback_reason else "compiled"
        found = "found in the cache" if report["cached"] else made
        _log.info("%s: %s, %.2f s", name, found, time.monotonic() - begin)
        if manifest.fallback_reason:
            _log.warning("%s: cannot be compiled, so onnxruntime serves it: %s", name, manifest.fallback_reason)
        return manifest

    @property
    def busy(self) -> bool:
        """Whether a job runs."""
        return self._job is not None and self._job.returncode is None

    def stop(self) -> None:
        """Kill the job that runs, if any."""
        if self._job is not None and self._job.returncode is None:
            self._job.kill()

    async def _run(
        self,
        path: Path,
        dimensions: Mapping[str, int],
        optional: Sequence[str],
        progress: Callable[[str, int, int], None],
    ) -> dict[str, Any]:
        """Run one job; return its last report, which has "folder" or "error"."""
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "gangway.compiler", str(path)]
        command += ["--cache-dir", str(self._cache_dir), "--progress-fd", str(write_fd)]
        command += [f"--dimension={name}={size}" for name, size in dimensions.items()]
        command += [f"--optional={name}" for name in optional]
        with contextlib.nullcontext() if self._log is None else self._log.details_of_child("compile job") as stderr:
            process = subprocess.Popen(
                command,
                pass_fds=(write_fd,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if stderr is None else stderr,
            )
        os.close(write_fd)
        self._job = Child("compile job", process, lambda _: None)
        last: dict[str, Any] = {}
        patience = self._give_way(process.pid)
        try:
            async for report in _reports(read_fd):
                if "phase" in report:
                    patience.cancel()  # the cache does not have it: compiling has time
                    progress(report["phase"], report["done"], report["total"])
                elif "warning" in report:
                    _log.warning("%s", report["warning"])
                else:
                    last = report
        finally:
            patience.cancel()
        await self._job.wait(JOB_END_SECONDS)
        return last or {"error": f"the compile job {self._job.fate()}"}

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
