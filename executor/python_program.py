"""A Python model as a program of a worker: it hands requests to a free instance, and sleeps until that answers.

Instances are processes of their own (`python_backend/`). While one executes for this worker it has the worker's core.
One that waits, for whatever it is, loses the core (`python_instance.py`). The front end then looks after the request
(`server/serving/inference/waiting_executions.py`), and has a worker go on here when the instance computes again.

The inputs of a request are followed by one more, which says what else the instance is to know of it: two lines in JSON.
The first one is of this request alone, the second one is equal for most. `order` there has the places of the inputs in
the client's order, where that is another one than the model's. What an instance is told and answers is understood once
for all that is equal: most requests of a client differ in their contents only. Its
answer is followed by one more output, the status: a JSON object, empty, or with one of

- `error`: (Triton's code, message),
- `types` of outputs, by their names, if they are others than the configuration says,
- `parameters` of the response,
- `left`: (address, execution, request, processes, whether it has begun, whether it `goes_on`), where the front end gets
  the responses. CPU clocks of the processes show when an execution that waits goes on; there are none of one that asks
  for a core itself.
- `waits`: of a run that gives an execution a core: the processes, if it waits again. `goes_on`: it computes, but others
  wanted the core.
"""

import json
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Literal, NamedTuple

from gangway.artifact.format import Manifest, TensorSpec
from gangway.base.process import LOG_WARNING, write_log_line
from gangway.executor import _native
from gangway.executor.frames import WORD_BYTES, Frame, FrameReader, FrameWriter, is_absent
from gangway.executor.frames import header_of as frame_header_of
from gangway.executor.instance_addresses import InstanceAddresses
from gangway.executor.python_instance import Instance, InstanceLostError, NotReadyError
from gangway.python_backend.elements import check_elements
from gangway.python_backend.messages import KNOWN_HEADER_BYTES, KNOWN_HEADERS, NO_CORE, Message, header_of, places

STATUS_BYTES: Final = 1 << 13  # of an answer, so much is kept for its status
_SLACK_BYTES: Final = 128
_MOST_NS: Final = 2**63 - 1
_NOTHING: Final[tuple[tuple[int, ...], int, int]] = (), 0, 0
_NOWHERE: Final[Iterator[int]] = iter(())
_AGAIN: Final = "it is started again"

Frames = tuple[memoryview, memoryview]
Prepared = tuple[bytes, bytes, _native.Handover]


class _Told(NamedTuple):
    """What the last input of a request says: of this request alone, and of all that are equal but for that."""

    own: bytes
    common: bytes


class _Run(NamedTuple):
    """How requests are handed over. `parts`: where the contents of each one's inputs are."""

    header: Mapping[str, Any]
    text: bytes
    parts: Sequence[Sequence[slice]]


class _Answer(NamedTuple):
    """What is written into the block of an answer. `tensors`: shapes and bytes, those of the status at the end.

    `contents`: where that is in the instance's memory, but for the status.
    """

    tensors: list[tuple[tuple[int, ...], int]]
    contents: Sequence[slice]
    status: bytes


class _Plain(NamedTuple):
    """A request that was handed over and answered in one go. `done`: the header of the answer."""

    instance: Instance
    run: _Run
    done: bytes


class _Answered(NamedTuple):
    """Answers of requests, and where their outputs are. `plain`: the only one was a plain request."""

    answers: Sequence[_Answer]
    memory: memoryview = memoryview(b"")
    plain: _Plain | None = None


