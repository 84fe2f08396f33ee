"""A model that onnxruntime executes, as a program of a worker. Imports onnxruntime and numpy.

Requests to a batched model, whose inputs and outputs all have the batch as their first axis, are executed as one: their
rows, one after the other, along that axis.
"""

import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from gangway.artifact.datatypes import STORAGE
from gangway.artifact.format import Manifest, TensorSpec
from gangway.artifact.onnx_session import open_session, reason_of, run_session
from gangway.base.host_limits import trim_heap
from gangway.base.process import LOG_WARNING, use_worker_priority, write_log_line
from gangway.executor import _native
from gangway.executor.frames import (
    FramePart,
    FrameReader,
    FrameWriter,
    header_of,
    is_absent,
    join_strings,
    needed_bytes,
    read_frame,
)
from gangway.executor.launch import thread_counts
from gangway.python_backend.elements import split_texts

Frames = tuple[memoryview, memoryview]  # of a request, and for its answer
Feeds = dict[str, Any]  # arrays by the names of inputs
Run = tuple[Feeds, memoryview]  # inputs of a request, and the memory of its answer
Failure = tuple[bool, str]  # whether what is in the request is to blame; why, one line
Prepared = tuple[bytes, bytes, Callable[[], object]]  # headers of a request and its answer; computes its contents
PREPARED_NS: Final = 2_000_000  # a longer run does not become noticeably shorter by it
UNBOUND: Final = ("BYTES", "BF16")  # of types that numpy does not have
# onnxruntime has a status for what is wrong with a request, but does not always use it.
_BLAMED: Final = re.compile(
    r"INVALID_ARGUMENT|Integer (division|modulo) by zero|Out of range value in index tensor|invalid indi?c?ex? found"
    r"|Invalid sequence length|\[ImageDecoder\]: "
)


class NoTextError(ValueError):
    """An input's elements are no strings of UTF-8, as all are that onnxruntime is given."""


def load_whole(folder: Path, manifest: Manifest, most_cores: int = 1) -> _native.Program:
    """Return the program of an artifact whose engine is onnxruntime, for gangs of up to `most_cores` cores.

    Raises ValueError where onnxruntime refuses it.
    """
    return _native.Program.whole(OnnxRuntimeModel(folder, manifest, most_cores))


class Team:
    """A session, and its threads beside the one that calls it; `optimise`: the file is as its exporter left it.

    Raises what onnxruntime raises.
    """

    def __init__(self, model: Path, threads: int, optimise: bool = True) -> None:
        before = _threads()
        self.session = open_session(model, optimise, threads)
        trim_heap()  # of what kernels have packed, and found packed in the file
        own = {thread.native_id for thread in threading.enumerate()}  # one may have been started meanwhile
        self._threads = sorted(_threads() - before - own)
        self._cores: tuple[int, ...] = ()
        for thread in self._threads:  # they inherit the priority of who loads
            use_worker_priority(thread)

    def pin(self, cores: tuple[int, ...]) -> None:
        """Let each thread have one of these cores, whose first one is the caller's."""
        if cores != self._cores:
            for thread, core in zip(self._threads, cores[1:], strict=False):
                with suppress(OSError):  # the core has been taken from us: the thread stays where it may be
                    os.sched_setaffinity(thread, {core})
            self._cores = cores


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


