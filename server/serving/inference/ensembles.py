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
from typing import NamedTuple

from gangway.artifact.format import ALIGNMENT_BYTES
from gangway.executor.logs import OFTEN
from gangway.executor.slots import SlotCounts, SlotOutcome, SlotStatus, places_bytes
from gangway.protos import StatusCode
from gangway.server.errors import RequestError, fault
from gangway.server.models.served import ServedModel
from gangway.server.models.settings import Terms
from gangway.server.requests.codecs import EMPTY_FRAME_BYTES, FrameCodec, copy_content, forget_answer
from gangway.server.requests.data_plane import DataPlane, Layout, Placement, PoolExhaustedError, Submission, TailLayout
from gangway.server.requests.ensembles import (
    EnsembleCodec,
    Graph,
    Result,
    Shape,
    Step,
    StepCodec,
    TensorName,
    compound_numbers,
)
from gangway.server.requests.python_codec import Answer, Left, Outputs, PythonCodec
from gangway.server.requests.regions import Content, Contents
from gangway.server.serving.inference.model_run import ModelRun, RequestClock, ShapeWatch, failure, no_room
from gangway.server.serving.inference.python import LARGE_BYTES, LeftRun, tell_gone
from gangway.server.serving.pending import Pending, drive
from gangway.server.serving.slots import Slots
from gangway.server.statistics import Times

_log = logging.getLogger(__name__)

Place = tuple[int, int]  # offset from the segment's start, a multiple of 64, and size in bytes


class Block:
    """Memory at `offset` of the io segment that several requests use: one writes its outputs where the next ones read.

    It lives as long as it has holders: requests until the executor has let go of them, and steps that have yet to
    read it. `holders` changes under the data plane's lock only.
    """

    __slots__ = ("holders", "offset")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.holders = 1  # its maker


class SharedSubmission(Submission):
    """A request whose tensors lie in blocks that others use, too."""

    def __init__(
        self, plane: DataPlane, layout: Layout, rows: int, slot: int, placement: Placement, blocks: Sequence[Block]
    ) -> None:
        super().__init__(plane, layout, rows, slot, 0, placement)  # places are counted from the segment's start
        self._blocks = blocks

    def release(self) -> bool:
        """Free the slot and let go of the blocks, unless the executor still owns them."""
        if not self._plane.give_slot(self._slot):
            return False
        for block in self._blocks:
            _release(self._plane, block)
        return True


class SharedMemoryPool:
    """Makes blocks, and requests that lie in them. Safe for threads."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def take(self, size_bytes: int) -> Block:
        """Return a new block, which the caller holds. Raises PoolExhaustedError, at once."""
        with self._plane.lock:
            return Block(self._plane.allocate(size_bytes))

    def hold(self, block: Block) -> None:
        """Add a holder to a block that has one."""
        with self._plane.lock:
            block.holders += 1

    def release(self, block: Block) -> None:
        """Hold it no more."""
        with self._plane.lock:
            _release(self._plane, block)

    def view(self, place: Place) -> memoryview:
        """Return the memory at a place."""
        offset, size_bytes = place
        return self._plane.io.view[offset : offset + size_bytes]

    def open(
        self, layout: Layout, rows: int, inputs: Sequence[Place], outputs: Sequence[Place], blocks: Sequence[Block]
    ) -> SharedSubmission:
        """Take a slot for a request whose tensors lie in these blocks, which it holds until it is over.

        Raises PoolExhaustedError, at once.
        """
        list_bytes = places_bytes(len(inputs), len(outputs))
        with self._plane.lock:
            slot = self._plane.take_slot()
            try:
                own = [Block(self._plane.allocate(list_bytes))] if list_bytes else []
            except PoolExhaustedError:
                self._plane.give_slot(slot)
                raise
            for block in blocks:
                block.holders += 1
            placement = Placement(tuple(inputs), tuple(outputs), own[0].offset if own else 0, 0)
            return SharedSubmission(self._plane, layout, rows, slot, placement, [*blocks, *own])


def places_within(block: Block, sizes_bytes: Sequence[int]) -> list[Place]:
    """Return places for tensors of these sizes, one after the other, in a block of `total_bytes` of them."""
    places, position = [], block.offset
    for size_bytes in sizes_bytes:
        places.append((position, size_bytes))
        position += _aligned(size_bytes)
    return places


def total_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the size of a block for tensors of these sizes."""
    return sum(map(_aligned, sizes_bytes))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _release(plane: DataPlane, block: Block) -> None:
    block.holders -= 1
    if block.holders == 0:
        plane.heap.free(block.offset)


