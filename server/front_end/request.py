"""A client's request, from its arrival to its answer: what all requests have in common stands here, once.

A thread that may wait calls `answer`: it begins an attempt, waits for it and finishes it, until there is a response.
The non-blocking way (`inference.py`) calls the parts: `open` and `submit` in the thread that has received the
message, `finish` in the one that waits for all of them, and `conclude` when that has sent the response. Each step of an
ensemble is a `ModelRun` of its own (`ensembles.py`).

One copy of each input into shared memory, one copy of each output out of it; or none, where workers use the client's.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from gangway.executor.logs import OFTEN
from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.server.errors import RequestError, unsupported
from gangway.server.front_end.ensembles import EnsembleRun, count_inner, outcome_of, times_of
from gangway.server.front_end.model_run import (
    ClientCall,
    InnerCall,
    InnerStream,
    ModelRun,
    RequestClock,
    ShapeWatch,
    no_room,
)
from gangway.server.front_end.python_runs import Infer, LeftRun, forget_left, refuse_inner, tell_gone
from gangway.server.front_end.tracing import Tracer
from gangway.server.models.settings import Terms
from gangway.server.requests.codecs import PRECISION_REPORTS, Codec, FrameCodec, TailCodec, TensorCodec, report_of
from gangway.server.requests.data_plane import NO_EXTERNAL, DataPlane, ExternalTensors, PoolExhaustedError, Submission
from gangway.server.requests.ensembles import EnsembleCodec
from gangway.server.requests.mapped_tensors import Mappings, choose_mapped
from gangway.server.requests.python_codec import Answer, Left, PythonCodec, finished, python_in
from gangway.server.requests.regions import NO_REGIONS, Contents, Region, Regions
from gangway.server.requests.validation import RequestPlan

_log = logging.getLogger(__name__)

COMPUTED: Final = frozenset({SlotStatus.OK, SlotStatus.INTERNAL, SlotStatus.INVALID})  # or it was tried


class Cancellable(Protocol):
    """What runs for a call."""

    def cancel(self) -> None:
        """Cancel: the client does not wait for the answer any more. From any thread, at any time, repeatedly."""


class Afterwork:
    """What is left to do for answers that are sent: no client need wait for it. Safe for threads.

    It is added before the answer is sent. Whoever sees something of it calls `do` before. `at_once`: it is done when it
    is added, because other processes see something of it.
    """

    def __init__(self, at_once: bool = False) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._left: deque[Callable[[], None]] = deque()

    def add(self, rest: Callable[[], None], at_once: bool = False) -> None:
        """Do it later, or `at_once`."""
        self._left.append(rest)
        if at_once or self._at_once:
            self.do()

    def do(self) -> None:
        """Return when nothing is left."""
        while self._left:
            with self._lock:
                if self._left:
                    try:
                        self._left[0]()
                    except Exception:  # the others' must not be lost by it
                        _log.exception("an answered request could not be counted: a fault of the server", extra=OFTEN)
                    self._left.popleft()  # not before: until then others wait for it


@dataclass(frozen=True)
class Resources:
    """What all requests of a front end share. Safe for threads. `mappings`: None if workers map no regions."""

    plane: DataPlane
    regions: Regions
    watch: ShapeWatch
    tracer: Tracer
    afterwork: Afterwork
    mappings: Mappings | None = None
    _running: set[Cancellable] = field(default_factory=set)  # until the last byte of the answer has been sent

    @property
    def idle(self) -> bool:
        """Whether no request is being executed and no answer to one is still on its way."""
        return not self._running and not self.plane.usage().requests

    def cancel_with(self, call: ClientCall, running: Cancellable) -> None:
        """Cancel what runs for a call when that is over: answered, or given up by the client."""
        self._running.add(running)
        if not call.add_callback(lambda: self._ended(running)):
            self._ended(running)

    def _ended(self, running: Cancellable) -> None:
        self._running.discard(running)
        running.cancel()


class ClientRequest(ModelRun):
    """A request whose plan is known. Its maker calls `close`, and before that `fail` if it was refused or failed.

    The model and those of an ensemble are in use until then (`uses`). `contents`: of the inputs, for a further attempt;
    empty while they are in the request's memory only. `response_id`: stands in the response.
    """

    regions: Mapping[str, Region] = NO_REGIONS
    contents: Contents = ()
    submission: Submission | None = None
    _maps = True  # workers may use tensors where the client has them

    def __init__(
        self,
        resources: Resources,
        plan: RequestPlan,
        request_id: bytes,
        call: ClientCall,
        arrival_ns: int,
        infer: Infer = refuse_inner,
    ) -> None:
        """Make it. `arrival_ns`: CLOCK_MONOTONIC. `infer` has other models execute what a Python model asks for."""
        clock = RequestClock.of(plan.terms.target_us, call.time_remaining(), arrival_ns)
        self.inner = call.call if isinstance(call, InnerStream) else call if isinstance(call, InnerCall) else None
        if self.inner is not None and self.inner.clock.deadline_ns:
            clock = clock._replace(deadline_ns=self.inner.clock.deadline_ns)
        super().__init__(plan.model, plan.shapes, plan.terms, clock, arrival_ns, resources.watch)
        self._resources = resources
        self.plan = plan
        self.request_id = self.response_id = request_id
        self.call = call
        self._infer = infer
        self._codec: Codec = plan.codec  # type: ignore[assignment] # but of an ensemble

    def take_turn(self, plan: RequestPlan) -> None:
        """Go on with the plan that the request's sequence has made of its own."""
        self.plan = plan
        self._codec = plan.codec  # type: ignore[assignment] # of a model of its own

    def contents_of(self, raws: list[memoryview]) -> Contents:
        """Hold the regions that the request names; return the contents of its inputs, checked. Raises RequestError."""
        if not self.plan.regions:
            return self.plan.contents(raws)
        self.regions = self._resources.regions.hold(self.plan.regions)
        return self.plan.contents(raws, self.regions)

    def decide(self, contents: Contents) -> None:
        """Go on with the plan for these contents, of a request to no ensemble. Raises RequestError."""
        self.plan = self.plan.decided(contents)
        self.shapes, self._codec = self.plan.shapes, self.plan.codec  # type: ignore[assignment]

    def answer(self, contents: Contents) -> bytes:
        """Return the serialised response. Blocks. Raises RequestError."""
        if self.inner is not None:
            self.inner.require_other((self.model.name, *(member.name for member in self.plan.members)))
        if isinstance(self.plan.codec, EnsembleCodec):
            return self._answer_ensemble(self.plan.codec, contents)
        self.contents = contents
        self.decide(contents)
        if self.model.is_decoupled and not hasattr(self.call, "respond"):
            unsupported(f"model '{self.model.name}' is decoupled: its responses need ModelStreamInfer")
        python = python_in(self._codec)
        if python is not None:
            contents = python.with_about(contents, self.request_id)
        while True:
            submission = self.open(contents)
            try:
                self.submit(contents)
                outcome = submission.wait(self.clock.end_ns)
                if outcome is None and python is None:
                    raise self.expired()
            except BaseException:
                submission.close()
                raise
            if outcome is None:
                self.abandon()
                raise self.expired()
            if (response := self.finish_and_conclude(outcome)) is not None:
                break
        if self.plan.wants_report and response:
            response += report_of(outcome, self.shapes.rows, self.target_us, submission.external.count)
        return response

    # -- one attempt

    def open(self, contents: Contents) -> Submission:
        """Take a slot and memory for an attempt, which `finish` gives back. Raises RequestError."""
        external = self._external(contents) if self.regions and self._maps else NO_EXTERNAL
        layout = self._codec.layout(contents)
        try:
            try:
                self.submission = self._resources.plane.open(layout, self.shapes.rows, external)
            except PoolExhaustedError:
                self._resources.afterwork.do()  # requests that are answered may have all slots
                self.submission = self._resources.plane.open(layout, self.shapes.rows, external)
        except PoolExhaustedError as error:
            external.release()
            raise no_room(error) from error
        return self.submission

    def submit(self, contents: Contents, by_bell: bool = False) -> None:
        """Copy the contents, hand the attempt to the scheduler, and cancel it when the call is over.

        `by_bell`: as in `Submission.submit`. Raises RequestError.
        """
        plan, submission = self.plan, self.submission
        assert submission is not None, "opened"
        self._codec.write(submission, contents)
        self.hand_over(submission, self.clock.deadline_ns, plan.terms.priority, plan.refuses_late, by_bell)
        # Only from here on is there something to cancel; a call that has ended meanwhile takes no callback any more.
        self._resources.cancel_with(self.call, submission)

    def abandon(self) -> None:
        """Let an attempt that has not ended in its time end by itself."""
        assert self.submission is not None, "opened"
        if python := python_in(self._codec):
            forget_left(python, self.submission)
        else:
            self.submission.close()

    def may_wait(self, status: SlotStatus) -> bool:
        """Whether `finish` may block: an instance of a Python model may have kept the request."""
        assert self.submission is not None, "opened"
        python = python_in(self._codec)
        return python is not None and (status is not SlotStatus.OK or python.is_left(self.submission.outputs[0]))

    def finish(self, status: SlotStatus) -> bytes | None:
        """Return the serialised response of an attempt that has ended so; `conclude` is to follow.

        None: another attempt must follow. Either the answer had too little room, which the next attempt has. Or memory
        of a region was missing, and copying finds out what is wrong with it. Or the compiled variant has been unloaded.
        Raises RequestError.
        """
        self.finished_ns = time.monotonic_ns()
        response, plan, submission = None, self.plan, self.submission
        assert submission is not None, "opened"
        external, codec = submission.external, self._codec
        try:
            if external is not NO_EXTERNAL and status in COMPUTED and external.has_lost_memory():
                self._maps = False
            elif status is SlotStatus.OK and (python := python_in(codec)):
                response = self._python_response(python, submission)
            elif status is SlotStatus.OK:
                response = self._codec.answer(self.response_id, submission, self.regions)
                if response is not None and self.model.chooses_precision:
                    response += PRECISION_REPORTS[submission.outcome().counts.bf16]
            elif status is SlotStatus.UNAVAILABLE and plan.fallback is not None and self._codec is not plan.fallback:
                self._codec, self._maps = plan.fallback, False
            else:
                if python := python_in(codec):
                    tell_gone(python, submission)
                raise self.failure(submission.outcome())
            if response is None and not self.contents and isinstance(codec, TensorCodec | FrameCodec | TailCodec):
                self.contents = codec.contents_in(submission)
        finally:
            if response is None:
                submission.close()
        self.end_ns = time.monotonic_ns()
        return response

    def finish_and_conclude(self, outcome: SlotOutcome) -> bytes | None:
        """Do both, if the attempt was the last one. Raises RequestError."""
        response = self.finish(outcome.status)
        if response is not None:
            self.conclude(response, outcome)
        return response

    def conclude(self, response: bytes, outcome: SlotOutcome) -> None:
        """Count and trace the answered request, and give the attempt's memory back."""
        assert self.submission is not None, "opened"
        try:
            self.submitted_ns -= self.plan.waited_ns  # waiting for its turn in a sequence is waiting
            self.succeeded(outcome)
            if self._resources.tracer.active:
                self._resources.tracer.answered(self, self.contents, response)
        finally:
            self.submission.close()

    def _python_response(self, codec: PythonCodec, submission: Submission) -> bytes:
        found = codec.read(submission.outputs[0])
        if isinstance(found, Answer):
            outputs, parameters = found.outputs, found.parameters
        else:
            self.is_whole = False
            submission.close()
            with self._left_run(codec, found, self.plan.terms) as run:
                if self.model.is_decoupled:
                    return self._stream(codec, run)
                outputs, parameters, _, _ = run.only()
        return finished(self._codec, codec.response(self.response_id, outputs, parameters, self.regions))

    def _stream(self, codec: PythonCodec, run: LeftRun) -> bytes:
        """Send the responses of a decoupled model but the last one, which is returned; empty: that was one before."""
        respond: Callable[[bytes], None] = self.call.respond  # type: ignore[attr-defined] # as `answer` has seen
        for each in run.responses():
            if each.is_final and each.is_empty and not codec.wants_empty_final:
                return b""
            response = finished(
                self._codec, codec.response(self.response_id, each.outputs, each.parameters, self.regions)
            )
            if each.is_final:
                return response
            respond(response)
        return b""

    def _left_run(self, codec: PythonCodec, left: Left, terms: Terms) -> LeftRun:
        """Return what goes on with a request that an instance of a Python model has kept. Raises RequestError."""
        chain = () if self.inner is None else self.inner.chain
        run = LeftRun(self._resources.plane, codec, left, self.clock, terms, self._infer, chain)
        self._resources.cancel_with(self.call, run)
        return run

    def _external(self, contents: Contents) -> ExternalTensors:
        """Return what of the request the workers are to use where the client has it."""
        mappings, candidates = self._resources.mappings, self.plan.mappable
        if mappings is None or candidates is None:
            return NO_EXTERNAL
        return choose_mapped(candidates, contents, self.regions, mappings)

    # -- other ways to an answer

    def _answer_ensemble(self, codec: EnsembleCodec, contents: Contents) -> bytes:
        resources, plan = self._resources, self.plan
        terms = replace(plan.terms, rejects_late=plan.refuses_late)
        with EnsembleRun(resources.plane, resources.watch, codec, terms, self.clock, self._left_run) as run:
            resources.cancel_with(self.call, run)
            results = run.execute(contents)
            self.finished_ns = time.monotonic_ns()
            response = codec.answer(self.response_id, results, self.regions)
        steps, outcome = run.ended, outcome_of(run.ended, self.begin_ns)
        self.outcome = outcome
        self.submitted_ns, self.end_ns = steps[0].submitted_ns, time.monotonic_ns()
        times, in_time = times_of(steps, self.end_ns - self.begin_ns), self.is_in_time()
        self.model.statistics.succeeded(self.shapes.counted_rows, times, in_time, outcome.counts)
        count_inner(codec.graph, steps)
        if resources.tracer.active:
            resources.tracer.answered(self, contents, response, steps)
        if plan.wants_report:
            response += report_of(outcome, self.shapes.rows, plan.terms.target_us)
        return response

    def answered_from_cache(self, looked_up_ns: int) -> None:
        """Count and trace a request whose answer was in the cache; `looked_up_ns`: when the look-up began."""
        now_ns, target_ns = time.monotonic_ns(), self.target_us * 1000
        in_time = now_ns - self.begin_ns <= target_ns if target_ns else None
        self.model.statistics.cache_hit(now_ns - self.begin_ns, now_ns - looked_up_ns, in_time)
        if self._resources.tracer.active:
            self._resources.tracer.not_executed(self)

    def fail(self, error: RequestError) -> None:
        """Count a request that was refused or has failed, and trace it."""
        self.failed(error, self.target_us > 0)
        if self._resources.tracer.active:
            self._resources.tracer.not_executed(self, error)

    def close(self) -> None:
        """Let go of the regions, the model, and the members of an ensemble."""
        if self.regions:
            self._resources.regions.release(self.regions)
        self.model.uses.end()
        for member in self.plan.members:
            member.uses.end()

    # -- what statistics and traces ask

    @property
    def target_us(self) -> float:
        """The latency target, 0: none."""
        return self.plan.terms.target_us

    def is_in_time(self) -> bool | None:
        """Whether `end_ns` meets the target; an answer that does makes room for others. None: there is none."""
        deadline_ns = self.clock.deadline_ns
        if not deadline_ns:
            return None
        is_met = self.end_ns <= deadline_ns
        if is_met:
            self._resources.plane.admission.met_target()
            statistics = self.model.statistics
            statistics.least_met_us = min(statistics.least_met_us, self.target_us)
        return is_met
