"""One request to an ensemble, from its first step to its last.

Each step is an ordinary request to a model: a slot of its own, seen by the scheduler among all others. Its inputs lie
where the steps before have left them. Steps that do not wait for each other are handed over together; the one thread of
the request sleeps until any of them has ended. No slot, or no memory, ends the request at once, so requests cannot wait
for each other.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import grpc

from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.server.calls import Contents
from gangway.server.data_plane import DataPlane, PoolExhaustedError
from gangway.server.ensemble.call import EnsembleCall, Result
from gangway.server.ensemble.graph import Step, TensorName
from gangway.server.ensemble.memory import SharedMemoryPool
from gangway.server.ensemble.spans import StepSpan
from gangway.server.ensemble.starting import Prepared, prepare_compiled, prepare_frame
from gangway.server.ensemble.values import Values
from gangway.server.ensemble.ways import StepWay
from gangway.server.errors import RequestError
from gangway.server.failures import failure, no_room
from gangway.server.queue_policy import Terms
from gangway.server.request_clock import RequestClock
from gangway.server.shape_watch import ShapeWatch


@dataclass(eq=False)
class _Running:
    """A step that has been handed over, and the blocks that are held for it until its outputs have been taken."""

    index: int
    way: StepWay
    prepared: Prepared
    begin_ns: int
    submitted_ns: int = 0


class EnsembleRun:
    """A context manager: leaving it cancels what still runs and gives everything back.

    One thread executes it. `cancel` may be called by any, at any time.
    """

    def __init__(
        self, plane: DataPlane, watch: ShapeWatch, call: EnsembleCall, terms: Terms, clock: RequestClock
    ) -> None:
        self._plane = plane
        self._pool = SharedMemoryPool(plane)
        self._watch = watch
        self._call = call
        self._terms = terms
        self._clock = clock
        self._values = Values(self._pool, call.graph, call.wanted)
        self._waits = list(call.graph.waits)
        self._lock = threading.Lock()  # of the two below
        self._running: list[_Running] = []
        self._cancelled = threading.Event()
        self.spans: list[StepSpan] = []

    def execute(self, contents: Contents) -> dict[TensorName, Result]:
        """Execute all steps; return the tensors that the answer is made of, valid until the run is left.

        Raises RequestError, which names the step.
        """
        for (tensor, shape), content in zip(self._call.shapes.inputs, contents, strict=True):
            self._values.give((tensor.name,), tensor.datatype, shape, content)
        ready = deque(index for index, waits in enumerate(self._waits) if not waits)
        while ready or self._running:
            while ready:
                self._start(ready.popleft())
            for running in self._ended():
                ready += self._finish(running)
        return self._values.results()

    def cancel(self) -> None:
        """Say that nobody waits for the answer any more."""
        with self._lock:
            self._cancelled.set()
            requests = [running.prepared.request for running in self._running]
        for request in requests:
            request.cancel()

    def __enter__(self) -> "EnsembleRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now_ns = time.monotonic_ns()
        with self._lock:
            left, self._running = self._running, []
        for running in left:
            model = self._call.graph.steps[running.index].model
            model.statistics.failed(now_ns - running.begin_ns, grpc.StatusCode.CANCELLED, had_target=False)
            self._close(running.prepared)
        self._values.clear()

    # -- steps

    def _start(self, index: int, again_since_ns: int = 0, whole: bool = False) -> None:
        """Hand a step over. `again_since_ns`: it was begun before; `whole`: by onnxruntime, whatever is compiled."""
        step, begin_ns = self._call.graph.steps[index], again_since_ns or time.monotonic_ns()
        try:
            inputs = self._values.of(step.inputs)
            kinds = {name: (value.datatype, value.shape) for name, value in inputs.items()}
            way = self._call.ways.of(index, step, kinds)
            if way.compiled is None or whole:
                prepared = prepare_frame(self._pool, way, list(inputs.values()))
            else:
                prepared = prepare_compiled(self._pool, self._values, step.model, way, inputs)
            self._submit(_Running(index, way, prepared, begin_ns))
        except PoolExhaustedError as error:
            raise self._failed(step, begin_ns, no_room(error)) from error
        except RequestError as error:
            raise self._failed(step, begin_ns, error) from error

    def _submit(self, running: _Running) -> None:
        clock, terms = self._clock, self._terms
        step = self._call.graph.steps[running.index]
        deadline_ns = clock.deadline_ns
        if deadline_ns:  # what comes after needs its time, too
            deadline_ns = max(1, deadline_ns - int(self._call.graph.remaining_us[running.index] * 1000))
        try:
            with self._lock:
                if self._cancelled.is_set():
                    gone = clock.status_of(SlotStatus.CANCELLED, time.monotonic_ns())
                    raise failure(self._name, gone, 0)
                self._running.append(running)
            running.submitted_ns = time.monotonic_ns()
            running.prepared.request.submit(
                deadline_ns, terms.priority, clock.arrival_ns, clock.limit_ns, terms.rejects_late, _max_queue(step)
            )
            if self._cancelled.is_set():  # just before the request could be
                running.prepared.request.cancel()
        except BaseException:
            self._remove(running)
            self._close(running.prepared)
            raise

    def _ended(self) -> list[_Running]:
        """Wait until a step has ended; return those that have."""
        slots, clock = self._plane.slots, self._clock
        begin_ns = time.monotonic_ns()
        lone = self._running[0].prepared.request.layout.model_id if len(self._running) == 1 else None
        spin_us = self._plane.spin_for(lone) if lone is not None else 0
        numbers = [running.prepared.request.slot for running in self._running]
        if not slots.wait_any(numbers, max(0, clock.end_ns - begin_ns) // 1000, spin_us):
            step = self._call.graph.steps[self._running[0].index]
            raise self._within(step, failure(self._name, clock.status_at_end, 0))
        if lone is not None:
            self._plane.last_wait_ns[lone] = time.monotonic_ns() - begin_ns
        return [running for running in self._running if slots.is_done(running.prepared.request.slot)]

    def _finish(self, running: _Running) -> Sequence[int]:
        """Take what a step has left; return the steps that can begin now."""
        step = self._call.graph.steps[running.index]
        finished_ns = time.monotonic_ns()
        outcome = running.prepared.request.outcome()
        self._remove(running)
        try:
            if outcome.status is SlotStatus.UNAVAILABLE and step.model.symbols and running.prepared.compiled:
                self._start(running.index, running.begin_ns, whole=True)  # the variant has been unloaded meanwhile
                return ()
            if outcome.status is not SlotStatus.OK:
                status = self._clock.status_of(outcome.status, finished_ns)
                error = failure(step.model.name, status, _max_queue(step), outcome.reason)
                raise self._failed(step, running.begin_ns, error)
            if not self._take(step, running):
                self._start(running.index, running.begin_ns, whole=True)  # there was too little room for the answer
                return ()
        finally:
            self._close(running.prepared)
        self._values.read(step.inputs)
        self._note(step, running, outcome, finished_ns)
        return self._freed(step)

    def _take(self, step: Step, running: _Running) -> bool:
        """Take a step's outputs over; False if there was too little room for them."""
        try:
            outputs = running.prepared.outputs(step.model, running.way)
        except RequestError as error:
            raise self._failed(step, running.begin_ns, error) from error
        if outputs is None:
            return False
        for name, tensor in step.outputs.items():
            output = outputs[name]
            self._values.write(tensor, step.model.outputs[name].datatype, output.shape, output.place, output.block)
        return True

    def _note(self, step: Step, running: _Running, outcome: SlotOutcome, finished_ns: int) -> None:
        model, shapes = step.model, running.way.shapes
        start_ns = self._clock.arrival_ns + round(outcome.queue_us * 1000)
        span = StepSpan(
            step,
            shapes.rows,
            running.begin_ns,
            running.submitted_ns,
            start_ns,
            start_ns + round(outcome.compute_us * 1000),
            finished_ns,
            time.monotonic_ns(),
            outcome,
        )
        self.spans.append(span)
        model.statistics.succeeded(shapes.rows, span.times, None, outcome.counts, outcome.batch_rows, outcome.leads)
        if model.symbols:
            self._watch.used(model, model.key_of(shapes.sizes))

    def _freed(self, step: Step) -> Sequence[int]:
        """Return the steps that have waited for this one alone."""
        freed = []
        for tensor in set(step.outputs.values()):
            for reader in self._call.graph.readers.get(tensor, ()):
                self._waits[reader] -= 1
                if not self._waits[reader]:
                    freed.append(reader)
        return freed

    def _remove(self, running: _Running) -> None:
        with self._lock:
            if running in self._running:
                self._running.remove(running)

    def _close(self, prepared: Prepared) -> None:
        prepared.request.close()
        for block in prepared.blocks:
            self._pool.let_go(block)

    # -- failures

    @property
    def _name(self) -> str:
        return self._call.graph.model.name

    def _failed(self, step: Step, begin_ns: int, error: RequestError) -> RequestError:
        """Count a failure in the statistics of the step's model; return what the client is told."""
        step.model.statistics.failed(time.monotonic_ns() - begin_ns, error.code, had_target=False)
        return self._within(step, error)

    def _within(self, step: Step, error: RequestError) -> RequestError:
        return RequestError(error.code, f"in ensemble '{self._name}', {step.title}: {error.message}")


def _max_queue(step: Step) -> int:
    """Return how many requests may wait for a step's model: that is for its own queue policy to say."""
    return step.model.policies.terms(0, 0, None).max_queue
