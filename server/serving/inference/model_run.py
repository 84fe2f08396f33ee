"""One run of a model, for a client's request or for a step of an ensemble: its deadline, how it ends, how it counts."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from gangway.base.logs import OFTEN
from gangway.base.memory_budget import memory_budget
from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.protos import StatusCode
from gangway.server.errors import RequestError
from gangway.server.messages import FirstAnswer, ShapeWanted
from gangway.server.models.served import ServedModel
from gangway.server.models.settings import Terms
from gangway.server.models.tensors import Shapes
from gangway.server.requests.admission import OVERLOADED
from gangway.server.requests.data_plane import PoolExhaustedError, Scheduling, Submission
from gangway.server.statistics import RequestTimes

_log = logging.getLogger(__name__)

MAX_WAIT_NS = 600 * 10**9  # every wait ends; a later deadline counts as none
LIMIT_SLACK_NS = 20 * 10**6  # the client's clock started earlier than ours


class RequestClock(NamedTuple):
    """When a request has come, when it is to be answered, and when its client stops waiting.

    Instants are CLOCK_MONOTONIC; 0 is none. `deadline_ns` comes from a latency target: the queue policy says what
    happens to a request that misses it. After `limit_ns` the client is gone. A limit does not make a deadline: a client
    that wants an answer by some time sends the parameter `timeout`.
    """

    arrival_ns: int  # of the bytes at the front end
    deadline_ns: int
    limit_ns: int

    @classmethod
    def of(cls, target_us: float, remaining_seconds: float | None, arrival_ns: int) -> "RequestClock":
        """Return a request's clock. `target_us` 0: no target. `remaining_seconds`: of the client, None: for ever."""
        if remaining_seconds is None and not target_us:
            return cls(arrival_ns, 0, 0)
        limited = remaining_seconds is not None and remaining_seconds * 1e9 < MAX_WAIT_NS
        limit_ns = time.monotonic_ns() + max(0, int((remaining_seconds or 0) * 1e9)) if limited else 0
        target_ns = min(int(target_us * 1000), MAX_WAIT_NS)
        deadline_ns = arrival_ns + target_ns if target_ns else 0
        return cls(arrival_ns, min(deadline_ns, limit_ns) if limit_ns else deadline_ns, limit_ns)

    @classmethod
    def without_client(cls) -> "RequestClock":
        """Return the clock of what nobody waits for."""
        return cls(time.monotonic_ns(), 0, 0)

    @property
    def end_ns(self) -> int:
        """When to stop waiting."""
        return self.limit_ns or self.arrival_ns + MAX_WAIT_NS

    def status_of(self, status: SlotStatus, end_ns: int) -> SlotStatus:
        """Return how a request ended that ended with `status` at `end_ns`.

        gRPC ends a call at its deadline as if the client had cancelled it.
        """
        timed_out = self.limit_ns and end_ns > self.limit_ns - LIMIT_SLACK_NS
        return SlotStatus.DEADLINE if timed_out and status is SlotStatus.CANCELLED else status

    @property
    def status_at_end(self) -> SlotStatus:
        """How a request ended that was not answered by then."""
        return SlotStatus.DEADLINE if self.limit_ns else SlotStatus.UNAVAILABLE


def no_room(error: PoolExhaustedError) -> RequestError:
    """Return the error for a request that found no slot or no memory."""
    if error.for_good:
        return RequestError(StatusCode.RESOURCE_EXHAUSTED, f"{error}: send fewer rows")
    return RequestError(StatusCode.UNAVAILABLE, f"Exceeds maximum queue size: {error}")


