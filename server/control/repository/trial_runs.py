"""Requests of the server's own, to try a model with, and to measure how long it takes when it is alone.

They are ordinary requests, through the supervisor's own io segment. A trial that fails shows nothing: the model may
want other sizes, or other contents.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from gangway.base.memory_budget import memory_budget
from gangway.executor.frames import example_bytes
from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.server.errors import ModelLoadError, RequestError
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Shapes, item_bytes
from gangway.server.requests.codecs import Codec, codec_of
from gangway.server.requests.data_plane import DataPlane, PoolExhaustedError, Scheduling, Submission
from gangway.server.requests.regions import Contents

SymbolSizes: TypeAlias = Mapping[str, int]  # of symbolic dimensions, by their names
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Trial:
    """A request to try a model with."""

    call: Codec
    contents: Contents
    rows: int = 1


class TrialError(ModelLoadError):
    """The model has failed; with other inputs it may not."""


def possible_sizes(model: ServedModel, *known: SymbolSizes) -> list[SymbolSizes]:
    """Return which of the sizes that are known to be possible give one to all symbols, with what dims say.

    Without any the model cannot be tried: sizes that nobody has named may be impossible, or never be asked for.
    """
    dims = _configured(model)
    return [sizes for sizes in ({}, *known) if all(symbol in sizes or symbol in dims for symbol in model.symbols)]


def first_possible(sizes: Sequence[SymbolSizes], attempt: Callable[[SymbolSizes], ResultT]) -> ResultT:
    """Return the result of the first attempt that does not fail. Raises the last TrialError if all do."""
    failed = TrialError("no sizes are known to try the model with")
    for some in sizes:
        try:
            return attempt(some)
        except TrialError as error:
            failed = error
    raise failed


def _configured(model: ServedModel) -> dict[str, int]:
    """Return the sizes that a model's configuration gives to symbols."""
    dims = [(tensor, axis, size) for tensor in model.all_inputs for axis, size in enumerate(tensor.shape)]
    return {tensor.symbols[axis]: size for tensor, axis, size in dims if tensor.symbols and size >= 0}


def trial_shapes(model: ServedModel, sizes: SymbolSizes, rows: int = 1) -> Shapes:
    """Return shapes of all inputs to try a model with; sizes that its configuration gives go before these."""
    configured = _configured(model)
    own = {symbol: configured.get(symbol, sizes.get(symbol, 1)) for symbol in model.symbols}
    inputs = []
    for tensor in model.all_inputs:
        symbols = tensor.symbols or ("",) * len(tensor.shape)
        shape = [own.get(symbol, 1) if size == -1 else size for size, symbol in zip(tensor.shape, symbols, strict=True)]
        if model.batched and tensor.shape[0] == -1:
            shape[0] = rows
        inputs.append((tensor, tuple(shape)))
    rows = inputs[0][1][0] if model.batched else 1
    return Shapes(rows, tuple(inputs), own)


def trial_of(model: ServedModel, sizes: SymbolSizes) -> Trial:
    """Return a request of zeros with these sizes of symbolic dimensions: of one row, unless more are configured."""
    shapes = trial_shapes(model, sizes)
    contents = [
        example_bytes(tensor.datatype, shape, item_bytes(tensor.datatype), tensor.example_texts)
        for tensor, shape in shapes.inputs
    ]
    return Trial(codec_of(model, shapes, list(model.outputs.values())), contents, shapes.rows)


REQUEST_TIMEOUT_SECONDS = 60.0
LAST_CLASS_SECONDS = 5.0  # for a run behind all requests; then it is one of the normal class
LAST_CLASS = 1 << 30  # after all that clients may ask for
WAIT_STEP_NS = 100_000_000  # how often `stop` is looked at
WARM_UP_RUNS = 2  # the first ones fault pages in
MIN_RUNS, MAX_RUNS = 3, 20
BUDGET_SECONDS = 0.1
PAUSE_SECONDS = 0.001  # a client's next request finds scheduler and workers asleep