@dataclass
class EnsembleTensor:
    """A tensor. `content`: wherever it is; `place`: in the io segment, if it is there, in a block that is held."""

    datatype: str
    shape: Shape
    content: Content
    readers: int  # steps, and the answer
    place: Place | None = None
    block: Block | None = None


class EnsembleTensors:
    """The tensors of one request to an ensemble: where they are, and how many have yet to read them.

    `wanted`: tensors that the answer is made of.
    """

    def __init__(self, pool: SharedMemoryPool, graph: Graph, wanted: tuple[TensorName, ...]) -> None:
        self._pool = pool
        self._readers: Mapping[TensorName, tuple[int, ...]] = graph.readers
        self._wanted = frozenset(wanted)
        self._tensors: dict[TensorName, EnsembleTensor] = {}

    def add_input(self, name: TensorName, datatype: str, shape: Shape, content: Content) -> None:
        """Add a tensor that came with the request."""
        self._add(name, EnsembleTensor(datatype, shape, content, 0))

    def add_output(self, name: TensorName, datatype: str, shape: Shape, place: Place, block: Block) -> None:
        """Add a tensor that a step has left at a place in a block, which the caller holds."""
        value = EnsembleTensor(datatype, shape, self._pool.view(place), 0, place, block)
        if self._add(name, value):
            self._pool.hold(block)

    def _add(self, name: TensorName, value: EnsembleTensor) -> bool:
        value.readers = len(self._readers.get(name, ())) + (name in self._wanted)
        if value.readers:
            self._tensors[name] = value
        return value.readers > 0

    def inputs_of(self, inputs: Mapping[str, TensorName]) -> dict[str, EnsembleTensor]:
        """Return the tensors of a step, by their names in its model, without those that the request has left out."""
        return {name: self._tensors[tensor] for name, tensor in inputs.items() if tensor in self._tensors}

    def copied_bytes(self, step: Step) -> int:
        """Return how many bytes are copied for a step: all of its inputs, or what a compiled model has no place of."""
        values = [self._tensors[tensor] for tensor in step.inputs.values() if tensor in self._tensors]
        return sum(len(value.content) for value in values if value.place is None or not step.model.compiled)

    def placed(self, value: EnsembleTensor) -> tuple[Place, Block]:
        """Return where in the io segment a tensor is: it is copied there, once, if it is not.

        Raises PoolExhaustedError if there is no memory, RequestError if the client's region has become too small.
        """
        if value.place is None or value.block is None:
            block = self._pool.take(len(value.content))
            value.block = block  # from here on it is given back, whatever happens
            place = block.offset, len(value.content)
            view = self._pool.view(place)
            copy_content(value.content, view)
            value.place, value.content = place, view
        return value.place, value.block

    def mark_read(self, inputs: Mapping[str, TensorName]) -> None:
        """A step has ended that has read these."""
        for name in set(inputs.values()):
            value = self._tensors.get(name)
            if value is not None:
                value.readers -= 1
                if not value.readers:
                    self._drop(name)

    def results(self) -> dict[TensorName, tuple[Shape, memoryview]]:
        """Return the tensors that the answer is made of, which stay until `clear`."""
        found = {}
        for name in self._wanted:
            value = self._tensors[name]
            assert isinstance(value.content, memoryview), "written by a step"
            found[name] = value.shape, value.content
        return found

    def clear(self) -> None:
        """Let go of everything."""
        for name in list(self._tensors):
            self._drop(name)

    def _drop(self, name: TensorName) -> None:
        value = self._tensors.pop(name)
        if value.block is not None:
            self._pool.release(value.block)


class Output(NamedTuple):
    """A tensor that a step has left."""

    shape: Shape
    place: Place
    block: Block


