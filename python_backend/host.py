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
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from gangway.python_backend import custom_metrics, log, working_for
from gangway.python_backend import triton_python_backend_utils as pb_utils
from gangway.python_backend.callers import Callers
from gangway.python_backend.calls import ATTACH_SECONDS, Calls, Responses
from gangway.python_backend.core import Core, tell
from gangway.python_backend.coroutines import Coroutines
from gangway.python_backend.executions import Execution, OutputCheck, encode_error, encode_failure
from gangway.python_backend.model_threads import LOOK_AGAIN_SECONDS, Status
from gangway.python_backend.open_executions import OpenExecutions
from gangway.python_backend.supervisor_link import linked

LOOK_SECONDS = 1.0
TURN_SECONDS = 0.05  # coroutines of several executions keep a core for so long, if they have always something to do
CONCURRENCY = "gangway_python_concurrency"


class Host:
    """Serves one instance of a model, which is initialised. `config`: its configuration, as a dictionary.

    `check`: what its responses must be like.
    """

    def __init__(self, model: Any, config: dict[str, Any], name: str, check: OutputCheck) -> None:
        self._model: Any = model
        self._name = name
        self._is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._check = check
        parameters = config.get("parameters") or {}
        concurrency = int(parameters.get(CONCURRENCY, {}).get("string_value", 1))
        self._concurrency = sys.maxsize if self._is_decoupled else concurrency
        status_fd = os.memfd_create("gangway-python-status", os.MFD_CLOEXEC)
        os.ftruncate(status_fd, mmap.PAGESIZE)
        status = Status(status_fd, is_own=True)
        self._executions = OpenExecutions(status, self._concurrency)
        self._core = Core(self._executions, status)
        self._calls = Calls(self._executions.changed, self._executions.all, check, _want_front_end)
        self._callers = Callers(self._executions, self._core, self._calls, check, self._is_decoupled, status_fd)
        self._coroutines: Coroutines | None = None
        self._awaited = 0  # requests to other models for which coroutines wait
        working_for.let_threads_inherit()
        pb_utils.runtime = self

    def run(self, listener: socket.socket) -> None:
        """Execute what comes, until `stop`. `listener`: a socket that listens."""
        self.start_thread(self._callers.accept, listener)
        self.start_thread(self._look_for_abandoned)
        while (execution := self._next()) is not None:
            self._perform(execution)

    def forget_model(self) -> None:
        """Let go of the model, so that it can end as objects do."""
        self._model = None

    def stop(self) -> None:
        """End `run` after what is being executed."""
        with self._executions.lock:
            self._executions.is_stopping = True
            self._executions.notify()

    def start_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        """Start a thread that is none of the model's."""
        self._core.start_thread(work, *arguments)

    @property
    def has_is_ready(self) -> bool:
        """Whether the model says whether it is ready."""
        return callable(getattr(self._model, "is_ready", None))

    def is_ready(self) -> bool:
        """Return what `is_ready` of the model says, in a thread of its own. An error, told in the log, is a no."""
        try:
            answer = self._model.is_ready()
            if inspect.isawaitable(answer):
                answer = asyncio.run(_result_of(answer))  # the loop of `execute` may be in the middle of a request
            if not isinstance(answer, bool):
                raise TypeError(f"is_ready returns a {type(answer).__name__}, and no bool")
        except BaseException as error:
            log.write_error(error)
            return False
        return answer

    @property
    def has_more(self) -> bool:
        """Whether the main thread has something to do beside coroutines."""
        return self._executions.is_over or self._executions.startable is not None

    def _next(self) -> Execution | None:
        """Return what is to be executed next: the first that somebody waits for. None: nothing more."""
        executions = self._executions
        while True:
            with executions.lock:
                if executions.is_over:
                    return None
                execution = executions.startable
                if execution is not None:
                    executions.waiting.remove(execution)
                    executions.open.append(execution)
                    executions.note(is_computing=True)
                    break
            if self._coroutines is None:
                self._wait(None)
            else:
                self._coroutines.run()
        self._callers.take_all(0)  # what came at the same time, so that its worker does not wait for this execution
        return execution

    def _wait(self, seconds: float | None) -> None:
        """Wait for messages of workers, and for what the inbox watches; main thread only."""
        executions = self._executions
        with executions.lock:
            executions.waiting = [each for each in executions.waiting if not each.is_abandoned(ATTACH_SECONDS)]
            executions.note(is_computing=False)
            if self.has_more:
                seconds = 0
            elif executions.waiting:
                seconds = LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS)
            executions.is_at_inbox = True
        self._callers.take_all(seconds)
        with executions.lock:
            executions.note(is_computing=True)
            self._core.has_since = time.monotonic()

    def _look_for_abandoned(self) -> None:
        """Answer calls of executions that no front end has come for, and forget these. Let go of unused metrics.

        End what its model has had for too long.
        """
        executions = self._executions
        while True:
            time.sleep(LOOK_AGAIN_SECONDS if self._core.threads.has_new else LOOK_SECONDS)
            custom_metrics.flush()
            self._calls.look()
            with executions.lock:
                late, let_go = [], []
                if not executions.is_wanted:
                    self._core.threads.rest(looks=True)
                waits_for_core = any(each.wants_core for each in executions.open)
                for number, each in list(executions.all.items()):
                    if each.is_begun:
                        is_late = each.is_late(waits_for_core or self._calls.has(each))
                        if is_late and each.worker is None:  # else the worker ends it
                            late.append(each)
                    elif each.is_over or each.is_abandoned(ATTACH_SECONDS):
                        del executions.all[number]
                    else:
                        let_go += each.responders
            for each in late:
                self._end_late(each)
            for responder in let_go:
                responder.end_if_let_go()

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

    # -- executing

    def _perform(self, execution: Execution) -> None:
        self._core.acquire()
        if execution.is_abandoned(ATTACH_SECONDS):
            self._end(execution)
            return
        execution.begin()
        for front_end in execution.attached:
            tell(front_end, {"begun": execution.number})
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
            self._executions.inbox.watch(self._coroutines.fileno())
        execution.coroutine = asyncio.ensure_future(result, loop=self._coroutines.loop)
        execution.coroutine.add_done_callback(functools.partial(self._ended, execution))

    def _ended(self, execution: Execution, coroutine: asyncio.Future[Any]) -> None:
        """The coroutine of an execution has ended."""
        error = asyncio.CancelledError() if coroutine.cancelled() else coroutine.exception()
        try:
            if error is None:
                self._take_responses(execution, None if self._is_decoupled else coroutine.result())
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
        with self._executions.lock:
            self._core.settle_threads()

    def _take_responses(self, execution: Execution, responses: Any) -> None:
        """Take what execute has returned. Raises TritonModelException for what it must not return."""
        responders = execution.responders
        if self._is_decoupled and responses is not None:
            raise pb_utils.TritonModelException("execute of a decoupled model returns None: responses are sent")
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
            responder.end_if_let_go()

    def _settle(self, execution: Execution) -> None:
        """Give the core back, with the responses if the worker waits for them."""
        executions = self._executions
        with executions.lock:
            worker, is_run = execution.worker, execution.is_run
            execution.is_begun, execution.is_answering = False, is_run and worker is not None
            if not is_run or worker is None:
                execution.worker = None
                execution.is_beside = not (execution.is_answered or execution.was_wanted)
                self._core.weigh(is_light=False)
                executions.open.remove(execution)
                executions.note(executions.is_computing)
        if not is_run or worker is None:
            tell(worker, {"stopped": True, "waits": execution.is_beside}, execution.ask)
            return
        self._callers.answer(execution, worker, [each.take_only() for each in execution.responders])

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
            self._core.release_all(self._executions.open if _in_main_thread() else [execution], goes_on=True)
        self._awaited += not is_foreign
        try:
            yield
        finally:
            self._awaited -= not is_foreign

    def wait(self, seconds: float | None) -> None:
        """Wait for the loop's events, for messages, at most so long. What waits for other models has no core."""
        if self._awaited or self._concurrency > 1:
            self._core.release_all(self._executions.open, goes_on=self._is_decoupled)
        self._wait(seconds)

    def go_on(self) -> None:
        """Return when coroutines may compute: they have a core, unless their model is decoupled, or nobody waits.

        Without one they have little weight, as what is left behind has.
        """
        if self._concurrency > 1 and time.monotonic() - self._core.has_since > TURN_SECONDS:
            self._core.release_all(self._executions.open)
        if self._executions.open and not self._is_decoupled:
            self._core.acquire()
        else:
            self._core.unpin_unused()

    @contextmanager
    def _without_core(self, execution: Execution) -> Iterator[None]:
        """While a thread waits for something else for an execution; only the main thread takes a core again."""
        is_main = _in_main_thread()
        had_core = self._core.release_all(self._executions.open if is_main else [execution], goes_on=not is_main)
        try:
            yield
        finally:
            if had_core and is_main:
                self._core.acquire()

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which what is executed in this thread has no core."""
        execution = working_for.execution()
        return nullcontext() if execution is None else self._without_core(execution)


def _want_front_end() -> None:
    """Have a front end come for what the model does while it has no request. Raises TritonModelException."""
    with suppress(OSError):
        linked().say({"attends": True})


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
