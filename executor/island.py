"""Layers of a compiled model that onnxruntime computes: islands. Imports onnxruntime and numpy.

Inputs and outputs stay where the program has them: onnxruntime reads and writes there.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

from gangway.artifact.onnx_session import bind_static
from gangway.executor.launch import thread_counts
from gangway.executor.onnxruntime_program import Failure, Team, failure_of
from gangway.executor.process import LOG_WARNING, write_log_line

MOST_BINDINGS: Final = 64  # places that an island remembers: rows and arenas that a worker uses in turn


class Island:
    """One layer, the ONNX file `model`, whose inputs and outputs have static shapes. Called by the C loop, row by row.

    A session of one thread is opened now, others for 2, 4, ... up to `most_cores` threads when they are used first.
    Raises ValueError where onnxruntime refuses the file.
    """

    def __init__(self, model: Path, model_name: str, most_cores: int) -> None:
        self._model, self._name = model, model_name
        self._counts = thread_counts(most_cores)
        try:
            self._teams = {1: Team(model, 1)}
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise ValueError(f"onnxruntime: {error}") from error
        self._bindings: OrderedDict[tuple[int, tuple[int, ...]], Any] = OrderedDict()

    def __call__(self, addresses: tuple[int, ...], cores: tuple[int, ...]) -> Failure | None:
        """Compute one row; return why it failed, or None. Failures that are not the request's fault are logged.

        `addresses`: where inputs and outputs lie, in the order of the file. `cores`: CPU numbers for threads, of which
        the first one is this worker's.
        """
        try:
            threads, team = self._team(len(cores))
            team.pin(cores)
            team.session.run_with_iobinding(self._binding(threads, team, addresses))
        except Exception as error:  # it concerns this row only
            failure = failure_of(error)
            if not failure[0]:
                write_log_line(f"{self._name}: onnxruntime could not execute a layer: {failure[1]}", LOG_WARNING)
            return failure
        return None

    def _team(self, cores: int) -> tuple[int, Team]:
        """Return the team with most threads that so many cores suffice for."""
        count = max(count for count in self._counts if count <= cores)
        if count not in self._teams:
            try:
                self._teams[count] = Team(self._model, count)
            except Exception as error:  # no threads, or no memory: one thread computes it, too
                write_log_line(f"{self._name}: no session of {count} threads: {failure_of(error)[1]}", LOG_WARNING)
                self._teams[count] = self._teams[1]
        return count, self._teams[count]

    def _binding(self, threads: int, team: Team, addresses: tuple[int, ...]) -> Any:
        """Return what tells the session where its tensors are: to make it takes longer than a small layer."""
        key = (threads, addresses)
        if key in self._bindings:
            self._bindings.move_to_end(key)
            return self._bindings[key]
        binding = bind_static(team.session, addresses)
        if len(self._bindings) == MOST_BINDINGS:
            self._bindings.popitem(last=False)
        self._bindings[key] = binding
        return binding
