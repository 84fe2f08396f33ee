"""One request to an ensemble, from its first step to its last.

Each step is an ordinary request to a model: a slot of its own, seen by the scheduler among all others. Its inputs lie
where the steps before have left them. Steps that do not wait for each other are handed over together; the request goes
on when any of them has ended. No slot, or no memory, ends the request at once, so requests cannot wait for each other.
What follows a decoupled step runs for each of its responses (`iterations.py`).
"""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, TypeAlias

from gangway.base.logs import OFTEN
from gangway.executor.slots import SlotStatus
from gangway.python_backend.messages import Described
from gangway.server.errors import RequestError, fault
from gangway.server.models.settings import Terms
from gangway.server.models.tensors import Shapes
from gangway.server.requests.data_plane import PoolExhaustedError
from gangway.server.requests.ensemble_graphs import EnsembleStep, compound_numbers
from gangway.server.requests.ensembles import EnsembleCodec, fitted
from gangway.server.requests.python_codec import Envelope, PythonAnswer, PythonCodec, PythonResponse, values_of
from gangway.server.requests.regions import Contents
from gangway.server.serving.inference.ensemble_counts import EndedStep
from gangway.server.serving.inference.ensemble_tensors import EnsembleTensor, EnsembleTensors
from gangway.server.serving.inference.instance_turns import StepTurn
from gangway.server.serving.inference.iterations import Iteration, ReadyStep
from gangway.server.serving.inference.model_run import ModelRun, RequestClock, ShapeWatch, failure, no_room
from gangway.server.serving.inference.python import (
    LARGE_BYTES,
    InnerCall,
    KeptRun,
    Origin,
    header_of,
    parsed_response,
    tell_gone,
)
from gangway.server.serving.inference.step_run import OpenStep, Outputs, StepRun, open_step, outputs_of
from gangway.server.serving.pending import Pending, drive
from gangway.server.serving.slots import Slots

_log = logging.getLogger(__name__)

MOST_KEPT: Final = 1000  # steps that have ended, for the trace and the times of the whole


class ScheduledStep(StepRun):
    """A step in an iteration. `responses`: of a decoupled one, to be taken; `is_over`: no further one follows."""

    is_over = False
    _room: Pending[None] | None = None
    _stops = False

    def __init__(
        self,
        ready: ReadyStep,
        step: EnsembleStep,
        shapes: Shapes,
        opened: OpenStep,
        clock: RequestClock,
        begin_ns: int,
        watch: ShapeWatch,
        queue: Terms,
    ) -> None:
        super().__init__(step, shapes, opened, clock, begin_ns, watch, queue)
        self.iteration, self.index = ready
        self.responses: deque[PythonResponse] = deque()

    async def wait_for_room(self) -> None:
        """Return when a further response may be taken: the ones before have been answered but for a few."""
        while self._has_enough:
            self._room = Pending()
            await self._room

    def let_on(self) -> None:
        """See whether there is room."""
        if self._room is not None and not self._has_enough:
            room, self._room = self._room, None
            room.settle(None)

    def stop(self) -> None:
        """Wait for no room: nobody wants further responses."""
        self._stops = True
        self.let_on()

    @property
    def _has_enough(self) -> bool:
        open_count = len(self.iteration.inner) + len(self.responses)
        return open_count >= self.iteration.most_open and not self._stops


@dataclass(eq=False)
class SequenceStep:
    """A step whose model has sequences: a request of its own, which waits for its turn in the sequence."""

    iteration: Iteration
    index: int
    step: EnsembleStep
    call: InnerCall
    result: bytes | RequestError | None = None


Running: TypeAlias = ScheduledStep | SequenceStep