def failure(name: str, status: SlotStatus, max_queue: int, reason: str = "") -> RequestError:
    """Return the error for a request to model `name` that was handed over and ended with this status.

    `max_queue`: of its queue policy. `reason`: what the worker says about it, one line.
    """
    match status:
        case SlotStatus.DEADLINE:
            message = f"the call's deadline passed before model '{name}' had answered"
            return RequestError(StatusCode.DEADLINE_EXCEEDED, message)
        case SlotStatus.LATE:
            return RequestError(StatusCode.UNAVAILABLE, f"Request timeout expired for model '{name}'")
        case SlotStatus.QUEUE_FULL:
            message = f"Exceeds maximum queue size: {max_queue} requests wait for model '{name}'"
            return RequestError(StatusCode.UNAVAILABLE, message)
        case SlotStatus.CROWDED:
            return RequestError(StatusCode.UNAVAILABLE, OVERLOADED)
        case SlotStatus.CANCELLED:
            return RequestError(StatusCode.CANCELLED, f"the request for model '{name}' was cancelled")
        case SlotStatus.UNAVAILABLE:
            message = f"the request for model '{name}' could not be executed now; it may be sent again"
            return RequestError(StatusCode.UNAVAILABLE, message)
        case SlotStatus.INVALID:
            return RequestError(StatusCode.INVALID_ARGUMENT, f"model '{name}': {reason}")
        case SlotStatus.CRASHED:
            message = f"model '{name}' ended the worker processes that executed it; this request is given up"
            return RequestError(StatusCode.INTERNAL, message)
        case SlotStatus.NO_MEMORY:
            needs = f"the request for model '{name}' needs more than {memory_budget().limit} leave room for"
            return RequestError(StatusCode.RESOURCE_EXHAUSTED, f"{needs}: send fewer rows")
        case _:
            why = f": {reason}" if reason else ""
            return RequestError(StatusCode.INTERNAL, f"the execution of model '{name}' failed{why}")


Sizes = tuple[int, ...]

ASK_AGAIN_S = 60.0  # the supervisor may have had too much to do
MAX_REMEMBERED = 1024


class ShapeWatch:
    """Tells the supervisor which sizes of symbolic dimensions requests have: each once, and again after a while.

    It tells the time of a model's first answer, too, where no trial request has shown the model's time alone.

    `tell` says whether the supervisor could be told.
    """

    def __init__(self, tell: Callable[[ShapeWanted | FirstAnswer], bool]) -> None:
        self._tell = tell
        self._asked: OrderedDict[tuple[str, int, Sizes], float] = OrderedDict()
        self._used: dict[tuple[str, int, Sizes], float] = {}
        self._answered: dict[tuple[str, int], int] = {}  # number of the model whose first answer was told

    def used(self, model: ServedModel, sizes: Sizes) -> None:
        """A request of these sizes has been answered."""
        now = time.monotonic()
        key = (model.name, model.version, sizes)
        if sizes in model.compiled:
            self._used[(model.name, model.version, model.compiled[sizes].variant)] = now
            return
        if now - self._asked.get(key, -ASK_AGAIN_S) < ASK_AGAIN_S:
            return
        self._asked[key] = now
        if len(self._asked) > MAX_REMEMBERED:
            self._asked.popitem(last=False)
        variants = {part.variant for part in model.compiled.values()}
        oldest = sorted(variants, key=lambda other: self._used.get((model.name, model.version, other), 0.0))
        self._used = {known: at for known, at in self._used.items() if known[:2] != key[:2] or known[2] in oldest}
        if not self._tell(ShapeWanted(model.name, model.version, sizes, tuple(oldest))):
            del self._asked[key]

    def answered(self, model: ServedModel, shapes: Shapes, row_us: float) -> None:
        """A request was answered by a model whose time alone is not known."""
        key = (model.name, model.version)
        if model.is_ensemble or (model.symbols and model.compiled_for(shapes) is not None):
            return  # a compiled size has a time of its own
        if self._answered.get(key) != model.load and self._tell(FirstAnswer(model.model_id, *key, row_us)):
            self._answered[key] = model.load


