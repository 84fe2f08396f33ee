"""All values of the command line of `gangway serve`, by group."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gangway.server.log_settings import LogSettings
from gangway.server.options.compatibility import CompatibilityOptions
from gangway.server.options.general import GeneralOptions
from gangway.server.options.grpc import GrpcOptions
from gangway.server.options.http import HttpOptions
from gangway.server.options.metrics import MetricsOptions
from gangway.server.options.models import ModelOptions
from gangway.server.options.repository import RepositoryOptions
from gangway.server.tracing.settings import TraceConfig

_VISIBLE = "every user of this machine can read the key in the list of processes; @FILE has it read from a file"


@dataclass(frozen=True)
class ServeOptions:
    """What the command line said. Every value has a default, so that a test names only what it is about."""

    general: GeneralOptions = field(default_factory=GeneralOptions)
    repository: RepositoryOptions = field(default_factory=RepositoryOptions)
    models: ModelOptions = field(default_factory=ModelOptions)
    grpc: GrpcOptions = field(default_factory=GrpcOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    traces: TraceConfig = field(default_factory=TraceConfig)
    logs: LogSettings = field(default_factory=LogSettings)
    compatibility: CompatibilityOptions = field(default_factory=CompatibilityOptions)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the log shall say once: flags that have no effect, what is left open, secrets that others can read."""
        given = (*self.compatibility.warnings, *self.models.warnings, *self.grpc.warnings)
        return (*given, *self._open_elsewhere(), *self._visible())

    def _open_elsewhere(self) -> Iterator[str]:
        """Yield a sentence for each protocol that leaves open what the other one restricts."""
        kinds = (
            (self.grpc.allowed, self.grpc.restrictions, "gRPC", "--grpc-restricted-protocol"),
            (self.http.allowed, self.http.restrictions, "HTTP", "--http-restricted-api"),
        )
        for (_, restricted, _, flag), (served, others, protocol, other) in (kinds, kinds[::-1]):
            if served and (left := restricted.categories - others.categories):
                names = ", ".join(sorted(left))
                yield f"{flag} restricts {names}, which {protocol} leaves open to everyone: {other} restricts it"

    def _visible(self) -> Iterator[str]:
        """Yield a sentence for each flag whose value on the command line is a secret."""
        given = {"--grpc-restricted-protocol": self.grpc.restrictions, "--http-restricted-api": self.http.restrictions}
        for flag, restrictions in given.items():
            if restrictions.is_visible:
                yield f"{flag}: {_VISIBLE}"
