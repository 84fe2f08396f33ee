"""Compile jobs: `python -m gangway.compiler --serve` does one after the other, and gives way to requests
(`supervisor/job_share.py`).

A process keeps TVM in memory for the next job, and ends after a pause. While the server starts, as many processes as
there are cores compile models beside each other; afterwards one does. Jobs for stand-ins, by which onnxruntime serves
models while they are compiled, take a second, and have a process of their own, so they wait for no compilation.

A job has as much time as its model's size deserves, not counting what it waits for a core
(`base/blame.py`): all others wait for their turn meanwhile. A model whose job does not end, or dies, is left
to onnxruntime by another job.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from gangway.artifact.format import Engine, Manifest
from gangway.artifact.instances import SizeSpan
from gangway.artifact.precision import IN_FP32, WantedPrecision
from gangway.artifact.reader import ArtifactError, read_manifest
from gangway.artifact.trim import UsedKeys, discard, trim
from gangway.base.blame import Blame
from gangway.base.console import Console, ProgressBars
from gangway.base.extras import ONNXRUNTIME, missing_packages
from gangway.base.process import use_idle_priority
from gangway.base.python_process import start_of
from gangway.server.control.repository.repository import Stamp
from gangway.server.control.supervisor.job_share import WaitLog, keep_share
from gangway.server.control.supervisor.jobs import Jobs
from gangway.server.control.supervisor.log import ServerLog
from gangway.server.control.supervisor.processes import Child
from gangway.server.errors import CompileError

_log = logging.getLogger(__name__)


class ProgressDisplay:
    """Shows the phases of one job while it is open: a bar on a terminal, otherwise one line per model.

    A model that is found in the cache shows nothing. `jobs`: who else is told.
    """

    def __init__(self, name: str, jobs: Jobs | None = None) -> None:
        self._name = name
        self._jobs = jobs
        self._job: int | None = None
        self._phase = ""
        self._bar: ProgressBars | None = None
        console = Console(stderr=True)
        if console.is_terminal:
            self._bar = ProgressBars(console)
            self._task = self._bar.add_task(name, visible=False)

    def update(self, phase: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of a phase are done."""
        if phase == "key":  # asking the cache
            return
        if self._jobs is not None:
            if self._job is None:
                self._job = self._jobs.begin("compile", self._name)
            self._jobs.advance(self._job, phase, done, total)
        if self._bar is not None:
            text = f"compiling {self._name}: {phase}"
            self._bar.update(self._task, description=text, completed=done, total=total, visible=True)
        elif not self._phase:
            _log.info("compiling %s", self._name)
        self._phase = phase

    def __enter__(self) -> "ProgressDisplay":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._jobs is not None and self._job is not None:
            self._jobs.end(self._job)


JOB_END_SECONDS = 10.0  # from the job's last word, or from SIGTERM, to its end
STOP_SECONDS = 2.0  # from SIGTERM to its end when the server stops
LEAST_TIMEOUT_SECONDS = 300.0  # for the smallest model
TIMEOUT_SECONDS_PER_MIB = 3.0
POLL_SECONDS = 0.5
IDLE_SECONDS = 60.0  # of a process that is kept for the next size
MAX_REQUESTS = 8192  # more than models and variants can be loaded
FINAL_KINDS = ("model", "unsupported", "internal")  # of errors that another attempt would have, too


def job_timeout_seconds(path: Path) -> float:
    """Return how long a job for an ONNX file may take, by the size of what lies in its folder. Raises OSError."""
    size_bytes = 0
    for file in path.parent.iterdir():
        with contextlib.suppress(FileNotFoundError):  # what lies beside a model may come and go
            size_bytes += file.stat().st_size if file.is_file() else 0
    return LEAST_TIMEOUT_SECONDS + TIMEOUT_SECONDS_PER_MIB * (size_bytes >> 20)


