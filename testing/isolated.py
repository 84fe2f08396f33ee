"""Isolated latency: what one query takes onnxruntime on an idle machine. Targets and capacity are multiples of it."""

import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnxruntime as ort

from gangway.clients.inputs import Array
from testing.reference import Example, open_session
from testing.repository import onnx_file

THREADS = 2
ROUNDS = 9
ROUND_S = 0.05  # short queries are repeated until a round has lasted so long


class Reference:
    """Sessions of onnxruntime with two threads each that do not spin: other models would pay for that."""

    def __init__(self, repository: Path, examples: Mapping[str, Example]) -> None:
        self._inputs: dict[str, dict[str, Array]] = {name: example.inputs for name, example in examples.items()}
        self._sessions: dict[str, ort.InferenceSession] = {
            name: open_session(onnx_file(repository, name), THREADS, spinning=False) for name in examples
        }

    def isolated_us(self, names: Iterable[str], rounds: int = ROUNDS) -> dict[str, float]:
        """Return each model's median over rounds in which the models take turns."""
        times_us: dict[str, list[float]] = {name: [] for name in names}
        for name in times_us:
            self._query_us(name)
        for _ in range(rounds):
            for name, measured in times_us.items():
                measured.append(statistics.median(self._round_us(name)))
        return {name: statistics.median(measured) for name, measured in times_us.items()}

    def _round_us(self, name: str) -> list[float]:
        end_s = time.perf_counter() + ROUND_S
        times_us = [self._query_us(name)]
        while time.perf_counter() < end_s:
            times_us.append(self._query_us(name))
        return times_us

    def _query_us(self, name: str) -> float:
        begin_ns = time.perf_counter_ns()
        self._sessions[name].run(None, self._inputs[name])
        return (time.perf_counter_ns() - begin_ns) / 1000
