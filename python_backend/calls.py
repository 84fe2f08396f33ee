"""Requests that a model makes to other models: front ends that have come for an execution execute them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from gangway.python_backend import triton_python_backend_utils as pb_utils
from gangway.python_backend import working_for
from gangway.python_backend.executions import (
    Execution,
    Form,
    OutputCheck,
    Responder,
    decode_response,
    encode_tensors,
)
from gangway.python_backend.messages import BACKGROUND, Buffer, Connection, Message

MOST_BYTES = 256 << 20  # of a request of it
ATTACH_SECONDS = 5.0  # from the answer of a worker to the front end that comes for more
Take = Callable[[Any, bool], None]  # a response, and whether it is the last one
Waiting = Callable[[Execution], AbstractContextManager[None]]
_NOBODY = {"error": ("CANCELLED", "no client waits for the request that asks for this"), "final": True}


class Call:
    """A request to another model. `take` gets each response, and whether it is the last one."""

    def __init__(
        self, number: int, execution: Execution, header: Mapping[str, Any], contents: Sequence[Buffer], take: Take
    ) -> None:
        self.number, self.execution, self.take = number, execution, take
        self.header, self.contents = header, contents
        self.connection: Connection | None = None


class Responses:
    """The responses to a request to another model, for threads and for coroutines.

    `waiting` makes the context in which a thread waits, `awaiting` that in which a coroutine does. `cancel` has a call
    ended of which no further response is wanted.
    """

    def __init__(
        self, begin: Callable[[Take], Call], cancel: Callable[[Call], None], waiting: Waiting, awaiting: Waiting
    ) -> None:
        self._cancel, self._waiting, self._awaiting = cancel, waiting, awaiting
        self._found: deque[tuple[Any, bool]] = deque()
        self._came = threading.Condition()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False
        self._call = begin(self._take)
        self._execution = self._call.execution

    def __iter__(self) -> Responses:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next response. Blocks."""
        if self._is_over:
            raise StopIteration
        with self._waiting(self._execution), self._came:
            self._came.wait_for(lambda: self._found or self._is_over)
            if not self._found:
                raise StopIteration
            return self._next()

    def __aiter__(self) -> Responses:
        """Return itself."""
        return self

    async def __anext__(self) -> Any:
        """Return the next response, in any loop."""
        if self._is_over:
            raise StopAsyncIteration
        with self._awaiting(self._execution):
            while True:
                with self._came:
                    if self._found:
                        return self._next()
                    if self._is_over:
                        raise StopAsyncIteration
                    self._waiter = waiter = asyncio.get_running_loop().create_future()
                await waiter

    def _next(self) -> Any:
        response, self._is_over = self._found.popleft()
        return response

    def cancel(self) -> None:
        """Have the request ended: whoever waits for a response, or asks for one, gets none. From any thread."""
        with self._came:
            is_under_way, self._is_over = not self._is_over, True
            self._found.clear()
        self._wake()
        if is_under_way:
            self._cancel(self._call)

    def _take(self, response: Any, is_last: bool) -> None:
        with self._came:
            if not self._is_over:
                self._found.append((response, is_last))
        self._wake()

    def _wake(self) -> None:
        with self._came:
            self._came.notify_all()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            with suppress(RuntimeError):  # its loop is closed: nobody waits
                waiter.get_loop().call_soon_threadsafe(_settle, waiter)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Calls:
    """Those of one instance. `changed`: has the lock of `executions`, which are those that somebody may wait for.

    `want`: has a front end come for `background`, an execution without an end: what a model asks while it has no
    request is asked for that.
    """

    def __init__(
        self,
        changed: threading.Condition,
        executions: MutableMapping[int, Execution],
        check: OutputCheck,
        want: Callable[[], None],
    ) -> None:
        self._changed, self._executions, self._want = changed, executions, want
        form = Form({"wanted": [], "room_bytes": 0, "most_bytes": MOST_BYTES})
        self.background = Execution(BACKGROUND, [Responder(form, {}, [], check, is_stream=False)], None, -1)
        executions[BACKGROUND] = self.background
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)

    def begin(self, request: Any, is_stream: bool, take: Take) -> Call:
        """Make a request for the execution that this thread or coroutine works for. Raises TritonModelException."""
        execution = working_for.execution() or self._latest()
        if execution.is_answered:
            execution = self.background
        described, contents = encode_tensors(
            request.inputs(),
            execution.responders[0].most_bytes,
            f"the request to model '{request.model_name()}'",
        )
        header = {
            "infer": next(self._numbers),
            "model": request.model_name(),
            "version": request.model_version(),
            "inputs": described,
            "wanted": list(request.requested_output_names()),
            "id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "priority": request.priority(),
            "parameters": pb_utils.parameters_of(request.parameters()),
            "stream": is_stream,
        }
        call = Call(header["infer"], execution, header, contents, take)
        with self._changed:
            self._calls[call.number] = call
        self._route(call)
        return call

    def attached(self, execution: Execution) -> None:
        """A front end has come for an execution: it may have what is not sent."""
        with self._changed:
            unsent = [call for call in self._calls.values() if call.execution is execution and call.connection is None]
        for call in unsent:
            self._route(call)

    def lost(self, connection: Connection) -> None:
        """A front end has gone: others of the execution may do what was asked of it."""
        with self._changed:
            calls = [call for call in self._calls.values() if call.connection is connection]
            for call in calls:
                call.connection = None
            abandoned = self._abandoned()
        for call in calls + abandoned:
            self._route(call)

    def has(self, execution: Execution) -> bool:
        """Whether an execution waits for other models."""
        return any(call.execution is execution for call in self._calls.values())

    def look(self) -> None:
        """Answer calls of executions that no front end has come for."""
        with self._changed:
            abandoned = self._abandoned()
        for call in abandoned:
            self._route(call)
        if self.has(self.background) and not self.background.attached:
            self._want()  # once more: who was asked may have gone

    def take_result(self, message: Message) -> None:
        """Take a response, which a front end has sent."""
        call = self._calls.get(message.header["result"])
        if call is not None:
            self._answer(call, message)

    def cancel(self, call: Call) -> None:
        """Have a front end end a call, and take nothing more of it."""
        with self._changed:
            is_under_way = self._calls.pop(call.number, None) is not None
        if is_under_way and call.connection is not None:
            with suppress(OSError):  # then it ends, too
                call.connection.send({"cancel": call.number})

    def _abandoned(self) -> list[Call]:
        return [each for each in self._calls.values() if each.execution.is_abandoned(ATTACH_SECONDS)]

    def _latest(self) -> Execution:
        """Return the execution that a thread of the model's own most likely works for."""
        with self._changed:
            return next(each for each in reversed(list(self._executions.values())) if not each.is_answered)

    def _route(self, call: Call) -> None:
        """Send a call to a front end of its execution, or wait for one; answer it if none will come."""
        with self._changed:
            attached = call.execution.attached
            if call.connection is not None or call.number not in self._calls:
                return
            call.connection = attached[0] if attached else None
            is_lost = not attached and call.execution.is_abandoned(ATTACH_SECONDS)
        if call.connection is not None:
            with suppress(OSError):  # `lost` follows
                call.connection.send(call.header, call.contents)
        elif call.execution is self.background:
            self._want()
        elif is_lost:
            self._answer(call, Message(dict(_NOBODY), memoryview(b"")))

    def _answer(self, call: Call, message: Message) -> None:
        is_last = bool(message.header.get("final", True))
        if is_last:
            with self._changed:
                if self._calls.pop(call.number, None) is None:
                    return
        try:
            response = decode_response(message.header, message.payload)
        except (ValueError, KeyError, pb_utils.TritonModelException) as error:
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(f"a response cannot be read: {error}"))
        call.take(response, is_last)
