"""Compile and execute node tests, many in one process, and let onnxruntime do the same ones beside it.

A crash of the compiler or of onnxruntime ends the process that runs the tests; one of a kernel ends the executor's
worker only. Both are failures of the test that was running, and the others go on: see `run_all`.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conformance.cases import Array, Case, same
from benchmarks.conformance.children import Task, run_in_children
from benchmarks.conformance.poison import PATTERNS, fill, free_stretches
from gangway.artifact.cache import Cache
from gangway.artifact.datatypes import DTYPES
from gangway.artifact.format import Engine, Manifest
from gangway.compiler.errors import ModelError
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.frames import join_strings
from gangway.executor.leases import LeaseSpec, Member
from gangway.executor.slots import SlotRequest, SlotStatus
from gangway.measure.model_runner import LocalExecutor
from gangway.python_backend.elements import split_texts
from testing.frame_requests import read_answer, write_request

NATIVE, RELAX, ONNXRUNTIME, UNSUPPORTED, CRASHED = "native", "Relax", "onnxruntime", "unsupported", "crashed"
CASE_TIMEOUT_S = 120  # the slowest compiles for seconds
RUN_TIMEOUT_S = 20
_ALONE = "; no other layer is"  # what is said of a single node, in which no other layer can be
_HEAP = 1 << 16
_IO_BYTES = 1 << 26
_ANSWER_BYTES = 1 << 24
_POISONED_BYTES = 1 << 20
_MODELS = 64  # numbers of models, used again and again
Answers = Callable[[], Sequence[tuple[Sequence[int], bytes]]]


@dataclass(frozen=True)
class Outcome:
    """How a test went: by what it was executed, what is wrong with the answer, and the same of onnxruntime alone."""

    name: str
    how: str
    error: str  # empty: passed
    reason: str = ""  # why it was not compiled
    peer_error: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether all outputs were right."""
        return not self.error

    @property
    def is_compiled(self) -> bool:
        """Whether it ran without onnxruntime."""
        return self.how in (NATIVE, RELAX)


class RefusedError(RuntimeError):
    """A model has no answer to a query."""