@dataclass(frozen=True)
class Prepared:
    """A request that is ready to be handed over. Its owner holds `blocks`; the last one has the outputs."""

    submission: SharedSubmission
    blocks: Sequence[Block]
    places: Sequence[Place]  # of the outputs: of each, or of the frame of all
    compiled: bool
    framed: bool

    def outputs(self, model: ServedModel, codec: StepCodec) -> Mapping[str, Output] | None:
        """Return what a request has left that is DONE, by name; None if there was too little room.

        Raises RequestError if it cannot be used.
        """
        block = self.blocks[-1]
        if not self.framed:
            return {
                name: Output(codec.output_shapes[name], self.places[tensor.index], block)
                for name, tensor in model.outputs.items()
            }
        assert isinstance(codec.frame, FrameCodec), "Python models' answers are taken in another way"
        (view,), ((begin, _),) = self.submission.outputs, self.places
        try:
            parts = codec.frame.parts_in(view)
        except ValueError as error:
            message = f"model '{model.name}' has written an answer that cannot be read: {error}"
            raise RequestError(StatusCode.INTERNAL, message) from error
        if parts is None:
            return None
        found = {}
        for name, tensor in model.outputs.items():
            part = parts[tensor.index]
            found[name] = Output(tensor.client_shape(part.shape), (begin + part.offset, part.size_bytes), block)
        return found


def prepare_compiled(
    pool: SharedMemoryPool,
    values: EnsembleTensors,
    model: ServedModel,
    codec: StepCodec,
    inputs: Mapping[str, EnsembleTensor],
) -> Prepared:
    """Prepare a step of a compiled model: it reads its inputs where they are, and has a block for its outputs, which a
    tail writes as a frame.

    A step without rows computes a row of zeros, and leaves outputs without contents. Raises PoolExhaustedError and
    RequestError.
    """
    assert codec.compiled is not None, "so the caller says"
    memory, rows, is_empty = codec.compiled.layout, codec.shapes.rows, codec.shapes.is_empty
    layout: Layout = memory
    sizes = [rows * row_bytes for row_bytes in memory.output_bytes]
    if codec.compiled.tail:
        sizes = [EMPTY_FRAME_BYTES if is_empty else codec.frame.answer_size.size_bytes]
        layout = TailLayout(memory.model_id, memory.input_bytes, sizes[0])
    places: list[Place] = [(0, 0)] * len(memory.input_bytes)
    blocks = []
    for name, value in inputs.items() if not is_empty else ():
        index = model.inputs[name].index
        places[index], block = values.placed(value)
        blocks.append(block)
        expected = rows * memory.input_bytes[index]
        if places[index][1] != expected:
            message = f"input '{name}' for model '{model.name}' has {places[index][1]} bytes, expected {expected}"
            raise RequestError(StatusCode.INTERNAL, message)
    taken = [pool.take(total_bytes(sizes))]
    try:
        outputs = places_within(taken[-1], sizes)
        if is_empty:
            taken.insert(0, pool.take(total_bytes(memory.input_bytes)))
            places = places_within(taken[0], memory.input_bytes)
            for place in places:
                pool.view(place)[:] = bytes(place[1])
        submission = pool.open(layout, rows, places, outputs, [*blocks, *taken])
        if codec.compiled.tail:
            forget_answer(submission)
    except BaseException:
        for block in taken:
            pool.release(block)
        raise
    left = [(taken[-1].offset, 0)] * len(memory.output_bytes) if is_empty else outputs
    return Prepared(submission, tuple(taken), left, compiled=True, framed=codec.compiled.tail and not is_empty)


def prepare_frame(pool: SharedMemoryPool, codec: StepCodec, inputs: Sequence[EnsembleTensor]) -> Prepared:
    """Prepare a step for onnxruntime: its inputs are copied into one frame, which has to be in one piece.

    Raises PoolExhaustedError, and RequestError.
    """
    contents: Contents = [value.content for value in inputs]
    if isinstance(codec.frame, PythonCodec):
        contents = codec.frame.with_about(contents, b"")
    layout = codec.frame.layout(contents)
    taken: list[Block] = []
    try:
        places = []
        for size_bytes in layout.frame_bytes:
            taken.append(pool.take(size_bytes))
            places.append((taken[-1].offset, size_bytes))
        submission = pool.open(layout, codec.shapes.rows, places[:1], places[1:], taken)
        try:
            codec.frame.write(submission, contents)
        except BaseException:
            submission.close()
            raise
    except BaseException:
        for block in taken:
            pool.release(block)
        raise
    return Prepared(submission, tuple(taken), places[1:], compiled=False, framed=True)