class PythonModel:
    """The instances of one model, as one worker sees them. Called by the C loop, a lease at a time.

    Of a plain request the next one of its kind is handed over and answered by `executor/native/instance.c`.

    `addresses`: of the instances. `rank`: the worker's, so that not all workers ask the same instance first. `kept` is
    called before the end of a run that an instance keeps.
    """

    def __init__(
        self,
        manifest: Manifest,
        addresses: InstanceAddresses,
        model_id: int,
        rank: int,
        kept: Callable[[], object],
    ) -> None:
        self._kept = kept
        self._name = manifest.model_name
        self._inputs, self._names = manifest.inputs, tuple(tensor.name for tensor in manifest.outputs)
        self._addresses, self._model_id, self._rank = addresses, model_id, rank
        self._instances: dict[int, Instance] = {}
        weakref.finalize(self, _close_all, self._instances)  # the loop lets go of a model with its last lease
        self._reader, self._writer = FrameReader(), FrameWriter()
        self._run_of = lru_cache(maxsize=KNOWN_HEADERS)(partial(_run_of, manifest.inputs))

    def __call__(
        self, frames: list[Frames], cores: tuple[int, ...] = (0,), again: bool = False
    ) -> Sequence[Prepared | Literal[False] | None]:
        """Execute requests from frame to frame. `cores`: the first one is this worker's. Failures are in answers.

        `again`: a request in the same memory was executed lately; return how a further one is (`_native.Program`).
        """

        def execute() -> _Answered:
            read = [self._reader.read(request) for request, _ in frames]
            told = [_told(request, frame) for (request, _), frame in zip(frames, read, strict=True)]
            about = header_of(told[0].common)
            if "resume" in about:
                return _Answered([_answer_of(self._resume(about, cores[0]), self._names)])
            return self._run(frames, read, told, about, cores[0])

        answered, frame = self._write_all(frames, execute)
        plain = answered.plain
        if again and plain is not None and frame is not None:
            return [self._prepared(*frames[0], answered.answers[0], frame, plain, cores[0])]
        not_now: list[Literal[False]] = [False] * len(frames)
        return not_now

    def _write_all(self, frames: list[Frames], execute: Callable[[], _Answered]) -> tuple[_Answered, Frame | None]:
        """Write what `execute` returns, or why there is no answer; return it, with the frame of the last one."""
        try:
            answered = execute()
        except NotReadyError:
            answered = self._failed(frames, "UNAVAILABLE", f"no instance of model '{self._name}' is ready; {_AGAIN}")
        except InstanceLostError as error:
            write_log_line(f"{self._name}: an instance of the Python model is lost: {error}", LOG_WARNING)
            message = f"an instance of model '{self._name}' was lost: {error}; {_AGAIN}"
            answered = self._failed(frames, "UNAVAILABLE", message)
        except Exception as error:  # it concerns these requests only
            answered = self._failed(frames, "INTERNAL", f"{error}")
        frame = None
        for (_, block), answer in zip(frames, answered.answers, strict=True):
            frame = self._write(block, answer, answered.memory)
        answered.memory.release()
        for instance in self._instances.values():
            instance.trim()
        return answered, frame

    def _run(
        self, frames: list[Frames], read: Sequence[Frame], told: Sequence[_Told], about: Mapping[str, Any], core: int
    ) -> _Answered:
        """Have an instance execute requests; return an answer to each."""
        refused = self._refused(frames, read)
        asked = [place for place in range(len(frames)) if place not in refused] if refused else range(len(frames))
        if not asked:
            return _Answered(list(refused.values()))
        form = tuple((told[place].common, read[place], self._room_bytes(frames[place][1])) for place in asked)
        is_short = sum(len(common) for common, _, _ in form) <= KNOWN_HEADER_BYTES
        number, instance = self._choose(about["instances"], about["instance"])
        own = [told[place].own for place in asked]
        try:
            is_later = about["takes_any"] and instance.takes_later  # else it is soon free
            run = (self._run_of if is_short else self._run_of.__wrapped__)(
                NO_CORE if is_later else core, about["timeout_s"], form
            )
            parts = [frames[place][0][each] for place, parts in zip(asked, run.parts, strict=True) for each in parts]
            if is_later:
                done = instance.leave_later(parts, own, run.text, core)
            else:
                done = instance.ask(run.header, parts, about["timeout_s"], own=own, text=run.text)
        except BaseException:
            self._drop(number)
            raise
        answered = self._taken(instance, run, done, about)
        if not refused:
            return answered
        given = iter(answered.answers)
        return answered._replace(
            answers=[refused.get(place) or next(given) for place in range(len(frames))], plain=None
        )

    def _taken(self, instance: Instance, run: _Run, done: Message, about: Mapping[str, Any]) -> _Answered:
        """Return what an instance has answered to requests."""
        is_kept = "waits" in done.header
        is_left = is_kept or any("left" in each for each in done.header["done"])
        if is_left and not about["takes_any"]:
            self._kept()
        memory = instance.memory[:]
        if is_kept:
            left = [
                (instance.address, done.header["waits"], index, instance.pids, True, done.header["goes_on"])
                for index in range(len(run.parts))
            ]
            return _Answered([_answer_of({"left": each}, self._names) for each in left], memory)
        answers = _answers_of(done, self._names, instance.address)
        is_plain = len(answers) == 1 and not is_left and len(done.text) <= KNOWN_HEADER_BYTES
        return _Answered(answers, memory, _Plain(instance, run, done.text) if is_plain else None)

    def _prepared(
        self, request: memoryview, block: memoryview, answer: _Answer, answered: Frame, plain: _Plain, core: int
    ) -> Prepared | None:
        """Return how requests like one that was answered are executed in the same memory; None: in no other way."""
        asked = self._reader.read(request)
        told, common = asked.parts[-1], _told(request, asked).common
        about = header_of(common)
        offsets, needed_bytes = places([part.stop - part.start for part in plain.run.parts[0]])
        status = answered.parts[-1]
        try:
            handover = _native.Handover(
                instance=plain.instance.end,
                request=request,
                block=block,
                header=plain.run.text,
                common=common,
                answer=plain.done,
                status=answer.status,
                told=(told.offset, told.size_bytes),
                status_at=status.offset,
                inputs=[
                    (part.start, at, part.stop - part.start)
                    for part, at in zip(plain.run.parts[0], offsets, strict=True)
                ],
                outputs=[
                    (where.start, part.offset, part.size_bytes)
                    for part, where in zip(answered.parts[:-1], answer.contents, strict=True)
                ],
                elements=[
                    (part.offset, part.size_bytes, math.prod(part.shape))
                    for tensor, part in zip(self._inputs, asked.parts, strict=False)  # the last part is none of them
                    if tensor.datatype == "BYTES" and not (tensor.optional and is_absent(part))
                ],
                needed_bytes=max([needed_bytes, *(where.stop for where in answer.contents)]),
                timeout_ns=min(int(about["timeout_s"] * 1e9), _MOST_NS),
                core=core,
                go_on=partial(self._go_on, [(request, block)], plain, core, about),
            )
        except ValueError:  # its messages are too long
            return None
        return frame_header_of(asked), frame_header_of(answered), handover

    def _go_on(
        self,
        frames: list[Frames],
        plain: _Plain,
        core: int,
        about: Mapping[str, Any],
        number: int,
        begin_ns: int,
        looked: tuple[int, int],
        received: bytes,
    ) -> None:
        """See to a request that was handed over and has had no plain answer so far."""

        def execute() -> _Answered:
            try:
                done = plain.instance.go_on(number, core, begin_ns, about["timeout_s"], looked, received)
            except BaseException:
                for place in [place for place, each in self._instances.items() if each is plain.instance]:
                    self._drop(place)
                raise
            return self._taken(plain.instance, plain.run, done, about)

        self._write_all(frames, execute)

    def _refused(self, frames: list[Frames], read: Sequence[Frame]) -> dict[int, _Answer]:
        """Return answers to requests whose strings are cut off, by their places."""
        refused: dict[int, _Answer] = {}
        for index, tensor in enumerate(self._inputs):
            if tensor.datatype != "BYTES":
                continue
            for place, ((request, _), frame) in enumerate(zip(frames, read, strict=True)):
                part = frame.parts[index]
                if place in refused or (tensor.optional and is_absent(part)):
                    continue
                try:
                    check_elements(request[part.offset : part.offset + part.size_bytes], math.prod(part.shape))
                except ValueError as error:
                    failure = "INVALID_ARG", f"input '{tensor.name}': {error}"
                    refused[place] = _answer_of({"error": failure}, self._names)
        return refused

    def _failed(self, frames: list[Frames], code: str, message: str) -> _Answered:
        return _Answered([_answer_of({"error": (code, message)}, self._names)] * len(frames))

    def _resume(self, about: Mapping[str, Any], core: int) -> dict[str, Any]:
        """Have an execution go on; return the outcome, when that has ended or waits."""
        address, execution = about["resume"]
        number = int(address.split("-")[-2])
        instance = self._instance(number)
        if instance.address != address:
            raise InstanceLostError("its process has ended")
        try:
            ended = instance.ask({"resume": execution, "core": core}, [], about["timeout_s"], about["patience_ms"])
        except BaseException:
            self._drop(number)
            raise
        goes_on = ended.header.get("goes_on", False)
        return {"waits": instance.pids, "goes_on": goes_on} if ended.header.get("waits") else {}

    def _choose(self, count: int, wanted: int) -> tuple[int, Instance]:
        """Return the instance with the lowest load, if possible without any. Raises NotReadyError if there is none.

        `wanted`: the number of the only one that is possible; -1: any.
        """
        if wanted >= 0:
            return wanted, self._instance(wanted)
        found: list[tuple[int, Instance]] = []
        for step in range(count):
            number = (self._rank + step) % count
            try:
                found.append((number, self._instance(number)))
            except InstanceLostError:
                continue
            if not found[-1][1].load:
                return found[-1]
        if not found:
            raise NotReadyError
        return min(found, key=lambda each: each[1].load)

    def _instance(self, number: int) -> Instance:
        """Return the connection to an instance. Raises InstanceLostError."""
        known = self._instances.get(number)
        if known is not None and not known.has_ended:
            return known
        self._drop(number)
        try:
            address = self._addresses.get(self._model_id, number)
            if not address:
                raise NotReadyError
            self._instances[number] = Instance(address)
        except (OSError, EOFError, ValueError) as error:
            raise NotReadyError from error
        return self._instances[number]

    def _drop(self, number: int) -> None:
        instance = self._instances.pop(number, None)
        if instance is not None:
            instance.close()

    def _room_bytes(self, answer: memoryview) -> int:
        """Return how many bytes an answer has room for: dimensions and contents of its outputs, and its status."""
        words = 2 + 2 * len(self._names) + 2
        return len(answer) - WORD_BYTES * words - _SLACK_BYTES

    def _write(self, block: memoryview, answer: _Answer, memory: memoryview) -> Frame | None:
        """Write an answer, whose contents are in this memory, into its block. None: it has no room."""
        frame = self._writer.write(block, answer.tensors)
        if frame is not None:
            *parts, status = frame.parts
            for part, where in zip(parts, answer.contents, strict=True):
                if part.size_bytes:
                    block[part.offset : part.offset + part.size_bytes] = memory[where]
            block[status.offset : status.offset + status.size_bytes] = answer.status
        return frame


