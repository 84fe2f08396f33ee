"""The loop of an instance: it executes what workers ask for, one execution at a time, in the main thread.

An execution has a core while a worker has one for it: from `run` or `resume` to `done` or `stopped`. Where a model
waits for another model it gives the core back, and asks a front end for one (`grant`) when it can go on. An execution
that finds the instance occupied waits in the same way. A decoupled model's execution begins so, too: its responses need
a front end that is there.

Where a model waits for anything else its worker sees that (`leave`). The execution goes on without a core then, with
little weight, until a front end has seen that it computes and another worker has one for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import math
import mmap
import os
import queue
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from gangway.python_backend import custom_metrics
from gangway.python_backend import triton_python_backend_utils as pb_utils
from gangway.python_backend.executions import (
    Encoded,
    Execution,
    OutputCheck,
    Responder,
    decode_response,
    decode_tensors,
    encode_error,
    encode_tensors,
)
from gangway.python_backend.inbox import Inbox
from gangway.python_backend.messages import CORE_BITS, WAITING_NICE, Connection, Message, is_same_user, places
from gangway.python_backend.supervisor_link import THREAD_NAME

ATTACH_SECONDS = 5.0  # from the answer of a worker to the front end that comes for more
LATE_SECONDS = 30.0  # from the begin of a run to its being read, on a machine that is busy
LOOK_SECONDS = 1.0
_NOBODY = {"error": ("CANCELLED", "no client waits for the request that asks for this"), "final": True}

_execution: contextvars.ContextVar[Execution | None] = contextvars.ContextVar("execution", default=None)


class Memory:
    """A worker's shared memory, in which it writes inputs and finds outputs."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._map: mmap.mmap | None = None

    def take(self, message: Message) -> memoryview:
        """Return the memory as a worker's message describes it. Raises ValueError, OSError."""
        if message.descriptor >= 0:
            self.close()
            self._descriptor = message.descriptor
        return self._mapped(message.header["memory_bytes"])

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


class Call:
    """A request to another model. `take` gets each response, and whether it is the last one."""

    def __init__(self, number: int, execution: Execution, message: Encoded, take: Callable[[Any, bool], None]) -> None:
        self.number, self.execution, self.message, self.take = number, execution, message, take
        self.connection: Connection | None = None


