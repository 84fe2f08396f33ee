"""A Python model as a program of a worker: it hands requests to a free instance, and sleeps until that answers.

Instances are processes of their own (`python_backend/`). While one executes for this worker it has the worker's core.
One that waits, for whatever it is, loses the core (`python_instance.py`). The front end then looks after the request
(`server/serving/inference/waiting_executions.py`), and has a worker go on here when the instance computes again.

The inputs of a request are followed by one more, which says what else the instance is to know of it, as JSON. `order`
there has the places of the inputs in the client's order, where that is another one than the model's. Its
answer is followed by one more output, the status: a JSON object, empty, or with one of

- `error`: (Triton's code, message),
- `types` of outputs, by their names, if they are others than the configuration says,
- `parameters` of the response,
- `left`: (address, execution, request, processes, whether it has begun), where the front end gets the responses. CPU
  clocks of the processes show when an execution that waits goes on; there are none of one that asks for a core itself.
- `waits`: of a run that gives an execution a core: the processes, if it waits again.
"""

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gangway.artifact.format import Manifest
from gangway.executor import _native
from gangway.executor.frames import WORD_BYTES, Frame, FrameReader, FrameWriter, is_absent
from gangway.executor.instance_addresses import InstanceAddresses
from gangway.executor.process import LOG_WARNING, write_log_line
from gangway.executor.python_instance import PATIENCE_MS, Instance, InstanceLostError, NotReadyError
from gangway.python_backend.elements import check_elements
from gangway.python_backend.messages import places

STATUS_BYTES: Final = 1 << 13  # of an answer, so much is kept for its status
_SLACK_BYTES: Final = 128

Frames = tuple[memoryview, memoryview]


