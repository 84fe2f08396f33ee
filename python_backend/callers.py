"""What workers and front ends ask of an instance, over their connections.

A worker brings requests and a core for them, or a core for an execution that has none. It hears of the end, or says
that the execution waits. Front ends come for responses that no worker has got.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gangway.python_backend import log
from gangway.python_backend.calls import ATTACH_SECONDS, Calls
from gangway.python_backend.core import Core, tell
from gangway.python_backend.executions import (
    Encoded,
    Execution,
    Header,
    OutputCheck,
    Responder,
    encode_error,
    forms_of,
)
from gangway.python_backend.messages import CORE_BITS, NO_CORE, Connection, Message, is_same_user, places
from gangway.python_backend.open_executions import OpenExecutions

LATE_SECONDS = 30.0  # from the begin of a run to its being read, on a machine that is busy
_raw_decode = json.JSONDecoder().raw_decode


class Callers:
    """All of them. `check`: what responses must be like. `status_fd`: of the page that workers are shown."""

    def __init__(
        self,
        executions: OpenExecutions,
        core: Core,
        calls: Calls,
        check: OutputCheck,
        is_decoupled: bool,
        status_fd: int,
    ) -> None:
        self._executions, self._core, self._calls, self._check = executions, core, calls, check
        self._is_decoupled, self._status_fd = is_decoupled, status_fd
        self._memories: dict[Connection, _Memory] = {}
        self._answered: dict[Connection, tuple[Execution, list[Header]]] = {}  # by the last run of a worker

    def accept(self, listener: socket.socket) -> None:
        """Attend to all that connect."""
        while True:
            connected, _ = listener.accept()
            if is_same_user(connected):
                self._core.start_thread(self._attend, Connection(connected))
            else:
                connected.close()

    def take_all(self, seconds: float | None) -> None:
        """Wait for messages of workers, and take them; main thread only."""
        self._executions.inbox.wait(seconds, self._take_at_inbox)
        self._executions.is_at_inbox = False  # it looks at what has changed before it waits again

    def _take_at_inbox(self, message: Message, worker: Connection) -> None:
        self._executions.is_at_inbox = False
        try:
            self._take(message, worker)
        except OSError:
            worker.end()
        except Exception as error:
            log.write_error(error)
            worker.end()

    def _attend(self, connection: Connection) -> None:
        """Do what a worker or front end asks for, until it goes."""
        responder: Responder | None = None
        try:
            with suppress(OSError):  # a caller that has gone may have said something before
                about = {"hello": os.getpid(), "cores": sorted(self._core.cores), "nice": self._core.nice}
                about["thread"] = threading.get_native_id()
                about["idle"] = self._core.waiting_threads
                connection.send(about, descriptor=self._status_fd)
            while True:
                message = connection.receive()
                if "attach" in message.header:
                    if responder is not None:
                        responder.detach()
                    responder = self._attach(message.header, connection)
                elif "result" in message.header:
                    self._calls.take_result(message)
                else:
                    self._take(message, connection)
                    self._executions.inbox.attend(connection, self._take)
        except (EOFError, OSError):
            pass
        except Exception as error:
            log.write_error(error)  # the caller finds the connection closed
        finally:
            connection.close()
            if responder is not None:
                responder.detach()
            self._lost(connection)

    # -- workers

    def _take(self, message: Message, worker: Connection) -> None:
        """Do what a worker asks for."""
        if "run" in message.header:
            self._begin(message, worker)
        elif "resume" in message.header:
            self._resume(message.header, int(bytes(message.payload)), worker)
        elif "leave" in message.header:
            self._leave(message.header["leave"], worker)

    def _begin(self, message: Message, worker: Connection) -> None:
        """Queue the requests of a run. If they cannot begin at once, the worker's core is not theirs."""
        memory = self._memories.setdefault(worker, _Memory())
        view = memory.take(message)
        number, *texts = bytes(message.payload).split(b"\n")
        responders = [
            Responder(form, _object_of(own), form.inputs(view), self._check, self._is_decoupled)
            for form, own in zip(forms_of(message.text), texts)  # noqa: B905 - Python 3.9
        ]
        execution = Execution(int(number), responders, worker, message.header["core"])
        execution.timeout_seconds = message.header.get("timeout_s", math.inf)
        for each in responders:
            each.begins = functools.partial(self._begin_stream, execution, each)
            each.ended = functools.partial(self._core.end_beside, execution)
        executions = self._executions
        with executions.lock:  # to the end: who is idle must not begin something else meanwhile
            self._answered.pop(worker, None)
            executions.all[execution.number] = execution
            if execution.core == NO_CORE:
                execution.worker, execution.is_run = None, False
                execution.leave()
                tell(worker, {"left": execution.number})
            elif not executions.can_begin:
                self._core.release(execution, goes_on=False)
            else:
                self._core.pin(execution.core)  # where the main thread is, others may compute
            executions.waiting.append(execution)
            executions.note(executions.is_computing)
            executions.notify()

    def _begin_stream(self, execution: Execution, responder: Responder) -> None:
        """The first of several responses is there: leave the execution to the front ends, and wait for this one's."""
        self._core.release(execution, goes_on=True)
        with self._executions.changed:
            self._executions.changed.wait_for(lambda: responder.was_attached, ATTACH_SECONDS)

    def _resume(self, header: Mapping[str, Any], number: int, worker: Connection) -> None:
        executions = self._executions
        with executions.lock:
            self._answered.pop(worker, None)
            execution = executions.all.get(header["resume"])
            wanted = execution is not None and (execution.wants_core or execution.is_begun or execution.is_beside)
            has_core = execution is not None and executions.has_core(execution)
            if execution is not None and wanted and not has_core:
                execution.worker, execution.core, execution.ask = worker, header["core"], number
                self._core.has_since = time.monotonic()
                if execution.wants_core:
                    execution.wants_core = False
                    executions.notify()
                else:
                    self._core.pin(execution.core)
                    self._core.settle_threads()
        if has_core or not wanted:
            worker.send({"stopped": True, "waits": wanted}, [b"%d" % number])

    def _leave(self, number: int, worker: Connection) -> None:
        """What has begun with this message of a worker has no core any more: it waits."""
        executions = self._executions
        with executions.lock:
            answered, outcomes = self._answered.pop(worker, (None, []))
            found = (each for each in executions.all.values() if each.worker is worker and each.ask == number)
            execution = next(found, None)
            if execution is not None:
                execution.worker, execution.is_run = None, False
                if executions.having_core() is None:
                    self._core.unpin()
                    self._core.weigh(is_light=bool(executions.open))
                self._core.settle_threads()
                if execution.is_answering:
                    return  # the main thread goes on with that
                execution.leave()
                executions.notify()
            elif answered is not None and answered.ask == number:  # it has not read that
                executions.all[number] = answered
                self._keep_again(answered, outcomes, self._memories[worker].sized(0))
                executions.notify()  # a front end may be there for it
        tell(worker, {"left": number})

    def answer(self, execution: Execution, worker: Connection, encoded: Sequence[Encoded | None]) -> None:
        """Have a worker read the responses to an execution, which is ending: its core is that worker's again.

        None: the front ends get what comes instead.
        """
        outcomes, parts = [], []
        for index, each in enumerate(encoded):
            pids = () if execution.responders[index].is_closed else (os.getpid(),)
            outcomes.append(Header.of(left=(execution.number, index, pids, True)) if each is None else each.header)
            parts += [] if each is None else each.payload
        offsets, size_bytes = places([len(part) for part in parts])
        memory = self._memories.get(worker)
        try:
            view = memory.sized(size_bytes) if memory is not None else memoryview(b"")
            for part, at in zip(parts, offsets):  # noqa: B905 - Python 3.9
                view[at : at + len(part)] = part
        except (OSError, ValueError) as error:
            outcomes = [encode_error(error).header for _ in encoded]
            view = memoryview(b"")
        executions = self._executions
        with executions.lock:
            is_read = execution.worker is worker  # else it has left, or has gone
            execution.worker, execution.is_run, execution.is_answering = None, False, False
            execution.is_beside = not (execution.is_answered or execution.was_wanted)
            if not is_read:
                self._keep_again(execution, outcomes, view)
            elif not any(each is None for each in encoded):
                executions.all.pop(execution.number, None)
                self._answered[worker] = execution, outcomes
            self._core.weigh(is_light=False)
            executions.open.remove(execution)
            executions.note(executions.is_computing)  # now: this core is another's when the worker has the answer
        if not is_read:
            tell(worker, {"left": execution.ask})
            return
        texts = b",".join([each.text for each in outcomes])
        tell(worker, b'{"done":[%b],"memory_bytes":%d}' % (texts, len(view)), execution.ask)
        execution.leave()

    def _keep_again(self, execution: Execution, outcomes: list[Header], memory: memoryview) -> None:
        """Let the front ends fetch responses that a worker was to get. `memory`: has their contents."""
        sizes = [size for outcome in outcomes for _, _, _, size in outcome.fields.get("outputs", ())]
        offsets = iter(places(sizes)[0])
        for responder, outcome in zip(execution.responders, outcomes):  # noqa: B905 - Python 3.9
            if "left" not in outcome.fields:
                outputs = outcome.fields.get("outputs", ())
                parts = [bytes(memory[at : at + each[3]]) for each, at in zip(outputs, offsets)]  # noqa: B905 - Python 3.9
                responder.keep_again(Encoded(outcome, list(parts)))
        execution.leave()

    # -- front ends

    def _attach(self, header: Mapping[str, Any], front_end: Connection) -> Responder:
        number, executions = header["attach"], self._executions
        with executions.lock:
            # The run and what its worker has said after it may be read later than this.
            age_seconds = (time.monotonic_ns() - (number >> CORE_BITS)) / 1e9
            executions.changed.wait_for(lambda: number in executions.all, max(0.0, LATE_SECONDS - age_seconds))
            execution = executions.all.get(number)
            if execution is None:
                raise EOFError
            responder: Responder = execution.responders[header["request"]]
            responder.attach(front_end)
            executions.notify()
        self._calls.attached(execution)
        return responder

    def _lost(self, connection: Connection) -> None:
        """A caller has gone: others of its executions may do what was asked of it."""
        executions = self._executions
        with executions.lock:
            memory = self._memories.pop(connection, None)
            self._answered.pop(connection, None)
            for execution in list(executions.all.values()):
                if execution.worker is connection:
                    execution.worker = None
                    if execution.is_run:
                        execution.leave()
                    execution.is_run = False
                self._core.end_beside(execution)
            executions.notify()
        if memory is not None:
            memory.close()
        self._calls.lost(connection)


class _Memory:
    """A worker's shared memory, in which it writes inputs and finds outputs: a descriptor that comes with a message."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._map: mmap.mmap | None = None

    def take(self, message: Message) -> memoryview:
        """Return the memory as a worker's message describes it. Raises ValueError, OSError."""
        if message.descriptor >= 0:
            self.close()
            self._descriptor = message.descriptor
            return self._mapped(os.fstat(self._descriptor).st_size)
        return self.sized(0)

    def sized(self, size_bytes: int) -> memoryview:
        """Return at least so many bytes, which the worker sees, too. Raises OSError where there is no memory."""
        if self._map is None or len(self._map) < size_bytes:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
            return self._mapped(size_bytes)
        return memoryview(self._map)

    def close(self) -> None:
        """Let go of it."""
        self._map = None  # views of it may still be there: they end it
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _mapped(self, size_bytes: int) -> memoryview:
        if self._map is None or len(self._map) != size_bytes:
            self._map = mmap.mmap(self._descriptor, size_bytes)
        return memoryview(self._map)


def _object_of(text: bytes) -> Any:
    """Return what JSON without spaces around it says: `json.loads` takes some times as long for short texts."""
    return _raw_decode(text.decode())[0]