class Host:
    """Serves one instance of a model, which is initialised. `config`: its configuration, as a dictionary.

    `check`: what its responses must be like.
    """

    def __init__(self, model: Any, config: dict[str, Any], name: str, check: OutputCheck) -> None:
        self._model, self._name = model, name
        self._is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._check = check
        self._waiting: list[Execution] = []
        self._is_stopping = False
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._inbox = Inbox()
        self._is_idle = True
        self._is_at_inbox = False  # the main thread waits there
        self._executions: dict[int, Execution] = {}
        self._memories: dict[Connection, Memory] = {}
        self._answered: dict[Connection, tuple[Execution, list[dict[str, Any]]]] = {}  # by the last run of a worker
        self._calls: dict[int, Call] = {}
        self._awaited = 0  # requests to other models for which coroutines wait
        own = [each.native_id for each in threading.enumerate() if each.name == THREAD_NAME]
        self._own_threads = {threading.get_native_id(), *own}
        self._idle_threads: list[int | None] = []
        self._demoted_of = 0  # threads, when all but our own were demoted
        self._core = -1
        self._cores = os.sched_getaffinity(0)
        self._main = threading.main_thread().native_id or 0
        self._nice = os.getpriority(os.PRIO_PROCESS, self._main)
        self._is_light = False  # the main thread has little weight
        self._may_raise = _may_raise(self._nice)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._background: asyncio.AbstractEventLoop | None = None
        self._status = os.memfd_create("gangway-python-status", os.MFD_CLOEXEC)
        os.ftruncate(self._status, mmap.PAGESIZE)
        self._status_map = mmap.mmap(self._status, mmap.PAGESIZE)
        pb_utils.runtime = self

    def run(self, listener: socket.socket) -> None:
        """Execute what comes, until `stop`. `listener`: a socket that listens."""
        self.start_thread(self._look_for_abandoned)
        self._idle_threads = list(self._own_threads - {self._main})
        self.start_thread(self._accept, listener)
        while (execution := self._next()) is not None:
            self._perform(execution)

    def stop(self) -> None:
        """End `run` after what is being executed."""
        with self._changed:
            self._is_stopping = True
            self._notify()

    def _notify(self) -> None:
        """Tell all threads that something has changed; the lock is held."""
        self._changed.notify_all()
        if self._is_at_inbox:
            self._inbox.wake()

    def _next(self) -> Execution | None:
        """Return what is to be executed next: the first that somebody waits for. None: nothing more."""
        while True:
            with self._changed:
                if self._is_stopping:
                    return None
                self._waiting = [each for each in self._waiting if not each.is_abandoned(ATTACH_SECONDS)]
                self._note_idle()
                execution = next((each for each in self._waiting if each.worker is not None or each.attached), None)
                if execution is not None:
                    self._waiting.remove(execution)
                    break
                self._is_at_inbox = True
                patience_seconds = LOOK_SECONDS if self._waiting else None
            self._take_all(patience_seconds)
        self._take_all(0)  # what came at the same time, so that its worker does not wait for this execution
        return execution

    def _note_idle(self) -> None:
        """Let workers know whether a run could begin at once; the lock is held."""
        self._is_idle = not self._waiting
        self._status_map[0] = not self._is_idle

    def _take_all(self, seconds: float | None) -> None:
        """Wait for messages of workers, and take them; main thread only."""

        def take(message: Message, worker: Connection) -> None:
            self._is_at_inbox = False
            try:
                self._take(message, worker)
            except OSError:
                worker.end()
            except Exception:
                traceback.print_exc()
                worker.end()

        self._inbox.wait(seconds, take)
        self._is_at_inbox = False  # it looks at what has changed before it waits again

    def _look_for_abandoned(self) -> None:
        """Answer calls of executions that no front end has come for, and forget these. Let go of unused metrics.

        End the process if its model has had requests for too long.
        """
        while True:
            time.sleep(LOOK_SECONDS)
            custom_metrics.flush()
            with self._changed:
                calls = [each for each in self._calls.values() if each.execution.is_abandoned(ATTACH_SECONDS)]
                late = []
                for number, each in list(self._executions.items()):
                    if each.is_begun:
                        others = each.wants_core or any(call.execution is each for call in self._calls.values())
                        if each.is_late(others) and each.worker is None:  # else the worker ends it
                            late.append(each)
                    elif each.is_over or each.is_abandoned(ATTACH_SECONDS):
                        del self._executions[number]
            for each in late:
                self._end_late(each)
            for call in calls:
                self._route(call)

    def _end_late(self, execution: Execution) -> None:
        """End the process, because of this execution."""
        name = self._check.model_name
        reason = f"it did not end within {execution.timeout_seconds:g} s and was ended"
        print(f"{name}: an instance of the Python model is lost: {reason}")
        message = f"an instance of model '{name}' was lost: {reason}; it is started again"
        for each in execution.responders:
            each.fail(Encoded({"error": ("UNAVAILABLE", message)}, []))
        os.kill(os.getpid(), signal.SIGKILL)

    # -- callers

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connected, _ = listener.accept()
            if is_same_user(connected):
                self.start_thread(self._attend, Connection(connected))
            else:
                connected.close()

    def start_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        """Start a thread that is none of the model's."""

        def run() -> None:
            self._own_threads.add(threading.get_native_id())
            try:
                work(*arguments)
            finally:
                self._own_threads.discard(threading.get_native_id())

        threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()

    def _attend(self, connection: Connection) -> None:
        """Do what a worker or front end asks for, until it goes."""
        responder: Responder | None = None
        try:
            with suppress(OSError):  # a caller that has gone may have said something before
                about = {"hello": os.getpid(), "cores": sorted(self._cores), "nice": self._nice}
                about["own"] = self._idle_threads
                connection.send(about, descriptor=self._status)
            while True:
                message = connection.receive()
                if "attach" in message.header:
                    responder = self._attach(message.header, connection)
                elif "result" in message.header:
                    self._take_result(message)
                else:
                    self._take(message, connection)
                    self._inbox.attend(connection, self._take)
        except (EOFError, OSError):
            pass
        except Exception:
            traceback.print_exc()  # the caller finds the connection closed
        finally:
            connection.close()
            if responder is not None:
                responder.detach()
            self._lost(connection)

    def _take(self, message: Message, worker: Connection) -> None:
        """Do what a worker asks for."""
        if "run" in message.header:
            self._begin(message, worker)
        elif "resume" in message.header:
            self._resume(message.header, worker)
        elif "leave" in message.header:
            self._leave(message.header["leave"], worker)

    def _begin(self, message: Message, worker: Connection) -> None:
        """Queue the requests of a run. If they cannot begin at once, the worker's core is not theirs."""
        memory = self._memories.setdefault(worker, Memory())
        view = memory.take(message)
        responders, at = [], 0
        for about in message.header["run"]:
            described = about["inputs"]
            tensors = decode_tensors(described, view[at:], aligned=True)
            at += places([size_bytes for _, _, _, size_bytes in described])[1]
            responders.append(Responder(about, tensors, self._check, self._is_decoupled))
        execution = Execution(message.header["ask"], responders, worker, message.header["core"])
        execution.timeout_seconds = message.header.get("timeout_s", math.inf)
        with self._changed:  # to the end: who is idle must not begin something else meanwhile
            self._answered.pop(worker, None)
            self._executions[execution.number] = execution
            if self._is_decoupled or not self._is_idle:
                self._release(execution)
            else:
                self._pin(execution.core)  # where the main thread is, others may compute
            self._waiting.append(execution)
            self._note_idle()
            self._notify()

    def _resume(self, header: dict[str, Any], worker: Connection) -> None:
        with self._changed:
            self._answered.pop(worker, None)
            execution = self._executions.get(header["resume"])
            wanted = execution is not None and (execution.wants_core or execution.is_begun)
            has_core = execution is not None and execution.worker is not None
            if execution is not None and wanted and not has_core:
                execution.worker, execution.core, execution.ask = worker, header["core"], header["ask"]
                if execution.wants_core:
                    execution.wants_core = False
                    self._notify()
                else:
                    self._pin(execution.core)
        if has_core or not wanted:
            worker.send({"stopped": True, "waits": wanted, "ask": header["ask"]})

    def _leave(self, number: int, worker: Connection) -> None:
        """What has begun with this message of a worker has no core any more: it waits."""
        with self._changed:
            answered, outcomes = self._answered.pop(worker, (None, []))
            found = (each for each in self._executions.values() if each.worker is worker and each.ask == number)
            execution = next(found, None)
            if execution is not None:
                self._unpin()
                execution.worker, execution.is_run = None, False
                if execution.is_answering:
                    return  # the main thread goes on with that
                execution.leave()
            elif answered is not None and answered.ask == number:  # it has not read that
                self._executions[number] = answered
                self._keep_again(answered, outcomes, self._memories[worker].sized(0))
                self._notify()
        self._tell(worker, {"left": number})

    def _keep_again(self, execution: Execution, outcomes: list[dict[str, Any]], memory: memoryview) -> None:
        """Let the front ends fetch responses that a worker was to get. `memory`: has their contents."""
        sizes = [size for outcome in outcomes for _, _, _, size in outcome.get("outputs", ())]
        offsets = iter(places(sizes)[0])
        for responder, outcome in zip(execution.responders, outcomes):  # noqa: B905 - Python 3.9
            if "left" not in outcome:
                parts = [bytes(memory[at : at + each[3]]) for each, at in zip(outcome.get("outputs", ()), offsets)]  # noqa: B905 - Python 3.9
                responder.keep_again(Encoded(outcome, list(parts)))
        execution.leave()

    def _attach(self, header: dict[str, Any], front_end: Connection) -> Responder:
        number = header["attach"]
        with self._changed:
            # The run and what its worker has said after it may be read later than this.
            age_seconds = (time.monotonic_ns() - (number >> CORE_BITS)) / 1e9
            self._changed.wait_for(lambda: number in self._executions, max(0.0, LATE_SECONDS - age_seconds))
            execution = self._executions.get(number)
            if execution is None:
                raise EOFError
            responder: Responder = execution.responders[header["request"]]
            responder.attach(front_end)
            unsent = [call for call in self._calls.values() if call.execution is execution and call.connection is None]
            self._notify()
        for call in unsent:
            self._route(call)
        return responder

    def _lost(self, connection: Connection) -> None:
        """A caller has gone: others of its executions may do what was asked of it."""
        with self._changed:
            memory = self._memories.pop(connection, None)
            self._answered.pop(connection, None)
            for execution in self._executions.values():
                if execution.worker is connection:
                    execution.worker = None
                    if execution.is_run:
                        execution.leave()
                    execution.is_run = False
            calls = [call for call in self._calls.values() if call.connection is connection]
            for call in calls:
                call.connection = None
            self._notify()
        if memory is not None:
            memory.close()
        for call in list(self._calls.values()):
            if call in calls or call.execution.is_abandoned(ATTACH_SECONDS):
                self._route(call)

    # -- the core

    def _release(self, execution: Execution) -> None:
        """Give the core back; what remains goes to the front ends."""
        with self._changed:
            worker, execution.worker = execution.worker, None
            was_run, execution.is_run = execution.is_run, False
        if was_run:
            place = (), execution.is_begun
            outcomes = [{"left": [execution.number, index, *place]} for index in range(len(execution.responders))]
            self._tell(worker, {"done": outcomes, "memory_bytes": 0, "ask": execution.ask})
            execution.leave()
        else:
            self._tell(worker, {"stopped": True, "ask": execution.ask})

    def _acquire(self, execution: Execution) -> bool:
        """Wait until the execution may use a core; False if there is nobody any more who wants it."""
        asked: Connection | None = None
        with self._changed:
            execution.wants_core = execution.worker is None
            while execution.worker is None:
                attached = execution.attached
                if asked not in attached:
                    asked = attached[0] if attached else None
                    if asked is not None:
                        self._tell(asked, {"grant": execution.number})
                if asked is None and execution.is_abandoned(ATTACH_SECONDS):
                    execution.wants_core = False
                    return False
                self._changed.wait(LOOK_SECONDS)
        self._pin(execution.core)
        return True

    def _pin(self, core: int) -> None:
        """Let the main thread have one core."""
        self._weigh(is_light=False)
        if core != self._core:
            try:
                os.sched_setaffinity(self._main, {core})
                self._core = core
            except OSError:
                pass  # it has been taken from us

    def _unpin(self) -> None:
        """Let the main thread go on where there is room for it; the lock is held."""
        self._core = -1
        with suppress(OSError):
            os.sched_setaffinity(self._main, self._cores)
        if self._may_raise:
            self._weigh(is_light=True)

    def _weigh(self, is_light: bool) -> None:
        if is_light != self._is_light:
            self._is_light = is_light
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._main, self._nice + WAITING_NICE * is_light)

    def _demote_threads(self) -> None:
        """Let threads that the model has left behind run where a core is idle."""
        count = os.stat("/proc/self/task").st_nlink - 2
        if count in (len(self._own_threads), self._demoted_of):
            return
        self._demoted_of = count
        for name in os.listdir("/proc/self/task"):
            thread = int(name)
            if thread not in self._own_threads:
                try:
                    if os.sched_getscheduler(thread) != os.SCHED_IDLE:
                        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                        os.sched_setaffinity(thread, self._cores)
                except OSError:
                    pass  # it has ended, or the system does not permit it

    @staticmethod
    def _tell(connection: Connection | None, header: dict[str, Any]) -> None:
        try:
            if connection is not None:
                connection.send(header)
        except OSError:
            pass  # the thread that receives finds the end

    # -- executing

    def _perform(self, execution: Execution) -> None:
        if not self._acquire(execution):
            return
        token = _execution.set(execution)
        execution.begin()
        try:
            self._take_responses(execution, self._execute([each.take_request() for each in execution.responders]))
        except Exception as error:
            if not execution.is_abandoned(ATTACH_SECONDS):
                traceback.print_exc()
            where = f"Failed to process the request(s) for model instance '{self._name}', message: "
            for each in execution.responders:
                each.fail(encode_error(error, where))
        finally:
            _execution.reset(token)
        self._settle(execution)
        self._demote_threads()

    def _execute(self, requests: list[Any]) -> Any:
        result = self._model.execute(requests)
        if not inspect.isawaitable(result):
            return result
        if self._is_decoupled:
            asyncio.run_coroutine_threadsafe(self._in_background(result, requests), self._background_loop())
            return None
        if self._loop is None:
            self._loop = asyncio.SelectorEventLoop(CoreSelector(self))
        asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(result)

    async def _in_background(self, result: Awaitable[Any], requests: list[Any]) -> None:
        try:
            await result
        except Exception as error:
            traceback.print_exc()
            for request in requests:
                request.get_response_sender().fail(encode_error(error))

    def _background_loop(self) -> asyncio.AbstractEventLoop:
        if self._background is None:
            self._background = asyncio.new_event_loop()
            threading.Thread(target=self._background.run_forever, name="coroutines", daemon=True).start()
        return self._background

    def _take_responses(self, execution: Execution, responses: Any) -> None:
        """Take what execute has returned. Raises TritonModelException for what it must not return."""
        responders = execution.responders
        if self._is_decoupled:
            if responses is not None:
                raise pb_utils.TritonModelException("execute of a decoupled model returns None: responses are sent")
            return
        if responses is None:
            responses = [None] * len(responders)
        if not isinstance(responses, (list, tuple)) or len(responses) != len(responders):
            count = len(responses) if isinstance(responses, (list, tuple)) else type(responses).__name__
            raise pb_utils.TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects."
                f" InferenceRequest(s) size is:{len(responders)}, and InferenceResponse(s) size is:{count}"
            )
        for responder, response in zip(responders, responses):  # noqa: B905 - Python 3.9
            if response is not None:
                try:
                    responder.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                except Exception as error:  # it concerns this request only
                    responder.fail(encode_error(error))

    def _settle(self, execution: Execution) -> None:
        """Give the core back, with the responses if the worker waits for them."""
        with self._changed:
            worker, is_run = execution.worker, execution.is_run
            execution.is_begun, execution.is_answering = False, is_run and worker is not None
            if not is_run or worker is None:
                execution.worker = None
                self._weigh(is_light=False)
                self._note_idle()
        if not is_run or worker is None:
            self._tell(worker, {"stopped": True, "ask": execution.ask})
            return
        encoded = [each.take_only() for each in execution.responders]
        outcomes, parts = [], []
        for index, each in enumerate(encoded):
            outcomes.append({"left": [execution.number, index, (), True]} if each is None else each.header)
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
        with self._changed:
            is_read = execution.worker is worker  # else it has left, or has gone
            execution.worker, execution.is_run, execution.is_answering = None, False, False
            if not is_read:
                self._keep_again(execution, outcomes, view)
            elif not any(each is None for each in encoded):
                self._executions.pop(execution.number, None)
                self._answered[worker] = execution, outcomes
            self._weigh(is_light=False)
            self._note_idle()  # now: this core is another's when the worker has the answer
        if not is_read:
            self._tell(worker, {"left": execution.ask})
            return
        self._tell(worker, {"done": outcomes, "memory_bytes": len(view), "ask": execution.ask})
        execution.leave()

    # -- requests to other models

    def infer(self, request: Any, is_stream: bool) -> Iterator[Any]:
        """Yield the responses of another model. Raises TritonModelException without a request in progress."""
        responses: queue.SimpleQueue[tuple[Any, bool]] = queue.SimpleQueue()
        call = self._call(request, is_stream, lambda response, is_last: responses.put((response, is_last)))
        return self._responses(call, responses)

    def infer_async(self, request: Any, is_stream: bool) -> Awaitable[Any]:
        """Return an awaitable of the response, or of an iterator of responses."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Any] = loop.create_future()
        if is_stream:
            found.set_result(pb_utils.ResponseIterator(self.infer(request, is_stream)))
            return found

        def settle(response: Any) -> None:
            self._awaited -= 1
            if not found.done():
                found.set_result(response)

        def take(response: Any, is_last: bool) -> None:
            loop.call_soon_threadsafe(settle, response)

        self._call(request, is_stream, take)
        self._awaited += 1
        return found

    def _call(self, request: Any, is_stream: bool, take: Callable[[Any, bool], None]) -> Call:
        execution = _execution.get() or self._latest()
        if execution is None:
            raise pb_utils.TritonModelException("a request to another model needs a request in progress")
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
        call = Call(header["infer"], execution, Encoded(header, contents), take)
        with self._changed:
            self._calls[call.number] = call
        self._route(call)
        return call

    def _latest(self) -> Execution | None:
        """Return the execution that a thread of the model's own most likely works for."""
        with self._changed:
            left = [each for each in self._executions.values() if not all(one.is_closed for one in each.responders)]
        return left[-1] if left else None

    def _route(self, call: Call) -> None:
        """Send a call to a front end of its execution, or wait for one; answer it if none will come."""
        with self._changed:
            attached = call.execution.attached
            if call.connection is not None or call.number not in self._calls:
                return
            call.connection = attached[0] if attached else None
            is_lost = not attached and call.execution.is_abandoned(ATTACH_SECONDS)
        if call.connection is not None:
            with suppress(OSError):  # `_lost` follows
                call.connection.send(call.message.header, call.message.payload)
        elif is_lost:
            self._answer(call, Message(dict(_NOBODY), memoryview(b"")))

    def _take_result(self, message: Message) -> None:
        call = self._calls.get(message.header["result"])
        if call is not None:
            self._answer(call, message)

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

    def _responses(self, call: Call, responses: queue.SimpleQueue[tuple[Any, bool]]) -> Iterator[Any]:
        is_last = False
        while not is_last:
            with self._without_core(call.execution):
                response, is_last = responses.get()
            yield response

    def _without_core(self, execution: Execution) -> CoreBreak:
        return CoreBreak(self, execution)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which what is executed in this thread has no core."""
        execution = self.current
        return nullcontext() if execution is None else self._without_core(execution)

    def pause(self, execution: Execution) -> bool:
        """Give the core of an execution back, if the main thread waits; return whether it is to be taken again."""
        with self._changed:
            has_core = execution.worker is not None and threading.current_thread() is threading.main_thread()
        if has_core:
            self._release(execution)
        return has_core

    def go_on(self, execution: Execution) -> None:
        """Take a core again. Without anybody who waits for the execution it ends without one."""
        if not self._acquire(execution):
            with self._changed:
                self._unpin()

    @property
    def awaits_others(self) -> bool:
        """Whether coroutines wait for other models."""
        return self._awaited > 0

    @property
    def current(self) -> Execution | None:
        """What is being executed, in its thread."""
        return _execution.get()


def _may_raise(nice: int) -> bool:
    """Whether a thread may have this nice value again after a larger one."""
    found = []

    def find_out() -> None:
        thread = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, nice + 1)
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            found.append(True)
        except OSError:
            pass

    trial = threading.Thread(target=find_out)
    trial.start()
    trial.join()
    return bool(found)


class CoreBreak:
    """A context in which an execution has no core."""

    def __init__(self, host: Host, execution: Execution) -> None:
        self._host, self._execution = host, execution
        self._goes_on = False

    def __enter__(self) -> None:
        self._goes_on = self._host.pause(self._execution)

    def __exit__(self, *error: object) -> None:
        if self._goes_on:
            self._host.go_on(self._execution)


class CoreSelector(selectors.DefaultSelector):
    """Of the event loop that runs coroutines: while it has nothing left but other models' responses, it has no core."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready. Blocks."""
        execution = self._host.current
        if execution is None or not self._host.awaits_others or timeout == 0:
            return super().select(timeout)
        if events := super().select(0):
            return events
        with CoreBreak(self._host, execution):
            return super().select(timeout)
