"""A client's request, from its arrival to its answer: what all requests have in common stands here, once.

`answer` is a coroutine (`serving/pending.py`): it begins an attempt, waits for it and finishes it, until there is a
response. `conclude` follows when that has been sent. Each step of an ensemble is a `ModelRun` of its own
(`ensembles.py`).

One copy of each input into shared memory, one copy of each output out of it; or none, where workers use the client's.
What copies much is done by a thread aside of the loop.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.python_backend.cancellations import NEVER_CANCELLED, Flag
from gangway.server.cancellations import Cancellations
from gangway.server.errors import RequestError, unavailable, unsupported
from gangway.server.requests.codecs import PRECISION_REPORTS, Codec, report_of
from gangway.server.requests.data_plane import NO_EXTERNAL, ExternalTensors, Submission
from gangway.server.requests.ensembles import EnsembleCodec
from gangway.server.requests.heap import ColdError
from gangway.server.requests.mapped_tensors import Mappings, choose_mapped
from gangway.server.requests.python_codec import Envelope, PythonAnswer, PythonCodec, PythonResponse, parameters_text
from gangway.server.requests.regions import NO_REGIONS, Contents, Region, Regions
from gangway.server.requests.validation import RequestPlan
from gangway.server.serving.access_log import Access
from gangway.server.serving.call import Begin, Call
from gangway.server.serving.inference.ensemble_counts import EndedStep, count_inner, outcome_of, times_of
from gangway.server.serving.inference.ensembles import EnsembleRun
from gangway.server.serving.inference.forwarded_headers import ForwardedHeaders
from gangway.server.serving.inference.iterations import Iteration
from gangway.server.serving.inference.model_run import ModelRun, RequestClock, ShapeWatch
from gangway.server.serving.inference.python import (
    LARGE_BYTES,
    InnerCall,
    KeptRun,
    Origin,
    forget_kept,
    tell_gone,
)
from gangway.server.serving.pending import drive
from gangway.server.serving.slots import Slots
from gangway.server.serving.tracing import Tracer

_OK: Final = SlotStatus.OK
COMPUTED: Final = frozenset({_OK, SlotStatus.INTERNAL, SlotStatus.INVALID})  # or it was tried


class Cancellable(Protocol):
    """What runs for a call."""

    def cancel(self) -> None:
        """Cancel: the client does not wait for the answer any more. At any time, repeatedly."""


@dataclass(frozen=True)
class Resources:
    """For the loop's thread, but for `idle`. `mappings`: None if workers map no regions.

    `forwarded`: which headers of a call are parameters of its requests.
    """

    slots: Slots
    regions: Regions
    watch: ShapeWatch
    tracer: Tracer
    cancellations: Cancellations
    mappings: Mappings | None = None
    forwarded: ForwardedHeaders = field(default_factory=ForwardedHeaders)
    _running: set[Cancellable] = field(default_factory=set)  # until the last byte of the answer has been sent

    @property
    def idle(self) -> bool:
        """Whether no request is being executed and no answer to one is still on its way."""
        return not self._running and not self.slots.plane.usage().requests

    def cancel_with(self, call: Call, running: Cancellable) -> None:
        """Cancel what runs for a call when that is over: answered, or given up by the client."""
        self._running.add(running)
        if not call.add_callback(partial(self._ended, running)):
            self._ended(running)

    def flag_of(self, call: Call) -> Flag:
        """Return what tells Python models when a call is over. Raises RequestError if there are too many calls."""
        if call.flag is not None:
            return call.flag
        flag = self.cancellations.begin()
        if flag is None:
            unavailable("Exceeds maximum queue size: too many calls wait for Python models")
        call.flag = flag
        if not call.add_callback(partial(self.cancellations.end, flag)):
            self.cancellations.end(flag)
        return flag

    def _ended(self, running: Cancellable) -> None:
        self._running.discard(running)
        running.cancel()


class ClientRequest(ModelRun):
    """A request whose plan is known. Its maker calls `close`, and before that `fail` if it was refused or failed.

    The model and those of an ensemble are in use until then (`uses`). `given`: contents of the inputs, until they are
    in the request's memory: many requests that wait would hold their tensors twice. `contents`: the same where they may
    be needed once more. `placed`: memory that has them already. `response_id`: stands in the response. `by_slot`: what
    happened last was that a slot has ended.
    """

    regions: Mapping[str, Region] = NO_REGIONS
    given: Contents = ()
    contents: Contents = ()
    submission: Submission | None = None
    placed: Submission | None = None
    by_slot = False
    _maps = True  # workers may use tensors where the client has them
    _kept_outcome: SlotOutcome | None = None  # of what an instance of a Python model has kept
    _rest: Callable[[], None] | None = None

    def __init__(
        self, resources: Resources, plan: RequestPlan, request_id: bytes, call: Call, arrival_ns: int, begin: Begin
    ) -> None:
        """Make it. `arrival_ns`: CLOCK_MONOTONIC. `begin` has other models execute what a Python model asks for."""
        clock = RequestClock.of(plan.terms.target_us, call.time_remaining(), arrival_ns)
        self.inner = call if isinstance(call, InnerCall) else None
        if self.inner is not None:
            self.inner.run = self
            if self.inner.clock.deadline_ns or self.inner.is_step:  # whose own target is for clients' requests
                clock = clock._replace(deadline_ns=self.inner.clock.deadline_ns)
        super().__init__(plan.model, plan.shapes, plan.terms, clock, arrival_ns, resources.watch)
        self._resources = resources
        self.plan = plan
        self.request_id = self.response_id = request_id
        self.call = call
        self._begin = begin
        self._codec: Codec = plan.codec  # type: ignore[assignment] # but of an ensemble

    @property
    def envelope(self) -> Envelope:
        """What Python models are told of it, beside its plan. Raises RequestError if there are too many calls."""
        resources, call = self._resources, self.call
        asks = self.model.is_python or any(member.is_python for member in self.plan.members)
        flag = resources.flag_of(call) if asks else NEVER_CANCELLED
        return Envelope(self.request_id, resources.forwarded.of(call), flag)

    def take_turn(self, plan: RequestPlan) -> None:
        """Go on with the plan that the request's sequence has made of its own."""
        self.plan = plan
        self._codec = plan.codec  # type: ignore[assignment] # of a model of its own

    async def take(self, raws: list[memoryview]) -> None:
        """Hold the regions that the request names, and its inputs, checked. Raises RequestError."""
        if self.plan.regions:
            self.regions = self._resources.regions.hold(self.plan.regions)
        if self.plan.takes_long:
            self.given = await self._resources.slots.aside.run(self.plan.contents, raws, self.regions)
        else:
            self.given = self.plan.contents(raws, self.regions)

    async def answer(self) -> bytes:
        """Return the serialised response; empty if all have been sent. `conclude` is to follow. Raises RequestError."""
        if self.inner is not None:
            self.inner.require_other((self.model.name, *(member.name for member in self.plan.members)))
        self.call.model = self.model.name
        if self.model.is_decoupled and not self.call.takes_many:
            way = "ModelStreamInfer" if self.inner is None else "exec(decoupled=True) or async_exec(decoupled=True)"
            unsupported(f"model '{self.model.name}' is decoupled: its responses need {way}")
        if isinstance(self.plan.codec, EnsembleCodec):
            return await self._answer_ensemble(self.plan.codec)
        if self.plan.calls is not None:
            self.plan = self.plan.decided(self.given)
            self.shapes, self._codec = self.plan.shapes, self.plan.codec  # type: ignore[assignment]
        if self.regions or self._resources.tracer.wants_tensors:
            self.contents = self.given
        if isinstance(self._codec, PythonCodec):
            self.given = self._codec.with_about(self.given, self.envelope)
        while (response := await self._finish(await self._attempt())) is None:
            self.given = self.contents
        self._rest = partial(self._count, response)
        if self.plan.wants_report and response:
            assert self.submission is not None, "answered"
            outcome = self._kept_outcome or self.submission.outcome()
            response += report_of(outcome, self.shapes.rows, self.target_us, self.submission.external.count)
        return response

    # -- one attempt

    async def _attempt(self) -> SlotStatus:
        """Hand the request to the scheduler; return how it has ended there. Raises RequestError."""
        contents, plan, codec, slots, placed = self.given, self.plan, self._codec, self._resources.slots, self.placed
        if placed is not None:
            submission, self.placed = placed, None
        else:
            external = self._external(contents) if self.regions and self._maps else NO_EXTERNAL
            if codec.states is not None:
                external = codec.states.tensors()
            layout, rows = codec.layout(contents), self.shapes.rows
            try:
                submission = slots.open(layout, rows, external, LARGE_BYTES if external is NO_EXTERNAL else None)
            except ColdError:
                await slots.aside.run(slots.plane.warm, layout, rows)
                submission = slots.open(layout, rows)
        self.submission, slot = submission, submission.slot
        try:
            if placed is not None:
                pass
            elif sum(map(len, submission.inputs)) > LARGE_BYTES:
                await slots.aside.run(codec.write, submission, contents)
            else:
                codec.write(submission, contents)
            self.given = contents = ()
            ended = slots.expect(slot, self.clock.end_ns)
            self.hand_over(submission, self.clock.deadline_ns, plan.terms.priority, plan.refuses_late)
        except BaseException:
            slots.forget(slot)
            submission.close()
            raise
        # Only from here on is there something to cancel; a call that has ended meanwhile takes no callback any more.
        self._resources.cancel_with(self.call, submission)
        if not await ended:
            self._abandon(submission)
            raise self.expired()
        self.by_slot = True
        return submission.status()

    def _abandon(self, submission: Submission) -> None:
        """Let an attempt that has not ended in its time end by itself."""
        if isinstance(self._codec, PythonCodec):
            drive(forget_kept(self._resources.slots, self._codec, submission))
        else:
            submission.close()

    async def _finish(self, status: SlotStatus) -> bytes | None:
        """Return the serialised response of an attempt that has ended so.

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
            elif status is _OK and isinstance(codec, PythonCodec):
                response = await self._python_response(codec, submission)
            elif status is _OK:
                if sum(map(len, submission.outputs)) > LARGE_BYTES or codec.classes:  # which may import numpy
                    answering = self._resources.slots.aside.run(
                        codec.answer, self.response_id, submission, self.regions
                    )
                    response, self.by_slot = await answering, False
                else:
                    response = codec.answer(self.response_id, submission, self.regions)
                if response is not None and self.model.chooses_precision:
                    response += PRECISION_REPORTS[submission.outcome().counts.bf16]
            elif status is SlotStatus.UNAVAILABLE and plan.fallback is not None and codec is not plan.fallback:
                self._codec, self._maps = plan.fallback, False
            else:
                if isinstance(codec, PythonCodec):
                    tell_gone(self._resources.slots, codec, submission)
                raise self.failure(submission.outcome())
            if response is None and not self.contents:
                self.contents = codec.contents_in(submission)
        finally:
            if response is None:
                submission.close()
        self.end_ns = time.monotonic_ns()
        return response

    async def _python_response(self, codec: PythonCodec, submission: Submission) -> bytes:
        found = codec.read(submission.outputs[0])
        if isinstance(found, PythonAnswer):
            return await self._response_of(codec, found)
        self.is_whole = self.by_slot = False
        outcome = submission.outcome()
        submission.close()
        run = KeptRun(self._resources.slots, codec, found, self._origin, self.plan.terms, self.refused_ns)
        self._resources.cancel_with(self.call, run)
        try:
            if self.call.takes_many and self.model.is_decoupled:
                return await self._stream(codec, run)
            return await self._response_of(codec, await run.next())
        finally:
            self._kept_outcome, self.finished_ns = run.outcome_of(outcome), time.monotonic_ns()
            run.cancel()

    async def _response_of(self, codec: PythonCodec, found: PythonAnswer | PythonResponse) -> bytes:
        def make() -> bytes:
            response = codec.response_of(self.response_id, found.outputs, self.regions)
            return response + parameters_text(found.parameters)

        size_bytes = sum(len(each.content) for each in found.outputs.values())
        if size_bytes > LARGE_BYTES or codec.classes:
            self.by_slot = False
            return await self._resources.slots.aside.run(make)
        return make()

    async def _stream(self, codec: PythonCodec, run: KeptRun) -> bytes:
        """Send the responses of a decoupled model but the last one, which is returned; empty: that was one before."""
        while True:
            found = await run.next()
            if found.is_final and found.is_empty:
                return codec.empty_response(self.response_id) if codec.wants_empty_final else b""
            if found.is_final:
                return await self._response_of(codec, found)
            try:
                self.call.respond(found.error or await self._response_of(codec, found))
            except RequestError as error:  # of this response alone
                self.call.respond(error.without_traceback())

    @property
    def _origin(self) -> Origin:
        """Of requests that models make for this one."""
        return Origin(self.clock, self._begin, () if self.inner is None else self.inner.chain)

    def _external(self, contents: Contents) -> ExternalTensors:
        """Return what of the request the workers are to use where the client has it."""
        mappings, candidates = self._resources.mappings, self.plan.mappable
        if mappings is None or candidates is None:
            return NO_EXTERNAL
        return choose_mapped(candidates, contents, self.regions, mappings)

    # -- other ways to an answer

    async def _answer_ensemble(self, codec: EnsembleCodec) -> bytes:
        resources, plan = self._resources, self.plan
        terms = replace(plan.terms, rejects_late=plan.refuses_late)
        if resources.tracer.wants_tensors:
            self.contents = self.given
        with EnsembleRun(resources.slots, self.watch, codec, terms, self.envelope, self._origin) as run:
            resources.cancel_with(self.call, run)
            contents, self.given = self.given, ()
            run.begin(contents)
            del contents
            while (found := await run.next()) is not None:
                response, is_last = await self._ensemble_answer(codec, found), found.is_last
                found.answered()
                if is_last:
                    break
                self.call.respond(response)
            else:
                response = codec.empty_response(self.response_id) if codec.wants_empty_final else b""
        self.end_ns = time.monotonic_ns()
        self.outcome = outcome_of(run.ended, self.begin_ns)
        self._rest = partial(self._count_ensemble, codec, run.ended, self.outcome, response)
        if plan.wants_report and response:
            response += report_of(self.outcome, self.shapes.rows, plan.terms.target_us)
        return response

    async def _ensemble_answer(self, codec: EnsembleCodec, found: Iteration) -> bytes:
        """Return the serialised answer of what steps have left. Raises RequestError."""
        self.finished_ns = time.monotonic_ns()
        results = found.tensors.results()
        made = partial(codec.answer, self.response_id, results, found.all_parameters, self.regions)
        if sum(len(each.content) for each in results.values()) > LARGE_BYTES or codec.classes:
            return await self._resources.slots.aside.run(made)
        return made()

    def answered_from_cache(self, looked_up_ns: int) -> None:
        """Count and trace a request whose answer was in the cache; `looked_up_ns`: when the look-up began."""
        now_ns, target_ns = time.monotonic_ns(), self.target_us * 1000
        in_time = now_ns - self.begin_ns <= target_ns if target_ns else None
        self.model.statistics.cache_hit(now_ns - self.begin_ns, now_ns - looked_up_ns, in_time)
        if self._is_traced:
            self._resources.tracer.not_executed(self)

    # -- the end

    def conclude(self) -> None:
        """Count and trace the answered request, and give the memory of its last attempt back. Once, or repeatedly."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest()

    def end(self) -> None:
        """Conclude and close it."""
        try:
            self.conclude()
        finally:
            self.close()

    def _count(self, response: bytes) -> None:
        submission = self.submission
        assert submission is not None, "answered"
        try:
            self.submitted_ns -= self.plan.waited_ns  # waiting for its turn in a sequence is waiting
            self.succeeded(self._kept_outcome or submission.outcome())
            if self._is_traced:
                self._resources.tracer.answered(self, self.contents, response)
        finally:
            submission.close()

    def _count_ensemble(
        self, codec: EnsembleCodec, steps: list[EndedStep], outcome: SlotOutcome, response: bytes
    ) -> None:
        self.submitted_ns = steps[0].run.submitted_ns
        times, in_time = times_of(steps, self.end_ns - self.begin_ns), self.is_in_time()
        self.model.statistics.succeeded(self.shapes.counted_rows, times, in_time, outcome.counts)
        count_inner(codec.graph, steps)
        if self._is_traced:
            self._resources.tracer.answered(self, self.contents, response, [each.run for each in steps])

    def fail(self, error: RequestError) -> None:
        """Count a request that was refused or has failed, and trace it."""
        self.failed(error, self.target_us > 0)
        if self._is_traced:
            self._resources.tracer.not_executed(self, error)

    def close(self) -> None:
        """Let go of the regions, the model, and the members of an ensemble."""
        if self.regions:
            self._resources.regions.release(self.regions)
        self.model.uses.end()
        for member in self.plan.members:
            member.uses.end()

    # -- what statistics, traces and the access log ask

    def note(self, access: Access) -> None:
        """Say what is known of the request, which is to be answered next."""
        access.model, access.version, access.request_id = self.model.name, str(self.model.version), self.request_id
        outcome = self.outcome
        if outcome is None and self._rest is not None and self.submission is not None:
            outcome = self._kept_outcome or self.submission.outcome()
        if outcome is not None:
            access.queue_us, access.compute_us = outcome.queue_us, outcome.compute_us

    @property
    def _is_traced(self) -> bool:
        """Whether it may have a trace; a step belongs to that of its ensemble."""
        return self._resources.tracer.active and not (self.inner is not None and self.inner.is_step)

    @property
    def target_us(self) -> float:
        """The latency target, 0: none."""
        return self.plan.terms.target_us

    def is_in_time(self) -> bool | None:
        """Whether `end_ns` meets the target; an answer that does makes room for others. None: there is none."""
        deadline_ns = self.clock.deadline_ns
        if not deadline_ns or (self.inner is not None and self.inner.is_step):
            return None
        is_met = self.end_ns <= deadline_ns
        if is_met:
            self._resources.slots.plane.admission.met_target()
            statistics = self.model.statistics
            statistics.least_met_us = min(statistics.least_met_us, self.target_us)
        return is_met
