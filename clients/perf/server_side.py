"""What the server says of a run: the difference of two ModelStatistics answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gangway.clients.connection import Connection
from gangway.clients.errors import RefusedError

OWN_PREFIX = "gangway_"


@dataclass(frozen=True)
class ServerSide:
    """Of one model: requests answered, nanoseconds in queue and compute altogether, counts that only Gangway has."""

    requests: int
    queue_ns: int
    compute_ns: int
    own: Mapping[str, int]

    def since(self, before: "ServerSide") -> "ServerSide":
        """Return what happened after `before`."""
        return ServerSide(
            self.requests - before.requests,
            self.queue_ns - before.queue_ns,
            self.compute_ns - before.compute_ns,
            {name: count - before.own.get(name, 0) for name, count in self.own.items()},
        )

    @property
    def mean_queue_us(self) -> float:
        """Microseconds that a request waited."""
        return self.queue_ns / self.requests / 1000 if self.requests else 0.0

    @property
    def mean_compute_us(self) -> float:
        """Microseconds from a request's first layer to its last, pauses included."""
        return self.compute_ns / self.requests / 1000 if self.requests else 0.0


def server_side(connection: Connection, names: Sequence[str]) -> dict[str, ServerSide]:
    """Return the counters of each model since it was loaded; of none if the server keeps no statistics."""
    try:
        answers = {name: connection.model_statistics(name) for name in names}
    except RefusedError:
        return {}
    found = {}
    for name, answer in answers.items():
        stats = [model.inference_stats for model in answer.model_stats]
        own = {
            key.removeprefix(OWN_PREFIX): value.success.count
            for model in answer.model_stats
            for key, value in model.response_stats.items()
            if key.startswith(OWN_PREFIX)
        }
        found[name] = ServerSide(
            sum(stat.success.count for stat in stats),
            sum(stat.queue.ns for stat in stats),
            sum(stat.compute_infer.ns for stat in stats),
            own,
        )
    return found