class PythonModel:
    """The instances of one model, as one worker sees them. Called by the C loop, a lease at a time.

    `addresses`: of the instances. `rank`: the worker's, so that not all workers ask the same instance first.
    """

    def __init__(self, manifest: Manifest, addresses: InstanceAddresses, model_id: int, rank: int) -> None:
        self._manifest = manifest
        self._addresses, self._model_id, self._rank = addresses, model_id, rank
        self._instances: dict[int, Instance] = {}
        weakref.finalize(self, _close_all, self._instances)  # the loop lets go of a model with its last lease
        self._reader, self._writer = FrameReader(), FrameWriter()

    def __call__(self, frames: list[Frames], cores: tuple[int, ...] = (0,), again: bool = False) -> list[None]:
        """Execute requests from frame to frame. `cores`: the first one is this worker's. Failures are in answers."""
        outcomes: list[dict[str, Any]] = [{} for _ in frames]
        memory = memoryview(b"")
        try:
            read = [self._reader.read(request) for request, _ in frames]
            about = [_about(request, frame) for (request, _), frame in zip(frames, read, strict=True)]
            if "resume" in about[0]:
                outcomes[0] = self._resume(about[0], cores[0])
            else:
                memory = self._run(frames, read, about, cores[0], outcomes)
        except NotReadyError:
            message = f"no instance of model '{self._manifest.model_name}' is ready; it is started again"
            outcomes = [{"error": ("UNAVAILABLE", message)} for _ in frames]
        except InstanceLostError as error:
            name = self._manifest.model_name
            write_log_line(f"{name}: an instance of the Python model is lost: {error}", LOG_WARNING)
            failure = ("UNAVAILABLE", f"an instance of model '{name}' was lost: {error}; it is started again")
            outcomes = [{"error": failure} for _ in frames]
        except Exception as error:  # it concerns these requests only
            outcomes = [{"error": ("INTERNAL", f"{error}")} for _ in frames]
        self._write_all(frames, outcomes, memory)
        memory.release()
        for instance in self._instances.values():
            instance.trim()
        return [None] * len(frames)

    def _run(
        self,
        frames: list[Frames],
        read: Sequence[Frame],
        about: Sequence[dict[str, Any]],
        core: int,
        outcomes: list[dict[str, Any]],
    ) -> memoryview:
        """Have an instance execute requests, and note the outcome of each; return where their outputs are."""
        asked, parts, places_of = [], [], []
        for place, ((request, answer), frame, own) in enumerate(zip(frames, read, about, strict=True)):
            try:
                described, contents = self._inputs(request, frame, own["request"])
            except ValueError as error:
                outcomes[place] = {"error": ("INVALID_ARG", f"{error}")}
                continue
            asked.append({**own["request"], "inputs": described, "room_bytes": self._room_bytes(answer)})
            parts += contents
            places_of.append(place)
        if not asked:
            return memoryview(b"")
        number, instance = self._choose(about[0]["instances"], about[0]["instance"])
        try:
            timeout_s = about[0]["timeout_s"]
            done = instance.ask({"run": asked, "core": core, "timeout_s": timeout_s}, parts, timeout_s)
        except BaseException:
            self._drop(number)
            raise
        if "waits" in done:
            for index, place in enumerate(places_of):
                outcomes[place] = {"left": (instance.address, done["waits"], index, instance.pids, True)}
            return memoryview(b"")
        for place, outcome in zip(places_of, done["done"], strict=True):
            if "left" in outcome:
                outcome["left"] = (instance.address, *outcome["left"])
            outcomes[place] = outcome
        return instance.memory[:]

    def _inputs(
        self, request: memoryview, frame: Frame, about: Mapping[str, Any]
    ) -> tuple[list[Any], list[memoryview]]:
        """Return descriptions and contents of a request's inputs, in the client's order.

        Raises ValueError for strings that are cut off.
        """
        described, contents = [], []
        for place in about.get("order", range(len(self._manifest.inputs))):
            tensor, part = self._manifest.inputs[place], frame.parts[place]
            if tensor.optional and is_absent(part):
                continue
            content = request[part.offset : part.offset + part.size_bytes]
            if tensor.datatype == "BYTES":
                try:
                    check_elements(content, math.prod(part.shape))
                except ValueError as error:
                    raise ValueError(f"input '{tensor.name}': {error}") from None
            described.append((tensor.name, tensor.datatype, part.shape, part.size_bytes))
            contents.append(content)
        return described, contents

    def _resume(self, about: dict[str, Any], core: int) -> dict[str, Any]:
        """Have an execution go on; return the outcome, when that has ended or waits."""
        address, execution = about["resume"]
        number = int(address.split("-")[-2])
        instance = self._instance(number)
        if instance.address != address:
            raise InstanceLostError("its process has ended")
        try:
            ended = instance.ask(
                {"resume": execution, "core": core}, [], about["timeout_s"], about.get("patience_ms", PATIENCE_MS)
            )
        except BaseException:
            self._drop(number)
            raise
        return {"waits": instance.pids} if ended.get("waits") else {}

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
        words = 2 + 2 * len(self._manifest.outputs) + 2
        return len(answer) - WORD_BYTES * words - _SLACK_BYTES

    def _write_all(self, frames: list[Frames], outcomes: Sequence[dict[str, Any]], memory: memoryview) -> None:
        sizes = [size for outcome in outcomes for _, _, _, size in outcome.get("outputs", ())]
        offsets = iter(places(sizes)[0])
        for (_, answer), outcome in zip(frames, outcomes, strict=True):
            contents = {}
            for name, _, shape, size in outcome.pop("outputs", ()):
                at = next(offsets)
                contents[name] = tuple(shape), memory[at : at + size]
            self._write(answer, contents, outcome)

    def _write(
        self, answer: memoryview, contents: dict[str, tuple[tuple[int, ...], memoryview]], outcome: dict[str, Any]
    ) -> None:
        """Write an answer. An output that is not there is a scalar without contents."""
        nothing: tuple[tuple[int, ...], memoryview] = ((), memoryview(b""))
        tensors = [contents.get(tensor.name, nothing) for tensor in self._manifest.outputs]
        outcome.pop("final", None)
        tensors.append(((), memoryview(_status(outcome))))
        frame = self._writer.write(answer, [(shape, len(content)) for shape, content in tensors])
        if frame is not None:
            for part, (_, content) in zip(frame.parts, tensors, strict=True):
                answer[part.offset : part.offset + part.size_bytes] = content


def _close_all(instances: dict[int, Instance]) -> None:
    for instance in instances.values():
        instance.close()
    instances.clear()


def load_python(manifest: Manifest, addresses: InstanceAddresses, model_id: int, rank: int) -> _native.Program:
    """Return the program of a Python model, whose instances are there or will be."""
    return _native.Program.whole(PythonModel(manifest, addresses, model_id, rank))


def _about(request: memoryview, frame: Frame) -> dict[str, Any]:
    part = frame.parts[-1]
    about: dict[str, Any] = json.loads(bytes(request[part.offset : part.offset + part.size_bytes]))
    return about


def _status(outcome: dict[str, Any]) -> bytes:
    """Return an answer's status as JSON, which a long message is cut for."""
    if "error" in outcome:
        code, message = outcome["error"]
        outcome["error"] = (code, message[:1000])
    return json.dumps(outcome, separators=(",", ":")).encode()