class OnnxRuntimeModel:
    """Sessions of 1, 2, 4, ... threads, this process's own: rank 0 of a gang runs the one that its cores suffice for.

    Called by the C loop, a lease at a time. `most_cores`: of a gang whose rank 0 is this worker.
    """

    def __init__(self, folder: Path, manifest: Manifest, most_cores: int = 1) -> None:
        self._manifest = manifest
        try:
            file, optimise = folder / manifest.whole_file, not manifest.is_optimised
            self._teams = {count: Team(file, count, optimise) for count in thread_counts(most_cores)}
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise ValueError(f"onnxruntime: {reason_of(error)}") from error
        self._session = self._teams[1].session
        self._reader, self._writer = FrameReader(), FrameWriter()
        self._outputs = [tensor.name for tensor in manifest.outputs]
        self._bfloat16 = {tensor.name for tensor in (*manifest.inputs, *manifest.outputs) if tensor.datatype == "BF16"}

    def __call__(
        self, frames: list[Frames], cores: tuple[int, ...] = (0,), again: bool = False
    ) -> Sequence[Failure | Prepared | None]:
        """Compute requests from frame to frame; return why each failed, or None.

        `cores`: CPU numbers of the gang, of which the first one is this worker's. `again`: the memory is that of a
        request before, so onnxruntime is told of it once, for the next ones with such tensors (`_native.Program`).

        Several are computed in one run, without those that onnxruntime cannot be given. If that fails each is computed
        alone, so that a wrong one costs only itself. An answer without room is no failure: its frame says how much is
        needed.
        """
        team = self._teams[max(count for count in self._teams if count <= len(cores))]
        team.pin(cores)
        self._session = team.session
        begin_ns = time.perf_counter_ns()
        failures: list[Failure | None] = [None] * len(frames)
        runs: dict[int, Run] = {}
        for place, (request, answer) in enumerate(frames):
            try:
                runs[place] = self._feeds(request), answer
            except Exception as error:  # it concerns this request only
                failures[place] = self._failure(error, len(frames))
        if len(runs) > 1 and self._manifest.batched and self._try(list(runs.values())) is None:
            return failures
        for place, run in runs.items():
            failures[place] = self._try([run])
        is_short = again and time.perf_counter_ns() - begin_ns < PREPARED_NS
        return [self._prepared(*frames[0])] if is_short and failures == [None] else failures

    def _prepared(self, request: memoryview, answer: memoryview) -> Prepared | None:
        """Return how requests like one that was answered are computed in the same memory; None if they cannot be.

        That is tried: what is an input, too, onnxruntime leaves where it is.
        """
        if needed_bytes(answer) > len(answer):
            return None
        asked, answered = self._reader.read(request), read_frame(answer)
        inputs, outputs = self._manifest.inputs, self._manifest.outputs
        places = [*zip(inputs, asked.parts, strict=True), *zip(outputs, answered.parts, strict=True)]
        if any(tensor.datatype in UNBOUND or not part.size_bytes for tensor, part in places):
            return None
        binding = self._session.io_binding()
        for bind, tensors, parts, view in (
            (binding.bind_input, inputs, asked.parts, request),
            (binding.bind_output, outputs, answered.parts, answer),
        ):
            begin = np.frombuffer(view, np.uint8).ctypes.data
            for tensor, part in zip(tensors, parts, strict=True):
                bind(tensor.name, "cpu", 0, STORAGE[tensor.datatype].type, part.shape, begin + part.offset)
        compute = partial(self._session.run_with_iobinding, binding)
        views = [answer[part.offset : part.offset + part.size_bytes] for part in answered.parts]
        contents = [bytes(view) for view in views]
        for view in views:
            view[:] = np.invert(np.frombuffer(view, np.uint8)).data
        try:
            compute()
            is_same = views == contents
        except Exception:  # onnxruntime's own exceptions have no common base
            is_same = False
        for view, content in zip(views, contents, strict=True):
            view[:] = content
        return (header_of(asked), header_of(answered), compute) if is_same else None

    def _try(self, runs: Sequence[Run]) -> Failure | None:
        try:
            self._run(runs)
        except Exception as error:  # it concerns these requests only
            return self._failure(error, len(runs))
        return None

    def _failure(self, error: Exception, requests: int) -> Failure:
        failure = failure_of(error)
        if requests > 1 and not failure[0]:  # who has sent a single one tells its owner, and the log
            name = self._manifest.model_name
            told = f"{name}: onnxruntime could not execute {requests} requests in a batch: {failure[1]}"
            write_log_line(told, LOG_WARNING)
        return failure

    def _run(self, runs: Sequence[Run]) -> None:
        feeds = [each for each, _ in runs]
        if len(feeds) == 1:
            answers = [run_session(self._session, self._outputs, feeds[0], self._bfloat16)]
        else:
            rows = [rows_of(each) for each in feeds]
            arrays = run_session(self._session, self._outputs, join_rows(feeds), self._bfloat16)
            answers = split_rows(arrays, rows)
        for (_, answer), arrays in zip(runs, answers, strict=True):
            self._write(answer, arrays)

    def _feeds(self, request: memoryview) -> Feeds:
        """Return the inputs of a request. Raises ValueError for what is no frame, NoTextError for strings of others."""
        parts = self._reader.read(request).parts
        return {
            tensor.name: _array(tensor, part, request)
            for tensor, part in zip(self._manifest.inputs, parts, strict=True)
            if not (tensor.optional and is_absent(part))
        }

    def _write(self, answer: memoryview, arrays: Sequence[Any]) -> None:
        write_arrays(self._writer, answer, self._manifest.outputs, arrays)


