"""One request to an ensemble, from its first step to its last.

Each step is an ordinary request to a model: a slot of its own, seen by the scheduler among all others. Its inputs lie
where the steps before have left them. Steps that do not wait for each other are handed over together; the request goes
on when any of them has ended. No slot, or no memory, ends the request at once, so requests cannot wait for each other.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import TracebackType
from typing import Any

from gangway.executor.logs import OFTEN
from gangway.executor.slots import SlotCounts, SlotOutcome, SlotStatus
from gangway.server.errors import RequestError, fault, internal
from gangway.server.models.settings import Terms
from gangway.server.requests.codecs import AnswerTensor, Codec, Shape, copy_content
from gangway.server.requests.data_plane import (
    Block,
    DataPlane,
    HeldTensors,
    Place,
    PoolExhaustedError,
    Submission,
    total_bytes,
)
from gangway.server.requests.ensembles import (
    EnsembleCodec,
    Graph,
    Step,
    StepPlan,
    TensorName,
    compound_numbers,
)
from gangway.server.requests.python_codec import Answer, Envelope, Left, PythonCodec
from gangway.server.requests.regions import Content, Contents
from gangway.server.serving.inference.model_run import ModelRun, RequestClock, ShapeWatch, failure, no_room
from gangway.server.serving.inference.python import LARGE_BYTES, LeftRun, PythonResponse, tell_gone
from gangway.server.serving.pending import Pending, drive
from gangway.server.serving.slots import Slots
from gangway.server.statistics import Times

_log = logging.getLogger(__name__)


@dataclass
class EnsembleTensor:
    """A tensor. `content`: wherever it is; `place`: in the io segment, if it is there, in a block that is held."""

    datatype: str
    shape: Shape
    content: Content
    place: Place | None = None
    readers: int = 0  # steps, and the answer


class EnsembleTensors:
    """The tensors of one request to an ensemble: where they are, and how many have yet to read them.

    `wanted`: tensors that the answer is made of.
    """

    def __init__(self, plane: DataPlane, graph: Graph, wanted: tuple[TensorName, ...]) -> None:
        self._plane = plane
        self._readers: Mapping[TensorName, tuple[int, ...]] = graph.readers
        self._wanted = frozenset(wanted)
        self._tensors: dict[TensorName, EnsembleTensor] = {}

    def add(self, name: TensorName, value: EnsembleTensor) -> None:
        """Add a tensor that came with the request, or that a step has left, in a block that the caller holds."""
        value.readers = len(self._readers.get(name, ())) + (name in self._wanted)
        if value.readers:
            self._tensors[name] = value
            if value.place is not None:
                self._plane.share(value.place.block)

    def inputs_of(self, inputs: Mapping[str, TensorName]) -> dict[str, EnsembleTensor]:
        """Return the tensors of a step, by their names in its model, without those that the request has left out."""
        return {name: self._tensors[tensor] for name, tensor in inputs.items() if tensor in self._tensors}

    def copied_bytes(self, step: Step) -> int:
        """Return how many bytes are copied for a step: all of its inputs, or what a compiled model has no place of."""
        values = [self._tensors[tensor] for tensor in step.inputs.values() if tensor in self._tensors]
        return sum(len(value.content) for value in values if value.place is None or not step.model.compiled)

    def placed(self, value: EnsembleTensor) -> Place:
        """Return where in the io segment a tensor is: it is copied there, once, if it is not.

        Raises PoolExhaustedError if there is no memory, RequestError if the client's region has become too small.
        """
        if value.place is None:
            block = self._plane.take(len(value.content))
            place = Place(block, block.offset, len(value.content))
            try:
                copy_content(value.content, self._plane.view(place))
            except BaseException:
                self._plane.drop(block)
                raise
            value.place, value.content = place, self._plane.view(place)
        return value.place

    def mark_read(self, inputs: Mapping[str, TensorName]) -> None:
        """A step has ended that has read these."""
        for name in set(inputs.values()):
            value = self._tensors.get(name)
            if value is not None:
                value.readers -= 1
                if not value.readers:
                    self._drop(name)

    def results(self) -> dict[TensorName, AnswerTensor]:
        """Return the tensors that the answer is made of, as far as steps have left them. They stay until `clear`."""
        found = {}
        for name in self._wanted.intersection(self._tensors):
            value = self._tensors[name]
            assert isinstance(value.content, memoryview), "written by a step"
            found[name] = AnswerTensor(value.datatype, value.shape, value.content)
        return found

    def clear(self) -> None:
        """Let go of everything."""
        for name in list(self._tensors):
            self._drop(name)

    def _drop(self, name: TensorName) -> None:
        value = self._tensors.pop(name)
        if value.place is not None:
            self._plane.drop(value.place.block)


class StepRun(ModelRun):
    """A step that has been handed over. `block` has its outputs, and is held until these have been taken.

    `in_time`: whether it has ended before its clock's end. `answer`: what a Python model has answered, or why it has
    not.
    """

    in_time = True
    answer: Answer | PythonResponse | RequestError | None = None

    def __init__(
        self,
        index: int,
        step: Step,
        plan: StepPlan,
        codec: Codec,
        submission: Submission,
        block: Block,
        clock: RequestClock,
        begin_ns: int,
        watch: ShapeWatch,
        queue: Terms,
    ) -> None:
        super().__init__(step.model, plan.shapes, queue, clock, begin_ns, watch)
        self.index = index
        self.step = step
        self.plan = plan
        self.codec = codec
        self.submission = submission
        self.block = block

    @property
    def compound_model(self) -> int:
        """The number of the model if the step may be a member of a compound task: one row, compiled; else -1."""
        if self.codec.memory is None or self.shapes.is_empty or self.shapes.rows != 1:
            return -1
        return self.submission.layout.model_id

    def outputs(self) -> Mapping[str, EnsembleTensor] | None:
        """Return what the step has left, by the names in its model; None if there was too little room.

        Raises RequestError if it cannot be used.
        """
        if self.answer is not None:
            return self._python_outputs(self.answer)
        views, begins = self.submission.outputs, self.submission.external.outputs
        found = {}
        if self.codec.response is not None:
            for tensor, datatype, shape, size in self.codec.response.described:
                at = 0 if self.codec.is_empty else tensor.index
                found[tensor.name] = self._placed(AnswerTensor(datatype, shape, views[at][:size], begins[at]))
            return found
        try:
            parts = self.codec.parts_in(views[0])
        except ValueError as error:
            internal(f"model '{self.model.name}' has written an answer that cannot be read: {error}")
        if parts is None:
            return None
        for name, tensor in self.model.outputs.items():
            part = parts[tensor.index]
            content = views[0][part.offset : part.offset + part.size_bytes]
            shape, offset = tensor.client_shape(part.shape), begins[0] + part.offset
            found[name] = self._placed(AnswerTensor(tensor.datatype, shape, content, offset))
        return found

    def _placed(self, tensor: AnswerTensor) -> EnsembleTensor:
        """Return a tensor whose offset is that in the io segment, or None."""
        size_bytes = len(tensor.content)
        place = None if tensor.offset is None else Place(self.block, tensor.offset, size_bytes)
        return EnsembleTensor(tensor.datatype, tensor.shape, tensor.content, place)

    def _python_outputs(self, answer: Answer | PythonResponse | RequestError) -> Mapping[str, EnsembleTensor]:
        """Return the outputs of an answer in one go, or those of the response after the step was kept.

        What the model leaves out is left out here: only who needs it fails.
        """
        if isinstance(answer, RequestError):
            raise answer.without_traceback()
        found = {}
        for name, tensor in answer.outputs.items():
            begin = None if tensor.offset is None else self.submission.external.outputs[0] + tensor.offset
            found[name] = self._placed(tensor._replace(offset=begin))
        return found


class EnsembleRun:
    """One request to an ensemble. A context manager: leaving it cancels what still runs and gives everything back.

    For the loop's thread. `cancel` may be called at any time.
    """

    def __init__(
        self,
        slots: Slots,
        watch: ShapeWatch,
        codec: EnsembleCodec,
        terms: Terms,
        clock: RequestClock,
        envelope: Envelope,
        left_run: Callable[[PythonCodec, Left, Terms], LeftRun],
    ) -> None:
        """Make it. `envelope`: of the request, which all of its steps have.

        `left_run` returns what goes on with a step that an instance of a Python model has kept.
        """
        self._slots = slots
        self._envelope = envelope
        self._watch_shapes = watch
        self._plane = slots.plane
        self._codec = codec
        self._terms = terms
        self._clock = clock
        self._tensors = EnsembleTensors(slots.plane, codec.graph, codec.wanted)
        self._waits = list(codec.graph.waits)
        self._left_run = left_run
        self._left: set[LeftRun] = set()
        self._running: list[StepRun] = []
        self._done: list[StepRun] = []  # of those that run: what has ended
        self._waiting: Pending[None] | None = None  # for the first of these
        self._cancelled = False
        self.ended: list[StepRun] = []

    async def execute(self, contents: Contents) -> dict[TensorName, AnswerTensor]:
        """Execute all steps; return the tensors that the answer is made of, valid until the run is left.

        Raises RequestError, which names the step.
        """
        for (tensor, shape), content in zip(self._codec.shapes.inputs, contents, strict=True):
            self._tensors.add((tensor.name,), EnsembleTensor(tensor.datatype, shape, content))
        ready = deque(index for index, waits in enumerate(self._waits) if not waits)
        while ready or self._running:
            await self._start_all(ready)
            if not self._done:
                self._waiting = Pending()
                await self._waiting
            done, self._done = self._done, []
            for running in done:
                ready += await self._finish(running)
        return self._tensors.results()

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters of the steps' responses; of one that several have, the last step's value counts."""
        found: dict[str, Any] = {}
        for running in sorted(self.ended, key=lambda each: each.index):
            if isinstance(running.answer, Answer | PythonResponse):
                found.update(running.answer.parameters)
        return found

    def cancel(self) -> None:
        """Cancel it: the client does not wait for the answer any more."""
        self._cancelled = True
        for running in self._running:
            running.submission.cancel()
        for left in tuple(self._left):
            left.cancel()

    def __enter__(self) -> "EnsembleRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unfinished, self._running = self._running, []
        for running in unfinished:
            self._slots.forget(running.submission.slot)
            running.failed(failure(running.model.name, SlotStatus.CANCELLED, running.queue.max_queue), had_target=False)
            self._close(running)
        self.cancel()
        self._tensors.clear()

    # -- steps

    async def _start_all(self, ready: deque[int]) -> None:
        """Hand over steps that can begin now, one right after the other; empties it."""
        prepared: deque[StepRun] = deque()
        try:
            while ready:
                prepared.append(await self._prepared(ready.popleft()))
            counts = self._slots.plane.compounds
            numbers = compound_numbers(self._codec.graph, [run.compound_model for run in prepared], counts)
            while prepared:
                running = prepared.popleft()
                self._submit(running, numbers.popleft(), last=not prepared)
        finally:
            for running in prepared:
                self._close(running)

    async def _start(self, index: int, again_since_ns: int = 0, whole: bool = False) -> None:
        """Hand a step over. `again_since_ns`: it was begun before; `whole`: by onnxruntime, whatever is compiled."""
        self._submit(await self._prepared(index, again_since_ns, whole))

    async def _prepared(self, index: int, again_since_ns: int = 0, whole: bool = False) -> StepRun:
        """Return a step with its inputs. Copying large ones would hold the loop for too long."""
        if self._tensors.copied_bytes(self._codec.graph.steps[index]) > LARGE_BYTES:
            return await self._slots.aside.run(self._prepare, index, again_since_ns, whole)
        return self._prepare(index, again_since_ns, whole)

    def _prepare(self, index: int, again_since_ns: int, whole: bool) -> StepRun:
        step, begin_ns = self._codec.graph.steps[index], again_since_ns or time.monotonic_ns()
        try:
            inputs = self._tensors.inputs_of(step.inputs)
            kinds = {name: (each.datatype, each.shape) for name, each in inputs.items()}
            plan = self._codec.step_plan(index, kinds)
            codec = plan.fallback if whole and plan.fallback is not None else plan.codec
            submission, block = self._open(codec, plan.shapes.rows, list(inputs.values()))
        except PoolExhaustedError as error:
            raise self._failed(step, begin_ns, no_room(error)) from error
        except RequestError as error:
            raise self._failed(step, begin_ns, error) from error
        watch, level = self._watch_shapes, self._codec.about.get("priority", 0)
        queue = step.model.policies.terms(self._terms.timeout_us, level, None)  # its own queue policy's
        return StepRun(index, step, plan, codec, submission, block, self._clock, begin_ns, watch, queue)

    def _open(self, codec: Codec, rows: int, inputs: Sequence[EnsembleTensor]) -> tuple[Submission, Block]:
        """Return a request that is ready to be handed over, and the block of its outputs, which is held.

        A compiled model reads its inputs where they are. All others, and a request without rows, have a copy. Raises
        PoolExhaustedError and RequestError.
        """
        plane = self._plane
        contents: Contents = [value.content for value in inputs]
        if isinstance(codec, PythonCodec):
            contents = codec.with_about(contents, self._envelope)
        layout, sources = codec.layout(contents), {}
        if codec.memory is not None and not codec.is_empty:
            for tensor, value in zip(codec.inputs, inputs, strict=True):
                place = sources[tensor.index] = self._tensors.placed(value)
                expected = rows * layout.input_bytes[tensor.index]
                if place.size_bytes != expected:
                    given = f"input '{tensor.name}' for model '{codec.model.name}' has {place.size_bytes} bytes"
                    internal(f"{given}, expected {expected}")
        sizes = layout.output_sizes(rows)
        block = plane.take(total_bytes(sizes))
        try:
            submission = plane.open(layout, rows, HeldTensors(plane, sources, dict(enumerate(block.places(sizes)))))
            try:
                codec.write(submission, contents)
            except BaseException:
                submission.close()
                raise
        except BaseException:
            plane.drop(block)
            raise
        return submission, block

    def _submit(self, running: StepRun, compound: int = 0, last: bool = True) -> None:
        """Hand a step over that is prepared. `compound`, `last`: see `Submission.submit`."""
        clock, terms, submission = self._clock, self._terms, running.submission
        deadline_ns = clock.deadline_ns
        if deadline_ns:  # what comes after needs its time, too
            deadline_ns = max(1, deadline_ns - int(self._codec.graph.remaining_us[running.index] * 1000))
        try:
            if self._cancelled:
                gone = clock.status_of(SlotStatus.CANCELLED, time.monotonic_ns())
                raise failure(self._name, gone, 0)
            drive(self._watch(running, self._slots.expect(submission.slot, clock.end_ns)))
            running.hand_over(
                submission, deadline_ns, terms.priority, terms.rejects_late, by_bell=True, compound=compound, last=last
            )
        except BaseException as error:
            self._slots.forget(submission.slot)
            self._close(running)
            if isinstance(error, RequestError):
                raise self._failed(running.step, running.begin_ns, error) from error
            raise
        self._running.append(running)

    async def _watch(self, running: StepRun, ended: Pending[bool]) -> None:
        """Wait for a step, and then for the response of an instance of a Python model that has kept it."""
        running.in_time = await ended
        running.finished_ns = time.monotonic_ns()
        codec = running.codec
        if running.in_time and isinstance(codec, PythonCodec) and running.submission.status() is SlotStatus.OK:
            running.answer = await self._answer_of(running, codec)
        self._note_done(running)

    async def _answer_of(self, running: StepRun, codec: PythonCodec) -> Answer | PythonResponse | RequestError:
        try:
            found = codec.read(running.submission.outputs[0])
            if isinstance(found, Answer):
                return found
            run = self._left_run(codec, found, self._terms)
            self._left.add(run)
            if self._cancelled:
                run.cancel()
            try:
                return await run.next()
            finally:
                self._left.discard(run)
                run.cancel()
        except RequestError as error:
            return error.without_traceback()
        except Exception:
            _log.exception("a step of an ensemble failed by a fault of the server", extra=OFTEN)
            return fault()

    def _note_done(self, running: StepRun) -> None:
        if running in self._running:
            self._done.append(running)
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                self._slots.serving.loop.call_soon(waiting.settle, None)  # with all that have ended meanwhile

    async def _finish(self, running: StepRun) -> Sequence[int]:
        """Take what a step has left; return the steps that can begin now."""
        step = running.step
        if not running.in_time:
            raise self._within(step, failure(self._name, self._clock.status_at_end, 0))
        self._running.remove(running)
        outcome = running.submission.outcome()
        try:
            may_go = running.plan.fallback is not None and running.codec is running.plan.codec
            if outcome.status is SlotStatus.UNAVAILABLE and may_go:
                await self._start(running.index, running.begin_ns, whole=True)  # the variant has been unloaded
                return ()
            if outcome.status is not SlotStatus.OK:
                if isinstance(running.codec, PythonCodec):
                    tell_gone(self._slots, running.codec, running.submission)
                raise self._failed(step, running.begin_ns, running.failure(outcome))
            try:
                outputs = running.outputs()
            except RequestError as error:
                raise self._failed(step, running.begin_ns, error) from error
            if outputs is None:  # it will have more room
                await self._start(running.index, running.begin_ns, whole=running.codec is running.plan.fallback)
                return ()
            for name, tensor in step.outputs.items():
                if name in outputs:
                    self._tensors.add(tensor, outputs[name])
        finally:
            self._close(running)
        self._tensors.mark_read(step.inputs)
        running.end_ns = time.monotonic_ns()
        running.succeeded(outcome)
        self.ended.append(running)
        return self._freed(step)

    def _freed(self, step: Step) -> Sequence[int]:
        """Return the steps that have waited for this one alone."""
        freed = []
        for tensor in set(step.outputs.values()):
            for reader in self._codec.graph.readers.get(tensor, ()):
                self._waits[reader] -= 1
                if not self._waits[reader]:
                    freed.append(reader)
        return freed

    def _close(self, running: StepRun) -> None:
        running.submission.close()
        self._plane.drop(running.block)

    # -- failures

    @property
    def _name(self) -> str:
        return self._codec.graph.model.name

    def _failed(self, step: Step, begin_ns: int, error: RequestError) -> RequestError:
        """Count a failure in the statistics of the step's model; return what the client is told."""
        step.model.statistics.failed(time.monotonic_ns() - begin_ns, error.code, had_target=False)
        return self._within(step, error)

    def _within(self, step: Step, error: RequestError) -> RequestError:
        return RequestError(error.code, f"in ensemble '{self._name}', {step.title}: {error.message}")


