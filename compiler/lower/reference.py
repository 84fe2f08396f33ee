"""Computations beside onnxruntime, the reference: in processes that can be stopped, and on examples of requests."""

import gc
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gangway.base.parent import signal_at_parents_end
from gangway.compiler.errors import EndedApartError, UnsupportedModelError
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.specs import Array

CPU_S = 5
WALL_S = 60
BUSY_STATES = "RD"  # of threads in /proc: one computes, or waits for a core or a disk
IDLE_LOOKS = 20  # at a process, within the time that it may be idle
END_S = 10  # of a process that has closed its pipe
TIMED_RUNS = 5
TIMED_S = 0.1
Result = TypeVar("Result")


def run_apart(work: Callable[[], Result], is_limited: bool = True) -> Result:
    """Return what `work` returns in a process of its own: a node may crash that, or take any time.

    `is_limited`: it has 5 s of a core, and may be idle for 60 s. Otherwise it has as much time as the process that
    waits for it.

    Raises UnsupportedModelError if it takes longer or raises an exception, EndedApartError if it does not live so long.
    """
    with working_apart(work, is_limited) as result:
        return result()


@contextmanager
def working_apart(
    work: Callable[[], Result], is_limited: bool = True, wall_s: float = WALL_S
) -> Iterator[Callable[[], Result]]:
    """Have a process work beside this one, as `run_apart` does; yield what waits for the result.

    It ends with the block. If it is limited, and idle for `wall_s` while its result is waited for, it does not end. A
    process that waits for a core is not idle: how busy the machine is decides nothing.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    arguments = (theirs, work, os.getpid(), is_limited)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=arguments)
    with _no_collection():
        process.start()
    theirs.close()

    def result() -> Result:
        try:
            ends = _ends(ours, process.pid or 0, wall_s) if is_limited else ours.poll(None)
            answer: tuple[bool, Any] = ours.recv() if ends else (False, "it does not end")
        except EOFError:
            process.join(END_S)
            raise _ending(process.exitcode, is_limited) from None
        is_done, result = answer
        if not is_done:
            raise UnsupportedModelError(result)
        return result  # type: ignore[no-any-return]

    try:
        yield result
    finally:
        process.kill()
        process.join()
        ours.close()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage while the block lasts, nor in a process that it forks, until that enables it."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _ends(pipe: Any, pid: int, wall_s: float) -> bool:
    """Wait for a process's answer, or its end; return False if it is idle for `wall_s` before."""
    last, since_s = _spent_ticks(pid), time.monotonic()
    while not pipe.poll(wall_s / IDLE_LOOKS):
        spent, now_s = _spent_ticks(pid), time.monotonic()
        if spent is None or spent != last:
            last, since_s = spent, now_s
        elif now_s - since_s >= wall_s:
            return False
    return True


def _spent_ticks(pid: int) -> int | None:
    """Return the ticks of a core that a process has used; None while a thread of it is busy, and after its end."""
    try:
        threads = [path.read_text().rpartition(") ")[2].split() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return None
    if any(state in BUSY_STATES for state, *_ in threads):
        return None
    return sum(int(ticks) for fields in threads for ticks in fields[11:13])  # in user and kernel mode


def _ending(status: int | None, is_limited: bool) -> UnsupportedModelError:
    """Return what the end of a process without an answer means; `status` as multiprocessing has it."""
    if is_limited and status in (-signal.SIGXCPU, -signal.SIGKILL):
        return UnsupportedModelError(f"it takes more than {CPU_S} s")
    if status is not None and status < 0:
        return EndedApartError(f"it ends the process by {signal.Signals(-status).name}")
    return EndedApartError(f"it ends the process with status {status}")


def _answer(pipe: Any, work: Callable[[], object], parent: int, is_limited: bool) -> None:
    try:
        signal_at_parents_end(signal.SIGKILL, parent)
    except ProcessLookupError:
        return
    # Garbage of the parent stays garbage here: the end of a session waits for threads that no fork has.
    gc.freeze()
    gc.enable()
    if is_limited:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    try:
        with np.errstate(all="ignore"):
            pipe.send((True, work()))
    except UnsupportedModelError as error:
        pipe.send((False, str(error)))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"[:200]))


def example(kind: TensorType, seed: int, infinities: bool = False) -> Array:
    """Return numbers that are valid in most places: integers, which may be indices, are 0 and 1."""
    random = np.random.default_rng(seed)
    if kind.dtype == "float32":
        numbers = np.asarray(4 * random.standard_normal(kind.shape), np.float32)
        if infinities:
            odd = numbers.reshape(-1)[seed % 2 :: 3]
            odd[:] = np.resize(np.array([np.inf, 0, -np.inf], np.float32), odd.shape)
        return numbers
    return random.integers(0, 2, kind.shape).astype(kind.dtype)


def best_us(run: Callable[[], object]) -> float:
    """Return the shortest of a few times that a call takes of this thread, whatever else the machine computes."""
    times: list[int] = []
    while not times or (len(times) < TIMED_RUNS and sum(times) < TIMED_S * 1e9):
        begin_ns = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - begin_ns)
    return min(times) / 1000
