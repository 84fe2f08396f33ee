"""gRPC's own health service: Check answers at once, Watch now and at every change."""

import threading
from collections.abc import Iterator

import grpc
from google.protobuf.message import DecodeError

from gangway.protos import health_pb2
from gangway.server.answers import HEALTH_SERVICES, Answers
from gangway.server.methods import AnyMethod, health_check_of

PERIOD_S = 0.25  # how late a watcher may learn of a change
MAX_WATCHERS = 64  # each has a thread

_Status = health_pb2.HealthCheckResponse.ServingStatus


class Health:
    """`check` is a method like the others; `watch` is a behaviour for gRPC, of bytes."""

    def __init__(self, answers: Answers, max_watchers: int = MAX_WATCHERS) -> None:
        self._answers = answers
        self._max_watchers = max_watchers
        self._watchers = threading.BoundedSemaphore(max_watchers)
        self.check: AnyMethod = health_check_of(answers)

    def watch(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the status of a service whenever it has changed, until the call ends."""
        try:
            request = health_pb2.HealthCheckRequest.FromString(message)
        except DecodeError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a HealthCheckRequest: {error}")
        if not self._watchers.acquire(blocking=False):
            context.abort(grpc.StatusCode.UNAVAILABLE, f"{self._max_watchers} watch the health already")
        ended = threading.Event()

        def end() -> None:
            self._watchers.release()
            ended.set()

        if not context.add_callback(end):
            end()
        told: health_pb2.HealthCheckResponse | None = None
        while not ended.is_set():
            status = self._status(request)
            if status != told:
                told = status
                yield status.SerializeToString()
            ended.wait(PERIOD_S)

    def _status(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Return the status; a service that is not known is none that fails: it may come."""
        if request.service not in HEALTH_SERVICES:
            return health_pb2.HealthCheckResponse(status=_Status.SERVICE_UNKNOWN)
        return self._answers.health_check(request)