def _close_all(instances: dict[int, Instance]) -> None:
    for instance in instances.values():
        instance.close()
    instances.clear()


def load_python(
    manifest: Manifest, addresses: InstanceAddresses, model_id: int, rank: int, kept: Callable[[], object]
) -> _native.Program:
    """Return the program of a Python model, whose instances are there or will be."""
    return _native.Program.whole(PythonModel(manifest, addresses, model_id, rank, kept))


def _told(request: memoryview, frame: Frame) -> _Told:
    part = frame.parts[-1]
    own, _, common = bytes(request[part.offset : part.offset + part.size_bytes]).partition(b"\n")
    return _Told(own, common)


def _run_of(
    inputs: Sequence[TensorSpec], core: int, timeout_s: float, form: Sequence[tuple[bytes, Frame, int]]
) -> _Run:
    """Return how requests are handed over. `form`: what each has in common with others, its frame, and its room."""
    asked, parts = [], []
    for common, frame, room_bytes in form:
        request = header_of(common)["request"]
        found = [
            (inputs[place], frame.parts[place])
            for place in request.get("order", range(len(inputs)))
            if not (inputs[place].optional and is_absent(frame.parts[place]))
        ]
        described = [(tensor.name, tensor.datatype, part.shape, part.size_bytes) for tensor, part in found]
        asked.append({**request, "inputs": described, "room_bytes": room_bytes})
        parts.append([slice(part.offset, part.offset + part.size_bytes) for _, part in found])
    header = {"run": asked, "core": core, "timeout_s": timeout_s}
    return _Run(header, json.dumps(header).encode(), parts)