class CaseRunner:
    """An executor with one worker, and a cache in the folder `root`. A context manager.

    `poisons`: every query runs in memory full of one pattern, then of another one, and must be answered alike.
    """

    def __init__(self, root: Path, core: int, poisons: bool = False) -> None:
        self._root, self._patterns = root, PATTERNS if poisons else PATTERNS[:1]
        self._executor = LocalExecutor(self._root / "cache", [core], arena_bytes=1 << 28, io_bytes=_IO_BYTES)
        self._loaded = 0

    def __enter__(self) -> "CaseRunner":
        self._executor.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._executor.__exit__(None, None, None)

    def run(self, case: Case) -> Outcome:
        """Compile and execute one test."""
        start = time.monotonic()
        try:
            manifest = self.compile(case.model)
        except ModelError as error:
            return Outcome(case.name, UNSUPPORTED, "refused", str(error), seconds=time.monotonic() - start)
        except Exception as error:
            return Outcome(case.name, CRASHED, f"{type(error).__name__}: {error}"[:500])
        try:
            problem = self._execute(case, manifest)
        except (RuntimeError, TimeoutError) as error:
            problem = f"execution: {error}"
        reason = manifest.fallback_reason.partition(_ALONE)[0]
        return Outcome(case.name, how(manifest), problem, reason, seconds=time.monotonic() - start)

    def compile(self, model: bytes) -> Manifest:
        """Return what is made of an ONNX file. Raises ModelError, and whatever else goes wrong."""
        path = self._root / "model.onnx"
        path.write_bytes(model)
        return compile_model(path, "model", Cache(self._root / "cache"), detect(), _ignore).manifest

    def answers(self, manifest: Manifest, data_sets: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """Return the outputs for each of these inputs. Raises RefusedError, RuntimeError and TimeoutError."""
        self._loaded += 1
        stretches = free_stretches(self._root / "model.onnx", manifest) if len(self._patterns) > 1 else []
        try:
            self._executor.load(self._loaded % _MODELS, manifest.key)
            found = [self._answer(manifest, inputs, stretches) for inputs in data_sets]
        except RefusedError:
            self._executor.unload(self._loaded % _MODELS)
            raise
        except (RuntimeError, TimeoutError):
            self._executor.restart(0)
            raise
        self._executor.unload(self._loaded % _MODELS)
        return found

    def _answer(self, manifest: Manifest, inputs: Sequence[Array], stretches: Sequence[tuple[int, int]]) -> list[Array]:
        """Return the answers to one query, in an arena that is zero but for what nobody must read."""
        rows = batch_of(manifest, inputs)
        self._executor.arena.zero(0, max(rows * manifest.arena_bytes, 1))
        answers = []
        for pattern in self._patterns:
            fill(self._executor.arena.view, stretches, rows, manifest.arena_bytes, pattern)
            answers.append(self._query(manifest, inputs, rows, pattern))
        if any(a.tobytes() != b.tobytes() for a, b in zip(answers[0], answers[-1], strict=True)):
            raise RuntimeError("the answer shows what lay in memory before")
        return answers[0]

    def _execute(self, case: Case, manifest: Manifest) -> str:
        """Return what is wrong with the answers. Raises RuntimeError and TimeoutError."""
        found = self.answers(manifest, [inputs for inputs, _ in case.data_sets])
        pairs = zip(found, (expected for _, expected in case.data_sets), strict=True)
        problems = [same(*pair, case) for outputs in pairs for pair in zip(*outputs, strict=True)]
        return "; ".join(filter(None, problems))

    def _query(self, manifest: Manifest, inputs: Sequence[Array], rows: int, pattern: bytes) -> list[Array]:
        """Return the answers to one query in memory full of `pattern`. Raises RuntimeError if there are none."""
        framed = manifest.engine is Engine.ONNXRUNTIME or manifest.tail
        request, answers = (self._framed if framed else self._plain)(manifest, inputs, rows, pattern)
        executor, layers = self._executor, len(manifest.layers)
        slot, generation = executor.begin(request)
        members = (Member(0, slot, generation, rows=rows),)
        executor.start(0, LeaseSpec(request.model_id, members, 0, manifest.arena_bytes, 0, layers), [0])
        if not executor.slots.wait(slot, RUN_TIMEOUT_S * 1_000_000):
            raise RuntimeError(f"no answer; the worker's status is {executor.workers[0].poll()}")
        outcome = executor.slots.outcome(slot)
        status = outcome.status
        executor.slots.release(slot)
        executor.left([0])
        if status in (SlotStatus.INVALID, SlotStatus.INTERNAL):
            raise RefusedError(f"{status.name}: {outcome.reason}")
        if status is not SlotStatus.OK:
            raise RuntimeError(f"answered {status.name}: {outcome.reason}")
        return [_read(tensor.datatype, *each) for tensor, each in zip(manifest.outputs, answers(), strict=True)]

    def _plain(
        self, manifest: Manifest, inputs: Sequence[Array], rows: int, pattern: bytes
    ) -> tuple[SlotRequest, Answers]:
        """Place tensors of known sizes; return the request, and what reads shapes and contents of the answers."""
        view, offset, places = self._executor.io.view, _HEAP, []
        for tensor in (*manifest.inputs, *manifest.outputs):
            end = offset + tensor.row_bytes * rows
            view[offset:end] = pattern * (end - offset)
            places.append((offset, end))
            offset = -(-end // 64) * 64
        count = len(manifest.inputs)
        for (begin, end), value in zip(places, inputs, strict=False):
            view[begin:end] = _bytes(value)
        begins = [begin for begin, _ in places]
        request = SlotRequest(self._loaded % _MODELS, rows, tuple(begins[:count]), tuple(begins[count:]))
        shapes = [[rows if size == -1 else size for size in tensor.shape] for tensor in manifest.outputs]
        ends = places[count:]
        return request, lambda: [(shape, bytes(view[i:j])) for shape, (i, j) in zip(shapes, ends, strict=True)]

    def _framed(
        self, manifest: Manifest, inputs: Sequence[Array], rows: int, pattern: bytes
    ) -> tuple[SlotRequest, Answers]:
        """The same for a model of onnxruntime."""
        io = self._executor.io
        io.view[_HEAP : _HEAP + _POISONED_BYTES] = pattern * _POISONED_BYTES
        tensors = [(value.shape, _bytes(value)) for value in inputs]
        request = write_request(io, _HEAP, self._loaded % _MODELS, rows, tensors, _ANSWER_BYTES)
        return request, lambda: read_answer(io, request)


def _bytes(value: Array) -> bytes:
    """Return contents as requests have them."""
    if value.dtype == object:
        return join_strings(value.reshape(-1).tolist())
    return np.ascontiguousarray(value).tobytes()


def _read(datatype: str, shape: Sequence[int], content: bytes) -> Array:
    if datatype == "BYTES":
        texts = np.array([*split_texts(content, math.prod(shape)), None], object)[:-1]
        return texts.reshape(shape)
    return np.frombuffer(content, DTYPES[datatype]).reshape(shape)


def batch_of(manifest: Manifest, inputs: Sequence[Array]) -> int:
    """Return the rows of a query: the first dimension, if that is the batch."""
    return len(inputs[0]) if manifest.batched else 1


def how(manifest: Manifest) -> str:
    """Return what executes a model: templates only, some layer of Relax's, or onnxruntime, at least in part."""
    if manifest.engine is Engine.ONNXRUNTIME or manifest.islands:
        return ONNXRUNTIME
    by_relax = any(layer.versions[0].description.startswith("relax") for layer in manifest.layers)
    return RELAX if by_relax else NATIVE


def peer_error(case: Case) -> str:
    """Return what is wrong with onnxruntime's own answers, empty if nothing is."""
    import onnxruntime  # noqa: PLC0415 - forked processes shall not inherit it

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(case.model, options, providers=["CPUExecutionProvider"])
        problems = []
        for inputs, expected in case.data_sets:
            names = [item.name for item in session.get_inputs()]
            found = session.run(None, dict(zip(names, inputs, strict=False)))
            problems += [same(np.asarray(value), wanted, case) for value, wanted in zip(found, expected, strict=True)]
    except Exception as error:  # onnxruntime's exceptions have no common base
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return "; ".join(filter(None, problems))


def run_all(cases: Sequence[Case], jobs: int, progress: Callable[[int], None], poisons: bool = False) -> list[Outcome]:
    """Run all tests in `jobs` processes at a time; a process that dies or hangs is replaced, its test has failed.

    `poisons`: see `CaseRunner`.
    """
    outcomes: dict[str, Outcome] = {}

    def done(outcome: Outcome) -> None:
        outcomes[outcome.name] = outcome
        progress(len(outcomes))

    run_in_children(Task(partial(_serve, poisons), _failed, CASE_TIMEOUT_S), iter(cases), jobs, done)
    return [outcomes[case.name] for case in cases]


def _failed(case: Case, _: str, why: str) -> Outcome:
    return Outcome(case.name, CRASHED, why, peer_error="not run")


def _serve(poisons: bool, pipe: Connection, root: Path, core: int) -> None:
    with CaseRunner(root, core, poisons) as runner, suppress(EOFError):  # our parent has died
        while case := pipe.recv():
            pipe.send(replace(runner.run(case), peer_error=peer_error(case)))


def _ignore(phase: str, done: int, total: int) -> None:
    """No progress bar."""