def times_of(steps: Sequence[StepRun], total_ns: int) -> Times:
    """Return what Triton counts of an ensemble: the sums over its steps, and no queue, since it has none."""
    each = [step.times_of(step.outcome) for step in steps if step.outcome is not None]
    return Times(
        total=total_ns,
        queue=0,
        compute_input=sum(times.compute_input for times in each),
        compute_infer=sum(times.compute_infer for times in each),
        compute_output=sum(times.compute_output for times in each),
    )


def outcome_of(steps: Sequence[StepRun], arrival_ns: int) -> SlotOutcome:
    """Return how the whole went: from the first task of any step to the last one of any, steps' counts together."""
    start_ns, end_ns = min(step.start_ns for step in steps), max(step.computed_ns for step in steps)
    outcomes = _outcomes(steps)
    return SlotOutcome(
        SlotStatus.OK,
        queue_us=(start_ns - arrival_ns) / 1e3,
        compute_us=(end_ns - start_ns) / 1e3,
        ranks=max(outcome.ranks for outcome in outcomes),
        attempts=max(outcome.attempts for outcome in outcomes),
        counts=reduce(_both, (outcome.counts for outcome in outcomes)),
    )


def count_inner(graph: Graph, steps: Sequence[StepRun]) -> None:
    """Count the request in the statistics of the ensembles that are steps."""
    for place, model in enumerate(graph.inner):
        own = [run for run in steps if place in run.step.ensembles]
        if own:  # else no output of it was asked for
            total_ns = max(run.end_ns for run in own) - min(run.begin_ns for run in own)
            counts = reduce(_both, (outcome.counts for outcome in _outcomes(own)))
            model.statistics.succeeded(
                max(run.shapes.counted_rows for run in own), times_of(own, total_ns), None, counts
            )


def _outcomes(steps: Sequence[StepRun]) -> list[SlotOutcome]:
    return [step.outcome for step in steps if step.outcome is not None]


def _both(one: SlotCounts, other: SlotCounts) -> SlotCounts:
    return SlotCounts(
        one.blocks + other.blocks,
        one.conflicts + other.conflicts,
        one.preemptions + other.preemptions,
        one.versions | other.versions,
        one.bf16 | other.bf16,
    )