def _answers_of(done: Message, names: tuple[str, ...], address: str) -> list[_Answer]:
    """Return what is written for each of an instance's outcomes. `names`: of outputs. `address`: the instance's."""
    outcomes = done.header["done"]
    if any("left" in outcome for outcome in outcomes):
        return _listed(
            [{**each, "left": (address, *each["left"])} if "left" in each else each for each in outcomes], names
        )
    is_short = len(done.text) <= KNOWN_HEADER_BYTES
    return (_known_answers if is_short else _known_answers.__wrapped__)(done.text, names)


@lru_cache(maxsize=KNOWN_HEADERS)
def _known_answers(done: bytes, names: tuple[str, ...]) -> list[_Answer]:
    return _listed(header_of(done)["done"], names)


def _listed(outcomes: Sequence[Mapping[str, Any]], names: tuple[str, ...]) -> list[_Answer]:
    sizes = [size_bytes for outcome in outcomes for _, _, _, size_bytes in outcome.get("outputs", ())]
    begins = iter(places(sizes)[0])
    return [_answer_of(outcome, names, begins) for outcome in outcomes]


def _answer_of(outcome: Mapping[str, Any], names: tuple[str, ...], begins: Iterator[int] = _NOWHERE) -> _Answer:
    """Return what is written for an outcome. An output that is not there is a scalar without contents.

    `begins`: where the contents of each output are.
    """
    found = {
        name: (tuple(shape), size_bytes, next(begins)) for name, _, shape, size_bytes in outcome.get("outputs", ())
    }
    outputs = [found.get(name, _NOTHING) for name in names]
    status = _status({key: value for key, value in outcome.items() if key not in ("outputs", "final")})
    tensors = [(shape, size_bytes) for shape, size_bytes, _ in outputs]
    contents = [slice(begin, begin + size_bytes) for _, size_bytes, begin in outputs]
    return _Answer([*tensors, ((), len(status))], contents, status)


def _status(outcome: dict[str, Any]) -> bytes:
    """Return an answer's status as JSON, which a long message is cut for."""
    if "error" in outcome:
        code, message = outcome["error"]
        outcome["error"] = (code, message[:1000])
    return json.dumps(outcome, separators=(",", ":")).encode()
