"""The main thread of an instance: it executes what workers ask for, one `execute` at a time.

An execution has a core while a worker has one for it: from `run` or `resume` to `done` or `stopped`. Where a model
waits for another model it gives the core back, and asks a front end for one (`grant`) when it can go on. An execution
that finds the instance occupied waits in the same way. The first of several responses leaves an execution to the front
ends. If threads of the model make responses when `execute` has returned, they have a core in the same way.

Where a model waits for anything else its worker sees that (`leave`). The execution goes on without a core then, with
little weight, until a front end has seen that it computes and another worker has one for it. So it is, too, where
threads and loops of the model's own wait for other models.

An execution whose `execute` is a coroutine stays open until that ends. Up to `gangway_python_concurrency` executions
are open at the same time, of a decoupled model any number. Their coroutines run in one loop (`coroutines.py`), which
computes while any of them has a core.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from gangway.python_backend import custom_metrics, log, working_for
from gangway.python_backend import triton_python_backend_utils as pb_utils
from gangway.python_backend.calls import ATTACH_SECONDS, Calls, Responses
from gangway.python_backend.coroutines import Coroutines
from gangway.python_backend.executions import (
    Encoded,
    Execution,
    Header,
    OutputCheck,
    Responder,
    encode_error,
    encode_failure,
    forms_of,
)
from gangway.python_backend.inbox import Inbox
from gangway.python_backend.messages import CORE_BITS, OCCUPIED, WAITING_NICE, Connection, Message, is_same_user, places
from gangway.python_backend.model_threads import ModelThreads, Status
from gangway.python_backend.supervisor_link import THREAD_NAME, linked
from gangway.python_backend.worker_memory import Memory

LATE_SECONDS = 30.0  # from the begin of a run to its being read, on a machine that is busy
LOOK_SECONDS = 1.0
TURN_SECONDS = 0.05  # coroutines of several executions keep a core for so long, if they have always something to do
CONCURRENCY = "gangway_python_concurrency"
_raw_decode = json.JSONDecoder().raw_decode


class Host:
    """Serves one instance of a model, which is initialised. `config`: its configuration, as a dictionary.

    `check`: what its responses must be like.
    """

    def __init__(self, model: Any, config: dict[str, Any], name: str, check: OutputCheck) -> None:
        self._model, self._name = model, name
        self._is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._check = check
        parameters = config.get("parameters") or {}
        concurrency = int(parameters.get(CONCURRENCY, {}).get("string_value", 1))
        self._concurrency = sys.maxsize if self._is_decoupled else concurrency
        self._waiting: list[Execution] = []  # to begin
        self._open: list[Execution] = []  # which have begun, and have not ended
        self._is_stopping = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inbox = Inbox()
        self._is_computing = False  # the main thread, for executions that are open
        self._is_at_inbox = False  # the main thread waits there
        self._has_core_since = 0.0
        self._executions: dict[int, Execution] = {}
        self._memories: dict[Connection, Memory] = {}
        self._answered: dict[Connection, tuple[Execution, list[Header]]] = {}  # by the last run of a worker
        self._calls = Calls(self._changed, self._executions, check, _want_front_end)
        self._coroutines: Coroutines | None = None
        self._awaited = 0  # requests to other models for which coroutines wait
        self._core = -1
        self._cores = os.sched_getaffinity(0)
        self._main = threading.main_thread().native_id or 0
        self._nice = os.getpriority(os.PRIO_PROCESS, self._main)
        self._is_light = False  # the main thread has little weight
        self._may_raise = _may_raise(self._nice)
        self._status_fd = os.memfd_create("gangway-python-status", os.MFD_CLOEXEC)
        os.ftruncate(self._status_fd, mmap.PAGESIZE)
        self._status = Status(self._status_fd, is_own=True)
        own = [each.native_id or 0 for each in threading.enumerate() if each.name == THREAD_NAME]
        self._threads = ModelThreads(self._status, (self._main, *own), self._nice, self._may_raise)
        working_for.let_threads_inherit()
        pb_utils.runtime = self

    def run(self, listener: socket.socket) -> None:
        """Execute what comes, until `stop`. `listener`: a socket that listens."""
        self.start_thread(self._accept, listener)
        self.start_thread(self._look_for_abandoned)
        while (execution := self._next()) is not None:
            self._perform(execution)

    def stop(self) -> None:
        """End `run` after what is being executed."""
        with self._lock:
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
            with self._lock:
                if self._is_over:
                    return None
                execution = self._startable
                if execution is not None:
                    self._waiting.remove(execution)
                    self._open.append(execution)
                    self._note(is_computing=True)
                    break
            if self._coroutines is None:
                self._wait(None)
            else:
                self._coroutines.run()
        self._take_all(0)  # what came at the same time, so that its worker does not wait for this execution
        return execution

    @property
    def _is_over(self) -> bool:
        """Whether nothing is to be executed any more that somebody waits for."""
        return self._is_stopping and all(each.is_abandoned(ATTACH_SECONDS) for each in self._open)

    @property
    def _startable(self) -> Execution | None:
        """What can begin."""
        if self._is_stopping or len(self._open) >= self._concurrency:
            return None
        return next((each for each in self._waiting if each.worker is not None or each.attached), None)

    @property
    def has_more(self) -> bool:
        """Whether the main thread has something to do beside coroutines."""
        return self._is_over or self._startable is not None

    def _note(self, is_computing: bool) -> None:
        """Let workers know whether a run could begin at once; the lock is held."""
        self._is_computing = is_computing and bool(self._open)
        self._status.load = min(len(self._open), OCCUPIED - 1) if self._can_begin else OCCUPIED

    @property
    def _can_begin(self) -> bool:
        """Whether a run could begin at once."""
        return not (self._waiting or self._is_computing or len(self._open) >= self._concurrency)

    def _wait(self, seconds: float | None) -> None:
        """Wait for messages of workers, and for what the inbox watches; main thread only."""
        with self._lock:
            self._waiting = [each for each in self._waiting if not each.is_abandoned(ATTACH_SECONDS)]
            self._note(is_computing=False)
            if self.has_more:
                seconds = 0
            elif self._waiting:
                seconds = LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS)
            self._is_at_inbox = True
        self._take_all(seconds)
        with self._lock:
            self._note(is_computing=True)
            self._has_core_since = time.monotonic()

    def _take_all(self, seconds: float | None) -> None:
        """Wait for messages of workers, and take them; main thread only."""
        self._inbox.wait(seconds, self._take_at_inbox)
        self._is_at_inbox = False  # it looks at what has changed before it waits again

    def _take_at_inbox(self, message: Message, worker: Connection) -> None:
        self._is_at_inbox = False
        try:
            self._take(message, worker)
        except OSError:
            worker.end()
        except Exception as error:
            log.write_error(error)
            worker.end()

    def _look_for_abandoned(self) -> None:
        """Answer calls of executions that no front end has come for, and forget these. Let go of unused metrics.

        End what its model has had for too long.
        """
        while True:
            time.sleep(LOOK_SECONDS)
            custom_metrics.flush()
            self._calls.look()
            with self._lock:
                late = []
                if not self._is_wanted:
                    self._threads.rest(looks=True)
                waits_for_core = any(each.wants_core for each in self._open)
                for number, each in list(self._executions.items()):
                    if each.is_begun:
                        is_late = each.is_late(waits_for_core or self._calls.has(each))
                        if is_late and each.worker is None:  # else the worker ends it
                            late.append(each)
                    elif each.is_over or each.is_abandoned(ATTACH_SECONDS):
                        del self._executions[number]
            for each in late:
                self._end_late(each)

    def _end_late(self, execution: Execution) -> None:
        """End an execution: its coroutine, or where there is none, or that does not end, the process."""
        name, reason = self._check.model_name, f"it did not end within {execution.timeout_seconds:g} s and was ended"
        coroutine, is_told = execution.coroutine, execution.is_answered
        message = f"a request to model '{name}': {reason}"
        if coroutine is None or is_told:
            log.write(f"{name}: an instance of the Python model is lost: {reason}")
            message = f"an instance of model '{name}' was lost: {reason}; it is started again"
        for each in execution.responders:
            each.fail(encode_failure("UNAVAILABLE", message))
        if coroutine is None or is_told:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            coroutine.get_loop().call_soon_threadsafe(coroutine.cancel)

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
            with self._lock:
                self._threads.begin_own(threading.get_native_id())
            try:
                work(*arguments)
            finally:
                with self._lock:
                    self._threads.end_own(threading.get_native_id())

        threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()

    def _attend(self, connection: Connection) -> None:
        """Do what a worker or front end asks for, until it goes."""
        responder: Responder | None = None
        try:
            with suppress(OSError):  # a caller that has gone may have said something before
                about = {"hello": os.getpid(), "cores": sorted(self._cores), "nice": self._nice}
                about["idle"] = list(self._threads.own - {self._main, threading.get_native_id()})
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
                    self._inbox.attend(connection, self._take)
        except (EOFError, OSError):
            pass
        except Exception as error:
            log.write_error(error)  # the caller finds the connection closed
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
            self._resume(message.header, int(bytes(message.payload)), worker)
        elif "leave" in message.header:
            self._leave(message.header["leave"], worker)

    def _begin(self, message: Message, worker: Connection) -> None:
        """Queue the requests of a run. If they cannot begin at once, the worker's core is not theirs."""
        memory = self._memories.setdefault(worker, Memory())
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
            each.ended = functools.partial(self._end_beside, execution)
        with self._lock:  # to the end: who is idle must not begin something else meanwhile
            self._answered.pop(worker, None)
            self._executions[execution.number] = execution
            if not self._can_begin:
                self._release(execution, goes_on=False)
            else:
                self._pin(execution.core)  # where the main thread is, others may compute
            self._waiting.append(execution)
            self._note(self._is_computing)
            self._notify()

    def _resume(self, header: Mapping[str, Any], number: int, worker: Connection) -> None:
        with self._lock:
            self._answered.pop(worker, None)
            execution = self._executions.get(header["resume"])
            wanted = execution is not None and (execution.wants_core or execution.is_begun or execution.is_beside)
            has_core = execution is not None and self._has_core(execution)
            if execution is not None and wanted and not has_core:
                execution.worker, execution.core, execution.ask = worker, header["core"], number
                self._has_core_since = time.monotonic()
                if execution.wants_core:
                    execution.wants_core = False
                    self._notify()
                else:
                    self._pin(execution.core)
                    self._settle_threads()
        if has_core or not wanted:
            worker.send({"stopped": True, "waits": wanted}, [b"%d" % number])

    def _has_core(self, execution: Execution) -> bool:
        """Whether it has a core; threads that make responses have that of the main thread, too."""
        if execution.is_beside and (self._beside_with_core() or self._having_core()) is not None:
            return True
        return execution.worker is not None

    def _leave(self, number: int, worker: Connection) -> None:
        """What has begun with this message of a worker has no core any more: it waits."""
        with self._lock:
            answered, outcomes = self._answered.pop(worker, (None, []))
            found = (each for each in self._executions.values() if each.worker is worker and each.ask == number)
            execution = next(found, None)
            if execution is not None:
                execution.worker, execution.is_run = None, False
                if self._having_core() is None:
                    self._unpin()
                    self._weigh(is_light=bool(self._open) and self._may_raise)
                self._settle_threads()
                if execution.is_answering:
                    return  # the main thread goes on with that
                execution.leave()
                self._notify()
            elif answered is not None and answered.ask == number:  # it has not read that
                self._executions[number] = answered
                self._keep_again(answered, outcomes, self._memories[worker].sized(0))
                self._notify()  # a front end may be there for it
        self._tell(worker, {"left": number})

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

    def _attach(self, header: Mapping[str, Any], front_end: Connection) -> Responder:
        number = header["attach"]
        with self._lock:
            # The run and what its worker has said after it may be read later than this.
            age_seconds = (time.monotonic_ns() - (number >> CORE_BITS)) / 1e9
            self._changed.wait_for(lambda: number in self._executions, max(0.0, LATE_SECONDS - age_seconds))
            execution = self._executions.get(number)
            if execution is None:
                raise EOFError
            responder: Responder = execution.responders[header["request"]]
            responder.attach(front_end)
            self._notify()
        self._calls.attached(execution)
        return responder

    def _lost(self, connection: Connection) -> None:
        """A caller has gone: others of its executions may do what was asked of it."""
        with self._lock:
            memory = self._memories.pop(connection, None)
            self._answered.pop(connection, None)
            for execution in list(self._executions.values()):
                if execution.worker is connection:
                    execution.worker = None
                    if execution.is_run:
                        execution.leave()
                    execution.is_run = False
                self._end_beside(execution)
            self._notify()
        if memory is not None:
            memory.close()
        self._calls.lost(connection)

    # -- the core

    def _release(self, execution: Execution, goes_on: bool) -> None:
        """Give the core back; what remains goes to the front ends. `goes_on`: without a core, as what waits does."""
        with self._lock:
            if execution.is_answering:
                return  # the main thread gives it back
            worker, execution.worker = execution.worker, None
            was_run, execution.is_run = execution.is_run, False
            if goes_on and self._having_core() is None:
                self._unpin()
            self._settle_threads()
        if was_run:
            place = (os.getpid(),) if goes_on else (), execution.is_begun
            outcomes = [{"left": [execution.number, index, *place]} for index in range(len(execution.responders))]
            self._tell(worker, {"done": outcomes, "memory_bytes": 0}, execution.ask)
            execution.leave()
        else:
            self._tell(worker, {"stopped": True, "waits": goes_on}, execution.ask)

    def _release_all(self, executions: Iterable[Execution], goes_on: bool = False) -> bool:
        """Give the cores of these back; return whether there was any."""
        having = [each for each in executions if each.worker is not None]
        for each in having:
            self._release(each, goes_on)
        return bool(having)

    def _acquire(self) -> None:
        """Wait until one of the open executions, or one that can begin, has a core, or nobody waits for any of them."""
        asked: tuple[Execution, Connection] | None = None
        with self._lock:
            while (having := self._having_core()) is None:
                # A worker that has come may have gone again before this thread has seen it.
                if asked is None or asked[1] not in asked[0].attached or not asked[0].wants_core:
                    self._note(is_computing=False)  # a run that begins now brings a core
                    if asked is not None:
                        asked[0].wants_core = False
                    asked = next(((each, each.attached[0]) for each in self._open if each.attached), None)
                    if asked is not None:
                        asked[0].wants_core = True
                        self._tell(asked[1], {"grant": asked[0].number})
                if asked is None and all(each.is_abandoned(ATTACH_SECONDS) for each in self._open):
                    break
                self._changed.wait(LOOK_SECONDS)
                self._has_core_since = time.monotonic()
            if asked is not None:
                asked[0].wants_core = False
            self._note(is_computing=True)
            if having is None:
                self._unpin()
        if having is not None:
            self._pin(having.core)

    def _having_core(self) -> Execution | None:
        return next((each for each in (*self._open, *self._waiting) if each.worker is not None), None)

    def _pin(self, core: int) -> None:
        """Let the main thread have one core."""
        self._weigh(is_light=False)
        if core != self._core:
            try:
                os.sched_setaffinity(self._main, {core})
                self._core = core
            except OSError:
                pass  # it has been taken from us
        if self._beside_with_core() is None:
            self._threads.place(core)

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

    def _beside_with_core(self) -> Execution | None:
        return next((each for each in self._executions.values() if each.is_beside and each.worker is not None), None)

    def _settle_threads(self) -> None:
        """Have the model's threads the core that there is for them; with none, little weight, or let them rest.

        The lock is held.
        """
        having = self._beside_with_core() or self._having_core()
        if having is not None:
            self._threads.place(having.core)
        elif self._is_wanted:
            self._threads.place(None)
        else:
            self._threads.rest(looks=False)

    @property
    def _is_wanted(self) -> bool:
        """Whether somebody waits for something of the model."""
        return any(
            not (each is self._calls.background or each.is_answered or each.is_abandoned(ATTACH_SECONDS))
            for each in (*self._executions.values(), *self._open)
        )

    def _begin_stream(self, execution: Execution, responder: Responder) -> None:
        """The first of several responses is there: leave the execution to the front ends, and wait for this one's."""
        self._release(execution, goes_on=True)
        with self._changed:
            self._changed.wait_for(lambda: responder.was_attached, ATTACH_SECONDS)

    def _end_beside(self, execution: Execution) -> None:
        """The last response to a request is there, or its client has gone."""
        with self._lock:
            if not execution.is_beside or not (execution.is_answered or execution.was_wanted):
                return
            execution.is_beside = False
            worker, execution.worker = execution.worker, None
            if self._having_core() is None:
                self._threads.place(None)
            self._settle_threads()
        self._tell(worker, {"stopped": True}, execution.ask)

    @staticmethod
    def _tell(connection: Connection | None, header: Mapping[str, Any] | bytes, number: int | None = None) -> None:
        try:
            if connection is not None:
                connection.send(header, () if number is None else (b"%d" % number,))
        except OSError:
            pass  # the thread that receives finds the end

    # -- executing

    def _perform(self, execution: Execution) -> None:
        self._acquire()
        if execution.is_abandoned(ATTACH_SECONDS):
            self._end(execution)
            return
        execution.begin()
        with working_for.working_for(execution):
            try:
                result = self._model.execute([each.take_request() for each in execution.responders])
                if not isinstance(result, list) and inspect.isawaitable(result):
                    self._go_on_later(execution, result)
                    return
                self._take_responses(execution, result)
            except BaseException as error:  # whatever it is, it concerns these requests only
                self._fail(execution, error)
        self._end(execution)

    def _go_on_later(self, execution: Execution, result: Awaitable[Any]) -> None:
        """Have the loop do what is left of an execution."""
        if self._coroutines is None:
            self._coroutines = Coroutines(self)
            self._inbox.watch(self._coroutines.fileno())
        execution.coroutine = asyncio.ensure_future(result, loop=self._coroutines.loop)
        execution.coroutine.add_done_callback(functools.partial(self._ended, execution))

    def _ended(self, execution: Execution, coroutine: asyncio.Future[Any]) -> None:
        """The coroutine of an execution has ended."""
        error = asyncio.CancelledError() if coroutine.cancelled() else coroutine.exception()
        try:
            if error is None and not self._is_decoupled:
                self._take_responses(execution, coroutine.result())
        except Exception as wrong:
            error = wrong
        if error is not None:
            self._fail(execution, error)
        self._end(execution)

    def _fail(self, execution: Execution, error: BaseException) -> None:
        if not execution.was_wanted:  # else it may be an error because of that
            log.write_error(error)
        where = f"Failed to process the request(s) for model instance '{self._name}', message: "
        for each in execution.responders:
            each.fail(encode_error(error, where))

    def _end(self, execution: Execution) -> None:
        execution.coroutine = None
        self._settle(execution)
        with self._lock:
            self._settle_threads()

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
        with self._lock:
            worker, is_run = execution.worker, execution.is_run
            execution.is_begun, execution.is_answering = False, is_run and worker is not None
            if not is_run or worker is None:
                execution.worker = None
                execution.is_beside = not (execution.is_answered or execution.was_wanted)
                self._weigh(is_light=False)
                self._open.remove(execution)
                self._note(self._is_computing)
        if not is_run or worker is None:
            self._tell(worker, {"stopped": True, "waits": execution.is_beside}, execution.ask)
            return
        encoded = [each.take_only() for each in execution.responders]
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
        with self._lock:
            is_read = execution.worker is worker  # else it has left, or has gone
            execution.worker, execution.is_run, execution.is_answering = None, False, False
            execution.is_beside = not (execution.is_answered or execution.was_wanted)
            if not is_read:
                self._keep_again(execution, outcomes, view)
            elif not any(each is None for each in encoded):
                self._executions.pop(execution.number, None)
                self._answered[worker] = execution, outcomes
            self._weigh(is_light=False)
            self._open.remove(execution)
            self._note(self._is_computing)  # now: this core is another's when the worker has the answer
        if not is_read:
            self._tell(worker, {"left": execution.ask})
            return
        texts = b",".join([each.text for each in outcomes])
        self._tell(worker, b'{"done":[%b],"memory_bytes":%d}' % (texts, len(view)), execution.ask)
        execution.leave()

    # -- what models wait for

    def infer(self, request: Any, is_stream: bool) -> Responses:
        """Execute a request to another model. Raises TritonModelException."""
        begin = functools.partial(self._calls.begin, request, is_stream)
        return Responses(begin, self._calls.cancel, self._without_core, self._awaiting)

    @contextmanager
    def _awaiting(self, execution: Execution) -> Iterator[None]:
        """While a coroutine waits for another model: in a loop of the model's own the core is given back at once.

        When such a loop has nothing else to do is not known.
        """
        is_foreign = self._coroutines is None or asyncio.get_running_loop() is not self._coroutines.loop
        if is_foreign:
            self._release_all(self._open if _in_main_thread() else [execution], goes_on=True)
        self._awaited += not is_foreign
        try:
            yield
        finally:
            self._awaited -= not is_foreign

    def wait(self, seconds: float | None) -> None:
        """Wait for the loop's events, for messages, at most so long. What waits for other models has no core."""
        if self._awaited or self._concurrency > 1:
            self._release_all(self._open, goes_on=self._is_decoupled)
        self._wait(seconds)

    def go_on(self) -> None:
        """Return when coroutines may compute: they have a core, unless their model is decoupled, or nobody waits.

        Without one they have little weight, as what is left behind has.
        """
        if self._concurrency > 1 and time.monotonic() - self._has_core_since > TURN_SECONDS:
            self._release_all(self._open)
        if self._open and not self._is_decoupled:
            self._acquire()
        elif self._core >= 0:
            with self._lock:
                if self._having_core() is None:
                    self._unpin()

    @contextmanager
    def _without_core(self, execution: Execution) -> Iterator[None]:
        """While a thread waits for something else for an execution; only the main thread takes a core again."""
        is_main = _in_main_thread()
        had_core = self._release_all(self._open if is_main else [execution], goes_on=not is_main)
        try:
            yield
        finally:
            if had_core and is_main:
                self._acquire()

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which what is executed in this thread has no core."""
        execution = working_for.execution()
        return nullcontext() if execution is None else self._without_core(execution)


def _want_front_end() -> None:
    """Have a front end come for what the model does while it has no request. Raises TritonModelException."""
    with suppress(OSError):
        linked().say({"attends": True})


def _object_of(text: bytes) -> Any:
    """Return what JSON without spaces around it says: `json.loads` takes some times as long for short texts."""
    return _raw_decode(text.decode())[0]


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


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
