"""The server's own account of where the time went, from the difference of two ModelStatistics answers."""

from dataclasses import dataclass

from gangway.clients.errors import RefusedError
from gangway.protos import grpc_service_pb2 as pb

PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class ServerTimes:
    """Successful requests, and nanoseconds per phase, cumulated over them."""

    requests: int
    phase_ns: dict[str, int]

    def since(self, before: "ServerTimes") -> "ServerTimes":
        """Return what happened after `before`."""
        return ServerTimes(
            self.requests - before.requests,
            {phase: ns - before.phase_ns[phase] for phase, ns in self.phase_ns.items()},
        )

    def mean_ms(self, phase: str) -> float:
        """Return milliseconds per request spent in a phase; 0 when there was no request."""
        return self.phase_ns[phase] / self.requests / 1e6 if self.requests else 0.0

    @property
    def total_ms(self) -> float:
        """Milliseconds per request, all phases."""
        return sum(self.mean_ms(phase) for phase in PHASES)


def server_times(response: pb.ModelStatisticsResponse) -> ServerTimes:
    """Add up the statistics of the model's versions. Raises RefusedError if the server keeps none."""
    if not response.model_stats:
        raise RefusedError("the server keeps no statistics of this model")
    stats = [model.inference_stats for model in response.model_stats]
    return ServerTimes(
        sum(stat.success.count for stat in stats),
        {phase: sum(getattr(stat, phase).ns for stat in stats) for phase in PHASES},
    )