@dataclass(frozen=True)
class CompileRequest:
    """What is to be compiled, and how. `name`: for people. `path`: of the ONNX file.

    `dimensions`: values for symbolic dimensions. `optional`: inputs that requests may leave out. `stamp`: of the files,
    if they may have been looked up. `with_batch`: a model whose first dimension cannot be a batch is an error, found
    before anything is compiled. `whole`: onnxruntime is to execute it. `precision`: what is asked for; the manifest's
    note says what came of it. `span`: one artifact for several sizes of a symbol, of which `dimensions` has any.
    `stand_in`: unless the cache has the model, return at once what onnxruntime executes until it is compiled.
    """

    name: str
    path: Path
    dimensions: Mapping[str, int] = field(default_factory=dict)
    optional: Sequence[str] = ()
    stamp: Stamp = ()
    with_batch: bool = False
    whole: bool = False
    precision: WantedPrecision = IN_FP32
    span: SizeSpan | None = None
    stand_in: bool = False

    @property
    def is_looked_up(self) -> bool:
        """Whether `Compiler.look_up` may have found it."""
        return not (self.dimensions or self.optional or self.whole or self.precision != IN_FP32)

    def job(self, uncompiled: str = "") -> dict[str, Any]:
        """Return what a process is asked (`compiler/__main__.py`). `uncompiled`: why it is left to onnxruntime."""
        job: dict[str, Any] = {"path": str(self.path), "dimensions": dict(self.dimensions)}
        job |= {"precision": asdict(self.precision), "optional": list(self.optional), "uncompiled": uncompiled}
        job |= {"batch": self.with_batch, "whole": self.whole}
        return job if self.span is None else job | {"span": asdict(self.span)}


class _Lane:
    """Jobs of a kind, `at_once` beside each other. `kept`: the processes that wait for the next ones."""

    def __init__(self, kind: Literal["compile", "stand-ins"], at_once: int = 1) -> None:
        self.kind = kind
        self.turn = asyncio.Semaphore(at_once)
        self.kept: list[CompilerProcess] = []


MOST_AT_ONCE = 4
BYTES_AT_ONCE = 4 << 30  # of the machine's memory for each job