@dataclass(frozen=True)
class TrialRunner:
    """Has models answer trials through the supervisor's own `plane`. All methods block, until `stop` is set at most."""

    plane: DataPlane
    stop: threading.Event

    def measure_isolated(self, model: ServedModel, sizes: Sequence[SymbolSizes], is_brief: bool = False) -> float:
        """Return how long a model computes when it is alone, in microseconds: a median.

        It runs for BUDGET_SECONDS or MIN_RUNS runs, whichever is longer, with the first of the `sizes` of symbolic
        dimensions that are possible. `is_brief`: it is to be served for minutes only, so one run is enough if that
        takes so long. Raises TrialError when the model cannot do with zeros, ModelLoadError when a run fails in another
        way.
        """
        return statistics.median(outcome.compute_us for outcome in self._outcomes(model, sizes, is_brief))

    def run_once(self, trial: Trial, read: Callable[[Submission], bool] | None = None) -> SlotOutcome:
        """Have a model compute once; return how it went.

        `read` looks at the answer, and says whether there was room for it. Raises TrialError when the model cannot do
        with these contents, ModelLoadError when it fails in another way.
        """
        try:
            read = read or (lambda submission: trial.call.answer(b"", submission) is not None)
            outcome = self._run(trial, LAST_CLASS, LAST_CLASS_SECONDS, read)
            if outcome is None:  # the server is so busy that the last class never gets its turn
                outcome = self._run(trial, 0, REQUEST_TIMEOUT_SECONDS, read)
        except PoolExhaustedError as error:
            raise ModelLoadError(f"no room for a trial run: {error}") from error
        if outcome is None:
            raise ModelLoadError(f"a trial run did not end within {REQUEST_TIMEOUT_SECONDS:.0f} seconds")
        return outcome

    def _outcomes(self, model: ServedModel, sizes: Sequence[SymbolSizes], is_brief: bool) -> Iterator[SlotOutcome]:
        warm_ups, least = (1, 1) if is_brief else (WARM_UP_RUNS, MIN_RUNS)

        def warmed_up(some: SymbolSizes) -> Trial:
            trial = trial_of(model, some)
            for _ in range(warm_ups):
                self.run_once(trial)
            return trial

        trial = first_possible(sizes, warmed_up)
        end = time.monotonic() + BUDGET_SECONDS
        for run in range(MAX_RUNS):
            if run >= least and time.monotonic() > end:
                return
            self.stop.wait(PAUSE_SECONDS)
            yield self.run_once(trial)

    def _run(
        self, trial: Trial, priority: int, seconds: float, read: Callable[[Submission], bool]
    ) -> SlotOutcome | None:
        """Return None if the run did not end in this time."""
        call, contents = trial.call, trial.contents
        while True:
            with self.plane.open(call.layout(contents), trial.rows) as request:
                call.write(request, contents)
                request.submit(Scheduling(priority=priority), alone=True)
                outcome = self._wait(request, seconds)
                if outcome is None:
                    return None
                if outcome.status is SlotStatus.INVALID and call.has_places:
                    return outcome  # kernels refuse a number, but compute to the end
                ending = f"a trial run ended with {outcome.status.name} after {outcome.attempts} attempts"
                if outcome.status in (SlotStatus.INTERNAL, SlotStatus.INVALID) and outcome.attempts <= 1:
                    raise TrialError(f"{ending}: {outcome.reason}" if outcome.reason else ending)
                if outcome.status is SlotStatus.NO_MEMORY:
                    raise ModelLoadError(f"a trial run needs more than {memory_budget().limit} leave room for")
                if outcome.status is not SlotStatus.OK:
                    raise ModelLoadError(ending)
                try:
                    if read(request):
                        return outcome  # else there was too little room for it
                except RequestError as error:
                    raise TrialError(error.message) from error

    def _wait(self, request: Submission, seconds: float) -> SlotOutcome | None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stop.is_set():
            outcome = request.wait(time.monotonic_ns() + WAIT_STEP_NS)
            if outcome is not None:
                return outcome
        if self.stop.is_set():
            raise ModelLoadError("the server is stopping")
        return None