class ModelRun:
    """A model computes one request. Not safe for threads.

    Instants are CLOCK_MONOTONIC in nanoseconds, 0 until they are known. `begin_ns`: the request has come, or the last
    input of a step is there. `submitted_ns`: the scheduler has it. `finished_ns`: the front end knows that it is
    computed. `end_ns`: the answer is made, or the next steps can begin. `queue`: what its model's queue policy says.
    """

    submitted_ns = finished_ns = end_ns = 0
    outcome: SlotOutcome | None = None
    is_whole = True  # the outcome is that of all that was computed

    def __init__(
        self, model: ServedModel, shapes: Shapes, queue: Terms, clock: RequestClock, begin_ns: int, watch: ShapeWatch
    ) -> None:
        self.model = model
        self.shapes = shapes
        self.queue = queue
        self.clock = clock
        self.begin_ns = begin_ns
        self.watch = watch

    def hand_over(
        self,
        submission: Submission,
        deadline_ns: int,
        priority: int,
        rejects_late: bool,
        compound: int = 0,
        last: bool = True,
    ) -> None:
        """Hand it to the scheduler. Raises RequestError (UNAVAILABLE)."""
        clock, queue = self.clock, self.queue
        self.submitted_ns = time.monotonic_ns()
        scheduling = Scheduling(
            deadline_ns, priority, clock.arrival_ns, clock.limit_ns, rejects_late, queue.max_queue, compound,
            self.queue_end_ns, queue.delays,
        )  # fmt: skip
        try:
            submission.submit(scheduling, by_bell=True, last=last)
        except PoolExhaustedError as error:
            raise no_room(error) from error

    @property
    def queue_end_ns(self) -> int:
        """Until when it may wait to begin, once it is handed over; 0: as long as it takes."""
        return self.submitted_ns + self.queue.queue_us * 1000 if self.queue.queue_us else 0

    @property
    def refused_ns(self) -> int:
        """When it is refused if it has not begun; 0: never."""
        return 0 if self.queue.delays else self.queue_end_ns

    def failure(self, outcome: SlotOutcome) -> RequestError:
        """Return the error for an outcome that is not OK."""
        status = self.clock.status_of(outcome.status, self.finished_ns)
        if status is SlotStatus.INTERNAL and outcome.reason:
            _log.warning(
                "%s: onnxruntime could not execute a request: %s", self.model.name, outcome.reason, extra=OFTEN
            )
        return failure(self.model.name, status, self.queue.max_queue, outcome.reason)

    def expired(self) -> RequestError:
        """Return the error for a run that has not ended by `clock.end_ns`."""
        return failure(self.model.name, self.clock.status_at_end, self.queue.max_queue)

    def succeeded(self, outcome: SlotOutcome) -> None:
        """Count a run that has ended well, at `end_ns`."""
        model, rows, self.outcome = self.model, self.shapes.counted_rows, outcome
        times, in_time = self.times_of(outcome), self.is_in_time()
        batch_rows = max(rows, outcome.batch_rows)
        model.statistics.succeeded(rows, times, in_time, outcome.counts, batch_rows, outcome.leads)
        if not model.isolated_us and self.is_whole:
            self.watch.answered(model, self.shapes, outcome.compute_us / batch_rows)
        if model.symbols and model.sequence is None:
            self.watch.used(model, model.key_of(self.shapes.sizes))

    def failed(self, error: RequestError, had_target: bool) -> None:
        """Count a run that has failed, now."""
        self.model.statistics.failed(time.monotonic_ns() - self.begin_ns, error.code, had_target)

    def is_in_time(self) -> bool | None:
        """Whether `end_ns` meets a target of its own; None: there is none."""
        return None

    @property
    def start_ns(self) -> int:
        """When the first task began; 0 if none did."""
        return self.clock.arrival_ns + round(self.outcome.queue_us * 1000) if self.outcome else 0

    @property
    def computed_ns(self) -> int:
        """When the last task ended; 0 if none did."""
        return self.start_ns + round(self.outcome.compute_us * 1000) if self.outcome else 0

    def times_of(self, outcome: SlotOutcome) -> RequestTimes:
        """Return what the model's statistics count of this outcome."""
        begin_ns, submitted_ns, finished_ns, end_ns = self.begin_ns, self.submitted_ns, self.finished_ns, self.end_ns
        infer_ns = int(outcome.compute_us * 1000)
        return RequestTimes(
            total=end_ns - begin_ns,
            queue=max(0, finished_ns - submitted_ns - infer_ns),
            compute_input=submitted_ns - begin_ns,
            compute_infer=infer_ns,
            compute_output=end_ns - finished_ns,
        )