class EnsembleRun:
    """One request to an ensemble. A context manager: leaving it cancels what still runs and gives everything back.

    For the loop's thread. `cancel` may be called at any time. `ended`: steps that have ended well, the first MOST_KEPT.
    """

    def __init__(
        self, slots: Slots, watch: ShapeWatch, codec: EnsembleCodec, terms: Terms, envelope: Envelope, origin: Origin
    ) -> None:
        """Make it. `envelope`: of the request, which all of its steps have.

        `origin`: of the request, and of what steps are requests of their own.
        """
        self._slots = slots
        self._envelope = envelope
        self._watch_shapes = watch
        self._plane = slots.plane
        self._codec = codec
        self._terms = terms
        self._clock = origin.clock
        self._root = Iteration(codec.graph, EnsembleTensors(slots.plane, codec.graph, frozenset(codec.wanted)))
        self._origin = origin
        self._kept: dict[ScheduledStep, KeptRun] = {}
        self._ready: deque[ReadyStep] = deque()
        self._running: list[Running] = []
        self._done: list[Running] = []  # of those that run: what has ended, or has a response
        self._waiting: Pending[None] | None = None  # for the first of these
        self._cancelled = False
        self.ended: list[EndedStep] = []

    def begin(self, contents: Contents) -> None:
        """Begin with the inputs of the request."""
        for (tensor, shape), content in zip(self._codec.shapes.inputs, contents, strict=True):
            self._root.tensors.add((tensor.name,), EnsembleTensor(tensor.datatype, shape, content))
        self._ready += self._root.ready()

    async def next(self) -> Iteration | None:
        """Execute steps until there is an answer, which is made of what they have left; None: there is no further one.

        The answer's `answered` is to be called then. Raises RequestError, which names the step.
        """
        while True:
            await self._start_all()
            found = self._root.next_answer()
            if found is not None or self._root.is_over:
                return found
            for running in self._running if self._codec.graph.streams else ():
                if isinstance(running, ScheduledStep):
                    running.let_on()
            if not self._done:
                self._waiting = Pending()
                await self._waiting
            done, self._done = self._done, []
            for running in done:
                try:
                    self._ready += await self._go_on(running)
                except RequestError as error:
                    self._fail(ReadyStep(running.iteration, running.index), error)

    def cancel(self) -> None:
        """Cancel it: the client does not wait for the answer any more."""
        self._cancelled = True
        for running in tuple(self._running):
            if isinstance(running, ScheduledStep):
                running.submission.cancel()
                running.stop()
                if (turn := running.turn) is not None and turn.waits:
                    turn.end()
                    self._begin_turn(running, turn)
            else:
                running.call.end()
        for kept in tuple(self._kept.values()):
            kept.cancel()

    def __enter__(self) -> "EnsembleRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        unfinished, self._running = self._running, []
        for running in unfinished:
            if isinstance(running, ScheduledStep):
                if running.slot is not None:
                    self._slots.forget(running.slot)
                cancelled = failure(running.model.name, SlotStatus.CANCELLED, running.queue.max_queue)
                running.failed(cancelled, had_target=False)
                running.close(self._plane)
                running.end_turn()
        self._root.clear()

    # -- steps

    async def _start_all(self) -> None:
        """Hand over steps that can begin now, one right after the other."""
        while self._ready:
            together = [self._ready.popleft()]
            iteration, index = together[0]
            while self._ready and self._ready[0].iteration is iteration:
                together.append(self._ready.popleft())
            prepared: deque[ScheduledStep] = deque()
            try:
                for each in together:
                    index = each.place
                    if self._codec.graph.steps[index].model.sequence is not None:
                        self._ask(each)
                    else:
                        prepared.append(await self._prepared(each))
                counts = self._slots.plane.compounds
                numbers = compound_numbers(self._codec.graph, [run.compound_model for run in prepared], counts)
                while prepared:
                    running = prepared.popleft()
                    index = running.index
                    self._submit(running, numbers.popleft(), last=not prepared)
            except RequestError as error:
                self._fail(ReadyStep(iteration, index), error)
            finally:
                for running in prepared:
                    running.close(self._plane)

    async def _start(self, ready: ReadyStep, again_since_ns: int = 0, whole: bool = False) -> None:
        """Hand a step over. `again_since_ns`: it was begun before; `whole`: by onnxruntime, whatever is compiled."""
        self._submit(await self._prepared(ready, again_since_ns, whole))

    async def _prepared(self, ready: ReadyStep, again_since_ns: int = 0, whole: bool = False) -> ScheduledStep:
        """Return a step with its inputs. Copying large ones would hold the loop for too long."""
        if ready.iteration.tensors.copied_bytes(self._codec.graph.steps[ready.place]) > LARGE_BYTES:
            return await self._slots.aside.run(self._prepare, ready, again_since_ns, whole)
        return self._prepare(ready, again_since_ns, whole)

    def _prepare(self, ready: ReadyStep, again_since_ns: int, whole: bool) -> ScheduledStep:
        step, begin_ns = self._codec.graph.steps[ready.place], again_since_ns or time.monotonic_ns()
        tensors = ready.iteration.tensors
        try:
            inputs = tensors.inputs_of(step.inputs)
            kinds = {name: (each.datatype, each.shape) for name, each in inputs.items()}
            plan = self._codec.step_plan(ready.place, kinds)
            codec, fallback = plan.codec, plan.fallback
            if whole and fallback is not None:
                codec, fallback = fallback, None
            rows, values = plan.shapes.rows, list(inputs.values())
            opened = open_step(self._plane, codec, fallback, rows, values, tensors, self._envelope)
        except PoolExhaustedError as error:
            raise self._failed(step, begin_ns, no_room(error)) from error
        except RequestError as error:
            raise self._failed(step, begin_ns, error) from error
        watch, level = self._watch_shapes, self._codec.about.get("priority", 0)
        queue = step.model.policies.terms(self._terms.timeout_us, level, None)  # its own queue policy's
        return ScheduledStep(ready, step, plan.shapes, opened, self._clock, begin_ns, watch, queue)

    def _submit(self, running: ScheduledStep, compound: int = 0, last: bool = True) -> None:
        """Hand a step over that is prepared, or have it wait for its turn. `compound`, `last`: `Submission.submit`."""
        if running.iteration.outer is not None and (most := running.most_apart):
            running.submitted_ns = time.monotonic_ns()
            self._running.append(running)
            clock, begin = running.clock, partial(self._begin_turn, running)
            urgency = self._terms.priority, clock.deadline_ns or math.inf, clock.arrival_ns
            running.turn = self._slots.turns.take(running.model.model_id, most, urgency, begin)
        else:
            self._hand_over(running, compound, last)
            self._running.append(running)

    def _begin_turn(self, running: ScheduledStep, turn: StepTurn) -> None:
        """Hand a step over that has waited for its turn: that is part of its time in the queue."""
        running.turn, begin_ns, failed = turn, running.submitted_ns, None
        try:
            self._hand_over(running)
        except RequestError as error:
            failed = error.without_traceback()
        except Exception:  # it concerns none of those whose turn has ended
            _log.exception("a step of an ensemble failed by a fault of the server", extra=OFTEN)
            failed = fault()
        running.submitted_ns = begin_ns
        if failed is not None:
            self._running.remove(running)
            turn.end()
            self._fail(ReadyStep(running.iteration, running.index), failed)
            self._wake()

    def _hand_over(self, running: ScheduledStep, compound: int = 0, last: bool = True) -> None:
        clock, terms, submission = self._clock_of(running.index), self._terms, running.submission
        try:
            if self._cancelled:
                gone = clock.status_of(SlotStatus.CANCELLED, time.monotonic_ns())
                raise failure(self._name, gone, 0)
            drive(self._watch(running, self._slots.expect(submission.slot, clock.end_ns)))
            running.hand_over(
                submission, clock.deadline_ns, terms.priority, terms.rejects_late, compound=compound, last=last
            )
        except BaseException as error:
            self._slots.forget(submission.slot)
            running.close(self._plane)
            if isinstance(error, RequestError):
                raise self._failed(running.step, running.begin_ns, error) from error
            raise

    def _clock_of(self, index: int) -> RequestClock:
        """Return the clock of a step: what comes after it needs its time, too."""
        deadline_ns = self._clock.deadline_ns
        if not deadline_ns:
            return self._clock
        after_ns = int(self._codec.graph.remaining_us[index] * 1000)
        return self._clock._replace(deadline_ns=max(1, deadline_ns - after_ns))

    async def _watch(self, running: ScheduledStep, ended: Pending[bool]) -> None:
        """Wait for a step, and then for the responses of an instance of a Python model that has kept it."""
        running.in_time = await ended
        running.finished_ns = time.monotonic_ns()
        codec = running.codec
        if running.in_time and isinstance(codec, PythonCodec) and running.submission.status() is SlotStatus.OK:
            try:
                await self._take_answers(running, codec)
            except RequestError as error:
                running.answer = error.without_traceback()
            except Exception:
                _log.exception("a step of an ensemble failed by a fault of the server", extra=OFTEN)
                running.answer = fault()
        running.is_over = True
        running.end_turn()
        self._note_done(running)

    async def _take_answers(self, running: ScheduledStep, codec: PythonCodec) -> None:
        """Take what a Python model has answered. Raises RequestError for an error of it, the first one of several."""
        found = codec.read(running.submission.outputs[0])
        if isinstance(found, PythonAnswer):
            running.answer = found
            return
        running.leave_slot(self._plane)
        run = self._kept[running] = KeptRun(self._slots, codec, found, self._origin, self._terms, running.refused_ns)
        if self._cancelled:
            run.cancel()
        try:
            while running.model.is_decoupled:
                response = await run.next()
                if response.error is not None:
                    raise response.error
                if not (response.is_final and response.is_empty):
                    running.responses.append(response)
                    self._note_done(running)
                if response.is_final:
                    return
                await running.wait_for_room()
            running.answer = await run.next()
        finally:
            del self._kept[running]
            running.answered(run.outcome_of(running.ended()))
            run.cancel()

    def _note_done(self, running: Running) -> None:
        if running in self._running and running not in self._done:
            self._done.append(running)
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._slots.serving.turn.at_end(partial(waiting.settle, None))  # with all that have ended meanwhile

    async def _go_on(self, running: Running) -> Sequence[ReadyStep]:
        """Take what a step has left; return the steps that can begin now. Raises RequestError."""
        if isinstance(running, SequenceStep):
            return await self._finish_asked(running)
        while running.responses:
            self._follow(running, running.responses.popleft())
        return await self._finish(running) if running.is_over else ()

    def _follow(self, running: ScheduledStep, response: PythonAnswer | PythonResponse) -> None:
        """Let steps begin that follow from a response of a decoupled step."""
        inner = running.iteration.follow(isinstance(response, PythonAnswer) or response.is_final)
        _take(running.step, inner, running.python_outputs(response))
        inner.parameters[running.index] = response.parameters
        self._ready += inner.ready()

    async def _finish(self, running: ScheduledStep) -> Sequence[ReadyStep]:
        """Take the answer of a step that has ended; return the steps that can begin now. Raises RequestError."""
        step, iteration, answer = running.step, running.iteration, running.answer
        ready = ReadyStep(iteration, running.index)
        if not running.in_time:
            raise self._within(step, failure(self._name, self._clock.status_at_end, 0))
        self._running.remove(running)
        outcome = running.ended()
        try:
            if outcome.status is SlotStatus.UNAVAILABLE and running.fallback is not None:
                await self._start(ready, running.begin_ns, whole=True)  # the variant has been unloaded
                return ()
            if outcome.status is not SlotStatus.OK:
                if isinstance(running.codec, PythonCodec):
                    tell_gone(self._slots, running.codec, running.submission)
                raise self._failed(step, running.begin_ns, running.failure(outcome))
            if isinstance(answer, RequestError):
                raise self._failed(step, running.begin_ns, answer.without_traceback())
            if not running.model.is_decoupled:
                try:
                    outputs = running.outputs()
                except RequestError as error:
                    raise self._failed(step, running.begin_ns, error) from error
                if outputs is None:  # it will have more room
                    await self._start(ready, running.begin_ns, whole=running.fallback is None)
                    return ()
                _take(step, iteration, outputs)
            elif answer is not None:
                self._follow(running, answer)
        finally:
            running.close(self._plane)
        iteration.tensors.mark_read(step.inputs)
        running.end_ns = time.monotonic_ns()
        running.succeeded(outcome)
        running.answer = None  # whose tensors others hold
        self._note_ended(step, running)
        if running.model.is_decoupled:
            iteration.is_streaming = False
            return ()
        if answer is not None:
            iteration.parameters[running.index] = answer.parameters
        return tuple(iteration.end(running.index))

    def _note_ended(self, step: EnsembleStep, run: ModelRun) -> None:
        if len(self.ended) < MOST_KEPT:
            self.ended.append(EndedStep(step, run))

    # -- steps that are requests of their own

    def _ask(self, ready: ReadyStep) -> None:
        """Have a step executed whose model has sequences. Raises RequestError."""
        iteration, index = ready
        step, about, begin_ns = self._codec.graph.steps[index], self._codec.about, time.monotonic_ns()
        described: list[Described] = []
        raws: list[memoryview] = []
        for name, value in iteration.tensors.inputs_of(step.inputs).items():
            shape = fitted(value.shape, step.model.inputs[name], step.model.least_rows)
            content = value.content
            if not isinstance(content, bytes | memoryview):
                try:
                    content = self._plane.view(iteration.tensors.placed(value))
                except PoolExhaustedError as error:
                    raise self._failed(step, begin_ns, no_room(error)) from error
            described.append((name, value.datatype, shape, len(content)))
            raws.append(memoryview(content))
        asked = {
            "model": step.model.name,
            "version": step.model.version,
            "inputs": described,
            "wanted": list(step.outputs),
            "parameters": {**about.get("parameters", {}), **self._envelope.headers},
            "correlation_id": about.get("correlation_id", 0),
            "flags": about.get("flags", 0),
            "timeout": about.get("timeout", 0),
            "priority": about.get("priority", 0),
        }
        call = InnerCall(self._clock_of(index), self._origin.chain, partial(self._asked, ready), None, is_step=True)
        self._running.append(SequenceStep(iteration, index, step, call))
        self._origin.begin(header_of(asked), self._envelope.request_id, raws, call, begin_ns)

    def _asked(self, ready: ReadyStep, call: InnerCall, result: bytes | RequestError) -> None:
        for running in self._running:
            if isinstance(running, SequenceStep) and running.call is call:
                running.result = result if isinstance(result, bytes) else result.without_traceback()
                self._note_done(running)
                return

    async def _finish_asked(self, running: SequenceStep) -> Sequence[ReadyStep]:
        """Take the answer of a step; return the steps that can begin now. Raises RequestError."""
        self._running.remove(running)
        step, iteration, result = running.step, running.iteration, running.result
        assert result is not None, "answered"
        if isinstance(result, RequestError):
            raise self._within(step, result)
        response = await parsed_response(self._slots, result)
        _take(step, iteration, outputs_of(response))
        iteration.parameters[running.index] = values_of(response.parameters)
        iteration.tensors.mark_read(step.inputs)
        if running.call.run is not None:
            self._note_ended(step, running.call.run)
        return tuple(iteration.end(running.index))

    # -- failures

    def _fail(self, ready: ReadyStep, error: RequestError) -> None:
        """Note an error of a step. What precedes it is still answered; nothing more is begun that would follow it."""
        ready.iteration.fail(ready.place, error)
        outer = ready.iteration.outer
        while outer is not None:
            for running in self._running:
                if isinstance(running, ScheduledStep) and running.iteration is outer and running.index == outer.stream:
                    running.stop()
                    if (kept := self._kept.get(running)) is not None:
                        kept.cancel()
            outer = outer.outer

    @property
    def _name(self) -> str:
        return self._codec.graph.model.name

    def _failed(self, step: EnsembleStep, begin_ns: int, error: RequestError) -> RequestError:
        """Count a failure in the statistics of the step's model; return what the client is told."""
        step.model.statistics.failed(time.monotonic_ns() - begin_ns, error.code, had_target=False)
        return self._within(step, error)

    def _within(self, step: EnsembleStep, error: RequestError) -> RequestError:
        return RequestError(error.code, f"in ensemble '{self._name}', {step.title}: {error.message}")


def _take(step: EnsembleStep, iteration: Iteration, outputs: Outputs) -> None:
    """Take the tensors that a step has left. One that is missing fails only those who need it."""
    for name, tensor in step.outputs.items():
        if name in outputs:
            iteration.tensors.add(tensor, outputs[name])