def jobs_at_once(cores: int, memory_bytes: int) -> int:
    """Return how many models are compiled beside each other while a server starts."""
    return max(1, min(cores, MOST_AT_ONCE, memory_bytes // BYTES_AT_ONCE))


class Compiler:
    """Turns ONNX files into artifacts in the cache.

    `log`: where details go, if they are wanted. `target`: what the last artifact was built for, for people.
    `timeout_seconds`: of the job for a file. `limit_bytes`: of the cache, 0: none; the artifacts whose keys `in_use`
    returns are never removed. `idle_seconds`: how long a process waits for the next job, 0: not at all.
    `jobs`: where jobs are told. `at_once`: how many run beside each other until `give_way`.
    """

    def __init__(
        self,
        cache_dir: Path,
        log: ServerLog | None = None,
        timeout_seconds: Callable[[Path], float] = job_timeout_seconds,
        limit_bytes: int = 0,
        in_use: Callable[[], Collection[str]] = tuple,
        idle_seconds: float = 0.0,
        jobs: Jobs | None = None,
        at_once: int = 1,
    ) -> None:
        self._cache_dir = cache_dir
        self._log = log
        self._timeout_seconds = timeout_seconds
        self._limit_bytes = limit_bytes
        self._in_use = in_use
        self._idle_seconds = idle_seconds
        self._jobs = jobs
        self._used_keys: UsedKeys | None = None
        self._stopping = False
        self._jobs_running: set[Child] = set()
        self._compilations, self._stand_ins = _Lane("compile", at_once), _Lane("stand-ins")
        self._at_once = at_once
        self._ends: set[asyncio.Task[None]] = set()  # of jobs that were given up
        self._narrowing: set[asyncio.Task[Literal[True]]] = set()  # what takes turns away from jobs
        self._gives_way = False
        self._found: dict[tuple[Path, Stamp], str] = {}  # folders of artifacts
        self._requests: dict[str, CompileRequest] = {}  # by key of what was made of them, the latest last
        self.target = ""

    def give_way(self) -> None:
        """From now on there are requests: let them go before jobs, also while these only look into the cache.

        Jobs that run beside each other are finished.
        """
        self._gives_way = True
        for _ in range(self._at_once - 1):
            task = asyncio.get_running_loop().create_task(self._compilations.turn.acquire())
            self._narrowing.add(task)
            task.add_done_callback(self._narrowing.discard)

    async def compile(self, request: CompileRequest) -> Manifest:
        """Return the manifest of the model's artifact, from the cache if it is there. Raises CompileError, OSError.

        Calls wait for their turn. Who gives a call up ends its job.
        """
        name, path = request.name, request.path
        async with (self._stand_ins if request.stand_in else self._compilations).turn:
            begin = time.monotonic()
            folder = self._found.pop((path, request.stamp), None) if request.is_looked_up else None
            report: dict[str, Any] = {"folder": folder, "cached": True}
            killed = False
            if folder is None:
                with ProgressDisplay(name, self._jobs) as display:
                    report = await self._job_for(request, display.update)
                    killed = "error" in report and "kind" not in report and not self._stopping
                    if killed and not (request.dimensions or request.optional or request.whole or request.stand_in):
                        _log.warning("%s: the compiler failed, so onnxruntime serves it: %s", name, report["error"])
                        plain = replace(request, precision=IN_FP32)
                        report = await self._job_for(plain, display.update, report["error"])
        if killed and request.stand_in and not request.dimensions:
            _log.warning("%s: nothing serves it until it is compiled: %s", name, report["error"])
            return await self.compile(replace(request, stamp=(), stand_in=False))
        if "error" in report:
            raise CompileError(report["error"], is_final=report.get("kind") in FINAL_KINDS)
        try:
            manifest = read_manifest(Path(report["folder"]))
        except ArtifactError as error:
            raise CompileError(str(error)) from error
        if (manifest.engine is Engine.ONNXRUNTIME or manifest.islands) and (missing := missing_packages(ONNXRUNTIME)):
            raise CompileError(f"some of it was not compiled, so it needs {missing}", is_final=True)
        if note := report.get("precision_note", ""):
            manifest = replace(manifest, precision_note=note)
        self._remember(manifest.key, request)
        self.target = manifest.target.name
        await self._limit(manifest.key, bool(report["cached"]))
        if not manifest.fallback_reason:
            found = "found in the cache" if report["cached"] else "compiled"
            _log.info("%s: %s, %.2f s", name, found, time.monotonic() - begin)
        return manifest

    async def _limit(self, key: str, is_cached: bool) -> None:
        """Tell others what is in use, and keep the cache to its limit after something was added."""
        if not self._limit_bytes or self._stopping:
            return
        with contextlib.suppress(OSError):
            self._used_keys = self._used_keys or UsedKeys(self._cache_dir)
            self._used_keys.tell({key, *self._in_use()})
            if not is_cached:
                await asyncio.to_thread(trim, self._cache_dir, self._limit_bytes)

    async def discard(self, key: str) -> None:
        """Remove an artifact that is of no use any more, unless another server has told that it uses it."""
        with contextlib.suppress(OSError):
            self._used_keys = self._used_keys or UsedKeys(self._cache_dir)
            self._used_keys.tell(set(self._in_use()) - {key})
            await asyncio.to_thread(discard, self._cache_dir, key)

    async def compile_again(self, key: str) -> None:
        """Put an artifact into the cache that it had before, unless it is there. Raises CompileError, OSError."""
        if key in self._requests:
            await self.compile(self._requests[key])

    def _remember(self, key: str, request: CompileRequest) -> None:
        self._requests.pop(key, None)
        self._requests[key] = replace(request, stamp=())
        if len(self._requests) > MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]

    async def look_up(self, files: Sequence[tuple[Path, Stamp]], stand_ins: bool = False) -> None:
        """Ask the cache for many models by one job, so that `compile` of those that it has needs none.

        `stand_ins`: what it has not will get one, so the process for that gets ready.
        """
        if len(files) < 2 - stand_ins:
            return
        stamps = dict(files)

        def note_found(report: dict[str, Any]) -> None:
            if "found" in report:
                path = Path(report["found"])
                self._found[path, stamps[path]] = report["folder"]

        lane = self._stand_ins if stand_ins else self._compilations
        async with lane.turn:
            await self._run(lane, {"look_up": list(map(str, stamps))}, note_found)

    @property
    def busy(self) -> bool:
        """Whether a job runs."""
        return any(job.returncode is None for job in self._jobs_running)

    def _pids(self) -> list[int]:
        return [job.pid for job in self._jobs_running]

    def stop(self) -> None:
        """End the jobs that run, if any. `ended` waits for that."""
        self._stopping = True
        for lane in (self._compilations, self._stand_ins):
            for process in lane.kept:
                process.stay()
                self._give_up(process, STOP_SECONDS)
        for job in self._jobs_running:
            self._end(job, STOP_SECONDS)
        if self._used_keys is not None:
            self._used_keys.close()

    async def ended(self) -> None:
        """Return when no job runs any more that was given up."""
        if self._ends:
            await asyncio.wait(self._ends)

    def _give_up(self, process: "CompilerProcess", timeout_seconds: float = JOB_END_SECONDS) -> None:
        process.close()  # what it is to report next is an answer to nothing
        self._end(process.child, timeout_seconds)

    def _end(self, job: Child, timeout_seconds: float) -> None:
        """Have a job remove what is unfinished, and end; it is killed if that takes too long."""
        if job.returncode is None:
            job.terminate()
            task = asyncio.get_running_loop().create_task(job.wait(timeout_seconds))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)

    async def _job_for(
        self, request: CompileRequest, progress: Callable[[str, int, int], None], uncompiled: str = ""
    ) -> dict[str, Any]:
        """Run one job; return its last report, which has "folder" or "error". One that was killed has no "kind"."""
        last: dict[str, Any] = {}

        def take(report: dict[str, Any]) -> None:
            if "phase" in report:
                progress(report["phase"], report["done"], report["total"])
            else:
                last.update(report)

        timeout_seconds = await asyncio.to_thread(self._timeout_seconds, request.path)
        lane = self._stand_ins if request.stand_in else self._compilations
        ending = await self._run(lane, request.job(uncompiled), take, timeout_seconds)
        return last or {"error": f"the compile job {ending}"}

    async def _run(
        self,
        lane: _Lane,
        job: Mapping[str, Any],
        take: Callable[[dict[str, Any]], None],
        timeout_seconds: float = math.inf,
    ) -> str:
        """Run a job to its end, or for `timeout_seconds`; return how its process ended, if it did.

        All that the job reports is taken. The process is kept for the next job of the lane, if that is of use.
        """
        process = self._process_of(lane)
        self._jobs_running.add(process.child)
        try:
            process.ask(job)
            end = await self._attend(process, take, timeout_seconds)
            if process.is_open and self._idle_seconds and not self._stopping:
                process.end_after(self._idle_seconds)
                lane.kept.append(process)
                return ""
            process.close()
            await process.child.wait(JOB_END_SECONDS)
        except BaseException:
            self._give_up(process)
            raise
        finally:
            self._jobs_running.discard(process.child)
        return end or process.child.exit_text()

    def _process_of(self, lane: _Lane) -> "CompilerProcess":
        """Return a process that is kept for jobs of a kind, or a new one. Raises OSError."""
        while lane.kept:
            process = lane.kept.pop()
            if process.is_open and process.child.returncode is None:
                process.stay()
                return process
        log = contextlib.nullcontext() if self._log is None else self._log.details_of_child("compile job")
        with log as stderr:
            return CompilerProcess([f"--serve={lane.kind}", "--cache-dir", str(self._cache_dir)], stderr)

    async def _attend(
        self,
        process: "CompilerProcess",
        take: Callable[[dict[str, Any]], None],
        timeout_seconds: float,
    ) -> str:
        """Take the reports of a job until the last one; return why it was killed, if it was. Warnings are logged."""
        job = process.child
        is_looking_up = True  # in the cache, which takes little
        if self._gives_way:
            use_idle_priority(job.pid)
        cores = len(os.sched_getaffinity(0))
        keep = keep_share(process.waits, job.pid, cores, lambda: self._gives_way and is_looking_up, self._pids)
        share = asyncio.get_running_loop().create_task(keep)
        end = asyncio.get_running_loop().create_task(_kill_when_overdue(job, timeout_seconds))
        try:
            async for report in process.reports():
                if "warning" in report:
                    _log.warning("%s", report["warning"])
                    continue
                if "info" in report:
                    _log.info("%s", report["info"])
                    continue
                is_looking_up = is_looking_up and report.get("phase", "key") == "key"
                take(report)
                if not report.keys() & {"phase", "found"}:
                    break
        finally:
            share.cancel()
            end.cancel()
        is_overdue = end.done() and not end.cancelled()
        return f"took more than {timeout_seconds:.0f} s and was ended" if is_overdue else ""


