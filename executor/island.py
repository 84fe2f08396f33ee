"""Layers of a compiled model that onnxruntime computes: islands. Imports onnxruntime and numpy.

Inputs and outputs stay where the program has them: onnxruntime reads and writes there. What a tail makes, whose size is
known only then, is copied to the request's frame.
"""

import ctypes
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gangway.artifact.format import Manifest
from gangway.artifact.onnx_session import bind_static, element_type, reason_of
from gangway.base.process import LOG_WARNING, write_log_line
from gangway.executor.frames import FrameWriter
from gangway.executor.launch import thread_counts
from gangway.executor.onnxruntime_program import Failure, Team, failure_of, write_arrays

MOST_BINDINGS: Final = 64  # places that an island remembers: rows and arenas that a worker uses in turn
Addresses = tuple[int, ...]
Cores = tuple[int, ...]


class _Layer:
    """An ONNX file, the sessions of it, and what they are told of the places in memory that were used lately.

    A session of one thread is opened now, others for 2, 4, ... up to `most_cores` threads when they are used first.
    Raises ValueError where onnxruntime refuses the file.
    """

    def __init__(self, model: Path, model_name: str, most_cores: int) -> None:
        self._model, self._name = model, model_name
        self._counts = thread_counts(most_cores)
        try:
            self._teams = {1: Team(model, 1)}
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise ValueError(f"onnxruntime: {reason_of(error)}") from error
        self._places: OrderedDict[tuple[int, Addresses], Any] = OrderedDict()

    def _failure(self, error: Exception) -> Failure:
        """Return why a row was not computed. Failures that are not the request's fault are logged."""
        failure = failure_of(error)
        if not failure[0]:
            write_log_line(f"{self._name}: onnxruntime could not execute a layer: {failure[1]}", LOG_WARNING)
        return failure

    def _team(self, cores: Cores) -> tuple[int, Team]:
        """Return the team with most threads that so many cores suffice for, on these cores."""
        count = max(count for count in self._counts if count <= len(cores))
        if count not in self._teams:
            try:
                self._teams[count] = Team(self._model, count)
            except Exception as error:  # no threads, or no memory: one thread computes it, too
                write_log_line(f"{self._name}: no session of {count} threads: {failure_of(error)[1]}", LOG_WARNING)
                self._teams[count] = self._teams[1]
        self._teams[count].pin(cores)
        return count, self._teams[count]

    def _place(self, threads: int, session: Any, addresses: Addresses) -> Any:
        """Return what tells the session where its tensors are: to make it takes longer than a small layer."""
        key = (threads, addresses)
        if key in self._places:
            self._places.move_to_end(key)
            return self._places[key]
        place = self._placed(session, addresses)
        if len(self._places) == MOST_BINDINGS:
            self._places.popitem(last=False)
        self._places[key] = place
        return place

    def _placed(self, session: Any, addresses: Addresses) -> Any:
        raise NotImplementedError


class Island(_Layer):
    """One layer whose inputs and outputs have static shapes. Called by the C loop, row by row."""

    def __call__(self, addresses: Addresses, cores: Cores) -> Failure | None:
        """Compute one row; return why it failed, or None.

        `addresses`: where inputs and outputs lie, in the order of the file. `cores`: CPU numbers for threads, of which
        the first one is this worker's.
        """
        try:
            threads, team = self._team(cores)
            team.session.run_with_iobinding(self._place(threads, team.session, addresses))
        except Exception as error:  # it concerns this row only
            return self._failure(error)
        return None

    def _placed(self, session: Any, addresses: Addresses) -> Any:
        return bind_static(session, addresses)


class Tail(_Layer):
    """The last layer, if it makes outputs of sizes that depend on data. Called by the C loop, request by request."""

    def __init__(self, model: Path, manifest: Manifest, most_cores: int) -> None:
        super().__init__(model, manifest.model_name, most_cores)
        shapes = [tensor.shape for tensor in self._teams[1].session.get_inputs()]
        self._joins = any(shape and not isinstance(shape[0], int) for shape in shapes)
        self._outputs = manifest.outputs
        self._writer = FrameWriter()

    def __call__(self, rows: Sequence[Addresses], answer: memoryview, cores: Cores) -> Failure | None:
        """Compute all rows of a request, and write the frame of its outputs; return why that failed, or None.

        `rows`: where the inputs of each lie. Rows are computed together if the file has any number of them, else one by
        one, and their outputs are joined along the first axis. An answer without room is no failure: its frame says how
        much is needed.
        """
        try:
            threads, team = self._team(cores)
            feeds = [self._place(threads, team.session, row) for row in rows]
            if self._joins and len(feeds) > 1:
                feeds = [{name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}]
            answers = [team.session.run(None, feed) for feed in feeds]
            arrays = answers[0] if len(answers) == 1 else list(map(np.concatenate, zip(*answers, strict=True)))
            write_arrays(self._writer, answer, self._outputs, arrays)
        except Exception as error:  # it concerns this request only
            return self._failure(error)
        return None

    def _placed(self, session: Any, addresses: Addresses) -> dict[str, Any]:
        """Return the inputs as arrays in the memory where they lie."""
        feeds = {}
        for tensor, address in zip(session.get_inputs(), addresses, strict=True):
            dtype = np.dtype(element_type(tensor.type))
            shape = (1, *tensor.shape[1:]) if self._joins else tensor.shape
            memory = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
            feeds[tensor.name] = np.frombuffer(memoryview(memory), dtype).reshape(shape)
        return feeds
