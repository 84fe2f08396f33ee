"""What a client is told of a request that was handed over and has not been answered."""

import grpc

from gangway.executor.memory_budget import memory_budget
from gangway.executor.slots import SlotStatus
from gangway.server.data_plane import PoolExhaustedError
from gangway.server.door import OVERLOADED
from gangway.server.errors import RequestError


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
