"""Computations beside onnxruntime, the reference: in processes that can be stopped, and on examples of requests."""

import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.specs import Array

CPU_S = 5
WALL_S = 60
TIMED_RUNS = 5
TIMED_S = 0.1
Result = TypeVar("Result")


def run_apart(work: Callable[[], Result]) -> Result:
    """Return what `work` returns in a process of its own: a node may crash that, or take any time.

    Raises UnsupportedModelError if it does, or raises an exception.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(theirs, work))
    process.start()
    theirs.close()
    try:
        answer: tuple[bool, Any] = ours.recv() if ours.poll(WALL_S) else (False, "it does not end")
    except EOFError:
        answer = False, f"it takes more than {CPU_S} s, or crashes"
    finally:
        process.kill()
        process.join()
        ours.close()
    is_done, result = answer
    if not is_done:
        raise UnsupportedModelError(result)
    return result  # type: ignore[no-any-return]


def _answer(pipe: Any, work: Callable[[], object]) -> None:
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