def write_arrays(writer: FrameWriter, answer: memoryview, outputs: Sequence[TensorSpec], arrays: Sequence[Any]) -> None:
    """Write the frame of these outputs, or only its size if there is no room. Raises ValueError for another type."""
    contents = [_contents(tensor, array) for tensor, array in zip(outputs, arrays, strict=True)]
    sizes = [(array.shape, len(content)) for array, content in zip(arrays, contents, strict=True)]
    frame = writer.write(answer, sizes)
    if frame is not None:
        for part, content in zip(frame.parts, contents, strict=True):
            answer[part.offset : part.offset + part.size_bytes] = content


def rows_of(feeds: Mapping[str, Any]) -> int:
    """Return how many rows a request has. Raises ValueError if its inputs do not agree."""
    counts = {len(array) if array.ndim else 0 for array in feeds.values()}
    if len(counts) != 1:
        raise ValueError(f"inputs of a request have {sorted(counts)} rows")
    return counts.pop()


def join_rows(feeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the inputs of all requests together. Raises ValueError unless they are alike but for their rows."""
    first = feeds[0]
    if any(each.keys() != first.keys() for each in feeds):
        raise ValueError("some requests leave an input out that others have")
    return {name: np.concatenate([each[name] for each in feeds]) for name in first}


def split_rows(arrays: Sequence[Any], rows: Sequence[int]) -> list[list[Any]]:
    """Return each request's outputs. Raises ValueError if an output has other rows than the requests together."""
    total = sum(rows)
    for array in arrays:
        if array.ndim == 0 or len(array) != total:
            raise ValueError(f"an output of shape {array.shape} for {total} rows")
    ends = np.cumsum(rows)
    return [[array[end - count : end] for array in arrays] for count, end in zip(rows, ends, strict=True)]


def failure_of(error: Exception) -> Failure:
    """Return what clients are told: the node and onnxruntime's sentence, or which input is no text."""
    if isinstance(error, NoTextError):
        return True, str(error)
    return _BLAMED.search(str(error)) is not None, reason_of(error)


def _array(tensor: TensorSpec, part: FramePart, request: memoryview) -> Any:
    """Return an input. Raises NoTextError."""
    content = request[part.offset : part.offset + part.size_bytes]
    if tensor.datatype == "BYTES":
        array = np.empty(math.prod(part.shape), object)
        try:
            array[:] = split_texts(content, array.size)
        except ValueError as error:
            raise NoTextError(f"input '{tensor.name}': {error}") from None
        return array.reshape(part.shape)
    return np.frombuffer(content, STORAGE[tensor.datatype]).reshape(part.shape)


def _contents(tensor: TensorSpec, array: Any) -> memoryview | bytes:
    if tensor.datatype == "BYTES":
        return join_strings(array.ravel().tolist())
    if array.dtype != STORAGE[tensor.datatype]:
        raise ValueError(f"output '{tensor.name}' is {array.dtype} instead of {tensor.datatype}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""
