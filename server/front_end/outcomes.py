"""When a request has come, when it is to be answered, and when nobody waits for it any more."""

import time
from typing import NamedTuple

import grpc

from gangway.executor.memory_budget import memory_budget
from gangway.executor.slots import SlotStatus
from gangway.server.errors import RequestError
from gangway.server.requests.admission import OVERLOADED
from gangway.server.requests.data_plane import PoolExhaustedError

# What a client is told of a request that was handed over and has not been answered.


def no_room(error: PoolExhaustedError) -> RequestError:
    """Return the error for a request that found no slot or no memory."""
    if error.for_good:
        return RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{error}: send fewer rows")
    return RequestError(grpc.StatusCode.UNAVAILABLE, f"Exceeds maximum queue size: {error}")


def failure(name: str, status: SlotStatus, max_queue: int, reason: str = "") -> RequestError:
    """Return the error for a request to model `name` that ended with this status.

    `max_queue`: of its queue policy. `reason`: what the worker says about it, one line.
    """
    match status:
        case SlotStatus.DEADLINE:
            message = f"the call's deadline passed before model '{name}' had answered"
            return RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
        case SlotStatus.LATE:
            return RequestError(grpc.StatusCode.UNAVAILABLE, f"Request timeout expired for model '{name}'")
        case SlotStatus.QUEUE_FULL:
            message = f"Exceeds maximum queue size: {max_queue} requests wait for model '{name}'"
            return RequestError(grpc.StatusCode.UNAVAILABLE, message)
        case SlotStatus.CROWDED:
            return RequestError(grpc.StatusCode.UNAVAILABLE, OVERLOADED)
        case SlotStatus.CANCELLED:
            return RequestError(grpc.StatusCode.CANCELLED, f"the request for model '{name}' was cancelled")
        case SlotStatus.UNAVAILABLE:
            message = f"the request for model '{name}' could not be executed now; it may be sent again"
            return RequestError(grpc.StatusCode.UNAVAILABLE, message)
        case SlotStatus.INVALID:
            return RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"model '{name}': {reason}")
        case SlotStatus.CRASHED:
            message = f"model '{name}' ended the worker processes that executed it; this request is given up"
            return RequestError(grpc.StatusCode.INTERNAL, message)
        case SlotStatus.NO_MEMORY:
            needs = f"the request for model '{name}' needs more than {memory_budget().limit} leave room for"
            return RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{needs}: send fewer rows")
        case _:
            why = f": {reason}" if reason else ""
            return RequestError(grpc.StatusCode.INTERNAL, f"the execution of model '{name}' failed{why}")


MAX_WAIT_NS = 600 * 10**9  # every wait ends; a later deadline counts as none
LIMIT_SLACK_NS = 20 * 10**6  # the client's clock started earlier than ours


class RequestClock(NamedTuple):
    """Instants of one request, CLOCK_MONOTONIC; 0 is none.

    `deadline_ns` is a target: what happens to a request that misses it is for its queue policy to say. After `limit_ns`
    the client is gone. A limit without a target makes none: whoever wants an answer by some time says so by `timeout`.
    """

    arrival_ns: int  # of the bytes at the front end
    deadline_ns: int
    limit_ns: int

    @classmethod
    def of(cls, target_us: float, remaining_seconds: float | None, arrival_ns: int) -> "RequestClock":
        """Return the clock of a request with this target (0: none), whose client waits so long (None: for ever)."""
        limited = remaining_seconds is not None and remaining_seconds * 1e9 < MAX_WAIT_NS
        limit_ns = time.monotonic_ns() + max(0, int((remaining_seconds or 0) * 1e9)) if limited else 0
        target_ns = min(int(target_us * 1000), MAX_WAIT_NS)
        deadline_ns = arrival_ns + target_ns if target_ns else 0
        return cls(arrival_ns, min(deadline_ns, limit_ns) if limit_ns else deadline_ns, limit_ns)

    @property
    def end_ns(self) -> int:
        """When to stop waiting."""
        return self.limit_ns or self.arrival_ns + MAX_WAIT_NS

    def is_met(self, end_ns: int) -> bool | None:
        """Return whether an answer at `end_ns` meets the target; None if there is none."""
        return end_ns <= self.deadline_ns if self.deadline_ns else None

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