async def _kill_when_overdue(job: Child, timeout_seconds: float) -> None:
    """Return after a job has had its time, and is killed for that."""
    blame = Blame(job.pid, timeout_seconds * 1e6, time.monotonic_ns() / 1e3)
    while not blame.is_too_much(time.monotonic_ns() / 1e3):
        await asyncio.sleep(POLL_SECONDS)
    job.kill()


class CompilerProcess:
    """A process of the compiler: what it is asked through a pipe, and the JSON lines that it reports through another.

    Raises OSError if it cannot be started.
    """

    def __init__(self, arguments: Sequence[str], stderr: int | None) -> None:
        read_fd, write_fd = os.pipe()
        start = start_of("gangway.compiler", [*arguments, "--progress-fd", str(write_fd)])
        try:
            process = subprocess.Popen(
                start.command,
                env=start.environment,
                pass_fds=(write_fd,),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if stderr is None else stderr,
            )
            self.child = Child("compile job", process, lambda _: None)
            self.waits = WaitLog(f"compile job {process.pid}")  # of all its jobs
        except OSError:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        assert process.stdin is not None
        self._input = process.stdin
        self._output = os.fdopen(read_fd, "rb", buffering=0)
        self._reader: asyncio.StreamReader | None = None
        self._transport: asyncio.ReadTransport | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self.is_open = True

    def ask(self, job: Mapping[str, Any]) -> None:
        """Send a job. A process that has ended says so by the end of its reports."""
        with contextlib.suppress(OSError):
            self._input.write(json.dumps(job).encode() + b"\n")
            self._input.flush()

    async def reports(self) -> AsyncIterator[dict[str, Any]]:
        """Yield what it reports, until it ends or says that it will. A later call goes on."""
        if self._reader is None:
            self._reader = reader = asyncio.StreamReader()
            self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), self._output
            )
        while line := await self._reader.readline():
            report = json.loads(line)
            if report.pop("ends", False):
                self.close()
            yield report
        self.close()

    def stay(self) -> None:
        """Do not end now, as was planned."""
        if self._end_timer is not None:
            self._end_timer.cancel()

    def end_after(self, seconds: float) -> None:
        """Let it end after a pause."""
        self._end_timer = asyncio.get_running_loop().call_later(seconds, self.close)

    def close(self) -> None:
        """Ask for no more: it ends when it has done what it was asked for."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._input.close()
        if self._transport is not None:
            self._transport.close()
        elif not self._output.closed:
            self._output.close()