class StepRun(ModelRun):
    """A step that has been handed over. The blocks of `prepared` are held until its outputs have been taken.

    `in_time`: whether it has ended before its clock's end. `left`: what an instance of a Python model has answered that
    had kept the step, or why it has not.
    """

    in_time = True
    left: Outputs | RequestError | None = None

    def __init__(
        self,
        index: int,
        step: Step,
        codec: StepCodec,
        prepared: Prepared,
        clock: RequestClock,
        begin_ns: int,
        watch: ShapeWatch,
        timeout_us: int,
    ) -> None:
        queue = step.model.policies.terms(timeout_us, 0, None)  # that is for its own queue policy to say
        super().__init__(step.model, codec.shapes, queue, clock, begin_ns, watch)
        self.index = index
        self.step = step
        self.codec = codec
        self.prepared = prepared

    @property
    def compound_model(self) -> int:
        """The number of the model if the step may be a member of a compound task: one row, compiled; else -1."""
        if not self.prepared.compiled or self.codec.shapes.is_empty or self.codec.shapes.rows != 1:
            return -1
        return self.prepared.submission.layout.model_id


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
        left_run: Callable[[PythonCodec, Left, Terms], LeftRun],
    ) -> None:
        """Make it. `left_run` returns what goes on with a step that an instance of a Python model has kept."""
        self._slots = slots
        self._watch_shapes = watch
        self._pool = SharedMemoryPool(slots.plane)
        self._codec = codec
        self._terms = terms
        self._clock = clock
        self._tensors = EnsembleTensors(self._pool, codec.graph, codec.wanted)
        self._waits = list(codec.graph.waits)
        self._left_run = left_run
        self._left: set[LeftRun] = set()
        self._running: list[StepRun] = []
        self._done: list[StepRun] = []  # of those that run: what has ended
        self._waiting: Pending[None] | None = None  # for the first of these
        self._cancelled = False
        self.ended: list[StepRun] = []

    async def execute(self, contents: Contents) -> dict[TensorName, Result]:
        """Execute all steps; return the tensors that the answer is made of, valid until the run is left.

        Raises RequestError, which names the step.
        """
        for (tensor, shape), content in zip(self._codec.shapes.inputs, contents, strict=True):
            self._tensors.add_input((tensor.name,), tensor.datatype, shape, content)
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

    def cancel(self) -> None:
        """Cancel it: the client does not wait for the answer any more."""
        self._cancelled = True
        for running in self._running:
            running.prepared.submission.cancel()
        for left in tuple(self._left):
            left.cancel()

    def __enter__(self) -> "EnsembleRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unfinished, self._running = self._running, []
        for running in unfinished:
            self._slots.forget(running.prepared.submission.slot)
            running.failed(failure(running.model.name, SlotStatus.CANCELLED, running.queue.max_queue), had_target=False)
            self._close(running.prepared)
        self.cancel()
        self._tensors.clear()

    # -- steps

    async def _start_all(self, ready: deque[int]) -> None:
        """Hand over steps that can begin now; empties it. Those of compound tasks follow each other at once."""
        if len(ready) < 2 or not self._codec.graph.compounds:
            while ready:
                await self._start(ready.popleft())
            return
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
                self._close(running.prepared)

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
            kinds = {name: (value.datatype, value.shape) for name, value in inputs.items()}
            codec = self._codec.steps.of(index, step, kinds)
            if codec.compiled is None or whole:
                prepared = prepare_frame(self._pool, codec, list(inputs.values()))
            else:
                prepared = prepare_compiled(self._pool, self._tensors, step.model, codec, inputs)
        except PoolExhaustedError as error:
            raise self._failed(step, begin_ns, no_room(error)) from error
        except RequestError as error:
            raise self._failed(step, begin_ns, error) from error
        watch = self._watch_shapes
        return StepRun(index, step, codec, prepared, self._clock, begin_ns, watch, self._terms.timeout_us)

    def _submit(self, running: StepRun, compound: int = 0, last: bool = True) -> None:
        """Hand a step over that is prepared. `compound`, `last`: see `Submission.submit`."""
        clock, terms, submission = self._clock, self._terms, running.prepared.submission
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
            self._close(running.prepared)
            if isinstance(error, RequestError):
                raise self._failed(running.step, running.begin_ns, error) from error
            raise
        self._running.append(running)

    async def _watch(self, running: StepRun, ended: Pending[bool]) -> None:
        running.in_time = await ended
        self._note_done(running)

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
        if running.left is None:
            running.finished_ns = time.monotonic_ns()
        outcome = running.prepared.submission.outcome()
        if self._is_left(running, outcome):
            return ()
        self._running.remove(running)
        try:
            if outcome.status is SlotStatus.UNAVAILABLE and step.model.symbols and running.prepared.compiled:
                await self._start(running.index, running.begin_ns, whole=True)  # the variant has been unloaded
                return ()
            if outcome.status is not SlotStatus.OK:
                if isinstance(running.codec.frame, PythonCodec):
                    tell_gone(self._slots, running.codec.frame, running.prepared.submission)
                raise self._failed(step, running.begin_ns, running.failure(outcome))
            if not self._take(running):
                await self._start(running.index, running.begin_ns, not running.prepared.compiled)  # with more room
                return ()
        finally:
            self._close(running.prepared)
        self._tensors.mark_read(step.inputs)
        running.end_ns = time.monotonic_ns()
        running.succeeded(outcome)
        self.ended.append(running)
        return self._freed(step)

    def _is_left(self, running: StepRun, outcome: SlotOutcome) -> bool:
        """Whether an instance has kept the step, with which something goes on until the step is done once more."""
        codec = running.codec.frame
        if running.left is not None or outcome.status is not SlotStatus.OK or not isinstance(codec, PythonCodec):
            return False
        try:
            found = codec.read(running.prepared.submission.outputs[0])
        except RequestError:
            return False  # which taking the outputs finds, too
        if isinstance(found, Left):
            drive(self._go_on(running, codec, found))
        return isinstance(found, Left)

    async def _go_on(self, running: StepRun, codec: PythonCodec, left: Left) -> None:
        """Take the response of a step that an instance has kept."""
        try:
            run = self._left_run(codec, left, self._terms)
            self._left.add(run)
            if self._cancelled:
                run.cancel()
            try:
                running.left = (await run.next()).outputs
            finally:
                self._left.discard(run)
                run.cancel()
        except RequestError as error:
            running.left = error.without_traceback()
        except Exception:
            _log.exception("a step of an ensemble failed by a fault of the server", extra=OFTEN)
            running.left = fault()
        self._note_done(running)

    def _take(self, running: StepRun) -> bool:
        """Take a step's outputs over; False if there was too little room for them."""
        step = running.step
        if isinstance(running.codec.frame, PythonCodec):
            self._take_python(running, running.codec.frame)
            return True
        try:
            outputs = running.prepared.outputs(step.model, running.codec)
        except RequestError as error:
            raise self._failed(step, running.begin_ns, error) from error
        if outputs is None:
            return False
        for name, tensor in step.outputs.items():
            output = outputs[name]
            self._tensors.add_output(
                tensor, step.model.outputs[name].datatype, output.shape, output.place, output.block
            )
        return True

    def _take_python(self, running: StepRun, codec: PythonCodec) -> None:
        """Take the outputs of a Python model's step over, or those of the response after it was kept."""
        step, (view,), ((begin, _),) = running.step, running.prepared.submission.outputs, running.prepared.places
        places: Mapping[str, int] = {}
        try:
            if isinstance(running.left, RequestError):
                raise running.left.without_traceback()
            if running.left is None:
                found = codec.read(view)
                assert isinstance(found, Answer), "else it is left"
                outputs, places = found.outputs, found.places
            else:
                outputs = running.left
            missing = [name for name in step.outputs if name not in outputs]
            if missing:
                message = f"the response of model '{step.model.name}' has no output '{missing[0]}'"
                raise RequestError(StatusCode.INTERNAL, message)
        except RequestError as error:
            raise self._failed(step, running.begin_ns, error) from error
        for name, tensor in step.outputs.items():
            own = step.model.outputs[name]
            shape, content = own.client_shape(outputs[name][0]), outputs[name][1]
            if name in places:
                place, block = (begin + places[name], len(content)), running.prepared.blocks[-1]
                self._tensors.add_output(tensor, own.datatype, shape, place, block)
                continue
            try:
                block = self._pool.take(len(content))
            except PoolExhaustedError as error:
                raise self._failed(step, running.begin_ns, no_room(error)) from error
            place = block.offset, len(content)
            self._pool.view(place)[:] = content
            self._tensors.add_output(tensor, own.datatype, shape, place, block)
            self._pool.release(block)

    def _freed(self, step: Step) -> Sequence[int]:
        """Return the steps that have waited for this one alone."""
        freed = []
        for tensor in set(step.outputs.values()):
            for reader in self._codec.graph.readers.get(tensor, ()):
                self._waits[reader] -= 1
                if not self._waits[reader]:
                    freed.append(reader)
        return freed

    def _close(self, prepared: Prepared) -> None:
        prepared.submission.close()
        for block in prepared.blocks:
            self._pool.release(block)

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
